# SPDX-License-Identifier: Apache-2.0
"""What one fault cost, stage by stage."""

from __future__ import annotations

import pytest

from resiliency.events import EventType as E
from resiliency.events import RunEvent
from resiliency.goodput_measure.incidents import STAGES, Incident
from resiliency.goodput_measure.ledger import build_ledger
from resiliency.goodput_measure.lives import to_us
from tests.goodput.story import Story


def story_with_fault() -> list[RunEvent]:
    story = Story(4).start().steps(7, save_every=5).fault(2, into_step=0.5, unnoticed=0.1, stop=0.4)
    return story.start(restore=5, imports=3, init=2, load=1.5, tier="peer").steps(2).finish().events


def incidents(events: list[RunEvent]) -> tuple[Incident, ...]:
    return build_ledger(events).incidents


def test_the_stages_of_an_incident_golden() -> None:
    (incident,) = incidents(story_with_fault())
    assert incident.spans == {
        "detected": 0.1,
        "stopped": 0.4,
        "rendezvous": 1.0,
        "started": 0.0,
        "imported": 3.0,
        "initialized": 3.5,  # at the same time as restored here, so it takes the whole span
        "restored": 0.0,
        "first_new_step": 1.0,
    }
    assert incident.total_s == pytest.approx(sum(filter(None, incident.spans.values())))
    assert (incident.ranks, incident.cause, incident.fault_known) == ((2,), "SIGKILL", True)
    assert (incident.last_step, incident.restored_step, incident.lost_steps, incident.tier) == (
        7,
        5,
        2,
        "peer",
    )


@pytest.mark.parametrize("missing", [E.WORKERS_STOPPED, E.RENDEZVOUS_DONE, E.WORKERS_STARTED, E.IMPORTED])
def test_a_missing_stage_goes_to_the_next_one_and_the_total_stays(missing: E) -> None:
    whole = incidents(story_with_fault())[0]
    (incident,) = incidents([e for e in story_with_fault() if e.type is not missing])
    assert sum(span is None for span in incident.spans.values()) == 1
    assert incident.total_s == whole.total_s == pytest.approx(sum(filter(None, incident.spans.values())))


def test_without_a_fault_report_the_stop_is_what_was_noticed() -> None:
    (incident,) = incidents([e for e in story_with_fault() if e.type is not E.FAULT_DETECTED])
    assert (incident.cause, incident.ranks) == ("", ())
    assert incident.detected == incident.stopped


def test_stopping_at_the_end_of_a_job_is_no_incident() -> None:
    story = Story(2).start().steps(3)
    story.tell(E.WORKERS_STOPPED)
    story.finish()
    assert incidents(story.events) == ()
    story.tell(E.JOB_STARTED)
    assert incidents(story.start(restore=3).steps(1).finish().events) == ()


def test_reports_of_several_ranks_before_the_restart_are_one_incident() -> None:
    story = Story(4).start().steps(3)
    story.tell(E.FAULT_DETECTED, rank=3, cause="SIGKILL")
    story.tell(E.FAULT_DETECTED, rank=1, cause="exit 1")
    story.now += 1
    story.tell(E.WORKERS_STOPPED)
    story.attempt += 1
    (incident,) = incidents(story.start(restore=0).steps(1).finish().events)
    assert incident.ranks == (1, 3)


def test_a_restart_that_fails_before_its_first_step_is_an_incident_of_its_own() -> None:
    story = Story(2).start().steps(3).fault(0).start(restore=0).fault(1)
    first, second = incidents(story.start(restore=0).steps(1).finish().events)
    assert first.total_s is None
    assert second.total_s is not None
    assert (first.ranks, second.ranks) == ((0,), (1,))


def test_a_job_that_never_came_back_has_an_open_incident() -> None:
    story = Story(2).start().steps(3).fault(0)
    story.tell(E.JOB_TERMINATED)
    (incident,) = incidents(story.events)
    assert incident.total_s is None
    assert [stage for stage in STAGES if incident.spans[stage] is not None] == ["detected", "stopped"]


def test_the_injected_time_is_the_time_of_the_fault() -> None:
    (incident,) = incidents(story_with_fault())
    injected = next(e for e in story_with_fault() if e.type is E.FAULT_INJECTED)
    assert incident.fault == to_us(injected.time)
