# SPDX-License-Identifier: Apache-2.0
"""A job that failed says so by its exit code, however its surviving workers ended."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from resiliency.launch import _compat

from .conftest import WAIT, WORKER, Launch, events, ready


@pytest.mark.parametrize(("policy", "restarts"), [("any-failed", 0), ("min-healthy", 1)])
@pytest.mark.slow
def test_a_failed_job_does_not_succeed_by_survivors_that_end_well(
    launch: Launch, tmp_path: Path, policy: str, restarts: int
) -> None:
    flags = ("--nproc-per-node=2", f"--max-restarts={restarts}", f"--ft-restart-policy={policy}")
    job = launch(*flags, WORKER, "graceful")
    for attempt in range(restarts + 1):
        victim, _ = ready(job, 1, attempt), ready(job, 0, attempt)
        os.kill(victim, signal.SIGKILL)
    assert job.wait(timeout=WAIT) == 1
    assert job.output.count("saved") == restarts + 1
    assert events(tmp_path / "run")[-1].fields == {"exit_code": 1, "outcome": "failed"}


def test_a_host_that_waited_as_a_spare_until_the_job_succeeded_has_succeeded() -> None:
    assert _compat.succeeded(None)  # what upstream returns for it, also where its workers failed before
