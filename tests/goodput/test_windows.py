# SPDX-License-Identifier: Apache-2.0
"""Windows, outages and other intervals: parts of one ledger, and what they add up to."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resiliency.events import EventType as E
from resiliency.goodput_measure.ledger import Bucket, Ledger, build_ledger
from resiliency.goodput_measure.reliability import Distribution, reliability_of
from resiliency.goodput_measure.what_if import interval_costs, save_model
from resiliency.goodput_measure.windows import attempts_of, cells, newest_window, rolling, window_of
from tests.goodput.story import Story

SECOND = 1_000_000


def twice_failed() -> Ledger:
    """Two ranks, 1 s a step, a save every 5 steps; faults 0.5 s into steps 8 and 16."""
    story = Story(2).start().steps(7, save_every=5, hold=0.25).fault(1, into_step=0.5)
    story.start(restore=5).steps(10, save_every=5, hold=0.25).fault(0, into_step=0.5, stop=2.4)
    return build_ledger(story.start(restore=15).steps(6, save_every=5, hold=0.25).finish().events)


@settings(max_examples=60, deadline=None)
@given(cell=st.integers(1, 90 * SECOND), low=st.integers(0, 80 * SECOND), length=st.integers(0, 80 * SECOND))
def test_cells_and_windows_are_exact(cell: int, low: int, length: int) -> None:
    ledger = twice_failed()
    if ledger.wall_us // cell > 100_000:
        cell *= 1000
    table = cells(ledger, cell)
    assert {cause: sum(of) for cause, of in table.items()} == ledger.totals
    window = window_of(ledger, ledger.start + low, ledger.start + low + length)
    assert sum(window.totals.values()) == max(window.end - window.start, 0) * 2
    index = min(low, ledger.wall_us - 1) // cell
    of_cell = window_of(ledger, ledger.start + index * cell, ledger.start + (index + 1) * cell)
    assert {cause: of[index] for cause, of in table.items()} == of_cell.totals


def test_attempts_follow_each_other_and_add_up_to_the_ledger() -> None:
    ledger = twice_failed()
    attempts = attempts_of(ledger)
    assert [window.end for window in attempts[:-1]] == [incident.detected for incident in ledger.incidents]
    assert (attempts[0].start, attempts[-1].end) == (ledger.start, ledger.end)
    for cause, total in ledger.totals.items():
        assert sum(window.totals[cause] for window in attempts) == total
    assert attempts[1].goodput == attempts[1].totals[Bucket.KEPT_STEPS] / 2 / (
        attempts[1].end - attempts[1].start
    )


def test_a_rolling_window_sees_the_time_without_steps() -> None:
    ledger = twice_failed()
    curve = rolling(ledger, 20 * SECOND)
    assert curve is not None
    for end, share in curve.points[:: len(curve.points) // 7]:
        assert share == pytest.approx(window_of(ledger, end - curve.length_us, end).goodput)
    assert curve.lowest[1] < curve.median < max(share for _, share in curve.points)
    assert newest_window(ledger, 20 * SECOND).end == ledger.end
    assert rolling(ledger, 10**9 * SECOND) is None
    assert newest_window(ledger).totals == ledger.totals


def test_outages_have_their_times_and_training_at_the_end_counts_as_without_a_failure() -> None:
    ledger = twice_failed()
    found = reliability_of(ledger)
    assert [outage.repair_s for outage in found.outages] == [
        incident.total_s for incident in ledger.incidents
    ]
    assert found.mttr_s == pytest.approx(sum(one.total_s or 0 for one in ledger.incidents) / 2)
    assert found.uptimes is not None
    # 7 steps, a hold and a half of step 8; then 9 more steps after the first new one, and so on.
    assert (found.uptimes.worst, found.uptimes.count) == (10.0, 2)
    assert found.mttf_s == pytest.approx(found.trained_s / 2)
    last_up_s = (ledger.end - (ledger.incidents[1].first_new_step or 0)) / 1e6
    assert found.trained_s == pytest.approx(7.75 + 10.0 + last_up_s)
    assert set(found.by_cause) == {"SIGKILL"}


def test_a_restart_that_fails_belongs_to_the_outage_that_it_was_to_end() -> None:
    story = Story(1).start().steps(3).fault(0).start(restore=0).fault(0)
    found = reliability_of(build_ledger(story.start(restore=0).steps(2).finish().events))
    (outage,) = found.outages
    first, second = build_ledger(story.events).incidents
    assert outage.repair_s == pytest.approx((second.first_new_step - first.fault) / 1e6)  # type: ignore[operator]


def test_without_a_failure_there_is_no_mean_time_to_one() -> None:
    found = reliability_of(build_ledger(Story(1).start().steps(3).finish().events))
    assert (found.mttf_s, found.mttr_s, found.repairs) == (None, None, None)
    assert found.trained_s == 3.5
    assert reliability_of(build_ledger([Story(1).events[0]])).trained_s == 0


def test_percentiles_are_of_what_was_measured() -> None:
    found = Distribution.of([float(value) for value in range(1, 101)])
    assert found == Distribution(count=100, mean=50.5, median=50.5, p90=90, p99=99, worst=100)


def test_another_interval_is_replayed_over_the_faults_of_this_job() -> None:
    model = save_model(twice_failed())
    assert model is not None
    assert (model.own_interval, model.step_s, model.hold_s) == (5, 1.0, 0.25)
    assert (model.steps, model.faults, model.first_step) == (21, ((7, 0.5), (15, 0.75)), 0)
    own = model.cost_of(5)
    # Faults after steps 7 and 15.  The save of step 15 was committed: nothing is lost there.
    assert (own.saves, own.held_s, own.lost_s) == (4, 1.0, 2.0)
    assert model.cost_of(4).lost_s == 3 + 3
    assert model.cost_of(100).lost_s == 7 + 15
    assert model.best().total_s <= min(model.cost_of(steps).total_s for steps in (1, 2, 5, 10, 20))
    costs = interval_costs(model, [7])
    assert [cost.interval_steps for cost in costs] == sorted({5, 7, model.best().interval_steps})
    assert next(cost for cost in costs if cost.interval_steps == 5).note.startswith("as it was")


def test_a_save_that_was_not_committed_in_time_is_not_gone_back_to() -> None:
    story = Story(1).start().steps(2)
    for _ in range(3):
        story.steps(4)
        story.everyone(E.SAVE_STARTED, step=story.step)
        story.everyone(E.SAVE_RELEASED, step=story.step)
        saved = story.step
        story.steps(2)
        story.tell(E.CHECKPOINT_SAVED, rank=0, step=saved)  # two steps later
    story.fault(0, into_step=0, unnoticed=0)
    model = save_model(build_ledger(story.start(restore=18).steps(1).finish().events))
    assert model is not None
    assert (model.own_interval, model.commit_s, model.faults) == (6, 2.0, ((20, 0.0),))
    assert model.cost_of(10).lost_s == 10  # step 20 would not have been there
    assert model.cost_of(9).lost_s == 2


def test_without_saves_nothing_is_said_about_their_interval() -> None:
    assert save_model(build_ledger(Story(1).start().steps(3).finish().events)) is None
