# SPDX-License-Identifier: Apache-2.0
"""Samplers that go on exactly where the model is, on any number of ranks.

A sampler says which samples come next, and its state says which are in the model. Both follow from one plain
number, the position in the epoch's order (`resiliency.data.progress`). What a DataLoader has fetched ahead is
not in the model and does not count; what the program trained on counts when it says so, by `advance`, or
without a word by `advancing`, which counts at `optimizer.step()`.

    sampler = InterruptableDistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler, num_workers=4)
    state = {"model": model, "optimizer": optimizer, "sampler": sampler}     # goes into every checkpoint
    for epoch in range(sampler.epoch, epochs):
        sampler.set_epoch(epoch)
        for batch in advancing(loader, optimizer):
            ...

Epochs: a state of this epoch goes on; another epoch is taken only from the start of this one or when it is
finished, else the rest of it would be left out in silence. Leaving a loop by an exception or by `break` keeps
the position. An epoch that was finished before it was saved gives nothing and says so once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized

import torch
from torch.utils.data import Sampler

from resiliency.data.global_batch import GlobalBatch, MicroBatch
from resiliency.data.order import EpochOrder
from resiliency.data.progress import Progress, check_whole
from resiliency.data.resumable import ResumableSampler
from resiliency.errors import ConfigError

#: Indexes that are computed at a time.
_CHUNK = 4096


class InterruptableDistributedSampler(ResumableSampler[int]):
    """torch's DistributedSampler, whose position is in the checkpoint.

    The same samples in the same order as torch's, for each argument of it, in every epoch. Iteration gives
    what is not in the model yet; `len` is how many samples that is.

    With `global_batch` each optimizer step is made of the same samples on any number of ranks: pass
    ``batch_sampler=sampler.micro_batches()`` to the DataLoader and loop over `advancing_steps`.

    Args:
        dataset: anything with a length.
        num_replicas, rank: of the process group by default, or 1 and 0 without one.
        seed: equal on all ranks.
        drop_last: leave out what cannot be dealt evenly at the end, instead of dealing some samples twice;
            with `global_batch`, leave out a last row that is not full.
        kind: ``computed`` takes no memory for the order, for 10^8 samples and more; see `EpochOrder`.
        global_batch: samples of an optimizer step over all ranks, and of a micro-batch.
        dataset_id: a name of the data; a state with another is refused.
    Raises:
        ConfigError: there is no such rank, a process group is needed first, or an argument is out of range.
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        kind: str = "torch",
        global_batch: GlobalBatch | int | None = None,
        dataset_id: str = "",
    ) -> None:
        progress = Progress(size=len(dataset), seed=seed, shuffle=shuffle, kind=kind, dataset=dataset_id)
        super().__init__(dataset, progress, num_replicas, rank, drop_last)
        if global_batch is not None and not isinstance(global_batch, GlobalBatch):
            global_batch = GlobalBatch(check_whole("the global batch", global_batch))
        self.global_batch = global_batch
        #: Samples of this rank that were advanced in a row, which counts when it is whole.
        self._in_row = 0

    def __iter__(self) -> Iterator[int]:
        if self.global_batch is not None:
            raise ConfigError(
                "the sampler has a global batch: taken one by one its samples are in no micro-batch, and "
                "those of weight 0 are repeated.",
                hint="Pass batch_sampler=sampler.micro_batches() to the loader, and loop over "
                "advancing_steps(loader, optimizer).",
            )
        start = self.begin_iteration()
        if start is None:
            return
        order = self.order_of(start)
        mine = start.deal(self.rank, self.num_replicas, drop_last=self.drop_last)
        for first in range(0, len(mine), _CHUNK):
            yield from indexes_at(order, mine[first : first + _CHUNK])

    @property
    def padding(self) -> int:
        """As of all samplers; none with `global_batch`, where a sample that is run twice has weight 0."""
        return 0 if self.global_batch else super().padding

    def micro_batches(self) -> MicroBatchSampler:
        """The same samples in micro-batches of `global_batch`, as a ``batch_sampler`` for a DataLoader.

        A loop over the loader itself has no weights: it takes those of `GlobalBatch.micro_batches` for each
        row, and leaves out what has weight 0. `advancing_steps` does that.

        Raises:
            ConfigError: there is no `global_batch`.
        """
        return MicroBatchSampler(self)

    def advance(self, count: int = 1) -> None:
        """Say that `count` more samples of this rank are in the model.

        With `global_batch` also those of weight 0 count, and the position moves when the row is whole: a
        state that is saved in between is that before the row, as the model is.

        Raises:
            ConfigError: that is more than this rank has left in the epoch, or a loop counts by itself.
        """
        super().advance(count)

    def _check_left(self, count: int) -> None:
        in_row = 0 if self._next_epoch is not None else self._in_row
        if count > self.left - in_row:
            raise self._too_far(count, self.left - in_row)

    def _add(self, count: int) -> None:
        if self.global_batch is None:
            super()._add(count)
            return
        progress = self._progress  # which may move the row on
        taken = self._in_row + count
        while row := self._next_row(progress):
            share = self._row_samples(row)
            if taken < share:
                break
            taken, progress = taken - share, progress.after(row)
        else:
            if taken:
                raise self._too_far(count, self._length(self._progress) - self._in_row)
            if count:
                progress = progress.after(progress.left)
        self._place(progress)
        self._in_row = taken

    def _place(self, progress: Progress) -> None:
        super()._place(progress)
        self._in_row = 0

    def _next_row(self, progress: Progress) -> int:
        """Samples of the next optimizer step; 0 if there is none."""
        assert self.global_batch is not None
        return next((row for row, _ in self.row_sizes(progress)), 0)

    def row_sizes(self, progress: Progress) -> Iterator[tuple[int, int]]:
        """The optimizer steps that are left: pairs of samples, and how many steps in turn have as many."""
        assert self.global_batch is not None
        consumed = progress.epoch * progress.size + progress.position
        return self.global_batch.rows(consumed, progress.left, drop_last=self.drop_last)

    def _row_samples(self, row: int) -> int:
        assert self.global_batch is not None
        return self.global_batch.run_samples(self.rank, self.num_replicas, row)

    def _length(self, progress: Progress) -> int:
        if self.global_batch is None:
            return super()._length(progress)
        return sum(count * self._row_samples(row) for row, count in self.row_sizes(progress))

    def rows(self, start: Progress) -> Iterator[tuple[int, tuple[MicroBatch, ...]]]:
        """First position and micro-batches of this rank, for each optimizer step from `start` on."""
        assert self.global_batch is not None
        progress = start
        while row := self._next_row(progress):
            yield progress.position, self.global_batch.micro_batches(self.rank, self.num_replicas, row)
            progress = progress.after(row)

    def begin_iteration(self) -> Progress | None:
        start = super().begin_iteration()
        if self._next_epoch is None:
            self._in_row = 0  # what was advanced of a row that was left is not in the model
        return start

    def _check_same_order(self, key: str, count: int, epoch: int) -> None:
        if key == "progress" and count > 0 and epoch > 0 and self.progress.shuffle:
            raise ConfigError(
                f"the state of cycling_utils says progress {count} in epoch {epoch}: it took the order of "
                "epoch 0 in "
                "every epoch, so these samples are not the first ones of any other order.",
                hint=f"Start that epoch from its beginning: load {{'progress': 0, 'epoch': {epoch}}}.",
            )


