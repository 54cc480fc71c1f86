# SPDX-License-Identifier: Apache-2.0
"""The simulator beside the real launcher."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from resiliency.events import EventType
from resiliency.testing.processes import Command
from simulator.faults import Kind
from simulator.recording import record
from tests.launch.conftest import (  # noqa: F401
    ROOT,
    WAIT,
    WORKER,
    Launch,
    events,
    launch,
    ready,
    temporary,
)
from tests.waiting import wait_until

JOB = f"simulator-launched-{os.getpid()}"


def simulator(tmp_path: Path, *flags: str) -> Command:
    argv = [sys.executable, str(ROOT / "simulator" / "simulator_entrypoint.py"), "--job", JOB]
    argv += ["--gpus_per_node", "2", "--state_dir", str(tmp_path / "state")]
    return Command([*argv, *flags], cwd=tmp_path, env={"JOB_IDENTIFIER": None})


def test_a_killed_worker_is_restarted_and_the_report_knows_when_it_died(
    launch: Launch,  # noqa: F811
    tmp_path: Path,
) -> None:
    job = launch("--nproc-per-node=2", "--max-restarts=2", f"--job-name={JOB}", WORKER, "wait")
    for rank in range(2):
        ready(job, rank)
    flags = ["--at", "0,kill,gpu=1", "--at", "3000,kill,gpu=0", "--run_dir", str(tmp_path / "run")]
    with simulator(tmp_path, *flags, "--job_end_grace_s", "1") as command:
        ready(job, 1, attempt=1)
        # Of the workers' end and the launcher's it learns by itself.
        job.signal(signal.SIGTERM)
        job.wait(timeout=WAIT)
        assert command.wait(timeout=WAIT) == 0
        assert f"job {JOB} has ended" in command.output
    story = [event for event in events(tmp_path / "run") if event.rank == 1]
    injected = next(event for event in story if event.type is EventType.FAULT_INJECTED)
    detected = next(event for event in story if event.type is EventType.FAULT_DETECTED)
    assert injected.time <= detected.time
    assert detected.fields["cause"] == "SIGKILL"
    # As a trace it is the same fault, by the word of the simulator or by that of the launcher alone.
    log = tmp_path / "run" / f"{JOB}-events.jsonl"
    (told,) = record([log]).failures
    assert (told.kind, told.node, told.gpu, told.cause) == (
        Kind.KILL,
        0,
        1,
        "kill of node 0 gpu 1 at 0.000000 s",
    )
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(line for line in lines if "fault_injected" not in line))
    (seen,) = record([log]).failures
    assert (seen.kind, seen.node, seen.gpu, seen.cause) == (Kind.KILL, 0, 1, "killed")


def test_a_lost_host_takes_its_launcher_along(launch: Launch, tmp_path: Path) -> None:  # noqa: F811
    job = launch("--nproc-per-node=2", "--max-restarts=2", WORKER, "wait", JOB_IDENTIFIER=JOB)
    for rank in range(2):
        ready(job, rank)
    with simulator(tmp_path, "--at", "0,host_kill") as command:
        assert command.wait(timeout=WAIT) == 0, command.output
    assert job.wait(timeout=WAIT) == -signal.SIGKILL
    wait_until(lambda: not job.survivors(), "something of the host lives")
