# SPDX-License-Identifier: Apache-2.0
"""What speaks against a GPU or a port, and what is a note only."""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from supervisor.policy.xid import Remedy, remedy
from supervisor.values import EventType
from supervisor.watchdogs.ecc import EccWatchdog, GpuHealth
from supervisor.watchdogs.links import Link, LinkWatchdog
from supervisor.watchdogs.nic import Ports
from supervisor.watchdogs.nvml import NvmlGpus, NvmlLinks
from supervisor.watchdogs.testing import FileGpus
from supervisor.watchdogs.watchdog import Look, UnknownHealth
from supervisor.watchdogs.xid import ACTIONS

GPU = GpuHealth(
    device="0000:3b:00",
    uncorrected=0,
    sram_threshold=False,
    remap_pending=False,
    remap_failed=False,
    action="none",
)


class Described:
    """GPUs that a test describes."""

    def __init__(self, *gpus: GpuHealth) -> None:
        self.gpus = gpus

    def read(self) -> tuple[GpuHealth, ...]:
        return self.gpus


def looks(*described: GpuHealth) -> list[Look]:
    """One watchdog's look at one GPU after the other state."""
    gpus = Described()
    watchdog = EccWatchdog("h", gpus, {}, boot="b")
    seen = []
    for health in described:
        gpus.gpus = (health,)
        seen.append(watchdog.look())
    return seen


def facts(look: Look) -> list[tuple[EventType, int | None, str]]:
    return [(found.type, found.evidence.code, found.evidence.advice) for found in look.findings]


@pytest.mark.parametrize(
    ("now", "wanted"),
    [
        (replace(GPU), []),
        (replace(GPU, uncorrected=3), []),  # the driver has contained it
        (replace(GPU, uncorrected=3, action=None), [(EventType.ECC, None, "")]),
        (replace(GPU, remap_pending=True), []),
        (replace(GPU, remap_failed=True), [(EventType.ECC, None, "")]),
        (replace(GPU, sram_threshold=True), [(EventType.ECC, None, "")]),
        (replace(GPU, action="gpu_reset"), [(EventType.XID, 154, "gpu_reset")]),
        (GpuHealth(device=GPU.device, lost=True), [(EventType.XID, 79, "")]),
        (GpuHealth(device=GPU.device), []),  # a driver that can tell nothing
    ],
)
def test_each_fact_about_a_gpu_is_told_once(
    now: GpuHealth, wanted: list[tuple[EventType, int | None, str]]
) -> None:
    healthy, first, second = looks(GPU, now, now)
    assert (facts(healthy), facts(first), facts(second)) == ([], wanted, [])
    # Also where it was so before anybody looked.
    assert facts(looks(now)[0]) == wanted


def test_an_error_that_the_driver_contained_is_noted() -> None:
    _, look = looks(GPU, replace(GPU, uncorrected=2, remap_pending=True))
    assert look.notes == (
        "GPU 0000:3b:00: 2 uncorrectable memory errors; the driver asks for none",
        "GPU 0000:3b:00: a memory row is replaced at its next reset",
    )


def test_a_count_that_began_again_is_no_negative_number_of_errors() -> None:
    old = replace(GPU, action=None, uncorrected=7)
    look = looks(old, replace(old, uncorrected=0), replace(old, uncorrected=1))
    assert [len(one.findings) for one in look] == [1, 0, 1]


@pytest.mark.parametrize(
    ("action", "wanted"),
    [
        ("gpu_reset", Remedy.RESET_GPU),
        ("bus_reset", Remedy.RESET_GPU),
        ("drain_and_reset", Remedy.DRAIN_AND_RESET),
        ("drain_p2p", Remedy.DRAIN_AND_RESET),
        ("node_reboot", Remedy.OUT_OF_SERVICE),
        ("system_reboot", Remedy.OUT_OF_SERVICE),
        ("recover_imex_domain", Remedy.UNKNOWN),
    ],
)
def test_the_drivers_action_decides_what_happens_to_the_host(action: str, wanted: Remedy) -> None:
    _, look = looks(GPU, replace(GPU, action=action))
    (found,) = look.findings
    assert remedy(found.evidence.code or 0, found.evidence.advice) is wanted


