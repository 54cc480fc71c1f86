# SPDX-License-Identifier: Apache-2.0
"""Loops as people write them: each is exact, or refused by name at its first batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from resiliency.data import (
    GlobalBatch,
    InterruptableDistributedGroupedBatchSampler,
    InterruptableDistributedSampler,
    ResumableIterable,
    advancing,
    advancing_steps,
)
from resiliency.errors import ConfigError
from tests.data.loaders import SIZE, Numbers, an_optimizer, listener_count, loader_of

Loader = DataLoader[Any]


def plain(global_batch: GlobalBatch | None = None, **options: Any) -> InterruptableDistributedSampler:
    return InterruptableDistributedSampler(Numbers(), 1, 0, global_batch=global_batch, **options)


def grouped() -> InterruptableDistributedGroupedBatchSampler:
    return InterruptableDistributedGroupedBatchSampler(Numbers(), [n % 3 for n in range(SIZE)], 4, 1, 0)


def weighted(loader: Loader, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for step in advancing_steps(loader, optimizer):
        for batch, _ in step:
            yield batch


SAMPLERS: dict[str, tuple[Callable[[], Any], Callable[[Any], Loader], Any]] = {
    "samples": (plain, loader_of, advancing),
    "workers": (plain, lambda sampler: loader_of(sampler, num_workers=1), advancing),
    "drop_last": (plain, lambda sampler: loader_of(sampler, drop_last=True), advancing),
    "batches of torch": (
        plain,
        lambda sampler: DataLoader(Numbers(), batch_sampler=BatchSampler(sampler, 4, False)),
        advancing,
    ),
    "groups": (grouped, lambda sampler: DataLoader(Numbers(), batch_sampler=sampler), advancing),
    "global batch": (
        lambda: plain(GlobalBatch(4)),
        lambda sampler: DataLoader(Numbers(), batch_sampler=sampler.micro_batches()),
        weighted,
    ),
}


@pytest.mark.parametrize("kind", SAMPLERS)
def test_len_of_the_loader_does_not_move_while_a_loop_runs_also_after_a_restart(kind: str) -> None:
    make, load, loop = SAMPLERS[kind]
    sampler, optimizer = make(), an_optimizer()
    loader = load(sampler)
    whole = len(loader)
    state, saved_at = {}, 0
    for started in (0, 2):
        trained = pending = started
        for number, _ in enumerate(loop(loader, optimizer), 1):
            assert len(loader) == whole - started
            pending += 1
            if number % 2 == 0 or number == len(loader):  # accumulates the gradients of two batches
                optimizer.step()
                trained = pending
                if trained == 2:
                    state, saved_at = sampler.state_dict(), trained
        assert (trained, saved_at) == (whole, 2)
        assert len(loader) == whole - started  # what sums over the loop are divided by
        sampler.load_state_dict(state)
        assert len(loader) == whole - 2
    sampler.finish_epoch()
    sampler.set_epoch(1)
    assert len(loader) == whole


def test_len_of_a_loop_without_advancing_moves_with_its_next_iteration_only() -> None:
    sampler = plain()
    loader = loader_of(sampler)
    for batch in islice(loader, 2):
        sampler.advance(len(batch))
        assert len(loader) == 6
    assert (len(loader), sampler.left) == (6, SIZE - 8)
    next(iter(loader))
    assert len(loader) == 4


@pytest.mark.parametrize("kind", ["samples", "workers", "drop_last", "global batch"])
def test_batches_at_an_epochs_end_count_with_the_step_that_comes_in_the_next_one(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    make, load, loop = SAMPLERS[kind]
    sampler, optimizer = make(), an_optimizer()
    states, in_model, gradients, number = [], list[int](), list[int](), 0
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch in loop(load(sampler), optimizer):
            gradients += batch.tolist()
            number += 1
            if number % 4 == 0:  # counts on over the ends of epochs
                optimizer.step()
                in_model += gradients
                gradients = []
            states.append((sampler.state_dict()["epoch"], sampler.state_dict()["position"]))
        if epoch == 0:
            between, before = sampler.state_dict(), list(in_model)
    if kind == "drop_last":
        size, expected = 20, [(0, 0)] * 3 + [(0, 16)] * 4 + [(1, 12)] * 3
    else:
        size, expected = SIZE, [(0, 0)] * 3 + [(0, 16)] * 4 + [(1, 8)] * 4 + [(1, SIZE)]
    assert states == expected
    assert f"epoch 0 ended, and no optimizer step came after the last {size - 16} of this rank" in caplog.text
    # A restart from the state between the epochs takes what is in no model.
    resumed = make()
    resumed.load_state_dict(between)
    rest = [index for batch in loop(load(resumed), optimizer) for index in batch.tolist()]
    assert len({*before, *rest}) == len(before) + len(rest) == size


def test_what_waits_counts_with_a_step_after_the_loop_and_before_the_next_one() -> None:
    sampler, optimizer = plain(), an_optimizer()
    loader = loader_of(sampler, drop_last=True)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for _ in advancing(loader, optimizer):
            pass
        assert sampler.state_dict()["position"] == 0
        if epoch == 0:
            optimizer.step()  # of the rest, as many loops have it
            assert sampler.state_dict() == plain().state_dict() | {"position": SIZE}
            assert listener_count(optimizer) == 0
        if epoch == 1:
            sampler.set_epoch(2)
            assert (sampler.state_dict()["epoch"], sampler.epoch, len(loader)) == (1, 2, 5)
            optimizer.step()
            assert (sampler.state_dict()["epoch"], sampler.state_dict()["position"]) == (2, 0)


def test_what_waits_is_not_handed_out_again_before_an_epoch_is_set() -> None:
    sampler, optimizer = plain(), an_optimizer()
    for _ in advancing(loader_of(sampler), optimizer):
        pass
    for loop in (advancing(loader_of(sampler), optimizer), iter(loader_of(sampler))):
        with pytest.raises(ConfigError, match=r"epoch 0 is finished\.  Call set_epoch\(1\)"):
            next(loop)
    sampler.reset_progress()
    assert next(advancing(loader_of(sampler), optimizer)).tolist() == list(plain())[:4]


def test_what_waits_can_be_counted_or_left_out_by_hand() -> None:
    for by_hand, after in ((lambda s: s.advance(SIZE), (0, SIZE)), (lambda s: s.finish_epoch(), (0, SIZE))):
        sampler, optimizer = plain(), an_optimizer()
        for _ in advancing(loader_of(sampler), optimizer):
            pass
        by_hand(sampler)
        state = sampler.state_dict()
        assert (state["epoch"], state["position"]) == after
        optimizer.step()
        assert sampler.state_dict() == state


def test_an_epoch_that_waits_can_be_followed_by_one_that_is_left_early() -> None:
    sampler, optimizer = plain(), an_optimizer()
    for _ in advancing(loader_of(sampler), optimizer):
        pass
    sampler.set_epoch(1)
    for batch in advancing(loader_of(sampler), optimizer):
        first = batch.tolist()
        break
    with pytest.raises(ConfigError, match="4 samples of this rank were handed out in epoch 1"):
        sampler.set_epoch(2)  # the rest of epoch 1 would be left out
    sampler.advance(0)  # it was not trained on; what waits goes on waiting
    sampler.set_epoch(1)
    batches = advancing(loader_of(sampler), optimizer)
    assert next(batches).tolist() == first
    assert (sampler.state_dict()["epoch"], sampler.state_dict()["position"]) == (0, 0)
    optimizer.step()
    assert (sampler.state_dict()["epoch"], sampler.state_dict()["position"]) == (1, 4)


def test_a_state_of_a_loop_that_nothing_counts_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    sampler = plain()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for _ in loader_of(sampler):  # advancing was forgotten
            assert sampler.state_dict()["position"] == 0
    told = [message.partition(",")[0] for message in caplog.messages]
    assert told == [f"the sampler is at position 0 of epoch {epoch}" for epoch in range(2)]
    caplog.clear()
    for epoch in (2, 3):  # not saved at all
        sampler.set_epoch(epoch)
        for _ in loader_of(sampler):
            pass
    sampler.set_epoch(1)
    assert [message.partition(",")[0] for message in caplog.messages] == [
        f"the sampler is at position 0 of epoch {epoch}" for epoch in (2, 3)
    ]
    caplog.clear()
    sampler.reset_progress()
    for batch in loader_of(sampler):
        sampler.advance(len(batch))
        sampler.state_dict()
    sampler.set_epoch(2)
    for _ in advancing(loader_of(sampler), an_optimizer()):
        sampler.state_dict()
    assert [message for message in caplog.messages if "nothing counts" in message] == []


def test_a_loader_that_ends_before_its_sampler_does_not_finish_the_epoch() -> None:
    class Short(DataLoader[Any]):
        def __iter__(self) -> Any:
            return islice(super().__iter__(), 3)

    sampler, optimizer = plain(), an_optimizer()
    for _ in advancing(Short(Numbers(), batch_size=4, sampler=sampler), optimizer):
        optimizer.step()
    assert sampler.state_dict()["position"] == 12
    with pytest.raises(ConfigError, match="10 positions would be left out"):
        sampler.set_epoch(1)


def test_a_loop_whose_sampler_was_moved_is_refused_at_its_next_batch() -> None:
    sampler, optimizer = plain(), an_optimizer()
    state = sampler.state_dict()
    moves: list[Callable[[], object]] = [
        lambda: sampler.load_state_dict(state),  # a rollback to before a loss that is nan
        sampler.finish_epoch,
        sampler.reset_progress,
        lambda: next(advancing(loader_of(sampler), optimizer)),  # a second loop over the same sampler
    ]
    for move in moves:
        sampler.reset_progress()
        batches = advancing(loader_of(sampler), optimizer)
        next(batches)
        optimizer.step()
        move()
        with pytest.raises(ConfigError, match="the position of the sampler was set while this loop"):
            next(batches)


def test_advance_inside_a_loop_that_counts_is_refused() -> None:
    sampler = plain()
    for optimizer in (an_optimizer(), None):
        for _ in advancing(loader_of(sampler), optimizer):
            with pytest.raises(ConfigError, match="inside a loop that counts by itself"):
                sampler.advance(4)
            break
        sampler.advance(0)
    assert sampler.progress.position == 0


def test_a_zip_of_two_loaders_counts_both_and_leaves_what_the_longer_one_has() -> None:
    short, long, optimizer = InterruptableDistributedSampler(range(12), 1, 0), plain(), an_optimizer()
    loaders = DataLoader(range(12), batch_size=4, sampler=short), loader_of(long)  # type: ignore[arg-type]
    for _ in zip(*(advancing(loader, optimizer) for loader in loaders), strict=False):
        optimizer.step()
    assert (short.state_dict()["position"], long.state_dict()["position"]) == (12, 12)
    short.set_epoch(1)
    with pytest.raises(ConfigError, match="10 positions would be left out"):
        long.set_epoch(1)
    assert listener_count(optimizer) == 0


def test_validation_between_and_a_loader_that_is_made_for_each_part_change_nothing() -> None:
    sampler, other, optimizer = plain(), plain(seed=1), an_optimizer()
    seen = list[int]()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        while sampler.left:
            for batch in islice(advancing(loader_of(sampler), optimizer), 2):
                seen += batch.tolist()
                optimizer.step()
            for _ in advancing(loader_of(other)):  # without an optimizer
                pass
            other.reset_progress()
    assert Counter(seen) == Counter([*range(SIZE)] * 2)


def test_a_loop_that_is_left_goes_on_with_the_persistent_workers_of_its_loader() -> None:
    sampler, optimizer = plain(), an_optimizer()
    loader = loader_of(sampler, num_workers=2, prefetch_factor=2, persistent_workers=True)
    seen = list[int]()
    for parts in (1, 3, 2):
        for number, batch in enumerate(advancing(loader, optimizer)):
            if number == parts:
                break  # with a batch in hand that was not trained on
            seen += batch.tolist()
            optimizer.step()
        sampler.advance(0)
    assert Counter(seen) == Counter(range(SIZE))
    assert sampler.progress.finished


@pytest.mark.parametrize("then", ["advancing", "plain", "set_epoch"])
def test_what_a_loop_that_was_left_had_in_no_step_is_refused_until_it_is_said(then: str) -> None:
    sampler, optimizer = plain(), an_optimizer()
    for number, _ in enumerate(advancing(loader_of(sampler), optimizer), 1):
        if number == 2:
            break  # with the gradients of two batches
    ways: dict[str, Callable[[], object]] = {
        "advancing": lambda: next(advancing(loader_of(sampler), optimizer)),
        "plain": lambda: next(iter(loader_of(sampler))),
        "set_epoch": lambda: sampler.set_epoch(1),
    }
    with pytest.raises(ConfigError, match=r"8 samples .* no optimizer step came after.*sampler.advance\(0\)"):
        ways[then]()
    optimizer.step()
    with pytest.raises(ConfigError, match="cannot tell whether the batch in hand"):
        ways[then]()
    sampler.advance(8)
    assert next(advancing(loader_of(sampler), optimizer)).tolist() == list(plain())[8:12]


def test_a_step_after_each_slice_of_batches_is_refused_at_the_second_slice() -> None:
    sampler, optimizer = plain(), an_optimizer()
    for _ in islice(advancing(loader_of(sampler), optimizer), 2):
        pass
    optimizer.step()
    with pytest.raises(ConfigError, match="cannot tell whether the batch in hand"):
        next(islice(advancing(loader_of(sampler), optimizer), 2))


@pytest.mark.parametrize("order", ["two samplers", "a hook of the program", "an iterable that waits"])
def test_a_loop_that_lets_go_within_a_step_disturbs_no_other_hook(order: str) -> None:
    optimizer, other = an_optimizer(), plain()
    called = list[str]()
    if order == "an iterable that waits":
        waiting: Any = ResumableIterable(StreamWithState())
        loader = DataLoader(waiting, batch_size=4)
    else:
        waiting = plain()
        loader = loader_of(waiting)
    for _ in advancing(loader, optimizer):
        pass  # all of it waits for a step
    if order == "two samplers":
        for _ in advancing(loader_of(other), optimizer):
            optimizer.step()
        assert other.progress.finished
    else:
        optimizer.register_step_post_hook(lambda *_: called.append("after"))
        optimizer.step()
        assert called == ["after"]
    assert listener_count(optimizer) == 0
    assert order == "an iterable that waits" or waiting.progress.finished


def carried(loops: Callable[[Any, Any], Iterator[Any]], *, flush: bool) -> list[int]:
    """Positions of two samplers after each of two epochs of six batches, with a step after every four."""
    samplers, optimizer = (plain(), plain(seed=1)), an_optimizer()
    positions, number = [], 0
    for epoch in range(2):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        for _ in loops(samplers, optimizer):
            number += 1
            if number % 4 == 0:
                optimizer.step()
        if flush:
            optimizer.step()
        positions += [sampler.state_dict()["position"] for sampler in samplers]
    return positions


def zipped(samplers: Any, optimizer: Any) -> Iterator[Any]:
    return zip(*(advancing(loader_of(sampler), optimizer) for sampler in samplers), strict=False)


def counted(samplers: Any, optimizer: Any) -> Iterator[Any]:
    loaders = [advancing(loader_of(sampler), optimizer) for sampler in samplers]
    return zip(range(6), *loaders, strict=False)


def by_next(samplers: Any, optimizer: Any) -> Iterator[Any]:
    # As variables of a script, they are closed when those of the next epoch take their place.
    samplers[0].kept = [advancing(loader_of(sampler), optimizer) for sampler in samplers]
    for _ in range(6):
        yield [next(loader) for loader in samplers[0].kept]


@pytest.mark.parametrize("loops", [zipped, counted, by_next])
def test_a_loop_that_never_asks_for_the_end_finishes_the_epoch(loops: Any) -> None:
    assert carried(loops, flush=True) == [SIZE] * 4
    assert carried(loops, flush=False) == [16, 16, SIZE, SIZE]  # 12 batches are three steps


def test_a_zip_of_samplers_without_an_optimizer_is_refused_at_the_next_epoch() -> None:
    first, second = plain(), plain(seed=1)
    for _ in zip(advancing(loader_of(first)), advancing(loader_of(second)), strict=False):
        pass
    first.set_epoch(1)
    with pytest.raises(ConfigError, match="cannot tell whether the batch in hand"):
        second.set_epoch(1)
    second.advance(2)
    second.set_epoch(1)


def test_of_two_optimizers_the_one_that_was_passed_counts() -> None:
    sampler, critic, generator = plain(), an_optimizer(), an_optimizer()
    positions = []
    for _ in advancing(loader_of(sampler), generator):
        critic.step()
        positions.append(sampler.state_dict()["position"])
        generator.step()
    assert positions == [0, 4, 8, 12, 16, 20]


def test_what_is_no_optimizer_of_torch_is_refused_with_what_to_do() -> None:
    for wrong in (
        [an_optimizer()],
        torch.nn.Linear(1, 1),
        torch.optim.lr_scheduler.StepLR(an_optimizer(), 1).step,
    ):
        with pytest.raises(ConfigError, match=r"does not tell when it makes a step\..*sampler.advance"):
            next(advancing(loader_of(plain()), wrong))  # type: ignore[arg-type]


class Twice(DataLoader[Any]):
    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield batch
            yield batch


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_loader_that_gives_more_than_its_sampler_has_is_refused(drop_last: bool) -> None:
    sampler, optimizer = plain(), an_optimizer()
    loader = Twice(Numbers(), batch_size=4, sampler=sampler, drop_last=drop_last)
    batches = advancing(loader, optimizer)
    for _ in range(5 if drop_last else 6):
        next(batches)
        optimizer.step()
    with pytest.raises(ConfigError, match="gave another batch after the last one of its sampler"):
        next(batches)


def test_a_loader_that_ends_with_less_than_a_batch_left_does_not_finish_the_epoch() -> None:
    class Short(DataLoader[Any]):
        def __iter__(self) -> Any:
            return islice(super().__iter__(), 5)

    sampler, optimizer = plain(), an_optimizer()
    for _ in advancing(Short(Numbers(), batch_size=4, sampler=sampler), optimizer):
        optimizer.step()
    assert sampler.state_dict()["position"] == 20
    with pytest.raises(ConfigError, match="2 positions would be left out"):
        sampler.set_epoch(1)


class StreamWithState(IterableDataset[int]):
    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < SIZE:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(SIZE))


def test_loaders_without_positions_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="reads a Stream, an IterableDataset"):
        next(advancing(DataLoader(Stream(), batch_size=4)))
    with pytest.raises(ConfigError, match="a list is no DataLoader"):
        next(advancing([torch.zeros(4)]))  # type: ignore[arg-type]


#: The part of torchdata's StatefulDataLoader that matters: its iterator saves the state of the sampler beside
#: a number of its own, and a sampler that has a state is not advanced by that number.
TORCHDATA = """
from torch.utils.data import BatchSampler, DataLoader

