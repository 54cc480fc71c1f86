# SPDX-License-Identifier: Apache-2.0
"""The distributed sampler: torch's order, exact resumption on any world, and refusal of what is not its
own."""

from __future__ import annotations

import io
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader, DistributedSampler

from resiliency import data
from resiliency.data import (
    EpochOrder,
    GlobalBatch,
    InterruptableDistributedSampler,
    InterruptableSampler,
)
from resiliency.errors import ConfigError

SIZES = st.integers(1, 60)
WORLDS = st.integers(1, 7)


def ranks_of(size: int, world: int, **options: object) -> list[InterruptableDistributedSampler]:
    return [
        InterruptableDistributedSampler(range(size), world, rank, **options)  # type: ignore[arg-type]
        for rank in range(world)
    ]


def advance_all(ranks: list[InterruptableDistributedSampler], count: int) -> None:
    for sampler in ranks:
        sampler.advance(count)


def test_a_sampler_keeps_the_order_in_one_tensor_and_in_no_list_c12() -> None:
    sampler = InterruptableDistributedSampler(range(10_000), 2, 0)
    iterator = iter(sampler)
    next(iterator)
    frame = iterator.gi_frame  # type: ignore[attr-defined]
    kept = [*vars(sampler).values(), *vars(sampler._order).values(), *frame.f_locals.values()]
    (order,) = [value for value in kept if isinstance(value, torch.Tensor)]
    assert (order.dtype, order.shape) == (torch.int64, (10_000,))
    assert [value for value in kept if isinstance(value, list | tuple | dict | set) and len(value) > 16] == []


@given(
    size=SIZES,
    world=WORLDS,
    seed=st.integers(0, 2**33),
    epoch=st.integers(0, 5),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
)
def test_order_and_padding_are_those_of_torchs_sampler_in_every_epoch(
    size: int, world: int, seed: int, epoch: int, shuffle: bool, drop_last: bool
) -> None:
    dealt: list[int] = []
    for sampler in ranks_of(size, world, seed=seed, shuffle=shuffle, drop_last=drop_last):
        theirs = DistributedSampler(
            range(size),  # type: ignore[arg-type]
            world,
            sampler.rank,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
        )
        theirs.set_epoch(epoch)
        sampler.set_epoch(epoch)
        mine = list(sampler)
        assert mine == list(theirs)
        assert len(sampler) == sampler.full_length == len(theirs) == len(mine)
        dealt += mine
    if not drop_last:
        assert len(dealt) == size + sampler.padding


def test_epochs_differ_c1() -> None:
    sampler = InterruptableDistributedSampler(range(100), 1, 0)
    orders = set()
    for epoch in range(3):
        sampler.set_epoch(epoch)
        orders.add(tuple(sampler))
    assert len(orders) == 3


@dataclass
class NaiveWorld:
    """The model: which samples were consumed, as a list, and the order of the epoch as torch's sampler has
    it."""

    order: list[int]
    consumed: list[int]

    def step(self, world: int, samples: int) -> list[int]:
        """Each of `world` ranks takes `samples` in torch's stride; what is beyond the end starts over."""
        start = len(self.consumed)
        wanted = [(start + number) for number in range(world * samples)]
        taken = [self.order[position % len(self.order)] for position in wanted]
        self.consumed += [self.order[position] for position in wanted if position < len(self.order)]
        return taken


LIVES = st.lists(
    st.tuples(WORLDS, st.lists(st.integers(1, 3), max_size=5), st.booleans(), st.integers(1, 3)),
    min_size=1,
    max_size=6,
)


