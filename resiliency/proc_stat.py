# SPDX-License-Identifier: Apache-2.0
"""What the kernel says of a process in ``/proc/PID/stat``."""

from __future__ import annotations


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
