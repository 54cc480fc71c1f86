# SPDX-License-Identifier: Apache-2.0
"""The published rules, one by one, and what happens at their edges."""

from __future__ import annotations

import pytest

from resiliency.errors import ConfigError
from resiliency.events import EventType as E
from resiliency.events import RunEvent
from resiliency.goodput_measure.published import calculate
from tests.goodput.story import event

RUN = [
    event(0, E.USER_SCHEDULED),
    event(10, E.JOB_STARTED),
    event(20, E.CHECKPOINT_LOADED, step=100),
    event(60, E.CHECKPOINT_SAVED, step=120),
    event(70, E.JOB_STARTED),
    event(80, E.CHECKPOINT_LOADED, step=120),
    event(120, E.CHECKPOINT_SAVED, step=140),
    event(200, E.JOB_TERMINATED),
]


def test_a_golden_run_gives_the_published_numbers_in_any_order_of_lines() -> None:
    for events in (RUN, RUN[::-1], RUN[1::2] + RUN[::2]):
        report = calculate(events, 2.5)
        assert report.to_json() == {
            "job_name": "demo",
            "total_events": 8,
            "job_started_count": 2,
            "checkpoints_loaded": 2,
            "checkpoints_saved": 2,
            "total_runtime_seconds": 200.0,
            "min_loaded_step": 100,
            "max_saved_step": 140,
            "step_diff": 40,
            "reference_step_time": 2.5,
            "effective_computation_time": 100.0,
            "goodput_percentage": 50.0,
            "notes": [],
        }


def test_a_log_without_user_scheduled_gets_a_proxy_that_counts() -> None:
    report = calculate(RUN[1:], 2.5)
    assert (report.total_events, report.total_runtime_s) == (8, 190.0)


def test_of_consecutive_starts_and_ends_only_the_last_is_kept() -> None:
    events = [
        *RUN[:2],
        event(11, E.JOB_STARTED),
        event(12, E.JOB_STARTED),
        *RUN[2:],
        event(199, E.JOB_TERMINATED),
    ]
    report = calculate(events, 2.5)
    assert (report.total_events, report.job_started_count, report.total_runtime_s) == (8, 2, 200.0)


def test_equal_times_are_ordered_as_listed_so_that_a_save_parts_two_starts() -> None:
    together = [event(5, E.JOB_TERMINATED), event(5, E.CHECKPOINT_SAVED, step=1), event(5, E.JOB_STARTED)]
    # job_started sorts before checkpoint_saved, so it is consecutive to the start at 4.
    assert calculate([event(4, E.JOB_STARTED), *together], 1).job_started_count == 1
    # user_terminated sorts between a save and job_terminated, so the two ends are not consecutive.
    ends = [event(4, E.JOB_TERMINATED), event(5, E.USER_TERMINATED), event(5, E.JOB_TERMINATED)]
    assert calculate(ends, 1).total_events == 4


def test_a_load_of_step_0_is_a_start_and_not_a_checkpoint() -> None:
    report = calculate([event(0, E.JOB_STARTED), event(1, E.CHECKPOINT_LOADED, step=0), *RUN[2:]], 1)
    assert (report.min_loaded_step, report.checkpoints_loaded, report.step_difference) == (0, 2, 140)


def one(*events: RunEvent, reference: float | None = 1.0) -> tuple[float | None, str]:
    report = calculate(events, reference)
    return report.goodput_percentage, "; ".join(report.notes)


def test_a_fresh_start_counts_from_step_0_and_says_so() -> None:
    goodput, notes = one(event(0, E.JOB_STARTED), event(100, E.CHECKPOINT_SAVED, step=40))
    assert goodput == 40
    assert "fresh start, counted from step 0" in notes


def test_a_job_that_saved_nothing_has_no_goodput() -> None:
    goodput, notes = one(event(0, E.JOB_STARTED), event(9, E.JOB_TERMINATED))
    assert goodput == 0
    assert "no checkpoint was saved" in notes


def test_a_single_event_has_no_runtime_to_compare_with() -> None:
    goodput, notes = one(event(0, E.CHECKPOINT_SAVED, step=3))
    assert goodput is None
    assert "no elapsed time" in notes


def test_without_a_reference_step_time_goodput_is_unknown_and_the_flag_is_named() -> None:
    goodput, notes = one(*RUN, reference=None)
    assert goodput is None
    assert "--reference-step-time" in notes


def test_no_step_past_the_loaded_one_is_zero_and_never_negative() -> None:
    goodput, notes = one(
        event(0, E.JOB_STARTED), event(1, E.CHECKPOINT_LOADED, step=9), event(5, E.CHECKPOINT_SAVED, step=4)
    )
    assert goodput == 0
    assert "no step past the loaded step 9" in notes


def test_more_than_all_of_the_time_is_called_out() -> None:
    goodput, notes = one(*RUN, reference=100)
    assert goodput == 2000
    assert "above 100 %" in notes


def test_a_save_before_the_first_start_points_at_the_clocks() -> None:
    _, notes = one(
        event(0, E.CHECKPOINT_SAVED, step=1), event(1, E.CHECKPOINT_SAVED, step=2), event(3, E.JOB_STARTED)
    )
    assert "is 3.000 s older than the first job_started" in notes


def test_a_resumed_job_whose_fresh_start_was_not_logged_is_called_out() -> None:
    _, notes = one(
        event(0, E.JOB_STARTED),
        event(9, E.CHECKPOINT_SAVED, step=50),
        event(20, E.CHECKPOINT_LOADED, step=50),
    )
    assert "the job began before step 50" in notes


def test_events_of_other_types_do_not_count() -> None:
    noise = [event(-50, E.PROCESS_STARTED, rank=0), event(900, E.STEP_FINISHED, rank=0, step=3)]
    assert calculate([*RUN, *noise], 2.5) == calculate(RUN, 2.5)


def test_no_goodput_event_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="no goodput event"):
        calculate([event(0, E.STEP_FINISHED, rank=0, step=1)], 1)
