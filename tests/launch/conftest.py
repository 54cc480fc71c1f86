# SPDX-License-Identifier: Apache-2.0
"""Starts the real launcher on small scripts, and reads what it wrote."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest

from resiliency.events import EventType, RunEvent
from resiliency.testing.processes import Command

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
WORKER = SCRIPTS / "worker.py"
#: Longest wait for something that takes a second or three on an idle machine.
WAIT = 120.0

Launch = Callable[..., Command]


@pytest.fixture
def temporary() -> Iterator[Path]:
    """TMPDIR of the launchers.  Short, because sockets lie in it."""
    with tempfile.TemporaryDirectory(prefix="lt-") as path:
        yield Path(path)


@pytest.fixture
def launch(tmp_path: Path, temporary: Path) -> Iterator[Launch]:
    """``launch(*flags_script_and_arguments, run_dir=..., NAME=value)`` starts a launcher."""
    commands: list[Command] = []
    with ExitStack() as stack:

        def start(
            *words: object,
            run_dir: Path | None = None,
            cold: bool = False,
            launcher: Path = ROOT / "launcher.py",
            **env: str,
        ) -> Command:
            argv = [sys.executable, str(launcher), "--run-dir", str(run_dir or tmp_path / "run")]
            fixed = {"TMPDIR": str(temporary), "OMP_NUM_THREADS": "1", "GOODPUT_USE_FILE_TRACKING": "1"}
            fixed |= {"RESILIENCY_CACHE_DIR": str(tmp_path / "cache")}
            command = Command([*argv, *map(str, words)], env={**fixed, **env}, cwd=tmp_path, cold=cold)
            commands.append(command)
            return stack.enter_context(command)

        yield start
        for command in commands:  # shown where the test has failed
            print(f"launcher {command.pid}, exit code {command.returncode}:")
            print(*command.lines[-60:], sep="\n")


@pytest.fixture
def leaves_nothing(temporary: Path) -> Callable[[Command], None]:
    """Fail unless a launcher that ended left neither processes nor files."""

    def check(command: Command) -> None:
        command.assert_no_orphans(timeout=WAIT)
        assert os.listdir(temporary) == []

    return check


def ready(command: Command, rank: int, attempt: int = 0) -> int:
    """Wait until a worker says that it is ready; returns its process id."""
    return int(command.wait_for_line(rf"rank {rank} attempt {attempt} pid (\d+) ready", timeout=WAIT)[1])


def events(run_dir: Path, kind: EventType | None = None) -> list[RunEvent]:
    lines = [line for path in run_dir.glob("*-events.jsonl") for line in path.read_text().splitlines()]
    return [event for event in map(RunEvent.from_json, lines) if kind in (None, event.type)]


def children(command: Command, words: str, *, recursive: bool = False) -> list[psutil.Process]:
    """Living processes that the launcher started, with these words in their command lines."""
    found = []
    with suppress(psutil.NoSuchProcess):
        for process in psutil.Process(command.pid).children(recursive=recursive):
            with suppress(psutil.NoSuchProcess):  # it has ended since it was listed
                if words in " ".join(process.cmdline()):
                    found.append(process)
    return found
