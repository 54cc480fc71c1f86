# SPDX-License-Identifier: Apache-2.0
"""Ports of InfiniBand and RoCE adapters, as the kernel shows them under ``/sys/class/infiniband``.

A port that was active and stays down is a finding; a link that went down and came back is a note, because
the collective library has lived through it or the job's own hang detection has not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from supervisor.values import EventType, Evidence, Finding
from supervisor.watchdogs.watchdog import Look, UnknownHealth, boot_id

PORTS = Path("/sys/class/infiniband")
#: Looks in a row that must see a port down: links train again within seconds.
DOWN_LOOKS = 3
_COUNTERS = ("link_downed", "local_link_integrity_errors", "excessive_buffer_overrun_errors")


class NicWatchdog:
    """Args:
    host: begins the ids of findings.
    root: where the adapters are shown.
    """

    def __init__(self, host: str, memory: Mapping[str, Any], *, root: Path = PORTS, boot: str = "") -> None:
        self._host, self._root, self._boot = host, root, boot or boot_id()
        self._down: dict[str, int] = {}
        known = memory if memory.get("boot") == self._boot else {}
        #: Ports that were active at some time, and how often each of them was reported.
        self._active: dict[str, int] = dict(known.get("active", {}))
        self._counters: dict[str, int] = {}

    def look(self) -> Look:
        ports = list(self._ports())
        if not ports:
            raise UnknownHealth(f"no network adapters under {self._root}")
        findings: list[Finding] = []
        notes: list[str] = []
        for name, path in ports:
            state = _read(path / "state").rpartition(": ")[2]
            if not state:
                notes.append(f"port {name} cannot be read")
                continue
            notes += self._count(name, path)
            if state == "ACTIVE":
                self._active.setdefault(name, 0)
                if self._down.pop(name, 0) >= DOWN_LOOKS:
                    notes.append(f"port {name} is up again")
            elif name in self._active:
                self._down[name] = self._down.get(name, 0) + 1
                if self._down[name] == DOWN_LOOKS:
                    self._active[name] += 1
                    findings.append(self._finding(name, state))
        return Look(findings=tuple(findings), notes=tuple(notes))

    def _ports(self) -> Iterator[tuple[str, Path]]:
        for path in sorted(self._root.glob("*/ports/*")):
            yield f"{path.parent.parent.name}/{path.name}", path

    def _count(self, name: str, path: Path) -> Iterator[str]:
        for counter in _COUNTERS:
            text = _read(path / "counters" / counter)
            if not text.isdecimal():
                continue
            key, value = f"{name} {counter}", int(text)
            if value > self._counters.get(key, value):
                yield f"port {name}: {counter} went from {self._counters[key]} to {value}"
            self._counters[key] = value

    def _finding(self, name: str, state: str) -> Finding:
        evidence = Evidence(
            id=f"{self._host[:180]}/nic/{self._boot}-{name}-{self._active[name]}",
            witness="nic",
            text=f"port {name} was active and is {state} now",
            device=name,
        )
        return Finding(type=EventType.NODE_CHECK, evidence=evidence)

    def memory(self) -> Mapping[str, Any]:
        return {"boot": self._boot, "active": self._active} if self._active else {}

    def descriptor(self) -> int | None:
        return None


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
