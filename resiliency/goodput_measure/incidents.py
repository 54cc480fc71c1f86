# SPDX-License-Identifier: Apache-2.0
"""Incidents: what each fault cost, as spans from the fault to the first new step.

An incident opens with the first `fault_detected` after the workers were last started, and takes in
every launcher event up to the next `workers_started`; then the ranks' own events tell how the new
processes came up.  A stage counts as reached when the last rank has reached it.  Launcher events
of several hosts fall into one incident as long as the hosts' clocks agree to within the time that
a restart takes.

Where a supervisor restarted the job, its decision and the end of its action are two more stages.  A
decision opens an incident as a fault does: a second action comes when the first one changed nothing.

`IncidentFinder` takes facts as they become known, and looks again at those incidents alone that they may
change: at each rank once for each of them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from resiliency.events import EventType, JsonValue
from resiliency.goodput_measure.lives import REACHED, Growth, Life, from_us

#: Stages after the fault, in the order in which a restart goes through them.
STAGES = (
    "detected",
    "stopped",
    "rendezvous",
    "started",
    "imported",
    "initialized",
    "restored",
    "first_new_step",
)
#: The same with what a supervisor adds; these two are there only in incidents that it acted for.
SUPERVISED_STAGES = ("detected", "decided", "acted", *STAGES[1:])


# What settles equal times: the order of a restart.
_ORDER = {
    EventType.FAULT_DETECTED: 0,
    EventType.ACTION_DECIDED: 1,
    EventType.WORKERS_STOPPED: 2,
    EventType.RENDEZVOUS_DONE: 3,
    EventType.WORKERS_STARTED: 4,
    EventType.ACTION_ENDED: 5,
}


class LauncherFact(NamedTuple):
    """What an incident needs of a launcher event."""

    time: int
    type: EventType
    rank: int | None = None
    cause: str = ""
    action: str = ""  # of a supervisor

    @property
    def order(self) -> tuple[int, int, int, str, str]:
        """The same for the facts of all hosts, in whatever order their logs are read."""
        rank = -1 if self.rank is None else self.rank
        return self.time, _ORDER.get(self.type, -1), rank, self.cause, self.action


class Failure(NamedTuple):
    """A fault that was injected, so that its true time is known."""

    time: int
    rank: int | None = None
    kind: str = ""

    @property
    def order(self) -> tuple[int, int, str]:
        return self.time, -1 if self.rank is None else self.rank, self.kind


@dataclass(frozen=True, kw_only=True)
class Incident:
    """One interruption.  Times are microseconds since the epoch; None where no event tells.

    `fault` is the true time where the fault was injected (`fault_known`), else the last step that
    any rank finished before the detection, so that `detected` is an upper bound.
    """

    index: int
    fault: int
    fault_known: bool
    detected: int
    decided: int | None = None
    acted: int | None = None
    stopped: int | None = None
    rendezvous: int | None = None
    started: int | None = None
    imported: int | None = None
    initialized: int | None = None
    restored: int | None = None
    first_new_step: int | None = None
    ranks: tuple[int, ...] = ()
    cause: str = ""
    action: str = ""  # the supervisor's newest for it
    last_step: int | None = None
    last_step_at: int | None = None  # when any rank last finished one before the detection
    restored_step: int | None = None
    tier: str | None = None

    @property
    def painted(self) -> tuple[object, ...]:
        """What the lanes show of the incident."""
        return self.fault, self.detected, self.decided, self.acted, self.action, self.rendezvous

    @property
    def spans(self) -> dict[str, float | None]:
        """Seconds that each stage took after the latest known stage before it.

        The known spans add up to `total_s`.  Stages that passed in another order (some frameworks
        restore before they count as initialized) are measured in the order in which they passed.
        """
        spans: dict[str, float | None] = dict.fromkeys(stages_of((self,)))
        before = self.fault
        reached = [
            (time, order, stage)
            for order, stage in enumerate(SUPERVISED_STAGES)
            if (time := getattr(self, stage)) is not None
        ]
        for time, _, stage in sorted(reached):
            spans[stage] = (max(time, before) - before) / 1e6
            before = max(time, before)
        return spans

    @property
    def total_s(self) -> float | None:
        """From the fault to the first new step; None when training never came back."""
        return None if self.first_new_step is None else (self.first_new_step - self.fault) / 1e6

    @property
    def lost_steps(self) -> int | None:
        """How many finished steps had to be done again."""
        if self.last_step is None or self.restored_step is None:
            return None
        return max(self.last_step - self.restored_step, 0)

    def to_json(self) -> dict[str, JsonValue]:
        """The incident as numbers that people and programs can read."""
        return {
            "index": self.index,
            "fault_time": from_us(self.fault).isoformat(),
            "fault_time_known": self.fault_known,
            "ranks": list(self.ranks),
            "cause": self.cause,
            "action": self.action,
            "spans_s": dict(self.spans),
            "total_s": self.total_s,
            "lost_steps": self.lost_steps,
            "restored_step": self.restored_step,
            "restored_from": self.tier,
        }


def stages_of(incidents: Iterable[Incident]) -> tuple[str, ...]:
    """The stages to show for `incidents`: a supervisor's only where it acted for one of them."""
    acted = any(one.decided is not None or one.acted is not None for one in incidents)
    return SUPERVISED_STAGES if acted else STAGES


