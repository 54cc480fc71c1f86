# SPDX-License-Identifier: Apache-2.0
"""The advised interval is the one that loses least, found here by trying."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resiliency.checkpoint.trainer.intervals import advise, expected_overhead, young_daly
from resiliency.errors import ConfigError

HOUR = 3600.0


@given(st.floats(0.001, 600), st.floats(600, 1e6))
def test_no_other_interval_loses_noticeably_less(cost_s: float, mtbf_s: float) -> None:
    advised = young_daly(cost_s, mtbf_s)
    least = min(expected_overhead(advised * 1.02**power, cost_s, mtbf_s) for power in range(-200, 201))
    assert expected_overhead(advised, cost_s, mtbf_s) <= least * 1.02 + 1e-9


def test_a_dear_save_is_made_seldom_and_never_less_often_than_failures_come() -> None:
    intervals = [young_daly(cost_s, 100.0) for cost_s in (0.0, 0.1, 1.0, 10.0)]
    assert intervals == sorted(intervals)
    assert intervals[0] == 0
    assert young_daly(200.0, 100.0) == young_daly(10_000.0, 100.0) == 100.0


def test_the_example_of_the_literature() -> None:
    """Five minutes to save and a failure a day: Young says two hours."""
    assert young_daly(300.0, 24 * HOUR) == pytest.approx(math.sqrt(2 * 300 * 24 * HOUR), rel=0.03)


def test_overhead_of_an_interval_that_never_ends_before_a_failure_is_endless() -> None:
    assert expected_overhead(1e6, 1.0, 1.0) == math.inf


@pytest.mark.parametrize(
    ("cost_s", "mtbf_s"), [(-1.0, 5.0), (math.nan, 5.0), (math.inf, 5.0), (1.0, 0.0), (1.0, math.nan)]
)
def test_durations_that_cannot_be_are_refused(cost_s: float, mtbf_s: float) -> None:
    with pytest.raises(ConfigError, match="found"):
        young_daly(cost_s, mtbf_s)


def test_the_first_save_with_its_allocations_does_not_set_the_interval() -> None:
    advice = advise([30.0, 0.5, 0.5], step_s=1.0, mtbf_s=4 * HOUR)
    assert advice.cost_s == 0.5
    assert advice.interval_steps == round(young_daly(0.5, 4 * HOUR))
    assert advice.interval_s == young_daly(0.5, 4 * HOUR)


def test_the_advice_says_in_words_what_it_rests_on() -> None:
    advice = advise([0.5], step_s=2.0, mtbf_s=4 * HOUR, tier="local")
    assert advice.expected_overhead == pytest.approx(0.0084, rel=0.02)
    assert advice.text == (
        "local: save every 60 steps (120 s): a save costs training 0.5 s (median of 1); "
        "with a failure every 4 h, saves and lost work add 0.84% to the time"
    )


def test_a_save_that_costs_nothing_is_made_at_every_step() -> None:
    assert advise([0.0], step_s=2.0, mtbf_s=HOUR).interval_steps == 1


def test_storage_that_needs_longer_than_the_best_interval_sets_it() -> None:
    advice = advise([0.5], step_s=1.0, mtbf_s=HOUR, commit_s=300.2)
    assert advice.interval_steps == 301
    assert "storage needs 300 s for each" in advice.text


def test_without_a_cost_there_is_no_advice() -> None:
    with pytest.raises(ConfigError, match="no save's cost is known"):
        advise([], step_s=1.0, mtbf_s=HOUR)
    with pytest.raises(ConfigError, match="a step takes more than 0 s"):
        advise([1.0], step_s=0.0, mtbf_s=HOUR)
