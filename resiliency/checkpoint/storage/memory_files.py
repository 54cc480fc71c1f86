# SPDX-License-Identifier: Apache-2.0
"""Room for files on a file system in memory (tmpfs): looked for before it is taken.

A disk that is full answers with an error.  Memory beyond the container's limit is answered by the OOM killer,
so whoever reserves a large file asks first, and one after the other: what one has been promised is taken
before the next one asks.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from resiliency.cgroups import memory_left
from resiliency.errors import CheckpointWriteFailed

MEMORY_LIMIT_HINT = (
    "Raise the container's memory limit (docker run --memory, resources.limits.memory): shared memory counts"
    " against it."
)
_reserving = threading.Lock()


@contextmanager
def room_in_memory(fd: int, size_bytes: int, path: Path) -> Iterator[None]:
    """Reserve `size_bytes` for the file `fd` at `path` in this context.  On a disk it does nothing.

    Raises:
        CheckpointWriteFailed: as for a full disk, as a memory limit of the container leaves less.
    """
    if not is_in_memory(os.fstat(fd).st_dev):
        yield
        return
    with _reserving:
        for group, free_bytes in memory_left():
            if size_bytes > free_bytes:
                raise CheckpointWriteFailed(
                    f"{path} is memory: {size_bytes / 2**20:.1f} MiB more are needed there, the memory limit"
                    f" of the container ({group}) leaves {free_bytes / 2**20:.1f} MiB.",
                    hint=f"{MEMORY_LIMIT_HINT}  Or put the local tier on a disk.",
                    path=str(path),
                    errno=errno.ENOSPC,
                )
        yield


def is_in_memory(device: int) -> bool:
    """Whether what is written to the file system of this number (``st_dev``) takes memory, and not a disk."""
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return False
    found = (line.split(" - ", 1) for line in mounts if line.split()[2] == number)
    return any(rest.split()[0] in ("tmpfs", "ramfs") for _, rest in found)
