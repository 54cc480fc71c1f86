# SPDX-License-Identifier: Apache-2.0
"""An incident of the supervisor in the job's event stream, and in its goodput ledger."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest

from resiliency.events import EventType as E
from resiliency.events import RunEvent
from resiliency.goodput_measure.incidents import STAGES, SUPERVISED_STAGES
from resiliency.goodput_measure.ledger import build_ledger
from resiliency.goodput_measure.lives import from_us
from resiliency.goodput_measure.report import incidents_text
from supervisor.values import CommandKind, EventType, OutcomeStatus
from supervisor.view.run_events import run_events
from supervisor.view.status import CommandStatus, EvidenceStatus, IncidentStatus, ReportStatus
from tests.goodput.story import Story

NOW = datetime(2026, 11, 23, 12, tzinfo=timezone.utc)


def hang(age_s: float) -> IncidentStatus:
    evidence = (EvidenceStatus(id="e1", witness="worker", text="rank 1 is at step 2, the others at 3"),)
    report = ReportStatus(event="event-1", type=EventType.HANG, ranks=(1,), evidence=evidence, acted_on=True)
    return IncidentStatus(
        id="i1", subject="llama", age_s=age_s, closed_age_s=0.0, reports=(report,), actions=1
    )


def command(kind: CommandKind, age_s: float, seconds: float, **fields: object) -> CommandStatus:
    given: dict[str, object] = {"incident": "i1", "workload": "llama", "outcome": OutcomeStatus.DONE}
    return CommandStatus(id=f"c{age_s}", kind=kind, age_s=age_s, seconds=seconds, **{**given, **fields})  # type: ignore[arg-type]


def test_detection_decision_and_action_have_their_times_and_reasons() -> None:
    swap = command(CommandKind.HOT_SWAP, 18.0, 6.0, host="h1", spare="h9")
    detected, decided, ended = run_events(hang(20.0), [swap], job_name="demo", now=NOW)
    assert [(event.type, (NOW - event.time).total_seconds()) for event in (detected, decided, ended)] == [
        (E.FAULT_DETECTED, 20.0),
        (E.ACTION_DECIDED, 18.0),
        (E.ACTION_ENDED, 12.0),
    ]
    assert (detected.job_name, detected.rank) == ("demo", 1)
    assert detected.fields["cause"] == "hang, rank 1"
    assert detected.fields["evidence"] == ["rank 1 is at step 2, the others at 3"]
    assert {
        "action": "hot_swap",
        "host": "h1",
        "spare": "h9",
        "incident": "i1",
    }.items() <= decided.fields.items()
    assert (ended.fields["outcome"], ended.fields["duration_s"]) == ("done", 6.0)
    for event in (detected, decided, ended):
        assert RunEvent.from_json(event.to_json()) == event


@pytest.mark.parametrize(
    "of_no_effect",
    [
        command(CommandKind.DUMP_STACKS, 9.0, 1.0),
        command(CommandKind.CORDON_HOST, 9.0, 1.0, host="h1"),
        command(CommandKind.HOT_SWAP, 9.0, 1.0, outcome=OutcomeStatus.WITHDRAWN),
        command(CommandKind.HOT_SWAP, 9.0, 1.0, outcome=None),
        command(CommandKind.HOT_SWAP, 9.0, 1.0, incident="another"),
    ],
)
def test_what_did_not_restart_the_job_is_no_interruption_of_it(of_no_effect: CommandStatus) -> None:
    assert run_events(hang(20.0), [of_no_effect], job_name="demo", now=NOW) == ()


def interrupted_job() -> tuple[list[RunEvent], datetime]:
    """A job whose launchers learn of a hang from the supervisor only; and when that was."""
    story = Story(2).start().steps(3)
    found = story.events[-1].time + timedelta(seconds=2)
    story.now += 10
    story.tell(E.FAULT_DETECTED, cause="the supervisor asked for a restart: hang")
    story.now += 1
    story.tell(E.WORKERS_STOPPED)
    story.attempt += 1
    return story.start(restore=0).steps(2).finish().events, found


def test_the_ledger_shows_when_the_supervisor_knew_decided_and_had_acted() -> None:
    events, found = interrupted_job()
    alone = build_ledger(events).incidents
    # Detected at 2 s after the last step, decided 3 s later, done 20 s after that: after the first new step.
    now = found + timedelta(hours=1)
    reset = command(CommandKind.IN_JOB_RESET, 3597.0, 3590.0)
    ours = run_events(hang(3600.0), [reset], job_name="demo", now=now)
    ledger = build_ledger([*events, *ours])
    (before,), (after,) = alone, ledger.incidents
    assert from_us(after.detected) == found
    assert tuple(after.spans) == SUPERVISED_STAGES
    assert tuple(before.spans) == STAGES
    assert after.spans["detected"] == 2.0
    assert after.spans["decided"] == 3.0
    assert after.acted == after.first_new_step  # the job did not wait for the supervisor to learn of it
    assert after.total_s == before.total_s == pytest.approx(sum(filter(None, after.spans.values())))
    assert after.cause == "hang, rank 1"
    assert sum(ledger.totals.values()) == sum(build_ledger(events).totals.values())
    assert " decided " in incidents_text(ledger.incidents)
    assert " decided " not in incidents_text(alone)


def test_growth_is_an_interruption_that_was_decided_and_no_fault() -> None:
    story = Story(2).start().steps(3)
    begin = story.events[-1].time
    story.now += 1
    story.tell(E.WORKERS_STOPPED)
    story.attempt += 1
    events = story.start(restore=3).steps(2).finish().events
    now = begin + timedelta(hours=1)
    report = ReportStatus(event="event-1", type=EventType.SCALE_UP, acted_on=True)
    room = IncidentStatus(
        id="i1", subject="llama", age_s=3599.5, closed_age_s=0.0, reports=(report,), actions=1
    )
    grown = command(CommandKind.SCALE_UP, 3599.5, 30.0, replicas=3)
    decided, ended = run_events(room, [grown], job_name="demo", now=now)
    assert (decided.type, ended.type) == (E.ACTION_DECIDED, E.ACTION_ENDED)
    assert decided.fields == {"incident": "i1", "action": "scale_up", "replicas": 3, "cause": "scale_up"}
    (incident,) = build_ledger([*events, decided, ended]).incidents
    assert (incident.action, incident.cause, incident.lost_steps) == ("scale_up", "scale_up", 0)
    assert from_us(incident.detected) == begin + timedelta(seconds=0.5)


def test_a_second_action_for_the_same_incident_is_an_interruption_of_its_own() -> None:
    story = Story(2).start().steps(3)
    begin = story.events[-1].time
    times = []
    for _ in range(2):
        story.now += 10
        story.tell(E.FAULT_DETECTED, cause="the supervisor asked for a restart: hang")
        times.append(story.events[-1].time)
        story.tell(E.WORKERS_STOPPED)
        story.attempt += 1
        story.start(restore=0)
    events = story.steps(1).finish().events
    now = begin + timedelta(hours=1)
    kinds = (CommandKind.IN_JOB_RESET, CommandKind.WORKLOAD_RESET)
    actions = [
        command(kind, (now - time).total_seconds() + 0.5, 1.0)
        for kind, time in zip(kinds, times, strict=True)
    ]
    ours = run_events(hang(3599.0), actions, job_name="demo", now=now)
    first, second = build_ledger([*events, *ours]).incidents
    assert None not in (first.decided, second.decided)
    assert from_us(second.detected) == times[1] - timedelta(seconds=0.5)
