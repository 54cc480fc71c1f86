# SPDX-License-Identifier: Apache-2.0
"""The GPU injectors over a library with NVML's functions, and, where there is a GPU, over the driver's."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from simulator.faults import FaultMissed, InjectionFailed, Kind, PlannedFault
from simulator.injectors.gpu import Nvml, PowerCap, Xid
from simulator.injectors.processes import Kill
from simulator.job import Job
from tests.simulator.conftest import StartWorker, state_of

JOB = f"simulator-gpu-{os.getpid()}"


class Library:
    """NVML's C functions over two GPUs of our own; arguments are ctypes objects, as for the driver's."""

    def __init__(self) -> None:
        self.limits = [700_000, 700_000]
        self.pids: list[list[int]] = [[], []]
        self.may_set = True
        self.shows_processes = True

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:
        if index.value >= len(self.limits):
            return 2
        handle._obj.value = index.value + 1
        return 0

    def nvmlDeviceGetPciInfo_v3(self, handle: Any, info: Any) -> int:
        info._obj.bus = 0x3A + handle.value
        return 0

    def nvmlDeviceGetPowerManagementLimit(self, handle: Any, limit: Any) -> int:
        limit._obj.value = self.limits[handle.value - 1]
        return 0

    def nvmlDeviceGetPowerManagementLimitConstraints(self, handle: Any, least: Any, most: Any) -> int:
        least._obj.value, most._obj.value = 200_000, 700_000
        return 0

    def nvmlDeviceSetPowerManagementLimit(self, handle: Any, limit: Any) -> int:
        if not self.may_set:
            return 4
        self.limits[handle.value - 1] = limit.value
        return 0

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: Any, count: Any, found: Any) -> int:
        if not self.shows_processes:
            return 3
        pids = self.pids[handle.value - 1]
        room, count._obj.value = count._obj.value, len(pids)
        if room < len(pids):
            return 7
        for place, pid in zip(found, pids, strict=False):
            place.pid = pid
        return 0


class OlderLibrary(Library):
    """Of a driver before R510: the same list has another name, and the limit cannot be asked for."""

    nvmlDeviceGetComputeRunningProcesses_v2 = Library.nvmlDeviceGetComputeRunningProcesses_v3

    def __getattribute__(self, name: str) -> Any:
        if name in ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetPowerManagementLimit"):
            raise AttributeError(name)
        return super().__getattribute__(name)


def fault(kind: Kind, value: int | None = None, gpu: int = 0) -> PlannedFault:
    lasts = kind is Kind.POWER_CAP
    return PlannedFault(at_us=0, kind=kind, node=0, gpu=gpu, duration_us=int(lasts), value=value)


def test_an_older_driver_says_which_processes_compute_and_what_it_lacks(start_worker: StartWorker) -> None:
    library = OlderLibrary()
    library.pids[1] = [start_worker(JOB, 1).pid]
    assert Nvml(library).processes(1) == library.pids[1]
    with pytest.raises(InjectionFailed, match="the driver is too old"):
        PowerCap(Job(JOB, 0), Nvml(library)).aim_fault(fault(Kind.POWER_CAP, 350, gpu=1))


def test_a_power_cap_is_set_and_taken_back(start_worker: StartWorker) -> None:
    library = Library()
    library.pids[1] = [start_worker(JOB, 1).pid]
    injector = PowerCap(Job(JOB, 0), Nvml(library))
    record = injector.aim_fault(fault(Kind.POWER_CAP, 350, gpu=1))
    injector.inject(record)
    assert library.limits == [700_000, 350_000]
    with pytest.raises(FaultMissed, match="the limit is 350 W already"):
        PowerCap(Job(JOB, 0), Nvml(library)).aim_fault(fault(Kind.POWER_CAP, 400, gpu=1))
    injector.end_effect(record)
    injector.end_effect(record)
    assert library.limits == [700_000, 700_000]


def test_a_capped_gpu_is_not_capped_again_until_its_cap_ended(start_worker: StartWorker) -> None:
    library = Library()
    library.pids = [[start_worker(JOB, 0).pid], [start_worker(JOB, 1).pid]]
    injector = PowerCap(Job(JOB, 0), Nvml(library))
    first = injector.aim_fault(fault(Kind.POWER_CAP, 500))
    injector.inject(first)
    with pytest.raises(FaultMissed, match="GPU 0 is capped already"):
        injector.aim_fault(fault(Kind.POWER_CAP, 300))
    other = injector.aim_fault(fault(Kind.POWER_CAP, 300, gpu=1))
    injector.inject(other)
    injector.end_effect(first)
    second = injector.aim_fault(fault(Kind.POWER_CAP, 300))
    injector.inject(second)
    injector.end_effect(second)
    injector.end_effect(other)
    assert library.limits == [700_000, 700_000]


def test_a_gpu_whose_processes_the_driver_hides_is_not_capped(start_worker: StartWorker) -> None:
    start_worker(JOB)
    library = Library()
    injector = PowerCap(Job(JOB, 0), Nvml(library))
    with pytest.raises(FaultMissed, match=f"shows no process of job {JOB} on GPU 0, so others may use it"):
        injector.aim_fault(fault(Kind.POWER_CAP, 300))
    library.shows_processes = False
    with pytest.raises(FaultMissed, match="so others may use it"):
        injector.aim_fault(fault(Kind.POWER_CAP, 300))


def test_a_cap_below_what_the_gpu_can_is_the_least_it_can(start_worker: StartWorker) -> None:
    library = Library()
    library.pids[0] = [start_worker(JOB).pid]
    injector = PowerCap(Job(JOB, 0), Nvml(library))
    assert injector.aim_fault(fault(Kind.POWER_CAP, 100))["cap_mw"] == 200_000


def test_a_limit_that_somebody_set_meanwhile_stays(start_worker: StartWorker) -> None:
    library = Library()
    library.pids[0] = [start_worker(JOB).pid]
    injector = PowerCap(Job(JOB, 0), Nvml(library))
    record = injector.aim_fault(fault(Kind.POWER_CAP, 300))
    injector.inject(record)
    library.limits[0] = 500_000
    injector.end_effect(record)
    assert library.limits[0] == 500_000


def test_a_gpu_that_another_job_uses_is_not_capped(start_worker: StartWorker) -> None:
    library = Library()
    library.pids[0] = [start_worker(JOB).pid, start_worker("another-job").pid]
    with pytest.raises(FaultMissed, match=f"process {library.pids[0][1]} there is not of job {JOB}"):
        PowerCap(Job(JOB, 0), Nvml(library)).aim_fault(fault(Kind.POWER_CAP, 300))


def test_the_process_on_the_gpu_is_killed_whatever_its_local_rank(start_worker: StartWorker) -> None:
    workers = [start_worker(JOB, rank) for rank in (0, 1)]
    stranger = start_worker("another-job")
    library = Library()
    library.pids[0] = [stranger.pid, workers[1].pid]
    injector = Kill(Job(JOB, 0), Nvml(library))
    injector.inject(injector.aim_fault(fault(Kind.KILL)))
    assert workers[1].wait(60) == -signal.SIGKILL
    # Where the driver shows no processes, it is the worker of that local rank.
    library.shows_processes = False
    injector.inject(injector.aim_fault(fault(Kind.KILL)))
    assert workers[0].wait(60) == -signal.SIGKILL
    assert state_of(stranger) == "S"


def test_more_processes_than_fit_are_asked_for_again() -> None:
    library = Library()
    library.pids[0] = list(range(1, 201))
    assert Nvml(library).processes(0) == library.pids[0]
    assert Nvml(library).processes(7) == []


def test_without_permission_or_driver_a_cap_is_refused(
    start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Library()
    library.may_set = False
    injector = PowerCap(Job(JOB, 0), Nvml(library))
    library.pids[0] = [start_worker(JOB).pid]
    record = injector.aim_fault(fault(Kind.POWER_CAP, 300))
    with pytest.raises(InjectionFailed, match="Limit failed: this user may not"):
        injector.inject(record)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert injector.refusal() == "only root may set the power limit of a GPU."
    with pytest.raises(InjectionFailed, match="NVML error 2"):
        Nvml(library).power_limit(7)


@pytest.mark.parametrize("kind", [Kind.XID, Kind.XID_CRASH])
def test_an_xid_line_reaches_the_log_with_or_without_a_crash(
    kind: Kind, start_worker: StartWorker, tmp_path: Path
) -> None:
    worker, log = start_worker(JOB), tmp_path / "kmsg"
    injector = Xid(Job(JOB, 0), Nvml(Library()), str(log))
    assert injector.refusal() == ""
    injector.inject(injector.aim_fault(fault(kind, 79)))
    assert log.read_text() == (
        f"NVRM: Xid (PCI:0000:3b:00): 79, pid={worker.pid}, GPU has fallen off the bus.\n"
    )
    if kind is Kind.XID:
        assert worker.poll() is None
    else:
        assert worker.wait(60) == -signal.SIGKILL


def test_no_line_is_written_for_a_worker_that_ended(start_worker: StartWorker, tmp_path: Path) -> None:
    worker, log = start_worker(JOB), tmp_path / "kmsg"
    injector = Xid(Job(JOB, 0), Nvml(Library()), str(log))
    record = injector.aim_fault(fault(Kind.XID_CRASH, 999))
    assert str(record["line"]).endswith("simulated failure")
    worker.kill()
    worker.wait()
    with pytest.raises(FaultMissed, match="ended before"):
        injector.inject(record)
    assert not log.exists() or log.read_text() == ""


def test_a_kernel_log_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    refusal = Xid(Job(JOB, 0), Nvml(Library()), str(tmp_path / "none" / "kmsg")).refusal()
    assert refusal.endswith("cannot be written by this user.")
    assert not (tmp_path / "kmsg").exists()


@pytest.mark.gpu
def test_the_drivers_own_library_tells_the_same() -> None:
    gpus = Nvml()
    assert gpus.refusal() == ""
    least, most = gpus.power_range(0)
    assert 0 < least <= gpus.power_limit(0) <= most
    domain, bus, device = gpus.bus_id(0).split(":")
    assert (len(domain), len(bus), len(device)) == (4, 2, 2)
    assert all(pid > 0 for pid in gpus.processes(0))


@pytest.mark.gpu
def test_a_real_gpu_is_capped_where_this_user_may(
    start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = Nvml()
    assert gpus.refusal() == ""
    worker = start_worker(JOB)
    # It computes nothing, so the driver does not show it.
    monkeypatch.setattr(gpus, "processes", lambda gpu: [worker.pid])
    injector = PowerCap(Job(JOB, 0), gpus)
    if why := injector.refusal():
        pytest.skip(f"gpu: {why}")
    before = gpus.power_limit(0)
    record = injector.aim_fault(fault(Kind.POWER_CAP, gpus.power_range(0)[0] // 1000 + 1))
    try:
        injector.inject(record)
        assert gpus.power_limit(0) == record["cap_mw"]
    finally:
        injector.end_effect(record)
    assert gpus.power_limit(0) == before


def test_the_structures_have_the_sizes_of_the_drivers() -> None:
    from simulator.injectors.gpu import _PciInfo, _ProcessInfo

    # nvmlPciInfo_t (version 3) and nvmlProcessInfo_t (version 2) of nvml.h.
    assert ctypes.sizeof(_PciInfo) == 68
    assert ctypes.sizeof(_ProcessInfo) == 24