_WORKING = attrgetter("working")
#: The other types say nothing about an incident.
_KNOWN = frozenset({*_ORDER, EventType.JOB_TERMINATED})


class IncidentFinder:
    """Groups launcher facts into incidents and completes them from the lives of the ranks."""

    def __init__(self) -> None:
        self.incidents: tuple[Incident, ...] = ()
        self.faults: list[Failure] = []  # by time
        self._facts: list[LauncherFact] = []  # in their order
        self._new: list[LauncherFact] = []
        self._drafts: list[_Draft] = []
        self._found: list[_Draft] = []  # those that are incidents
        self._changed = 0  # the first incident that is not up to date; at most their number

    def add_fact(self, fact: LauncherFact) -> None:
        if fact.type in _KNOWN:
            self._new.append(fact)

    def add_fault(self, fault: Failure) -> None:
        insort(self.faults, fault, key=lambda one: one.order)
        self._change_from(bisect_left(self._found, fault.time, key=_detected))

    def note_growth(self, growth: Growth) -> None:
        """A life has new marks."""
        is_late = bool(self.incidents) and growth.last <= self.incidents[-1].detected
        if is_late or growth.tells_of_start:
            # The newest incident before it began waits for it; those after its marks ended it.
            began = min(growth.working, growth.life.working)
            waits = bisect_left(self._found, began, key=_detected) - 1
            self._change_from(min(waits, bisect_left(self._found, growth.last, key=_detected)))

    def forget_lives(self) -> None:
        """The lives are others than they were."""
        self._changed = -1

    def update(self, ranks: Sequence[Sequence[Life]]) -> int | None:
        """Bring `incidents` up to date; returns from when on they are others, None where they are not.

        Args:
            ranks: the lives of each in their order, in the order of the ranks.
        """
        self._take_facts()
        if self._changed >= len(self._found) == len(self.incidents):
            return None
        first = max(min(self._changed, len(self._found)), 0)
        before = self.incidents
        self.incidents = (
            *before[:first],
            *(self._complete(index, ranks) for index in range(first, len(self._found))),
        )
        self._changed = len(self._found)
        for old, new in zip(before[first:], self.incidents[first:], strict=False):
            if old.painted != new.painted:
                return min(old.detected, new.detected)
        longer = max(before, self.incidents, key=len)
        common = min(len(before), len(self.incidents))
        return longer[common].detected if len(longer) > common else None

    def _change_from(self, index: int) -> None:
        self._changed = min(self._changed, index)

    def _take_facts(self) -> None:
        if not self._new:
            return
        new = sorted(self._new, key=lambda fact: fact.order)
        self._new = []
        # The last draft may still take in facts, and it ends the waiting of the incident before it.
        self._change_from(len(self._found) - 2)
        begin = len(self._facts)
        if self._facts and new[0].order < self._facts[-1].order:
            while self._drafts and self._drafts[-1].opened > new[0].order:
                self._drafts.pop()
            opened = self._drafts.pop().opened if self._drafts else None
            begin = 0 if opened is None else bisect_left(self._facts, opened, key=lambda fact: fact.order)
            self._facts[begin:] = sorted((*self._facts[begin:], *new), key=lambda fact: fact.order)
            self._change_from(sum(draft.is_incident for draft in self._drafts) - 2)
        else:
            self._facts += new
        for index in range(begin, len(self._facts)):
            _add_fact(self._drafts, self._facts[index])
        self._found = [draft for draft in self._drafts if draft.is_incident]

    def _complete(self, index: int, ranks: Sequence[Sequence[Life]]) -> Incident:
        draft = self._found[index]
        after = self._found[index - 1].detected if index else None
        before = self._found[index + 1].detected if index + 1 < len(self._found) else None
        injected = self._injected_at(draft.detected, after)
        reached: dict[EventType, int] = {}
        last_steps: list[int] = []
        ended: list[int] = []
        resumed: list[int] = []
        tier: str | None = None
        for lives in ranks:
            place = bisect_right(lives, draft.detected, key=_WORKING)
            old = lives[place - 1] if place else None
            if old is not None and (after is None or old.last > after):
                at, step = old.finished_step(draft.detected)
                if at is not None:
                    ended.append(at)
                if step is not None:
                    last_steps.append(step)
                # Survivors finish at most the step they are in; more steps since then mean that this
                # fault (a slowdown, say) did not interrupt the job.
                if injected is not None and (
                    old.marks.count_of(EventType.STEP_FINISHED, injected, draft.detected) > 1
                ):
                    injected = None
            if place < len(lives) and (before is None or lives[place].working < before):
                new = lives[place]
                for stage in REACHED:
                    if (time := new.first(stage)) is not None:
                        reached[stage] = max(time, reached.get(stage, time))
                if (from_step := new.resumed_from) is not None:
                    resumed.append(from_step)
                tier = tier or new.marks.first_tier()
        last_step_at = max(ended, default=None)
        first_new_step = reached.get(EventType.STEP_FINISHED)
        acted = draft.acted
        if acted is not None and first_new_step is not None:
            acted = min(acted, first_new_step)  # the job did not wait for what the supervisor learnt later
        return Incident(
            index=index,
            fault=next(time for time in (injected, last_step_at, draft.detected) if time is not None),
            fault_known=injected is not None,
            detected=draft.detected,
            decided=draft.decided,
            acted=acted,
            stopped=draft.stopped,
            rendezvous=draft.rendezvous,
            started=draft.started,
            imported=reached.get(EventType.IMPORTED),
            initialized=reached.get(EventType.INITIALIZED),
            restored=reached.get(EventType.CHECKPOINT_LOADED),
            first_new_step=first_new_step,
            ranks=tuple(sorted(draft.ranks)),
            cause=draft.cause,
            action=draft.action,
            last_step=max(last_steps, default=None),
            last_step_at=last_step_at,
            restored_step=min(resumed, default=None),
            tier=tier,
        )

    def _injected_at(self, detected: int, after: int | None) -> int | None:
        """When the newest fault was injected that may have interrupted the job; None where none was."""
        place = bisect_right(self.faults, detected, key=lambda fault: fault.time)
        if place and (after is None or self.faults[place - 1].time > after):
            return self.faults[place - 1].time
        return None


