# SPDX-License-Identifier: Apache-2.0
"""Intervals in seconds and by the rate of failures, agreed by ranks whose clocks differ."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from resiliency.checkpoint import Checkpointer, CheckpointerOptions, Interval, LocalTier, TierName
from resiliency.checkpoint.agent_link import LinkOptions
from resiliency.checkpoint.agreement import Agreement
from resiliency.checkpoint.schedule import Schedule
from resiliency.errors import ConfigError
from resiliency.runtime import RunInfo
from resiliency.testing.clock import ManualClock
from resiliency.testing.rank_pool import RankPool


def train(schedule: Schedule, clock: ManualClock, steps: range, step_s: float) -> dict[int, tuple[str, ...]]:
    """What was due at which step."""
    saved = {}
    for step in steps:
        clock.advance(timedelta(seconds=step_s))
        due = schedule.due(step)
        if due:
            saved[step] = tuple(tier.value for tier in due)
            schedule.saved(step, due)
    return saved


def save_by_a_clock_of_ones_own(rank: int) -> list[dict[int, tuple[str, ...]]]:
    clock, step_s = ManualClock(), 10.0 / (1 + rank)
    intervals = {TierName.LOCAL: Interval(seconds=20), TierName.PERSISTENT: Interval(seconds=60)}
    schedule = Schedule(intervals, Agreement.of_process_group(), clock)
    automatic = Schedule({TierName.LOCAL: Interval(mtbf_s=10_000)}, Agreement.of_process_group(), clock)
    automatic.add_cost([TierName.LOCAL], 3.0 * rank)
    automatic.add_commit(TierName.LOCAL, 35.0 + 100 * rank)
    return [train(each, clock, range(1, 16), step_s) for each in (schedule, automatic)]


def test_ranks_whose_clocks_differ_save_the_same_steps(rank_pool: RankPool) -> None:
    ranks = rank_pool.run(save_by_a_clock_of_ones_own, 2, timeout=60.0, operation_timeout=30.0).values
    (first, first_automatic), second = ranks
    assert second == [first, first_automatic]
    # Rank 0 steps every 10 s: 2 steps from one local save to the next, 6 between persistent ones.
    assert [step for step, tiers in first.items() if "persistent" in tiers] == [7, 13]
    assert list(first) == [3, 5, 7, 9, 11, 13, 15]
    # Saves cost nothing, and take 35 s to commit as rank 0 measured it: 4 steps.
    assert list(first_automatic) == [5, 9, 13]


def test_the_interval_follows_what_saves_turn_out_to_cost() -> None:
    clock = ManualClock()
    schedule = Schedule({TierName.LOCAL: Interval(mtbf_s=10_000)}, Agreement(0, 1), clock)
    # As dear as a step, for all that is known: sqrt(2 x 1 s x 10,000 s) makes 141 steps.
    assert train(schedule, clock, range(1, 65), step_s=1.0) == {}
    for _ in range(9):
        schedule.add_cost([TierName.LOCAL], 0.02)
    # The next agreement is 64 steps after the first; sqrt(2 x 0.02 s x 10,000 s) makes 20.
    assert list(train(schedule, clock, range(65, 128), step_s=1.0)) == [65, 85, 105, 125]
    advice = schedule.advice(TierName.LOCAL, step_s=1.0, mtbf_s=10_000)
    assert advice.interval_steps == 20
    assert "save every 20 steps" in advice.text


def test_no_interval_is_shorter_than_a_save_needs_to_be_durable() -> None:
    clock = ManualClock()
    both = {TierName.LOCAL: Interval(mtbf_s=10_000), TierName.PERSISTENT: Interval(mtbf_s=10_000)}
    schedule = Schedule(both, Agreement(0, 1), clock)
    schedule.add_cost(both, 0.02)  # which alone makes 20 steps
    for commit_s in (300.0, 50.2, 50.2):  # the first save makes room
        schedule.add_commit(TierName.PERSISTENT, commit_s)
    saves = train(schedule, clock, range(1, 110), step_s=1.0)
    assert [step for step, tiers in saves.items() if "persistent" in tiers] == [52, 103]
    assert [step for step, tiers in saves.items() if "local" in tiers] == [21, 41, 61, 81, 101]
    advice = {tier: schedule.advice(tier, step_s=1.0, mtbf_s=10_000) for tier in both}
    assert [advice[tier].interval_steps for tier in both] == [20, 51]
    assert "storage needs 50.2 s for each" in advice[TierName.PERSISTENT].text
    assert "storage" not in advice[TierName.LOCAL].text


def opened(directory: Path, job: str, **arguments: object) -> Checkpointer:
    return Checkpointer(
        directory,
        info=RunInfo(job_name=job, host="here", rank=0),
        options=CheckpointerOptions(link=LinkOptions(grace=timedelta(seconds=5))),
        **arguments,  # type: ignore[arg-type]
    )


def test_a_checkpointer_saves_by_time_and_tells_what_interval_would_be_best(tmp_path: Path) -> None:
    job, state = f"schedule-{os.getpid()}", {"weights": torch.zeros(1000)}
    soon = Interval(seconds=1e-9)  # whatever a step takes, that is every step
    with opened(
        tmp_path / "all", job, every=soon, local=LocalTier(directory=tmp_path / "own")
    ) as checkpoints:
        with pytest.raises(ConfigError, match="no save's cost is known yet"):
            checkpoints.advice(TierName.PERSISTENT, mtbf_s=3600)
        assert checkpoints.step(1, state) is None  # nothing is known of the time of a step
        handle = checkpoints.step(2, state)
        assert handle is not None
        assert handle.record.tiers == ("persistent",)
        assert handle.wait(timedelta(seconds=60))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"every_steps": 5, "every": Interval(seconds=5)}, "not both"),
        ({"every_steps": -1}, "must not be negative"),
    ],
)
def test_an_interval_that_cannot_be_is_refused_at_the_door(
    tmp_path: Path, arguments: dict[str, object], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        opened(tmp_path, "refused", **arguments)
    with pytest.raises(ConfigError, match=text):
        LocalTier(directory=tmp_path, **arguments)  # type: ignore[arg-type]
