# SPDX-License-Identifier: Apache-2.0
"""A large log is read in memory that a person has."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmark"))

import ledger_scale

MIB = 2**20


@pytest.mark.thorough("a measure of memory; the reader has tests of its own")
@pytest.mark.slow
def test_memory_grows_by_less_than_the_file(tmp_path: Path) -> None:
    costs = []
    for size in (1 * MIB, 9 * MIB):
        log = tmp_path / f"{size}.jsonl"
        ledger_scale.write_log(log, size, ranks=64)
        costs.append(ledger_scale.measure(log, "--timeline", str(tmp_path / "t.html")))
    small, large = costs
    # Some 3 MiB; with an object for each event it was 20.
    assert large.memory_mib - small.memory_mib < 8


def test_what_the_benchmark_writes_is_a_job_that_fails_and_comes_back(tmp_path: Path) -> None:
    from resiliency.goodput_measure.ledger import build_ledger
    from resiliency.goodput_measure.reader import read_events

    log = tmp_path / "log"
    lines = ledger_scale.write_log(log, 200_000, ranks=4)
    events = list(read_events(log, progress=False))
    ledger = build_ledger(events)
    assert len(events) == lines
    assert len(ledger.lanes) == 4
    assert all(incident.lost_steps is not None for incident in ledger.incidents[:-1])
    assert ledger.incidents
