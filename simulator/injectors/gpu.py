# SPDX-License-Identifier: Apache-2.0
"""Faults of GPUs: a power cap by NVML, and an Xid line in the kernel log with or without a crash.

`Nvml` calls the driver's own library, so no package is needed; tests hand it a library of their own.
"""

from __future__ import annotations

import ctypes
import os
import signal
from typing import Any, Protocol

from simulator.faults import XID_REASONS, FaultMissed, InjectionFailed, Kind, PlannedFault
from simulator.injectors.processes import pack, packed, target
from simulator.job import Job
from simulator.journal import Record

KERNEL_LOG = "/dev/kmsg"
_SUCCESS, _NOT_SUPPORTED, _NO_PERMISSION, _INSUFFICIENT_SIZE, _FUNCTION_NOT_FOUND = 0, 3, 4, 7, 13


class Gpus(Protocol):
    """What the injectors need of the GPUs of this host.  Power is in milliwatts."""

    def refusal(self) -> str:
        """Why there are none, as a sentence; "" when there are."""
        ...

    def bus_id(self, gpu: int) -> str: ...

    def processes(self, gpu: int) -> list[int]: ...

    def power_limit(self, gpu: int) -> int: ...

    def power_range(self, gpu: int) -> tuple[int, int]: ...

    def set_power_limit(self, gpu: int, milliwatts: int) -> None: ...


class _PciInfo(ctypes.Structure):
    _fields_ = (
        ("bus_id_legacy", ctypes.c_char * 16),
        *((name, ctypes.c_uint) for name in ("domain", "bus", "device", "device_id", "subsystem_id")),
        ("bus_id", ctypes.c_char * 32),
    )


class _ProcessInfo(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used_bytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class Nvml:
    """GPUs as NVIDIA's driver shows them.

    Args:
        library: with NVML's C functions; None loads the driver's, at the first call.
    """

    def __init__(self, library: Any = None) -> None:
        self._library = library
        self._ready = False

    def refusal(self) -> str:
        try:
            self._start()
        except (OSError, InjectionFailed) as error:
            return f"there is no NVIDIA driver on this host: {error}"
        return ""

    def bus_id(self, gpu: int) -> str:
        info = _PciInfo()
        self._call("nvmlDeviceGetPciInfo_v3", self._handle(gpu), ctypes.byref(info))
        return f"{info.domain & 0xFFFF:04x}:{info.bus:02x}:{info.device:02x}"

    def processes(self, gpu: int) -> list[int]:
        try:
            handle = self._handle(gpu)
        except InjectionFailed:
            return []  # no driver, or fewer GPUs than workers
        room = 64
        while True:
            count, found = ctypes.c_uint(room), (_ProcessInfo * room)()
            code = self._code(self._list_processes, handle, ctypes.byref(count), found)
            if code == _SUCCESS:
                return [found[index].pid for index in range(count.value)]
            if code != _INSUFFICIENT_SIZE:
                return []  # in a container the driver does not tell
            room = count.value * 2

    def power_limit(self, gpu: int) -> int:
        limit = ctypes.c_uint()
        self._call("nvmlDeviceGetPowerManagementLimit", self._handle(gpu), ctypes.byref(limit))
        return limit.value

    def power_range(self, gpu: int) -> tuple[int, int]:
        least, most = ctypes.c_uint(), ctypes.c_uint()
        self._call(
            "nvmlDeviceGetPowerManagementLimitConstraints",
            *(self._handle(gpu), ctypes.byref(least), ctypes.byref(most)),
        )
        return least.value, most.value

    def set_power_limit(self, gpu: int, milliwatts: int) -> None:
        self._call("nvmlDeviceSetPowerManagementLimit", self._handle(gpu), ctypes.c_uint(milliwatts))

    def _start(self) -> None:
        if not self._ready:
            if self._library is None:
                self._library = ctypes.CDLL("libnvidia-ml.so.1")
            self._checked("nvmlInit_v2", self._library.nvmlInit_v2())
            self._ready = True

    def _handle(self, gpu: int) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(gpu), ctypes.byref(handle))
        return handle

    @property
    def _list_processes(self) -> str:
        """Of drivers before R510 there is the second form alone, with the same structure."""
        newest = "nvmlDeviceGetComputeRunningProcesses_v3"
        return newest if hasattr(self._library, newest) else "nvmlDeviceGetComputeRunningProcesses_v2"

    def _code(self, name: str, *arguments: object) -> int:
        self._start()
        try:
            function = getattr(self._library, name)
        except AttributeError:
            return _FUNCTION_NOT_FOUND
        return int(function(*arguments))

    def _call(self, name: str, *arguments: object) -> None:
        try:
            self._checked(name, self._code(name, *arguments))
        except OSError as error:
            raise InjectionFailed(f"there is no NVIDIA driver on this host: {error}.") from error

    @staticmethod
    def _checked(name: str, code: int) -> None:
        if code != _SUCCESS:
            why = {_NOT_SUPPORTED: "not supported by this GPU", _NO_PERMISSION: "this user may not"}
            why[_FUNCTION_NOT_FOUND] = "the driver is too old"
            raise InjectionFailed(f"{name} failed: {why.get(code, f'NVML error {code}')}.")


