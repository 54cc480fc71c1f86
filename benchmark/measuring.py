# SPDX-License-Identifier: Apache-2.0
"""What every measurement asks and says: numbers of rounds and the like, and the machine that it ran on."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
from pathlib import Path

import psutil

from resiliency.events import JsonValue


def count(text: str) -> int:
    """A flag's value: how many."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, found {text!r}")
    return int(text)


def machine() -> dict[str, JsonValue]:
    """What a reader needs to know to compare figures; taken before the runs, which are a load themselves."""
    facts: dict[str, JsonValue] = {
        "cores": os.cpu_count(),
        "cpu": _cpu_model(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load_1min": round(os.getloadavg()[0], 2),
        "kernel": platform.release().partition("-")[0],
        "python": platform.python_version(),
    }
    for package in ("torch", "nvidia-resiliency-ext", "dlrover", "nemo_toolkit", "megatron-core"):
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            facts[package] = None
    return facts


def file_system(path: Path) -> str | None:
    """Type of the file system that holds `path`."""
    mounts = {Path(part.mountpoint): part.fstype for part in psutil.disk_partitions(all=True)}
    for parent in (path.resolve(), *path.resolve().parents):
        if parent in mounts:
            return str(mounts[parent])
    return None


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