def test_the_next_watchdog_of_the_same_start_tells_nothing_again(tmp_path: Path) -> None:
    bad = replace(GPU, remap_failed=True)
    first = EccWatchdog("h", Described(bad), {}, boot="b")
    (told,) = first.look().findings
    kept = json.loads(json.dumps(first.memory()))
    assert EccWatchdog("h", Described(bad), kept, boot="b").look().findings == ()
    (again,) = EccWatchdog("h", Described(bad), kept, boot="c").look().findings
    assert told.evidence.id != again.evidence.id


def test_a_fact_that_was_over_and_comes_again_is_another_finding() -> None:
    gpus, ids = Described(), []
    watchdog = EccWatchdog("h", gpus, {}, boot="b")
    for health in (
        GPU,
        GpuHealth(device=GPU.device, lost=True),
        GPU,
        GpuHealth(device=GPU.device, lost=True),
    ):
        gpus.gpus = (health,)
        ids += [found.evidence.id for found in watchdog.look().findings]
        kept = json.loads(json.dumps(watchdog.memory()))
        watchdog = EccWatchdog("h", gpus, kept, boot="b")
    assert len(set(ids)) == 2


def test_a_gpu_that_is_not_listed_any_more_is_noted() -> None:
    gpus = Described(GPU, replace(GPU, device="0000:5e:00"))
    watchdog = EccWatchdog("h", gpus, {}, boot="b")
    watchdog.look()
    gpus.gpus = (GPU,)
    assert watchdog.look().notes == ("GPU 0000:5e:00 is not listed any more",)


def test_a_file_describes_gpus_or_says_why_not(tmp_path: Path) -> None:
    path = tmp_path / "gpus.json"
    gpus = FileGpus(path)
    with pytest.raises(UnknownHealth, match="describes no GPUs"):
        gpus.read()
    path.write_text(json.dumps([{"device": "0000:3b:00", "action": "none"}]))
    assert gpus.read() == [GpuHealth(device="0000:3b:00", action="none")]
    path.write_text('"NVML: Driver Not Loaded"')
    with pytest.raises(UnknownHealth, match=r"^NVML: Driver Not Loaded$"):
        gpus.read()
    path.write_text('[{"device": "x", "colour": 1}]')
    with pytest.raises(UnknownHealth, match="colour"):
        gpus.read()


def test_without_a_driver_nvml_says_so() -> None:
    if Path("/proc/driver/nvidia/version").exists():
        pytest.skip("this machine has a driver")
    with pytest.raises(UnknownHealth, match=r"^NVML: "):
        NvmlGpus().read()


class Driver(ModuleType):
    """A binding of NVML that knows two GPUs; those in `lost` are off the bus.

    What is not in `answers` of a GPU its driver does not support.
    """

    NVML_SUCCESS, NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_GPU_IS_LOST = 0, 3, 15
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0
    NVML_FI_DEV_GET_GPU_RECOVERY_ACTION = 274
    NVML_FEATURE_ENABLED, NVML_NVLINK_MAX_LINKS = 1, 18
    NVML_NVLINK_ERROR_DL_REPLAY, NVML_NVLINK_ERROR_DL_RECOVERY = 0, 1  # older than the other counters

    class NVMLError(Exception):
        def __init__(self, value: int = 15) -> None:
            self.value = value

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.lost: set[int] = set()
        #: (GPU, link) -> whether it is active; there are no others.
        self.links: dict[tuple[int, int], bool] = {}
        self.replays = 0
        #: (GPU, question) -> answer.
        self.answers: dict[tuple[int, str], Any] = {}
        #: A question at which the GPU that is asked falls off the bus.
        self.lost_at = ""

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index in self.lost:
            raise self.NVMLError
        return index

    def nvmlDeviceGetPciInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(busId=f"00000000:{handle:02X}:00.0".encode())

    def _answer(self, handle: int, question: str) -> Any:
        if question == self.lost_at:
            self.lost.add(handle)
        if handle in self.lost:
            raise self.NVMLError
        if (handle, question) not in self.answers:
            raise self.NVMLError(self.NVML_ERROR_NOT_SUPPORTED)
        return self.answers[handle, question]

    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, counter: int) -> int:
        assert (kind, counter) == (self.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, self.NVML_VOLATILE_ECC)
        return int(self._answer(handle, "ecc"))

    class c_nvmlEccSramErrorStatus_v1_t(ctypes.Structure):
        _fields_ = (("before", ctypes.c_ulonglong * 9), ("bThresholdExceeded", ctypes.c_uint))

    def nvmlDeviceGetSramEccErrorStatus(self, handle: int, status: Any) -> None:
        status._obj.bThresholdExceeded = self._answer(handle, "sram")

    def nvmlDeviceGetRemappedRows(self, handle: int) -> tuple[int, int, int, int]:
        corrected, uncorrected, pending, failed = self._answer(handle, "rows")
        return corrected, uncorrected, pending, failed

    def nvmlDeviceGetFieldValues(self, handle: int, fields: list[int]) -> list[SimpleNamespace]:
        assert fields == [self.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION]
        try:
            action = self._answer(handle, "action")
        except self.NVMLError as error:
            if error.value != self.NVML_ERROR_NOT_SUPPORTED:
                raise
            # The call succeeds; the field says that it is not supported.
            return [SimpleNamespace(nvmlReturn=error.value, value=SimpleNamespace(uiVal=0))]
        return [SimpleNamespace(nvmlReturn=self.NVML_SUCCESS, value=SimpleNamespace(uiVal=action))]

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        if (handle, link) not in self.links:
            raise self.NVMLError(self.NVML_ERROR_NOT_SUPPORTED)
        return self.links[handle, link]

    def nvmlDeviceGetNvLinkErrorCounter(self, handle: int, link: int, counter: int) -> int:
        if counter != self.NVML_NVLINK_ERROR_DL_REPLAY:
            raise self.NVMLError(self.NVML_ERROR_NOT_SUPPORTED)
        return self.replays


