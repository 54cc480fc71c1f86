# SPDX-License-Identifier: Apache-2.0
"""Find out what a test left behind: threads, processes, descriptors, variables, shared memory.

A snapshot costs a few tenths of a millisecond, because it only lists; what looks like a leak is
looked at closely, given a moment to go away, and named in words that lead to its owner.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from resiliency.proc_stat import stat_fields

#: How long something that is ending may take on a busy machine: a thread after its last statement, a process
#: that was killed.  Only a leak takes so long.
GRACE_S = 10.0
#: pytest rewrites this one between the phases of a test.
_IGNORED_VARIABLES = frozenset({"PYTEST_CURRENT_TEST"})
#: One each per process, for its whole life: of all tqdm bars, and of `awake_s`.
_IGNORED_THREADS = frozenset({"TMonitor", "AwakeTicker"})
#: Servers of Python's multiprocessing; one each per process, for its whole life.
_IGNORED_PROGRAMS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
_SHM = "/dev/shm"  # noqa: S108  # files of killed loader workers are deleted, else it is only looked at
#: A tensor that a loader worker shares: torch makes the file, maps it and unlinks it at once.
_SHARED_TENSOR = re.compile(r"torch_(\d+)_")


class LeakKind(str, Enum):
    THREADS = "threads"
    PROCESSES = "processes"
    DESCRIPTORS = "descriptors"
    VARIABLES = "variables"
    SHARED_MEMORY = "shared_memory"


@dataclass(frozen=True, kw_only=True)
class ProcessSnapshot:
    """What this process owns now.  `pids` are all of the machine's; only new ones are looked at."""

    threads: frozenset[threading.Thread]
    pids: frozenset[str]
    descriptors: Mapping[int, str]
    variables: Mapping[str, str]
    shared_memory: frozenset[str]

    @classmethod
    def take(cls) -> ProcessSnapshot:
        return cls(
            threads=frozenset(threading.enumerate()),
            pids=frozenset(name for name in os.listdir("/proc") if name.isdigit()),
            descriptors=open_descriptors(),
            variables=dict(os.environ),
            shared_memory=frozenset(_listdir(_SHM)),
        )


@dataclass(frozen=True, kw_only=True)
class Owner:
    """What something that lives longer than a test holds; asked again at every look."""

    pids: Callable[[], Collection[int]] = tuple
    descriptors: Callable[[], Collection[int]] = tuple


def leaks_since(
    before: ProcessSnapshot,
    *,
    allowed: Collection[LeakKind] = (),
    owners: Sequence[Owner] = (),
    grace_s: float = GRACE_S,
) -> list[str]:
    """Describe everything that is there now and was not in `before`, one line each.

    Args:
        allowed: kinds that are not looked at.
        owners: for example the rank pool, which replaces ranks whenever it needs to.
        grace_s: how long to wait for what is about to go away.
    """
    deadline = time.monotonic() + grace_s
    found = _look(before, allowed, owners)
    if _can_end(found):
        gc.collect()  # an object in a reference cycle may be all that keeps it open
        multiprocessing.active_children()  # waits for those that have ended, which else the next start does
        found = _look(before, allowed, owners)
    while _can_end(found) and time.monotonic() < deadline:
        # Nothing tells when a descriptor or a file of somebody else goes, so look again.
        threading.Event().wait(0.02)
        found = _look(before, allowed, owners)
    return [line for lines in found.values() for line in lines]


def _look(
    before: ProcessSnapshot, allowed: Collection[LeakKind], owners: Sequence[Owner]
) -> dict[LeakKind, list[str]]:
    now = ProcessSnapshot.take()
    pids = {pid for owner in owners for pid in owner.pids()}
    descriptors = {fd for owner in owners for fd in owner.descriptors()}
    found = {
        LeakKind.THREADS: _threads(before, now),
        LeakKind.PROCESSES: _processes(before, now, pids),
        LeakKind.DESCRIPTORS: _new_descriptors(before, now, descriptors),
        LeakKind.VARIABLES: _changed_variables(before, now),
        LeakKind.SHARED_MEMORY: _files(before, now),
    }
    return {kind: lines for kind, lines in found.items() if lines and kind not in allowed}


def _can_end(found: Mapping[LeakKind, list[str]]) -> bool:
    return bool(found.keys() - {LeakKind.VARIABLES})


