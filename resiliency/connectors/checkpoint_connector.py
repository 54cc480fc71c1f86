# SPDX-License-Identifier: Apache-2.0
"""Find the newest usable checkpoint when a trainer starts, and restore it.

The idea: rank 0 lists the candidates, all ranks agree on one, all ranks prove it (each reads a
part of the files against the manifest), all ranks learn the verdict, and only then does a byte
move into the model.  What one rank alone finds, before or while it loads, is agreed on too, and then all
ranks turn to the next older candidate.  One whose content is bad is marked ``-unfinished``; one that some
host could not reach is not.  When checkpoints exist but none is usable, the job ends with an error:
silently starting from random weights would lose everything that was trained.

With a checkpoint process, every step that the hosts hold between them is a candidate too: in their
memory, in their local tiers, and in the copies that they keep for each other.  Which rank takes what
from where is the process's business, and what it wrote is proven while it is read.  Such a step that
turns out to be cut for another parallel layout is passed over, and an older one of the persistent tier is
cut anew.  If that one cannot be, for the form in which its optimizer was saved, the job ends: going back
further could lose much, and a person can start the layout that fits.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector

from resiliency.checkpoint.format.catalog import unmarked_checkpoints
from resiliency.checkpoint.format.marker import parse_step, step_directory
from resiliency.checkpoint.names import TierName
from resiliency.checkpoint.ranks import RankGroup
from resiliency.checkpoint.recovery.lost_checkpoints import refuse_lost_checkpoints
from resiliency.checkpoint.recovery.outcomes import agree
from resiliency.checkpoint.recovery.sources import Tier
from resiliency.checkpoint.storage.posix import LocalStorage
from resiliency.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointIncomplete,
    CheckpointMissing,
    ConfigError,
    LayoutMismatch,
    ResiliencyError,
)
from resiliency.events import EventStream, EventType
from resiliency.files import posix_path
from resiliency.plugins import checkpoint_kinds
from resiliency.plugins.dist_ckpt import VerifiedCheckpointIO, is_rank_zero
from resiliency.plugins.in_cluster_local_ckpt import SplitCheckpointIO
from resiliency.plugins.persistent_ckpt_proc import PersistentCheckpointProcessIO, process_of
from resiliency.plugins.random_states import set_rng_state

logger = logging.getLogger(__name__)

#: What a load raises, on any rank, when its checkpoint is of no use and another may be.
_REFUSALS = (CheckpointCorrupt, CheckpointIncomplete, CheckpointMissing, LayoutMismatch)

_WITH_RANDOM_STATE = (VerifiedCheckpointIO, PersistentCheckpointProcessIO, SplitCheckpointIO)

#: Where a step came from that was in no one directory.
_IN_WORDS = {
    "memory": "memory",
    "local": "the local tiers of the hosts",
    "peers": "the local tiers of the hosts, with shards from other hosts",
}


@dataclass
class _Attempts:
    """How a choice has gone so far."""

    longest: int
    failed: int = 0
    #: Candidates that the hosts hold; the same steps on all ranks.
    held: Collection[Path] = ()
    #: Of these, what is of another parallel layout.
    unfit: list[Path] = field(default_factory=list)
    #: What was wrong with the last of them.
    mismatch: str = ""


class CheckpointConnector(_CheckpointConnector):
    """Drop-in for a trainer's own connector: ``trainer._checkpoint_connector = CheckpointConnector(...)``.

    Collective: every rank of the job takes part in the choice.

    Args:
        trainer: the trainer to restore.
        persistent_ckpt_dir: directory of the persistent tier; the same path on every rank.
        local_ckpt_dir: directory of the local tier; it is searched too, and at the same step it is
            preferred because it is nearer.  Where a checkpoint process writes the local tier, it is the
            process that is asked, and this may be left out.
        max_attempts: how many checkpoints may turn out bad before the job gives up.
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
        self._tiers = {posix_path(root): name for name, root in tiers.items() if root is not None}
        if not self._tiers and process_of(trainer) is None:
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
            with checkpoint_kinds.in_use(Path(checkpoint_path)):
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
        if isinstance(io, _WITH_RANDOM_STATE) and io.restored_rng is not None:
            self.trainer.callbacks.append(_RestoreRngState(io.restored_rng))
        step, tier = parse_step(chosen.name), self._tier_of(chosen)
        if self.trainer.is_global_zero:
            logger.info("restored step %s from %s", step, _IN_WORDS.get(tier or "", chosen))
        self._emit(EventType.CHECKPOINT_LOADED, step=step, path=str(chosen), tier=tier)

    def _tier_of(self, chosen: Path) -> str | None:
        process = process_of(self.trainer)
        if process is None or process.restores.restored_from is Tier.NONE:
            return self._tiers.get(chosen.parent)
        where = process.restores.restored_from
        return str(where.value)

    def _get_lightning_module_state_dict(self) -> dict[str, Any]:
        """Lightning's hook: what goes into a dump; NeMo's strategy replaces it by its sharded state."""
        return {} if process_of(self.trainer) is not None else super()._get_lightning_module_state_dict()

    def _restore_newest(self) -> Path | None:
        """Restore the newest candidate that is good; None if there is no candidate.

        Raises:
            LayoutMismatch: on all ranks; a persistent checkpoint cannot be cut anew for this layout.
        """
        attempts = _Attempts(self._max_attempts)
        with closing(self._usable(attempts)) as candidates:
            return self._restore_first(candidates, attempts)

    def _restore_first(self, candidates: Iterable[Path], attempts: _Attempts) -> Path | None:
        for path in candidates:
            try:
                problems = self._try_together(path)
            except LayoutMismatch as mismatch:
                process = process_of(self.trainer)
                # A step that hosts hold may be in the persistent tier as well, under the same path.
                if path not in attempts.held or (process is not None and process.restores.is_resharded):
                    raise
                attempts.unfit.append(path)
                attempts.mismatch = str(mismatch)
                if is_rank_zero():
                    logger.warning(
                        "the hosts hold step %s for another parallel layout, and only persistent checkpoints"
                        " can be cut anew: %s",
                        parse_step(path.name),
                        mismatch,
                    )
                continue
            if not problems:
                return path
            # Who found it bad has hidden it, if it is bad for everybody.
            attempts.failed += 1
            _tell(path, problems)
        return None

    def _try_together(self, path: Path) -> list[str]:
        """Restore `path`; what ranks found wrong with it, the same on all of them, empty if it was nothing.

        Raises:
            LayoutMismatch: on all ranks; it is of another parallel layout.
        """
        error: ResiliencyError | None = None
        try:
            super()._restore_modules_and_callbacks(path)
        except _REFUSALS as failure:
            error = failure
        bad = agree(RankGroup.of_process_group(), error, f"restoring {path}")
        return sorted(set(bad.values()))

    def _newest_usable(self) -> Path | None:
        with closing(self._usable(_Attempts(self._max_attempts))) as candidates:
            return next(candidates, None)

    def _usable(self, attempts: _Attempts) -> Generator[Path, None, None]:
        """Candidates that are good as far as can be told without loading them, newest first.

        Each is in use from its proof until the next one is asked for.

        Raises:
            CheckpointCorrupt: there are candidates, and none of those tried was taken; or earlier starts
                found all of them bad.
            LayoutMismatch: none was bad, and none fits.
        """
        process = process_of(self.trainer)
        # Not by their paths: a directory may be called otherwise on each host.
        held: dict[int, Path] = {}
        if process is not None:
            held = {step: process.restores.path_of(step) for step in process.restores.captured()}
        attempts.held = held.values()
        agreed = self._candidates_together(held)
        candidates = [held[found] if isinstance(found, int) else found for found in agreed]
        if process is not None:
            self._tell_what_is_lost(process, candidates)
        if not candidates:
            local = None if process is None else process.directories.get(TierName.LOCAL)
            shared_storages = [LocalStorage(root) for root in self._listed()]
            refuse_lost_checkpoints(RankGroup.of_process_group(), shared_storages, local)
        for number, path in enumerate(candidates):
            if attempts.failed == attempts.longest:
                break
            with checkpoint_kinds.in_use(path):
                problems = (
                    []
                    if path in held.values()
                    else checkpoint_kinds.verify_together(path, skim=process is not None)
                )
                if problems:
                    attempts.failed += 1
                    _tell(path, problems)
                    continue
                if number:
                    logger.warning("falling back to step %s in %s", parse_step(path.name), path)
                yield path
        if candidates:
            self._give_up(candidates, attempts)

    def _tell_what_is_lost(self, process: PersistentCheckpointProcessIO, candidates: Sequence[Path]) -> None:
        """Hosts may hold newer checkpoints, or parts of some, that this job cannot go on from.

        Raises:
            LayoutMismatch: nothing else is left, and another number of ranks could go on from it.
            CheckpointIncomplete: nothing else is left than parts of several saves.
        """
        newest = max((parse_step(path.name) or 0 for path in candidates), default=-1)
        found = process.restores.refused_saves(above=newest)
        refusal = None if candidates else found.refusal()
        if refusal is not None:
            raise refusal
        if found.why and is_rank_zero():
            logger.error("the hosts hold newer checkpoints that cannot be used: %s", found.why)

    def _give_up(self, candidates: Sequence[Path], attempts: _Attempts) -> NoReturn:
        if not attempts.failed:
            steps = ", ".join(str(parse_step(path.name)) for path in attempts.unfit)
            raise LayoutMismatch(
                f"the hosts hold steps {steps} for another parallel layout, and there is no persistent"
                f" checkpoint that could be cut anew: {attempts.mismatch}",
                hint="Start with the layout that saved them; to train from scratch, name empty directories.",
                paths=[str(path) for path in attempts.unfit],
            )
        raise CheckpointCorrupt(
            f"{len(candidates)} checkpoints in {self._places()};"
            f" none of the newest {attempts.failed} is usable.",
            hint="The log names what is wrong with each.  To train from scratch on purpose, name an "
            "empty directory; to try older ones, raise max_attempts.",
            paths=[str(path) for path in candidates],
        )

    def _candidates_together(self, held: Mapping[int, Path]) -> list[Path | int]:
        """Rank 0's list on every rank: what a rank sees on shared storage may lag behind.

        Raises:
            CheckpointError, PeerError: on all ranks; rank 0 could not list a directory.
        """
        ranks = RankGroup.of_process_group()
        error: ResiliencyError | None = None
        mine: list[Path | int] = []
        if ranks.rank == 0:
            try:
                mine = self._candidates(held)
            except (OSError, CheckpointError) as failure:
                error = CheckpointError(
                    f"checkpoints cannot be listed: {failure}.",
                    hint="Mend the mount, or name other directories.",
                )
        ranks.check(error, "listing checkpoints")
        agreed = ranks.gather(mine)[0]
        if not agreed:
            self._check_nobody_sees_any(ranks)
        return agreed

    def _check_nobody_sees_any(self, ranks: RankGroup) -> None:
        """An empty directory on rank 0's host alone is a missing mount, and no new training."""
        mine: list[str] = []
        if ranks.rank:  # rank 0 has just looked
            with suppress(OSError, CheckpointError):
                mine = [str(path) for root in self._listed() for path in unmarked_checkpoints(root)]
        everyone = ranks.gather(mine[:1])
        for rank, found in enumerate(everyone):
            if found:
                raise CheckpointError(
                    f"rank {rank} sees {found[0]}, and rank 0 sees no checkpoint.",
                    hint="Mend the mount of rank 0's host; to train from scratch, name an empty directory.",
                    path=found[0],
                )

    def _candidates(self, held: Mapping[int, Path]) -> list[Path | int]:
        """Newest first; a number is a step that the hosts hold."""
        found = [path for root in self._listed() for path in self._checkpoints_in(root)]
        steps: list[tuple[int, Path | int]] = [(step, step) for step in held]
        steps += [(parse_step(p.name) or 0, p) for p in found if p.absolute() not in held.values()]
        # The sort is stable: of equal steps what is nearer stays first.
        return [candidate for _, candidate in sorted(steps, key=lambda item: item[0], reverse=True)]

    def _checkpoints_in(self, root: Path) -> list[Path]:
        """As rank 0 sees them; where the process writes, as it found them at this start."""
        process = process_of(self.trainer)
        if process is None or root.absolute() != process.directories.get(TierName.PERSISTENT):
            return unmarked_checkpoints(root)
        return [root / step_directory(step) for step in process.restores.inventory().stored]

    def _listed(self) -> list[Path]:
        """Directories in which this rank sees all there is; the process knows what the hosts have."""
        process = process_of(self.trainer)
        written = {} if process is None else process.directories
        roots = {root.absolute(): root for root in self._tiers}
        if TierName.PERSISTENT in written:
            roots.setdefault(written[TierName.PERSISTENT], written[TierName.PERSISTENT])
        return [root for absolute, root in roots.items() if absolute != written.get(TierName.LOCAL)]

    def _places(self) -> str:
        process = process_of(self.trainer)
        roots = {root.absolute(): None for root in self._tiers}
        if process is not None:
            roots |= dict.fromkeys(process.directories.values())
        return " and ".join(map(str, roots))

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


def _tell(path: Path, problems: Sequence[str]) -> None:
    if is_rank_zero():
        for problem in problems:
            logger.error("checkpoint %s is not used: %s", path, problem)
