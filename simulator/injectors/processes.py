# SPDX-License-Identifier: Apache-2.0
"""Faults of processes: killed, stopped for a while, slowed down by a CPU quota or by niceness."""

from __future__ import annotations

import errno
import os
import resource
import signal
import time
import uuid
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from resiliency.proc_stat import stat_fields
from simulator.faults import FaultMissed, InjectionFailed, Kind, PlannedFault
from simulator.job import Job, Member, Process, ancestors
from simulator.journal import Record

_NICE = 19
#: A bit of CapEff: may lower niceness again.
_CAP_SYS_NICE = 23
_PERIOD_US = 100_000
#: How long a control group may take to become empty.
_EMPTY_S = 10.0


class DeviceProcesses(Protocol):
    """Which processes compute on a device; NVML where there is one."""

    def processes(self, gpu: int) -> list[int]:
        """Process numbers; [] where that cannot be told."""
        ...


def target(job: Job, fault: PlannedFault, devices: DeviceProcesses | None = None) -> Member:
    """The worker that a fault strikes: the job's process on the GPU, else the worker of that local rank.

    Raises:
        FaultMissed: there is none now.
    """
    assert fault.gpu is not None
    on_gpu = devices.processes(fault.gpu) if devices is not None else []
    if on_gpu:
        for member in job.members():
            if member.process.pid in on_gpu:
                return member
    found = job.workers_of(fault.gpu)
    if not found:
        raise FaultMissed(
            f"{fault.text} missed: job {job.name} has no worker of local rank {fault.gpu} now.",
            hint="It restarts, has ended, or --gpus_per_node is larger than its workers; with"
            " --virtual-local-rank all workers have local rank 0.",
        )
    ranks = sorted({member.rank for member in found if member.rank is not None})
    if len(ranks) > 1:
        raise FaultMissed(
            f"{fault.text} missed: ranks {', '.join(map(str, ranks))} of job {job.name} all have local rank"
            f" {fault.gpu}, and the fault is meant for one.",
            hint="Start the job without --virtual-local-rank, or see --node_rank where several nodes share"
            " a machine.",
        )
    return found[-1]


def pack(process: Process) -> Record:
    """A process as a record."""
    return {"pid": process.pid, "started": process.started}


def unpack(record: object) -> Process:
    """The process of a record; raises KeyError or TypeError on another form."""
    if not isinstance(record, dict):
        raise TypeError(f"a process is an object, found {record!r}")
    return Process(int(record["pid"]), str(record["started"]))


def packed(record: Record) -> list[Process]:
    """All processes of a record."""
    listed = record["processes"]
    return [unpack(each) for each in listed] if isinstance(listed, list) else []


class Kill:
    """SIGKILL: to one worker, or to all of the job on this node, its launcher included."""

    name = "kill"
    kinds = frozenset({Kind.KILL, Kind.HOST_KILL})
    outlives_boot = False

    def __init__(self, job: Job, devices: DeviceProcesses | None = None) -> None:
        self._job = job
        self._devices = devices

    def refusal(self) -> str:
        return ""

    def aim_fault(self, fault: PlannedFault) -> Record:
        if fault.kind is Kind.KILL:
            worker = target(self._job, fault, self._devices)
            return {"processes": [pack(worker.process)], "rank": worker.rank}
        processes = self._job.host_processes()
        if not processes:
            raise FaultMissed(f"{fault.text} missed: job {self._job.name} has no process on this node now.")
        return {"processes": [pack(process) for process in processes]}

    def inject(self, record: Record) -> None:
        if not sum(self._job.signal(process, signal.SIGKILL) for process in packed(record)):
            raise FaultMissed(f"process {packed(record)[0].pid} ended before it could be killed.")

    def end_effect(self, record: Record) -> None:
        pass  # the dead stay dead


class Stop:
    """SIGSTOP, and SIGCONT at the end."""

    name = "stop"
    kinds = frozenset({Kind.STOP})
    outlives_boot = False

    def __init__(self, job: Job, devices: DeviceProcesses | None = None) -> None:
        self._job = job
        self._devices = devices

    def refusal(self) -> str:
        return ""

    def aim_fault(self, fault: PlannedFault) -> Record:
        worker = target(self._job, fault, self._devices)
        if stat_fields(worker.process.pid)[:1] == ["T"]:
            raise FaultMissed(f"{fault.text} missed: process {worker.process.pid} is stopped already.")
        return {"processes": [pack(worker.process)], "rank": worker.rank}

    def inject(self, record: Record) -> None:
        (process,) = packed(record)
        if not self._job.signal(process, signal.SIGSTOP):
            raise FaultMissed(f"process {process.pid} ended before it could be stopped.")

    def end_effect(self, record: Record) -> None:
        for process in packed(record):
            try:
                process.send(signal.SIGCONT)
            except PermissionError as error:
                raise InjectionFailed(f"process {process.pid} may not be continued: {error}.") from error


