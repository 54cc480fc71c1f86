# SPDX-License-Identifier: Apache-2.0
"""A host has one keeper on a machine: what the next actor starts is not ended by the last one's."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest

from resiliency.testing.processes import stop_process
from supervisor.orchestrators.processes import Mark, has_ended, marked_processes, start_process
from tests.supervisor_plane.plane import ROOT
from tests.waiting import WAIT_S, wait_until


class Keepers:
    """Keepers of one host, and what its actors start."""

    def __init__(self, fleet: Path, stack: ExitStack) -> None:
        self.fleet, self._stack = str(fleet), stack

    def start(self) -> subprocess.Popen[bytes]:
        """Its standard input is an actor's."""
        argv = [sys.executable, "-m", "supervisor.orchestrators.ray.keeper", self.fleet, "h"]
        keeper = self._stack.enter_context(
            subprocess.Popen(argv, stdin=subprocess.PIPE, cwd=ROOT, start_new_session=True)
        )
        assert keeper.stdin is not None
        self._stack.callback(keeper.stdin.close)
        return keeper

    def running(self) -> list[psutil.Process]:
        found = []
        for one in psutil.process_iter():
            with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                words = one.cmdline()
                if words[-2:] == [self.fleet, "h"] and one.status() != psutil.STATUS_ZOMBIE:
                    found.append(one)
        return found

    def start_launcher(self) -> int:
        mark = Mark(fleet=self.fleet, host="h", part="launcher", start="job:1")
        waits = [sys.executable, "-c", "import signal; signal.pause()"]
        child = start_process(waits, mark=mark, environment={}, log=Path(self.fleet, "log.txt"))
        self._stack.callback(lambda: has_ended(child))
        return child


@pytest.fixture
def keepers(tmp_path: Path) -> Iterator[Keepers]:
    with ExitStack() as stack:
        keepers = Keepers(tmp_path, stack)
        yield keepers
        stack.close()
        wait_until(lambda: not keepers.running(), "a keeper does not end")


def test_a_keeper_waits_for_a_slow_one_before_it_and_what_is_started_then_lives(keepers: Keepers) -> None:
    first = keepers.start()
    assert first.wait(WAIT_S) == 0
    (slow,) = keepers.running()
    old = keepers.start_launcher()
    stop_process(slow.pid)
    assert first.stdin is not None
    first.stdin.close()  # its actor has ended
    second = keepers.start()
    # On a free name it is ready within a moment.
    with pytest.raises(subprocess.TimeoutExpired):
        second.wait(3.0)
    slow.send_signal(signal.SIGCONT)
    assert second.wait(WAIT_S) == 0
    # It gives its name back a moment before it ends.
    wait_until(lambda: slow not in keepers.running(), "the first keeper does not end")
    assert marked_processes(keepers.fleet) == []
    wait_until(lambda: has_ended(old), "it lives")
    new = keepers.start_launcher()
    assert [one.pid for one in marked_processes(keepers.fleet)] == [new]
    assert second.stdin is not None
    second.stdin.close()
    wait_until(lambda: not keepers.running(), "the second keeper does not end")
    assert marked_processes(keepers.fleet) == []
