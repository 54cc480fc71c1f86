# SPDX-License-Identifier: Apache-2.0
"""Find the newest usable checkpoint when a trainer starts, and restore it.

The idea: rank 0 lists the candidates, all ranks agree on one, all ranks prove it (each reads a
part of the files against the manifest), all ranks learn the verdict, and only then does a byte
move into the model.  A candidate that fails is marked ``-unfinished`` and the next older one is
tried.  When checkpoints exist but none is usable, the job ends with an error: silently starting
from random weights would lose everything that was trained.

With a checkpoint process, what all ranks find captured in the memory of their hosts is a candidate
too, and what the process wrote is proven while it is read.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector

from resiliency.errors import CheckpointCorrupt, CheckpointIncomplete, CheckpointMissing, ConfigError
from resiliency.events import EventStream, EventType
from resiliency.plugins import checkpoint_kinds, manifest
from resiliency.plugins.dist_ckpt import VerifiedCheckpointIO, is_rank_zero, set_rng_state
from resiliency.plugins.persistent_ckpt_proc import PersistentCheckpointProcessIO, process_of

logger = logging.getLogger(__name__)

#: What a load raises, on all ranks alike, when its checkpoint is bad and another may not be.
_UNUSABLE = (CheckpointCorrupt, CheckpointIncomplete, CheckpointMissing)


class CheckpointConnector(_CheckpointConnector):
    """Drop-in for a trainer's own connector: ``trainer._checkpoint_connector = CheckpointConnector(...)``.

    Collective: every rank of the job takes part in the choice.

    Args:
        trainer: the trainer to restore.
        persistent_ckpt_dir: directory of the persistent tier; the same path on every rank.
        local_ckpt_dir: directory of the local tier; it is searched too, and at the same step it is
            preferred because it is nearer.
        max_attempts: how many checkpoints are tried before the job gives up.
        events: where the restore is recorded.
    Raises:
        ConfigError: no directory was given, or `max_attempts` is below 1.
    """

    def __init__(
        self,
        trainer: Any,
        *,
        persistent_ckpt_dir: str | Path | None = None,
        local_ckpt_dir: str | Path | None = None,
        max_attempts: int = 3,
        events: EventStream | None = None,
    ) -> None:
        super().__init__(trainer)
        # Nearer first: of two checkpoints of one step, the one in the first tier is taken.
        tiers = {"local": local_ckpt_dir, "persistent": persistent_ckpt_dir}
        self._tiers = {Path(root): name for name, root in tiers.items() if root is not None}
        if not self._tiers:
            raise ConfigError("CheckpointConnector needs persistent_ckpt_dir, local_ckpt_dir or both.")
        if max_attempts < 1:
            raise ConfigError(f"max_attempts is at least 1, found {max_attempts}.")
        self._max_attempts = max_attempts
        self._events = events

    def _restore_modules_and_callbacks(self, checkpoint_path: str | Path | None = None) -> None:
        """Lightning's hook: restore `checkpoint_path` if the user named one, else the newest usable.

        Raises:
            CheckpointCorrupt: checkpoints exist, and none of those tried could be used.
        """
        self._emit(EventType.RESTORE_STARTED)
        if checkpoint_path is not None:
            chosen: Path | None = Path(checkpoint_path)
            super()._restore_modules_and_callbacks(chosen)
        else:
            chosen = self._restore_newest()
        if chosen is None:
            super()._restore_modules_and_callbacks(None)
            if self.trainer.is_global_zero:
                logger.info("no checkpoint in %s: training starts from scratch", self._places())
            # The published goodput formula counts progress from the smallest step ever loaded.
            self._emit(EventType.CHECKPOINT_LOADED, step=0)
            return
        io = self.trainer.strategy.unwrapped_checkpoint_io
        if (
            isinstance(io, VerifiedCheckpointIO | PersistentCheckpointProcessIO)
            and io.restored_rng is not None
        ):
            self.trainer.callbacks.append(_RestoreRngState(io.restored_rng))
        process = process_of(self.trainer)
        from_memory = process is not None and process.restored_from_memory
        step = manifest.step_of(chosen)
        if self.trainer.is_global_zero:
            logger.info("restored step %s from %s", step, "memory" if from_memory else chosen)
        tier = "memory" if from_memory else self._tiers.get(chosen.parent)
        self._emit(EventType.CHECKPOINT_LOADED, step=step, path=str(chosen), tier=tier)

    def _get_lightning_module_state_dict(self) -> dict[str, Any]:
        """Lightning's hook: what goes into a dump; NeMo's strategy replaces it by its sharded state."""
        return {} if process_of(self.trainer) is not None else super()._get_lightning_module_state_dict()

    def _restore_newest(self) -> Path | None:
        """Restore the newest candidate that is good; None if there is no candidate."""
        for path in self._usable():
            try:
                super()._restore_modules_and_callbacks(path)
            except _UNUSABLE as error:
                _condemn(path, [str(error)])
            else:
                return path
        return None

    def _newest_usable(self) -> Path | None:
        return next(self._usable(), None)

    def _usable(self) -> Iterator[Path]:
        """Candidates that are good as far as can be told without loading them, newest first.

        Raises:
            CheckpointCorrupt: there are candidates, and none of those tried was taken.
        """
        process = process_of(self.trainer)
        captured = (
            [] if process is None else [process.directory / f"step={s}" for s in process.steps_in_memory()]
        )
        candidates = _agree(self._candidates(captured) if is_rank_zero() else [])
        for tried, path in enumerate(candidates[: self._max_attempts]):
            problems = (
                [] if path in captured else checkpoint_kinds.verify_together(path, skim=process is not None)
            )
            if problems:
                _condemn(path, problems)
                continue
            if tried:
                logger.warning("falling back to step %s in %s", manifest.step_of(path), path)
            yield path
        if candidates:
            tried = min(len(candidates), self._max_attempts)
            raise CheckpointCorrupt(
                f"{len(candidates)} checkpoints in {self._places()}; none of the newest {tried} is usable.",
                hint="The log names what is wrong with each.  To train from scratch on purpose, name an "
                "empty directory; to try older ones, raise max_attempts.",
                paths=[str(path) for path in candidates],
            )

    def _candidates(self, captured: Sequence[Path]) -> list[Path]:
        found = [path for root in self._tiers for path in manifest.complete_checkpoints(root)]
        known = {path.absolute() for path in found}
        found += [path for path in captured if path not in known]
        # The sort is stable: of equal steps the nearer tier stays first.
        return sorted(found, key=lambda path: manifest.step_of(path) or 0, reverse=True)

    def _places(self) -> str:
        return " and ".join(str(root) for root in self._tiers)

    def _emit(
        self, event: EventType, step: int | None = None, path: str | None = None, tier: str | None = None
    ) -> None:
        if self._events is not None:
            self._events.emit(event, step=step, path=path, tier=tier)


class _RestoreRngState(Callback):
    """Sets the random state once, just before the first step.

    Not at restore time: data loaders draw random numbers when they start, which the run that wrote
    the checkpoint had done long before.
    """

    def __init__(self, state: dict[str, Any]) -> None:
        self._state: dict[str, Any] | None = state

    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        if self._state is not None:
            set_rng_state(self._state)
            self._state = None


def _agree(candidates: Sequence[Path]) -> list[Path]:
    """Rank 0's list on every rank: what a rank sees on shared storage may lag behind."""
    if not dist.is_initialized():
        return list(candidates)
    box: list[Any] = [list(candidates)]
    dist.broadcast_object_list(box, src=0)
    return list(box[0])


def _condemn(path: Path, problems: Sequence[str]) -> None:
    for problem in problems:
        logger.error("checkpoint %s is not used: %s", path, problem)
    # A marker of its own: it was never a candidate on disk, or its reader has hidden it already.
    if is_rank_zero() and path.is_dir() and not manifest.marker_of(path).exists():
        checkpoint_kinds.hide(path, problems[0])
