# SPDX-License-Identifier: Apache-2.0
"""When to save, in which tier, and what to keep.

One `ModelCheckpoint` per tier, each with its own interval.  The checkpoint of step N (N optimizer
steps are finished) is the directory ``step=N``; ``step=N-unfinished`` stands beside it while it is
being written.  A new checkpoint is committed before an old one is deleted, whatever kills the job
in between, and what is on disk is the only memory: nothing about retention is kept in the
checkpoint itself.

Several tiers may be due at one step, and training is held once: only the callback with the highest
priority saves.  Where one checkpoint process writes several of these tiers, its copy is for all of them.
"""

from __future__ import annotations

import logging
import secrets
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch.distributed as dist
from nemo.lightning.ckpt_utils import ckpt_to_dir
from nemo.lightning.pytorch.callbacks import ModelCheckpoint as NeMoModelCheckpoint
from nemo.utils.app_state import AppState
from nemo.utils.callbacks.dist_ckpt_io import AsyncFinalizableCheckpointIO

from resiliency.callbacks.consumed_samples import ExactMegatronSampler
from resiliency.checkpoint.branches import read_branches
from resiliency.checkpoint.format.catalog import (
    begin_branch,
    left_among,
    list_steps,
    needless_steps,
    remove_checkpoint,
)
from resiliency.checkpoint.format.marker import (
    Marker,
    MarkerState,
    lift_marker,
    parse_step,
    put_marker,
    read_marker,
    split_path,
    step_directory,
)
from resiliency.checkpoint.names import PRIORITY, attempt_on_branch
from resiliency.checkpoint.names import TierName as Tier
from resiliency.checkpoint.storage.posix import LocalStorage
from resiliency.errors import CheckpointError, CheckpointWriteFailed, ConfigError
from resiliency.events import EventStream, EventType
from resiliency.files import posix_path
from resiliency.plugins.dist_ckpt import is_rank_zero
from resiliency.plugins.persistent_ckpt_proc import PersistentCheckpointProcessIO, process_of
from resiliency.progress import report_kept, report_step, watch_rank

logger = logging.getLogger(__name__)


__all__ = ["ModelCheckpoint", "Tier"]


#: A step that was restored from there is in this tier; of nothing that was restored, nothing is to save.
_HELD_BY = {
    Tier.PERSISTENT: ("none", "persistent"),
    Tier.LOCAL: ("none", "local", "peers"),
}


