# SPDX-License-Identifier: Apache-2.0
"""Run a real command in a test, and leave nothing of it behind.

Every process started under a `Command` inherits an environment variable with the command's id, so
that its whole tree can be found again after parents died and children were adopted by init.
Leaving the context kills all of them.

Every wait has a deadline and is woken by the operating system (pipe, pidfd), never by a timer.
Output arrives when the program flushes it: programs under test should log, or ``print(flush=True)``.
`PYTHONUNBUFFERED` is not set on purpose, because an unbuffered `print` writes the text and its
newline separately and lines of different ranks would run into each other.

A Python program is forked from the test run's warm interpreter where there is one, see `warm`.
"""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

import psutil

from resiliency.proc_stat import stat_fields, wait_for_program
from resiliency.testing import warm
from resiliency.testing.pool.output import OutputReader

#: Ids of the commands that a process runs under, outermost first, joined by ":".
MARKER_ENV = "RESILIENCY_TEST_ID"
#: Lines of output that an error message quotes.
TAIL_LINES = 40
#: Longest time until a process that was told to stop stands still.
STOP_S = 60.0


class Command:
    """One command with its output and all of its descendants.

        with Command([sys.executable, "train.py"], log=tmp_path / "log.txt") as cmd:
            cmd.wait_for_line(r"step 5", timeout=30)
            cmd.signal(signal.SIGTERM)
            assert cmd.wait(timeout=30) == 0
            assert cmd.survivors(timeout=5) == []

    Standard output and error are merged; standard input is empty; the command leads a session of
    its own, so that a Ctrl-C meant for pytest does not reach it.

    Args:
        argv: program and arguments.
        env: variables to set on top of this process's environment; None as a value removes one.
        cwd: working directory.
        log: file that receives the output as it arrives.
        cold: start an interpreter of its own, also where one that has imported things could be forked.
    """

    def __init__(
        self,
        argv: Sequence[str | os.PathLike[str]],
        *,
        env: Mapping[str, str | None] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        log: str | os.PathLike[str] | None = None,
        cold: bool = False,
    ) -> None:
        self.argv = [os.fspath(part) for part in argv]
        self.id = uuid.uuid4().hex
        self._output = OutputReader(None if log is None else Path(log))
        try:
            self._process = warm.start(
                self.argv,
                env=_environment(env or {}, self.id),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=self._output.write_fd,
                stderr=self._output.write_fd,
                cold=cold,
            )
            wait_for_program(self._process.pid, STOP_S)  # its mark has to be seen
        except BaseException:
            self._output.close()
            raise
        self._output.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit code, or minus the signal that killed it; None while it runs."""
        return self._process.poll()

    @property
    def output(self) -> str:
        """Everything written so far, also what this process has not read until now."""
        self._output.drain()
        return self._output.text()

    @property
    def lines(self) -> list[str]:
        """The whole lines written so far, without their newlines."""
        self._output.drain()
        return self._output.lines()

    def wait_for_line(
        self, pattern: str | re.Pattern[str], *, timeout: float, count: int = 1, since: int = 0
    ) -> re.Match[str]:
        """Wait until `count` lines contain `pattern`; return the match in the last of them.

        Args:
            since: number of leading lines to leave out; pass ``len(cmd.lines)`` taken before an
                action to wait for what follows the action.
        Raises:
            TimeoutError: the line did not come in time.
            EOFError: the command and all that held its output ended without it.
        """
        deadline = time.monotonic() + timeout
        regex = re.compile(pattern)
        found, position = 0, since
        while True:
            ended = not self._output.wait_for_more(position, deadline)
            for line in self._output.lines()[position:]:
                position += 1
                if match := regex.search(line):
                    found += 1
                    if found == count:
                        return match
            if ended:
                what = f"{found} of {count} lines matching {regex.pattern!r}"
                if self._output.at_end:
                    raise EOFError(self._explain(f"ended after {what}"))
                raise TimeoutError(self._explain(f"printed only {what} within {timeout} s"))

    def signal(self, number: int) -> None:
        """Send a signal to the command itself, not to its children.

        After SIGSTOP it does nothing any more; see `stop_process`.
        """
        if number == signal.SIGSTOP:
            stop_process(self.pid)
        else:
            self._process.send_signal(number)

    def wait(self, *, timeout: float) -> int:
        """Wait until the command exits and return its exit code (minus the signal that killed it).

        Its descendants may live on; see `survivors`.

        Raises:
            TimeoutError: it still runs.
        """
        if self._process.poll() is None:
            wait_for_exit([self.pid], time.monotonic() + timeout)
            if self._process.poll() is None:
                raise TimeoutError(self._explain(f"did not exit within {timeout} s"))
        self._output.drain()
        return self._process.wait()

    def descendants(self) -> list[psutil.Process]:
        """Living processes below the command, found by parent.  See `survivors` for orphans."""
        try:
            return psutil.Process(self.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def survivors(self, *, timeout: float = 0.0) -> list[psutil.Process]:
        """Processes of this command, orphans included, that are still alive after `timeout`.

        Returns as soon as there are none.
        """
        deadline = time.monotonic() + timeout
        while (alive := self._members()) and time.monotonic() < deadline:
            wait_for_exit([process.pid for process in alive], deadline)
        return alive

    def assert_no_orphans(self, *, timeout: float = 5.0) -> None:
        """Fail if a process outlives the command by more than `timeout`."""
        if alive := self.survivors(timeout=timeout):
            names = "\n".join(f"  {process.pid} {_describe(process)}" for process in alive)
            raise AssertionError(self._explain(f"left {len(alive)} processes behind:\n{names}\n"))

    def kill(self, *, timeout: float = 10.0) -> None:
        """SIGKILL every process of this command until none is left.

        Raises:
            TimeoutError: one does not die, or they respawn faster than they are killed.
        """
        deadline = time.monotonic() + timeout
        while alive := self._members():
            if time.monotonic() >= deadline:
                raise TimeoutError(self._explain(f"has processes that survive SIGKILL: {alive}"))
            for process in alive:
                with suppress(psutil.NoSuchProcess):
                    process.kill()  # psutil compares start times, so a recycled pid is safe
            wait_for_exit([process.pid for process in alive], deadline)
        self._process.wait()

    def close(self) -> None:
        """Kill what is left and release pipe and thread; idempotent."""
        try:
            self.kill()
        finally:
            self._output.close()

    def __enter__(self) -> Command:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _members(self) -> list[psutil.Process]:
        # The marker finds orphans; the tree finds a child that overwrote its environment.
        found = {process.pid: process for process in processes_marked(self.id)}
        if self._process.poll() is None:
            with suppress(psutil.NoSuchProcess):
                root = psutil.Process(self.pid)
                found.update({process.pid: process for process in [*root.children(recursive=True), root]})
        return [process for process in found.values() if is_alive(process)]

    def _explain(self, what: str) -> str:
        code = self.returncode
        state = "still runs" if code is None else f"exited with {code}"
        lines = self._output.lines()
        tail = "\n".join(f"  | {line}" for line in lines[-TAIL_LINES:])
        shown = min(TAIL_LINES, len(lines))
        return (
            f"command {' '.join(self.argv)} {what} (pid {self.pid} {state}). "
            f"Last {shown} of {len(lines)} lines:\n{tail}"
        )


def processes_marked(command_id: str) -> list[psutil.Process]:
    """Living processes that were started under the command with this id."""
    needle = command_id.encode()
    key = f"{MARKER_ENV}=".encode()
    found = []
    for pid in psutil.pids():
        try:
            environ = Path(f"/proc/{pid}/environ").read_bytes()
            if needle in environ and any(
                entry.startswith(key) and needle in entry for entry in environ.split(b"\0")
            ):
                found.append(psutil.Process(pid))
        except (OSError, psutil.NoSuchProcess):  # ended meanwhile, or belongs to somebody else
            continue
    return [process for process in found if is_alive(process)]


def is_alive(process: psutil.Process) -> bool:
    """False for zombies too: they hold nothing, and a container's init may never reap them."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _describe(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return "(gone)"


