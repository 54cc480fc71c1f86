# SPDX-License-Identifier: Apache-2.0
"""How the costs of a job grow with its ranks, as the benchmark counts them at two sizes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from resiliency.testing.processes import Command

SCRIPT = Path(__file__).parents[2] / "benchmark" / "scale.py"
WAIT = 300.0
STATES = ("sharded", "hybrid", "replicated")


@pytest.mark.thorough("a benchmark; tests/checkpoint counts operations")
@pytest.mark.slow
def test_the_operations_of_a_restart_a_prune_and_a_part_of_a_save_do_not_grow_with_the_ranks(
    tmp_path: Path,
) -> None:
    report, note = tmp_path / "scale.json", tmp_path / "scale.md"
    flags = ["--ranks", "128", "512", "--export", str(report), "--markdown", str(note)]
    with Command([sys.executable, SCRIPT, *flags]) as command:
        assert command.wait(timeout=WAIT) == 0, command.output
    figures = json.loads(report.read_text())
    power = {(row["action"], row["who"], row["layout"]): row for row in figures["exponents"]}
    for state in STATES:
        for key in (
            *((action, who) for action in ("restart", "fewer ranks") for who in ("rank 0", "any other rank")),
            ("prune", "rank 0's host"),
        ):
            if power[(*key, state)]["operations"] is None:  # of who is refused without a look
                continue
            assert abs(power[(*key, state)]["operations"]) < 0.05, (key, state)
        part = power["part of save", "any other host", state]
        assert abs(part["operations"]) < 0.05, state
        assert part["written_bytes"] < 0.1, state
        for action in ("first save", "later save"):  # the leader counts votes: each rank's once
            assert power[action, "rank 0's host", state]["operations"] < 1.05, (action, state)
        # Of what a rank reads only the manifest grows, by some 30 bytes per rank of the job.
        read = {
            cost["ranks"]: cost["read_bytes"]
            for cost in figures["costs"]
            if (cost["action"], cost["who"], cost["layout"]) == ("restart", "any other rank", state)
        }
        assert read[512] - read[128] < 64 * (512 - 128), state
    assert abs(power["save of S", "rank 0's host", "sharded"]["cpu_s"]) < 0.2
    assert "| restart | any other rank | hybrid | exponent | ^0.00 |" in note.read_text()


def test_a_job_of_one_host_is_refused() -> None:
    with Command([sys.executable, SCRIPT, "--ranks", "8"]) as command:
        assert command.wait(timeout=WAIT) == 2
        assert "a job needs two hosts of 8 ranks" in command.output
