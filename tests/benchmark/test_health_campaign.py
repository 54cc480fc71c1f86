# SPDX-License-Identifier: Apache-2.0
"""The campaign of ranks that hang or are slow: its schedule, its table, and one seed of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from health_campaign import JobOutcome, Outcome, as_table
from health_faults import RANKS, Fault, FaultKind, schedule

from resiliency.testing.processes import Command

BENCHMARK = Path(__file__).parents[2] / "benchmark"
WAIT = 600.0


def test_each_seed_has_each_fault_once_and_is_the_same_each_time() -> None:
    seeds = [schedule(seed) for seed in range(40)]
    assert seeds == [schedule(seed) for seed in range(40)]
    for faults in seeds:
        assert faults[0].kind is FaultKind.STEP_ONE
        assert {fault.kind for fault in faults} == set(FaultKind)
        assert [Fault.from_json(fault.to_json()) for fault in faults] == faults
    assert {fault.rank for faults in seeds for fault in faults} == set(range(RANKS))


def test_the_table_counts_who_was_named_in_time_late_and_wrongly() -> None:
    def outcome(latency_s: float | None, *, named: bool = True) -> Outcome:
        return Outcome(
            seed=1, kind=FaultKind.STUCK.name, rank=2, named=named, latency_s=latency_s, sentence=""
        )

    outcomes = (
        outcome(7.0),
        outcome(9.0),
        outcome(11.0),
        outcome(8.0, named=False),
        outcome(None, named=False),
    )
    job = JobOutcome(seed=1, outcomes=outcomes, false=("rank 3 is slow",), seconds=3600.0)
    text = as_table([job])
    assert f"| {FaultKind.STUCK.value} | 5 | 2 | 2 | 9.0 | 11.0 |" in text
    assert FaultKind.SAVE.value not in text
    assert text.endswith("False accusations: 1, in 1.0 hours of 4 ranks.\n- rank 3 is slow")


@pytest.mark.thorough("a benchmark; tests/launch/hangs names ranks that hang and are slow")
@pytest.mark.slow
def test_one_seed_names_each_fault(tmp_path: Path) -> None:
    export = tmp_path / "found.json"
    argv = [sys.executable, str(BENCHMARK / "health_campaign.py"), "--seeds=1", "--export", str(export)]
    with Command(argv) as command:
        assert command.wait(timeout=WAIT) == 0, command.output
    [job] = json.loads(export.read_text())
    assert len(job["outcomes"]) == len(FaultKind)


@pytest.mark.thorough("a benchmark")
@pytest.mark.slow
def test_the_cost_of_being_watched_is_measured(tmp_path: Path) -> None:
    with Command([sys.executable, str(BENCHMARK / "health_cost.py"), "--seconds=2"]) as command:
        assert command.wait(timeout=WAIT) == 0, command.output
        assert command.output.count("| torch |") == 1
