# SPDX-License-Identifier: Apache-2.0
"""One decision while it is being made: reads see its own writes, and all of it is applied or none."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from supervisor.decision.guards import View
from supervisor.decision.state import Account, Change, Incident, State
from supervisor.policy.thresholds import Thresholds
from supervisor.values import Command, Event, HostInfo, WorkloadInfo


@dataclass(frozen=True)
class Decision:
    """What came of one input: log `changes` first, then carry out `commands`; `notes` say why, for people."""

    state: State
    changes: tuple[Change, ...]
    commands: tuple[Command, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class EventReport:
    """What a policy sees: one event of an incident, and what is known of its job and host."""

    event: Event
    incident: Incident
    workload: WorkloadInfo | None
    host: HostInfo | None


class Turn:
    """The state of one decision, its time and its epoch.

    Args:
        shadow: commands are noted and not given.
        mine: see `State.with_changes`.
    """

    def __init__(
        self,
        state: State,
        epoch: int,
        now: float,
        limits: Thresholds,
        *,
        shadow: bool = False,
        mine: set[str] | None = None,
    ) -> None:
        self.state = state
        self.epoch = epoch
        self.now = now
        self.limits = limits
        self.shadow = shadow
        self._mine = set() if mine is None else mine
        self.changes: dict[tuple[str, str], Any] = {}
        self.commands: list[Command] = []
        self.notes: list[str] = []
        # Of the policy's present call: whether a rung was taken, now or as soon as the guards allow.
        self.settled = False

    @property
    def view(self) -> View:
        return View(state=self.state, now=self.now, limits=self.limits)

    def put(self, table: str, key: str, row: Any) -> None:
        """Write one row; None deletes it."""
        if getattr(self.state, table).get(key) == row:
            return
        self.changes[table, key] = row
        self.state = self.state.with_changes(((table, key, row),), self._mine)

    def next_id(self, counter: str, prefix: str) -> str:
        fleet = self.view.fleet
        number = getattr(fleet, counter) + 1
        self.put(
            "fleet",
            "",
            replace(fleet, incidents=number) if counter == "incidents" else replace(fleet, commands=number),
        )
        return f"{prefix}{number}{fleet.series}"

    def account(self, workload: str) -> Account:
        return self.view.account(workload)

    def decision(self) -> Decision:
        changes = tuple((table, key, row) for (table, key), row in self.changes.items())
        return Decision(self.state, changes, tuple(self.commands), tuple(self.notes))
