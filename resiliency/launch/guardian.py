# SPDX-License-Identifier: Apache-2.0
"""Leaves no process behind: finds all processes of one launcher, and ends them if it vanishes.

Every worker inherits an environment variable with the launcher's id.  The kernel shows the
environment that a process was started with, so descendants are found whatever they did since:
parents died, sessions were left, init adopted them.

A launcher that is killed with SIGKILL can do nothing any more, so a small second process holds the
read end of a pipe from it.  The kernel closes the write end when the launcher ends, however it
ends; unless the launcher said goodbye before, the guardian then ends its workers and removes its
files.  PR_SET_PDEATHSIG in each worker was rejected: it is cleared by exec of another user's
binary, follows the thread and not the process, and does not reach grandchildren.

This file runs on its own (``python -I -S guardian.py``), so it imports nothing of the project.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime, timezone
from typing import NamedTuple

#: Ids of the launchers that a process runs under, outermost first, joined by ":".
LAUNCHER_ENV = "RESILIENCY_LAUNCHER_ID"
#: In the name of memory that holds the standard error of a worker, see `failures.standard_error`.
STDERR_MEMORY = "resiliency-stderr"
#: How long processes that outlived their worker get between SIGTERM and SIGKILL.
LEFTOVER_GRACE_S = 5.0
#: How long resource trackers get to clear up behind processes that were killed.
TRACKER_GRACE_S = 2.0
#: A wait counts for at most so long at once: the whole job may be suspended meanwhile.
_TURN_S = 0.5


class Process(NamedTuple):
    """A process, told apart from a later one with the same number by its start time."""

    pid: int
    started: str

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """The living process `pid`, or None."""
        try:
            with open(f"/proc/{pid}/stat", "rb") as stat:
                # The command name may hold spaces and brackets: fields count from the last ')'.
                fields = stat.read().rpartition(b")")[2].split()
        except OSError:
            return None
        # A zombie holds nothing, and in a container nobody may ever reap it.
        return None if fields[0] in (b"Z", b"X") else cls(pid, fields[19].decode())

    @property
    def alive(self) -> bool:
        return Process.of(self.pid) == self

    @property
    def is_tracker(self) -> bool:
        """Whether this is a resource tracker of Python's multiprocessing.

        It unlinks the semaphores and shared memory of its process once all users of them have
        ended, and then ends too: killed before that, it leaves them in /dev/shm for ever.
        """
        with suppress(OSError), open(f"/proc/{self.pid}/cmdline", "rb") as cmdline:
            return b"multiprocessing.resource_tracker" in cmdline.read()
        return False

    def send(self, number: int) -> None:
        """Signal this process, and its whole group if it leads one; SIGKILL spares trackers."""
        if not self.alive:
            return
        with suppress(ProcessLookupError, PermissionError):
            leads = os.getpgid(self.pid) == self.pid
            if number == signal.SIGKILL:
                for process in group(self.pid) if leads else [self]:
                    if not process.is_tracker:
                        process.kill()
            elif leads:
                os.killpg(self.pid, number)
            else:
                os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL to this process alone, whatever it is."""
        with suppress(ProcessLookupError, PermissionError):
            os.kill(self.pid, signal.SIGKILL)


def group(pgid: int) -> list[Process]:
    """The living processes of a group, also when the one that led it is gone."""
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(ProcessLookupError, PermissionError):
            if os.getpgid(int(name)) == pgid and (process := Process.of(int(name))) is not None:
                found.append(process)
    return found


def find(launcher_id: str) -> list[Process]:
    """Living processes that were started, at any depth, under the launcher with this id."""
    key, needle, found = f"{LAUNCHER_ENV}=".encode(), launcher_id.encode(), []
    for name in os.listdir("/proc"):
        if not name.isdecimal() or int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as environ:
                entries = environ.read().split(b"\0")
        except OSError:  # ended meanwhile, or belongs to somebody else
            continue
        if any(entry.startswith(key) and needle in entry for entry in entries):
            process = Process.of(int(name))
            if process is not None:
                found.append(process)
    return found


