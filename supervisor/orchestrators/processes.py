# SPDX-License-Identifier: Apache-2.0
"""Processes of local hosts: started in sessions of their own, found again by a mark in their environment.

They outlive the actuator that started them.  A mark says which host, which part of it and which start a
process and all its descendants belong to, so that an actuator that was started again, or a test, finds them
without a file that could be stale.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from resiliency.proc_stat import read_stat, wait_for_program

MARK_ENV = "RESILIENCY_LOCAL_HOST"
#: A kernel takes a millisecond to set up a program, on a busy machine a few.
_PROGRAM_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Whose a process is.

    Attributes:
        fleet: the state directory, which one local fleet has for itself.
        part: ``daemon`` or ``launcher``.
        start: tells this start of the part from others.
    """

    fleet: str
    host: str
    part: str
    start: str = ""

    def to_text(self) -> str:
        return "|".join((self.fleet, self.host, self.part, self.start))

    @classmethod
    def from_text(cls, text: str) -> Mark | None:
        """None where the text is no mark."""
        parts = text.split("|")
        if len(parts) != 4:
            return None
        return cls(fleet=parts[0], host=parts[1], part=parts[2], start=parts[3])


@dataclass(frozen=True, kw_only=True)
class Marked:
    """A living process with a mark.  `stopped`: it does nothing, as after SIGSTOP."""

    pid: int
    parent: int
    mark: Mark
    stopped: bool = False


def marked_processes(fleet: str) -> list[Marked]:
    """All living processes of a local fleet; those that have ended and are not waited for do not count."""
    return list(_scan(fleet))


def _scan(fleet: str) -> Iterator[Marked]:
    key = MARK_ENV.encode() + b"="
    with os.scandir("/proc") as entries:
        for entry in entries:
            if not entry.name.isdigit():
                continue
            # It has ended, or is another user's.  Any other error says nothing about it: without a free
            # descriptor all hosts would look lost.
            with suppress(FileNotFoundError, ProcessLookupError, PermissionError, ValueError):
                environ = Path(entry.path, "environ").read_bytes()
                text = next((one for one in environ.split(b"\0") if one.startswith(key)), None)
                mark = Mark.from_text(text[len(key) :].decode()) if text is not None else None
                if mark is None or mark.fleet != fleet:
                    continue
                state, parent = read_stat(entry.name)[:2]
                if state not in ("Z", "X"):
                    yield Marked(pid=int(entry.name), parent=int(parent), mark=mark, stopped=state in "Tt")


def start_process(argv: Sequence[str], *, mark: Mark, environment: Mapping[str, str], log: Path) -> int:
    """Start `argv` in a session of its own; its output is added to `log`.  Returns its process id.

    Spawned and not forked: the actuator has gRPC's threads.

    Raises:
        OSError: it cannot be started.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    pid = os.posix_spawnp(
        argv[0],
        list(argv),
        {**environment, MARK_ENV: mark.to_text()},
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
        # A worker of Ray blocks SIGINT, and Python ignores the others: a fresh process does not.
        setsigmask=(),
        setsigdef=(signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ),
    )
    wait_for_program(pid, _PROGRAM_S)  # `marked_processes` sees it from here on
    return pid


def has_ended(pid: int) -> bool:
    """Whether a child has ended; it is waited for then.  Another process's child counts as ended too."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def signal_roots(processes: Sequence[Marked], number: signal.Signals) -> None:
    """Signal the processes that none of the others started: a launcher, and not its ranks."""
    pids = {one.pid for one in processes}
    _signal([one.pid for one in processes if one.parent not in pids], number)


def kill_all(processes: Sequence[Marked]) -> None:
    """SIGKILL; all are stopped first, so that none sees another one end and acts upon it."""
    pids = [one.pid for one in processes]
    _signal(pids, signal.SIGSTOP)
    _signal(pids, signal.SIGKILL)


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
