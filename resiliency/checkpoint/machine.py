# SPDX-License-Identifier: Apache-2.0
"""What tells machines and containers apart, whatever they are called, and room for open files in a process.

Ranks of one host share its agent, so they must share more than a name: the kernel, the network namespace in
which the agent's socket has its address, and the memory in which captures lie.

The usual soft limit of open files is 1024, as `select` can serve no more; the hard one is far above.  The
soft one is raised by what is needed, so that the rest of the program keeps the room that it had.
"""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path

from resiliency.errors import ConfigError

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where a process runs; what could not be found out is empty, and no difference.

    Attributes:
        boot: id of the running kernel, drawn when it booted.
        network: id of the network namespace.
        memory: id of the directory that holds the captures of all jobs.
        disk: id of the directory of the local tier; empty: there is none.
    """

    boot: str = ""
    network: str = ""
    memory: str = ""
    disk: str = ""

    @classmethod
    def of_this_process(cls, arena_root: Path, local_directory: Path | None = None) -> Machine:
        try:
            boot = _BOOT_ID.read_text().strip()
        except OSError:
            boot = ""
        disk = "" if local_directory is None else _file_id(local_directory)
        return cls(boot=boot, network=_file_id(_NETWORK), memory=_file_id(arena_root), disk=disk)

    def shares_loopback_with(self, other: Machine) -> bool:
        """Whether a loopback address here leads there."""
        return _may_be_equal(self.boot, other.boot) and _may_be_equal(self.network, other.network)

    def difference_from(self, other: Machine) -> str:
        """Why this and `other` cannot be one host of a job; empty if they can."""
        if not _may_be_equal(self.boot, other.boot):
            return "they run on two machines"
        if not _may_be_equal(self.network, other.network):
            return "they run in containers with two network namespaces"
        if not _may_be_equal(self.memory, other.memory):
            return "they run in containers that do not share their memory file system"
        return ""


def file_id(status: os.stat_result) -> str:
    """Of a file or directory, among all that this kernel has."""
    return f"{status.st_dev:x}-{status.st_ino:x}"


def _file_id(path: Path) -> str:
    try:
        return file_id(path.stat())
    except OSError:
        return ""


def _may_be_equal(one: str, other: str) -> bool:
    return not one or not other or one == other


#: Open files that the process may need meanwhile.
_SPARE = 64


def make_room_for(count: int, *, what: str) -> None:
    """Let this process open `count` more files than now.

    Raises:
        ConfigError: the hard limit is below that.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        is_open = len(os.listdir("/proc/self/fd"))
    except OSError:  # not one is left: what is opened next says so
        return
    needed = is_open + count + _SPARE
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise ConfigError(
            f"{what} need {count} descriptors; {is_open} files are open, and the limit is {hard}.",
            hint="Raise the hard limit of open files (ulimit -Hn, LimitNOFILE of the service or container).",
        )
    wanted = soft + count
    wanted = max(needed, wanted if hard == resource.RLIM_INFINITY else min(wanted, hard))
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