def wait_until_gone(processes: Iterable[Process], timeout_s: float, wake_fd: int | None = None) -> bool:
    """Wait until all `processes` ended; False when time runs out or `wake_fd` becomes readable."""
    left_s = timeout_s
    poll = select.poll()
    if wake_fd is not None:
        poll.register(wake_fd, select.POLLIN)
    fds, unwatched = _watch(processes, poll)
    try:
        while fds or (unwatched := [process for process in unwatched if process.alive]):
            if left_s <= 0:
                return False
            # Where the kernel has no pidfd, look every 20 ms.
            began, turn_s = time.monotonic(), min(left_s, 0.02 if unwatched else _TURN_S)
            ready = poll.poll(turn_s * 1000)
            left_s -= min(time.monotonic() - began, turn_s)
            for fd, _ in ready:
                if fd == wake_fd:
                    return False
                poll.unregister(fd)
                os.close(fd)
                fds.discard(fd)
        return True
    finally:
        for fd in fds:
            os.close(fd)


def _watch(processes: Iterable[Process], poll: select.poll) -> tuple[set[int], list[Process]]:
    fds, unwatched = set(), []
    for process in processes:
        try:
            fd = os.pidfd_open(process.pid)
        except ProcessLookupError:
            continue
        except (AttributeError, OSError):
            unwatched.append(process)
            continue
        if process.alive:
            fds.add(fd)
            poll.register(fd, select.POLLIN)
        else:
            os.close(fd)
    return fds, unwatched


def end(processes: Iterable[Process], grace_s: float, wake_fd: int | None = None) -> None:
    """SIGTERM, then SIGKILL for those that are still there after `grace_s`."""
    targets = list(processes)
    for process in targets:
        process.send(signal.SIGTERM)
        process.send(signal.SIGCONT)  # a stopped process cannot act on SIGTERM
    if wait_until_gone(targets, grace_s, wake_fd):
        return
    for process in targets:
        process.send(signal.SIGKILL)
    trackers = [process for process in targets if process.is_tracker]
    if not wait_until_gone(trackers, TRACKER_GRACE_S):
        for tracker in trackers:
            tracker.kill()


def _guard(launcher_id: str, grace_s: float, private_dir: str) -> None:
    """Read who has to be ended from standard input; do it when it closes without a goodbye."""
    workers: list[Process] = []
    helpers: list[Process] = []
    last_words: list[tuple[str, dict[str, object]]] = []
    for line in sys.stdin:
        kind, *pids = line.split()
        if kind == "bye":
            return
        if kind == "last_words":
            last_words.append(json.loads(line.partition(" ")[2]))
            continue
        known = [process for pid in pids if (process := Process.of(int(pid))) is not None]
        if kind == "workers":
            workers = known
        elif kind == "helpers":
            helpers += known
    outputs = _unshown(workers)
    print("launcher.py was killed: its guardian ends the workers", file=sys.stderr, flush=True)
    for path, record in last_words:
        _append(path, {"timestamp": datetime.now(timezone.utc).isoformat(), **record})
    deadline = time.monotonic() + grace_s
    end({*workers, *find(launcher_id)}, grace_s)
    # Those that were started meanwhile, or left their group.
    while left := find(launcher_id):
        end(left, max(min(LEFTOVER_GRACE_S, deadline - time.monotonic()), 0.05))
        if time.monotonic() > deadline + LEFTOVER_GRACE_S:
            break
    for process in helpers:
        process.send(signal.SIGKILL)
    shutil.rmtree(private_dir, ignore_errors=True)
    for output, shown in outputs:
        _show(output, shown)


def _unshown(workers: Iterable[Process]) -> list[tuple[int, int]]:
    """Memory that holds the standard error of workers, and how much of it the launcher has shown."""
    found = []
    for worker in workers:
        with suppress(OSError):
            path = f"/proc/{worker.pid}/fd/2"
            if STDERR_MEMORY in os.readlink(path):
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                found.append((fd, os.fstat(fd).st_size))
    return found


def _show(output: int, shown: int) -> None:
    with suppress(OSError):  # closed at the other end
        while data := os.pread(output, 65536, shown):
            shown += os.write(2, data)


def _append(path: str, record: dict[str, object]) -> None:
    # Not created: a log that has no first event needs no last one.
    with suppress(OSError):
        fd = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.write(fd, json.dumps(record).encode() + b"\n")
        os.close(fd)


if __name__ == "__main__":
    _guard(sys.argv[1], float(sys.argv[2]), sys.argv[3])
