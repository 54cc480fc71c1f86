# SPDX-License-Identifier: Apache-2.0
"""Wakes a thread that waits for descriptors, from other threads and from signal handlers."""

from __future__ import annotations

import os
from contextlib import suppress


class WakePipe:
    """A pipe that is readable from `wake` to `clear`.  `close` while no other thread may call `wake`.

    Attributes:
        wakeup_fd: for `signal.set_wakeup_fd`.
    """

    def __init__(self) -> None:
        self._out, self.wakeup_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def fileno(self) -> int:
        return self._out

    def wake(self) -> None:
        """Returns at once; once closed it does nothing."""
        # It is full of reasons to wake up, or closed.
        with suppress(OSError):
            os.write(self.wakeup_fd, b"!")

    def clear(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._out, 4096)

    def close(self) -> None:
        """Idempotent."""
        # Forgotten first: a signal handler or a fork in between must not use numbers that others got.
        fds = self._out, self.wakeup_fd
        self._out = self.wakeup_fd = -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)
