# SPDX-License-Identifier: Apache-2.0
"""Processes that look like the workers of a job, and nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from simulator.job import Process, stat_fields
from simulator.journal import Journal
from tests.simulator.disks import small_disk  # noqa: F401 - a fixture
from tests.waiting import wait_until

StartWorker = Callable[..., subprocess.Popen[bytes]]
NOBODY = 65534


def _can_unshare() -> bool:
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return False
    return subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode == 0


as_root = pytest.mark.skipif(not _can_unshare(), reason="needs the right to make network namespaces")


@pytest.fixture
def start_worker() -> Iterator[StartWorker]:
    """``start_worker(job, local_rank, group_rank=0, user=None, under=())`` starts one that only waits."""
    with ExitStack() as stack:

        def start(
            job: str,
            local_rank: int = 0,
            group_rank: int = 0,
            user: int | None = None,
            under: tuple[str, ...] = (),
        ) -> subprocess.Popen[bytes]:
            env = {"PATH": os.environ["PATH"], "JOB_IDENTIFIER": job, "LOCAL_RANK": str(local_rank)}
            env |= {"RANK": str(local_rank), "GROUP_RANK": str(group_rank)}
            process = subprocess.Popen([*under, "sleep", "600"], env=env, user=user)
            stack.callback(_end, process)
            # Only then it has the environment that it is known by.
            wait_until(lambda: b"sleep" in _command(process.pid), "the worker did not start")
            return process

        yield start


def _command(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]
    return b""


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def journal(state_dir: Path) -> Iterator[Journal]:
    journal = Journal(state_dir)
    yield journal
    journal.close()


def state_of(process: subprocess.Popen[bytes]) -> str:
    """``S`` sleeping, ``T`` stopped, ``Z`` dead."""
    return (stat_fields(process.pid) or ["Z"])[0]


def identity(process: subprocess.Popen[bytes]) -> Process:
    found = Process.of(process.pid)
    assert found is not None
    return found
