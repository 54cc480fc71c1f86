# SPDX-License-Identifier: Apache-2.0
"""The wait of a rank's main thread: the system call that it sleeps in, and the library that made it.

A lock without a time ends by another thread alone, so a rank that sleeps in one may do so for ever.  All else
ends by itself or from outside: an answer over a socket, a line from a terminal, the end of a child, a time.

    futex without a time    from Python or another library    LOCK      unless another thread waits outside
    any wait                from torch, NCCL, CUDA, ...       PEERS     another rank, or a device
    futex, sleep            with a time                       TIME
    any other call                                            OUTSIDE

What cannot be read is not known, and is no lock.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum

from resiliency.launch.hangs.descriptors import TERMINAL, describe, polled
from resiliency.launch.reaction import executable_memory, first_caller
from resiliency.rank.inspection import RankThread

#: System calls whose first argument is a descriptor, by machine.
_OF_DESCRIPTOR = {
    "x86_64": {
        0: "read", 1: "write", 16: "ioctl", 17: "pread64", 18: "pwrite64", 19: "readv", 20: "writev",
        42: "connect", 43: "accept", 44: "sendto", 45: "recvfrom", 46: "sendmsg", 47: "recvmsg",
        72: "fcntl", 73: "flock", 288: "accept4",
    },
    "aarch64": {
        63: "read", 64: "write", 29: "ioctl", 67: "pread64", 68: "pwrite64", 65: "readv", 66: "writev",
        203: "connect", 202: "accept", 206: "sendto", 207: "recvfrom", 211: "sendmsg", 212: "recvmsg",
        25: "fcntl", 32: "flock", 242: "accept4",
    },
}  # fmt: skip
_OTHERS = {
    "x86_64": {
        7: "poll", 23: "select", 232: "epoll_wait", 270: "pselect6", 271: "ppoll", 281: "epoll_pwait",
        35: "nanosleep", 230: "clock_nanosleep", 219: "restart_syscall",
        61: "wait4", 247: "waitid", 202: "futex", 257: "openat",
    },
    "aarch64": {
        72: "pselect6", 73: "ppoll", 22: "epoll_pwait",
        101: "nanosleep", 115: "clock_nanosleep", 128: "restart_syscall",
        260: "wait4", 95: "waitid", 98: "futex", 56: "openat",
    },
}  # fmt: skip
_POLLS = frozenset({"poll", "select", "epoll_wait", "pselect6", "ppoll", "epoll_pwait"})
_TIMES = frozenset({"nanosleep", "clock_nanosleep", "restart_syscall"})
#: Of torch these wait for a peer or a device; it reads and writes files, too.
_SENDS = frozenset({"connect", "accept", "accept4", "sendto", "recvfrom", "sendmsg", "recvmsg", "ioctl"})
#: Operations of futex that wait, and its flag for one that no other process shares.
_FUTEX_WAITS, _FUTEX_PRIVATE = frozenset({0, 6, 9, 11, 13}), 128
_PEERS = (
    "libtorch", "libc10", "libgloo", "libnccl", "librccl", "libmpi", "libuc", "libccl", "libfabric",
    "libibverbs", "libmlx5", "libcuda", "libnv", "libamdhip", "libhsa",
)  # fmt: skip
PYTHON = "python"


class WaitKind(Enum):
    """Kinds of waits, by what ends them."""

    NONE = "it does not wait"
    LOCK = "another thread of its process"
    PEERS = "another rank, or a device"
    TIME = "a time"
    OUTSIDE = "something outside of its process"


@dataclass(frozen=True)
class ThreadWait:
    """`library`: the one that waits.  `outside`: words for what it waits for."""

    kind: WaitKind
    library: str = ""
    outside: str = ""


def classify(call: str, arguments: Sequence[int], library: str) -> WaitKind:
    """The kind of a wait in the system call `call`, made by code of `library`."""
    waits = call in _POLLS or call in _TIMES or call == "futex"
    if library.startswith(_PEERS) and (waits or call in _SENDS):
        return WaitKind.PEERS
    if call == "futex" and arguments[1] & 0x7F in _FUTEX_WAITS:
        if arguments[3]:
            return WaitKind.TIME
        return WaitKind.LOCK if arguments[1] & _FUTEX_PRIVATE else WaitKind.OUTSIDE
    return WaitKind.TIME if call in _TIMES else WaitKind.OUTSIDE


class RankThreads:
    """The threads of process `pid`, as they are now.

    Raises:
        OSError: they may not be seen, or the process has ended.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._code = executable_memory(pid)
        self._memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        os.close(self._memory)

    def wait_of(self, thread: int) -> ThreadWait | None:
        """None where that is not known."""
        machine = platform.machine()
        with open(f"/proc/{self._pid}/task/{thread}/syscall") as file:
            words = file.read().split()
        if words[0] == "running":
            return ThreadWait(WaitKind.NONE)
        if len(words) < 9 or machine not in _OTHERS:
            return None
        number, *arguments = (int(word, 0) for word in words)
        call = {**_OF_DESCRIPTOR[machine], **_OTHERS[machine]}.get(number, f"system call {number}")
        library = first_caller(self._memory, arguments[-2], self._code)
        if library is None and call == "futex":
            return None
        library = PYTHON if _is_python(library or "") else library or ""
        kind = classify(call, arguments, library)
        return ThreadWait(kind, library, self._words(call, arguments) if kind is WaitKind.OUTSIDE else "")

    def may_be_helped(self, main: ThreadWait, threads: Sequence[RankThread] | None, *, joins: bool) -> bool:
        """True where another thread, which may release the lock of the main one, waits for something outside.

        Trackers, loaders and servers of metrics keep threads beside each job.  So daemons that run no code
        of the user, and threads that are not Python's, count only where the main one waits for another
        thread, or in a library.  A thread that sleeps may be between two tries of a request.

        Args:
            threads: of Python; None: the interpreter is not free to tell.
            joins: the main thread waits for another one, as far as its calls tell.
        """
        if threads is None and main.library == PYTHON:
            return True  # that is not known
        known = {thread.id: thread for thread in threads or ()}
        for name in os.listdir(f"/proc/{self._pid}/task"):
            thread, found = known.get(int(name)), None
            with suppress(OSError):  # it has just ended
                found = self.wait_of(int(name)) if int(name) != self._pid else None
            if found is None or (found.library == PYTHON and thread is None):
                continue
            if _may_help(found, thread, main, joins=joins):
                return True
        return False

    def _words(self, call: str, arguments: Sequence[int]) -> str:
        if call in _POLLS:
            found = [describe(self._pid, one) for one in polled(self._pid, self._memory, call, arguments)]
            found.sort(key=lambda words: (not words.startswith(TERMINAL), ":" not in words))
            return found[0] if found else "descriptors"
        if call in _OF_DESCRIPTOR[platform.machine()].values():
            words = describe(self._pid, arguments[0])
            return f"a lock on {words}" if call in ("flock", "fcntl") else words
        if call == "openat":
            path = os.pread(self._memory, 256, arguments[1]).partition(b"\0")[0]
            return f"file {path.decode(errors='replace')}"
        if call in ("wait4", "waitid"):
            return "a child process"
        return "a lock that processes share" if call == "futex" else call


def _may_help(found: ThreadWait, thread: RankThread | None, main: ThreadWait, *, joins: bool) -> bool:
    """`thread`: None where it is not Python's."""
    if thread is None:
        if found.kind is WaitKind.TIME:
            return found.library == main.library
        return found.kind is WaitKind.OUTSIDE and (joins or main.library != PYTHON)
    is_users = thread.is_own or not thread.is_daemon
    if found.kind is WaitKind.TIME:
        return is_users
    return found.kind in (WaitKind.OUTSIDE, WaitKind.PEERS) and (joins or is_users)


def _is_python(library: str) -> bool:
    return library.startswith(("python", "libpython")) or ".cpython-" in library
