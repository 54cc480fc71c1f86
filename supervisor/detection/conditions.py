# SPDX-License-Identifier: Apache-2.0
"""Conditions: each is told by its events from its beginning to its end, which withdraws their evidence."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from typing import TypeVar

from supervisor.values import Change, Event, EventType, Evidence, LauncherState

T = TypeVar("T")

#: Ids of evidence that a sensor concluded, as `Conditions.evidence` makes them.
_CONCLUDED = re.compile(r"([^:/]+):\d+/\d+")

#: Events that are no condition (an Xid, a change of a node) are repeated that long in a snapshot.
_RECENT_S = 600.0
#: Events of one condition that are kept until it ends: one for each worker of a host.
_EVENTS = 64
#: Findings and withdrawn evidence that are remembered: memory has a bound, daemons have none.
_REMEMBERED = 10_000


class Conditions:
    """What one detector has told, and what of it still holds.

    Args:
        incarnation: event ids begin with it.
    """

    def __init__(self, incarnation: str) -> None:
        self._incarnation = incarnation
        #: Run of each job now.
        self.runs: dict[str, str] = {}
        self._events = 0
        self._open: dict[tuple[str, str], list[Event]] = {}
        self._recent: list[tuple[float, Event]] = []
        self._findings: dict[str, None] = {}
        self._withdrawn: dict[str, None] = {}
        self._losses: dict[str, float] = {}  # when evidence confirmed that a job lacks a host

    def event(
        self,
        type: EventType,
        evidence: tuple[Evidence, ...],
        *,
        workload: str = "",
        host: str = "",
        ranks: tuple[int, ...] = (),
        attempt: int = 0,
        launcher: LauncherState = LauncherState.UNKNOWN,
        change: Change | None = None,
    ) -> Event:
        self._events += 1
        return Event(
            id=f"{self._incarnation}:{self._events}",
            type=type,
            evidence=evidence,
            workload=workload,
            host=host,
            ranks=ranks,
            attempt=attempt,
            launcher=launcher,
            change=change,
            run=self.runs.get(workload, ""),
        )

    def evidence(self, *texts: str, age_s: float = 0.0) -> tuple[Evidence, ...]:
        """Each text begins with its witness and a colon."""
        return tuple(
            Evidence(
                id=f"{self._incarnation}:{self._events + 1}/{index}",
                witness=text.partition(":")[0].split()[0],
                text=text,
                age_s=age_s,
            )
            for index, text in enumerate(texts)
        )

    def keep_recent(self, event: Event, time: float) -> Event:
        self._recent = [(at, each) for at, each in self._recent[-1000:] if time - at < _RECENT_S]
        self._recent.append((time, event))
        return event

    def keep_open(self, condition: tuple[str, str], event: Event) -> None:
        """A condition may be told of more than once before it ends: one rank after the other."""
        events = self._open.setdefault(condition, [])
        events.append(event)
        del events[:-_EVENTS]

    def close(self, condition: tuple[str, str]) -> None:
        for event in self._open.pop(condition, ()):
            for evidence in event.evidence:
                _remember(self._withdrawn, evidence.id, None)

    def is_new_finding(self, id: str) -> bool:
        """Whether evidence of this id was not remembered yet: findings are repeated in each report."""
        return id not in self._findings

    def remember_finding(self, id: str) -> None:
        _remember(self._findings, id, None)

    def is_withdrawn(self, id: str) -> bool:
        return id in self._withdrawn

    def is_foreign(self, id: str) -> bool:
        """Whether another sensor concluded it, so that nobody here withdraws it."""
        concluded = _CONCLUDED.fullmatch(id)
        return concluded is not None and concluded[1] != self._incarnation

    def note_loss(self, event: Event, time: float) -> None:
        for evidence in event.evidence if event.confirms_loss or event.ends_attempt else ():
            _remember(self._losses, evidence.id, time)

    def lost_at(self, ids: Iterable[str]) -> float:
        """When evidence of `ids` that still holds last confirmed that the job lacks a host."""
        known = (self._losses.get(each, -math.inf) for each in ids if each not in self._withdrawn)
        return max(known, default=-math.inf)

    def reported(self, time: float) -> Iterator[Event]:
        """Events of open conditions, and those of late that are none."""
        for events in self._open.values():
            yield from events
        yield from (event for at, event in self._recent if time - at < _RECENT_S)


def _remember(memory: dict[str, T], id: str, value: T) -> None:
    memory[id] = value
    if len(memory) > _REMEMBERED:
        del memory[next(iter(memory))]
