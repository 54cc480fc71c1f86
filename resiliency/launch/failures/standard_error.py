# SPDX-License-Identifier: Apache-2.0
"""The end of each rank's standard error, without files: memory that ranks append to, and a copy for people.

    rank 0  --write(2)-->  memory 0  --.
    rank 1  --write(2)-->  memory 1  --+--  thread of the launcher  -->  the launcher's standard error
                              |
                              '-- at a death: its last 8 KiB

A write appends to memory.  It never waits for a reader: neither for a launcher that is stopped, nor for one
that is gone, nor for a log that takes no more; and a rank that outlives its launcher gets no SIGPIPE.  What
was copied is freed, but for the end.  Children of a rank may hold the memory for as long as they like.

All that ranks write is shown, in the order of each rank, at most `_EVERY_S` late.  More than `MOST_BYTES` of
a rank do not wait for a log that is stuck: the oldest are left out, and a line says so.  A launcher that is
killed leaves the rest to its guardian.

A terminal is left to the ranks, because programs ask for it (colours, progress bars); nothing is kept then,
nor where files may not grow (``ulimit -f``).  Alternatives, and what this gives up: docs/adr/0016.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import resource
import select
import threading
import time
from contextlib import suppress

from resiliency.launch import guardian

logger = logging.getLogger(__name__)

#: Bytes of each rank: kept at least; unshown at most, then the oldest are dropped; freed at a time.
KEPT_BYTES, MOST_BYTES, _FREED_BYTES = 8192, 64 << 20, 1 << 20
#: The kernel would tell of each write (inotify), and so wake the launcher for each line of a busy rank.
_EVERY_S = 0.025
#: A pipe that is ready takes so many bytes without waiting.
_CHUNK_BYTES = select.PIPE_BUF
#: Longest wait for a standard error that takes nothing, when the launcher ends.
_LAST_S = 2.0


class StandardErrors:
    """The standard errors of the ranks of this host; a rank's is forgotten when it starts again.

    Args:
        shown_on: descriptor of the launcher's standard error.
    """

    def __init__(self, shown_on: int = 2) -> None:
        self._shown_on = shown_on
        self._keeps = (
            _is_open(shown_on)
            and not os.isatty(shown_on)
            and resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
        )
        self._lock = threading.Lock()
        self._memories: dict[int, _Memory] = {}
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="resiliency-stderr", daemon=True)

    def try_open(self, local_rank: int, *, shown: bool = True) -> _Memory | None:
        """The standard error for a new process of a rank; None: it gets the launcher's own.

        Args:
            shown: False: it is only kept.
        """
        if not self._keeps:
            return None
        try:
            memory = _Memory(local_rank, shown=shown)
        except OSError as error:
            logger.debug("standard error of ranks not kept: %s", error)
            self._keeps = False
            return None
        with self._lock:
            before, self._memories[local_rank] = self._memories.get(local_rank), memory
            if before is not None:
                before.show(self._shown_on)
                before.close()
        if not self._thread.is_alive():
            self._thread.start()
        return memory

    def show(self, timeout_s: float = 0.5) -> None:
        """Show all that ranks have written so far, unless the launcher's standard error takes no more."""
        deadline = time.monotonic() + timeout_s
        while not self._show_some() and (left_s := deadline - time.monotonic()) > 0:
            select.select([], [self._shown_on], [], min(left_s, _EVERY_S))

    def close(self) -> None:
        self._ends.set()
        if self._thread.is_alive():
            self._thread.join(_LAST_S)
        self.show(_LAST_S)
        with self._lock:
            for memory in self._memories.values():
                memory.close()
            self._memories.clear()

    def _run(self) -> None:
        while not self._ends.wait(_EVERY_S):
            while not self._show_some() and not self._ends.is_set():
                select.select([], [self._shown_on], [], _EVERY_S)

    def _show_some(self) -> bool:
        """Whether all of it is shown."""
        if not self._lock.acquire(timeout=_LAST_S):  # the thread waits for a disk
            return True
        try:
            done = [memory.show(self._shown_on) for memory in self._memories.values()]
            return all(done)
        finally:
            self._lock.release()


class _Memory:
    """Of one process.  Has the `fileno` of a file for it."""

    def __init__(self, local_rank: int, *, shown: bool) -> None:
        self._whose = f"the standard error of local rank {local_rank}"
        self._fd = os.memfd_create(guardian.STDERR_MEMORY, os.MFD_CLOEXEC)
        fcntl.fcntl(self._fd, fcntl.F_SETFL, os.O_APPEND)  # also for an agent, which opens it once more
        self._shown = shown
        self._next = self._freed = self._left_out = 0

    def fileno(self) -> int:
        return self._fd

    @property
    def path(self) -> str:
        """For this process."""
        return f"/proc/self/fd/{self._fd}"

    def show(self, on: int) -> bool:
        """Copy what is new, as far as `on` takes it without waiting; returns whether that is all."""
        size = os.fstat(self._fd).st_size
        if size < self._next:  # truncated
            self._next = self._freed = 0
        if not self._shown:
            self._next = size
        left_out = max(size - self._next - MOST_BYTES, 0)
        self._next, self._left_out = self._next + left_out, self._left_out + left_out
        while self._next < size and select.select([], [on], [], 0)[1]:
            try:
                if self._left_out:
                    os.write(on, f"launcher.py: {self._left_out} bytes of {self._whose} left out\n".encode())
                    self._left_out = 0
                self._next += os.write(
                    on, os.pread(self._fd, min(_CHUNK_BYTES, size - self._next), self._next)
                )
            except BlockingIOError:
                break
            except OSError:  # closed at the other end, or its disk is full: a rank is not to notice
                self._next = size
        self._free()
        return self._next >= size

    def close(self) -> None:
        os.close(self._fd)

    def _free(self) -> None:
        """Give memory back that holds what was shown, but for the end."""
        until = (self._next - KEPT_BYTES) // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        if until - self._freed >= _FREED_BYTES:
            with (
                suppress(OSError, ValueError),
                mmap.mmap(self._fd, until - self._freed, offset=self._freed) as old,
            ):
                old.madvise(mmap.MADV_REMOVE)
            self._freed = until


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
