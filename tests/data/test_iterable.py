# SPDX-License-Identifier: Apache-2.0
"""A dataset without positions goes on behind the batch that is in the model, in each of its workers."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from resiliency.data import ResumableIterable, advancing, atomic_torch_save
from resiliency.errors import ConfigError
from resiliency.testing.rank_pool import RankOutcome, RankPool
from tests.data.loaders import end_with, join_feeders


class Stream(IterableDataset[int]):
    """Numbers, of which each worker has another share; `state_dict` is a list that it goes on writing to."""

    def __init__(self, size: int = 23, uneven: bool = False) -> None:
        self.size, self.uneven = size, uneven
        self.place = [0, 0]

    def share(self) -> list[int]:
        info = get_worker_info()
        if self.uneven and info:  # of three workers one has nothing, one a third, one the rest
            cuts = [0, 0, self.size // 3, self.size]
            return list(range(cuts[info.id], cuts[info.id + 1]))
        return list(range(info.id, self.size, info.num_workers) if info else range(self.size))

    def __iter__(self) -> Iterator[int]:
        share = self.share()
        while self.place[1] < len(share):
            self.place[1] += 1
            yield 1000 * self.place[0] + share[self.place[1] - 1]
        self.place[:] = [self.place[0] + 1, 0]

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class WithEpochs(Stream):
    """Is told its epochs, and does not start over by itself."""

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.place[0]:
            self.place = [epoch, 0]

    def __iter__(self) -> Iterator[int]:
        share = self.share()
        while self.place[1] < len(share):
            self.place[1] += 1
            yield 1000 * self.place[0] + share[self.place[1] - 1]


class OwnIterator(Stream):
    """Is its own iterator, and starts over where that is made."""

    def __iter__(self) -> Iterator[int]:
        self.place, self.left = [self.place[0], 0], self.share()
        return self

    def __next__(self) -> int:
        if self.place[1] == len(self.left):
            raise StopIteration
        self.place[1] += 1
        return self.left[self.place[1] - 1]


class OtherIterator(Stream):
    """Has no state; its iterator has."""

    state_dict = load_state_dict = None  # type: ignore[assignment]

    def __iter__(self) -> Iterator[int]:
        return iter(OwnIterator(self.size, self.uneven))


def listed(samples: Any) -> list[int]:
    samples = samples if isinstance(samples, list) else [samples]
    return [sample["n"] if isinstance(sample, dict) else sample for sample in samples]


def hugging_face_stream() -> Any:
    from datasets import Dataset

    return Dataset.from_dict({"n": list(range(22))}).to_iterable_dataset(num_shards=4)


def an_optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)


def undisturbed(make: Callable[[], Any], epochs: int, **options: Any) -> list[list[int]]:
    """What torch's loader gives of the dataset itself."""
    dataset, found = make(), []
    loader = DataLoader(dataset, collate_fn=listed, **options)
    for epoch in range(epochs):
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)
        found += list(loader)
    return found


def life(
    make: Callable[[], Any], state: dict[str, Any] | None, batches: int, epochs: int, **options: Any
) -> tuple[list[list[int]], dict[str, Any]]:
    """That many batches, from new objects; the state is taken after the last one's step."""
    data, optimizer, seen = ResumableIterable(make(), 1, 0), an_optimizer(), []
    if state is not None:
        data.load_state_dict(state)
    loader = DataLoader(data, collate_fn=listed, **options)
    for epoch in range(data.epoch, epochs):
        data.set_epoch(epoch)
        for batch in advancing(loader, optimizer):
            optimizer.step()
            seen.append(batch)
            if len(seen) == batches:
                return seen, data.state_dict()
    return seen, data.state_dict()


def lives(make: Callable[[], Any], lengths: list[int], epochs: int, **options: Any) -> list[list[int]]:
    """What lives of these lengths see, in turn, until one sees less than its length."""
    seen: list[list[int]] = []
    state = None
    for number in range(60):
        length = lengths[number % len(lengths)]
        more, state = life(make, copy.deepcopy(state), length, epochs, **options)
        seen += more
        if len(more) < length:
            return seen
    raise AssertionError(f"no end after {seen}")


@pytest.mark.parametrize("batch_size", [4, None])
@pytest.mark.parametrize("kind", [Stream, WithEpochs, OwnIterator, OtherIterator])
def test_without_workers_a_run_that_ends_after_each_batch_sees_what_torchs_loader_gives(
    kind: type[Stream], batch_size: int | None
) -> None:
    options = {"batch_size": batch_size, "drop_last": kind is WithEpochs and batch_size is not None}
    assert lives(kind, [1], 3 if batch_size else 2, **options) == undisturbed(
        kind, 3 if batch_size else 2, **options
    )


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Stream, {"prefetch_factor": 5}),
        (Stream, {"persistent_workers": True, "drop_last": True}),
    ],
)
def test_workers_that_end_at_different_times_go_on_in_their_turn(
    kind: type[Stream], options: dict[str, Any]
) -> None:
    make = partial(kind, 23, True)
    options = {"batch_size": 4, "num_workers": 3, **options}
    assert lives(make, [1, 4], 2, **options) == undisturbed(make, 2, **options)


