# SPDX-License-Identifier: Apache-2.0
"""Groups of fresh rank processes, and what memory their whole process tree takes.

Ranks are forked from an interpreter that has imported torch and nothing has run in it, so a fresh process
costs a tenth of a second.  Everything they start carries a mark in its environment, is counted with
them, and is ended with them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import psutil
from ckpt_rank import Figures, Task, serve

from resiliency.testing import warm
from resiliency.testing.processes import MARKER_ENV, processes_marked

#: A contestant that says nothing for that long has failed.
SILENCE_S = 240.0
_LOOK_S = 0.02
#: Where captures belong, and where the rivals' segments are.
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108
_PRELOAD = ("torch.distributed.checkpoint", "resiliency.checkpoint")


class RankFailed(Exception):
    """A rank ended without figures; the text says why."""


class Groups:
    """Runs tasks, one after the other; a context manager."""

    def __init__(self) -> None:
        self._mark = uuid.uuid4().hex
        self._interpreter = contextlib.ExitStack()

    def run(self, task: Task, env: dict[str, str]) -> list[Figures]:
        """The figures of each rank; rank 0's may have `extra_bytes`.

        Raises:
            RankFailed: with the first error.
        """
        with tempfile.TemporaryDirectory() as directory:
            ranks: list[warm.Process] = []
            pipes: list[Connection] = []
            try:
                for rank in range(task.world_size):
                    process, pipe = warm.start_function(serve, task, rank, f"{directory}/store", env)
                    ranks.append(process)
                    pipes.append(pipe)
                return self._converse(pipes)
            finally:
                _end(ranks, pipes)

    def _converse(self, pipes: Sequence[Connection]) -> list[Figures]:
        figures: dict[int, Figures] = {}
        memory = _Memory(self._mark)
        heard = time.monotonic()
        while len(figures) < len(pipes):
            waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in figures]
            for pipe in wait(waiting, _LOOK_S if memory.watching else 1.0):
                rank = next(number for number, other in enumerate(pipes) if other is pipe)
                heard = time.monotonic()
                kind, content = _receive(pipes[rank], rank)
                if kind == "figures":
                    figures[rank] = content
                elif kind == "memory":
                    memory.handle(content)
                    pipes[rank].send("looked")
                else:
                    raise RankFailed(f"rank {rank}: {content}")
            memory.look()
            if time.monotonic() - heard > SILENCE_S:
                raise RankFailed(f"nothing was heard for {SILENCE_S:.0f} s")
        if memory.extra_bytes is not None:
            figures[0]["extra_bytes"] = memory.extra_bytes
        return [figures[rank] for rank in range(len(pipes))]

    def close(self) -> None:
        """End what contestants left behind; more tasks may follow."""
        left = [process for process in processes_marked(self._mark) if not _is_server(process)]
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=10)

    def __enter__(self) -> Groups:
        # Before the mark is set, which the interpreter must not have: it is no contestant's.
        self._interpreter.enter_context(warm.interpreter(*_PRELOAD))
        os.environ[MARKER_ENV] = ":".join(filter(None, (os.environ.get(MARKER_ENV), self._mark)))
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
        self._interpreter.close()


def _is_server(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.pid == os.getpid() or "resource_tracker" in " ".join(process.cmdline())
    return True


def _receive(pipe: Connection, rank: int) -> tuple[str, Any]:
    try:
        kind, content = pipe.recv()
    except EOFError:
        raise RankFailed(f"rank {rank} died without a word") from None
    return kind, content


def _end(ranks: Sequence[warm.Process], pipes: Sequence[Connection]) -> None:
    for process in ranks:
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            for child in psutil.Process(process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            process.kill()
            process.wait(10)
    for pipe in pipes:
        pipe.close()


class _Memory:
    """Private memory of the marked processes, and shared memory: growth from a baseline to the peak.

    Shared memory is what /dev/shm holds, segments that are unlinked or lent to another process included.
    Nothing else must use that meanwhile; `unshare --mount` gives a job one of its own.
    """

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._baseline = 0
        self._peak = 0
        self.watching = False
        self._seen: list[int] = []
        self._listed = 0.0

    @property
    def extra_bytes(self) -> int | None:
        return self._peak - self._baseline if self._peak else None

    def handle(self, what: object) -> None:
        self.watching = what == "watch"
        if what == "baseline":
            self._baseline = self._now()

    def look(self) -> None:
        if self.watching:
            self._peak = max(self._peak, self._now())

    def _now(self) -> int:
        if time.monotonic() - self._listed > 0.5:
            # What ranks share with the interpreter is split with it: all parts together tell what is new.
            self._seen = [*warm.pids(), *(process.pid for process in processes_marked(self._mark))]
            self._listed = time.monotonic()
        return shutil.disk_usage(SHARED_MEMORY).used + sum(_private_bytes(pid) for pid in self._seen)


def _private_bytes(pid: int) -> int:
    """Memory that is in no file and not shared; what forked processes share is split among them."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss_Anon:"))
    return 0


@contextlib.contextmanager
def arena(root: Path = SHARED_MEMORY) -> Iterator[Path]:
    """A directory in shared memory that is gone afterwards, whatever was left in it."""
    with tempfile.TemporaryDirectory(prefix="ckpt-compare-", dir=root, ignore_cleanup_errors=True) as path:
        yield Path(path)