def test_a_gpu_whose_handle_the_driver_refuses_is_lost_and_hides_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver()
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    gpus = NvmlGpus()
    assert [gpu.lost for gpu in gpus.read()] == [False, False]
    driver.lost = {1}
    assert list(gpus.read()) == [
        GpuHealth(device="0000:00:00"),
        GpuHealth(device="0000:01:00", lost=True),
    ]


def test_all_that_a_driver_tells_of_a_gpu_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    reset = next(number for number, word in ACTIONS.items() if word == "gpu_reset")
    driver.answers = {
        **{(0, "ecc"): 3, (0, "sram"): 1, (0, "rows"): (5, 2, 1, 0), (0, "action"): reset},
        **{(1, "ecc"): 0, (1, "sram"): 0, (1, "rows"): (0, 9, 0, 1), (1, "action"): 0},
    }
    assert list(NvmlGpus().read()) == [
        GpuHealth(
            device="0000:00:00",
            uncorrected=3,
            sram_threshold=True,
            remap_pending=True,
            remap_failed=False,
            action="gpu_reset",
        ),
        GpuHealth(
            device="0000:01:00",
            uncorrected=0,
            sram_threshold=False,
            remap_pending=False,
            remap_failed=True,
            action=ACTIONS[0],
        ),
    ]


