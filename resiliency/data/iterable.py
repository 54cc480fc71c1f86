# SPDX-License-Identifier: Apache-2.0
"""An IterableDataset that goes on exactly where the model is, whatever its workers had read ahead.

The dataset of the user has `state_dict` and `load_state_dict`, itself or its iterator, as torchdata's
StatefulDataLoader wants them. In each worker the state is taken when the samples of a batch were pulled, and
comes along with the batch. It counts when the batch counts, so the state that is saved is that of the model.

    data = ResumableIterable(dataset)
    loader = DataLoader(data, batch_size=32, num_workers=4)
    for batch in advancing(loader, optimizer):
        ...

Batches come from the workers in turn, and a worker that has ended is left out: torch's order, in which
nothing depends on time. A restart begins with worker 0 too, so the workers before the one whose turn it is
give one batch of nothing, which the loop leaves out. So does a worker that ends, for the state it ends with.

Invariant: a position is that after a whole batch of one worker; what a step of the optimizer came after is
counted, the rest is pending.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from resiliency.data._compat import has_unsaved_buffer
from resiliency.data.optimizer_steps import StepListener
from resiliency.data.progress import check_whole
from resiliency.data.resumable import check_world, world_of
from resiliency.data.worker_states import Reader, Tag, TaggingCollate, WorkerStart, WorkerState
from resiliency.errors import ConfigError

log = logging.getLogger(__name__)

T = TypeVar("T")

_VERSION = 1


@dataclass(frozen=True)
class _Position:
    """Where all workers of a rank are; without `workers` none has given a batch yet."""

    epoch: int = 0
    turn: int = 0
    workers: tuple[WorkerState | None, ...] = ()

    @property
    def is_finished(self) -> bool:
        ended = [worker and worker.epoch == self.epoch and worker.ended for worker in self.workers]
        return bool(ended) and all(ended)

    @property
    def is_under_way(self) -> bool:
        return any(worker and worker.epoch == self.epoch for worker in self.workers) and not self.is_finished

    def after(self, tag: Tag, count: int) -> _Position:
        """Behind a batch of one of `count` workers."""
        workers = list(self.workers or (None,) * count)
        workers[tag.worker] = tag.state
        return _Position(self.epoch, (tag.worker + 1) % count, tuple(workers))


class ResumableIterable(IterableDataset[T], Generic[T]):
    """A dataset whose position is in the checkpoint, for a DataLoader in a loop of `advancing`.

    The dataset shares the data out to ranks and workers by itself, as torch asks of any IterableDataset. If
    it has `set_epoch`, each worker calls that before an epoch. The state is this rank's own.

    Args:
        dataset: has `state_dict` and `load_state_dict`, or its iterator has; after ``load_state_dict(state)``
            it goes on behind the sample that it gave last before ``state_dict()``.
        num_replicas, rank: of the process group by default, or 1 and 0 without one.
    Raises:
        ConfigError: there is no such rank, a process group is needed first, or the dataset is one of Hugging
            Face's that shuffles in a buffer.
    """

    def __init__(
        self, dataset: IterableDataset[T], num_replicas: int | None = None, rank: int | None = None
    ) -> None:
        self._asked = num_replicas, rank
        self.num_replicas, self.rank = world_of(num_replicas, rank)
        if has_unsaved_buffer(dataset):
            raise ConfigError(
                "the dataset shuffles in a buffer that its state leaves out: each restart would lose what is "
                "in it.",
                hint="Leave out shuffle() of the iterable dataset: take a map-style one and a sampler, or "
                "shuffle in a dataset of your own whose state has the buffer.",
            )
        self._reader = Reader(dataset)
        self._counted = _Position()
        #: Batches that were handed out and are not counted, and the position behind them.
        self._pending = 0
        self._ahead = self._counted
        self._in_hand = False
        self._loop: _Loop[T] | None = None
        self._loaded_finished = False
        #: A state was loaded of a training that had begun.
        self._is_resumed = False
        #: The loader whose workers read last, where they persist.
        self._persisting: weakref.ref[DataLoader[T]] | None = None
        #: Whether what read last is where the next iteration starts.
        self._is_carried = False

    @property
    def dataset(self) -> IterableDataset[T]:
        """The dataset of the user."""
        return self._reader.dataset

    @property
    def epoch(self) -> int:
        """The epoch that the next sample is of."""
        return self._start.epoch + (self._loaded_finished and self._start.is_finished)

    @property
    def _start(self) -> _Position:
        """Where an iteration starts. What a loop that was left had pending is taken again; what waits for a
        step at the end of an epoch is not."""
        was_left = self._loop is not None and self._loop.was_left
        return self._counted if was_left or not self._pending else self._ahead

    def __iter__(self) -> Iterator[Any]:
        """For the loader of a loop of `advancing`."""
        return self._reader.begin()

    def __getstate__(self) -> dict[str, object]:
        return {"_reader": self._reader}  # a worker that is not forked needs no more

    def set_epoch(self, epoch: int) -> None:
        """Take the samples of this epoch.

        Raises:
            ConfigError: another epoch is under way; the text has both numbers.
        """
        now = self._start
        if check_whole("epoch", epoch) == now.epoch:
            return
        self._refuse_doubt()
        if now.is_under_way:
            raise ConfigError(
                f"epoch {now.epoch} is under way, and epoch {epoch} was asked for: its rest would be "
                "left out.",
                hint="After a restart, begin with `for epoch in range(data.epoch, epochs)`. To leave out the "
                "rest on purpose, call finish_epoch().",
            )
        self._place(_Position(epoch, workers=now.workers))

    def finish_epoch(self) -> None:
        """Leave out what is left of the epoch: another one may be set. To be called on all ranks."""
        now = self._counted
        unread = WorkerState(now.epoch, {}, ended=True)
        ended = tuple(replace(worker or unread, epoch=now.epoch, ended=True) for worker in now.workers)
        self._move_to(replace(now, workers=ended))

    def advance(self, batches: int = 1) -> None:
        """Say how many batches in hand are in the model, after a loop that cannot tell was left: all or none.

        Raises:
            ConfigError: another number of batches is in hand.
        """
        if check_whole("advance", batches) not in (0, self._pending):
            raise ConfigError(
                f"advance({batches}), and {self._pending} batches are in hand: the position is behind all of "
                "them or before them."
            )
        self._move_to(self._ahead if batches else self._counted)

    def state_dict(self) -> dict[str, object]:
        """What this rank needs to go on behind what is in the model; each rank has its own.

        Raises:
            ConfigError: a loop without its optimizer holds a batch, or the optimizer made a step after the
                loop was left: what is in hand may be in the model or not.
        """
        if self._in_hand:
            raise self._in_doubt()
        now = self._counted
        return {
            "version": _VERSION,
            "rank": self.rank,
            "world_size": self.num_replicas,
            "epoch": now.epoch,
            "turn": now.turn,
            "workers": [worker and dict(vars(worker)) for worker in now.workers],
        }

    def _in_doubt(self) -> ConfigError:
        return ConfigError(
            "the dataset cannot tell whether the batch in hand is in the model.",
            hint="Pass the optimizer: advancing(loader, optimizer), and make its step before the loop is "
            "left. Else say first how many batches in hand are in the model: data.advance(1), or "
            "advance(0).",
        )

    def _refuse_doubt(self) -> None:
        """Raises ConfigError: what was handed out may be in the model or in the gradients, and would be
        handed out again, or left out."""
        if self._in_hand:
            raise self._in_doubt()
        if self._loop is not None and self._loop.was_left and self._pending:
            raise ConfigError(
                f"{self._pending} batches were handed out in epoch {self._counted.epoch}, and no optimizer "
                "step came after them: they would come again while the gradients may have them, or never.",
                hint="Leave a loop after a step, and before the next batch is asked for. Else zero the "
                "gradients and say data.advance(0) when the loop is left, or data.advance(that many) if "
                "they are in the model.",
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state that this rank saved, in a job of as many ranks.

        Raises:
            ConfigError: the state is of another rank or number of ranks, or none of this class.
        """
        if state.get("version") != _VERSION or "workers" not in state:
            raise ConfigError(
                f"this is no state of a ResumableIterable that this release reads: its version is "
                f"{state.get('version')!r}, its keys are {sorted(map(str, state))}."
            )
        saved, here = (state["rank"], state["world_size"]), (self.rank, self.num_replicas)
        if saved != here:
            raise ConfigError(
                f"the state is of rank {saved[0]} of {saved[1]}, and this is rank {here[0]} of {here[1]}: "
                "only the dataset knows how it shares out its samples.",
                hint="Each rank saves a state of its own and loads that, on as many ranks. To begin an epoch "
                "on others, load no state and call set_epoch.",
            )
        workers = tuple(worker and WorkerState(**worker) for worker in state["workers"])
        self._move_to(_Position(state["epoch"], state["turn"], workers))
        self._loaded_finished = self._counted.is_finished
        self._is_resumed = bool(self._counted.epoch or workers)

    def loop(self, loader: DataLoader[T], optimizer: Optimizer | None) -> Iterator[T]:
        """The batches of a loader over this dataset, for `advancing`, which says the rest.

        Raises:
            ConfigError: the epoch is finished, the loader has another number of workers than the state, or
                its workers persist and are ahead of the model.
        """
        if type(loader).__module__.partition(".")[0] == "accelerate":
            raise ConfigError(
                f"a {type(loader).__name__} of accelerate reads ahead and shares out batches by itself.",
                hint="Leave the loader out of accelerator.prepare, and move batches in the loop.",
            )
        if self._start.is_finished:
            if not self._loaded_finished:
                raise ConfigError(
                    f"epoch {self.epoch} is finished.", hint=f"Call set_epoch({self.epoch + 1})."
                )
            log.warning(
                "epoch %d was finished when it was saved: nothing is left in it; begin with epoch %d",
                *(self._start.epoch, self.epoch),
            )
            return
        batches, count = self._begin(loader), max(1, loader.num_workers)
        self._loop = loop = _Loop(self, optimizer)
        try:
            for batch, tag in batches:
                if self._loop is not loop:
                    raise ConfigError(
                        "the position of the dataset was set while a loop over it was under way.",
                        hint="Leave the loop, and begin another.",
                    )
                if tag.state is None:
                    continue
                self._hand_out(self._start.after(tag, count), has_batch=tag.has_batch)
                if tag.has_batch:
                    self._in_hand = optimizer is None
                    yield batch
                    if optimizer is None and self._loop is loop:
                        self.count_step()
            loop.has_ended = self._is_carried = self._loop is loop
        finally:
            loop.end()

    def _begin(self, loader: DataLoader[T]) -> Iterator[tuple[T, Tag]]:
        """An iterator of the loader, whose workers start where the loop starts."""
        check_world((self.num_replicas, self.rank), self._asked)
        self._refuse_doubt()
        now, has_workers = self._start, loader.num_workers > 0
        if now.workers and len(now.workers) != max(1, loader.num_workers):
            raise ConfigError(
                f"the state is of {len(now.workers)} workers of a loader, and this one has "
                f"{max(1, loader.num_workers)}; only the dataset knows how it shares out its samples.",
                hint="Pass the same num_workers (0 is as 1). To begin an epoch with others, load no state, "
                "and call set_epoch.",
            )
        persists = self._persisting is not None and self._persisting() is loader
        if persists and not self._is_carried:
            raise ConfigError(
                "the workers of the loader persist and are ahead of the model: they cannot be sent back.",
                hint="Make a new DataLoader where a loop was left, or a state is loaded, or leave out "
                "persistent_workers=True.",
            )
        if self._loop is not None:
            self._loop.release()
        if not has_workers and not now.workers:
            # No worker gets a copy: what the dataset is now is gone with its first sample.
            now = replace(now, workers=(self._reader.initial_state(),))
            self._loop = None
            self._place(now)
            self._is_carried = True
        # Workers that are new each time are copies of a dataset that was never read, unless they go on within
        # an epoch. Others go on, into another epoch too: from their states where they are not there yet.
        states = now.workers
        if has_workers and not loader.persistent_workers:
            states = tuple(worker if worker and worker.epoch == now.epoch else None for worker in states)
        elif self._is_carried and (persists or not has_workers):
            states = ()
        self._reader.epoch.fill_(now.epoch)
        self._reader.start = WorkerStart(states, now.turn, loader.batch_size or 1)
        self._persisting = weakref.ref(loader) if loader.persistent_workers else None
        self._is_carried = self._in_hand = False
        collate, state = loader.collate_fn, torch.get_rng_state()
        loader.collate_fn = TaggingCollate(self._reader, collate, loader.batch_size, loader.drop_last)
        try:
            batches: Iterator[Any] = iter(loader)
        finally:
            loader.collate_fn, self._reader.start = collate, None
        was_drawn = now.is_under_way or (loader.persistent_workers and self._is_resumed)
        if was_drawn and loader.generator is None:
            # The loader draws a seed for its workers from torch's generator. A run that was not interrupted
            # drew one at the start of the epoch only, and for workers that persist at that of its first one.
            torch.set_rng_state(state)
        return batches

    def _hand_out(self, position: _Position, *, has_batch: bool) -> None:
        if has_batch:
            self._ahead, self._pending = position, self._pending + 1
        else:
            self._place(position)

    def _place(self, position: _Position) -> None:
        """Move the start without counting anything."""
        if self._start is self._ahead and self._pending:
            self._ahead = position
        else:
            self._counted = position

    def _move_to(self, position: _Position) -> None:
        """Go where the program says, whatever a loop handed out."""
        if self._loop is not None:
            self._loop.release()
        self._loop, self._pending, self._in_hand, self._is_carried = None, 0, False, False
        self._counted, self._loaded_finished = position, False

    @property
    def pending(self) -> int:
        """Batches that were handed out, and that no step of the optimizer came after."""
        return self._pending

    def count_step(self) -> None:
        """All that was handed out is in the model."""
        if self._pending:
            self._counted, self._pending = self._ahead, 0
        self._in_hand = False

    def doubt(self) -> None:
        """What is in hand may be in the model or not."""
        self._in_hand = True


class _Loop(Generic[T]):
    """One loop over a dataset, which sees the steps of its optimizer."""

    def __init__(self, data: ResumableIterable[T], optimizer: Optimizer | None) -> None:
        self._data = data
        self._hook = StepListener(optimizer, self._stepped) if optimizer is not None else None
        self.was_left = False
        self.has_ended = False

    def end(self) -> None:
        self.was_left = not self.has_ended
        if not self._data.pending:
            self.release()
        elif self.has_ended and self._hook is not None:
            log.warning(
                "epoch %d ended with %d batches that no step of the optimizer came after: they count with "
                "the next step",
                self._data.epoch,
                self._data.pending,
            )

    def release(self) -> None:
        if self._hook is not None:
            self._hook.remove()

    def _stepped(self) -> None:
        if self.was_left:
            self._data.doubt()
        else:
            self._data.count_step()
        if self.was_left or self.has_ended:
            self.release()
