# SPDX-License-Identifier: Apache-2.0
"""Ports of InfiniBand and RoCE adapters, as the kernel shows them under ``/sys/class/infiniband``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from supervisor.watchdogs.links import Link
from supervisor.watchdogs.watchdog import UnknownHealth

PORTS = Path("/sys/class/infiniband")
_COUNTERS = ("link_downed", "local_link_integrity_errors", "excessive_buffer_overrun_errors")


class Ports:
    """Args:
    root: where the adapters are shown.
    """

    def __init__(self, root: Path = PORTS) -> None:
        self._root = root

    def read(self) -> Sequence[Link]:
        paths = sorted(self._root.glob("*/ports/*"))
        if not paths:
            raise UnknownHealth(f"no network adapters under {self._root}")
        return [
            Link(
                name=f"port {path.parent.parent.name}/{path.name}",
                state=_read(path / "state").rpartition(": ")[2],
                counters={
                    counter: int(text)
                    for counter in _COUNTERS
                    if (text := _read(path / "counters" / counter)).isdecimal()
                },
            )
            for path in paths
        ]


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
