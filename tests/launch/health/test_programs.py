# SPDX-License-Identifier: Apache-2.0
"""The programs of the probes, as far as they are functions of values, and the platforms of their results."""

from __future__ import annotations

import errno
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from resiliency import cgroups
from resiliency.launch.host_check import programs
from resiliency.launch.host_check.platforms import processor_platform
from resiliency.launch.host_check.programs import (
    disk_fault,
    find_mount,
    gpu_fault,
    odd_ones,
    with_limit,
)

CORE = (
    "processor\t: 0\nmodel\t\t: 207\nmodel name\t: Some Processor\nflags\t\t: fpu avx2{}\ncpu MHz\t: {}\n\n"
)
ONE = CORE.format(" avx512f", 2300)


@pytest.mark.parametrize(
    ("cpuinfo", "build", "environ", "same"),
    [
        (ONE, "torch 3", {"HOME": "/b", "OMP_NUM_THREADS": "4"}, True),
        (ONE + CORE.format(" avx512f", 2301), "torch 3", {}, True),  # how many cores, and how fast
        (CORE.format("", 2300), "torch 3", {}, False),  # a hypervisor masks instructions
        (ONE.replace("207", "143"), "torch 3", {}, False),  # another generation under one name
        (ONE + CORE.format("", 2300), "torch 3", {}, False),  # two kinds of cores
        (ONE, "torch 3\nMKL 2025", {}, False),
        (ONE, "torch 3", {"MKL_ENABLE_INSTRUCTIONS": "AVX2"}, False),
        (ONE, "torch 3", {"MKL_CBWR": "COMPATIBLE"}, False),
        (ONE, "torch 3", {"ATEN_CPU_CAPABILITY": "default"}, False),
        (ONE, "torch 3", {"ONEDNN_MAX_CPU_ISA": "AVX2"}, False),
        ("", "torch 3", {}, False),
    ],
)
def test_a_platform_is_all_that_the_bits_of_a_result_depend_on(
    cpuinfo: str, build: str, environ: dict[str, str], same: bool
) -> None:
    usual = processor_platform(ONE, "torch 3", {"HOME": "/a"})
    assert usual.startswith("Some Processor (")
    assert (processor_platform(cpuinfo, build, environ) == usual) is same


@pytest.mark.parametrize(
    ("number", "system", "is_read_only", "kind"),
    [
        (errno.EIO, "ext4", False, "error"),
        (errno.EUCLEAN, "xfs", False, "error"),
        (errno.EROFS, "ext4", False, "error"),  # the kernel found damage
        (errno.EROFS, "ext4", True, "missing"),  # a person mounted it so
        (errno.EIO, "nfs4", False, "missing"),  # its server's
        (errno.EROFS, "lustre", False, "missing"),
        *((number, "ext4", False, "missing") for number in (errno.ENOSPC, errno.EDQUOT, errno.EACCES)),
        (errno.EMFILE, "ext4", False, "missing"),
        (errno.ENOENT, "", False, "missing"),
    ],
)
def test_an_error_is_the_hosts_where_its_own_disk_is_broken(
    number: int, system: str, is_read_only: bool, kind: str
) -> None:
    error = OSError(number, os.strerror(number))
    fault = disk_fault(Path("/run"), error, (system, is_read_only) if system else None)
    assert list(fault) == [kind]
    assert fault[kind].startswith(f"cannot write to /run: {os.strerror(number)}")


def test_the_mount_of_a_directory_is_found() -> None:
    assert find_mount(Path("/proc")) == ("proc", False)


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("CUDA error: uncorrectable ECC error encountered\nCompile with ...", "error"),
        ("CUDA error: an illegal memory access was encountered", "error"),
        ("CUDA error: unspecified launch failure", "error"),
        ("CUDA out of memory. Tried to allocate 64.00 MiB. GPU 0 has ...", "missing"),
        ("CUDA error: out of memory", "missing"),
        ("CUDA error: CUDA-capable device(s) is/are busy or unavailable", "missing"),
        ("CUDA error: no kernel image is available for execution on the device", "missing"),
        ("CUDA driver initialization failed, you might not have a CUDA gpu.", "missing"),
    ],
)
def test_an_error_of_cuda_is_the_gpus_where_it_says_so(message: str, kind: str) -> None:
    assert gpu_fault(message) == {kind: message.partition("\n")[0]}


