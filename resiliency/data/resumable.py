# SPDX-License-Identifier: Apache-2.0
"""What all samplers that resume have in common: epochs, the position in them, and the state.

Invariant: `progress` is what the model was trained on and nothing else. What iteration hands out, and what a
DataLoader fetches ahead of the program, leaves it alone; `advance` moves it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist
from torch.utils.data import Sampler

from resiliency.data.order import EpochOrder
from resiliency.data.progress import Progress, check_rank, check_whole
from resiliency.errors import ConfigError

log = logging.getLogger(__name__)

Item = TypeVar("Item", covariant=True)


class ResumableSampler(Sampler[Item]):
    """Epochs, position and state; the subclasses say what is at a position.

    Attributes:
        rank, num_replicas: this rank, and how many positions are dealt to.
    """

    def __init__(
        self, progress: Progress, num_replicas: int | None, rank: int | None, drop_last: bool
    ) -> None:
        self.num_replicas, self.rank = world_of(num_replicas, rank)
        self.drop_last = drop_last
        self._progress = progress
        #: Counted and not yet added to the progress: a loop adds to it at every step, and few steps are
        #: saved.
        self.counted = 0
        self._order: EpochOrder | None = None
        self._loaded_finished = False
        self._said_finished = False
        #: Whether `len` is that of a whole epoch, for loops that look at it once and count by themselves.
        self.has_full_length = False
        #: A batch is with the program, and nothing will tell when it is in the model.
        self.in_hand = False

    @property
    def progress(self) -> Progress:
        """What is in the model; equal on all ranks between two steps."""
        if self.counted:
            counted, self.counted = self.counted, 0
            in_hand = self.in_hand  # of the batch after those
            self.advance(counted)
            self.in_hand = in_hand
        return self._progress

    @property
    def epoch(self) -> int:
        """The epoch that the next sample is of."""
        return self.progress.epoch

    @property
    def padding(self) -> int:
        """Positions that are dealt twice at the end of this epoch, so that all ranks get equally many."""
        return 0 if self.drop_last else self.progress.padding(self.num_replicas)

    @property
    def full_length(self) -> int:
        """What `len` is at the start of this epoch on these ranks."""
        return self._length(self.progress.at_epoch(self.epoch))

    def __len__(self) -> int:
        """What is left of the epoch for this rank; all of it at the start, or with `has_full_length`."""
        return self.full_length if self.has_full_length else self.left

    @property
    def left(self) -> int:
        """What is left of the epoch for this rank."""
        return self._length(self.progress)

    def set_epoch(self, epoch: int) -> None:
        """Take the samples of this epoch.

        Raises:
            ConfigError: another epoch is under way; the text has both numbers.
        """
        check_whole("epoch", epoch)
        if epoch == self.epoch:
            return
        if self.progress.position and self.left:
            raise ConfigError(
                f"epoch {self.epoch} is at position {self.progress.position} of {self.progress.size}, and "
                f"epoch {epoch} was asked for: {self.progress.left} positions would be left out.",
                hint="After a restart, begin with `for epoch in range(sampler.epoch, epochs)`. To leave "
                "out the rest on purpose (a loader with drop_last does), call finish_epoch().",
            )
        self._move_to(self.progress.at_epoch(epoch))

    @contextmanager
    def in_epoch(self, epoch: int) -> Iterator[ResumableSampler[Item]]:
        """`set_epoch` for a block. However the block ends, what was advanced counts, and nothing else."""
        self.set_epoch(epoch)
        yield self

    def advance(self, count: int = 1) -> None:
        """Say that `count` more samples (batches of a batch sampler) of this rank are in the model.

        After a loop of `advancing` without its optimizer that was left early: those of the batch that it
        handed out last, or 0 if the model was not trained on it.

        Raises:
            ConfigError: that is more than this rank has left in the epoch.
        """
        left = self.left
        if check_whole("advance", count) > left:
            raise self._too_far(count, left)
        self._move_to(self.progress.after(count * self.num_replicas), keep=True)
        if 0 < count == left:  # with drop_last some positions are left, which are dealt to no rank
            self.finish_epoch()

    def finish_epoch(self) -> None:
        """Leave out what is left of the epoch: another one may be set. To be called on all ranks."""
        self._move_to(self.progress.after(self.progress.left), keep=True)

    def reset_progress(self) -> None:
        """Go to the start of this epoch: all its samples come again."""
        self._move_to(self.progress.at_epoch(self.epoch))

    def state_dict(self) -> dict[str, int | bool | str]:
        """Plain values that are equal on all ranks, to be saved with the model after an optimizer step.

        Raises:
            ConfigError: `advancing` without its optimizer holds a batch, which may be in the model or not.
        """
        if self.in_hand:
            raise ConfigError(
                "the sampler cannot tell whether the batch in hand is in the model.",
                hint="Pass the optimizer: advancing(loader, optimizer). Without it, save when the loop has "
                "ended by itself, or leave it and say first whether its last batch is in the model: "
                "sampler.advance(its samples), or advance(0).",
            )
        return self.progress.to_state()

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
        self._loaded_finished = not self.left

    def _move_to(self, progress: Progress, *, keep: bool = False) -> None:
        if not keep:
            self._loaded_finished = self._said_finished = False
        if self._order is not None and self._order.epoch != progress.epoch:
            self._order = None  # the memory of a permutation
        self._progress = progress
        self.in_hand = False

    def ready(self) -> bool:
        """Whether there is something to take.

        Raises:
            ConfigError: this program has finished the epoch: a loop that sets none would train on nothing.
        """
        # What `drop_last` leaves out of an epoch that another number of ranks began is dealt to no rank: no
        # `advance` will ever finish it.
        if self.left or not self.progress.position:
            return True
        if not self._loaded_finished:
            raise ConfigError(
                f"epoch {self.epoch} is finished.",
                hint=f"Call set_epoch({self.epoch + 1}), or reset_progress() to take its samples again.",
            )
        if not self._said_finished:
            self._said_finished = True
            log.warning(
                "epoch %d was finished when it was saved: nothing is left in it for these ranks", self.epoch
            )
        return False

    def _length(self, progress: Progress) -> int:
        return len(progress.deal(self.rank, self.num_replicas, drop_last=self.drop_last))

    def _epoch_order(self, size: int) -> EpochOrder:
        if self._order is None:
            now = self.progress
            self._order = EpochOrder(size, epoch=now.epoch, seed=now.seed, shuffle=now.shuffle, kind=now.kind)
        return self._order

    def _too_far(self, count: int, left: int) -> ConfigError:
        return ConfigError(
            f"advance({count}) on rank {self.rank} in epoch {self.epoch}, where {left} are left for this "
            "rank.",
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
