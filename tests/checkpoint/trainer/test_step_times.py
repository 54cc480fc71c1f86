# SPDX-License-Identifier: Apache-2.0
"""What counts as the excess of a save, on a clock that stands still."""

from __future__ import annotations

from itertools import pairwise

import pytest

from resiliency.checkpoint.trainer.step_times import WINDOW_STEPS, Excess, StepTimes


class Training:
    """Steps of given lengths."""

    def __init__(self) -> None:
        self.now = 100.0
        self.held = 0.0
        self.times = StepTimes(lambda: self.now)
        self.times.tick(0.0)

    def steps(self, count: int, seconds: float) -> list[Excess]:
        found = []
        for _ in range(count):
            self.now += seconds
            excess = self.times.tick(self.held)
            if excess is not None:
                found.append(excess)
        return found

    def save(self, step: int, held_s: float) -> Excess | None:
        self.hold(held_s)
        return self.times.saved(step)

    def hold(self, seconds: float) -> None:
        self.now += seconds
        self.held += seconds


def test_slower_steps_after_a_save_are_its_excess_and_its_held_time_is_not() -> None:
    training = Training()
    training.steps(20, 1.0)
    training.save(20, held_s=0.25)
    training.hold(0.5)
    (excess,) = training.steps(WINDOW_STEPS, 1.1)
    assert (excess.step, excess.steps) == (20, WINDOW_STEPS)
    assert excess.excess_s == pytest.approx(1.0)


def test_undisturbed_steps_have_no_excess_and_disturbed_ones_do_not_move_the_baseline() -> None:
    training = Training()
    training.steps(10, 1.0)
    found = []
    for save in range(1, 6):
        training.save(save * 40, held_s=0.0)
        found += training.steps(WINDOW_STEPS, 2.0)
        training.steps(30, 1.0)
    assert [round(excess.excess_s, 6) for excess in found] == [10.0] * 5
    assert all(later.step > earlier.step for earlier, later in pairwise(found))


def test_a_save_soon_after_another_ends_its_window() -> None:
    training = Training()
    training.steps(10, 1.0)
    training.save(10, held_s=0.0)
    assert training.steps(4, 1.5) == []
    excess = training.save(14, held_s=0.0)
    assert excess == Excess(step=10, steps=4, excess_s=pytest.approx(2.0))
    assert training.save(14, held_s=0.0) is None


def test_without_undisturbed_steps_nothing_is_claimed() -> None:
    training = Training()
    training.save(1, held_s=0.0)
    assert training.steps(3 * WINDOW_STEPS, 1.0) == []