@settings(max_examples=80)
@given(
    size=SIZES,
    lives=LIVES,
    kind=st.sampled_from(["torch", "computed"]),
    epoch=st.integers(0, 3),
    drop_last=st.booleans(),
)
def test_any_history_of_resizes_and_kills_consumes_each_sample_exactly_once(
    size: int, lives: list[tuple[int, list[int], bool, int]], kind: str, epoch: int, drop_last: bool
) -> None:
    """Each life has a world, batch sizes and a number of batches whose gradients make one step; it dies after
    its last batch, before or after that is saved, or in the middle of the gradients of a step."""
    first = InterruptableDistributedSampler(range(size), 1, 0, kind=kind)
    first.set_epoch(epoch)
    model = NaiveWorld(order=list(first), consumed=[])
    state, saved = first.state_dict(), list[int]()
    dropped = 0
    for world, batches, saved_last, accumulated in [*lives, (2, [1] * size, True, 1)]:
        ranks = ranks_of(size, world, kind=kind, drop_last=drop_last)
        for sampler in ranks:
            sampler.load_state_dict(state)
        iterators = [iter(sampler) for sampler in ranks]
        in_gradients = 0
        for number, batch in enumerate(batches):
            left = ranks[0].left - in_gradients
            if not left:
                break
            batch = min(batch, left)
            got = [[next(iterator) for _ in range(batch)] for iterator in iterators]
            wanted = model.step(world, batch)
            assert [sample for samples in zip(*got, strict=True) for sample in samples] == wanted
            assert ranks[0].padding < world
            in_gradients += batch
            if (number + 1) % accumulated and batch < left:
                continue
            advance_all(ranks, in_gradients)
            in_gradients = 0
            states = [sampler.state_dict() for sampler in ranks]
            assert all(found == states[0] for found in states)
            if saved_last or number < len(batches) - 1:
                state, saved = states[0], list(model.consumed)
                dropped = state["position"] - len(saved)  # type: ignore[operator]
                assert dropped == 0 or (drop_last and dropped < world and state["position"] == size)
        model.consumed = list(saved)
    # What two ranks cannot share is dealt to none, and no life has anything left to do.
    undealt = size - len(saved) - dropped
    assert undealt <= drop_last
    assert Counter(saved) == Counter(model.order[: size - dropped - undealt])


ROW_LIVES = st.lists(st.tuples(WORLDS, st.integers(0, 4), st.integers(1, 5)), min_size=1, max_size=6)


@settings(max_examples=60)
@given(size=SIZES, batch=st.integers(1, 20), lives=ROW_LIVES, drop_last=st.booleans())
def test_with_a_global_batch_every_step_is_made_of_the_same_samples_on_any_world(
    size: int, batch: int, lives: list[tuple[int, int, int]], drop_last: bool
) -> None:
    order = list(InterruptableDistributedSampler(range(size), 1, 0))
    rows = [order[start : start + batch] for start in range(0, size, batch)]
    if drop_last and rows and len(rows[-1]) < batch:
        rows.pop()
    state = InterruptableDistributedSampler(range(size), 1, 0).state_dict()
    done = 0
    for world, steps, micro in [*lives, (3, size, 2)]:
        ranks = ranks_of(size, world, global_batch=GlobalBatch(batch, micro), drop_last=drop_last)
        for sampler in ranks:
            sampler.load_state_dict(state)
        loaders = [iter(sampler.micro_batches()) for sampler in ranks]
        left = {len(sampler.micro_batches()) for sampler in ranks}
        assert len(left) == 1
        for row in rows[done : done + steps]:
            real: list[int] = []
            weight = 0.0
            for sampler, loader in zip(ranks, loaders, strict=True):
                plan = GlobalBatch(batch, micro).micro_batches(sampler.rank, world, len(row))
                for part in plan:
                    indexes = next(loader)
                    assert len(indexes) == part.samples <= micro
                    real += indexes if part.weight else []
                    weight += part.weight
                    half = part.samples // 2
                    sampler.advance(half)  # a state in the middle of a row is that before the row
                    assert sampler.state_dict()["position"] == done * batch or not part.weight
                    sampler.advance(part.samples - half)
            assert real == row
            assert weight == pytest.approx(world)
            done += 1
            positions = {sampler.state_dict()["position"] for sampler in ranks}
            assert len(positions) == 1
        state = ranks[0].state_dict()
    assert done == len(rows)
    if rows:
        assert state["position"] == size


def test_len_is_what_is_left_and_a_resumed_sampler_gives_just_that_c9() -> None:
    sampler = InterruptableDistributedSampler(range(20), 2, 1)
    everything = list(sampler)
    sampler.advance(4)
    resumed = InterruptableDistributedSampler(range(20), 2, 1)
    resumed.load_state_dict(sampler.state_dict())
    assert list(resumed) == everything[4:]
    assert len(resumed) == resumed.left == sampler.left == 6
    assert len(sampler) == 10  # what the iteration gave
    assert resumed.full_length == 10