def test_a_python_without_torch_measures_no_products(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert programs.main(["compute", "."]) == 0
    missing, end = map(json.loads, capsys.readouterr().out.splitlines())
    assert missing["missing"].startswith("could not measure: ModuleNotFoundError: ")
    assert end == {"end": True}


def test_as_many_cores_compute_at_once_as_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container with half a GiB on a host with 32 cores."""
    at_once: list[int] = []

    class Threads(ThreadPoolExecutor):
        def __init__(self, count: int) -> None:
            at_once.append(count)
            super().__init__(count)

    found = {"value": 1.0, "digest": "a"}
    monkeypatch.setattr(programs, "ThreadPoolExecutor", Threads)
    monkeypatch.setattr(programs, "multiply", lambda operands, on, spoil: found)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(32)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: None)
    for left_mib, threads in ((2048, 32), (200, 12), (40, 2)):
        monkeypatch.setattr(programs, "available_bytes", lambda left=left_mib: left << 20)
        assert programs.multiply_on_cores("here")["value"] == 1.0
        assert at_once.pop() == threads
    monkeypatch.setattr(programs, "available_bytes", lambda: 16 << 20)
    with pytest.raises(programs.NotMeasured, match="memory leaves 16 MiB, too little for 32 cores"):
        programs.multiply_on_cores("here")


def test_devices_of_one_host_are_compared_with_each_other() -> None:
    assert odd_ones({"0": "a", "1": "a", "2": "b", "3": "a"}) == (["2"], 3)
    assert odd_ones({"0": "a", "1": "a"}) == ([], 2)
    assert odd_ones({"0": "a"}) == ([], 1)


@pytest.mark.parametrize(
    ("throttled", "waited", "value", "noted"),
    [
        (0.0, 0.9, 100.0, False),  # load of others
        (0.8, 0.8, 20.0, True),  # a limit of 20 %
        (3.0, 0.5, 50.0, True),  # other threads of the container were throttled, too
        (0.6, 0.0, 100.0, True),  # a kernel that counts no wait: the clock has seen it
        (1.2, 1.2, 0.0, True),
    ],
)
def test_a_rate_is_what_a_cpu_limit_leaves(
    throttled: float, waited: float, value: float, noted: bool
) -> None:
    found = with_limit({"value": 100.0, "digest": "a"}, throttled, waited)
    assert found["value"] == pytest.approx(value)
    assert found["digest"] == "a"
    assert ("of the time by the CPU limit" in found.get("note", "")) is noted


#: As the kernel writes them, version 2 and 1; the group above has a limit as well.
CPU_STATS = {
    2: (
        "0::/pod/container\n",
        "usage_usec 9\nnr_periods 20\nnr_throttled 20\nthrottled_usec 2565216\nnr_bursts 0\n",
    ),
    1: (
        "9:name=systemd:/\n4:cpu,cpuacct:/pod/container\n",
        "nr_periods 20\nnr_throttled 20\nthrottled_time 2565216855\nnr_bursts 0\n",
    ),
}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("limited", ["pod/container", "pod", ""])
def test_throttled_time_is_read_from_each_group_with_a_limit(
    tmp_path: Path, version: int, limited: str
) -> None:
    member, stat = CPU_STATS[version]
    root = tmp_path / "cgroup" if version == 2 else tmp_path / "cgroup/cpu"
    (root / "pod/container").mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(member)
    (root / "pod/container/cpu.stat").write_text("usage_usec 9\nuser_usec 5\n")
    assert cgroups.throttled_s(tmp_path / "cgroup", tmp_path / "proc") == 0.0
    (root / limited / "cpu.stat").write_text(stat)
    assert cgroups.throttled_s(tmp_path / "cgroup", tmp_path / "proc") == pytest.approx(2.565, abs=0.001)
