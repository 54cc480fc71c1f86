# SPDX-License-Identifier: Apache-2.0
"""What the kernel says of a process in ``/proc/PID``."""

from __future__ import annotations

import os
import time
from contextlib import suppress


def read_stat(pid: int | str = "self") -> list[str]:
    """The fields from the third on (state, parent, group, ...), so that field n of proc(5) is item n - 3.

    Raises:
        OSError: there is no such process, or this one may open no more files.
    """
    with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
        # The command name may hold spaces and brackets: fields count from the last ')'.
        return stat.read().rpartition(")")[2].split()


def stat_fields(pid: int | str = "self") -> list[str]:
    """Like `read_stat`; empty instead of an error."""
    try:
        return read_stat(pid)
    except OSError:
        return []


def has_ended(pid: int) -> bool:
    """Whether it is gone, or a zombie that its parent has not looked at yet."""
    return (stat_fields(pid) or ["X"])[0] in ("Z", "X")


def handles_signal(pid: int, number: int) -> bool:
    """Whether the process has a handler: without one, most signals would end it.

    Raises:
        OSError: there is no such process.
    """
    with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as status:
        for line in status:
            name, _, mask = line.partition(":")
            if name == "SigCgt":
                return bool(int(mask, 16) >> (number - 1) & 1)
    return False


def waited_for_core_s(task: int | str) -> float:
    """Seconds in which a thread could have run and others had its core; 0 where the kernel counts none.

    Args:
        task: id of a process, for its first thread, or ``thread-self``.
    """
    try:
        with open(f"/proc/{task}/schedstat", "rb") as schedstat:
            return int(schedstat.read().split()[1]) / 1e9
    except (OSError, IndexError):  # it has ended, or the kernel or a sandbox has no such numbers
        return 0.0


def wait_for_program(pid: int, timeout_s: float) -> None:
    """Return when a child that was just spawned shows its environment, has ended or takes too long.

    A spawn returns while the kernel still sets up the program: for a moment no environment is there, and with
    it no mark by which the process is found.  Nothing tells when it is; one without any takes too long.
    """
    deadline = time.monotonic() + timeout_s
    with suppress(OSError), open(f"/proc/{pid}/environ", "rb", buffering=0) as environ:
        while not environ.read(1) and time.monotonic() < deadline:
            if has_ended(pid):
                return
            os.sched_yield()