class InterruptableSampler(InterruptableDistributedSampler):
    """Samples of a dataset that is this rank's own, such as a `DistributedShardedDataset`.

    All ranks advance together, each through its own data. `num_replicas`, `rank` and `drop_last` are there
    for programs that pass them, and are refused where they would mean something.

    Raises:
        ConfigError: more than one replica, another rank than 0, or `drop_last`.
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        kind: str = "torch",
        dataset_id: str = "",
    ) -> None:
        if num_replicas not in (None, 1) or rank not in (None, 0) or drop_last:
            raise ConfigError(
                "InterruptableSampler gives every sample of its dataset to this rank: "
                f"num_replicas={num_replicas}, "
                f"rank={rank}, drop_last={drop_last} would have no effect.",
                hint="Leave them out, or take InterruptableDistributedSampler.",
            )
        super().__init__(dataset, 1, 0, shuffle, seed, kind=kind, dataset_id=dataset_id)

    def load_state_dict(self, state: Mapping[str, object], *, world_size: int | None = None) -> None:
        """Go on from a state of this sampler, or of cycling_utils' one, which counts one rank's samples.

        Raises:
            ConfigError: the state belongs to other data or another order.
        """
        super().load_state_dict(state, world_size=1)

    def _check_same_order(self, key: str, count: int, epoch: int) -> None:
        """cycling_utils' sampler of this name takes another order in each epoch, and the same ones."""


class MicroBatchSampler(Sampler[list[int]]):
    """Batch sampler over the rows of a global batch; see `InterruptableDistributedSampler.micro_batches`.

    Raises:
        ConfigError: the sampler has no `global_batch`.
    """

    def __init__(self, sampler: InterruptableDistributedSampler) -> None:
        if sampler.global_batch is None:
            raise ConfigError(
                "the sampler has no global batch to split.",
                hint="Construct it with global_batch=GlobalBatch(samples, micro).",
            )
        self.sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        start = self.sampler.begin_iteration()
        if start is None:
            return
        order = self.sampler.order_of(start)
        for first, parts in self.sampler.rows(start):
            for part in parts:
                yield indexes_at(order, range(first + part.start, first + part.stop))

    def __len__(self) -> int:
        """Micro-batches of this rank that the iteration that began last gives, as `len` of the sampler."""
        batch, world_size = self.sampler.global_batch, self.sampler.num_replicas
        assert batch is not None
        rows = self.sampler.row_sizes(self.sampler.length_from)
        return sum(count * batch.micro_count(world_size, row) for row, count in rows)


def indexes_at(order: EpochOrder, positions: range) -> list[int]:
    found: list[int] = order.at(torch.arange(positions.start, positions.stop, positions.step)).tolist()
    return found
