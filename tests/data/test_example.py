# SPDX-License-Identifier: Apache-2.0
"""The example: ranks are killed and come back in another number, and neither samples nor losses notice."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from resiliency.testing.processes import Command
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]


def launched(ranks: int, directory: Path, job: str) -> Command:
    argv = [sys.executable, str(ROOT / "launcher.py"), "--nproc-per-node", str(ranks)]
    argv += [str(ROOT / "examples" / "ddp_data.py"), "--ckpt-dir", str(directory), "--epochs", "2"]
    return Command(argv, env={"JOB_IDENTIFIER": job}, cwd=directory.parent)


def losses(*outputs: str) -> dict[int, float]:
    found = re.findall(r"step (\d+) epoch \d+ loss ([\d.]+)", "\n".join(outputs))
    return {int(step): float(loss) for step, loss in found}


@pytest.mark.slow
def test_the_dispatch_example_writes_each_range_though_its_server_and_a_worker_are_killed(
    tmp_path: Path,
) -> None:
    def run(*words: object) -> Command:
        argv = [sys.executable, str(ROOT / "examples" / "dispatched_ranges.py"), *map(str, words)]
        return Command(argv, env={"DATA_TOKEN": tmp_path.name})

    output = tmp_path / "out"
    output.mkdir()
    serve = ["serve", "--book", tmp_path / "book", "--size", 1500, "--range-size", 10, "--port"]
    with ExitStack() as stack:
        first = stack.enter_context(run(*serve, 0))
        port = int(first.wait_for_line(r"serving on port (\d+)", timeout=120)[1])
        work = ["work", "--port", port, "--output", output, "--worker"]
        one, two = (stack.enter_context(run(*work, name)) for name in ("one", "two"))
        wait_until(lambda: len(os.listdir(output)) > 10, "no ranges are written", timeout=120)
        one.kill()
        first.kill()
        wait_until_free(port)
        stack.enter_context(run(*serve, port))
        again = stack.enter_context(run(*work, "one"))  # frees what the killed one held
        for worker in (two, again):
            assert worker.wait(timeout=120) == 0
            worker.wait_for_line("the data end", timeout=120)
    assert sorted(output.iterdir()) == sorted(output / f"{start}.txt" for start in range(0, 1500, 10))
    assert (output / "1490.txt").read_text().splitlines()[-1] == "1499 2247001"


@pytest.mark.slow
def test_a_model_is_trained_once_on_each_range_though_a_rank_all_ranks_and_the_server_are_killed(
    tmp_path: Path,
) -> None:
    script, size = str(ROOT / "examples" / "dispatched_model.py"), ["--size", "3000"]

    def serve(port: int) -> Command:
        argv = [sys.executable, script, "serve", *size, "--book", str(tmp_path / "book"), "--port", str(port)]
        return Command(argv, env={"DATA_TOKEN": tmp_path.name})

    def train(ranks: int, port: int, every: int) -> Command:
        argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        argv += ["--max-restarts", "2", script, "train", *size, "--port", str(port), "--every", str(every)]
        argv += ["--checkpoint", str(tmp_path / "model.pt")]
        store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        return Command(argv, env={"DATA_TOKEN": tmp_path.name, **store}, cwd=tmp_path)

    with ExitStack() as stack:
        first = stack.enter_context(serve(0))
        port = int(first.wait_for_line(r"serving on port (\d+)", timeout=120)[1])
        with train(2, port, every=10_000) as killed:
            killed.wait_for_line(r"^step 3:", timeout=300)
            os.kill(int(killed.wait_for_line(r"rank 1 is process (\d+)", timeout=1)[1]), signal.SIGKILL)
            killed.wait_for_line("starts after step 0", timeout=300, count=4)
            killed.wait_for_line(r"^step 3:", timeout=300, count=2)
        with train(2, port, every=5) as killed:
            killed.wait_for_line(r"^step 12:", timeout=300)
        first.kill()
        wait_until_free(port)
        stack.enter_context(serve(port))
        with train(1, port, every=100) as last:
            last.wait_for_line(r"rank 0 of 1 starts after step \d*[05]$", timeout=300)
            last.wait_for_line("rank 0 done: every sample once", timeout=300)
            assert last.wait(timeout=60) == 0
    assert torch.load(tmp_path / "model.pt")["ranges"]["free"] == []


def wait_until_free(port: int) -> None:
    """A client that asks for a server that is away may hold its port for a moment."""

    def free() -> bool:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                return False
            return True

    wait_until(free, f"port {port} is taken")


@pytest.mark.slow
def test_the_example_goes_on_with_another_number_of_ranks_and_the_same_losses(tmp_path: Path) -> None:
    job = f"data-{os.getpid()}-{tmp_path.name}"
    with launched(2, tmp_path / "ckpt", job) as killed:
        killed.wait_for_line(r"step 27 ", timeout=600)
        killed.kill()
        before = killed.output
    with launched(3, tmp_path / "ckpt", job) as resized:
        start = resized.wait_for_line(r"rank 0 of 3 starts after step (\d+)", timeout=600)
        assert int(start[1]) >= 5
        assert resized.wait(timeout=600) == 0
        assert "rank 0 done: every sample once in each of 2 epochs" in resized.output
    with launched(1, tmp_path / "whole", job + "-whole") as whole:
        assert whole.wait(timeout=600) == 0
    expected = losses(whole.output)
    assert len(expected) == 64
    assert losses(before, resized.output) == pytest.approx(expected, abs=2e-12, rel=0)
