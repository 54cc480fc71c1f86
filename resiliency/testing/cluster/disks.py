# SPDX-License-Identifier: Apache-2.0
"""What lies on the disks of a cluster, seen without the engine's help."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def copies_on(root: Path, step: int) -> dict[str, list[str]]:
    """Which hosts hold a committed copy of another host's checkpoint of `step`, by its owner.

    Args:
        root: of the cluster, with a directory for each host.
    """
    found: dict[str, list[str]] = {}
    for holder, where in _committed(root, step):
        if where.parent.name == "replicas":
            found.setdefault(where.name, []).append(holder)
    return found


def own_on(root: Path, step: int) -> list[str]:
    """Which hosts hold their own checkpoint of `step`, committed."""
    return [host for host, where in _committed(root, step) if where.parent.name != "replicas"]


def _committed(root: Path, step: int) -> Iterator[tuple[str, Path]]:
    """Host and directory of each checkpoint of `step` that has its manifest and no marker."""
    name = f"step={step}"
    for host in sorted(os.listdir(root)):
        # Unlike a glob, this passes over what is deleted meanwhile.
        for path, directories, _ in os.walk(root / host / "disk"):
            manifest, marker = Path(path, name, "manifest.json"), Path(path, f"{name}-unfinished")
            # In this order: the marker is there before the manifest is.
            if name in directories and manifest.exists() and not marker.exists():
                yield host, Path(path)