def _environment(extra: Mapping[str, str | None], command_id: str) -> dict[str, str]:
    merged: dict[str, str | None] = {**os.environ, **extra}
    env = {name: value for name, value in merged.items() if value is not None}
    # A command started by a command belongs to both.
    env[MARKER_ENV] = ":".join(filter(None, (os.environ.get(MARKER_ENV), command_id)))
    return env


def stop_process(pid: int) -> None:
    """SIGSTOP, and wait until it has taken effect; see `wait_until_stopped`."""
    os.kill(pid, signal.SIGSTOP)
    wait_until_stopped(pid)


@contextmanager
def suspended(*commands: Command) -> Iterator[None]:
    """Within, no process of the commands runs, as those of a job that a scheduler suspends."""
    stopped: set[int] = set()
    try:
        while moving := {one.pid for command in commands for one in command.survivors()} - stopped:
            stopped |= moving
            for pid in moving:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            for pid in moving:
                wait_until_stopped(pid)
        yield
    finally:
        for pid in stopped:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def wait_until_stopped(pid: int) -> None:
    """Wait until all threads of a process that got SIGSTOP stand still, or have ended.

    Before, a thread on another core may go on for a while, and answer what it should not.

    Raises:
        TimeoutError: one of them does not, such as in a call to a disk that hangs.
    """
    deadline = time.monotonic() + STOP_S
    while moving := [thread for thread in _threads(pid) if stat_fields(thread)[:1] not in _STILL]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{', '.join(moving)} did not stop within {STOP_S:g} s")
        threading.Event().wait(0.001)


#: States of threads that do nothing: stopped, traced, ended; and no state where there is none any more.
_STILL: tuple[list[str], ...] = (["T"], ["t"], ["Z"], ["X"], [])


def _threads(pid: int) -> list[str]:
    """As paths below ``/proc``."""
    with suppress(FileNotFoundError):
        return [f"{pid}/task/{thread}" for thread in os.listdir(f"/proc/{pid}/task")]
    return []


def wait_for_exit(pids: Iterable[int], deadline: float) -> None:
    """Wait until all of `pids` exited or the deadline passed."""
    poll = select.poll()
    waiting = set()
    try:
        for pid in pids:
            with suppress(ProcessLookupError):
                fd = os.pidfd_open(pid)
                waiting.add(fd)
                poll.register(fd, select.POLLIN)
        while waiting and (left := deadline - time.monotonic()) > 0:
            for fd, _ in poll.poll(left * 1000):
                poll.unregister(fd)
                os.close(fd)
                waiting.discard(fd)
    finally:
        for fd in waiting:
            os.close(fd)
