# SPDX-License-Identifier: Apache-2.0
"""Samples of the ranges that a worker is granted: as a sampler for a DataLoader, or as records of text files.

Invariant of the sampler: samples that it handed out and that were not advanced are still held, and come first
in the next iteration. So what a DataLoader fetched ahead is never lost, and never counts. Where one of them
went to another worker, all are given back and nothing counts before a new iteration: else the samples that
come out of the loader would no longer be those that `advance` counts.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar, cast

import torch
from torch.utils.data import DataLoader, Sampler

from resiliency.data.dispatch.book import Answer, StaleRange, state_of_start
from resiliency.data.dispatch.client import DataClient
from resiliency.data.dispatch.ranges import Plain, SampleRange
from resiliency.data.order import EpochOrder
from resiliency.data.progress import check_whole
from resiliency.errors import ConfigError

T = TypeVar("T")


class DispatchedSampler(Sampler[int]):
    """Indexes of the samples that the data server grants to this worker.

        sampler = DispatchedSampler(client)
        loader = DataLoader(dataset, batch_size=32, sampler=sampler, num_workers=4)
        for batch in sampler.batches(loader):
            ...
            sampler.advance(len(batch))

    One iteration ends where a range could only come from another worker while this one still has samples on
    their way through the loader; `batches` starts the next one, until the data end. A loop that goes on after
    a StaleRange, without its batch, gets the next batch from a new iteration too. With `drop_last` an
    iteration leaves out its last samples if they fill no batch, and counts them as skipped.

    Args:
        client: of a server of `SampleRanges`.
    Raises:
        ConfigError: the server has other ranges.
    """

    def __init__(self, client: DataClient) -> None:
        source = client.source
        if source.get("source") != "samples":
            raise ConfigError(
                f"the data server has ranges of {source.get('source')!r}, and a sampler needs samples.",
                hint="Loop over client.ranges().",
            )
        self.client = client
        #: Whether the server said that the data end.
        self.ended = False
        self._shuffled = source["order"] == "samples"
        self._size, self._seed = cast(int, source["size"]), cast(int, source["seed"])
        self._kind = cast(str, source["kind"])
        self._order: EpochOrder | None = None
        #: Handed out, or about to be, and not advanced.
        self._held: deque[SampleRange] = deque()
        self._advanced = True
        #: What was handed out is another worker's, so that nothing counts before the next iteration.
        self._is_stale = False
        #: Whether nothing was asked, advanced or loaded yet.
        self._is_new = True
        #: Whether samples counted at once, so that no step says whether a model has them.
        self._without_step = False

    @property
    def step(self) -> int:
        """The step of which this worker spoke last, or that was loaded; 0: of none."""
        return max(0, self.client.step)

    def __iter__(self) -> Iterator[int]:
        if self._held and not self._advanced:
            raise ConfigError(
                "the samples of the last iteration were not advanced, and would come again.",
                hint="Call sampler.advance(samples of the batch) for each batch that was used.",
            )
        self._advanced = self._is_stale = self._is_new = False
        for part in list(self._held):
            yield from self._indexes(part)
        while not self._is_stale and (part_or_not := self._next_range()) is not None:
            self._held.append(part_or_not)
            yield from self._indexes(part_or_not)

    def batches(self, loader: DataLoader[T]) -> Iterator[T]:
        """The batches of a loader over this sampler, until the data end.

        Raises:
            ConfigError: the loader has another sampler, or gives batches out of order; or samples of batches
                were not advanced at the end of an iteration, where they would come again.
        """
        if loader.sampler is not self or not loader.in_order:
            raise ConfigError(
                "the loader does not take its samples from this sampler, in order.",
                hint="Pass sampler=sampler to the DataLoader, and leave out in_order=False.",
            )
        while not (self.ended and not self._held):
            for batch in loader:
                yield batch
                if self._is_stale:
                    break
            else:
                self._end_iteration(loader.batch_size if loader.drop_last else 1)

    def _end_iteration(self, batch_size: int | None) -> None:
        """All batches of an iteration were used. What a loader with `drop_last` left of it is dropped."""
        left = sum(map(len, self._held))
        if left >= (batch_size or 1):
            raise ConfigError(
                f"{left} samples that the loader handed out were not advanced, and would come again.",
                hint="Call sampler.advance(samples of the batch) for each batch, with the number of the "
                "optimizer's step that will use it.",
            )
        while self._held:
            with contextlib.suppress(StaleRange):  # another worker has it
                self.client.drop(self._held[0])
            self._held.popleft()

    def advance(self, count: int, step: int | None = None) -> None:
        """Say that the next `count` samples that were handed out are used.

        Args:
            step: of the optimizer that uses them, to be said before the collective that ends it, with a
                count of 0 where this worker has no samples in it; None: they count at once.
        Raises:
            ConfigError: fewer were handed out.
            StaleRange: they belong to another worker now, or an iteration in which that was said goes on.
        """
        if self._is_stale:
            raise StaleRange(
                "samples of this iteration went to another worker, and the others were given back.",
                hint="Leave out its batches, and iterate over the loader again; sampler.batches() does.",
                worker=self.client.worker,
            )
        if check_whole("advance", count) > (held := sum(map(len, self._held))):
            raise ConfigError(f"advance({count}), and {held} samples were handed out.")
        self._advanced = True
        self._without_step |= step is None and count > 0
        if step is not None:
            self.client.step = max(self.client.step, check_whole("step", step))
        while count:
            part = self._held[0]
            used = part.first(min(count, len(part)))
            try:
                self.client.done(used, step)
            except StaleRange:
                self._forget_held()
                raise
            count -= len(used)
            self._held.popleft()
            if used != part:
                self._held.appendleft(SampleRange(used.stop, part.stop, part.epoch, part.partition))

    def state_dict(self) -> Plain:
        """Plain values for the checkpoint of the step that was advanced last; the same on all ranks.

        Before the first iteration or step it is the state of a model from scratch, and the server is not
        asked: loaders of checkpoints ask for it to learn its form.

        Raises:
            ConfigError: samples were advanced without a step, so that all states would be that of step 0; or
                a later step is over on another worker, so that this would not be the state of the model.
        """
        if self._without_step:
            raise ConfigError(
                "samples were advanced without a step: a checkpoint cannot say whether its model has them.",
                hint="Pass the optimizer's step: sampler.advance(samples, step=n).",
            )
        if self._is_new and self.client.step < 0:
            return state_of_start(self.client.source)
        return self.client.commit(self.step, is_last=True)

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on from a checkpoint, on all ranks; see `Book.rollback`."""
        self.client.rollback(state)
        self.ended, self._advanced, self._without_step = False, True, False
        self._held.clear()
        self._is_stale = self._is_new = False

    def _forget_held(self) -> None:
        """Give back what this worker still holds: the loader hands out its samples behind stale ones."""
        self._is_stale = self._advanced = True
        while self._held:
            with contextlib.suppress(StaleRange):
                self.client.give_back(self._held.pop())

    def _next_range(self) -> SampleRange | None:
        found = self.client.try_next_range() if self._held else self.client.next_range()
        self.ended = found is None or found is Answer.END
        return found if isinstance(found, SampleRange) else None

    def _indexes(self, part: SampleRange) -> Iterator[int]:
        if not self._shuffled:
            return iter(range(part.start, part.stop))
        if self._order is None or self._order.epoch != part.epoch:
            self._order = EpochOrder(self._size, epoch=part.epoch, seed=self._seed, kind=self._kind)
        indexes: list[int] = self._order.at(torch.arange(part.start, part.stop)).tolist()
        return iter(indexes)


def sizes_of(paths: Iterable[str | os.PathLike[str]]) -> tuple[tuple[str, int], ...]:
    """Path and size in bytes of each file, for `TextRanges`.

    Raises:
        OSError: there is no such file.
    """
    return tuple((os.fspath(path), os.path.getsize(path)) for path in paths)


def text_records(part: SampleRange) -> Iterator[bytes]:
    """The lines of a range of `TextRanges`, without their newlines: those whose first byte is in it.

    Raises:
        OSError: the file cannot be read.
    """
    with open(part.partition, "rb") as file:
        if part.start:
            file.seek(part.start - 1)
            file.readline()  # of the range before
        position = file.tell()
        while position < part.stop and (line := file.readline()):
            position += len(line)
            yield line.removesuffix(b"\n")
