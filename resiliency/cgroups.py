# SPDX-License-Identifier: Apache-2.0
"""What the memory limits of the control groups of this process leave; their excess is answered by a kill."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

#: cgroup v1 says "no limit" with a number of about this size.
_NO_LIMIT = 1 << 60


def memory_left(
    cgroups: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")
) -> Iterator[tuple[Path, int]]:
    """Each group with a limit, and the bytes that it leaves."""
    for group in _groups(cgroups, proc):
        for limit_name, used_name, cache_name in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit, used = _number(group / limit_name), _number(group / used_name)
            if limit is None or used is None or limit >= _NO_LIMIT:
                continue
            # Page cache of ordinary files is given back under pressure; shared memory is not.
            yield group, limit - used + (_statistic(group / "memory.stat", cache_name) or 0)


def _groups(cgroups: Path, proc: Path) -> Iterator[Path]:
    """This process's memory cgroup and its ancestors, as far as they can be seen."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "memory" in controllers.split(","):
            root = cgroups if controllers == "" else cgroups / "memory"
            group = root / path.lstrip("/")
            while True:
                yield group
                if group == root or root not in group.parents:
                    break
                group = group.parent


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def oom_kills(cgroups: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> int | None:
    """How many processes of this process's memory cgroup the kernel has killed for memory; None: unknown.

    Groups above count kills of other jobs, too, and so does the host, which is asked where no group counts.
    """
    group = next(_groups(cgroups, proc), None)
    if group is not None:
        for name in ("memory.events", "memory.oom_control"):
            if (count := _statistic(group / name, "oom_kill")) is not None:
                return count
    return _statistic(proc / "vmstat", "oom_kill")


def _statistic(path: Path, name: str) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith(name + " ")), None)
