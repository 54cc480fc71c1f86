# SPDX-License-Identifier: Apache-2.0
"""The whole way with real launchers: a host is lost with all it had, and another one takes its place."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from resiliency.testing.cluster.hosts import WAIT_S, TestCluster
from resiliency.testing.cluster.training import Training, expected_losses
from resiliency.testing.processes import Command
from tests.ports import free_port

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
STEPS, PARK = 8, 4


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[TestCluster]:
    with TestCluster(2, log=tmp_path / "cluster.txt") as cluster:
        yield cluster


def launch(cluster: TestCluster, name: str, node: int, port: int, tmp_path: Path) -> Command:
    argv = [
        *(sys.executable, str(ROOT / "launcher.py"), "--run-dir", str(tmp_path / name)),
        "--rdzv-conf=keep_alive_interval=1,keep_alive_max_attempt=6,join_timeout=240,last_call_timeout=2",
        *("--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={port}", f"--node-rank={node}"),
        *("--rdzv-id=cluster", "--local-addr=127.0.0.1", "--max-restarts=3"),
        *(
            "-m",
            "resiliency.testing.cluster.training",
            f"steps={STEPS}",
            f"hold={PARK + 1}",
            "await_copies=True",
        ),
    ]
    return cluster.command(name, argv, cwd=tmp_path)


def test_a_launched_host_that_is_gone_with_its_disk_is_replaced_and_no_step_is_lost(
    cluster: TestCluster, tmp_path: Path
) -> None:
    port = free_port()
    cluster.make_gate(PARK + 1)
    first, second = (launch(cluster, f"h{node}", node, port, tmp_path) for node in range(2))
    first.wait_for_line(f"rank 0 held {PARK + 1}", timeout=WAIT_S)
    cluster.kill("h1", disk=True)
    assert second.returncode == -signal.SIGKILL
    cluster.add("h2")
    third = launch(cluster, "h2", 1, port, tmp_path)
    for command, rank in ((first, 0), (third, 1)):
        command.wait_for_line(rf"rank {rank} restored {PARK} ", timeout=WAIT_S)
    first.wait_for_line(f"rank 0 held {PARK + 1}", timeout=WAIT_S, count=2)
    cluster.open_gate(PARK + 1)
    assert [command.wait(timeout=WAIT_S) for command in (first, third)] == [0, 0]
    losses = dict(re.findall(r"rank 0 step (\d+) loss (\S+)", first.output))
    curve = expected_losses(Training(steps=STEPS), 2)
    assert losses == {str(step): loss for step, loss in curve.items()}
