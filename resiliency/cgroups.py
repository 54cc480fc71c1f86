# SPDX-License-Identifier: Apache-2.0
"""Limits of this process's control groups: memory, whose excess is answered by a kill, and processor time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

#: cgroup v1 says "no limit" with a number of about this size.
_NO_LIMIT = 1 << 60


def memory_left(
    cgroups: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")
) -> Iterator[tuple[Path, int]]:
    """Each group with a limit, and the bytes that it leaves."""
    for group in _groups("memory", cgroups, proc):
        for limit_name, used_name, cache_name in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit, used = _number(group / limit_name), _number(group / used_name)
            if limit is None or used is None or limit >= _NO_LIMIT:
                continue
            # Page cache of ordinary files is given back under pressure; shared memory is not.
            yield group, limit - used + (_statistic(group / "memory.stat", cache_name) or 0)


def available_bytes(cgroups: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> int:
    """Memory that this process may still take: of the machine, and of the groups that it is in."""
    machine = _statistic(proc / "meminfo", "MemAvailable:")
    left = [free_bytes for _, free_bytes in memory_left(cgroups, proc)]
    return min([_NO_LIMIT if machine is None else machine << 10, *left])


def throttled_s(cgroups: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> float:
    """Seconds, summed over cores, in which a CPU limit kept a group of this process from running."""
    found = [0.0]
    for group in _groups("cpu", cgroups, proc):
        for name, unit_s in (("throttled_usec", 1e-6), ("throttled_time", 1e-9)):  # of version 2 and 1
            found.append((_statistic(group / "cpu.stat", name) or 0) * unit_s)
    return max(found)  # time in which two groups were held up is counted in both


def _groups(controller: str, cgroups: Path, proc: Path) -> Iterator[Path]:
    """This process's group of a controller and its ancestors, as far as they can be seen."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "" or controller in controllers.split(","):
            root = cgroups if controllers == "" else cgroups / controller
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
    group = next(_groups("memory", cgroups, proc), None)
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