def begun(
    size: int = 10, *, optimizer: bool = True, **options: Any
) -> tuple[ResumableIterable[int], Any, Any]:
    data = ResumableIterable(Stream(size), 1, 0)
    steps = an_optimizer()
    loader = DataLoader(data, collate_fn=listed, batch_size=2, **options)
    return data, steps, lambda: advancing(loader, steps if optimizer else None)


def place(data: ResumableIterable[int]) -> int:
    """Samples of the only worker that are in the model."""
    [worker] = data.state_dict()["workers"]  # type: ignore[misc]
    return worker["parts"]["dataset"]["place"][1] if worker else 0


def test_a_batch_counts_when_the_optimizer_has_made_a_step_after_it() -> None:
    data, steps, loop = begun()
    places = []
    for number, _ in enumerate(loop(), 1):
        if number % 2 == 0:
            steps.step()
        places.append(place(data))
    assert places == [0, 4, 4, 8, 8]


def test_what_no_step_came_after_at_the_end_of_an_epoch_counts_with_the_next_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    data, steps, loop = begun()
    for number, _ in enumerate(loop(), 1):
        if number < 5:
            steps.step()
    assert "epoch 0 ended with 1 batches that no step of the optimizer came after" in caplog.text
    assert place(data) == 8
    data.set_epoch(1)
    waiting = data.state_dict()
    for number, batch in enumerate(loop()):
        assert batch == [1000 + 2 * number, 1001 + 2 * number]
        if number == 0:
            assert data.state_dict() == waiting
            continue
        steps.step()
        assert (data.epoch, place(data)) == (1, 4)
        break
    resumed, _, resumed_loop = begun()
    resumed.load_state_dict(waiting)
    before = copy.deepcopy(waiting)
    assert next(iter(resumed_loop())) == [8, 9]
    assert resumed.state_dict() == before


def test_a_loop_that_was_left_begins_again_behind_the_last_step() -> None:
    data, steps, loop = begun()
    for number, _ in enumerate(loop()):
        if number == 2:
            break
        steps.step()
    for begin in (partial(next, loop()), partial(data.set_epoch, 1)):
        with pytest.raises(ConfigError, match=r"1 batches were handed out in epoch 0.*data.advance\(0\)"):
            begin()
    data.advance(0)
    assert [batch for batch in loop() if steps.step() is None] == [[4, 5], [6, 7], [8, 9]]
    assert data.epoch == 0
    with pytest.raises(ConfigError, match=r"epoch 0 is finished.*set_epoch\(1\)"):
        list(loop())
    resumed, _, resumed_loop = begun()
    resumed.load_state_dict(data.state_dict())
    assert resumed.epoch == 1, "a program that was killed between two epochs begins with the next"
    resumed.set_epoch(resumed.epoch)
    assert len(list(resumed_loop())) == 5


def test_a_step_after_a_loop_was_left_leaves_doubt_that_the_program_resolves() -> None:
    for count, expected in ((0, [0, 1]), (2, [4, 5])):
        data, steps, loop = begun()
        for number, _ in enumerate(loop()):
            if number == 1:
                break
        steps.step()
        for doubtful in (data.state_dict, partial(next, loop()), partial(data.set_epoch, 1)):
            with pytest.raises(ConfigError, match="cannot tell whether the batch in hand is in the model"):
                doubtful()
        with pytest.raises(ConfigError, match=r"advance\(1\), and 2 batches are in hand"):
            data.advance(1)
        data.advance(count)
        assert next(iter(loop())) == expected


def test_without_an_optimizer_a_batch_counts_when_the_next_is_asked_for() -> None:
    data, _, loop = begun(optimizer=False)
    for number, _ in enumerate(loop()):
        with pytest.raises(ConfigError, match="batch in hand"):
            data.state_dict()
        if number == 1:
            break
    data.advance(1)
    assert place(data) == 4
    list(loop())
    assert place(data) == 0  # of the next epoch: the stream starts over by itself


def test_an_epoch_is_left_by_name_only() -> None:
    data, steps, loop = begun()
    for _ in loop():
        steps.step()
        break
    with pytest.raises(ConfigError, match="epoch 0 is under way, and epoch 1 was asked for"):
        data.set_epoch(1)
    data.finish_epoch()
    data.set_epoch(1)
    assert data.epoch == 1


