# SPDX-License-Identifier: Apache-2.0
"""Intervals in seconds and by the rate of failures, agreed by ranks whose clocks differ."""

from __future__ import annotations

import logging
import os
import statistics
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from resiliency.checkpoint import (
    Checkpointer,
    CheckpointerOptions,
    Interval,
    LocalTier,
    SaveHandle,
    SaveState,
    TierName,
)
from resiliency.checkpoint.agent.client import LinkOptions
from resiliency.checkpoint.ranks import RankGroup
from resiliency.checkpoint.trainer.schedule import Schedule
from resiliency.errors import ConfigError
from resiliency.runtime import RunInfo
from resiliency.testing.clock import ManualClock
from resiliency.testing.rank_pool import RankPool
from tests import agent_host

SOON = timedelta(seconds=60)
DAY = 86_400.0


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
    schedule = Schedule(intervals, RankGroup.of_process_group(), clock)
    automatic = Schedule({TierName.LOCAL: Interval(mtbf_s=10_000)}, RankGroup.of_process_group(), clock)
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
    schedule = Schedule({TierName.LOCAL: Interval(mtbf_s=10_000)}, RankGroup(0, 1), clock)
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
    schedule = Schedule(both, RankGroup(0, 1), clock)
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


def opened(
    directory: Path, job: str, *, clock: ManualClock | None = None, bytes_per_s: int = 0, **arguments: object
) -> Checkpointer:
    link = LinkOptions(grace=timedelta(seconds=5))
    return Checkpointer(
        directory,
        info=RunInfo(job_name=job, host="here", rank=0),
        options=CheckpointerOptions(link=link, clock=clock or ManualClock(), bytes_per_s=bytes_per_s),
        **arguments,  # type: ignore[arg-type]
    )


class Training:
    """A loop whose steps take 100 s, and 101 s after a save that was made."""

    def __init__(self, root: Path, *, bytes_per_s: int = 0, **arguments: object) -> None:
        self._clock, self._state = ManualClock(), {"weights": torch.zeros(1000)}
        self.saves: dict[int, SaveHandle] = {}
        job = f"schedule-{os.getpid()}-{root.name}"
        self.checkpoints = opened(root / "all", job, clock=self._clock, bytes_per_s=bytes_per_s, **arguments)

    def run(self, steps: range, *, wait: bool = True) -> None:
        """Go on, waiting for each save to end unless told otherwise."""
        for step in steps:
            newest = list(self.saves.values())[-1:]
            disturbed = any(save.state is not SaveState.SKIPPED for save in newest)
            self._clock.advance(timedelta(seconds=101 if disturbed else 100))
            if handle := self.checkpoints.step(step, self._state):
                self.saves[step] = handle
                assert not wait or handle.wait(SOON)


@pytest.mark.usefixtures("agents_at_once")
def test_a_checkpointer_saves_by_time_and_tells_what_interval_would_be_best(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    training = Training(tmp_path, every=Interval(seconds=1000), local=LocalTier(directory=tmp_path / "own"))
    with training.checkpoints as checkpoints:
        with pytest.raises(ConfigError, match="no save's cost is known yet"):
            checkpoints.advice(TierName.PERSISTENT, mtbf_s=DAY)
        training.run(range(1, 26))
        assert list(training.saves) == [11, 21]
        records = [handle.record for handle in training.saves.values()]
        assert {record.tiers for record in records} == {("persistent",)}
        assert 5.0 < (records[0].excess_s or 0.0) <= 10.0  # less what it held, of real time
        advice = checkpoints.advice(TierName.PERSISTENT, mtbf_s=DAY)
        assert advice.cost_s == pytest.approx(10.0)
        assert advice.text == (
            "persistent: save every 13 steps (1300 s): a save costs training 10 s (median of 1); "
            "with a failure every 24 h, saves and lost work add 1.54% to the time"
        )
        soonest = checkpoints.advice(TierName.PERSISTENT, mtbf_s=1e-6)
        took_s = [record.queued_s + record.commit_s for record in records]
        assert soonest.interval_s == pytest.approx(statistics.median(took_s))
        assert "storage needs" in soonest.text
        with pytest.raises(ConfigError, match="no save's cost is known yet"):
            checkpoints.advice(TierName.LOCAL, mtbf_s=DAY)
    assert (
        "this run, persistent: a save costs training 10 s (median of 1), and is durable after" in caplog.text
    )
    agent_host.wait_for_end(tmp_path.name)


@pytest.mark.usefixtures("agents_at_once")
def test_a_checkpointer_saves_as_often_as_its_saves_turn_out_to_be_worth(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    training = Training(tmp_path, every=Interval(mtbf_s=5500))
    with training.checkpoints as checkpoints:
        training.run(range(1, 41))
        advice = checkpoints.advice(TierName.PERSISTENT, mtbf_s=5500)
    # As dear as a step, for all that is known: sqrt(2 x 100 s x 5500 s) makes 10 steps.  They cost 10 s,
    # which makes 3 steps; the first agreement that can know is that at step 33.
    assert list(training.saves) == [11, 21, 31, 34, 37, 40]
    assert caplog.text.count(f"from the saves of this run, {advice.text}") == 1
    agent_host.wait_for_end(tmp_path.name)


@pytest.mark.usefixtures("agents_at_once")
def test_a_save_that_was_skipped_does_not_make_saves_look_cheap(tmp_path: Path) -> None:
    training = Training(tmp_path, every_steps=10, bytes_per_s=1)
    with training.checkpoints as checkpoints:
        training.run(range(1, 20))  # the first is written at once, the next an hour later
        training.run(range(20, 51), wait=False)
        states = [handle.state for handle in training.saves.values()]
        assert states[:4:3] == [SaveState.COMMITTED, SaveState.SKIPPED]
        text = checkpoints.advice(TierName.PERSISTENT, mtbf_s=DAY).text
        assert "a save costs training 10 s (median of 3)" in text
        checkpoints.lift_bandwidth_cap()
    agent_host.wait_for_end(tmp_path.name)


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
