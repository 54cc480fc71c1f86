# SPDX-License-Identifier: Apache-2.0
"""Whether a rank and its children do anything, as the kernel counts it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from resiliency.proc_stat import stat_fields

#: Below these, per second, a process tree counts as idle: threads that look now and then take less.
IDLE_CPU_S = 0.03
IDLE_IO_BYTES = 65_536

_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
#: Of `stat_fields`: state, and processor time of the process itself in user and kernel mode.
_STATE, _USER, _SYSTEM = 0, 11, 12


@dataclass(frozen=True, kw_only=True)
class Activity:
    """What a process tree has done so far.  `complete`: all of it could be seen."""

    cpu_s: float
    io_bytes: int
    #: Processes in it; some wait for a disk now.
    pids: frozenset[int]
    waits_for_disk: bool
    complete: bool

    def is_idle_until(self, later: Activity, seconds: float) -> bool | None:
        """Whether nothing was done in the `seconds` from here to `later`; None: that cannot be told."""
        if not (self.complete and later.complete):
            return None
        return (
            self.pids == later.pids
            and not (self.waits_for_disk or later.waits_for_disk)
            and later.cpu_s - self.cpu_s <= IDLE_CPU_S * seconds
            and later.io_bytes - self.io_bytes <= IDLE_IO_BYTES * seconds
        )


def activity(pid: int) -> Activity:
    """Of process `pid` and all that it started."""
    pids, left = set(), [pid]
    cpu_s, io_bytes, disk, complete = 0.0, 0, False, True
    while left:
        one = left.pop()
        pids.add(one)
        fields = stat_fields(one)
        if not fields:
            continue  # it has ended
        cpu_s += (int(fields[_USER]) + int(fields[_SYSTEM])) * _TICK_S
        try:
            for line in Path(f"/proc/{one}/io").read_text().splitlines():
                name, _, value = line.partition(": ")
                if name in ("rchar", "wchar"):
                    io_bytes += int(value)
            for task in os.listdir(f"/proc/{one}/task"):
                # A thread may read for the main one, which then only waits for it.
                disk = disk or stat_fields(f"{one}/task/{task}")[:1] == ["D"]
                children = Path(f"/proc/{one}/task/{task}/children").read_text().split()
                left += [int(child) for child in children if int(child) not in pids]
        except (
            OSError
        ):  # it has ended in between; or there is no right to look, or no such file in this kernel
            complete = complete and not stat_fields(one)
    return Activity(
        cpu_s=cpu_s, io_bytes=io_bytes, pids=frozenset(pids), waits_for_disk=disk, complete=complete
    )


def is_stopped(pid: int) -> bool:
    """Whether the kernel does not run it, because of a signal or a debugger."""
    return (stat_fields(pid) or [""])[_STATE] in ("T", "t")
