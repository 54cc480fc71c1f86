# SPDX-License-Identifier: Apache-2.0
"""The launcher names ranks that stand still, and ends those that are to blame."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from resiliency.events import EventType

from ..conftest import SCRIPTS, WAIT, Launch, events

HANGING = SCRIPTS / "hanging.py"


def test_a_rank_that_hangs_in_its_loader_is_named_with_its_frame_ended_and_started_again(
    launch: Launch, tmp_path: Path
) -> None:
    job = launch("--nproc-per-node=3", "--max-restarts=1", "--hang-timeout-s=6", HANGING, "loader")
    assert job.wait(timeout=WAIT) == 0
    (hang,) = events(tmp_path / "run", EventType.HANG_DETECTED)
    assert hang.fields["kind"] == "behind"
    assert (hang.fields["ranks"], hang.fields["waiting"]) == ([1], [0, 2])
    assert hang.fields["phase"] == "data"
    assert str(hang.fields["frame"]).endswith("in __getitem__")
    (fault,) = events(tmp_path / "run", EventType.FAULT_DETECTED)
    assert fault.rank == 1
    assert str(fault.fields["cause"]).startswith("hang: rank 1 (host ")
    assert "ranks 0, 2 wait in a collective that it has not begun" in str(fault.fields["cause"])
    # Equal stacks are shown once, and the one that differs first.
    told = [line.partition("stacks of ")[2] for line in job.lines if "stacks of " in line]
    assert told == ["rank 1:", "ranks 0, 2:"]
    assert job.output.count(" finished") == 3


def test_a_rank_that_is_stopped_before_its_first_step_is_named_and_one_that_evaluates_is_not_accused(
    launch: Launch, tmp_path: Path
) -> None:
    job = launch("--nproc-per-node=2", "--hang-timeout-s=off", HANGING, "stopped")
    pid = int(job.wait_for_line(r"rank 1 pid (\d+) stops", timeout=WAIT)[1])
    job.wait_for_line(
        "rank 1 .* has been stopped for .* s, by SIGSTOP or a debugger; rank 0 waits", timeout=WAIT
    )
    os.kill(pid, signal.SIGCONT)
    job.wait_for_line("rank 0 .* holds up the job for .* s, in an evaluation: .* in evaluate", timeout=WAIT)
    assert job.wait(timeout=WAIT) == 0
    kinds = [hang.fields["kind"] for hang in events(tmp_path / "run", EventType.HANG_DETECTED)]
    assert kinds == ["stopped", "held_up"]
