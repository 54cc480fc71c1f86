# SPDX-License-Identifier: Apache-2.0
"""Bring a state back: from this host's memory, else from the newest checkpoint that verifies.

All ranks agree on one step before a byte of the state changes.  A source that turns out bad on any
rank is passed over on all of them, and the next one is tried; steps are never mixed.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, IntEnum

from resiliency.checkpoint.agreement import Agreement
from resiliency.checkpoint.arena import RankArena, peek
from resiliency.checkpoint.catalog import Condition, list_checkpoints, quarantine
from resiliency.checkpoint.dcp_format import DcpFormat
from resiliency.checkpoint.lease import Lease
from resiliency.checkpoint.local_format import LocalFormat
from resiliency.checkpoint.megatron_format import MegatronFormat
from resiliency.checkpoint.progress import Progress
from resiliency.checkpoint.reader import CheckpointReader
from resiliency.checkpoint.storage import Storage
from resiliency.checkpoint.table import Shard
from resiliency.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointIncomplete,
    LayoutMismatch,
    PeerError,
    ResiliencyError,
)

logger = logging.getLogger(__name__)

_BAD = (CheckpointCorrupt, CheckpointIncomplete)
#: Formats that hold each rank's state as it was captured; a checkpoint of another one is not bad.
_RESTORABLE = frozenset({DcpFormat.name, LocalFormat.name, MegatronFormat.name})

#: Finds out whether a state fits what its rank had captured (else LayoutMismatch), changing nothing, and
#: returns what fills it, which runs once all ranks fit; None: nothing is to be filled.
Fill = Callable[[Shard], Callable[[], object] | None]


class Tier(str, Enum):
    """Where a state came from."""

    NONE = "none"
    MEMORY = "memory"
    DISK = "disk"


@dataclass(frozen=True, kw_only=True)
class Restored:
    """What `restore` did.  Step 0 and tier NONE: there was nothing, the state is as it was."""

    step: int
    tier: Tier
    size_bytes: int = 0
    #: The run whose checkpoints the directory holds; who goes on with them takes over its name.
    run_id: str = ""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A step that could be restored."""

    step: int
    tier: Tier
    session: str = ""  # of captures: two attempts may have captured one step differently
    run_id: str = ""


