# SPDX-License-Identifier: Apache-2.0
"""The kernel's advisory lock on a file or directory: gone with the process that holds it, however it ends."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from resiliency.forks import call_in_child


class FileLock:
    """A descriptor with an advisory lock; closed, it is released.

    Args:
        path: of a file, or with `directory` of a directory.
    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path, *, create: bool = False, directory: bool = False) -> None:
        flags = os.O_RDONLY | os.O_DIRECTORY if directory else os.O_RDWR | (os.O_CREAT if create else 0)
        self.path = path
        self.fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
        # A forked child (a data loader's worker) shares the open files of its parent, and with them the
        # locks: closing its copies keeps a lock from outliving the process that took it.
        call_in_child(self.abandon)

    def try_lock(self, *, exclusive: bool) -> bool:
        try:
            fcntl.flock(self.fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def is_current(self) -> bool:
        """False if the file was removed or replaced since it was opened."""
        try:
            return os.path.samestat(os.fstat(self.fd), os.stat(self.path))
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Release the lock, also if a forked child still has the file open.  Idempotent."""
        if self.fd >= 0:
            fcntl.flock(self.fd, fcntl.LOCK_UN)
            self.abandon()

    def abandon(self) -> None:
        """Close without unlocking: the lock belongs to the parent process."""
        if self.fd >= 0:
            # Forgotten first: a fork in between must not close a number that another file got since.
            fd, self.fd = self.fd, -1
            os.close(fd)
