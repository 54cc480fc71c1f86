# SPDX-License-Identifier: Apache-2.0
"""All ranks find the same tiers due at the same steps, whatever their clocks say."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resiliency.checkpoint.names import TierName
from resiliency.checkpoint.trainer.intervals import young_daly
from resiliency.checkpoint.trainer.tier_policy import Interval, TierPolicy
from resiliency.errors import ConfigError, PeerError
from resiliency.testing.clock import ManualClock

LOCAL, PERSISTENT = TierName.LOCAL, TierName.PERSISTENT
Saves = list[tuple[int, tuple[TierName, ...]]]


class Job:
    """Ranks that call their policies as a training loop does; rank 0 is the first."""

    def __init__(self, intervals: Mapping[TierName, Interval], *, drifts: Sequence[float] = (1.0,)) -> None:
        self._drifts = drifts
        self._clocks = [ManualClock() for _ in drifts]
        self._policies = [TierPolicy(intervals, clock) for clock in self._clocks]
        self.costs_s: dict[TierName, float] = {}
        self.agreed_at: list[int] = []

    def train(self, steps: Sequence[int], seconds: Callable[[int], float] = lambda step: 1.0) -> Saves:
        """The saves; fails if ranks differ in anything."""
        saves = []
        for step in steps:
            for clock, drift in zip(self._clocks, self._drifts, strict=True):
                clock.advance(timedelta(seconds=seconds(step) * drift))
            if one([policy.agrees_at(step) for policy in self._policies]):
                self.agreed_at.append(step)
                proposal = self._policies[0].propose(step, self.costs_s)
                for policy in self._policies:
                    policy.adopt(step, proposal)
            due = one([policy.due(step) for policy in self._policies])
            if due:
                saves.append((step, due))
                self.save(step, due)
        return saves

    def save(self, step: int, tiers: Sequence[TierName]) -> None:
        for policy in self._policies:
            policy.saved(step, tiers)


def one(answers: list[object]) -> object:
    """What all ranks say."""
    assert all(answer == answers[0] for answer in answers), answers
    return answers[0]


def steps_of(saves: Saves, tier: TierName) -> list[int]:
    return [step for step, tiers in saves if tier in tiers]


def test_steps_are_multiples_also_after_a_restart_and_ranks_never_talk() -> None:
    job = Job({LOCAL: Interval(steps=4), PERSISTENT: Interval(steps=10)}, drifts=(1.0, 9.0))
    saves = job.train(range(7, 25))
    assert saves == [
        (8, (LOCAL,)),
        (10, (PERSISTENT,)),
        (12, (LOCAL,)),
        (16, (LOCAL,)),
        (20, (PERSISTENT, LOCAL)),  # one capture for both, the persistent one first
        (24, (LOCAL,)),
    ]
    assert job.agreed_at == []


def test_without_an_interval_nothing_is_due() -> None:
    assert Job({LOCAL: Interval()}).train(range(1, 200)) == []
    assert Job({}).train(range(1, 200)) == []


@given(
    st.lists(st.floats(0.1, 50), min_size=1, max_size=4),
    st.lists(st.floats(0.01, 5), min_size=1, max_size=5),
    st.floats(0.01, 100),
    st.sampled_from([Interval(seconds=30), Interval(mtbf_s=1000), Interval(steps=7)]),
)
def test_ranks_agree_however_fast_their_clocks_and_uneven_the_steps(
    drifts: list[float], lengths: list[float], cost_s: float, local: Interval
) -> None:
    job = Job({PERSISTENT: Interval(seconds=100), LOCAL: local}, drifts=drifts)
    job.costs_s = {LOCAL: cost_s}
    job.train(range(3, 120), lambda step: lengths[step % len(lengths)])
    assert job.agreed_at == [4, 5, 7, 11, 19, 35, 67]


def test_seconds_become_steps_of_the_length_that_they_have() -> None:
    saves = Job({PERSISTENT: Interval(seconds=60)}).train(range(1, 600), lambda step: 2.0)
    assert steps_of(saves, PERSISTENT) == list(range(31, 600, 30))


def test_slow_first_steps_are_forgotten() -> None:
    saves = Job({PERSISTENT: Interval(seconds=60)}).train(
        range(1, 2000), lambda step: 30.0 if step < 6 else 0.5
    )
    found = steps_of(saves, PERSISTENT)
    assert found[0] < 10  # a minute went by already
    assert found[-1] - found[-2] == 120


def test_steps_that_become_slower_are_noticed() -> None:
    saves = Job({LOCAL: Interval(seconds=100)}).train(
        range(1, 4000), lambda step: 1.0 if step < 1000 else 4.0
    )
    found = steps_of(saves, LOCAL)
    assert found[-1] - found[-2] == 25


def test_a_step_longer_than_the_interval_is_saved_each_time() -> None:
    saves = Job({LOCAL: Interval(seconds=1)}).train(range(1, 20), lambda step: 10.0)
    assert steps_of(saves, LOCAL) == list(range(2, 20))


def test_seconds_count_from_the_last_save_of_any_kind() -> None:
    job = Job({LOCAL: Interval(seconds=10)})
    assert job.train(range(1, 9)) == []
    job.save(8, [LOCAL])
    assert job.train(range(9, 20)) == [(18, (LOCAL,))]


def test_a_save_into_one_tier_does_not_stand_for_the_other() -> None:
    job = Job({LOCAL: Interval(seconds=10), PERSISTENT: Interval(seconds=25)})
    saves = job.train(range(1, 60))
    assert steps_of(saves, LOCAL) == [11, 21, 31, 41, 51]
    assert steps_of(saves, PERSISTENT) == [26, 51]


def test_training_that_goes_back_counts_anew_from_there() -> None:
    job = Job({LOCAL: Interval(seconds=10)})
    job.train(range(100, 130))
    saves = job.train(range(95, 120))
    assert job.agreed_at[-5:] == [96, 97, 99, 103, 111]
    assert steps_of(saves, LOCAL) == [105, 115]


def test_an_interval_from_the_rate_of_failures_follows_the_cost_that_is_measured() -> None:
    job = Job({LOCAL: Interval(mtbf_s=1800)})
    guessed = job.train(range(1, 128))
    assert steps_of(guessed, LOCAL)[0] == 1 + round(young_daly(1.0, 1800))  # as dear as a step
    job.costs_s = {LOCAL: 0.04}
    learnt = steps_of(job.train(range(128, 400)), LOCAL)
    assert learnt[-1] - learnt[-2] == round(young_daly(0.04, 1800))


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"steps": None}, "steps of an interval must be 0"),
        ({"steps": -1}, "steps of an interval must be 0"),
        ({"seconds": float("nan")}, "seconds of an interval must be 0"),
        ({"mtbf_s": float("inf")}, "mtbf_s of an interval must be 0"),
        ({"steps": 5, "seconds": 3.0}, "found steps and seconds"),
        ({"seconds": 3.0, "mtbf_s": 3.0}, "found seconds and mtbf_s"),
    ],
)
def test_an_interval_that_cannot_be_is_refused(values: dict[str, float], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Interval(**values)  # type: ignore[arg-type]


def test_a_rank_with_other_intervals_than_rank_0_says_so() -> None:
    mine = TierPolicy({LOCAL: Interval(seconds=1)}, ManualClock())
    mine.agrees_at(1)
    with pytest.raises(PeerError, match="Give all ranks the same intervals"):
        mine.adopt(2, {"persistent": 3})
