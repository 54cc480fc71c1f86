# SPDX-License-Identifier: Apache-2.0
"""The whole way with real launchers: a host is lost with all it had, and another one takes its place."""

from __future__ import annotations

import re
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from resiliency.testing.bed_training import Training, expected_losses
from resiliency.testing.host_bed import PATIENCE_S, HostBed
from resiliency.testing.processes import Command

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
STEPS, PARK = 8, 4


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[HostBed]:
    with HostBed(2, log=tmp_path / "bed.txt") as bed:
        yield bed


def launch(bed: HostBed, name: str, node: int, port: int, tmp_path: Path) -> Command:
    argv = [
        *(sys.executable, str(ROOT / "launcher.py"), "--run-dir", str(tmp_path / name)),
        "--rdzv-conf=keep_alive_interval=1,keep_alive_max_attempt=4,join_timeout=60,last_call_timeout=2",
        *("--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={port}", f"--node-rank={node}"),
        *("--rdzv-id=bed", "--local-addr=127.0.0.1", "--max-restarts=3"),
        *("-m", "resiliency.testing.bed_training", f"steps={STEPS}", f"hold={PARK + 1}", "await_copies=True"),
    ]
    return bed.command(name, argv, cwd=tmp_path)


def test_a_launched_host_that_is_gone_with_its_disk_is_replaced_and_no_step_is_lost(
    bed: HostBed, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])
    bed.make_gate(PARK + 1)
    first, second = (launch(bed, f"h{node}", node, port, tmp_path) for node in range(2))
    first.wait_for_line(f"rank 0 held {PARK + 1}", timeout=PATIENCE_S)
    bed.kill("h1", disk=True)
    assert second.returncode == -signal.SIGKILL
    bed.add("h2")
    third = launch(bed, "h2", 1, port, tmp_path)
    for command, rank in ((first, 0), (third, 1)):
        command.wait_for_line(rf"rank {rank} restored {PARK} ", timeout=PATIENCE_S)
    first.wait_for_line(f"rank 0 held {PARK + 1}", timeout=PATIENCE_S, count=2)
    bed.open_gate(PARK + 1)
    assert [command.wait(timeout=PATIENCE_S) for command in (first, third)] == [0, 0]
    losses = dict(re.findall(r"rank 0 step (\d+) loss (\S+)", first.output))
    curve = expected_losses(Training(steps=STEPS), 2)
    assert losses == {str(step): loss for step, loss in curve.items()}
