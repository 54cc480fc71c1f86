# SPDX-License-Identifier: Apache-2.0
"""End to end: launcher, checkpoints and samplers, while hosts are lost and come."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from resiliency.testing.processes import Command
from tests.launch.conftest import Launch, launch, temporary  # noqa: F401 - fixtures
from tests.launch.settings import FAST
from tests.ports import free_port

WAIT_S = 120.0
SCRIPT = Path(__file__).parent / "elastic_training.py"


def losses(*outputs: str) -> dict[int, float]:
    found = re.findall(r"step (\d+) world \d+ loss ([\d.]+)", "\n".join(outputs))
    return {int(step): float(loss) for step, loss in found}


@pytest.mark.slow
def test_from_four_ranks_to_two_and_to_three_each_sample_counts_once_and_no_loss_moves(
    launch: Launch,  # noqa: F811
    tmp_path: Path,
) -> None:
    port = free_port()

    def host(index: int, ranks: int) -> Command:
        conf = FAST.replace("join_timeout=4", "join_timeout=60,last_call_timeout=2")
        place = ["--master-addr=127.0.0.1", f"--master-port={port}", f"--node-rank={index}"]
        flags = [conf, "--nnodes=1:2", f"--nproc-per-node={ranks}", *place, "--rdzv-id=elastic"]
        words = [*flags, "--local-addr=127.0.0.1", SCRIPT, tmp_path / "ckpt", "4:8", "2:17"]
        return launch(*words, run_dir=tmp_path / f"run{index}-{ranks}", NODE_NAME=f"host{index}-{ranks}")

    first, lost = host(0, 2), host(1, 2)
    first.wait_for_line("rank 0 of 4 waits", timeout=WAIT_S)
    lost.signal(signal.SIGKILL)
    start = first.wait_for_line(r"rank 0 of 2 starts after step (\d+)", timeout=WAIT_S)
    assert int(start[1]) >= 6
    first.wait_for_line("rank 0 of 2 waits", timeout=WAIT_S)
    newcomer = host(1, 1)
    start = first.wait_for_line(r"rank 0 of 3 starts after step (\d+)", timeout=WAIT_S)
    assert int(start[1]) >= 15
    try:
        assert [command.wait(timeout=WAIT_S) for command in (first, newcomer)] == [0, 0]
    except TimeoutError as error:
        said = "\n".join(newcomer.lines[-40:])
        raise AssertionError(f"{error}\nThe newcomer (exit code {newcomer.returncode}):\n{said}") from error
    assert "seen [3]" in first.output
    lost.assert_no_orphans(timeout=WAIT_S)
    whole = launch("--nproc-per-node=1", SCRIPT, tmp_path / "whole", run_dir=tmp_path / "run-whole")
    assert whole.wait(timeout=WAIT_S) == 0
    assert "seen [3]" in whole.output
    expected = losses(whole.output)
    assert len(expected) == 30
    assert losses(first.output) == pytest.approx(expected, abs=1e-12, rel=0)