class CpuQuota:
    """Less CPU by a control group with a quota, made beside the process's own (v2) or under it (v1)."""

    name = "cpu_quota"
    kinds = frozenset({Kind.SLOW, Kind.POWER_CAP})
    outlives_boot = False

    def __init__(self, job: Job) -> None:
        self._job = job

    def refusal(self) -> str:
        # The job's groups, once it is there: it may be in another container.
        workers = self._job.workers().values()
        parent = _quota_parent(next((each.process.pid for each in workers), os.getpid()))
        if parent is None:
            return "no control group of the CPU controller is mounted where groups can be added."
        if not os.access(parent, os.W_OK):
            return f"the control group {parent} cannot be written by this user."
        return ""

    def aim_fault(self, fault: PlannedFault) -> Record:
        worker = target(self._job, fault)
        pid = worker.process.pid
        home, parent = _group_of(pid), _quota_parent(pid)
        if home is None or parent is None or home.name.startswith("resiliency-simulator-"):
            raise FaultMissed(f"{fault.text} missed: process {pid} is slowed already, or in no CPU group.")
        return {
            "processes": [pack(worker.process)],
            "rank": worker.rank,
            "home": str(home),
            "group": str(parent / f"resiliency-simulator-{uuid.uuid4().hex}"),
            "quota_us": _percent(fault) * _PERIOD_US // 100,
        }

    def inject(self, record: Record) -> None:
        (process,) = packed(record)
        group, quota = Path(str(record["group"])), record["quota_us"]
        try:
            group.mkdir()
            if (group / "cpu.max").exists():
                (group / "cpu.max").write_text(f"{quota} {_PERIOD_US}")
            else:
                (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
                (group / "cpu.cfs_quota_us").write_text(str(quota))
            if not self._job.owns(process):
                raise FaultMissed(f"process {process.pid} ended before it could be slowed down.")
            (group / "cgroup.procs").write_text(str(process.pid))
        except ProcessLookupError:
            raise FaultMissed(f"process {process.pid} ended before it could be slowed down.") from None
        except OSError as error:
            raise InjectionFailed(f"no CPU quota for process {process.pid} in {group}: {error}.") from error

    def end_effect(self, record: Record) -> None:
        group, home = Path(str(record["group"])), Path(str(record["home"]))
        deadline = time.monotonic() + _EMPTY_S
        while True:
            try:
                # What the process has started meanwhile is in the group, too.
                for pid in (group / "cgroup.procs").read_text().split():
                    with suppress(ProcessLookupError):
                        (home / "cgroup.procs").write_text(pid)
                group.rmdir()
            except OSError as error:
                if not group.exists():
                    return
                # A process that is just ending keeps its group busy for a moment.
                if error.errno != errno.EBUSY or time.monotonic() > deadline:
                    raise InjectionFailed(
                        f"the processes in {group} stay slow: {error}.",
                        hint=f"Write them to {home}/cgroup.procs, or to another group's if that one is gone.",
                    ) from error
                time.sleep(0.01)


class Niceness:
    """Niceness 19 for all threads: slow only where others want the CPU, but needs no control group."""

    name = "niceness"
    kinds = frozenset({Kind.SLOW, Kind.POWER_CAP})
    outlives_boot = False

    def __init__(self, job: Job) -> None:
        self._job = job
        #: Workers that effects of this injector have slowed now.
        self._slowed: set[Process] = set()

    def refusal(self) -> str:
        if _may_lower_niceness(0):
            return ""
        return "this user may not lower niceness again (RLIMIT_NICE, CAP_SYS_NICE), so it is not raised."

    def aim_fault(self, fault: PlannedFault) -> Record:
        worker = target(self._job, fault)
        try:
            before = os.getpriority(os.PRIO_PROCESS, worker.process.pid)
        except ProcessLookupError:
            raise FaultMissed(f"{fault.text} missed: process {worker.process.pid} ended.") from None
        if before >= _NICE or not _may_lower_niceness(before):
            raise FaultMissed(f"{fault.text} missed: process {worker.process.pid} has niceness {before}.")
        return {
            "processes": [pack(worker.process)],
            "rank": worker.rank,
            "local_rank": worker.local_rank,
            "job": self._job.name,
            "before": before,
            # In the unit and from the moment of the kernel's start times.
            "began": int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK")),
        }

    def inject(self, record: Record) -> None:
        (process,) = packed(record)
        if not self._job.owns(process):
            raise FaultMissed(f"process {process.pid} ended before it could be slowed down.")
        self._slowed.add(process)
        _set_niceness(process, _NICE, of=None)

    def end_effect(self, record: Record) -> None:
        before = int(str(record["before"]))
        self._slowed.difference_update(packed(record))
        for process in packed(record):
            if process.alive:
                _set_niceness(process, before, of=_NICE)
        # What it has started meanwhile inherited the niceness, and so did what that started.  The deadline
        # is for a worker that goes on starting processes with this niceness by its own choice.
        deadline = time.monotonic() + _EMPTY_S
        while sum(_set_niceness(process, before, of=_NICE) for process in self._started_since(record)):
            if time.monotonic() > deadline:
                return

    def _started_since(self, record: Record) -> list[Process]:
        """Processes that a slowed worker started after it was slowed, orphans of the job included."""
        began = record.get("began")
        if not isinstance(began, int):
            return []  # of an earlier release
        # By the record, for the next start on this host may be for another job.
        orphans = {
            member.process
            for member in Job(str(record["job"]), None).members()
            if (member.rank, member.local_rank) == (record["rank"], record["local_rank"])
        }
        workers = {process.pid for process in packed(record) if process.alive}
        others = {process.pid for process in self._slowed}
        found = []
        for pid in (int(name) for name in os.listdir("/proc") if name.isdecimal()):
            process = Process.of(pid)
            if process is None or int(process.started) < began or pid in workers:
                continue
            above = ancestors(pid)
            if (process in orphans or workers & above) and not others & above:
                found.append(process)
        return found


def _set_niceness(process: Process, wanted: int, of: int | None) -> bool:
    """For all threads, or for those with niceness `of`; threads that appear meanwhile inherit it.

    Returns whether a thread's was changed.
    """
    ever, changed = False, True
    while changed:
        changed = False
        for tid in _threads(process.pid):
            try:
                found = os.getpriority(os.PRIO_PROCESS, tid)
                if found != wanted and of in (None, found):
                    os.setpriority(os.PRIO_PROCESS, tid, wanted)
                    ever = changed = True
            except ProcessLookupError:
                continue
            except OSError as error:
                raise InjectionFailed(f"niceness of process {process.pid} stays: {error}.") from error
    return ever


def _threads(pid: int) -> Iterable[int]:
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def _may_lower_niceness(to: int) -> bool:
    limit = resource.getrlimit(resource.RLIMIT_NICE)[0]
    if limit == resource.RLIM_INFINITY or 20 - limit <= to:
        return True
    status = Path("/proc/self/status").read_text()
    effective = next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff:"))
    return bool(int(effective, 16) >> _CAP_SYS_NICE & 1)


def _percent(fault: PlannedFault) -> int:
    """Of one CPU; a power cap of 700 W, which is none, is all of it."""
    assert fault.value is not None
    return max(fault.value * 100 // 700, 1) if fault.kind is Kind.POWER_CAP else fault.value


def _group_of(pid: int) -> Path | None:
    """Directory of the group of a process in the hierarchy with the CPU controller."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
        mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    except OSError:
        return None
    paths = dict(line.split(":", 2)[1:] for line in lines)
    for names, path in paths.items():
        if "cpu" in names.split(","):
            return _mounted(mounts, path, lambda kind, options: kind == "cgroup" and "cpu" in options)
    if "" in paths:
        return _mounted(mounts, paths[""], lambda kind, options: kind == "cgroup2")
    return None


def _mounted(mounts: list[list[str]], path: str, matches: object) -> Path | None:
    for fields in mounts:
        kind, options = fields[fields.index("-") + 1], fields[-1].split(",")
        assert callable(matches)
        if matches(kind, options):
            group = Path(fields[4]) / path.lstrip("/")
            return group if group.is_dir() else None
    return None


def _quota_parent(pid: int) -> Path | None:
    """Where a group with a quota can be made; with v2 only where the controller is handed down."""
    home = _group_of(pid)
    if home is None:
        return None
    if (home / "cpu.cfs_quota_us").exists() or (home / "cpu.shares").exists():
        return home
    for group in (home.parent, home):
        with suppress(OSError):
            if "cpu" in (group / "cgroup.subtree_control").read_text().split():
                return group
    return None
