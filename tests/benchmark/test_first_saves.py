# SPDX-License-Identifier: Apache-2.0
"""The measurement of a job's first saves: what it counts, and small as its users start it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from first_saves import Round, Save, summary

from resiliency.testing.processes import Command

SCRIPT = Path(__file__).parents[2] / "benchmark" / "first_saves.py"
WAIT = 300.0


def round_of(*held_s: float, skipped: int = 0) -> Round:
    states = ["skipped"] * skipped + ["committed"] * (len(held_s) - skipped)
    saves = [
        Save(step=10 * number, state=state, held_s=held, at_s=3.0 * number, passes=10)
        for number, (state, held) in enumerate(zip(states, held_s, strict=True), start=1)
    ]
    return Round(slot_s=0.6, saves=saves)


@pytest.mark.parametrize(
    ("found", "is_met"),
    [
        (round_of(0.15, 0.01, 0.01, 0.01), True),
        (round_of(0.16, 0.01, 0.01, 0.01), False),
        (round_of(0.29, 0.2, 0.2, 0.2), True),
        (round_of(0.31, 0.2, 0.2, 0.2), False),
        (round_of(0.01, 0.01, 0.01, 0.4), False),
        (round_of(0.1, 0.01, 0.01, 0.01, skipped=1), False),
    ],
)
def test_a_job_passes_if_every_save_was_made_and_none_held_it_for_longer_than_a_later_one(
    found: Round, is_met: bool
) -> None:
    assert found.is_met is is_met
    assert summary([found]).endswith("met" if is_met else "MISSED")


def test_the_summary_counts_what_was_not_made() -> None:
    text = summary([round_of(0.1, 0.1, 0.01, 0.01, skipped=2), round_of(0.1, 0.01, 0.01, 0.01)])
    assert "saves made, of 4: [2, 4]; not made: [2, 0]" in text


@pytest.mark.thorough("a benchmark; what it counts has tests of its own")
@pytest.mark.slow
def test_a_small_job_has_every_save_and_leaves_nothing_behind(tmp_path: Path) -> None:
    export, disk = tmp_path / "rounds.json", tmp_path / "disk"
    sizes = ["--size-gib=0.01", "--step-s=0.05", "--every=2", "--saves=4", "--rounds=1", "--new-memory-s=1"]
    command = [sys.executable, SCRIPT, *sizes, "--directory", disk, "--export", export]
    with Command(list(map(str, command))) as started:
        assert started.wait(timeout=WAIT) in (0, 1), started.output
        started.assert_no_orphans(timeout=120)
    (found,) = json.loads(export.read_text())["rounds"]
    assert found["slot_s"] >= 0.01
    assert [(save["step"], save["state"]) for save in found["saves"]] == [
        (step, "committed") for step in (2, 4, 6, 8)
    ]
    assert list(disk.iterdir()) == []
