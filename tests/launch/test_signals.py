# SPDX-License-Identifier: Apache-2.0
"""How the launcher ends when it is told to, and that nothing stays behind in any of the ways."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from resiliency.events import EventType
from resiliency.testing.processes import Command
from tests.ports import free_port

from .conftest import WAIT, WORKER, Launch, children, events, ready

LeavesNothing = Callable[[Command], None]


def start(launch: Launch, *words: object, cold: bool = False) -> Command:
    job = launch("--nproc-per-node=2", *words, cold=cold)
    ready(job, 0)
    ready(job, 1)
    return job


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(("action", "clean"), [("graceful", True), ("children", False)])
@pytest.mark.slow
def test_a_signal_reaches_the_workers_and_the_exit_code_says_whether_they_finished_cleanly(
    launch: Launch,
    tmp_path: Path,
    leaves_nothing: LeavesNothing,
    number: signal.Signals,
    action: str,
    clean: bool,
) -> None:
    job = start(launch, WORKER, action)
    job.signal(number)
    code = 0 if clean else 128 + number
    assert job.wait(timeout=WAIT) == code
    assert job.output.count("saved") == (2 if clean else 0)
    # A worker may say KeyboardInterrupt; the launcher has no traceback of its own.
    assert "resiliency/launch" not in job.output
    assert events(tmp_path / "run")[-1].fields == {"exit_code": code, "outcome": number.name}
    leaves_nothing(job)


@pytest.mark.thorough("other signals are near")
@pytest.mark.slow
def test_behind_nohup_hang_ups_stay_ignored_where_workers_are_functions_too(launch: Launch) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        job = launch("--nproc-per-node=1", "--run-path", WORKER, "wait", cold=True)
    finally:
        signal.signal(signal.SIGHUP, before)
    job.wait_for_line("started 1 workers", timeout=WAIT)
    ignored = re.search(r"SigIgn:\s*(\w+)", Path(f"/proc/{job.pid}/status").read_text())
    assert ignored
    assert int(ignored[1], 16) >> (signal.SIGHUP - 1) & 1
    job.signal(signal.SIGTERM)
    job.wait(timeout=WAIT)


def test_workers_that_ignore_the_signal_are_killed_after_the_term_timeout(
    launch: Launch, leaves_nothing: LeavesNothing
) -> None:
    job = start(launch, "--term-timeout=0.5", WORKER, "stubborn")
    job.signal(signal.SIGTERM)
    assert job.wait(timeout=WAIT) == 128 + signal.SIGTERM
    leaves_nothing(job)


def test_a_second_signal_ends_the_wait_for_the_workers_at_once(
    launch: Launch, leaves_nothing: LeavesNothing
) -> None:
    job = start(launch, WORKER, "stubborn")  # the default term timeout is half an hour
    job.signal(signal.SIGINT)
    job.wait_for_line("ignores the signal", timeout=WAIT, count=2)
    job.signal(signal.SIGINT)
    assert job.wait(timeout=WAIT) == 128 + signal.SIGINT
    assert "a second signal came" in job.output
    leaves_nothing(job)


@pytest.mark.parametrize("action", ["children", "stubborn"])
def test_nothing_outlives_a_launcher_that_is_killed(
    launch: Launch, tmp_path: Path, leaves_nothing: LeavesNothing, action: str
) -> None:
    job = start(launch, "--workers-stop-timeout=1", WORKER, action)
    job.signal(signal.SIGKILL)
    assert job.wait(timeout=WAIT) == -signal.SIGKILL
    leaves_nothing(job)
    last = events(tmp_path / "run")[-1]
    assert (last.type, last.fields["outcome"]) == (EventType.JOB_TERMINATED, "launcher killed")
    published = (tmp_path / "run" / "local-goodput.log").read_text().splitlines()
    assert [json.loads(line)["event_type"] for line in published] == ["job_started", "job_terminated"]


def test_a_dead_guardian_costs_the_protection_and_not_the_job(launch: Launch, tmp_path: Path) -> None:
    job = start(launch, "--max-restarts=1", WORKER, "--attempt=0", "wait")
    (guardian,) = children(job, "guardian.py", recursive=True)
    guardian.kill()
    os.kill(ready(job, 1), signal.SIGKILL)
    assert job.wait(timeout=WAIT) == 0
    assert "guardian process" in job.output


@pytest.mark.thorough("a dead guardian is near")
def test_a_dead_rank_monitor_is_replaced_at_the_next_start(launch: Launch, tmp_path: Path) -> None:
    # Cold, because the template of a launcher that was forked has the same command line.
    job = start(launch, "--max-restarts=1", WORKER, "--attempt=0", "wait", cold=True)
    monitors = children(job, " ".join(job.argv[:2]), recursive=True)
    assert len(monitors) == 2
    monitors[0].kill()
    os.kill(ready(job, 1), signal.SIGKILL)
    assert job.wait(timeout=WAIT) == 0
    assert len(events(tmp_path / "run", EventType.WORKERS_STARTED)) == 2


def test_a_launcher_that_waits_for_other_hosts_can_be_ended(
    launch: Launch, tmp_path: Path, leaves_nothing: LeavesNothing
) -> None:
    # One that nobody joins, and one whose meeting point does not exist: native code waits there.
    port = free_port()
    for endpoint, conf in ((f"localhost:{port}", ""), (f"127.0.0.1:{port + 1}", "is_host=false")):
        run_dir = tmp_path / f"run{conf}"
        job = launch(
            "--nnodes=2",
            f"--rdzv-endpoint={endpoint}",
            f"--rdzv-conf={conf}",
            WORKER,
            "wait",
            run_dir=run_dir,
        )
        job.wait_for_line("meeting other hosts", timeout=WAIT)
        job.signal(signal.SIGTERM)
        assert job.wait(timeout=WAIT) == 128 + signal.SIGTERM
        assert events(run_dir)[-1].type == EventType.JOB_TERMINATED
        leaves_nothing(job)


def test_a_temporary_directory_with_a_long_name_is_no_obstacle(launch: Launch, tmp_path: Path) -> None:
    long = tmp_path / ("x" * 100)  # a socket's path may have 107 bytes
    long.mkdir()
    assert launch(WORKER, "finish", TMPDIR=str(long)).wait(timeout=WAIT) == 0
    assert os.listdir(long) == []


@pytest.mark.slow
def test_two_launchers_on_one_host_do_not_meet(launch: Launch, tmp_path: Path) -> None:
    jobs = [launch("--nproc-per-node=1", WORKER, "graceful", run_dir=tmp_path / f"run{i}") for i in range(2)]
    for job in jobs:
        ready(job, 0)
    for job in jobs:
        job.signal(signal.SIGTERM)
        assert job.wait(timeout=WAIT) == 0
