# SPDX-License-Identifier: Apache-2.0
"""The cost of a save at every step: how it is judged, and small as its users start it."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest
from every_step import Found, as_text

from resiliency.testing.processes import Command

SCRIPT = Path(__file__).parents[2] / "benchmark" / "every_step.py"
WAIT = 300.0


@pytest.mark.parametrize(("saved", "outcome"), [(0.51, "met"), (0.52, "MISSED")])
def test_steps_with_saves_are_compared_with_those_without_in_the_same_round(
    saved: float, outcome: str
) -> None:
    found = Found(
        size_bytes=2**30,
        without_s=[0.5, 1.0, 0.1],
        with_saves_s=[saved, 1.0 + 3 * (saved - 0.5), 0.1],
        held_s=[0.001],
        outcomes=Counter(committed=20, skipped=10),
    )
    assert found.is_met is (outcome == "met")
    text = as_text(found)
    assert text.endswith(outcome)
    assert "saves: 20 committed, 10 skipped" in text


@pytest.mark.thorough("a benchmark; what it counts has tests of its own")
@pytest.mark.slow
def test_a_small_job_saves_every_step_and_leaves_nothing_behind(tmp_path: Path) -> None:
    export, disk = tmp_path / "found.json", tmp_path / "disk"
    sizes = ["--size-gib=0.01", "--step-s=0.05", "--steps=3", "--rounds=2"]
    command = [sys.executable, SCRIPT, *sizes, "--directory", disk, "--export", export]
    with Command(list(map(str, command))) as started:
        assert started.wait(timeout=WAIT) in (0, 1), started.output
        started.assert_no_orphans(timeout=120)
    found = json.loads(export.read_text())
    assert sum(found["outcomes"].values()) == 6
    assert len(found["with_saves_s"]) == len(found["without_s"]) == 2
    assert list(disk.iterdir()) == []
