# SPDX-License-Identifier: Apache-2.0
"""Is there room for the slots?  Asked before allocating, because afterwards the answer is a kill.

Shared memory has three limits: the size of the tmpfs (64 MB in a Docker container by default),
the memory limit of the container's cgroup, which tmpfs pages count against and whose excess is
answered by the OOM killer, and the process's limit on file sizes.  The first is also enforced by
`posix_fallocate` with a proper error; for the second there is no error at all.
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from resiliency.cgroups import memory_left
from resiliency.checkpoint.storage.memory_files import MEMORY_LIMIT_HINT
from resiliency.errors import ConfigError
from resiliency.proc_stat import stat_fields


@dataclass(frozen=True)
class Room:
    """What one limit leaves, and how to raise it.

    Attributes:
        is_shared: with the other ranks of the host.
    """

    limit: str
    free_bytes: int
    hint: str
    is_shared: bool = True


def check_room(directory: Path, wanted_bytes: int, *, others_bytes: int = 0) -> None:
    """Refuse if `wanted_bytes` more in `directory` would exceed a limit.

    Args:
        others_bytes: what other ranks of this host are about to allocate.
    Raises:
        ConfigError: the text names the limit, both numbers, and what to set.
    """
    for room in rooms(directory):
        others = others_bytes if room.is_shared else 0
        if wanted_bytes + others > room.free_bytes:
            beside = f" and {_size(others)} for other ranks of this host" if others else ""
            raise ConfigError(
                f"shared memory for checkpoints: {_size(wanted_bytes)} more are needed in {directory}"
                f"{beside}, {room.limit} leaves {_size(room.free_bytes)}.",
                hint=room.hint,
                path=str(directory),
                wanted_bytes=wanted_bytes,
                free_bytes=room.free_bytes,
            )


def rooms(
    directory: Path, *, cgroups: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")
) -> Iterator[Room]:
    """Every limit that applies to new pages in `directory`."""
    status = os.statvfs(directory)
    yield Room(
        "the file system",
        status.f_bavail * status.f_frsize,
        "Docker grants /dev/shm 64 MB unless told: docker run --shm-size=<bytes>; on Kubernetes mount an"
        " emptyDir with medium Memory at /dev/shm.",
    )
    yield from _cgroup_rooms(cgroups, proc)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY:
        hint = "Raise it: ulimit -f unlimited."
        yield Room("the limit on file sizes (ulimit -f)", limit, hint, is_shared=False)


def _cgroup_rooms(cgroups: Path, proc: Path) -> Iterator[Room]:
    for group, free_bytes in memory_left(cgroups, proc):
        yield Room(f"the memory limit of the container ({group})", free_bytes, MEMORY_LIMIT_HINT)


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"


#: Flags of a task that is exiting, dumping core, or was ended by a signal (include/linux/sched.h).
_LEAVING = 0x4 | 0x200 | 0x400


def process_start_ticks(pid: int) -> int | None:
    """When the kernel started process `pid` (clock ticks since boot): tells a reused pid apart."""
    fields = stat_fields(pid)
    return int(fields[19]) if fields else None


def is_leaving(pid: int) -> bool:
    """Whether process `pid` will run no more code, though it may still hold its locks.

    The kernel takes tenths of a second to free the memory of a large process, and closes its files after.
    """
    fields = stat_fields(pid)
    if not fields or fields[0] in ("Z", "X") or int(fields[6]) & _LEAVING:
        return True
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except OSError:
        return True
    pending = (int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd", "ShdPnd")))
    return any(mask >> (signal.SIGKILL - 1) & 1 for mask in pending)
