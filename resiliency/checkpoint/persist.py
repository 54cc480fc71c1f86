# SPDX-License-Identifier: Apache-2.0
"""The agent's worker: one thread that turns captured slots into committed checkpoints, in order.

What it is given stays lent to it until it is done, so a trainer cannot overwrite it and may die.
It reports every save exactly once; a save that fails touches nothing older.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

from resiliency.checkpoint.arena import CapturedSlot
from resiliency.checkpoint.catalog import clean_unfinished, forget_failed, free_failed, try_prune
from resiliency.checkpoint.commit import CheckpointFormat, SaveTicket, commit
from resiliency.checkpoint.dcp_format import DcpFormat
from resiliency.checkpoint.dcp_leaves import PlainLeaves
from resiliency.checkpoint.manifest import RankIndex
from resiliency.checkpoint.megatron_format import MegatronFormat
from resiliency.checkpoint.shard_file import FileRecord
from resiliency.checkpoint.storage import LocalStorage, Storage
from resiliency.checkpoint.table import Shard
from resiliency.checkpoint.wire import Done, Settings
from resiliency.errors import CheckpointWriteFailed, ResiliencyError

logger = logging.getLogger(__name__)

#: Beyond that many, saves are refused; slots end long before.
QUEUE_LIMIT = 16


@dataclass(frozen=True, kw_only=True)
class SaveJob:
    """This host's part of one save.

    `missing`: why a local rank has no capture; then nothing is saved.  `skipped_by`: ranks that said so
    themselves.
    """

    step: int
    session: str
    run_id: str
    world_size: int
    ranks: tuple[int, ...]
    slots: Mapping[int, CapturedSlot]
    settings: Settings
    missing: str = ""
    skipped_by: tuple[int, ...] = ()
    queued: float = field(default_factory=time.monotonic)

    @property
    def leads(self) -> bool:
        return 0 in self.ranks

    def close(self) -> None:
        for slot in self.slots.values():
            slot.close()


@dataclass(frozen=True)
class CleanJob:
    """Delete what unfinished saves of dead attempts left in the directory."""

    settings: Settings

    def close(self) -> None:
        """It holds nothing."""


class Pace:
    """Spreads writes so that they stay below a bandwidth; threads of one save share it."""

    def __init__(self, bytes_per_s: int, stop: threading.Event) -> None:
        self._rate = bytes_per_s
        self._stop = stop
        self._lock = threading.Lock()
        self._free_at = time.monotonic()

    def __call__(self, size_bytes: int) -> None:
        with self._lock:
            now = time.monotonic()
            begins = max(self._free_at, now)
            self._free_at = begins + size_bytes / self._rate
        if begins > now:
            self._stop.wait(begins - now)


class Worker:
    """Runs jobs one after the other.  `on_done` is called from its thread.

    Args:
        hurry: once set, the bandwidth cap is off: the host is about to go.
    """

    def __init__(self, on_done: Callable[[SaveJob, Done], None], hurry: threading.Event) -> None:
        self._on_done = on_done
        self._hurry = hurry
        self._queue: queue.Queue[SaveJob | CleanJob | None] = queue.Queue(QUEUE_LIMIT)
        self._thread = threading.Thread(target=self._run, name="resiliency-persist", daemon=True)
        self._thread.start()

    def try_put(self, job: SaveJob | CleanJob) -> bool:
        """Queue a job; False if too many wait."""
        try:
            self._queue.put_nowait(job)
        except queue.Full:
            return False
        return True

    def close(self, timeout: timedelta) -> None:
        """End after what is queued; with an empty queue at once."""
        self._queue.put(None, timeout=timeout.total_seconds())
        self._thread.join(timeout.total_seconds())

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                if isinstance(job, SaveJob):
                    done = self._save(job)
                    self._on_done(job, done)
                    # Nobody waits for this: to delete a large file takes a good part of writing it.
                    if job.leads and not done.error:
                        _tidy(job)
                else:
                    _clean(job)
            finally:
                job.close()

    def _save(self, job: SaveJob) -> Done:
        began = time.monotonic()
        error, size = "", 0
        try:
            size = self._commit(job)
            logger.info("step %d committed: %d bytes in %.2f s", job.step, size, time.monotonic() - began)
        except ResiliencyError as failure:
            error = str(failure)
            logger.error("save of step %d failed: %s", job.step, error)
        except Exception as failure:  # the border of this thread: a save failed, the next may not
            error = f"{type(failure).__name__}: {failure}"
            logger.exception("save of step %d failed", job.step)
        return Done(
            step=job.step,
            session=job.session,
            error=error,
            skipped_by=job.skipped_by,
            size_bytes=size,
            queued_s=began - job.queued,
            commit_s=time.monotonic() - began,
        )

    def _commit(self, job: SaveJob) -> int:
        storage = LocalStorage(job.settings.directory)
        ticket = SaveTicket(
            step=job.step,
            run_id=job.run_id,
            save_id=f"{job.session}-{job.step}",
            world_size=job.world_size,
            ranks=range(job.world_size),
            timeout=timedelta(seconds=job.settings.save_timeout_s),
        )
        if job.missing:
            # As a commit that fails where it would write: this way the other hosts learn of it.
            unwritten = dict.fromkeys(job.ranks)
            commit(storage, _Unwritable(job.missing), ticket, unwritten, leads=job.leads)
            return 0
        if job.leads:
            _try(lambda: free_failed(storage))
        shards = {rank: slot.shard for rank, slot in job.slots.items()}
        return commit(storage, self._format(job.settings), ticket, shards, leads=job.leads).size_bytes

    def _format(self, settings: Settings) -> CheckpointFormat[Shard]:
        pace = Pace(settings.bytes_per_s, self._hurry) if settings.bytes_per_s else None
        if settings.format == MegatronFormat.name:
            return MegatronFormat(pace=pace)
        return DcpFormat(spread_unsharded=settings.replicated, leaves=PlainLeaves(), pace=pace)


def _tidy(job: SaveJob) -> None:
    """What a committed save makes needless."""
    storage = LocalStorage(job.settings.directory)
    try_prune(storage, job.settings.keep)
    _try(lambda: forget_failed(storage, below=job.step))


def _try(tidy_up: Callable[[], None]) -> None:
    try:
        tidy_up()
    except ResiliencyError as error:  # no reason to fail the save that this is for; the next one tries again
        logger.warning("traces of failed saves were not deleted: %s", error)


class _Unwritable:
    """A format whose ranks have nothing to write, and say why."""

    name = "dcp"

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def write_rank(
        self, storage: Storage, directory: str, shard: None, *, run_id: str, save_id: str
    ) -> RankIndex:
        raise CheckpointWriteFailed(self._reason)

    def seal(self, storage: Storage, directory: str, indexes: Sequence[RankIndex]) -> Sequence[FileRecord]:
        return ()


def _clean(job: CleanJob) -> None:
    storage = LocalStorage(job.settings.directory)
    try:
        gone = clean_unfinished(storage)
    except ResiliencyError as error:
        logger.warning("%s was not cleaned up: %s", storage.describe(), error)
    else:
        if gone:
            logger.info("deleted unfinished checkpoints: %s", gone)
