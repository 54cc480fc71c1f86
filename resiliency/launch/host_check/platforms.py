# SPDX-License-Identifier: Apache-2.0
"""Platforms: hosts whose devices must compute the same bits from the same numbers.

A processor's model name does not tell: generations share one in a cloud, a hypervisor masks instructions, and
libraries choose by instructions, by their own version and by environment variables.  All of these are part of
a platform, and results of two platforms are not compared.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from pathlib import Path

#: Lines of /proc/cpuinfo by which processors differ, on x86, Arm and others.  Clock rates are not among them.
_FIELDS = frozenset(
    (
        "vendor_id", "cpu family", "model", "model name", "stepping", "flags",
        "CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision", "Features",
        "cpu", "revision", "isa", "uarch",
    )
)  # fmt: skip
#: Variables that begin so steer a library for linear algebra.
_STEERING = (
    "ATEN_", "BLIS_", "CUBLAS", "DNNL_", "MKL_", "NVIDIA_TF32", "ONEDNN_", "OPENBLAS_", "TORCH_ALLOW_TF32",
    "TORCH_BLAS_",
)  # fmt: skip
_MODEL_NAMES = ("model name", "cpu", "uarch", "CPU part")


def processor_platform(cpuinfo: str, build: str, environ: Mapping[str, str]) -> str:
    """The platform of a processor.

    Args:
        cpuinfo: text of /proc/cpuinfo; may be empty.
        build: version and settings of torch and its libraries.
    """
    kinds = set()
    for block in cpuinfo.split("\n\n"):
        pairs = (line.partition(":")[::2] for line in block.splitlines())
        kinds.add(
            tuple(sorted((name.strip(), value.strip()) for name, value in pairs if name.strip() in _FIELDS))
        )
    first = dict(max(kinds, default=()))
    name = next((first[name] for name in _MODEL_NAMES if name in first), platform.machine())
    return f"{name} ({_digest(sorted(kinds), build, environ)})"


def gpu_platform(device: str, build: str, environ: Mapping[str, str]) -> str:
    """The platform of a GPU; `device` is its name and shape."""
    return f"{device} ({_digest(device, build, environ)})"


def read_cpuinfo() -> str:
    """Empty where it cannot be read."""
    try:
        return Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return ""


def _digest(device: object, build: str, environ: Mapping[str, str]) -> str:
    steered = sorted((name, value) for name, value in environ.items() if name.startswith(_STEERING))
    return hashlib.sha256(json.dumps([device, build, steered]).encode()).hexdigest()[:8]
