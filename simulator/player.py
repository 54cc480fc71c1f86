# SPDX-License-Identifier: Apache-2.0
"""Plays the part of a schedule that belongs to one node, and undoes it.

One thread, one loop: what is due ends, what is due happens, then it waits.  The order around each effect is
aim, journal, inject, wait, undo, journal; a kill between any two leaves an open entry or nothing.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

from resiliency.errors import ResiliencyError
from resiliency.events import EventStream, EventType
from resiliency.runtime import Clock, SystemClock
from simulator.faults import FaultMissed, InjectionFailed, Kind, PlannedFault
from simulator.injectors import Injector, error_text, refusal_of
from simulator.job import Job
from simulator.journal import Journal, Record, Recovered

logger = logging.getLogger(__name__)

#: How often the job is looked for.
_LOOK_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What became of a node's faults.

    Attributes:
        injected, missed, failed: faults that happened, had no target, met an error.
        undone: effects that were ended.
        kept: effects that could not be ended; they are in the journal.
    """

    injected: int = 0
    missed: int = 0
    failed: int = 0
    undone: int = 0
    kept: int = 0

    def __str__(self) -> str:
        text = f"{self.injected} faults injected, {self.missed} missed, {self.undone} effects undone"
        if self.failed:
            text += f", {self.failed} failed"
        return text + (f", {self.kept} NOT undone" if self.kept else "")