class ModelCheckpoint(NeMoModelCheckpoint):
    """Saves at intervals, and once more when training ends.

    Args:
        dirpath: directory of this tier's checkpoints; the same path on every rank.  That of a local tier
            is written by a checkpoint process (`resiliency.plugins.in_cluster_local_ckpt`).
        interval_steps: save when the number of finished steps is a multiple of this.  None: the checkpoint
            process that writes the tier was given the interval, which may then be in seconds, or by the
            rate of failures (`resiliency.checkpoint.trainer.tier_policy.Interval`).
        tier: where `dirpath` is.
        keep: number of newest complete checkpoints to keep; -1 keeps all.
        priority: when several of these callbacks are due at one step, only the one with the highest
            priority saves; at equal priorities a persistent tier does.  It also saves the last step, even
            if another tier has just done so: what outlives the job should be in the tier that outlives the
            hosts.
        events: where saves are recorded; None records nothing.
    Raises:
        ConfigError: an interval below 1, or a `keep` that would delete every checkpoint; at the start, no
            interval or two.
    """

    dirpath: Any

    def __init__(
        self,
        dirpath: str | Path,
        interval_steps: int | None,
        *,
        tier: Tier = Tier.PERSISTENT,
        keep: int = -1,
        priority: int = 0,
        events: EventStream | None = None,
    ) -> None:
        if interval_steps is not None and interval_steps < 1:
            raise ConfigError(f"a checkpoint interval is at least 1 step, found {interval_steps}.")
        if keep == 0 or keep < -1:
            raise ConfigError(
                f"keep at least 1 checkpoint (or -1 for all), found {keep}.", flag="--topk-ckpt"
            )
        super().__init__(
            dirpath=str(posix_path(dirpath)),
            filename="{step}",
            monitor=None,
            save_last=False,
            save_top_k=-1,
            every_n_train_steps=interval_steps or 0,
            save_on_train_epoch_end=False,
            save_optim_on_train_end=True,
            always_save_context=False,
            save_context_on_train_end=False,
            enable_version_counter=False,
        )
        self.tier = tier
        self.priority = priority
        self.keep = keep
        self.interval_steps = interval_steps
        #: The process that knows the interval.
        self._paced_by: PersistentCheckpointProcessIO | None = None
        self._events = events
        #: Steps that this training has committed, oldest commit first.
        self._committed: list[int] = []
        #: That this training does.
        self._first_step = 1
        #: Whether it has come to a save of its own; one that only evaluates goes back to nothing.
        self._has_saved = False

    @property
    def state_key(self) -> str:
        return f"{type(self).__qualname__}[{self.tier.value}]"

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to restore: the directory says what exists."""

    def is_due(self, step: int) -> bool:
        """True when this tier saves after `step` finished steps."""
        if self.interval_steps is None:
            return self._paced_by is not None and self._paced_by.is_due(step, self.tier)
        return step % self.interval_steps == 0

    def setup(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        """NeMo's, unless a checkpoint process saves this tier.

        NeMo deletes unfinished checkpoints here, while the process of the attempt before may still be
        committing one; it deletes them itself, in order with its saves.
        """
        watch_rank()
        _warn_of_count(trainer)
        process = self._process(trainer)
        self._check_interval(process)
        if process is None:
            if self.tier is Tier.LOCAL and trainer.num_nodes > 1:
                raise ConfigError(
                    f"ModelCheckpoint saves to {self.dirpath}, the local tier of {trainer.num_nodes} hosts,"
                    " and no checkpoint process writes there.",
                    hint="Add resiliency.plugins.in_cluster_local_ckpt.InClusterLocalCheckpointIO to the"
                    " trainer's plugins.",
                )
            super().setup(trainer, *args, **kwargs)
            return
        self._check_process(process, trainer)
        self.async_save = False
        super(NeMoModelCheckpoint, self).setup(trainer, *args, **kwargs)
        # Lightning gives all ranks the directory of rank 0, and the disk of a host may be called otherwise.
        self.dirpath = str(process.directories[self.tier])

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        # NeMo moves and writes files there: it fails where no NeMoLogger set it, and at a second time.
        if AppState().log_dir is not None and _tiers_of(trainer)[0] is self:
            super().on_train_start(trainer, pl_module)
        process = process_of(trainer)
        self._first_step = trainer.global_step + 1
        # A job that resumes at its last step must not save that step again over itself; but a step
        # that came from elsewhere may not be in this tier yet.
        if process is None or process.restores.restored_from.value in _HELD_BY[self.tier]:
            self._last_global_step_saved = trainer.global_step

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Hold the step until what it writes has been copied."""
        process = process_of(trainer)
        if process is not None:
            process.fence()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        report_step(trainer.global_step)
        process = process_of(trainer)
        if process is not None:
            # Not before: then a fresh optimizer has no state yet.
            if not process.is_prewarmed and trainer.global_step >= self._first_step:
                process.prewarm(trainer.strategy)
            process.step_done(trainer.global_step)
        if self.is_due(trainer.global_step) and not self._outranked(trainer):
            self._save(trainer)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Saves depend on steps only."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Save the last step, unless that is done, and wait until every save is committed."""
        process = self._process(trainer)
        if process is not None:
            self._finish(trainer, process)
            return
        if not self._outranked(trainer, at_end=True):
            self._save(trainer, last=True)
        checkpoint_io = trainer.strategy.checkpoint_io
        if isinstance(checkpoint_io, AsyncFinalizableCheckpointIO):
            checkpoint_io.maybe_finalize_save_checkpoint(blocking=True)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Record a save that failed, wherever it surfaced: an asynchronous one does so steps later."""
        if isinstance(exception, CheckpointWriteFailed):
            step = exception.fields.get("step")
            self._emit(EventType.SAVE_FAILED, step if isinstance(step, int) else None, error=str(exception))

    def _save(self, trainer: Any, *, last: bool = False) -> None:
        if not self._should_skip_saving_checkpoint(trainer):
            path = Path(self.dirpath) / f"step={trainer.global_step}"
            process = self._process(trainer)
            if process is not None:
                self._capture(trainer, process, path)
            # One rank decides for all: another host's mount may show it something older.
            elif why := trainer.strategy.broadcast(self._clear(path) if trainer.is_global_zero else ""):
                self._refuse(trainer, path, why, last=last)
            else:
                self._save_checkpoint(trainer, f"{path}{self.FILE_EXTENSION}")

    def _clear(self, path: Path) -> str:
        """Delete what is at the place of a save if this training has gone back behind it; returns why nothing
        may be written there."""
        storage, step = LocalStorage(path.parent), parse_step(path.name)
        assert step is not None
        try:
            if not self._has_saved:
                begin_branch(storage, self._first_step - 1)
                self._has_saved = True
            if step in left_among(storage, [step]):
                remove_checkpoint(storage, step)
        except CheckpointError as error:
            return f"may hold a checkpoint ({error.message})"
        return _why_taken(path)

    def _refuse(self, trainer: Any, path: Path, why: str, *, last: bool) -> None:
        """Fail a save whose place is taken; training goes on.

        Raises:
            CheckpointWriteFailed: it is the last save, on all ranks.
        """
        error = CheckpointWriteFailed(
            f"{path} {why}: it stays, and the state of now is not saved.",
            hint="Save to another directory, or move checkpoints of steps that are trained again away.",
            step=trainer.global_step,
            path=str(path),
        )
        if last:
            raise error
        if trainer.is_global_zero:
            logger.error("%s", error)
        self._emit(EventType.SAVE_FAILED, trainer.global_step, error=str(error))

    def _capture(
        self,
        trainer: Any,
        process: PersistentCheckpointProcessIO,
        path: Path,
        *,
        last: bool = False,
        held: Collection[Tier] = (),
    ) -> None:
        """What Lightning does to save, without its barrier: the process needs none.

        Args:
            held: these have the step already, as all ranks know.
        """
        step = trainer.global_step
        sharing = [
            c
            for c in _tiers_of(trainer)
            if c._process(trainer) is process and (last or c.is_due(step)) and c.tier not in held
        ]
        tiers = tuple({self.tier: None} | {c.tier: None for c in sharing})
        self._emit(EventType.SAVE_STARTED, step)
        for callback in (self, *sharing):
            callback._last_global_step_saved = step
        dump = trainer._checkpoint_connector.dump_checkpoint(False)
        process.save(trainer.strategy, dump, path, tiers=tiers, last=last)
        self._emit(EventType.SAVE_RELEASED, step)

    def _finish(self, trainer: Any, process: PersistentCheckpointProcessIO) -> None:
        """The last step must be durable, and not only captured; other saves may have failed.

        Where the job is told to end, it is enough that the hosts have it when its time is over.

        Raises:
            CheckpointWriteFailed: it could not be saved, on all ranks.
        """
        if self._outranked(trainer, at_end=True):
            if not any(c._process(trainer) is process for c in self._above(trainer)):
                process.wait()
                process.finish()
                if isinstance(trainer.strategy.checkpoint_io, AsyncFinalizableCheckpointIO):
                    process.teardown()  # which the wrapper would not pass on
            return
        step, path = trainer.global_step, Path(self.dirpath) / f"step={trainer.global_step}"
        if not self._should_skip_saving_checkpoint(trainer):
            self._capture(trainer, process, path, last=True)
        process.wait()
        if process.newest_step == step:
            held = process.committed_in(step)
            if not self._is_enough(held, process):
                logger.error("the last step, %d, was not saved; trying once more", step)
                self._capture(trainer, process, path, last=True, held=held)
                process.wait()
                held = process.committed_in(step)
            if not self._is_enough(held, process):
                raise CheckpointWriteFailed(
                    f"the last step, {step}, could not be saved to {self.dirpath}.",
                    hint="The log says why.  Started again on these hosts, the job finds it in memory.",
                    step=step,
                    path=str(self.dirpath),
                )
            if self.tier not in held:
                logger.warning(
                    "the last step, %d, is in the local tier, and not yet in %s", step, self.dirpath
                )
                return  # the agent goes on with it, if it is left the time
        process.finish()

    def _is_enough(self, held: frozenset[Tier], process: PersistentCheckpointProcessIO) -> bool:
        return self.tier in held or (process.is_stopping and bool(held))

    def _process(self, trainer: Any) -> PersistentCheckpointProcessIO | None:
        """The checkpoint process, if it is the one that saves this tier."""
        process = process_of(trainer)
        return process if process is not None and self.tier in process.directories else None

    def _check_interval(self, process: PersistentCheckpointProcessIO | None) -> None:
        self._paced_by = process if process is not None and self.tier in process.paced else None
        if (self.interval_steps is None) == (self._paced_by is None):
            found = "none was" if self._paced_by is None else "both were"
            raise ConfigError(
                f"either ModelCheckpoint or the checkpoint process is given the interval of the"
                f" {self.tier.value} tier, and {found}.",
                hint="Give interval_steps here, or None here and `every` to the process or its LocalTier.",
            )

    def _check_process(self, process: PersistentCheckpointProcessIO, trainer: Any) -> None:
        written = process.directories[self.tier]
        if Path(self.dirpath).absolute() != written:
            raise ConfigError(
                f"ModelCheckpoint saves to {self.dirpath}, the checkpoint process to {written}.",
                hint="Give both the same directory.",
            )
        if self.keep != -1:
            raise ConfigError(
                f"ModelCheckpoint is to keep {self.keep} checkpoints, but the checkpoint process deletes.",
                hint="Give `keep` to PersistentCheckpointProcessIO alone.",
            )
        if trainer.strategy.checkpoint_io is process and getattr(trainer.strategy, "async_save", False):
            raise ConfigError(
                "the strategy has ckpt_async_save=True, NeMo's own asynchronous saves.",
                hint="Set ckpt_async_save=False: PersistentCheckpointProcessIO is asynchronous by itself.",
            )

    def _outranked(self, trainer: Any, *, at_end: bool = False) -> bool:
        return any(at_end or other.is_due(trainer.global_step) for other in self._above(trainer))

    def _above(self, trainer: Any) -> list[ModelCheckpoint]:
        return [other for other in _tiers_of(trainer) if other._precedence() > self._precedence()]

    def _precedence(self) -> tuple[int, int]:
        return self.priority, -PRIORITY.index(self.tier)

    def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
        step = trainer.global_step
        self._emit(EventType.SAVE_STARTED, step)
        super()._save_checkpoint(trainer, filepath)
        self._emit(EventType.SAVE_RELEASED, step)

    def _get_finalize_save_checkpoint_callback(
        self, trainer: Any, filepath: str, global_step: int
    ) -> Callable[[], None]:
        finalize = super()._get_finalize_save_checkpoint_callback(trainer, filepath, global_step)

        def commit() -> None:
            finalize()
            if trainer.is_global_zero:
                logger.info("committed checkpoint of step %d in %s", global_step, ckpt_to_dir(filepath))
                self._emit(EventType.CHECKPOINT_SAVED, global_step)
                if self.tier is Tier.PERSISTENT:  # ranks of another number cannot go on from local shards
                    report_kept(global_step)
                self._committed = [step for step in self._committed if step != global_step] + [global_step]
                self._prune(Path(self.dirpath))

        return commit

    def _prune(self, root: Path) -> None:
        """Keep the newest: what this training has committed, in that order, before what was there."""
        if self.keep == -1:
            return
        storage = LocalStorage(root)
        steps = [step for step in list_steps(storage)[1] if (root / step_directory(step)).is_dir()]
        # What has no manifest says no branch: a training that went on from an older step is newer than the
        # higher steps before it.
        age = {step: number for number, step in enumerate(self._committed, start=1)}
        oldest_first = sorted(steps, key=lambda step: (age.get(step, 0), step))
        for step in needless_steps(oldest_first, left_among(storage, steps), self.keep):
            if remove_checkpoint(storage, step):
                logger.info("deleted checkpoint step=%d of %s, the newest %d are kept", step, root, self.keep)

    def _emit(self, event: EventType, step: int | None, error: str | None = None) -> None:
        if self._events is not None:
            self._events.emit(event, step=step, tier=self.tier.value, error=error)

    @staticmethod
    def set_checkpoint_unfinished_marker(checkpoint_path: str | Path, barrier_after: bool = False) -> None:
        """Mark, and clear what an attempt that did not finish left at the same step."""
        if is_rank_zero():
            directory = Path(ckpt_to_dir(posix_path(checkpoint_path)))
            root, step = split_path(directory)
            storage = LocalStorage(root)
            storage.make_dir("")
            # The manifest takes it over, and so says the branch.
            save_id = attempt_on_branch(secrets.token_hex(8), read_branches(storage).newest)
            put_marker(storage, step, Marker(state=MarkerState.WRITING, save_id=save_id))
            if directory.exists():
                logger.warning("removing what an unfinished save left in %s", directory)
                shutil.rmtree(directory)
        if barrier_after and dist.is_initialized():
            dist.barrier()

    @staticmethod
    def remove_checkpoint_unfinished_marker(
        checkpoint_path: str | Path, barrier_before: bool = False
    ) -> None:
        """The commit: from here on readers take the checkpoint."""
        if barrier_before and dist.is_initialized():
            dist.barrier()
        if is_rank_zero():
            directory = Path(ckpt_to_dir(checkpoint_path))
            root, step = split_path(directory)
            storage = LocalStorage(root)
            storage.sync_dir(directory.name)
            lift_marker(storage, step)


def _why_taken(directory: Path) -> str:
    """Why nothing may be written there; empty: it is free, or a marker says that nothing of it is needed."""
    storage, step = LocalStorage(directory.parent), parse_step(directory.name)
    try:
        is_marked = step is not None and read_marker(storage, step) is not None
        is_taken = not is_marked and bool(storage.list(directory.name))
    except CheckpointError as error:
        return f"may hold a checkpoint ({error.message})"
    return "is a checkpoint of an earlier training" if is_taken else ""


def _tiers_of(trainer: Any) -> list[ModelCheckpoint]:
    return [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]


def _warn_of_count(trainer: Any) -> None:
    sampler = getattr(trainer.datamodule, "data_sampler", None)
    ramp = getattr(sampler, "rampup_batch_size", None)
    if ramp is not None and not isinstance(sampler, ExactMegatronSampler):
        logger.warning(
            "in the batch-size ramp-up %s checkpoints have NeMo's count of consumed samples, and a restart "
            "leaves out some; add resiliency.callbacks.consumed_samples.ConsumedSamplesCallback",
            ramp,
        )