@dataclass
class _Draft:
    """An incident while launcher facts still arrive."""

    opened: tuple[int, int, int, str, str]  # order of the fact that opened it
    certain: bool = False  # a fault was reported; mere stopping is also how a job ends
    ranks: set[int] = field(default_factory=set)
    cause: str = ""
    action: str = ""
    decided: int | None = None
    acted: int | None = None
    stopped: int | None = None
    rendezvous: int | None = None
    started: int | None = None

    @property
    def detected(self) -> int:
        return self.opened[0]

    @property
    def is_incident(self) -> bool:
        return self.certain or self.started is not None


def _detected(draft: _Draft) -> int:
    return draft.opened[0]


def _add_fact(drafts: list[_Draft], fact: LauncherFact) -> None:
    """The next fact, in their order."""
    draft = drafts[-1] if drafts and drafts[-1].started is None else None
    if fact.type in (EventType.FAULT_DETECTED, EventType.ACTION_DECIDED, EventType.WORKERS_STOPPED):
        if draft is None:
            draft = _Draft(opened=fact.order)
            drafts.append(draft)
        if fact.type is EventType.WORKERS_STOPPED:
            draft.stopped = fact.time
        else:
            draft.certain = True
            draft.cause = draft.cause or fact.cause
            if fact.rank is not None:
                draft.ranks.add(fact.rank)
            if fact.type is EventType.ACTION_DECIDED:
                draft.decided, draft.action = fact.time, fact.action
    elif fact.type is EventType.ACTION_ENDED:
        # Often after the ranks have started: the supervisor learns of it last.
        if drafts and drafts[-1].decided is not None:
            drafts[-1].acted = fact.time
    elif draft is not None and fact.type is EventType.RENDEZVOUS_DONE:
        draft.rendezvous = fact.time
    elif draft is not None and fact.type is EventType.WORKERS_STARTED:
        draft.started = fact.time
    elif draft is not None and fact.type is EventType.JOB_TERMINATED and not draft.certain:
        drafts.pop()  # stopped because the job was told to end
