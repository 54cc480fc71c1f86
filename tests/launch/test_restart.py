# SPDX-License-Identifier: Apache-2.0
"""What the launcher of one host does when its workers fail."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

import pytest

from resiliency.events import EventType
from resiliency.testing.processes import Command

from .conftest import SCRIPTS, WAIT, WORKER, Launch, events, ready

TRAIN = SCRIPTS / "train.py"
LeavesNothing = Callable[[Command], None]


def test_a_killed_rank_is_noticed_at_once_and_all_ranks_start_again_in_place(
    launch: Launch, tmp_path: Path, leaves_nothing: LeavesNothing
) -> None:
    # With a poll, the death would be noticed after up to 30 s.
    job = launch(
        *("--nproc-per-node=2", "--max-restarts=2", "--monitor-interval=30", "--job-name=demo"),
        *(WORKER, "--attempt=0", "wait"),
    )
    victim, _ = ready(job, 1), ready(job, 0)
    killed = datetime.now(timezone.utc)
    os.kill(victim, signal.SIGKILL)
    for rank in range(2):
        job.wait_for_line(rf"rank {rank} attempt 1 finished", timeout=WAIT)
    assert job.wait(timeout=WAIT) == 0
    story = events(tmp_path / "run")
    assert [(event.type, event.attempt) for event in story] == [
        (EventType.JOB_STARTED, None),
        (EventType.RENDEZVOUS_DONE, 0),
        (EventType.WORKERS_STARTED, 0),
        (EventType.FAULT_DETECTED, 0),
        (EventType.DIAGNOSED, 0),
        (EventType.WORKERS_STOPPED, 0),
        (EventType.RENDEZVOUS_DONE, 1),
        (EventType.WORKERS_STARTED, 1),
        (EventType.WORKERS_STOPPED, 1),
        (EventType.JOB_TERMINATED, None),
    ]
    fault, last = story[3], story[-1]
    assert (fault.job_name, fault.rank, fault.fields["cause"]) == ("demo", 1, "SIGKILL")
    assert fault.fields["exit_code"] == -signal.SIGKILL
    assert (fault.time - killed).total_seconds() < 10
    assert last.fields == {"exit_code": 0, "outcome": "succeeded"}
    leaves_nothing(job)


@pytest.mark.slow
def test_an_exit_code_is_named_with_the_file_that_has_the_output(launch: Launch, tmp_path: Path) -> None:
    flags = ("--nproc-per-node=2", "--max-restarts=1", f"--log-dir={tmp_path / 'logs'}", "--tee=3")
    job = launch(*flags, "--restart-policy=min-healthy", WORKER, "--only=1", "finish", "--exit=3")
    assert job.wait(timeout=WAIT) == 1
    faults = events(tmp_path / "run", EventType.FAULT_DETECTED)
    assert [(fault.rank, fault.attempt, fault.fields["cause"]) for fault in faults] == [
        (1, 0, "exit code 3"),
        (1, 1, "exit code 3"),
    ]
    for fault in faults:
        log_file = Path(str(fault.fields["log_file"]))
        assert log_file.parts[-3:] == (f"attempt_{fault.attempt}", "1", "stderr.log")
        assert log_file.is_file()


@pytest.mark.slow
def test_a_hung_rank_is_found_by_its_missing_heartbeats_and_the_job_goes_on(
    launch: Launch, tmp_path: Path, leaves_nothing: LeavesNothing
) -> None:
    job = launch(
        # A rank that a busy machine stops for a second costs another restart, and that is right.
        *("--nproc-per-node=2", "--max-restarts=9", "--workers-stop-timeout=5"),
        # Spellings of three generations.
        *("--ft-rank-heartbeat-timeout=1", "--ft-workload_check_interval", "0.2"),
        *("--ft-param-initial_rank_heartbeat_timeout=60", TRAIN, "--heartbeats", "--fail=1:hang"),
        PET_STANDBY="auto",
    )
    assert job.wait(timeout=WAIT) == 0
    fault = events(tmp_path / "run", EventType.FAULT_DETECTED)[0]
    # The other rank waits for the hung one in a collective, so it misses heartbeats, too.
    assert fault.fields["cause"] == "hang: no heartbeat within 1 s"
    assert re.search("rank 1 attempt [1-9] sum 1", job.output)
    started = events(tmp_path / "run", EventType.WORKERS_STARTED)
    assert {event.fields["forked"] for event in started} == {2}, job.output
    leaves_nothing(job)


def test_when_the_restarts_are_used_up_the_summary_says_who_where_why_and_when(
    launch: Launch, tmp_path: Path, leaves_nothing: LeavesNothing
) -> None:
    flags = ("--nproc-per-node=2", "--max-restarts=1", f"--log-dir={tmp_path / 'logs'}", "--redirects=3")
    job = launch(*flags, WORKER, "--only=1", "finish", "--raise", "boom")
    assert job.wait(timeout=WAIT) == 1
    summary = job.output[job.output.index("worker.py failed") :]
    for part in (
        "1 rank on this host, 1 of 1 restarts used",
        f"rank 1 (host {os.uname().nodename}, local rank 1, pid ",
        "exit code 1, ValueError: boom",
        "UTC in attempt 1",
        "attempt_1/1/stderr.log",
    ):
        assert part in summary
    assert [event.attempt for event in events(tmp_path / "run", EventType.FAULT_DETECTED)] == [0, 1]
    assert events(tmp_path / "run")[-1].fields == {"exit_code": 1, "outcome": "failed"}
    leaves_nothing(job)


def test_a_worker_that_ignores_sigterm_does_not_hold_up_a_restart(launch: Launch) -> None:
    job = launch(
        *("--nproc-per-node=2", "--max-restarts=1", "--workers-stop-timeout=0.5"),
        *(WORKER, "--attempt=0", "stubborn"),
    )
    stubborn, victim = ready(job, 0), ready(job, 1)
    os.kill(victim, signal.SIGKILL)
    job.wait_for_line(rf"killing processes {stubborn}: they outlived SIGTERM", timeout=WAIT)
    assert job.wait(timeout=WAIT) == 0


def test_workers_are_told_the_job_and_where_its_files_go(launch: Launch, tmp_path: Path) -> None:
    job = launch("--rdzv-id=job7", "--rdzv-endpoint=localhost:0", WORKER, "env", JOB_IDENTIFIER="from-env")
    assert job.wait(timeout=WAIT) == 0
    assert f"JOB_IDENTIFIER=from-env RESILIENCY_RUN_DIR={tmp_path / 'run'} LOCAL_RANK=0" in job.output


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["--run-path", WORKER], id="in process", marks=pytest.mark.thorough("a module is near")),
        pytest.param(["-m", "worker"], id="module"),
        pytest.param(["--no-python", SCRIPTS / "hello.sh"], id="program"),
    ],
)
@pytest.mark.slow
def test_a_script_runs_in_each_of_torchruns_ways(launch: Launch, words: list[object]) -> None:
    job = launch(*words, "env", PYTHONPATH=str(SCRIPTS))
    assert job.wait(timeout=WAIT) == 0
    assert "WORLD_SIZE=1" in job.output
