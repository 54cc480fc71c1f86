# SPDX-License-Identifier: Apache-2.0
"""The activity of a rank and its children, as the kernel counts it."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from resiliency.proc_stat import stat_fields
from resiliency.rank.inspection import offering_processes, questions_file

#: Below these, per second, a process tree counts as idle: threads that look now and then take less.
IDLE_CPU_S = 0.03
IDLE_IO_BYTES = 65_536

_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
#: Of `stat_fields`: state, parent, and processor time of the process itself in user and kernel mode.
_STATE, _PARENT, _USER, _SYSTEM = 0, 1, 11, 12
#: Generations of processes below the one that the launcher started.
_MOST_DEEP = 32


@dataclass(frozen=True, kw_only=True)
class Activity:
    """The work of a process tree so far.

    `switches`: times that the main thread of the rank left its core.  `ready`: threads that run or could run
    now, with the times that each has slept.  `pids`: processes in it; some `waits_for_disk` now.
    `complete`: all of it could be seen.
    """

    cpu_s: float
    io_bytes: int
    switches: int
    ready: frozenset[tuple[int, int]]
    pids: frozenset[int]
    waits_for_disk: bool
    complete: bool

    def is_idle_until(self, later: Activity, seconds: float) -> bool | None:
        """True where nothing was done in the `seconds` from here to `later`; None: not known."""
        if not (self.complete and later.complete):
            return None
        return (
            self.pids == later.pids
            and not (self.waits_for_disk or later.waits_for_disk)
            # A thread that did not sleep in between has work, and gets little of a core.
            and not self.ready & later.ready
            and self.switches == later.switches
            and later.cpu_s - self.cpu_s <= IDLE_CPU_S * seconds
            and later.io_bytes - self.io_bytes <= IDLE_IO_BYTES * seconds
        )


def activity(pid: int, main: int | None = None) -> Activity:
    """Of process `pid` and all that it started.

    Args:
        main: the process in it that trains; None: `pid`.
    """
    pids, left = set(), [pid]
    cpu_s, io_bytes, disk, ready, complete = 0.0, 0, False, set[tuple[int, int]](), True
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
                # A thread may read or compute for the main one, which then only waits for it.
                state = stat_fields(f"{one}/task/{task}")[:1]
                disk = disk or state == ["D"]
                if state == ["R"]:
                    ready.add((int(task), _switches(f"{one}/task/{task}", "voluntary_ctxt_switches")))
                children = Path(f"/proc/{one}/task/{task}/children").read_text().split()
                left += [int(child) for child in children if int(child) not in pids]
        except (
            OSError
        ):  # it has ended in between; or there is no right to look, or no such file in this kernel
            complete = complete and not stat_fields(one)
    return Activity(
        cpu_s=cpu_s,
        io_bytes=io_bytes,
        switches=_switches(main or pid, "voluntary_ctxt_switches", "nonvoluntary_ctxt_switches"),
        ready=frozenset(ready),
        pids=frozenset(pids),
        waits_for_disk=disk,
        complete=complete,
    )


def _switches(task: int | str, *kinds: str) -> int:
    """Of a thread, or of the first one of a process; 0 where that cannot be read."""
    with suppress(OSError, ValueError):
        lines = [line.partition(":") for line in Path(f"/proc/{task}/status").read_text().splitlines()]
        return sum(int(number) for kind, _, number in lines if kind in kinds)
    return 0


def is_stopped(pid: int) -> bool:
    """True where the kernel does not run it, because of a signal."""
    return _state(pid) == "T" and not _has_tracer(pid)


def is_traced(pid: int) -> bool:
    """True where a debugger keeps it from running."""
    return _state(pid) == "t" or (_state(pid) == "T" and _has_tracer(pid))


def inspected_process(pid: int, directory: str) -> int:
    """The process that offers to be inspected: `pid`, or the nearest one below it, as under a script."""
    if questions_file(directory, pid).exists():
        return pid
    below = [(depth, one) for one in offering_processes(directory) if (depth := _depth(one, pid))]
    return min(below)[1] if below else pid


def _depth(pid: int, root: int) -> int:
    """Generations that `pid` is below `root`; 0 where it is not."""
    for depth in range(_MOST_DEEP):
        if pid == root:
            return depth
        pid = int((stat_fields(pid) or ["", "0"])[_PARENT])
        if pid <= 1:
            break
    return 0


def _state(pid: int) -> str:
    return (stat_fields(pid) or [""])[_STATE]


def _has_tracer(pid: int) -> bool:
    with suppress(OSError):
        return "TracerPid:\t0\n" not in Path(f"/proc/{pid}/status").read_text()
    return False
