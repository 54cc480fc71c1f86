# SPDX-License-Identifier: Apache-2.0
"""A loss that is not finite sends a job back behind the checkpoint that may hold the damage."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from resiliency.events import EventType

from .conftest import SCRIPTS, WAIT, Launch, events


@pytest.mark.slow
def test_a_job_goes_back_behind_the_damage_and_further_back_until_that_brings_nothing(
    launch: Launch, tmp_path: Path
) -> None:
    flags = ("--on-nan=rollback", "--max-restarts=9", "--attempts-without-progress=2")
    job = launch(*flags, SCRIPTS / "rolling_back.py", tmp_path / "checkpoints")
    assert job.wait(timeout=WAIT) == 70
    # The damage of step 18 is gone.  What is bad in itself ends the job, after one more step back.
    assert re.findall(r"attempt \d from (\d+) with (\d+)", job.output) == [
        *[("0", "0"), ("10", "80"), ("30", "240"), ("20", "160")],
    ]
    told = events(tmp_path / "run", EventType.DIAGNOSED)
    assert [(event.fields["cause"], event.fields["advice"]) for event in told] == [
        *[("nan", "restart")] * 3,
        ("nan", "stop"),
    ]
    assert told[-1].fields["decided_by"] == "no_progress"
    assert "the job goes back to a checkpoint before step 20" in str(told[0].fields["sentence"])


def test_a_job_without_an_older_checkpoint_ends(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "begin").touch()
    flags = ("--on-nan=rollback", "--max-restarts=9", "--nproc-per-node=2")
    job = launch(*flags, SCRIPTS / "failing.py", "nan")
    assert job.wait(timeout=WAIT) == 70
    assert "there is no older checkpoint to go back to" in job.output
