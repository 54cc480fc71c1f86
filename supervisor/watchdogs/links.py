# SPDX-License-Identifier: Apache-2.0
"""Links of a host that were active and stay down: network ports, and the NVLinks of its GPUs.

A link that was active and stays down is a finding; one that went down and came back is a note, because
the collective library has lived through it or the job's own hang detection has not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from supervisor.values import EventType, Evidence, Finding
from supervisor.watchdogs.watchdog import Look, boot_id

ACTIVE = "ACTIVE"
#: Looks in a row that must see a link down: links train again within seconds.
DOWN_LOOKS = 3


@dataclass(frozen=True, kw_only=True)
class Link:
    """One link at one moment.

    Attributes:
        name: stays the same; begins with what the link is, such as "port".
        state: ACTIVE, or another word; "" where it cannot be read, from which nothing is concluded.
        counters: of errors, those that can be read.
    """

    name: str
    state: str
    counters: Mapping[str, int] = field(default_factory=dict)


class Links(Protocol):
    def read(self) -> Sequence[Link]:
        """All links of this host.  May block for ever; raises UnknownHealth where there is no answer."""


class LinkWatchdog:
    """Args:
    host: begins the ids of findings.
    witness: the watchdog's name.
    memory: of the process before this one.
    """

    def __init__(
        self, host: str, witness: str, links: Links, memory: Mapping[str, Any], *, boot: str = ""
    ) -> None:
        self._host, self._witness, self._links = host, witness, links
        self._boot = boot or boot_id()
        self._down: dict[str, int] = {}
        known = memory if memory.get("boot") == self._boot else {}
        #: Links that were active at some time, and how often each of them was reported.
        self._active: dict[str, int] = dict(known.get("active", {}))
        self._counters: dict[tuple[str, str], int] = {}

    def look(self) -> Look:
        findings: list[Finding] = []
        notes: list[str] = []
        for link in self._links.read():
            if not link.state:
                notes.append(f"{link.name} cannot be read")
                continue
            notes += self._count(link)
            if link.state == ACTIVE:
                self._active.setdefault(link.name, 0)
                if self._down.pop(link.name, 0) >= DOWN_LOOKS:
                    notes.append(f"{link.name} is up again")
            elif link.name in self._active:
                self._down[link.name] = self._down.get(link.name, 0) + 1
                if self._down[link.name] == DOWN_LOOKS:
                    self._active[link.name] += 1
                    findings.append(self._finding(link))
        return Look(findings=tuple(findings), notes=tuple(notes))

    def _count(self, link: Link) -> Iterator[str]:
        for counter, value in link.counters.items():
            before = self._counters.get((link.name, counter), value)
            if value > before:
                yield f"{link.name}: {counter} went from {before} to {value}"
            self._counters[link.name, counter] = value

    def _finding(self, link: Link) -> Finding:
        place = link.name.partition(" ")[2]
        evidence = Evidence(
            id=f"{self._host[:180]}/{self._witness}/{self._boot}-{place}-{self._active[link.name]}",
            witness=self._witness,
            text=f"{link.name} was active and is {link.state} now",
            device=place,
        )
        return Finding(type=EventType.NODE_CHECK, evidence=evidence)

    def memory(self) -> Mapping[str, Any]:
        return {"boot": self._boot, "active": self._active} if self._active else {}

    def descriptor(self) -> int | None:
        return None