class PowerCap:
    """A lower power limit for a GPU that only this job uses."""

    name = "power_cap"
    kinds = frozenset({Kind.POWER_CAP})
    outlives_boot = False  # the driver starts with the default limit

    def __init__(self, job: Job, gpus: Gpus) -> None:
        self._job = job
        self._gpus = gpus
        #: GPUs with a cap of this injector: one upon another would take the first for the limit before.
        self._capped: set[int] = set()

    def refusal(self) -> str:
        if why := self._gpus.refusal():
            return why
        try:
            self._gpus.power_range(0)
        except InjectionFailed as error:
            return str(error)
        # Looked up, not tried out: nothing is written before somebody agreed to it.
        return "" if os.geteuid() == 0 else "only root may set the power limit of a GPU."

    def aim_fault(self, fault: PlannedFault) -> Record:
        assert fault.gpu is not None
        assert fault.value is not None
        if fault.gpu in self._capped:
            raise FaultMissed(f"{fault.text} missed: GPU {fault.gpu} is capped already.")
        worker = target(self._job, fault, self._gpus)
        there = self._gpus.processes(fault.gpu)
        pids = {member.process.pid for member in self._job.members()}
        strangers = [pid for pid in there if pid not in pids]
        if not pids.intersection(there):
            # In a container the driver may show no process, or numbers of another PID namespace.
            raise FaultMissed(
                f"{fault.text} missed: the driver shows no process of job {self._job.name} on GPU"
                f" {fault.gpu}, so others may use it.",
                hint="Start the simulator where the driver shows them: on the host, or in its PID namespace.",
            )
        if strangers:
            raise FaultMissed(
                f"{fault.text} missed: process {strangers[0]} there is not of job {self._job.name}."
            )
        before = self._gpus.power_limit(fault.gpu)
        least, most = self._gpus.power_range(fault.gpu)
        wanted = min(max(fault.value * 1000, least), most)
        if wanted >= before:
            raise FaultMissed(f"{fault.text} missed: the limit is {before / 1000:.0f} W already.")
        return {"gpu": fault.gpu, "before_mw": before, "cap_mw": wanted, "rank": worker.rank}

    def inject(self, record: Record) -> None:
        gpu = _int(record["gpu"])
        self._capped.add(gpu)
        self._gpus.set_power_limit(gpu, _int(record["cap_mw"]))

    def end_effect(self, record: Record) -> None:
        gpu = _int(record["gpu"])
        # Another limit than ours is somebody's later choice.
        if self._gpus.power_limit(gpu) == record["cap_mw"]:
            self._gpus.set_power_limit(gpu, _int(record["before_mw"]))
        self._capped.discard(gpu)


class Xid:
    """A line as the driver writes it, for what watches the kernel log; with XID_CRASH the process dies, too.

    Args:
        kernel_log: where the line goes; another file than `KERNEL_LOG` where a watcher is told to read it.
    """

    name = "xid"
    kinds = frozenset({Kind.XID, Kind.XID_CRASH})
    outlives_boot = False

    def __init__(self, job: Job, gpus: Gpus, kernel_log: str = KERNEL_LOG) -> None:
        self._job = job
        self._gpus = gpus
        self._kernel_log = kernel_log

    def refusal(self) -> str:
        place = self._kernel_log if os.path.exists(self._kernel_log) else os.path.dirname(self._kernel_log)
        writable = os.access(place or ".", os.W_OK)
        return "" if writable else f"the kernel log {self._kernel_log} cannot be written by this user."

    def aim_fault(self, fault: PlannedFault) -> Record:
        worker = target(self._job, fault, self._gpus)
        bus = f"0000:{fault.gpu:02x}:00" if self._gpus.refusal() else self._gpus.bus_id(fault.gpu or 0)
        code = fault.value or 79
        line = f"NVRM: Xid (PCI:{bus}): {code}, pid={worker.process.pid}, " + XID_REASONS.get(
            code, "simulated failure"
        )
        crash = fault.kind is Kind.XID_CRASH
        return {"line": line, "processes": [pack(worker.process)] if crash else [], "rank": worker.rank}

    def inject(self, record: Record) -> None:
        processes = packed(record)
        if not all(self._job.owns(process) for process in processes):
            raise FaultMissed(f"process {processes[0].pid} ended before it could be killed.")
        try:
            fd = os.open(self._kernel_log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                os.write(fd, f"{record['line']}\n".encode())
            finally:
                os.close(fd)
        except OSError as error:
            raise InjectionFailed(f"no Xid line in {self._kernel_log}: {error.strerror}.") from error
        for process in processes:
            self._job.signal(process, signal.SIGKILL)

    def end_effect(self, record: Record) -> None:
        pass  # a line stays, and the dead stay dead


def _int(value: object) -> int:
    assert isinstance(value, int)
    return value
