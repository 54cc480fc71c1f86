# SPDX-License-Identifier: Apache-2.0
"""Incidents: what each fault cost, as spans from the fault to the first new step.

An incident opens with the first `fault_detected` after the workers were last started, and takes in
every launcher event up to the next `workers_started`; then the ranks' own events tell how the new
processes came up.  A stage counts as reached when the last rank has reached it.  Launcher events
of several hosts fall into one incident as long as the hosts' clocks agree to within the time that
a restart takes.

Where a supervisor restarted the job, its decision and the end of its action are two more stages.  A
decision opens an incident as a fault does: a second action comes when the first one changed nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from resiliency.events import EventType, JsonValue
from resiliency.goodput_measure.lives import Life, from_us

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


class Failure(NamedTuple):
    """A fault that was injected, so that its true time is known."""

    time: int
    rank: int | None = None
    kind: str = ""


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


def find_incidents(
    facts: Iterable[LauncherFact], lives: Sequence[Sequence[Life]], faults: Sequence[Failure]
) -> tuple[Incident, ...]:
    """Group launcher facts into incidents and complete them from the ranks' lives."""
    drafts = _drafts(sorted(facts, key=lambda fact: (fact.time, _ORDER.get(fact.type, -1))))
    incidents = []
    for index, draft in enumerate(drafts):
        after = drafts[index - 1].detected if index else None
        before = drafts[index + 1].detected if index + 1 < len(drafts) else None
        incidents.append(_complete(index, draft, lives, faults, after, before))
    return tuple(incidents)


@dataclass
class _Draft:
    """An incident while launcher facts still arrive."""

    detected: int
    certain: bool = False  # a fault was reported; mere stopping is also how a job ends
    ranks: set[int] = field(default_factory=set)
    cause: str = ""
    action: str = ""
    decided: int | None = None
    acted: int | None = None
    stopped: int | None = None
    rendezvous: int | None = None
    started: int | None = None


def _drafts(facts: list[LauncherFact]) -> list[_Draft]:
    drafts: list[_Draft] = []
    for fact in facts:
        draft = drafts[-1] if drafts and drafts[-1].started is None else None
        if fact.type in (EventType.FAULT_DETECTED, EventType.ACTION_DECIDED, EventType.WORKERS_STOPPED):
            if draft is None:
                draft = _Draft(detected=fact.time)
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
    return [draft for draft in drafts if draft.certain or draft.started is not None]


def _complete(
    index: int,
    draft: _Draft,
    lives: Sequence[Sequence[Life]],
    faults: Sequence[Failure],
    after: int | None,
    before: int | None,
) -> Incident:
    old = [
        life
        for of_rank in lives
        if (life := _last_working(of_rank, draft.detected)) and (after is None or life.last > after)
    ]
    new = [life for of_rank in lives if (life := _next_working(of_rank, draft.detected, before))]
    ends = [life.marks.last_of(EventType.STEP_FINISHED, draft.detected) for life in old]
    last_step_at = max((time for time in ends if time is not None), default=None)
    injected = _injected_at(draft.detected, old, faults, after)
    fault = next(time for time in (injected, last_step_at, draft.detected) if time is not None)
    incident = Incident(
        index=index,
        fault=fault,
        fault_known=injected is not None,
        detected=draft.detected,
        decided=draft.decided,
        acted=draft.acted,
        stopped=draft.stopped,
        rendezvous=draft.rendezvous,
        started=draft.started,
        ranks=tuple(sorted(draft.ranks)),
        cause=draft.cause,
        action=draft.action,
        last_step_at=last_step_at,
        last_step=max(
            (
                step
                for life in old
                if (step := life.marks.highest_step(EventType.STEP_FINISHED, draft.detected)) is not None
            ),
            default=None,
        ),
    )
    return _with_recovery(incident, new)


def _with_recovery(incident: Incident, new: list[Life]) -> Incident:
    def reached(type: EventType) -> int | None:
        times = [time for life in new if (time := life.first(type)) is not None]
        return max(times, default=None)

    loads = [mark for life in new for mark in life.marks.of_type(EventType.CHECKPOINT_LOADED)]
    resumed = [step for life in new if (step := life.resumed_from) is not None]
    first_new_step = reached(EventType.STEP_FINISHED)
    acted = incident.acted
    if acted is not None and first_new_step is not None:
        acted = min(acted, first_new_step)  # the job did not wait for what the supervisor learnt later
    return replace(
        incident,
        acted=acted,
        imported=reached(EventType.IMPORTED),
        initialized=reached(EventType.INITIALIZED),
        restored=reached(EventType.CHECKPOINT_LOADED),
        first_new_step=first_new_step,
        restored_step=min(resumed, default=None),
        tier=next((mark.tier for mark in loads if mark.tier), None),
    )


def _last_working(of_rank: Sequence[Life], time: int) -> Life | None:
    return next((life for life in reversed(of_rank) if life.working <= time), None)


def _next_working(of_rank: Sequence[Life], after: int, before: int | None) -> Life | None:
    life = next((life for life in of_rank if life.working > after), None)
    return life if life is not None and (before is None or life.working < before) else None


def _injected_at(detected: int, old: list[Life], faults: Sequence[Failure], after: int | None) -> int | None:
    """When the fault was injected that interrupted the job; None where none was."""
    for fault in sorted(faults, reverse=True, key=lambda fault: fault.time):
        if fault.time > detected or (after is not None and fault.time <= after):
            continue
        # Survivors finish at most the step they are in; more steps since then means that this
        # fault (a slowdown, say) did not interrupt the job.
        if all(life.marks.count_of(EventType.STEP_FINISHED, fault.time, detected) <= 1 for life in old):
            return fault.time
        break
    return None