@given(size=SIZES, world=WORLDS, done=st.integers(0, 60), drop_last=st.booleans())
def test_padding_and_what_is_dropped_are_counted_from_what_is_left(
    size: int, world: int, done: int, drop_last: bool
) -> None:
    first = InterruptableDistributedSampler(range(size), 1, 0)
    order = list(first)
    first.advance(min(done, size))
    left = order[min(done, size) :]
    ranks = ranks_of(size, world, drop_last=drop_last)
    for sampler in ranks:
        sampler.load_state_dict(first.state_dict())
    dealt = [index for share in zip(*[list(sampler) for sampler in ranks], strict=True) for index in share]
    assert len(dealt) == (len(left) // world * world if drop_last else len(left) + ranks[0].padding)
    assert dealt[: len(left)] == left[: len(dealt)]
    assert dealt[len(left) :] == (order * world)[: max(0, len(dealt) - len(left))]
    assert ranks[0].padding < world


def test_an_epoch_shorter_than_its_global_batch_is_not_finished_before_it_begins() -> None:
    sampler = InterruptableDistributedSampler(range(3), 1, 0, drop_last=True, global_batch=4)
    sampler.advance(0)
    assert sampler.state_dict()["position"] == 0


def test_a_name_of_the_data_is_compared_where_both_sides_have_one() -> None:
    named = InterruptableDistributedSampler(range(20), 1, 0, dataset_id="v2")
    plain = InterruptableDistributedSampler(range(20), 1, 0)
    plain.load_state_dict(named.state_dict())
    named.load_state_dict(plain.state_dict() | {"dataset": ""})
    assert (plain.state_dict()["dataset"], named.state_dict()["dataset"]) == ("", "v2")


def test_the_state_is_plain_values_that_torch_loads_by_default() -> None:
    sampler = InterruptableDistributedSampler(range(20), 2, 1, seed=5, dataset_id="v2")
    sampler.advance(3)
    file = io.BytesIO()
    torch.save(sampler.state_dict(), file)
    file.seek(0)
    assert torch.load(file) == {
        "version": 1,
        "size": 20,
        "seed": 5,
        "shuffle": True,
        "kind": "torch",
        "dataset": "v2",
        "plan": "",
        "share": "",
        "epoch": 0,
        "position": 6,
    }


@pytest.mark.parametrize(
    ("options", "size", "text"),
    [
        ({"seed": 1}, 20, "seed 0 in the state and 1 here"),
        ({}, 21, "size of the data set 20 in the state and 21 here"),
        ({"shuffle": False}, 20, "shuffle True in the state and False here"),
        ({"kind": "computed"}, 20, "kind of order 'torch' in the state and 'computed' here"),
        ({"dataset_id": "v3"}, 20, "data set 'v2' in the state and 'v3' here"),
    ],
)
def test_a_state_of_another_order_is_refused_with_both_values_c6(
    options: dict[str, object], size: int, text: str
) -> None:
    state = InterruptableDistributedSampler(range(20), 1, 0, dataset_id="v2").state_dict()
    other = InterruptableDistributedSampler(range(size), 1, 0, **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=text):
        other.load_state_dict(state)
    assert other.state_dict()["position"] == 0


def test_a_state_of_a_later_release_and_one_that_is_none_are_refused() -> None:
    sampler = InterruptableDistributedSampler(range(20), 1, 0)
    with pytest.raises(ConfigError, match="has version 9, and this release reads version 1"):
        sampler.load_state_dict(sampler.state_dict() | {"version": 9})
    with pytest.raises(ConfigError, match="no state of a sampler"):
        sampler.load_state_dict({"step": 3})
    broken = sampler.state_dict() | {"position": 21}
    with pytest.raises(ConfigError, match="position 21 is beyond the end of an epoch of 20"):
        sampler.load_state_dict(broken)
    del broken["position"]
    with pytest.raises(ConfigError, match="no 'position'"):
        sampler.load_state_dict(broken)


def test_another_epoch_in_the_middle_of_one_is_refused_with_both_numbers_c7() -> None:
    sampler = InterruptableDistributedSampler(range(20), 1, 0)
    sampler.set_epoch(3)
    sampler.advance(5)
    for take in (sampler.set_epoch, lambda epoch: sampler.in_epoch(epoch).__enter__()):
        with pytest.raises(ConfigError, match="epoch 3 is at position 5 of 20, and epoch 4 was asked for"):
            take(4)
    sampler.set_epoch(3)
    assert len(sampler) == sampler.left == 15
    sampler.finish_epoch()
    sampler.set_epoch(4)
    assert len(sampler) == 20


def test_an_epoch_before_that_of_the_loaded_state_is_refused_with_both_numbers() -> None:
    sampler = InterruptableDistributedSampler(range(20), 1, 0)
    sampler.set_epoch(2)
    sampler.advance(20)
    resumed = InterruptableDistributedSampler(range(20), 1, 0)
    for position in (0, 20):
        resumed.load_state_dict(sampler.state_dict() | {"position": position})
        with pytest.raises(ConfigError, match=r"epoch 0 was asked for, and the state .* is of epoch 2"):
            resumed.set_epoch(0)  # as `for epoch in range(epochs)` does after a restart
        assert resumed.epoch == (3 if position else 2)  # the epoch that the next sample is of
    resumed.reset_progress()
    resumed.set_epoch(0)
    assert sorted(resumed) == list(range(20))


def test_break_and_an_exception_keep_the_position_and_the_end_finishes_the_epoch_c8() -> None:
    sampler = InterruptableDistributedSampler(range(6), 1, 0)
    with sampler.in_epoch(0):
        for _ in sampler:
            sampler.advance()
            break
    assert sampler.progress.position == 1
    with pytest.raises(RuntimeError, match="loss is nan"), sampler.in_epoch(0):  # noqa: PT012  # the loop is the point
        for number, _ in enumerate(sampler):
            if number == 2:
                raise RuntimeError("loss is nan")
            sampler.advance()
    assert sampler.progress.position == 3
    with sampler.in_epoch(0):
        for _ in sampler:
            sampler.advance()
    assert sampler.progress.finished
    with sampler.in_epoch(1):
        assert len(list(sampler)) == 6


def test_a_finished_epoch_that_is_loaded_gives_nothing_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sampler = InterruptableDistributedSampler(range(6), 2, 0)
    sampler.advance(3)
    resumed = InterruptableDistributedSampler(range(6), 2, 0)
    resumed.load_state_dict(sampler.state_dict())
    assert [list(resumed), list(resumed)] == [[], []]
    (message,) = caplog.messages
    assert message.startswith("epoch 0 was finished when it was saved: nothing is left in it")
    assert "begin with epoch 1" in message
    resumed.set_epoch(1)
    assert len(list(resumed)) == 3


def test_a_restart_from_an_epochs_end_begins_with_the_next_epoch(caplog: pytest.LogCaptureFixture) -> None:
    sampler = InterruptableDistributedSampler(range(6), 1, 0)
    sampler.advance(6)
    resumed = InterruptableDistributedSampler(range(6), 1, 0)
    resumed.load_state_dict(sampler.state_dict())
    assert resumed.state_dict() == sampler.state_dict()
    with pytest.raises(ConfigError, match="epoch 1 would be left out"):
        resumed.set_epoch(2)
    taken = {}
    for epoch in range(resumed.epoch, 3):  # scheduler, validation and save of epoch 0 are not run twice
        resumed.set_epoch(epoch)
        taken[epoch] = list(resumed)
        resumed.advance(6)
        assert (resumed.epoch, resumed.state_dict()["epoch"]) == (epoch, epoch)
    assert [sorted(taken[epoch]) for epoch in (1, 2)] == [list(range(6))] * 2
    assert caplog.messages == []


def test_an_epoch_that_gives_these_ranks_nothing_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    sampler = InterruptableDistributedSampler(range(5), 7, 3, drop_last=True)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        assert list(sampler) == []
    assert [message.partition(":")[0] for message in caplog.messages] == [
        "an epoch of 5 gives 7 ranks nothing"
    ]


@pytest.mark.parametrize(
    ("size", "position", "options"), [(10, 6, {}), (22, 20, {"global_batch": 4})], ids=["ranks", "row"]
)
def test_an_epoch_whose_rest_drop_last_leaves_out_is_finished_where_it_is_loaded(
    size: int, position: int, options: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    one = InterruptableDistributedSampler(range(size), 1, 0)
    one.advance(position)
    for sampler in ranks_of(size, 8, drop_last=True, **options):
        sampler.load_state_dict(one.state_dict())
        # As a framework that owns the loop: nothing comes, so nothing is advanced.
        assert len(sampler) == 0
        batches = sampler.micro_batches() if options else sampler
        assert [list(batches), list(batches)] == [[], []]
        sampler.set_epoch(1)
        assert list(batches)
        assert sampler.full_length > 0
    assert len(caplog.messages) == 8
    assert all(
        m.startswith("epoch 0 was finished when it was saved: nothing is left") for m in caplog.messages
    )


def test_fewer_samples_than_ranks_with_drop_last_give_nothing_in_every_epoch() -> None:
    sampler = InterruptableDistributedSampler(range(3), 8, 0, drop_last=True)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        assert list(sampler) == []


def test_a_loop_that_sets_no_epoch_is_refused_instead_of_training_on_nothing_c11() -> None:
    sampler = InterruptableDistributedSampler(range(6), 1, 0)
    sampler.advance(6)
    with pytest.raises(ConfigError, match=r"epoch 0 is finished\.  Call set_epoch\(1\)"):
        list(sampler)
    sampler.reset_progress()
    assert len(list(sampler)) == 6
    # The same if the epoch was begun by another program, and finished by this one.
    sampler.advance(3)
    resumed = InterruptableDistributedSampler(range(6), 1, 0)
    resumed.load_state_dict(sampler.state_dict())
    resumed.advance(3)
    with pytest.raises(ConfigError, match="epoch 0 is finished"):
        list(resumed)


def test_a_loop_that_never_advances_works_as_with_torchs_sampler() -> None:
    sampler = InterruptableDistributedSampler(range(6), 1, 0)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        assert sorted(sampler) == list(range(6))


def test_advancing_beyond_what_is_left_is_refused_and_moves_nothing_c11() -> None:
    sampler = InterruptableDistributedSampler(range(10), 3, 2)
    sampler.advance(3)
    with pytest.raises(ConfigError, match=r"advance\(2\) on rank 2 in epoch 0, where 1 are left"):
        sampler.advance(2)
    assert sampler.progress.position == 9
    rows = InterruptableDistributedSampler(range(10), 3, 2, global_batch=4)
    with pytest.raises(ConfigError, match="are left for this rank"):
        rows.advance(len(rows) + 1)
    assert rows.progress.position == 0


def test_the_position_never_exceeds_the_size_however_much_padding_there_is() -> None:
    for sampler in ranks_of(2, 7):
        assert sampler.padding == 5
        sampler.advance(1)
        assert sampler.state_dict()["position"] == 2


def test_a_state_of_cycling_utils_loads_with_the_world_size_that_wrote_it() -> None:
    sampler = InterruptableDistributedSampler(range(40), 2, 0)
    with pytest.raises(ConfigError, match=r"progress 5 in epoch 0, and not on how many ranks.*resumed on 2"):
        sampler.load_state_dict({"progress": 5, "epoch": 0})
    sampler.load_state_dict({"progress": 5, "epoch": 0}, world_size=4)
    assert sampler.state_dict()["position"] == 20
    # Its later epochs had the order of epoch 0 (C1): the samples seen are no prefix of ours.
    with pytest.raises(ConfigError, match="progress 5 in epoch 2: it took the order of epoch 0"):
        sampler.load_state_dict({"progress": 5, "epoch": 2}, world_size=4)
    sampler.load_state_dict({"progress": 0, "epoch": 2})
    assert (sampler.epoch, len(sampler)) == (2, 20)
    with pytest.raises(ConfigError, match="progress 50 in epoch 0 on 4 ranks, and an epoch has 40"):
        sampler.load_state_dict({"progress": 50, "epoch": 0}, world_size=4)


def test_a_state_of_dlrover_loads_with_its_world_size_and_never_wraps_d46_d47() -> None:
    sampler = InterruptableDistributedSampler(range(10), 1, 0)
    with pytest.raises(ConfigError, match="completed_num 8 in epoch 1, and not on how many ranks"):
        sampler.load_state_dict({"completed_num": 8, "epoch": 1})
    sampler.load_state_dict({"completed_num": 8, "epoch": 1}, world_size=4)
    assert (sampler.epoch, len(sampler)) == (1, 2)
    # Four ranks of batch 1 count 12 of 10 samples at the end: the epoch is over, and not at sample 2.
    sampler.load_state_dict({"completed_num": 12, "epoch": 1}, world_size=4)
    assert sampler.progress.finished


def test_the_plain_sampler_gives_the_whole_of_its_dataset_and_refuses_what_it_would_ignore_c10() -> None:
    sampler = InterruptableSampler(range(10), seed=3)
    theirs = DistributedSampler(range(10), 1, 0, seed=3)  # type: ignore[arg-type]
    assert list(sampler) == list(theirs)
    sampler.load_state_dict({"progress": 4, "epoch": 2})
    theirs.set_epoch(2)
    assert list(sampler) == list(theirs)[4:]
    for options in ({"num_replicas": 4}, {"rank": 1}, {"drop_last": True}):
        with pytest.raises(ConfigError, match="would have no effect"):
            InterruptableSampler(range(10), **options)  # type: ignore[arg-type]


def test_the_other_spelling_names_the_same_classes_c11() -> None:
    assert data.InterruptibleSampler is InterruptableSampler
    assert data.InterruptibleDistributedSampler is InterruptableDistributedSampler
    assert (
        data.InterruptibleDistributedGroupedBatchSampler is data.InterruptableDistributedGroupedBatchSampler
    )


def test_a_rank_that_does_not_exist_and_a_missing_process_group_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigError, match="no rank 3 in a world of 3"):
        InterruptableDistributedSampler(range(10), 3, 3)
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(ConfigError, match="one of 8 ranks by its environment, and there is no process group"):
        InterruptableDistributedSampler(range(10))
    monkeypatch.delenv("WORLD_SIZE")
    assert InterruptableDistributedSampler(range(10)).num_replicas == 1


@given(samples=st.integers(1, 200), micro=st.integers(0, 20), world=WORLDS, row=st.integers(1, 200))
def test_shares_differ_by_one_at_most_and_all_ranks_run_equally_many_micro_batches(
    samples: int, micro: int, world: int, row: int
) -> None:
    assume(row <= samples)
    batch = GlobalBatch(samples, micro)
    shares = [batch.share(rank, world, row) for rank in range(world)]
    assert [position for share in shares for position in share] == list(range(row))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    plans = [batch.micro_batches(rank, world, row) for rank in range(world)]
    assert len({len(plan) for plan in plans}) == 1
    assert sum(part.weight for plan in plans for part in plan) == pytest.approx(world)


def test_a_global_batch_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="global batch has 0 samples"):
        GlobalBatch(0)
    with pytest.raises(ConfigError, match="micro is -1"):
        GlobalBatch(4, -1)
    with pytest.raises(ConfigError, match="no global batch to split"):
        InterruptableDistributedSampler(range(4), 1, 0).micro_batches()