class Player:
    """One node's simulator.

    Args:
        faults: of this node, in order.
        job: that is injured.
        injectors: the first one that knows a kind and works on this host carries it out.
        journal: of this process.
        wait: sleeps as many seconds at most; True when the simulator is to end.
        events: receive `FAULT_INJECTED`.
        grace: how long no process of the job may be there before it has ended; restarts are shorter.
    """

    def __init__(
        self,
        faults: Sequence[PlannedFault],
        job: Job,
        injectors: Sequence[Injector],
        journal: Journal,
        *,
        wait: Callable[[float], bool],
        events: EventStream | None = None,
        grace: timedelta = timedelta(seconds=15),
        clock: Clock | None = None,
    ) -> None:
        self._pending = list(reversed(faults))
        self._job = job
        self._journal = journal
        self._wait = wait
        self._events = events
        self._grace_s = grace.total_seconds()
        self._clock = clock or SystemClock()
        self._all_injectors = injectors
        self._injectors: dict[Kind, Injector | None] = {}
        #: Effects that end later: time, entry, injector, record, text.
        self._active: list[tuple[float, int, Injector, Record, str]] = []
        self._summary = Summary()

    def wait_for_job(self, timeout: timedelta) -> bool:
        """Wait until the job has a worker on this node; False when the simulator is to end instead.

        Raises:
            FaultMissed: there was none in time; the message says what is there.
        """
        deadline = self._clock.monotonic() + timeout.total_seconds()
        while not self._job.workers():
            if self._clock.monotonic() >= deadline:
                others = self._job.other_nodes()
                raise FaultMissed(
                    f"no worker of job {self._job.name} on this node within {timeout.total_seconds():g} s.",
                    hint=f"Workers with GROUP_RANK {', '.join(others)} are here: see --node_rank."
                    if others
                    else "It must run on this host, as this user, with JOB_IDENTIFIER or TORCHELASTIC_RUN_ID"
                    " set to this name: see --job.",
                )
            if self._wait(0.2):
                return False
        return True

    def play(self) -> Summary:
        """Play all faults until none is left, the job ends, or `wait` says so.  All is undone then."""
        # Now that the job is there, they know whether they can work on it.
        self._injectors = {
            kind: next(
                (one for one in self._all_injectors if kind in one.kinds and not refusal_of(one)), None
            )
            for kind in {fault.kind for fault in self._pending}
        }
        began = seen = self._clock.monotonic()
        try:
            while self._pending or self._active:
                now = self._clock.monotonic()
                self._end_effects(now)
                while self._pending and began + self._pending[-1].at_us / 1e6 <= now:
                    self._inject(self._pending.pop())
                if self._job.is_present():
                    seen = now
                elif now - seen >= self._grace_s:
                    logger.info("simulator ends: job %s has ended", self._job.name)
                    break
                due = [began + self._pending[-1].at_us / 1e6] if self._pending else []
                due += [self._active[0][0]] if self._active else []
                left_s = min(due, default=now) - self._clock.monotonic()
                if self._wait(min(max(left_s, 0.0), _LOOK_S)):
                    logger.info("simulator ends: a signal asked for it")
                    break
        finally:
            self._end_effects(None)
        return self._summary

    def _inject(self, fault: PlannedFault) -> None:
        injector = self._injectors[fault.kind]
        if injector is None:
            self._count(missed=1)
            logger.warning("fault missed: no injector for %s works on this host", fault.text)
            return
        if not self._job.is_present():  # a fault of the host would hit the next job, or count for this one
            self._count(missed=1)
            logger.warning("%s missed: job %s is not on this node now", fault.text, self._job.name)
            return
        try:
            record = injector.aim_fault(fault) | {"injector": injector.name, "fault": fault.text}
            number = self._journal.begin_effect(record)
        except FaultMissed as error:
            self._count(missed=1)
            logger.warning("%s", error)
            return
        except Exception as error:  # the border to an injector, which may be anybody's
            self._count(failed=1)
            _log_failure(f"fault {fault.text} not injected", error)
            return
        at, end_s = self._clock.now(), self._clock.monotonic() + fault.duration_us / 1e6
        effect = (end_s, number, injector, record, fault.text)
        try:
            injector.inject(record)
        except FaultMissed as error:
            self._count(missed=1)
            logger.warning("fault %s not injected: %s", fault.text, error)
            self._end_effect(effect, counted=False)
            return
        except Exception as error:  # as above; also no room for a process or a descriptor
            self._count(failed=1)
            _log_failure(f"fault {fault.text} not injected", error)
            self._end_effect(effect, counted=False)
            return
        self._count(injected=1)
        logger.info("fault injected: %s%s", fault.text, f" ({fault.cause})" if fault.cause else "")
        if self._events is not None:
            rank = record.get("rank")
            self._events.emit(
                EventType.FAULT_INJECTED,
                rank=rank if isinstance(rank, int) else None,
                time=at,
                fault=fault.text,
                kind=fault.kind.value,
                cause=fault.cause,
                duration_s=fault.duration_us / 1e6,
                value=fault.value,
            )
        if fault.duration_us:
            heapq.heappush(self._active, effect)
        else:
            try:
                self._journal.end_effect(number)
            except OSError as error:
                # The next start undoes it, which changes nothing of an effect that has no end.
                self._count(kept=1)
                _log_failure(f"effect kept in the journal: {fault.text}", error)

    def _end_effects(self, now: float | None) -> None:
        """Those that are due; all for None."""
        while self._active and (now is None or self._active[0][0] <= now):
            self._end_effect(heapq.heappop(self._active), counted=True)

    def _end_effect(self, effect: tuple[float, int, Injector, Record, str], *, counted: bool) -> None:
        _, number, injector, record, text = effect
        try:
            injector.end_effect(record)
            self._journal.end_effect(number)
        except Exception as error:  # as in `_inject`
            self._count(kept=1)
            _log_failure(f"effect kept: {text}", error)
            return
        if counted:
            self._count(undone=1)
            logger.info("effect undone: %s", text)

    def _count(self, **more: int) -> None:
        changed = {name: getattr(self._summary, name) + number for name, number in more.items()}
        self._summary = replace(self._summary, **changed)


def _log_failure(what: str, error: Exception) -> None:
    is_known = isinstance(error, (ResiliencyError, OSError))  # they say enough
    logger.error("%s: %s", what, error_text(error), exc_info=None if is_known else error)


def recover(journal: Journal, injectors: Iterable[Injector]) -> Recovered:
    """Undo what simulators that were killed have left on this host."""
    by_name = {injector.name: injector for injector in injectors}

    def undo(record: Record, same_boot: bool) -> None:
        injector = by_name.get(str(record.get("injector")))
        if injector is None:
            raise InjectionFailed(f"no injector {record.get('injector')!r} is there to undo {record}.")
        if same_boot or injector.outlives_boot:
            try:
                injector.end_effect(record)
            except ResiliencyError:
                raise
            except Exception as error:  # as in `_inject`: the other effects must not wait for this one
                raise InjectionFailed(f"cannot undo {record}: {error!r}.") from error
        logger.info("effect undone that a killed simulator left: %s", record.get("fault"))

    return journal.recover(undo)
