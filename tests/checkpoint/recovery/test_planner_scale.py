# SPDX-License-Identifier: Apache-2.0
"""The planner's benchmark as its users start it, for a job that is small enough for a test."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from resiliency.testing.processes import Command

SCRIPT = Path(__file__).parents[3] / "benchmark" / "planner_scale.py"
WAIT = 180.0


def run(*flags: str, expect: int) -> str:
    with Command([sys.executable, SCRIPT, *flags]) as command:
        assert command.wait(timeout=WAIT) == expect, command.output
        return command.output


def test_it_measures_every_case_and_says_what_each_moves(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    flags = ["--ranks", "60", "--ranks-per-host", "4", "--lost-hosts", "1", "--runs", "2"]
    output = run(*flags, "--export", str(report), expect=0)
    figures = json.loads(report.read_text())
    assert figures["machine"]["cores"]
    sent = {case["case"]: case["sent_shards"] for case in figures["cases"]}
    # Of those who moved, the ranks of one host find the copy of their checkpoint there.
    assert sent == {"restarted": 0, "lost": 4, "permuted": 56, "replicas": 8}
    for case in figures["cases"]:
        assert len(case["first_plan_s"]) == 2
        assert min(case["first_plan_s"]) > 0
        assert case["peak_bytes"] > 0
        assert case["case"] in output
    assert "60 ranks on 15 hosts" in output


def test_a_job_that_cannot_be_restored_is_told_and_makes_the_exit_code_1() -> None:
    output = run("--ranks", "8", "--ranks-per-host", "4", "--lost-hosts", "1", "--runs", "1", expect=1)
    assert "no plan for 'replicas'" in output


def test_a_job_without_a_host_left_is_refused() -> None:
    assert "one must be left" in run("--ranks", "8", "--lost-hosts", "1", expect=2)
