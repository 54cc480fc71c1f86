# SPDX-License-Identifier: Apache-2.0
"""Every microsecond of every rank has one cause: small golden histories, then any history at all."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resiliency.errors import ConfigError
from resiliency.events import EventType as E
from resiliency.events import RunEvent
from resiliency.goodput_measure.ledger import Bucket, Ledger, LedgerBuilder, Span, build_ledger
from tests.goodput.histories import chaos, damaged_job
from tests.goodput.story import Story, event, resolve


def seconds(ledger: Ledger) -> dict[str, float]:
    return {bucket.value: total / 1e6 for bucket, total in ledger.totals.items() if total}


def check_exact(ledger: Ledger) -> None:
    """No gap, no overlap, nothing negative, and the sum is wall x ranks as whole numbers."""
    for lane in ledger.lanes.values():
        at = ledger.start
        for span in lane:
            assert span.start == at
            assert span.end > span.start
            at = span.end
        assert at == ledger.end or not lane
        assert sum(span.end - span.start for span in lane) == ledger.wall_us
    assert sum(ledger.totals.values()) == ledger.wall_us * len(ledger.lanes)
    assert min(ledger.totals.values()) >= 0


def faulty(**fault: object) -> Story:
    """Two ranks; steps 1-5, saved at 4, killed half a second into step 6, resumed from 4."""
    story = Story(2).start().steps(5, save_every=4, hold=0.25).fault(1, **fault)  # type: ignore[arg-type]
    return story.start(restore=4).steps(3).finish()


def test_an_undisturbed_job_golden() -> None:
    ledger = build_ledger(Story(2).start().steps(10, save_every=5, hold=0.5).finish().events)
    check_exact(ledger)
    assert seconds(ledger) == {
        "other": 3.0,  # rendezvous before the first process (1 s) and the end (0.5 s), two ranks
        "startup": 6.0,
        "initialization": 4.0,
        "kept_steps": 20.0,
        "save_held": 2.0,
    }
    assert ledger.goodput == ledger.ettr == 10 / 17.5
    assert ledger.median_step_s == 1.0


def test_a_kill_golden() -> None:
    ledger = build_ledger(faulty().events)
    check_exact(ledger)
    assert seconds(ledger) == {
        "other": 3.0,
        "startup": 12.0,
        "initialization": 8.0,
        "restore": 2.0,
        "kept_steps": 14.0,  # 1-4 and 5-7 of each rank
        "lost_steps": 3.0,  # step 5, and half of step 6
        "save_held": 0.5,
        "detection": 0.2,
        "restart": 2.8,  # stop 0.4 and rendezvous 1
    }


def test_without_an_injected_time_detection_counts_from_the_last_step() -> None:
    totals = seconds(build_ledger(faulty(injected=False).events))
    assert (totals["detection"], totals["lost_steps"]) == (1.2, 2.0)


def test_a_step_is_lost_when_any_later_life_continues_from_before_it() -> None:
    story = Story(1).start().steps(6).fault(0, into_step=0, unnoticed=0)
    story.start(restore=5).steps(1).fault(0, into_step=0, unnoticed=0)  # 5 was corrupt after all
    story.start(restore=2).steps(4).finish()
    totals = seconds(build_ledger(story.events))
    assert (totals["kept_steps"], totals["lost_steps"]) == (2 + 4, 4 + 1)


def test_a_life_that_died_before_its_first_step_still_says_from_where_it_continued() -> None:
    story = Story(1).start().steps(6).fault(0, into_step=0, unnoticed=0)
    story.start(restore=3).fault(0, into_step=0, unnoticed=0).start(restore=6).steps(1).finish()
    assert seconds(build_ledger(story.events))["lost_steps"] == 3


def test_a_restart_without_a_checkpoint_loses_everything() -> None:
    story = Story(1).start().steps(6).fault(0, into_step=0, unnoticed=0)
    story.step = 0
    story.start().steps(2).finish()
    totals = seconds(build_ledger(story.events))
    assert (totals["kept_steps"], totals["lost_steps"]) == (2, 6)


def test_steps_of_a_rank_that_never_came_back_are_judged_by_the_job() -> None:
    story = Story(2).start().steps(6).fault(1, into_step=0, unnoticed=0)
    story.ranks = range(1)
    story.start(restore=4).steps(2).finish()
    ledger = build_ledger(story.events)
    check_exact(ledger)
    causes = {span.bucket for span in ledger.lanes[1]}
    assert Bucket.LOST_STEPS in causes
    assert ledger.lanes[1][-1].bucket is Bucket.OTHER
    assert ledger.goodput is not None
    assert ledger.ettr is not None
    assert ledger.goodput < ledger.ettr


def test_a_rank_that_moves_to_a_host_with_a_slow_clock_still_loses_its_steps() -> None:
    story = Story(1).start().steps(6).fault(0, into_step=0, unnoticed=0)
    story.now -= 8  # the new host believes that the old life is still at step 4
    ledger = build_ledger(story.start(restore=2, imports=1, init=1).steps(1).finish().events)
    check_exact(ledger)
    assert {span.bucket for span in ledger.lanes[0]} >= {Bucket.LOST_STEPS, Bucket.KEPT_STEPS}


def test_a_new_launch_that_counts_attempts_from_0_again_is_a_new_life() -> None:
    story = Story(1).start().steps(6).fault(0, into_step=0, unnoticed=0)
    story.tell(E.JOB_TERMINATED)
    story.now += 10
    story.attempt = 0
    story.tell(E.JOB_STARTED)
    story.start(restore=5).steps(1).finish()
    totals = seconds(build_ledger(story.events))
    assert totals["lost_steps"] == 1
    assert totals["restart"] == 0.4 + 10 + 1


def test_a_standby_process_does_not_take_time_from_the_life_before_it() -> None:
    story = Story(1).start().steps(3)
    standby = [
        event(story.now - 2.5, E.PROCESS_STARTED, rank=0, attempt=1),
        event(story.now - 0.5, E.IMPORTED, rank=0, attempt=1),
    ]
    story.fault(0).now += 1
    story.tell(E.WORKERS_STARTED)
    story.now += 0.5
    story.everyone(E.INITIALIZED)
    story.steps(2).finish()
    ledger = build_ledger([*story.events, *standby])
    check_exact(ledger)
    totals = seconds(ledger)
    assert totals["kept_steps"] == 5
    assert totals["startup"] == 3
    assert totals["restart"] == 1.4


def test_a_rank_that_died_in_a_held_save_charges_the_save() -> None:
    story = Story(1).start().steps(4)
    story.everyone(E.SAVE_STARTED, step=4)
    story.fault(0, into_step=2, unnoticed=0).start(restore=4).steps(1).finish()
    totals = seconds(build_ledger(story.events))
    assert totals["save_held"] == 2
    assert "lost_steps" not in totals


def test_a_restart_that_no_launcher_saw_is_still_a_restart() -> None:
    launcher = {E.FAULT_DETECTED, E.WORKERS_STOPPED, E.RENDEZVOUS_DONE, E.WORKERS_STARTED, E.JOB_STARTED}
    ledger = build_ledger(e for e in faulty().events if e.type not in launcher)
    check_exact(ledger)
    totals = seconds(ledger)
    assert totals["restart"] == 3.0
    assert totals["lost_steps"] == 3.0


def test_a_slowdown_injected_long_before_a_crash_is_not_taken_for_its_cause() -> None:
    story = Story(1).start()
    story.tell(E.FAULT_INJECTED, rank=0, kind="slow")
    story.steps(5).fault(0, injected=False, unnoticed=0.5).start(restore=5).steps(1).finish()
    ledger = build_ledger(story.events)
    assert not ledger.incidents[0].fault_known
    assert seconds(ledger)["detection"] == 1.0


def supervised(action: str) -> dict[str, float]:
    """A host is lost; the supervisor decides after 2 s, acts for 5 s, and hosts meet 4 s after that."""
    story = Story(2).start().steps(3)
    story.tell(E.FAULT_DETECTED, cause="host lost")
    story.now += 2
    story.tell(E.ACTION_DECIDED, action=action, incident="i1")
    story.now += 1
    story.tell(E.WORKERS_STOPPED)
    story.now += 4
    story.tell(E.ACTION_ENDED, action=action, incident="i1")
    story.attempt += 1
    story.now += 3
    ledger = build_ledger(story.start(restore=3).steps(1).finish().events)
    check_exact(ledger)
    assert ledger.incidents[0].action == action
    return seconds(ledger)


def test_a_restart_by_the_supervisor_is_split_into_decision_swap_and_waiting_for_hosts() -> None:
    totals = supervised("hot_swap")
    assert (totals["decision"], totals["swap"], totals["capacity"]) == (4, 10, 8)
    assert "restart" not in totals


def test_an_action_that_changes_no_hosts_is_no_swap_and_waits_for_none() -> None:
    totals = supervised("in_job_reset")
    assert (totals["decision"], totals["restart"]) == (4, 18)
    assert not {"swap", "capacity"} & set(totals)


def test_other_jobs_in_the_file_are_left_out_and_an_empty_log_is_refused() -> None:
    mixed = [*faulty().events, event(-100, E.JOB_STARTED, job="other")]
    assert build_ledger(mixed, "demo").totals == build_ledger(faulty().events).totals
    with pytest.raises(ConfigError, match="no event to build a ledger from"):
        build_ledger(mixed, "third")


def test_a_log_of_the_launcher_alone_has_no_ranks_and_no_shares() -> None:
    ledger = build_ledger([event(0, E.JOB_STARTED), event(5, E.JOB_TERMINATED)])
    check_exact(ledger)
    assert (ledger.goodput, dict(ledger.lanes)) == (None, {})


def test_a_failure_that_is_injected_after_the_end_of_a_job_lengthens_nothing() -> None:
    story = Story(1).start().steps(3).finish()
    builder = LedgerBuilder()
    for one in (*story.events, event(story.now + 60, E.FAULT_INJECTED, kind="memory")):
        builder.add_event(one)
    assert builder.has_ended()
    assert builder.build().wall_us == build_ledger(story.events).wall_us


def test_the_stronger_of_overlapping_causes_wins() -> None:
    spans = [Span(0, 10, Bucket.KEPT_STEPS), Span(4, 6, Bucket.SAVE_HELD), Span(9, 30, Bucket.RESTART)]
    assert tuple(resolve(spans, 2, 20)) == (
        Span(2, 4, Bucket.KEPT_STEPS),
        Span(4, 6, Bucket.SAVE_HELD),
        Span(6, 10, Bucket.KEPT_STEPS),
        Span(10, 20, Bucket.RESTART),
    )


@settings(max_examples=150, deadline=None)
@given(chaos() | damaged_job())
def test_any_history_adds_up_to_exactly_wall_times_ranks(events: Sequence[RunEvent]) -> None:
    ledger = build_ledger(events)
    check_exact(ledger)
    assert set(ledger.lanes) >= {e.rank for e in events if e.type is E.STEP_FINISHED and e.rank is not None}
    assert 0 <= (ledger.ettr or 0) <= 1
    for incident in ledger.incidents:
        assert all(span is None or span >= 0 for span in incident.spans.values())
        ledger.to_json()


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_the_order_of_lines_does_not_matter(data: st.DataObject) -> None:
    events = faulty().events
    assert build_ledger(data.draw(st.permutations(events))).totals == build_ledger(events).totals


@settings(max_examples=100, deadline=None)
@given(steps=st.integers(1, 12), resume=st.integers(0, 12), more=st.integers(1, 5))
def test_kept_plus_lost_is_all_that_was_stepped(steps: int, resume: int, more: int) -> None:
    resume = min(resume, steps)
    story = Story(2).start().steps(steps).fault(0, into_step=0, unnoticed=0)
    ledger = build_ledger(story.start(restore=resume).steps(more).finish().events)
    assert ledger.totals[Bucket.KEPT_STEPS] == 2 * (resume + more) * 1_000_000
    assert ledger.totals[Bucket.LOST_STEPS] == 2 * (steps - resume) * 1_000_000
