# SPDX-License-Identifier: Apache-2.0
"""The agent's workers: one thread per tier, which turns captured slots into committed checkpoints, in order.

What a worker is given stays lent to it until it is done, so a trainer cannot overwrite it and may die.
It reports every save exactly once; a save that fails touches nothing older.  Tiers share nothing but
the slots that they read: one that is slow or full neither delays nor fails the other.

A call of the storage that does not return (a dead file server, a stuck device) keeps its thread, and
the slots of its save, which the device may still read.  All else goes on: whoever calls `look_for_hang`
has what waits for it reported.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TypeAlias

from resiliency.checkpoint.agent.jobs import FreeJob, GiveUpJob, RefuseJob, RetireJob, SaveJob, ShowJob
from resiliency.checkpoint.agent.protocol import Done, Settings
from resiliency.checkpoint.branches import Branches, record_branches
from resiliency.checkpoint.capture.arena import free_others
from resiliency.checkpoint.commit.commit import CheckpointFormat, Committed, SaveTicket, commit
from resiliency.checkpoint.commit.retention import (
    clean_tier,
    committed_save,
    delete_superseded,
    remove_given_up,
    remove_left,
    retire,
    show_untaken,
)
from resiliency.checkpoint.format.catalog import (
    clean_unfinished,
    forget_failed,
    free_failed,
    is_damaged,
    marked_steps,
    try_prune,
)
from resiliency.checkpoint.format.dcp import DcpFormat
from resiliency.checkpoint.format.dcp_values import FlattenedValues
from resiliency.checkpoint.format.local import LocalFormat
from resiliency.checkpoint.format.manifest import RankIndex
from resiliency.checkpoint.format.megatron import MegatronFormat
from resiliency.checkpoint.format.reader import holds_shards
from resiliency.checkpoint.gke.hand_off import HandOffQueue, locked
from resiliency.checkpoint.names import TierName, start_of
from resiliency.checkpoint.replication.retirement import retire_replicas_alone
from resiliency.checkpoint.state.layout import Shard
from resiliency.checkpoint.storage.chunked_file import FileRecord
from resiliency.checkpoint.storage.interface import Storage
from resiliency.checkpoint.storage.posix import LocalStorage
from resiliency.checkpoint.storage.throttle import Throttle
from resiliency.checkpoint.storage.watched import CallTimeouts, WatchedStorage
from resiliency.checkpoint.threads import start_thread
from resiliency.errors import CheckpointWriteFailed, ResiliencyError

logger = logging.getLogger(__name__)

#: Beyond that many, saves are refused; slots end long before.
QUEUE_LIMIT = 16
#: What ends sooner is no hang to be named at the end.
_LONG_CALL = timedelta(seconds=10)

Job: TypeAlias = "SaveJob | RefuseJob | ShowJob | FreeJob | RetireJob | GiveUpJob"


@dataclass
class _Work:
    """The job that the thread is at.

    `given_up`: its storage hangs; `overtaken`: see `commit`; `reported`: of a save, how it ended.
    """

    job: Job
    storage: WatchedStorage
    given_up: threading.Event = field(default_factory=threading.Event)
    overtaken: threading.Event = field(default_factory=threading.Event)
    reported: bool = False


class Worker:
    """Runs the jobs of one tier one after the other.  `on_done` is called from its thread, or from that
    which looks for a hang.

    Args:
        throttle: bandwidth cap of the persistent tier.
        open_storage: of a directory.
    """

    def __init__(
        self,
        tier: TierName,
        on_done: Callable[[SaveJob, Done], None],
        throttle: Throttle,
        open_storage: Callable[[str], Storage] = LocalStorage,
    ) -> None:
        self._tier = tier
        self._on_done = on_done
        self._throttle = throttle
        self._open_storage = open_storage
        self._queue: queue.Queue[Job | None] = queue.Queue(QUEUE_LIMIT)
        #: attempts of the saves that are being written or wait to be.
        self._saves: Counter[str] = Counter()
        #: The attempt that saves; hosts may be gone that were of one before.
        self._attempt_id = ""
        self._is_leaving = False
        #: The start of the job that has cleaned the tier, at its first save.
        self._cleaned = ""
        #: Of the last save, and what of the settings it was made for: it knows the layouts of this host.
        self._layout: tuple[object, CheckpointFormat[Shard]] | None = None
        #: Where it led the last save, and the committed checkpoints that it knows there.
        self._known: tuple[object, dict[int, str]] = (None, {})
        self._lock = threading.Lock()
        self._work: _Work | None = None
        self._thread = threading.Thread(target=self._run, name=f"resiliency-{tier.value}", daemon=True)
        start_thread(self._thread)

    def is_saving(self, attempt_id: str) -> bool:
        """Whether a save of an attempt is being written or waits to be."""
        with self._lock:
            return self._saves[attempt_id] > 0

    def overtake(self, attempt_id: str) -> None:
        """An attempt saves: those of earlier ones, whose hosts may be gone, soon wait for others no more."""
        with self._lock:
            self._attempt_id = attempt_id
            self._note_overtaken()

    def stop_waiting(self) -> None:
        """The agent is to leave: no save, also of those to come, waits for other hosts for long."""
        with self._lock:
            self._is_leaving = True
            self._note_overtaken()

    def try_put(self, job: Job) -> bool:
        """Queue a job; False if too many wait."""
        self._count(job, 1)
        try:
            self._queue.put_nowait(job)
        except queue.Full:
            self._count(job, -1)
            return False
        return True

    def why_hung(self, timeouts: CallTimeouts | None = None) -> str:
        """Which call of the storage has not returned for longer than a save may take; empty: none.

        Args:
            timeouts: with a call, if it ends sooner.
        """
        with self._lock:
            work = self._work
        return "" if work is None else _why_hung(work, timeouts)

    def look_for_hang(self, timeouts: CallTimeouts | None = None) -> None:
        """Report what waits for a call that hangs: the save that made it as failed, others as skipped.

        Args:
            timeouts: see `why_hung`.
        """
        with self._lock:
            work = self._work
        if work is None or not (why := _why_hung(work, timeouts)):
            return
        if not work.given_up.is_set():
            work.given_up.set()
            work.storage.give_up_files()
            logger.error("the %s tier hangs: %s", self._tier.value, why)
            if isinstance(work.job, SaveJob) and self._may_report(work):
                self._on_done(work.job, work.job.ended(why, hangs=True))
        for job in self._take_waiting_saves():
            self.refuse(job, why, left_out=True, hangs=True)

    def refuse(self, job: SaveJob, why: str, *, left_out: bool, hangs: bool) -> None:
        """Report a save that is not written, also to the agents of other hosts; see `Done`."""
        job.give_back()
        refused = replace(job, slots={}, missing=why)
        if job.concerns_others:
            self.try_put(RefuseJob(save=refused, why=why))
        self._on_done(refused, refused.ended(why, left_out=left_out, hangs=hangs))

    def close(self, timeout: timedelta) -> None:
        """End after what is queued; with an empty queue at once.

        A thread whose call does not return is left behind: it keeps nobody, not even the end of the process.
        """
        timeouts = CallTimeouts(longest=timeout)
        # What hangs by now has had its time.
        left_s = 0.0 if self.why_hung(timeouts) else timeout.total_seconds()
        deadline = time.monotonic() + left_s
        try:
            self._queue.put(None, timeout=left_s)
        except queue.Full:
            logger.error("the %s tier still has more to do than it can: its jobs are left", self._tier.value)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            why = self.why_hung(CallTimeouts(longest=max(timeout, _LONG_CALL))) or "it is still busy."
            logger.error("the agent leaves without the %s tier: %s", self._tier.value, why)

    def _count(self, job: Job, change: int) -> None:
        if isinstance(job, SaveJob):
            with self._lock:
                self._saves[job.attempt_id] += change

    def _take_waiting_saves(self) -> list[SaveJob]:
        saves: list[SaveJob] = []
        others: list[Job | None] = []
        with suppress(queue.Empty):
            while True:
                job = self._queue.get_nowait()
                if isinstance(job, SaveJob):
                    saves.append(job)
                    self._count(job, -1)
                else:
                    others.append(job)
        for other in others:
            self._queue.put_nowait(other)
        return saves

    def _note_overtaken(self) -> None:
        if self._work is None:
            return
        attempt_id = _attempt_id(self._work.job)
        is_earlier = attempt_id != self._attempt_id and bool(attempt_id and self._attempt_id)
        if self._is_leaving or is_earlier:
            self._work.overtaken.set()

    def _may_report(self, work: _Work) -> bool:
        """True for who asks first."""
        with self._lock:
            first, work.reported = not work.reported, True
            return first

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            self._perform(job)

    def _perform(self, job: Job) -> None:
        try:
            work = self._begin(job)
        except Exception as error:  # as below
            logger.exception("a job of the %s tier failed", self._tier.value)
            self._count(job, -1)
            if isinstance(job, SaveJob):
                self.refuse(job, str(error), left_out=False, hangs=False)
            return
        try:
            self._do(work)
        except Exception:  # the border of this thread: the jobs that wait are not to blame
            logger.exception("a job of the %s tier failed", self._tier.value)
        finally:
            with self._lock:
                self._work = None
            if work.given_up.is_set():
                logger.warning("the storage of the %s tier answers again", self._tier.value)

    def _begin(self, job: Job) -> _Work:
        work = _Work(job, WatchedStorage(self._open_storage(_directory(self._tier, _settings(job)))))
        with self._lock:
            self._work = work
            self._note_overtaken()
        return work

    def _do(self, work: _Work) -> None:
        job, storage = work.job, work.storage
        if isinstance(job, SaveJob):
            self._run_save(work, job)
        elif isinstance(job, RefuseJob):
            _refuse(work, job)
        elif isinstance(job, ShowJob):
            _try(lambda: _show_untaken(storage, job))
        elif isinstance(job, FreeJob):
            free_others(job.arena, job.local_ranks, step=job.step)
        elif isinstance(job, GiveUpJob):
            _try(lambda: _remove_given_up(storage, job))
        else:
            _try(lambda: _retire(storage, job))

    def _run_save(self, work: _Work, job: SaveJob) -> None:
        done = self._save(work, job)
        try:
            # The slots first: who hears that the save is done may want them.
            job.give_back()
        finally:
            self._count(job, -1)
            if self._may_report(work):
                self._on_done(job, done)
        # Nobody waits for this: to delete a large file takes a good part of writing it.
        if job.leads and not done.error:
            self._tidy(work.storage, job)

    def _tidy(self, storage: Storage, job: SaveJob) -> None:
        """What a committed save makes needless: in the local tier no other save, see `_retire`."""
        if job.tier is TierName.PERSISTENT:
            place = job.run_id, storage.describe()
            if self._known[0] != place:
                self._known = place, {}
            try_prune(storage, job.settings.keep, spare=job.step, known=self._known[1])
        _try(lambda: forget_failed(storage, below=job.step))

    def _save(self, work: _Work, job: SaveJob) -> Done:
        began = time.monotonic()
        error, size, kept = "", 0, False
        try:
            committed = self._commit(work, job)
            size = committed.size_bytes
            # Else an agent before this one has committed this very save.
            kept = committed.kept and committed_save(work.storage, job.step) != job.save_id
            logger.info(
                "step %d %s in the %s tier%s",
                job.step,
                "was there before, and stays" if kept else "committed",
                self._tier.value,
                # Nothing is written of what an agent before this one has committed.
                f": {size} bytes in {time.monotonic() - began:.2f} s" if size else "",
            )
        except ResiliencyError as failure:
            error = str(failure)
            logger.error("save of step %d in the %s tier failed: %s", job.step, self._tier.value, error)
        except Exception as failure:  # the border of this thread: a save failed, the next may not
            error = f"{type(failure).__name__}: {failure}"
            logger.exception("save of step %d in the %s tier failed", job.step, self._tier.value)
        return Done(
            step=job.step,
            attempt_id=job.attempt_id,
            tier=self._tier.value,
            error=error,
            try_number=job.try_number,
            kept=kept,
            size_bytes=size,
            queued_s=began - job.queued,
            commit_s=time.monotonic() - began,
        )

    def _commit(self, work: _Work, job: SaveJob) -> Committed:
        try:
            self._remove_obstacles(work.storage, job)
            layout = self._format(job.settings)
        except Exception as error:  # before the commit, which tells other hosts of what fails in it
            if job.concerns_others:
                self.try_put(RefuseJob(save=replace(job, slots={}, missing=str(error)), why=str(error)))
            raise
        storage = work.storage
        shards = {rank: slot.shard for rank, slot in job.slots.items()}
        # A job that was started again at its last step and saved it has it in memory under a new name.
        is_same = partial(holds_shards, storage, job.step, shards)
        return commit(
            storage,
            layout,
            replace(_ticket(job), is_same=is_same if job.step == job.restored_step else None),
            shards,
            leads=job.leads,
            cancel=work.given_up,
            overtaken=work.overtaken,
        )

    def _remove_obstacles(self, storage: WatchedStorage, job: SaveJob) -> None:
        """Remove what a save would find in its way."""
        if job.leads:
            # Not when a start begins: one that saves nothing, such as an evaluation, removes nothing.
            if self._cleaned != start_of(job.attempt_id):
                self._cleaned = start_of(job.attempt_id)
                _try(lambda: _log_gone("unfinished", _clean(storage, job)))
            _try(lambda: free_failed(storage))
            branches = Branches(job.branches)
            record_branches(storage, branches)
            remove_left(storage, job.step, branches)
        # A step that the job went on from is the one to save, and stays.
        if self._tier is TierName.LOCAL and (job.step != job.restored_step or is_damaged(storage, job.step)):
            delete_superseded(storage, step=job.step, run_id=job.run_id, save_id=job.save_id)

    def _format(self, settings: Settings) -> CheckpointFormat[Shard]:
        of = settings.format, settings.replicated, settings.bytes_per_s
        if self._layout is None or self._layout[0] != of:
            self._layout = of, self._new_format(settings)
        return self._layout[1]

    def _new_format(self, settings: Settings) -> CheckpointFormat[Shard]:
        if self._tier is TierName.LOCAL:
            return LocalFormat()
        self._throttle.bytes_per_s = settings.bytes_per_s
        pace = self._throttle.wait
        if settings.format == MegatronFormat.name:
            return MegatronFormat(pace=pace)
        return DcpFormat(spread_unsharded=settings.replicated, values=FlattenedValues(), pace=pace)


def _why_hung(work: _Work, timeouts: CallTimeouts | None) -> str:
    """See `Worker.why_hung`."""
    call = work.storage.oldest_call()
    if call is None:
        return ""
    is_over = timeouts is not None and timeouts.is_over(call)
    if not is_over and call.age_s < _settings(work.job).save_timeout_s:
        return ""
    return (
        f"the storage does not answer: {call.what} {call.path} has not returned for {call.age_s:.0f} s.  "
        "See dmesg, and whether the file server is up.  Older checkpoints are as they were."
    )


def _directory(tier: TierName, settings: Settings) -> str:
    return settings.local_directory if tier is TierName.LOCAL else settings.directory


def _settings(job: Job) -> Settings:
    return job.save.settings if isinstance(job, RefuseJob) else job.settings


def _attempt_id(job: Job) -> str:
    """Of a job that may wait for other hosts; empty: it does not."""
    save = job.save if isinstance(job, RefuseJob) else job
    return save.attempt_id if isinstance(save, SaveJob) and save.concerns_others else ""


def _ticket(job: SaveJob) -> SaveTicket:
    return SaveTicket(
        step=job.step,
        run_id=job.run_id,
        save_id=job.save_id,
        try_number=job.try_number,
        world_size=job.world_size,
        ranks=job.voters,
        restored_save=job.restored_save,
        branches=Branches(job.branches).with_seen([job.save_id]),
        timeout=timedelta(seconds=job.settings.save_timeout_s),
    )


def _clean(storage: WatchedStorage, job: SaveJob) -> list[int]:
    """What unfinished saves of earlier starts of the job left in a tier."""
    if job.tier is TierName.PERSISTENT:
        return clean_unfinished(storage, run_id=job.run_id)
    if not marked_steps(storage):  # nor, at a first start, a directory that could be locked
        return []
    with _kept_from_trainers(storage, job.settings):
        return clean_tier(storage, run_id=job.run_id)


def _show_untaken(storage: WatchedStorage, job: ShowJob) -> None:
    if marked_steps(storage):
        with _kept_from_trainers(storage, job.settings):
            show_untaken(storage)


@contextmanager
def _kept_from_trainers(storage: WatchedStorage, settings: Settings) -> Iterator[None]:
    """For the time in which generations are deleted: where they are handed off, a trainer renames them."""
    with ExitStack() as stack:
        if settings.local_backlog:
            with storage.noted("lock", ""):
                stack.enter_context(locked(Path(settings.local_directory)))
        yield


def _retire(storage: WatchedStorage, job: RetireJob) -> None:
    settings = job.settings
    local = Path(settings.local_directory)
    with _kept_from_trainers(storage, settings):
        gone = retire(
            storage,
            run_id=job.run_id,
            complete=job.complete,
            keep=settings.local_keep,
            hook=HandOffQueue(storage, settings.local_backlog) if settings.local_backlog else None,
            alone=job.alone,
            restored_step=job.restored_step,
        )
    _log_gone("old", gone)
    with storage.noted("delete copies in", ""):
        for source_host, steps in retire_replicas_alone(local, job.complete, keep=settings.local_keep):
            _log_gone(f"{source_host}'s old", steps)


def _remove_given_up(storage: WatchedStorage, job: GiveUpJob) -> None:
    with _kept_from_trainers(storage, job.settings):
        gone = remove_given_up(storage, job.saves)
    _log_gone("given-up", gone)


def _log_gone(what: str, steps: list[int]) -> None:
    if steps:
        logger.info("deleted %s checkpoints: %s", what, steps)


def _try(tidy_up: Callable[[], None]) -> None:
    try:
        tidy_up()
    except ResiliencyError as error:  # no reason to fail the save that this is for; the next one tries again
        logger.warning("needless files were not deleted: %s", error)


def _refuse(work: _Work, job: RefuseJob) -> None:
    """As a commit that fails where it would write: this way the other hosts learn of it.

    This waits for no longer than a save may take.  A follower that comes later still looks once whether its
    leader waits, who may have begun later.  A leader that comes later does nothing: it would clear what is of
    somebody else by now.
    """
    ticket = _ticket(job.save)
    left = ticket.timeout - timedelta(seconds=time.monotonic() - job.save.queued)
    if left <= timedelta(0) and job.save.leads:
        return
    ticket, unwritten = replace(ticket, timeout=max(left, timedelta(0))), dict.fromkeys(job.save.ranks)
    try:
        commit(
            work.storage,
            _Unwritable(job.why),
            ticket,
            unwritten,
            leads=job.save.leads,
            overtaken=work.overtaken,
        )
    except ResiliencyError as error:
        logger.info("step %d is not saved: %s", job.save.step, error)


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