def test_with_a_global_batch_samples_one_by_one_are_refused() -> None:
    sampler = InterruptableDistributedSampler(range(10), 2, 1, global_batch=GlobalBatch(5, 1))
    with pytest.raises(ConfigError, match=r"taken one by one .* batch_sampler=sampler.micro_batches\(\)"):
        next(iter(DataLoader(range(10), batch_size=2, sampler=sampler)))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="the global batch is True"):
        InterruptableDistributedSampler(range(10), 2, 1, global_batch=True)
    assert InterruptableDistributedSampler(range(10), 2, 1, global_batch=np.int64(4)).left == 5  # type: ignore[arg-type]


def test_the_largest_seed_goes_through_the_epochs() -> None:
    sampler = InterruptableDistributedSampler(range(5), 1, 0, seed=2**64 - 1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        assert sorted(sampler) == list(range(5))
    sampler = InterruptableDistributedSampler(range(5), 1, 0)
    assert EpochOrder(5, seed=2**64 - 1, epoch=1).at(torch.arange(5)).tolist() == list(sampler)  # as seed 0


def test_a_sampler_that_was_made_before_the_process_group_is_refused_in_it() -> None:
    early, told = InterruptableDistributedSampler(range(8)), InterruptableDistributedSampler(range(8), 1, 0)
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    try:
        with pytest.raises(ConfigError, match="made for rank 0 of 1, and the process group says rank 1 of 2"):
            next(iter(early))
        assert len(list(told)) == 8
        assert len(list(InterruptableDistributedSampler(range(8)))) == 4
    finally:
        dist.destroy_process_group()
