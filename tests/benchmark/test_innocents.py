# SPDX-License-Identifier: Apache-2.0
"""The campaign of sound jobs, and that of outages: what they count as harm, and one cheap job of each."""

from __future__ import annotations

import sys
from pathlib import Path

import health_innocents
import outages
import pytest

from resiliency.testing.processes import Command

BENCHMARK = Path(__file__).parents[2] / "benchmark"
WAIT = 600.0


def test_the_tables_count_jobs_that_were_disturbed_or_lost() -> None:
    def innocent(**changes: object) -> health_innocents.Outcome:
        sound = {
            "behaviour": "evaluate",
            "seconds": 9.0,
            "exit_code": 0,
            "restarts": 0,
            "harm": (),
            "named": (),
        }
        return health_innocents.Outcome(**(sound | changes))  # type: ignore[arg-type]

    text = health_innocents.as_table(
        [innocent(), innocent(restarts=1, harm=("1 restarts",)), innocent(exit_code=None)]
    )
    assert "| evaluate | 3 | 2 | 1 | nothing |" in text
    assert text.endswith("2 of 3 jobs were harmed.\n- evaluate: 1 restarts\n- evaluate: stood still")

    def outage(code: int) -> outages.Outcome:
        return outages.Outcome(
            kind="dns", place="save", away_s=5.0, exit_code=code, restarts=4, back_s=1.0, last_words="gave up"
        )

    text = outages.as_table([outage(0), outage(70)])
    assert "| dns | save | 5 | 1 of 2 | 4 | 1.0 |" in text
    assert text.endswith("1 of 2 jobs were lost.\n- dns save: 70, gave up")


@pytest.mark.thorough("a benchmark; tests/launch/hangs has each kind of wait by itself")
@pytest.mark.slow
def test_sound_jobs_are_left_alone() -> None:
    argv = [sys.executable, str(BENCHMARK / "health_innocents.py"), "--act-s=8", "--behaviours"]
    argv += ["score_with_judge", "answer_in_a_thread", "child_process", "slow_steps_of_one_rank"]
    with Command(argv) as command:
        assert command.wait(timeout=WAIT) == 0, command.output


@pytest.mark.thorough("a benchmark; tests/launch has one outage under a real launcher")
@pytest.mark.slow
def test_jobs_outlive_an_outage() -> None:
    argv = [sys.executable, str(BENCHMARK / "outages.py"), "--seconds=5", "--places=step", "save"]
    with Command(argv) as command:
        assert command.wait(timeout=WAIT) == 0, command.output
