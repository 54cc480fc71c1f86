# SPDX-License-Identifier: Apache-2.0
"""Collects save requests of a host's ranks into one write task per tier.

A step goes to the worker of a tier once every rank of the host has sent its request or its skip for that
tier: a rank may skip a step in one tier and save it in another.  One capture serves all its tiers.  A step
may be tried several times: ranks number their tries alike, and a request counts for its own try alone.  Each
tier reports each try once; the collector keeps the last reports for ranks that ask again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

from resiliency.checkpoint.agent.commit_lookups import CommitLookup, CommitLookups
from resiliency.checkpoint.agent.jobs import (
    FreeJob,
    GiveUpJob,
    JobKey,
    RefuseJob,
    RetireJob,
    SaveJob,
    ShowJob,
)
from resiliency.checkpoint.agent.protocol import Attach, Done, SaveRequest, Skip
from resiliency.checkpoint.agent.tier_writers import Worker
from resiliency.checkpoint.capture.arena import (
    CapturedSlot,
    open_captured,
    peek,
    rank_directory,
    ranks_in,
    try_open_slot,
)
from resiliency.checkpoint.names import TierName, TierTry, attempt_id_of, save_id_of, start_of
from resiliency.checkpoint.storage.throttle import Throttle
from resiliency.checkpoint.storage.watched import CallTimeouts
from resiliency.errors import CheckpointError
from resiliency.runtime import awake_s, name_ranks

logger = logging.getLogger(__name__)

#: More saves than can be queued or in slots, times tiers.
_REMEMBERED = 128


class _PendingSave:
    """The ranks of this host that have said what they have of one step for one try in one tier."""

    def __init__(self, member: Attach) -> None:
        self.member = member
        self.attempt_id = member.attempt_id
        self.until = awake_s() + member.settings.save_timeout_s
        self.patient = False
        self.slots: dict[int, CapturedSlot] = {}
        self.missing: dict[int, str] = {}
        #: Whether an agent before this one has committed it; None: that is not asked.
        self.lookup: CommitLookup | None = None

    @property
    def ranks(self) -> set[int]:
        return self.slots.keys() | self.missing.keys()

    @property
    def absent(self) -> list[int]:
        """The others of this host."""
        return sorted(set(self.member.local_ranks) - self.ranks)

    def close(self) -> None:
        for slot in self.slots.values():
            slot.close()


class SaveCollector:
    """Gathers steps and passes them on; used by the agent's main thread.

    Args:
        arena: of the job.
        on_done: called with each report, in this thread or a worker's; the agent then calls `finish`.
        throttle: see `Worker`.
    """

    def __init__(self, arena: Path, on_done: Callable[[SaveJob, Done], None], throttle: Throttle) -> None:
        self._arena = arena
        self._on_done = on_done
        self._workers = {tier: Worker(tier, on_done, throttle) for tier in TierName}
        self._commit_lookups = CommitLookups()
        self._pending: dict[TierTry, _PendingSave] = {}
        #: Reports that are still to come.
        self.in_work = 0
        #: The last saves that were handed to a worker, and how they ended if they have.
        self._handled: dict[JobKey, Done | None] = {}
        #: attempt and step of the last emergency commit that was logged as impossible.
        self._reported_uncommitted: tuple[str, int] | None = None

    def begin_attempt(self, attach: Attach) -> None:
        """Another start of the job: what was gathered for the one before is over."""
        incomplete = dict(self._pending)
        for pending in incomplete.values():
            pending.close()
        self._pending.clear()
        # What earlier attempts had in work is reported to nobody.
        self._handled = {
            key: done
            for key, done in self._handled.items()
            if done is None or start_of(key[0]) == start_of(attach.attempt_id)
        }
        if attach.settings.local_directory:
            self._workers[TierName.LOCAL].try_put(ShowJob(settings=attach.settings))
        for tried, pending in incomplete.items():
            self._refuse(tried, pending)

    def stop_waiting(self) -> None:
        """The agent is to leave: saves end to wait for other hosts, see `Worker`."""
        for worker in self._workers.values():
            worker.stop_waiting()

    def _refuse(self, tried: TierTry, pending: _PendingSave) -> None:
        """Tell other hosts, which may wait, that this one's part of a save will not come."""
        why = f"{name_ranks(pending.absent)} ended before having it."
        job = save_job(pending.member, tried, missing=why)
        if job.concerns_others:
            self._workers[job.tier].try_put(RefuseJob(save=job, why=why))

    def save(self, member: Attach, save: SaveRequest) -> list[Done]:
        """A rank has a step; returns what it may have missed, as a rescue was faster."""
        missed = []
        for tried in save.tries:
            key = (member.attempt_id, tried)
            if key not in self._handled:
                pending = self._pending_of(member, tried)
                if save.again and tried.tier == TierName.LOCAL.value and pending.lookup is None:
                    # An agent before this one may have committed it, and died before all heard of it.
                    pending.lookup = self._commit_lookups.ask(member, tried.step)
                pending.patient |= save.patient
                self._add(pending, member, save)
                self._submit(member, tried)
            elif (done := self._handled[key]) is not None:
                missed.append(done)
        return missed

    def look_again(self) -> None:
        """See what is known by now of the saves of agents before this one, and which ranks are overdue.

        What is committed is reported once more, as if it had been now: to all ranks, and for its copies.
        """
        for tried, pending in list(self._pending.items()):
            lookup = pending.lookup
            # It may have gone since, with a newer one.
            if lookup is None or not lookup.is_over() or self._pending.get(tried) is not pending:
                continue
            pending.lookup = None
            if lookup.is_committed():
                self._pending.pop(tried).close()
                self._report_committed(save_job(pending.member, tried))
            else:
                self._submit(pending.member, tried)
        for tried in sorted(tried for tried, one in self._pending.items() if awake_s() > one.until):
            if tried in self._pending:  # else it went with a newer one
                self._end_pending(tried, self._pending[tried])

    def _end_pending(self, tried: TierTry, pending: _PendingSave) -> None:
        """Fail a try of which some ranks have said nothing for the time of a save: their slots are lent."""
        member = pending.member
        for rank in pending.absent:
            pending.missing[rank] = (
                f"rank {rank} said nothing of it for {member.settings.save_timeout_s:g} s: it hangs, or is on"
                f" another machine that is called {member.host!r} as well"
            )
        self._submit(member, tried)

    def _report_committed(self, job: SaveJob) -> None:
        """Nothing is left to do for a step that is here already."""
        self.in_work += 1
        self._handled[job.key] = None
        self._on_done(job, job.ended())

    def skip(self, member: Attach, skip: Skip) -> None:
        """A rank has no capture of a step."""
        for tried in skip.tries:
            self._pending_of(member, tried).missing[member.rank] = skip.reason
            self._submit(member, tried)

    def commit_emergency(self, last: Attach, without: Collection[tuple[int, TierName]] = ()) -> None:
        """Commit the newest step that every rank of this host has whole in memory, where it is quickest.

        Args:
            without: steps, each with a tier that is not to get it.
        """
        steps = [
            {h.step for _, h in peek(self._arena, rank) if h.run_id == last.attempt_id}
            for rank in last.local_ranks
        ]
        for step in sorted(set.intersection(*steps), reverse=True)[:1]:
            if self._is_committed(last.attempt_id, step):
                return
            tier = self._tier_for(last, step, without)
            if tier is None:
                return
            for wanted in TierName:
                # Where some ranks have already sent it, it goes as well.
                number = _newest_try(self._pending, step, wanted) or int(wanted is tier)
                if number:
                    self._commit_emergency_into(last, TierTry(step, number, wanted.value))

    def _tier_for(
        self, last: Attach, step: int, without: Collection[tuple[int, TierName]]
    ) -> TierName | None:
        """The first that has not failed at a step and does not hang; None as well while one is still at it.

        Where other hosts have parts too they take the first, and in another nobody would wait for this one's.
        """
        tiers = [TierName(name) for name in last.settings.tiers]
        if not last.is_alone:
            del tiers[1:]
        for tier in tiers:
            handled = [tried for attempt_id, tried in self._handled if attempt_id == last.attempt_id]
            newest = _newest_try(handled, step, tier)
            if newest >= (_newest_try(self._pending, step, tier) or 1):
                if self._handled[last.attempt_id, TierTry(step, newest, tier.value)] is None:
                    return None  # how it ends is reported
            elif (step, tier) not in without and not self._workers[tier].why_hung():
                if tier is not tiers[0]:
                    logger.warning(
                        "step %d, which its ranks left in memory, goes to the %s tier: the %s tier failed, or"
                        " does not answer",
                        *(step, tier.value, tiers[0].value),
                    )
                return tier
        if self._reported_uncommitted != (last.attempt_id, step):
            self._reported_uncommitted = last.attempt_id, step
            logger.error(
                "step %d, which its ranks left in memory, is not committed: storage of the %s tier failed, or"
                " does not answer",
                *(step, " and the ".join(tier.value for tier in tiers)),
            )
        return None

    def _commit_emergency_into(self, last: Attach, tried: TierTry) -> None:
        step = tried.step
        pending = self._pending.get(tried) or _PendingSave(last)
        with ExitStack() as opened:
            try:
                found = {
                    rank: opened.enter_context(open_captured(self._arena, rank, step=step))
                    for rank in last.local_ranks
                    if rank not in pending.slots
                }
            except CheckpointError as error:  # its trainer lives and captures again
                # The text, not the error: a kept record would keep this frame, and with it the slots, mapped.
                logger.info("step %d is not whole any more: %s", step, str(error))
                return
            opened.pop_all()
        logger.warning("committing step %d, which its ranks left in memory, in the %s tier", step, tried.tier)
        pending.slots.update(found)
        pending.patient = True
        self._pending[tried] = pending
        self._submit(last, tried)

    def finish(self, job: SaveJob, done: Done) -> None:
        """Take note of a report."""
        self.in_work -= 1
        if done.left_out:  # not even begun: it may still be rescued
            self._handled.pop(job.key, None)
        elif not job.missing:
            self._handled[job.key] = done
            is_whole = job.tier is TierName.PERSISTENT or len(job.ranks) == job.world_size
            if job.step == job.restored_step and is_whole and not done.error:
                # So is what the start before captured, which this one went on from.
                self._handled[attempt_id_of(job.restored_save, job.step), job.key[1]] = done
        while len(self._handled) > _REMEMBERED:
            del self._handled[next(iter(self._handled))]

    def retire(self, job: RetireJob) -> None:
        """Delete what is needless in the local tier, after what is being written there."""
        if not self._workers[TierName.LOCAL].try_put(job):
            logger.info("old checkpoints stay until the next step is complete")

    def give_up(self, job: GiveUpJob) -> None:
        """Delete in the local tier what never becomes complete, after what is being written there."""
        if not self._workers[TierName.LOCAL].try_put(job):
            logger.info("steps that were given up stay until the next one is")

    def free_others(self, attach: Attach, tier: TierName, step: int) -> None:
        """`step` of this attempt is safe in `tier`: ranks that run elsewhere now need no captures here."""
        if set(ranks_in(self._arena)) - set(attach.local_ranks):
            job = FreeJob(
                settings=attach.settings, arena=self._arena, local_ranks=attach.local_ranks, step=step
            )
            self._workers[tier].try_put(job)  # if it is busy, after the next step

    def captures_are_spent(self) -> bool:
        """Whether every newest capture here is committed in some tier."""
        newest = [peek(self._arena, rank)[:1] for rank in ranks_in(self._arena)]
        return all(self._is_committed(header.run_id, header.step) for found in newest for _, header in found)

    def look_for_hang(self, timeouts: CallTimeouts | None = None) -> None:
        """Have reported what waits for storage that does not answer; see `Worker.look_for_hang`."""
        for worker in self._workers.values():
            worker.look_for_hang(timeouts)

    def close(self, timeout: timedelta) -> None:
        """End the workers; those whose storage does not answer are left behind."""
        deadline = awake_s() + timeout.total_seconds()
        for worker in self._workers.values():
            worker.close(timedelta(seconds=max(0.0, deadline - awake_s())))
        self._commit_lookups.close()
        for pending in self._pending.values():
            pending.close()
        self._pending.clear()  # and with them the mappings of slots

    def _is_committed(self, attempt_id: str, step: int, tier: str | None = None) -> bool:
        """By any try, and in any tier if none is named."""
        return any(
            (of_attempt, tried.step) == (attempt_id, step)
            and tier in (None, tried.tier)
            and done is not None
            and not done.error
            for (of_attempt, tried), done in self._handled.items()
        )

    def _pending_of(self, member: Attach, tried: TierTry) -> _PendingSave:
        return self._pending.setdefault(tried, _PendingSave(member))

    def _add(self, pending: _PendingSave, member: Attach, save: SaveRequest) -> None:
        try:
            slot = self._borrow(member, save)
            why = f"{save.slot} does not hold that step, or was deleted"
        except (CheckpointError, OSError) as error:  # no descriptor is left, for instance
            slot, why = None, str(error)  # a kept record of the error itself would keep slots mapped
            logger.warning("rank %d, step %d: %s", member.rank, save.step, why)
        if slot is None:
            pending.missing[member.rank] = f"rank {member.rank}: {why}"
        elif member.rank in pending.slots:
            slot.close()
        else:
            pending.slots[member.rank] = slot

    def _borrow(self, member: Attach, save: SaveRequest) -> CapturedSlot | None:
        if not save.slot or "/" in save.slot:
            return None
        slot = try_open_slot(rank_directory(self._arena, member.rank) / save.slot)
        if slot is None:
            return None
        made_by = slot.header.run_id
        # Or by the start before, which left this step in memory alone.
        is_ours = made_by == member.attempt_id or save_id_of(made_by, save.step) == member.restored_save
        if is_ours and slot.header.step == save.step:
            return slot
        slot.close()
        return None

    def _submit(self, attach: Attach, tried: TierTry) -> None:
        """Pass a try to its tier once all ranks of this host have spoken."""
        pending = self._pending[tried]
        if pending.ranks != set(attach.local_ranks):
            return
        if pending.missing and pending.lookup is not None:
            return  # it may be committed all the same: ranks that were told so say no more of it
        del self._pending[tried]  # and with it the question: a commit finds what is there, too
        # Ranks pass the tries of a tier in order, so an older one that is still incomplete never will be
        # whole.  Of another tier it may be: after the loss of an agent they speak of one tier at a time.
        older = [other for other in self._pending if other.tier == tried.tier and other < tried]
        for other in sorted(older):
            incomplete = self._pending[other]
            for rank in incomplete.absent:
                incomplete.missing[rank] = f"rank {rank} went on without it"
            self._submit(attach, other)  # those that wait for it are told
        is_committed = self._is_committed(pending.attempt_id, tried.step, tried.tier)
        missing = "" if is_committed else "; ".join(pending.missing.values())
        job = save_job(attach, tried, slots={} if missing or is_committed else pending.slots, missing=missing)
        if missing or is_committed or job.key in self._handled:
            pending.close()
        if job.key in self._handled:
            return  # its report reaches them
        if is_committed:  # by an earlier try, of which some ranks were not told
            self._report_committed(job)
        else:
            self._pass_to_worker(job, patient=pending.patient)

    def _pass_to_worker(self, job: SaveJob, *, patient: bool) -> None:
        self.in_work += 1
        worker = self._workers[job.tier]
        worker.overtake(job.attempt_id)
        hang = worker.why_hung()
        if hang and not job.missing:
            worker.refuse(job, hang, left_out=True, hangs=True)
            return
        why, left_out = job.missing, False
        if not why and not patient and len(job.settings.tiers) > 1 and worker.is_saving(job.attempt_id):
            # Its slot would be lent for as long, and there is one for each tier.
            why, left_out = (
                "an earlier save is still being written: storage is slower than the interval",
                True,
            )
        if not why:
            self._handled[job.key] = None
            if worker.try_put(job):
                return
            del self._handled[job.key]
            why = "too many saves wait for storage"
        # Nothing is remembered of it: what was not even begun may still be rescued.
        worker.refuse(job, why, left_out=left_out, hangs=bool(hang))


def _newest_try(tries: Iterable[TierTry], step: int, tier: TierName) -> int:
    """The number of the newest of `step` in `tier`; 0: none."""
    return max((tried.number for tried in tries if (tried.step, tried.tier) == (step, tier)), default=0)


def save_job(
    member: Attach, tried: TierTry, *, slots: Mapping[int, CapturedSlot] | None = None, missing: str = ""
) -> SaveJob:
    """This host's part of a try, as its ranks have introduced themselves."""
    return SaveJob(
        tier=TierName(tried.tier),
        step=tried.step,
        attempt_id=member.attempt_id,
        run_id=member.run_id,
        world_size=member.world_size,
        ranks=tuple(sorted(member.local_ranks)),
        slots=slots or {},
        settings=member.settings,
        try_number=tried.number,
        restored_step=member.restored_step,
        restored_save=member.restored_save,
        branches=member.branches,
        missing=missing,
    )
