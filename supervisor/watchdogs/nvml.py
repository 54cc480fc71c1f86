# SPDX-License-Identifier: Apache-2.0
"""Read the GPUs' health and links through NVML (``nvidia-ml-py``), in the process of the watchdog only.

A driver that does not know a question leaves its answer unknown; NVML's own errors become `UnknownHealth`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from supervisor.watchdogs.ecc import GpuHealth
from supervisor.watchdogs.links import ACTIVE, Link
from supervisor.watchdogs.watchdog import UnknownHealth
from supervisor.watchdogs.xid import ACTIONS, short_bus_id

T = TypeVar("T")


#: Counters of an NVLink, by the names that NVML's constants have.
_LINK_COUNTERS = ("replay", "recovery", "crc_flit", "crc_data")


class _Nvml(Generic[T]):
    """Loads the library with the first reading, and again after one that failed."""

    def __init__(self) -> None:
        self._nvml: Any = None

    def read(self) -> Sequence[T]:
        nvml = self._load()
        try:
            return self._read(nvml)
        except nvml.NVMLError as error:
            self._nvml = None
            raise UnknownHealth(f"NVML: {error}") from error

    def _read(self, nvml: Any) -> Sequence[T]:
        raise NotImplementedError

    def _load(self) -> Any:
        if self._nvml is None:
            try:
                import pynvml
            except ImportError as error:
                raise UnknownHealth(
                    "NVML: nvidia-ml-py is not installed: pip install 'resiliency[watchdogs]'"
                ) from error
            try:
                pynvml.nvmlInit()
            except pynvml.NVMLError as error:
                raise UnknownHealth(f"NVML: {error}") from error
            self._nvml = pynvml
        return self._nvml


class NvmlGpus(_Nvml[GpuHealth]):
    """The GPUs of this host, with what their driver can tell of each."""

    def __init__(self) -> None:
        super().__init__()
        self._devices: dict[int, str] = {}  # by index: one that is lost does not say where it was

    def _read(self, nvml: Any) -> Sequence[GpuHealth]:
        return [self._read_one(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]

    def _read_one(self, nvml: Any, index: int) -> GpuHealth:
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            bus = nvml.nvmlDeviceGetPciInfo(handle).busId
        except nvml.NVMLError as error:
            if error.value != nvml.NVML_ERROR_GPU_IS_LOST or index not in self._devices:
                raise
            return GpuHealth(device=self._devices[index], lost=True)
        device = self._devices[index] = _place(bus)
        ask = partial(_ask, nvml)
        try:
            remapped = ask(lambda: nvml.nvmlDeviceGetRemappedRows(handle))
            return GpuHealth(
                device=device,
                uncorrected=ask(
                    lambda: int(
                        nvml.nvmlDeviceGetTotalEccErrors(
                            handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
                        )
                    )
                ),
                sram_threshold=ask(lambda: _sram_threshold(nvml, handle)),
                # Corrected and uncorrected rows, then whether one is pending, and whether one failed.
                remap_pending=None if remapped is None else bool(remapped[2]),
                remap_failed=None if remapped is None else bool(remapped[3]),
                action=ask(lambda: _action(nvml, handle)),
            )
        except nvml.NVMLError as error:
            if error.value != nvml.NVML_ERROR_GPU_IS_LOST:
                raise
            return GpuHealth(device=device, lost=True)


class NvmlLinks(_Nvml[Link]):
    """NVLinks of all GPUs that answer; those of a lost one are not listed."""

    def _read(self, nvml: Any) -> Sequence[Link]:
        links: list[Link] = []
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                device = _place(nvml.nvmlDeviceGetPciInfo(handle).busId)
                for number in range(nvml.NVML_NVLINK_MAX_LINKS):
                    state = _ask(nvml, partial(nvml.nvmlDeviceGetNvLinkState, handle, number))
                    if state is None:  # there is no such link
                        continue
                    counters = {
                        name: _ask(nvml, partial(_link_counter, nvml, handle, number, name))
                        for name in _LINK_COUNTERS
                    }
                    links.append(
                        Link(
                            name=f"NVLink {device}/{number}",
                            state=ACTIVE if state == nvml.NVML_FEATURE_ENABLED else "INACTIVE",
                            counters={name: count for name, count in counters.items() if count is not None},
                        )
                    )
            except nvml.NVMLError as error:
                if error.value != nvml.NVML_ERROR_GPU_IS_LOST:
                    raise
        if not links:
            raise UnknownHealth("NVML: no GPU has NVLinks")
        return links


def _ask(nvml: Any, question: Callable[[], T]) -> T | None:
    """The answer, or None where this GPU or driver does not know the question."""
    try:
        return question()
    except nvml.NVMLError as error:
        if error.value == nvml.NVML_ERROR_GPU_IS_LOST:
            raise
        return None
    except AttributeError:
        return None  # a binding that is older than the question


def _place(bus: bytes | str) -> str:
    return short_bus_id(bus.decode() if isinstance(bus, bytes) else bus)


def _link_counter(nvml: Any, handle: Any, link: int, name: str) -> int:
    counter = getattr(nvml, f"NVML_NVLINK_ERROR_DL_{name.upper()}")
    return int(nvml.nvmlDeviceGetNvLinkErrorCounter(handle, link, counter))


def _sram_threshold(nvml: Any, handle: Any) -> bool:
    status = nvml.c_nvmlEccSramErrorStatus_v1_t()
    nvml.nvmlDeviceGetSramEccErrorStatus(handle, ctypes.byref(status))
    return bool(status.bThresholdExceeded)


def _action(nvml: Any, handle: Any) -> str | None:
    (value,) = nvml.nvmlDeviceGetFieldValues(handle, [nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
    if value.nvmlReturn != nvml.NVML_SUCCESS:
        return None
    return ACTIONS.get(int(value.value.uiVal))
