# SPDX-License-Identifier: Apache-2.0
"""A job that a scheduler suspends goes on as if nothing had been."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from resiliency.events import EventType
from resiliency.launch import guardian
from resiliency.testing.processes import Command, suspended
from tests.ports import free_port

from .conftest import SCRIPTS, WAIT, Launch, events

#: The limit of each keep-alive between the processes of the job, and how long they are suspended.  A busy
#: machine may stop one of them for some seconds, and leave the others.
LIMIT_S, SUSPENDED_S = 10, 13.0


@pytest.mark.slow
def test_a_job_of_two_hosts_that_was_suspended_for_longer_than_all_limits_goes_on(
    launch: Launch, tmp_path: Path
) -> None:
    """Launchers, rank monitors, ranks and checkpoint agents: nobody is ended, lost or started again."""
    flags = [
        *("--nnodes=2", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=pair"),
        *("--local-addr=127.0.0.1", f"--job-name=suspended-{os.getpid()}"),
        f"--rdzv-conf=keep_alive_interval=2,keep_alive_max_attempt={LIMIT_S // 2}",
        f"--ft-rank-heartbeat-timeout={LIMIT_S}",
        *("--ft-workload_check_interval=0.2", "--ft-param-initial_rank_heartbeat_timeout=60"),
    ]
    hosts = [
        launch(*flags, SCRIPTS / "suspended.py", tmp_path / "c", run_dir=tmp_path / name, NODE_NAME=name)
        for name in ("a", "b")
    ]
    before = [progress(host, 2) for host in hosts]
    with suspended(*hosts):
        threading.Event().wait(SUSPENDED_S)  # what is tested
    # For some looks more: what is judged late is seen, too.
    after = [progress(host, 8) for host in hosts]
    assert after == before
    for host in hosts:
        os.kill(int(after[hosts.index(host)].split()[1]), signal.SIGUSR2)
    assert [host.wait(timeout=WAIT) for host in hosts] == [0, 0]
    for host, name in zip(hosts, ("a", "b"), strict=True):
        assert not events(tmp_path / name, EventType.FAULT_DETECTED)
        host.wait_for_line("WARNING .* launcher stopped for", timeout=WAIT)


def test_a_wait_for_processes_to_end_goes_on_after_a_suspension(monkeypatch: pytest.MonkeyPatch) -> None:
    asleep_s = iter((0.0,))
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + next(asleep_s, 3600.0))
    monkeypatch.setattr(guardian, "time", clock)
    with subprocess.Popen(["sleep", "0.2"]) as process:
        ending = guardian.Process.of(process.pid)
        assert ending is not None
        assert guardian.wait_until_gone([ending], WAIT)


def progress(host: Command, count: int) -> str:
    """Process ids of rank and agent, once the rank has said `count` times that it makes steps."""
    return host.wait_for_line(r"attempt 0 (pid \d+ agent [1-9]\d*) step", timeout=WAIT, count=count)[1]
