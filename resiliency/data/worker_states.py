# SPDX-License-Identifier: Apache-2.0
"""The worker's side of a `ResumableIterable`: its dataset, and the state of it that comes with each batch.

A batch that the loader makes holds whole batches only: where the dataset has ended, or the worker's turn is
skipped, nothings fill it, and collating takes them out again. So the state after the last sample comes along
too, which torch's loader has no way to send.

Without workers all this runs in the training process.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import IterableDataset, get_worker_info

from resiliency.errors import ConfigError

T = TypeVar("T")

#: Fills a batch where a worker has no sample.
_NOTHING = object()


@dataclass(frozen=True)
class WorkerState:
    """What a worker's dataset and its iterator said of themselves.

    Attributes:
        epoch: in which they said it.
        parts: their states, as ``dataset`` and ``iterator``.
        ended: there was nothing left in that epoch.
    """

    epoch: int
    parts: Mapping[str, Any]
    ended: bool


@dataclass(frozen=True)
class Tag:
    """What comes along with a batch.

    Attributes:
        worker: that made it.
        state: of that worker behind the batch; None where it skipped its turn.
        has_batch: there is one.
    """

    worker: int
    state: WorkerState | None
    has_batch: bool


@dataclass(frozen=True)
class WorkerStart:
    """Where the workers of a loader start.

    Attributes:
        workers: the state of each; None, or none at all, where a dataset starts as it is.
        turn: the worker that gives the first batch.
        batch_size: of the loader; 1 where it makes no batches.
    """

    workers: tuple[WorkerState | None, ...]
    turn: int
    batch_size: int


class Reader(Generic[T]):
    """Reads one worker's copy of the dataset.

    Attributes:
        dataset: of the user.
        epoch: to be read; in shared memory, for workers that persist.
        start: for the next iteration of workers that are new.
    """

    def __init__(self, dataset: IterableDataset[T]) -> None:
        self.dataset = dataset
        self.epoch = torch.tensor(-1).share_memory_()  # type: ignore[no-untyped-call]
        self.start: WorkerStart | None = None
        self._read_epoch = -1
        self._batch_size = 1
        self._iterator: Iterator[T] = iter(())
        self._skips = self._ended = False

    def initial_state(self) -> WorkerState:
        """Of a dataset that was not iterated yet."""
        parts = {"dataset": self.dataset.state_dict()} if _is_stateful(self.dataset) else {}  # type: ignore[attr-defined]
        return WorkerState(-1, copy.deepcopy(parts), ended=False)

    def begin(self) -> Iterator[object]:
        """The samples of an epoch, and nothings.

        Raises:
            ConfigError: the loop is not one of `advancing`, or neither the dataset nor its iterator has a
                state.
        """
        start, self.start = self.start, None
        epoch, worker = int(self.epoch), _worker()
        if start is None and epoch == self._read_epoch:
            raise ConfigError(
                "a ResumableIterable was iterated outside of advancing: what is in the model is not known.",
                hint="Loop over advancing(loader, optimizer).",
            )
        self._read_epoch = epoch
        self._skips = self._ended = False
        # Copied: without workers this is what is saved next, and a dataset may write to what it loads.
        state = copy.deepcopy(start.workers[worker]) if start and start.workers else None
        if start:
            self._batch_size = start.batch_size
        goes_on = state is not None and state.epoch == epoch
        if goes_on:
            self._set_epoch(epoch)  # before the state, as it may start the epoch over
        # In torchdata's order: an iterator may be the dataset itself, and start over where it is made.
        if state and "dataset" in state.parts:
            self.dataset.load_state_dict(state.parts["dataset"])  # type: ignore[attr-defined]
        if not goes_on:
            self._set_epoch(epoch)
        self._iterator = iter(self.dataset)
        if not (_is_stateful(self._iterator) or _is_stateful(self.dataset)):
            raise ConfigError(
                f"neither a {type(self.dataset).__name__} nor its iterator has state_dict and "
                "load_state_dict: where it is cannot be saved.",
                hint="Give it both: state_dict returns what load_state_dict needs to go on behind the sample "
                "that was given last.",
            )
        if state and goes_on and "iterator" in state.parts:
            self._iterator.load_state_dict(state.parts["iterator"])  # type: ignore[attr-defined]
        if state and goes_on and state.ended:
            return iter(())
        return self._samples(skip=start is not None and worker < start.turn)

    def _set_epoch(self, epoch: int) -> None:
        set_epoch: Callable[[int], object] | None = getattr(self.dataset, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)

    def _samples(self, *, skip: bool) -> Iterator[object]:
        if skip:
            self._skips = True
            yield from [_NOTHING] * self._batch_size
            self._skips = False
        count = 0
        while True:  # no `for`, which would make an iterator of the iterator
            try:
                sample = next(self._iterator)
            except StopIteration:
                break
            yield sample
            count += 1
        self._ended = True
        yield from [_NOTHING] * (self._batch_size - count % self._batch_size)

    def tag(self, *, has_batch: bool) -> Tag:
        """For the batch whose last sample was just given."""
        if self._skips:
            return Tag(_worker(), None, False)
        holders: dict[str, object] = {"iterator": self._iterator}
        if holders["iterator"] is not self.dataset:
            holders["dataset"] = self.dataset
        # Copied: a loader's queue pickles later, when the dataset may have changed what it returned.
        parts = {
            name: copy.deepcopy(holder.state_dict())  # type: ignore[attr-defined]
            for name, holder in holders.items()
            if _is_stateful(holder)
        }
        return Tag(_worker(), WorkerState(self._read_epoch, parts, self._ended), has_batch)


class TaggingCollate:
    """Makes a batch of the samples in it, with its tag.

    Args:
        collate: of the loader.
        batch_size: of the loader, None where it makes no batches.
    """

    def __init__(
        self, reader: Reader[T], collate: Callable[[Any], Any], batch_size: int | None, drop_last: bool
    ) -> None:
        self._reader = reader
        self._collate = collate
        self._batch_size = batch_size
        self._drop_last = drop_last

    def __call__(self, samples: Any) -> tuple[Any, Tag]:
        if self._batch_size is None:
            has_batch = samples is not _NOTHING
        else:
            samples = [sample for sample in samples if sample is not _NOTHING]
            has_batch = len(samples) == self._batch_size or (bool(samples) and not self._drop_last)
        return (self._collate(samples) if has_batch else None), self._reader.tag(has_batch=has_batch)


def _worker() -> int:
    info = get_worker_info()
    return 0 if info is None else info.id


def _is_stateful(value: object) -> bool:
    return all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))
