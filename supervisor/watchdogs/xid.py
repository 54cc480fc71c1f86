# SPDX-License-Identifier: Apache-2.0
"""Xids in a kernel log: NVIDIA's driver reports there what went wrong, and on which GPU.

What an Xid asks for is not decided here; see `supervisor.policy.xid`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from supervisor.values import EventType, Evidence, Finding
from supervisor.watchdogs.kernel_log import FROM_THE_BEGINNING, KernelLog, Line, open_log
from supervisor.watchdogs.watchdog import Look, UnknownHealth, short_text

#: Announces the driver's own recovery action.
RECOVERY_ACTION_CHANGED = 154
#: NVML's numbers of recovery actions, which Xid 154 uses too, in the words of `policy.xid.ADVICE`.
ACTIONS = {
    0: "none",
    1: "gpu_reset",
    2: "node_reboot",
    3: "drain_p2p",
    4: "drain_and_reset",
    5: "recover_imex_domain",
    6: "bus_reset",
    7: "system_reboot",
}

# Only what the kernel itself can have written: another program's text that holds these words is no Xid.
_PREFIX = r"""
    (?: \[ [^\]]{1,40} \] \s                                        # dmesg, also with -T
    | (?: \w{3} \s [ \d]\d \s [\d:]{8} | \d{4}-\S{10,40} ) \s \S+ \s kernel: \s (?: \[ [ \d.]+ \] \s? )?
    | \d+,\d+,\d+,[^;]{1,40};                                       # a record of /dev/kmsg, saved as it is
    )?
"""
_XID = re.compile(
    _PREFIX
    + r"""NVRM: \s Xid \s \( (?:PCI:)? (?P<bus> [0-9A-Fa-f]{4,8} : [0-9A-Fa-f]{2} : [0-9A-Fa-f]{2} )
    [^)]{0,40} \) : \s (?P<code> \d{1,4} ) (?! \d ) (?: , \s* (?P<why> .* ) )? $""",
    re.VERBOSE,
)
_NEW_ACTION = re.compile(r"changed from \S+ \(.*?\) to (0x[0-9A-Fa-f]{1,4})\b")


@dataclass(frozen=True, kw_only=True)
class Xid:
    """One Xid.  `device` is the GPU's place on the bus, `advice` a word of `ACTIONS` or empty."""

    device: str
    code: int
    advice: str = ""


def parse_xid(text: str) -> Xid | None:
    """The Xid that a line of a kernel log reports; None for every other line."""
    if "NVRM: Xid" not in text:
        return None
    match = _XID.match(text.rstrip("\r"))
    if match is None:
        return None
    code, advice = int(match["code"]), ""
    if code == RECOVERY_ACTION_CHANGED and (action := _NEW_ACTION.search(match["why"] or "")):
        advice = ACTIONS.get(int(action[1], 16), "")
    return Xid(device=short_bus_id(match["bus"]), code=code, advice=advice)


def short_bus_id(bus: str) -> str:
    """``0000:3b:00``: kernel log and NVML write the domain with four or eight digits, and in either case."""
    domain, colon, rest = bus.lower().partition(":")
    return f"{domain[-4:].rjust(4, '0')}{colon}{rest.partition('.')[0]}"


class XidWatchdog:
    """Args:
    host: begins the ids of findings.
    path: of the kernel log.
    memory: of the watchdog before this one.
    """

    def __init__(self, host: str, path: str, memory: Mapping[str, Any]) -> None:
        self._host, self._path, self._memory = host, path, memory
        self._log: KernelLog | None = None

    def look(self) -> Look:
        if self._log is None:
            if not self._memory and not os.path.exists(self._path):
                self._memory = FROM_THE_BEGINNING
            self._log = open_log(self._path, self._memory)
        try:
            read = self._log.read_lines()
        except UnknownHealth:
            self._memory = self._log.memory()
            self.close()
            raise
        return Look(findings=find_xids(self._host, read.lines), notes=tuple(read.notes))

    def memory(self) -> Mapping[str, Any]:
        return self._memory if self._log is None else self._log.memory()

    def descriptor(self) -> int | None:
        return None if self._log is None else self._log.descriptor()

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None


def find_xids(host: str, lines: Sequence[Line]) -> tuple[Finding, ...]:
    """A finding for each Xid in `lines`.

    The driver announces what it wants done about a GPU after the Xids that made it want that: the last such
    advice goes with those before it, because it has seen the registers.
    """
    found = [(line, xid) for line in lines if (xid := parse_xid(line.text)) is not None]
    advice: dict[str, str] = {}
    findings: list[Finding] = []
    for line, xid in reversed(found):
        if xid.advice:
            advice.setdefault(xid.device, xid.advice)
        wanted = advice.get(xid.device, "")
        evidence = Evidence(
            id=f"{host[:180]}/xid/{line.id}",
            witness="xid",
            text=short_text(line.text),
            age_s=line.age_s,
            code=xid.code,
            device=xid.device,
            # Advice to do nothing takes nothing back from an Xid before it.
            advice=xid.advice or ("" if wanted == "none" else wanted),
        )
        findings.append(Finding(type=EventType.XID, evidence=evidence))
    return tuple(reversed(findings))
