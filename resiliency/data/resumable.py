# SPDX-License-Identifier: Apache-2.0
"""What all samplers that resume have in common: epochs, the position in them, and the state.

Invariant: `progress` is what the model was trained on and nothing else. What iteration hands out, and what a
DataLoader fetches ahead of the program, leaves it alone; `advance` moves it, and a `Loop` that counts at the
optimizer's steps.

Batches at the end of an epoch that no step came after wait for one. The next epoch may begin meanwhile:
iteration starts there, and `progress` stays in the epoch before until that step.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sized
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Sampler

from resiliency.data._compat import refuse_foreign_loaders, refuse_persisting_workers
from resiliency.data.order import EpochOrder
from resiliency.data.progress import Progress, check_rank, check_whole
from resiliency.errors import ConfigError

log = logging.getLogger(__name__)

Item = TypeVar("Item", covariant=True)


class Loop:
    """What a loop that counts by itself has handed out of the epoch, and no optimizer step came after.

    Attributes:
        handed_out: samples of this rank (batches of a batch sampler).
        ended: all of the epoch was handed out.
        left: the loop was left before that.
        generator_state: of torch's default generator, to be put back when the loader has begun.
    """

    def __init__(self) -> None:
        self.handed_out = 0
        self.ended = False
        self.left = False
        self.generator_state: Tensor | None = None

    def wait(self) -> None:
        """Hold nothing of this epoch, and count a step before the next loop for what waits of another one."""
        self.handed_out, self.ended, self.left = 0, False, True

    def release(self) -> None:
        """Let go of the optimizer: no step counts for this loop any more."""


class ResumableSampler(Sampler[Item]):
    """Epochs, position and state; the subclasses say what is at a position.

    Attributes:
        dataset: what the samples are of.
        rank, num_replicas: this rank, and how many positions are dealt to.
        loop: that counts by itself, and is under way or has batches that wait for a step.
    """

    def __init__(
        self, dataset: Sized, progress: Progress, num_replicas: int | None, rank: int | None, drop_last: bool
    ) -> None:
        self.num_replicas, self.rank = world_of(num_replicas, rank)
        self._asked = num_replicas, rank
        self.dataset = dataset
        self._samples = len(dataset)
        self.drop_last = drop_last
        self._progress = progress
        #: Counted and not yet added to the progress: a loop adds to it at every step, and few steps are
        #: saved.
        self._counted = 0
        #: Start of the epoch that was set while batches of the one before wait for a step.
        self._next_epoch: Progress | None = None
        #: Where the iteration that began last started: `len` does not move while a loop runs.
        self._began: Progress | None = None
        self.loop: Loop | None = None
        self._order: EpochOrder | None = None
        #: An iteration began that no loop counts, and `advance` said nothing since.
        self._uncounted = False
        #: What a state said: epochs before it are in the model.
        self._loaded_epoch = 0
        self._loaded_finished = False
        #: A state was loaded of a training that had begun.
        self.is_resumed = False
        self._said_finished = self._said_empty = False
        #: The share of the dataset that the iteration before was of.
        self._last_share: str | None = None
        #: Whether `len` is that of a whole epoch, for loops that look at it once and count by themselves.
        self.has_full_length = False
        #: A batch is with the program, and nothing will tell when it is in the model.
        self.in_hand = False

    @property
    def progress(self) -> Progress:
        """What is in the model; equal on all ranks between two steps."""
        if self._counted:
            counted, self._counted = self._counted, 0
            self._add(counted)
        return self._progress

    @property
    def start(self) -> Progress:
        """Where an iteration starts: what is in the model, or in a loop's gradients at an epoch's end, is not
        taken again."""
        return self.progress if self._next_epoch is None else self._next_epoch

    @property
    def epoch(self) -> int:
        """The epoch that the next sample is of. After a state of a finished epoch that is the next one, which
        `set_epoch` begins."""
        return self.start.epoch + self._loaded_finished

    @property
    def padding(self) -> int:
        """Positions that are dealt twice at the end of this epoch, so that all ranks get equally many."""
        return 0 if self.drop_last else self.start.padding(self.num_replicas)

    @property
    def full_length(self) -> int:
        """What `len` is at the start of this epoch on these ranks."""
        return self._length(self.start.at_epoch(self.epoch))

    def __len__(self) -> int:
        """What the iteration that began last gives this rank; before one, what is `left`. With
        `has_full_length` always that of a whole epoch."""
        return self._length(self.length_from)

    @property
    def length_from(self) -> Progress:
        """What `len` is counted from."""
        if self.has_full_length:
            return self.start.at_epoch(self.epoch)
        return self.start if self._began is None else self._began

    @property
    def left(self) -> int:
        """What is left of the epoch for this rank now."""
        return self._length(self.start)

    @property
    def waits_for_step(self) -> bool:
        """Whether all of an epoch was handed out, and no optimizer step came after its last batches."""
        return self._next_epoch is not None or (self.loop is not None and self.loop.ended)

    def set_epoch(self, epoch: int) -> None:
        """Take the samples of this epoch.

        Raises:
            ConfigError: another epoch is under way, or the loaded state is of a later one: the text has both
                numbers. Or a loop was left with batches that may be in the model.
        """
        check_whole("epoch", epoch)
        if self.loop is None or self.loop.left or self.loop.ended:
            self._began = None
        if epoch == self.start.epoch:
            return
        if epoch < self._loaded_epoch:
            raise ConfigError(
                f"epoch {epoch} was asked for, and the state that was loaded is of epoch "
                f"{self._loaded_epoch}: epoch {epoch} would be trained on again.",
                hint="After a restart, begin with `for epoch in range(sampler.epoch, epochs)`. To train on "
                "it again on purpose, call reset_progress() first. (A loader of accelerate or of Fabric "
                "sets an epoch by itself, and counts from 0 after a restart: advancing() tells the former.)",
            )
        if self._loaded_finished and epoch > self.epoch:
            raise ConfigError(
                f"epoch {epoch} was asked for, and the state that was loaded is of epoch "
                f"{self.epoch - 1}, which is finished: epoch {self.epoch} would be left out.",
                hint="Begin with `for epoch in range(sampler.epoch, epochs)`: sampler.epoch is the next one.",
            )
        self._refuse_doubt()
        if self._uncounted and not self.start.position:
            self._warn_of_uncounted()
        if self.waits_for_step:
            self._set_next_epoch(epoch)
            return
        if self.progress.position and self.left:
            raise ConfigError(
                f"epoch {self.progress.epoch} is at position {self.progress.position} of "
                f"{self.progress.size}, and epoch {epoch} was asked for: {self.progress.left} positions "
                "would be left out.",
                hint="After a restart, begin with `for epoch in range(sampler.epoch, epochs)`. To leave "
                "out the rest on purpose (a loader with drop_last does), call finish_epoch().",
            )
        self._move_to(self.progress.at_epoch(epoch))

    def _set_next_epoch(self, epoch: int) -> None:
        if self.loop is not None:
            self.loop.wait()
        self._next_epoch = None if epoch == self.progress.epoch else self.progress.at_epoch(epoch)

    @contextmanager
    def in_epoch(self, epoch: int) -> Iterator[ResumableSampler[Item]]:
        """`set_epoch` for a block. However the block ends, what was advanced counts, and nothing else."""
        self.set_epoch(epoch)
        yield self

    def advance(self, count: int = 1) -> None:
        """Say that `count` more samples (batches of a batch sampler) of this rank are in the model.

        After a loop of `advancing` that was left with batches in no step, or before a step that was made
        outside: the samples of these batches, or 0 if neither model nor gradients have any of them.

        Raises:
            ConfigError: that is more than this rank has left in the epoch, or a loop counts by itself.
        """
        check_whole("advance", count)
        if self.loop is not None and not (self.loop.ended or self.loop.left):
            raise ConfigError(
                f"advance({count}) inside a loop that counts by itself: these samples would count twice.",
                hint="Leave it out with advancing(); use it in loops over the loader itself, and after "
                "a loop was left.",
            )
        self._check_left(count)
        if self._next_epoch is not None:
            if not count and not self.in_hand:  # what waits goes on waiting
                if self.loop is not None:
                    self.loop.wait()
                return
            self._place(self._next_epoch)
        self._let_go()
        self._add(count)
        self.in_hand = self._uncounted = False

    def _check_left(self, count: int) -> None:
        left = self.left
        if count > left:
            raise self._too_far(count, left)

    def _add(self, count: int) -> None:
        """Move the progress by `count` of this rank."""
        left = self._length(self._progress)
        if count > left:
            raise self._too_far(count, left)
        moved = self._progress.after(count * self.num_replicas)
        if 0 < count == left:  # with drop_last some positions are left, which are dealt to no rank
            moved = moved.after(moved.left)
        self._place(moved)

    def begin_loop(self, loop: Loop) -> None:
        """Count what this loop hands out, and nothing of one before it.

        Raises:
            ConfigError: the epoch was handed out, and none was set since; or the loop before was left with
                batches that may be in the model or in its gradients.
        """
        if self.loop is not None and self.loop.ended:
            raise self._finished()
        self._refuse_doubt()
        self._let_go()
        self.loop = loop
        self.in_hand = self._uncounted = False

    def _refuse_doubt(self) -> None:
        """Raises ConfigError: what was handed out may be in the model or in the gradients, and would be
        handed out again, or left out."""
        if self.in_hand:
            raise self._in_doubt()
        if self.loop is None or self.loop.ended or not self.loop.handed_out:
            return
        raise ConfigError(
            f"{self.loop.handed_out} samples of this rank were handed out in epoch {self.start.epoch}, and "
            "no optimizer step came after them: they would come again while the gradients may have them, or "
            "never.",
            hint="Leave a loop after a step, and before the next batch is asked for. Else zero the gradients "
            "and say sampler.advance(0) when the loop is left, or sampler.advance(their samples) if they are "
            "in the model.",
        )

    def _in_doubt(self) -> ConfigError:
        return ConfigError(
            "the sampler cannot tell whether the batch in hand is in the model.",
            hint="Pass the optimizer, and make its steps inside the loop: advancing(loader, optimizer). "
            "Else leave the loop, and say first what of the batches in hand is in the model: "
            "sampler.advance(its samples), or advance(0).",
        )

    def count_step(self) -> None:
        """All that the loop handed out is in the model."""
        assert self.loop is not None
        if self._next_epoch is not None:
            self._place(self._next_epoch)
        self._counted += self.loop.handed_out
        self.loop.handed_out = 0
        self.in_hand = False
        if self.loop.ended:
            self._place_at_end()
            self._let_go()

    def end_loop(self) -> int:
        """All of the epoch was handed out: it is finished, or waits for a step.

        Returns:
            How many of this rank wait.
        """
        assert self.loop is not None
        self.loop.ended = True
        if not self.loop.handed_out and self._next_epoch is None:
            self._place_at_end()
            self._let_go()
            return 0
        return self.loop.handed_out

    def _let_go(self) -> None:
        if self.loop is not None:
            self.loop.release()
            self.loop = None

    def finish_epoch(self) -> None:
        """Leave out what is left of the epoch: another one may be set. To be called on all ranks."""
        self._let_go()
        if self._next_epoch is not None:
            self._place(self._next_epoch)
        self._place_at_end()
        self.in_hand = self._uncounted = self._loaded_finished = False

    def reset_progress(self) -> None:
        """Go to the start of this epoch: all its samples come again."""
        self._move_to(self.start.at_epoch(self.start.epoch))
        self._loaded_epoch = 0

    def state_dict(self) -> dict[str, int | bool | str]:
        """Plain values that are equal on all ranks, to be saved with the model after an optimizer step.

        Raises:
            ConfigError: `advancing` without its optimizer holds a batch, or a step was made after a loop was
                left with one: it may be in the model or not.
        """
        if self.in_hand:
            raise self._in_doubt()
        if self._uncounted:
            self._warn_of_uncounted()
        return self.progress.to_state()

    def _warn_of_uncounted(self) -> None:
        self._uncounted = False
        log.warning(
            "the sampler is at position %d of epoch %d, and nothing counts what an iteration gave since: if "
            "the model was trained on it, a restart will train on it again; loop over advancing(loader, "
            "optimizer), or call sampler.advance(its samples) after each step",
            self.progress.position,
            self.progress.epoch,
        )

    def load_state_dict(self, state: Mapping[str, object], *, world_size: int | None = None) -> None:
        """Go on from a state that any rank of any world size saved.

        Args:
            world_size: of the program that wrote a state of cycling_utils (`progress`, `epoch`) or of DLRover
                (`completed_num`, `epoch`), which do not name it. Such a state is read where it says for
                certain which samples were seen.
        Raises:
            ConfigError: the state belongs to other data or another order, or does not say what was seen.
        """
        if "version" in state:
            progress = self.progress.resume(state)
        else:
            progress = self._of_other_library(state, world_size)
        self._move_to(progress)
        self._loaded_epoch = progress.epoch
        self._loaded_finished = not self.left
        self.is_resumed = bool(progress.epoch or progress.position)

    def _move_to(self, progress: Progress) -> None:
        """Go where the program says, whatever a loop handed out."""
        self._let_go()
        self._loaded_finished = self._said_finished = self.in_hand = self._uncounted = False
        self._began = None
        self._place(progress)

    def _place(self, progress: Progress) -> None:
        self._counted, self._next_epoch = 0, None
        self._progress = progress

    def _place_at_end(self) -> None:
        progress = self.progress
        self._place(progress.after(progress.left))

    def begin_iteration(self) -> Progress | None:
        """Where an iteration that begins now starts; None where nothing is left in the epoch.

        Raises:
            ConfigError: this program has finished the epoch (a loop that sets none would train on nothing), a
                loader of another library deals or counts by itself, a loop before was left with batches that
                may be in the model, or the process group is another one than that of the constructor.
        """
        start = self.start
        check_world((self.num_replicas, self.rank), self._asked)
        if self.loop is not None and self.loop.left:
            self._refuse_doubt()
        refuse_foreign_loaders(at_start=not start.position)
        if self.loop is not None and self.loop.generator_state is not None:
            torch.set_rng_state(self.loop.generator_state)
            self.loop.generator_state = None
        if self.loop is not None and self.loop.ended:
            raise self._finished()
        # What `drop_last` leaves out of an epoch that another number of ranks began is dealt to no rank: no
        # `advance` will ever finish it.
        if start.position and not self._length(start):
            if not self._loaded_finished:
                raise self._finished()
            if not self._said_finished:
                self._said_finished = True
                log.warning(
                    "epoch %d was finished when it was saved: nothing is left in it for these ranks; begin "
                    "with epoch %d, as `for epoch in range(sampler.epoch, epochs)` does",
                    start.epoch,
                    self.epoch,
                )
            return None
        if start.size and not self._length(start) and not self._said_empty:
            self._said_empty = True
            log.warning(
                "an epoch of %d gives %d ranks nothing: with drop_last it is less than one for each, or than "
                "a global batch",
                start.size,
                self.num_replicas,
            )
        self._began = start = self._in_share(start)
        self._uncounted = (self.loop is None or self.loop.left) and self._length(start) > 0
        return start

    def _in_share(self, start: Progress) -> Progress:
        share = getattr(self.dataset, "share_id", "")
        if self._last_share not in (None, share):
            refuse_persisting_workers()
        self._last_share = share
        if share == start.share:
            return start
        if start.position:
            raise ConfigError(
                f"epoch {start.epoch} is at position {start.position} of another share of the data: "
                f"{start.share or 'none'!r}, and the dataset holds {share!r}.",
                hint="Construct the dataset as it was, and reshard it as for this epoch. To take the new "
                "share from the start of an epoch, call finish_epoch() and set the next one.",
            )
        start = replace(start, share=share)
        if self._next_epoch is None:
            self._progress = start
        else:
            self._next_epoch = start
        return start

    def _finished(self) -> ConfigError:
        epoch = self.start.epoch
        return ConfigError(
            f"epoch {epoch} is finished.",
            hint=f"Call set_epoch({epoch + 1}), or reset_progress() to take its samples again.",
        )

    def _length(self, progress: Progress) -> int:
        return len(progress.deal(self.rank, self.num_replicas, drop_last=self.drop_last))

    def order_of(self, now: Progress) -> EpochOrder:
        """The order of an epoch; it keeps one, for the memory of a permutation."""
        if self._order is None or self._order.epoch != now.epoch:
            self._order = None
            self._order = EpochOrder(
                self._samples, epoch=now.epoch, seed=now.seed, shuffle=now.shuffle, kind=now.kind
            )
        return self._order

    def _too_far(self, count: int, left: int) -> ConfigError:
        return ConfigError(
            f"advance({count}) on rank {self.rank} in epoch {self.start.epoch}, where {left} are left for "
            "this rank.",
            hint="The last batch may be short: advance by the samples that it has, or use advancing().",
        )

    def _of_other_library(self, state: Mapping[str, object], world_size: int | None) -> Progress:
        for key in ("progress", "completed_num"):
            if key in state and "epoch" in state:
                break
        else:
            raise ConfigError(f"this is no state of a sampler: its keys are {sorted(map(str, state))}.")
        count, epoch = check_whole(key, state[key]), check_whole("epoch", state["epoch"])
        if count and world_size is None:
            raise ConfigError(
                f"the state says {key} {count} in epoch {epoch}, and not on how many ranks: which samples "
                f"were seen is not known. It would be resumed on {self.num_replicas}.",
                hint="Pass world_size= of the job that saved it.",
            )
        position = count * (world_size or 1) if key == "progress" else count
        self._check_same_order(key, count, epoch)
        if position >= self.progress.size + (world_size or 1):
            raise ConfigError(
                f"the state says {key} {count} in epoch {epoch} on {world_size} ranks, and an epoch has "
                f"{self.progress.size}."
            )
        return self.progress.at_epoch(epoch).after(position)

    def _check_same_order(self, key: str, count: int, epoch: int) -> None:
        """Raises ConfigError if a state of another library counts positions of another order."""


def warn_of_waiting(epoch: int, count: int) -> None:
    """Log that the last `count` of an epoch were handed out to this rank, and are not in the model."""
    log.warning(
        "epoch %d ended, and no optimizer step came after the last %d of this rank: they count with the next "
        "step, and are in no model if there is none or if their gradients are zeroed before it",
        epoch,
        count,
    )


def world_of(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    if num_replicas is None or rank is None:
        in_group = dist.is_available() and dist.is_initialized()
        if not in_group and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ConfigError(
                f"this is one of {os.environ['WORLD_SIZE']} ranks by its environment, and there is no "
                "process group.",
                hint="Call init_process_group first, or pass num_replicas and rank.",
            )
        num_replicas = (dist.get_world_size() if in_group else 1) if num_replicas is None else num_replicas
        rank = (dist.get_rank() if in_group else 0) if rank is None else rank
    check_rank(rank, num_replicas)
    return num_replicas, rank


def check_world(made_for: tuple[int, int], asked: tuple[int | None, int | None]) -> None:
    """Raises ConfigError: ranks were counted before the process group was there, and it counts others.

    Args:
        made_for: number of ranks, and the rank.
        asked: what the program gave for them; None: what the group says.
    """
    if None not in asked or not (dist.is_available() and dist.is_initialized()):
        return
    here = world_of(*asked)
    if here != made_for:
        raise ConfigError(
            f"this was made for rank {made_for[1]} of {made_for[0]}, and the process group says rank "
            f"{here[1]} of {here[0]}.",
            hint="Construct it after init_process_group, or pass num_replicas and rank.",
        )