def test_another_rank_and_another_number_of_ranks_or_workers_are_refused_with_both() -> None:
    data, steps, loop = begun()
    for _ in loop():
        steps.step()
        break
    state = data.state_dict()
    for world, rank in ((2, 0), (2, 1)):
        other = ResumableIterable(Stream(), world, rank)
        with pytest.raises(ConfigError, match=f"is of rank 0 of 1, and this is rank {rank} of 2"):
            other.load_state_dict(state)
    data, _, two_workers = begun(num_workers=2)
    data.load_state_dict(state)
    with pytest.raises(ConfigError, match="the state is of 1 workers of a loader, and this one has 2"):
        next(iter(two_workers()))
    with pytest.raises(ConfigError, match=r"its version is None, its keys are \['epoch'\]"):
        data.load_state_dict({"epoch": 1})


def test_a_dataset_without_a_state_and_a_loop_that_does_not_count_are_refused_by_name() -> None:
    class Plain(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(4))

    with pytest.raises(ConfigError, match=r"reads a Plain, an IterableDataset.*ResumableIterable"):
        next(iter(advancing(DataLoader(Plain()), an_optimizer())))
    with pytest.raises(ConfigError, match="neither a Plain nor its iterator has state_dict"):
        next(iter(advancing(DataLoader(ResumableIterable(Plain(), 1, 0)), an_optimizer())))
    with pytest.raises(ConfigError, match="iterated outside of advancing"):
        next(iter(DataLoader(ResumableIterable(Stream(), 1, 0))))


def test_workers_that_persist_and_are_ahead_of_the_model_are_refused() -> None:
    _, steps, loop = begun(num_workers=1, persistent_workers=True)
    for _ in loop():
        steps.step()
        break
    with pytest.raises(ConfigError, match="persist and are ahead of the model"):
        next(iter(loop()))


@pytest.mark.thorough("datasets of one's own are near; importing Hugging Face's takes seconds")
def test_hugging_faces_iterable_dataset_goes_on_and_one_that_shuffles_in_a_buffer_is_refused() -> None:
    for workers in (0, 2):
        options = {"batch_size": 4, "num_workers": workers}
        wanted = undisturbed(hugging_face_stream, 2, **options)
        assert lives(hugging_face_stream, [2, 3], 2, **options) == wanted
    from datasets import interleave_datasets

    shuffled = hugging_face_stream().shuffle(seed=1).map(dict)
    for dataset in (shuffled, interleave_datasets([hugging_face_stream(), shuffled])):
        with pytest.raises(ConfigError, match="shuffles in a buffer that its state leaves out"):
            ResumableIterable(dataset, 1, 0)


def train_until_killed(rank: int, path: str, options: dict[str, Any], kill_at: int, after_save: bool) -> None:
    """Two epochs; the model is the list of samples it consumed, saved with the dataset in one file."""
    data, optimizer, consumed = ResumableIterable(Stream(), 1, 0), an_optimizer(), []
    if os.path.exists(path):
        saved = torch.load(path)
        consumed = saved["model"]
        data.load_state_dict(saved["data"])
    loader = DataLoader(data, 4, worker_init_fn=partial(end_with, os.getpid()), collate_fn=listed, **options)
    steps = 0
    for epoch in range(data.epoch, 2):
        data.set_epoch(epoch)
        for batch in advancing(loader, optimizer):
            consumed.append(batch)
            optimizer.step()
            if steps == kill_at and not after_save:
                os.kill(os.getpid(), signal.SIGKILL)
            atomic_torch_save({"model": consumed, "data": data.state_dict()}, path)
            if steps == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            steps += 1
    del loader
    join_feeders()


@pytest.mark.thorough("runs that end after each batch are near, in one process")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_workers": 2, "prefetch_factor": 4},
        {"num_workers": 2, "prefetch_factor": 4, "persistent_workers": True},
    ],
    ids=["no worker", "two workers", "persistent workers"],
)
def test_a_rank_killed_at_every_batch_consumes_what_an_undisturbed_one_does(
    options: dict[str, Any], rank_pool: RankPool, tmp_path: Path
) -> None:
    path, lives = tmp_path / "checkpoint", 0
    while lives < 60:
        # Every batch has two deaths: before it is saved, and after; some lives get to later batches.
        saved, ahead = lives % 2 == 1, lives // 2 % 2
        job = rank_pool.run(train_until_killed, 1, str(path), options, ahead, saved, group=False, timeout=60)
        if job.outcomes == [RankOutcome.OK]:
            break
        assert job.outcomes == [RankOutcome.DIED], str(job[0])
        lives += 1
    assert lives >= 12
    assert torch.load(path)["model"] == undisturbed(Stream, 2, batch_size=4, **options)