class StatefulDataLoader(DataLoader):
    def __iter__(self):
        self.indexes = BatchIterator(self.batch_sampler)
        return self
    def __next__(self):
        return self.collate_fn([self.dataset[index] for index in next(self.indexes)])

class BatchIterator:
    def __init__(self, batches):
        self.batches, self.samples = batches, iter(batches.sampler)
    def __next__(self):
        return [next(self.samples) for _ in range(self.batches.batch_size)]
"""


def test_a_loader_of_torchdata_which_has_a_position_of_its_own_is_refused_in_every_loop() -> None:
    module: dict[str, Any] = {"__name__": "torchdata.stateful_dataloader.stateful_dataloader"}
    exec(TORCHDATA, module)  # noqa: S102  # the frames of the loop are to be those of torchdata
    loader = module["StatefulDataLoader"](Numbers(), batch_size=4, sampler=plain())
    with pytest.raises(ConfigError, match="a StatefulDataLoader of torchdata keeps a position of its own"):
        next(advancing(loader))
    with pytest.raises(ConfigError, match="loader of torchdata keeps a position of its own"):
        next(iter(loader))


def dropout_after(
    state: dict[str, Any] | None, batches: int, **options: Any
) -> tuple[list[int], dict[str, Any]]:
    """Numbers that are drawn as by dropout in each batch of two epochs, and a state after `batches`."""
    optimizer = an_optimizer()
    sampler: Any = ResumableIterable(StreamWithState()) if options.pop("is_iterable", False) else plain()
    is_iterable = isinstance(sampler, ResumableIterable)
    loader = DataLoader(sampler, 4, **options) if is_iterable else loader_of(sampler, **options)
    torch.manual_seed(7)
    if state is not None:
        sampler.load_state_dict(state["sampler"])
        torch.set_rng_state(state["random"])
    drawn, saved = list[int](), dict[str, Any]()
    for epoch in range(sampler.epoch, 2):
        sampler.set_epoch(epoch)
        for _ in advancing(loader, optimizer):
            drawn.append(int(torch.randint(1 << 30, ())))
            optimizer.step()
            if len(drawn) == batches:
                saved = {"sampler": sampler.state_dict(), "random": torch.get_rng_state()}
    return drawn, saved


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_workers": 1},
        {"num_workers": 1, "persistent_workers": True},
        {"num_workers": 1, "persistent_workers": True, "is_iterable": True},
        {"generator": torch.Generator()},
    ],
    ids=["plain", "a worker", "a persistent worker", "a stream", "its own generator"],
)
def test_a_resumed_loop_draws_the_random_numbers_of_an_undisturbed_one(options: dict[str, Any]) -> None:
    for batches in (2, 6, 8) if not options else (2, 6):
        whole, saved = dropout_after(None, batches, **options)
        assert dropout_after(saved, 0, **options)[0] == whole[batches:], batches


def test_resumed_steps_draw_the_random_numbers_of_undisturbed_ones() -> None:
    def drawn(state: dict[str, Any] | None) -> tuple[list[int], dict[str, Any]]:
        sampler, optimizer = plain(GlobalBatch(8, 3)), an_optimizer()
        torch.manual_seed(7)
        if state is not None:
            sampler.load_state_dict(state["sampler"])
            torch.set_rng_state(state["random"])
        numbers, saved = list[int](), dict[str, Any]()
        loader: Loader = DataLoader(Numbers(), batch_sampler=sampler.micro_batches())
        for step in advancing_steps(loader, optimizer):
            numbers.append(int(torch.randint(1 << 30, ())))  # before the first micro-batch is loaded
            for _ in step:
                numbers.append(int(torch.randint(1 << 30, ())))
            optimizer.step()
            saved = saved or {"sampler": sampler.state_dict(), "random": torch.get_rng_state()}
        return numbers, saved

    whole, saved = drawn(None)
    assert drawn(saved)[0] == whole[4:]