class Restorer:
    """Restores one rank's state, together with all others."""

    def __init__(
        self,
        arena: RankArena,
        storage: Storage,
        agreement: Agreement,
        *,
        replicated: bool,
    ) -> None:
        self._arena = arena
        self._storage = storage
        self._agreement = agreement
        self._replicated = replicated
        #: Whether a source turned out bad when some of it had been put into the state already.
        self._overwritten = False

    def restore(self, fill: Fill, *, step: int | None = None) -> Restored:
        """Let `fill` bring back the newest step, or exactly `step`; collective.

        Raises:
            LayoutMismatch: the checkpoint is of another model or parallel layout, on any rank.
            PeerError: another rank could not restore.
        """
        sources = self.sources()
        run_id = next((source.run_id for source in sources if source.run_id), "")
        self._overwritten = False
        for source in sources:
            if step not in (None, source.step):
                continue
            size = self._try(source, fill)
            if size is not None:
                level = logging.DEBUG if self._agreement.rank else logging.INFO  # all ranks alike
                logger.log(level, "restored step %d from %s", source.step, source.tier.value)
                return Restored(step=source.step, tier=source.tier, size_bytes=size, run_id=run_id)
        if self._overwritten:
            raise CheckpointCorrupt(
                "a checkpoint turned out bad when a part of it was in the state already; there is no other.",
                hint="Start the program again: it then begins anew, or with what was saved by then.",
                rank=self._agreement.rank,
            )
        return Restored(step=0, tier=Tier.NONE)

    def sources(self) -> list[Source]:
        """Best first: newest, and of one step the one in memory; the same list on all ranks."""
        captured = {
            Source(step=header.step, tier=Tier.MEMORY, session=header.run_id)
            for _, header in peek(self._arena.directory, self._arena.rank)
            if header.world_size == self._arena.world_size
        }
        error: ResiliencyError | None = None
        stored: list[Source] = []
        if self._agreement.rank == 0:
            try:
                stored = self._stored()
            except CheckpointError as failure:
                error = failure
        self._agreement.check(error, "listing checkpoints")
        everyone = self._agreement.gather((captured, stored))
        shared = set.intersection(*(captured for captured, _ in everyone))
        sources = [*shared, *everyone[0][1]]
        return sorted(sources, key=lambda s: (-s.step, s.tier is Tier.DISK, s.session))

    def _stored(self) -> list[Source]:
        found = list_checkpoints(self._storage)
        for checkpoint in found:
            if checkpoint.condition is Condition.BAD:
                logger.warning("passing over %s: %s", checkpoint.path, checkpoint.why)
            elif checkpoint.condition is Condition.STOCK:  # good, but for other readers
                logger.info("passing over %s: %s", checkpoint.path, checkpoint.why)
            elif checkpoint.manifest is not None and checkpoint.manifest.format not in _RESTORABLE:
                logger.warning(
                    "passing over %s: it has format %r; load it with torch.distributed.checkpoint.load",
                    checkpoint.path,
                    checkpoint.manifest.format,
                )
        return [
            Source(step=c.step, tier=Tier.DISK, run_id=c.manifest.run_id)
            for c in found
            if c.condition is Condition.COMPLETE
            and c.manifest is not None
            and c.manifest.format in _RESTORABLE
        ]

    def _try(self, source: Source, fill: Fill) -> int | None:
        """Bytes restored; None if the source is bad on any rank."""
        if source.tier is Tier.MEMORY:
            return self._from_memory(source, fill)
        lease = None
        try:
            if self._agreement.rank == 0:
                try:
                    lease = Lease(self._storage, source.step)
                except CheckpointError as error:  # read-only storage: nobody deletes there either
                    logger.info("step %d is read without a lease: %s", source.step, error)
            return self._from_disk(source, fill)
        finally:
            if lease is not None:
                lease.close()

    def _from_memory(self, source: Source, fill: Fill) -> int | None:
        with contextlib.ExitStack() as lent:

            def find() -> Shard:
                shard = lent.enter_context(self._arena.captured(source.step))
                if shard.run_id != source.session:
                    raise CheckpointIncomplete(f"the capture of step {source.step} was replaced.")
                return shard

            return self._fill(source, find, fill, "restoring from memory")

    def _from_disk(self, source: Source, fill: Fill) -> int | None:
        with Progress(f"restoring step {source.step}", shown=self._arena.rank == 0) as progress:
            return self._fill(source, lambda: self._open(source.step, progress), fill, "restoring from disk")

    def _fill(self, source: Source, find: Callable[[], Shard], fill: Fill, doing: str) -> int | None:
        error: ResiliencyError | None = None
        size, act = 0, None
        try:
            shard = find()
            size, act = shard.layout.size_bytes, fill(shard)
        except ResiliencyError as failure:
            error = failure
        if not self._all_good(source, error, doing):
            return None
        try:
            if act is not None:
                act()
        except ResiliencyError as failure:
            error = failure
        if not self._all_good(source, error, doing):
            self._overwritten = True
            return None
        return size

    def _open(self, step: int, progress: Progress) -> Shard:
        reader = CheckpointReader(self._storage, step)
        rank, saved_ranks = self._arena.rank, reader.manifest.world_size
        if saved_ranks != self._arena.world_size:
            if not self._replicated:
                raise LayoutMismatch(
                    f"{reader.path} was saved by {saved_ranks} ranks, this job has {self._arena.world_size}.",
                    hint="Load it with torch.distributed.checkpoint.load, which cuts it anew.",
                    path=reader.path,
                    step=step,
                )
            rank %= saved_ranks
        progress.expect(reader.index(rank).size_bytes)
        reader.pace = progress
        return reader.open_shard(rank)

    def _all_good(self, source: Source, error: ResiliencyError | None, doing: str) -> bool:
        """Whether all ranks succeeded; False to try the next source, on all of them.

        A source that is bad for one rank is passed over, also where it does not fit another.
        """
        verdicts = self._agreement.gather(None if error is None else (_kind(error), str(error)))
        failures = [verdict for verdict in verdicts if verdict is not None]
        if not failures:
            return True
        worst, why = min(failures)
        if worst is not _Kind.BAD:
            self._check(error, doing)
        logger.error("step %d from %s passed over: %s", source.step, source.tier.value, why)
        if source.tier is Tier.DISK and self._agreement.rank == 0:
            try:
                quarantine(self._storage, source.step, why)
            except CheckpointError as failure:
                logger.warning("%s", failure)
        return False

    def _check(self, error: ResiliencyError | None, doing: str) -> None:
        """Raise on all ranks if any has an error, and an error of the same kind on all.

        What the caller does next depends on the kind, and must be the same everywhere.
        """
        found = self._agreement.gather(None if error is None else (_kind(error), str(error)))
        failures = [(*verdict, rank) for rank, verdict in enumerate(found) if verdict is not None]
        if not failures:
            return
        kind, text, rank = min(failures)
        if error is not None and _kind(error) == kind:
            raise error
        raise _RAISED[kind](f"rank {rank}, while {doing}: {text}", rank=rank)


class _Kind(IntEnum):
    """Of failures on several ranks the first of these decides what is raised on all."""

    OTHER = 0
    BAD = 1
    UNFIT = 2


_RAISED: dict[_Kind, type[ResiliencyError]] = {
    _Kind.OTHER: PeerError,
    _Kind.BAD: CheckpointCorrupt,
    _Kind.UNFIT: LayoutMismatch,
}


def _kind(error: ResiliencyError) -> _Kind:
    if isinstance(error, _BAD):
        return _Kind.BAD
    return _Kind.UNFIT if isinstance(error, LayoutMismatch) else _Kind.OTHER