@pytest.mark.parametrize("question", ["rows", "ecc", "sram", "action"])
def test_a_question_that_a_driver_does_not_support_is_unknown_and_a_gpu_may_be_lost_at_any_of_them(
    question: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver()
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    every: dict[str, Any] = {"rows": (0, 0, 0, 0), "ecc": 0, "sram": 0, "action": 0}
    driver.answers = {(gpu, name): answer for gpu in (0, 1) for name, answer in every.items()}
    healthy = NvmlGpus().read()[0]
    unknown = {
        "rows": {"remap_pending": None, "remap_failed": None},
        "ecc": {"uncorrected": None},
        "sram": {"sram_threshold": None},
        "action": {"action": None},
    }
    del driver.answers[0, question]
    gpus = NvmlGpus()
    one, other = gpus.read()
    assert asdict(one) == asdict(healthy) | unknown[question]
    assert other == replace(healthy, device="0000:01:00")
    driver.lost_at = question
    assert [(gpu.device, gpu.lost) for gpu in gpus.read()] == [("0000:00:00", True), ("0000:01:00", True)]


def test_an_nvlink_that_stays_down_is_a_finding_and_one_that_counts_errors_a_note(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver()
    driver.links = {(0, 0): True, (0, 5): False, (1, 0): True}
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    watchdog = LinkWatchdog("h", "nvlink", NvmlLinks(), {}, boot="b")
    assert watchdog.look() == Look()
    driver.links[1, 0] = False
    driver.replays = 7
    assert set(watchdog.look().notes) == {
        f"NVLink {place}: replay went from 0 to 7"
        for place in ("0000:00:00/0", "0000:00:00/5", "0000:01:00/0")
    }
    found = [found.evidence for _ in range(4) for found in watchdog.look().findings]
    assert [(one.device, one.text) for one in found] == [
        ("0000:01:00/0", "NVLink 0000:01:00/0 was active and is INACTIVE now")
    ]


def test_the_nvlinks_of_a_lost_gpu_are_not_listed_and_a_host_without_any_is_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver()
    driver.links = {(0, 0): True, (1, 0): True}
    driver.lost = {1}
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    assert NvmlLinks().read() == [Link(name="NVLink 0000:00:00/0", state="ACTIVE", counters={"replay": 0})]
    driver.links.clear()
    with pytest.raises(UnknownHealth, match="no GPU has NVLinks"):
        NvmlLinks().read()


@pytest.mark.gpu
def test_a_real_driver_answers_what_it_is_asked() -> None:
    gpus = NvmlGpus().read()
    assert gpus
    for gpu in gpus:
        assert len(gpu.device) == len("0000:3b:00")
        assert gpu.uncorrected is not None  # every GPU that this is for has ECC
        assert gpu.remap_failed is not None


# ---------------------------------------------------------------- ports


class Adapters:
    """As the kernel shows them."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def set(self, name: str, state: str, link_downed: int = 0) -> None:
        device, _, port = name.partition("/")
        path = self.root / device / "ports" / port
        (path / "counters").mkdir(parents=True, exist_ok=True)
        (path / "state").write_text(f"{state}\n")
        (path / "counters" / "link_downed").write_text(f"{link_downed}\n")

    def watchdog(self, memory: Mapping[str, Any] | None = None) -> LinkWatchdog:
        return LinkWatchdog("h", "nic", Ports(self.root), memory or {}, boot="b")


@pytest.fixture
def adapters(tmp_path: Path) -> Adapters:
    return Adapters(tmp_path / "infiniband")


def test_a_port_that_was_active_and_stays_down_is_a_finding_and_one_that_never_was_is_none(
    adapters: Adapters,
) -> None:
    watchdog = adapters.watchdog()
    adapters.set("mlx5_0/1", "4: ACTIVE")
    adapters.set("mlx5_1/1", "1: DOWN")
    assert watchdog.look() == Look()
    adapters.set("mlx5_0/1", "1: DOWN")
    assert [len(watchdog.look().findings) for _ in range(5)] == [0, 0, 1, 0, 0]
    adapters.set("mlx5_0/1", "4: ACTIVE")
    assert watchdog.look().notes == ("port mlx5_0/1 is up again",)
    adapters.set("mlx5_0/1", "2: INIT")
    ids = {found.evidence.id for _ in range(4) for found in watchdog.look().findings}
    assert ids == {"h/nic/b-mlx5_0/1-2"}  # another time than the first


def test_a_link_that_trained_again_is_a_note(adapters: Adapters) -> None:
    watchdog = adapters.watchdog()
    adapters.set("mlx5_0/1", "4: ACTIVE", link_downed=3)
    watchdog.look()
    adapters.set("mlx5_0/1", "1: DOWN", link_downed=4)
    assert watchdog.look() == Look(notes=("port mlx5_0/1: link_downed went from 3 to 4",))
    adapters.set("mlx5_0/1", "4: ACTIVE", link_downed=4)
    assert watchdog.look() == Look()


def test_a_watchdog_that_was_started_again_knows_which_ports_were_active(adapters: Adapters) -> None:
    adapters.set("mlx5_0/1", "4: ACTIVE")
    first = adapters.watchdog()
    first.look()
    adapters.set("mlx5_0/1", "1: DOWN")
    second = adapters.watchdog(json.loads(json.dumps(first.memory())))
    (found,) = [found for _ in range(3) for found in second.look().findings]
    assert (found.type, found.evidence.device) == (EventType.NODE_CHECK, "mlx5_0/1")


def test_a_host_without_adapters_is_unknown(tmp_path: Path) -> None:
    with pytest.raises(UnknownHealth, match="no network adapters under"):
        Ports(tmp_path / "none").read()