def _threads(before: ProcessSnapshot, now: ProcessSnapshot) -> list[str]:
    return [
        f"thread {thread.name!r}{' (daemon)' if thread.daemon else ''} still runs"
        for thread in now.threads - before.threads
        if type(thread).__name__ not in _IGNORED_THREADS and thread.is_alive()
    ]


def _processes(before: ProcessSnapshot, now: ProcessSnapshot, own: Collection[int]) -> list[str]:
    lines = []
    for pid in sorted(int(name) for name in now.pids - before.pids):
        stat = _Stat.read(pid)
        if stat is None or pid in own or not _is_ours(stat):
            continue
        command = Path(f"/proc/{pid}/cmdline")
        with suppress(OSError):
            text = command.read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            if stat.state == "Z" and stat.parent == os.getpid():
                lines.append(f"process {pid} ended but was never waited for")
            elif stat.state != "Z" and not any(program in text for program in _IGNORED_PROGRAMS):
                lines.append(f"process {pid} still runs: {text}")
    return lines


def _is_ours(stat: _Stat) -> bool:
    """True for a descendant, and for an orphan of our process group."""
    if stat.parent == 1:
        return stat.group == os.getpgrp() and os.getppid() != 1
    parent: _Stat | None = stat
    while parent is not None and parent.parent > 1:
        if parent.parent == os.getpid():
            return True
        parent = _Stat.read(parent.parent)
    return False


@dataclass(frozen=True, kw_only=True)
class _Stat:
    state: str
    parent: int
    group: int

    @classmethod
    def read(cls, pid: int) -> _Stat | None:
        fields = stat_fields(pid)
        if not fields:
            return None
        return cls(state=fields[0], parent=int(fields[1]), group=int(fields[2]))


def open_descriptors() -> dict[int, str]:
    """Descriptors of this process and what they refer to."""
    found = {}
    for name in _listdir("/proc/self/fd"):
        with suppress(OSError):  # the descriptor of this very listing is closed by now
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found


def _new_descriptors(before: ProcessSnapshot, now: ProcessSnapshot, own: Collection[int]) -> list[str]:
    return [
        f"descriptor {fd} is open: {_describe(fd, target)}"
        for fd, target in now.descriptors.items()
        if before.descriptors.get(fd) != target and fd not in own
    ]


def _describe(fd: int, target: str) -> str:
    if not target.startswith("socket:"):
        return target
    try:
        with socket.socket(fileno=os.dup(fd)) as twin:
            listens = twin.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            text = f"socket {'listening on' if listens else 'bound to'} {twin.getsockname()!r}"
            with suppress(OSError):
                text += f", connected to {twin.getpeername()!r}"
            return text
    except OSError:
        return target


def _changed_variables(before: ProcessSnapshot, now: ProcessSnapshot) -> list[str]:
    names = (set(before.variables) | set(now.variables)) - _IGNORED_VARIABLES
    return [
        f"environment variable {name} changed from {old!r} to {new!r}"
        for name in sorted(names)
        if (old := before.variables.get(name)) != (new := now.variables.get(name))
    ]


def _files(before: ProcessSnapshot, now: ProcessSnapshot) -> list[str]:
    new = sorted(now.shared_memory - before.shared_memory)
    return [
        f"file {_SHM}/{name} still exists"
        for name in new
        if not _deleted_for_the_dead(name) and not _is_foreign(f"{_SHM}/{name}")
    ]


def _deleted_for_the_dead(name: str) -> bool:
    """Delete what torch leaves if SIGKILL comes between two of its calls; no code of ours could."""
    tensor = _SHARED_TENSOR.match(name)
    if tensor is None or _Stat.read(int(tensor[1])) is not None:
        return False
    with suppress(FileNotFoundError):
        os.unlink(f"{_SHM}/{name}")
    return True


def _is_foreign(path: str) -> bool:
    """True if a process that is not ours maps the file: other programs use shared memory too."""
    needle = path.encode()
    for name in _listdir("/proc"):
        with suppress(OSError):
            if name.isdigit() and needle in Path(f"/proc/{name}/maps").read_bytes():
                stat = _Stat.read(int(name))
                if stat is not None and int(name) != os.getpid() and not _is_ours(stat):
                    return True
    return False


def _listdir(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:  # a machine without it has nothing to leak there
        return []
