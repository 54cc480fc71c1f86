# SPDX-License-Identifier: Apache-2.0
"""What tells machines and containers apart, whatever they are called.

Ranks of one host share its agent, so they must share more than a name: the kernel, the network namespace in
which the agent's socket has its address, and the memory in which captures lie.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where a process runs; what could not be found out is empty, and no difference.

    Attributes:
        boot: id of the running kernel, drawn when it booted.
        network: id of the network namespace.
        memory: id of the directory that holds the captures of all jobs.
    """

    boot: str = ""
    network: str = ""
    memory: str = ""

    @classmethod
    def of_this_process(cls, arena_root: Path) -> Machine:
        try:
            boot = _BOOT_ID.read_text().strip()
        except OSError:
            boot = ""
        return cls(boot=boot, network=_file_id(_NETWORK), memory=_file_id(arena_root))

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
