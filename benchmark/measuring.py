# SPDX-License-Identifier: Apache-2.0
"""What every measurement asks, says and needs: numbers of rounds, the machine that it ran on, free ports."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import socket
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


def free_ports(count: int) -> list[int]:
    """Ports of this machine that were free a moment ago."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()


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
