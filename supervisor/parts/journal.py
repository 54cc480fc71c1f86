# SPDX-License-Identifier: Apache-2.0
"""What happened lately, read off the records of the event log: incidents, commands and notes.

The controller's state forgets an incident when it ends; people want to see it afterwards.  A journal is made
from records alone, so after a restart it is what it was, as far back as the log goes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

from supervisor.decision.state import Flight, Incident
from supervisor.event_log import Record
from supervisor.values import Command, CommandKind, Outcome, OutcomeStatus

T = TypeVar("T")

#: Closed incidents, ended commands and notes that are kept.
INCIDENTS, COMMANDS, NOTES = 50, 200, 200

#: Commands that go with an action and are none of their own.
_BESIDE = (CommandKind.DUMP_STACKS, CommandKind.CORDON_HOST)


@dataclass(frozen=True, kw_only=True)
class PastIncident:
    """An incident as it was last, and when it closed; None while it is open."""

    incident: Incident
    closed_at: float | None = None


@dataclass(frozen=True, kw_only=True)
class PastCommand:
    """A command, when it was decided, and how and when it ended; None while it is under way."""

    command: Command
    at: float
    ended_at: float | None = None
    outcome: Outcome | None = None


@dataclass(frozen=True, kw_only=True)
class Span:
    """A part of an incident's time on the log's clock; `end` is None while it lasts."""

    name: str
    begin: float
    end: float | None


class Journal:
    """Takes records in their order."""

    def __init__(self) -> None:
        self.incidents: dict[str, PastIncident] = {}  # by id
        self.commands: dict[str, PastCommand] = {}  # by id
        self.notes: deque[tuple[float, str]] = deque(maxlen=NOTES)
        self._open: dict[str, str] = {}  # subject: id

    def copy(self) -> Journal:
        """As it is now; what is added later is not in it."""
        copy = Journal()
        copy.incidents, copy.commands, copy.notes = (
            dict(self.incidents),
            dict(self.commands),
            self.notes.copy(),
        )
        return copy

    def add(self, record: Record) -> None:
        self.notes.extend((record.now, note) for note in record.notes)
        for table, key, row in record.changes:
            if table == "incidents":
                self._take_incident(key, row, record.now)
            elif table == "commands":
                self._take_command(key, row, record)

    def _take_incident(self, subject: str, row: Incident | None, now: float) -> None:
        if row is not None:
            self._open[subject] = row.id
            self.incidents[row.id] = PastIncident(incident=row)
            return
        past = self.incidents.get(self._open.pop(subject, ""))
        if past is not None:
            self.incidents[past.incident.id] = replace(past, closed_at=now)
            _drop_oldest(self.incidents, INCIDENTS + len(self._open))

    def _take_command(self, id: str, row: Flight | None, record: Record) -> None:
        if row is not None:
            self.commands[id] = PastCommand(command=row.command, at=row.at)
            return
        past = self.commands.get(id)
        if past is not None:
            if record.kind == "Outcome" and record.given["command"] == id:
                outcome = Outcome.from_dict(record.given)
            else:  # the actuator withdraws it, or its outcome changes nothing any more
                epoch, withdrawn = past.command.epoch, OutcomeStatus.WITHDRAWN
                outcome = Outcome(command=id, epoch=epoch, status=withdrawn, text="not waited for")
            self.commands[id] = replace(past, ended_at=record.now, outcome=outcome)
            _drop_oldest(self.commands, COMMANDS)

    def spans(self, incident: Incident, closed_at: float | None) -> Iterator[Span]:
        """What the time of an incident went into, without gaps."""
        actions = sorted(
            (
                past
                for past in self.commands.values()
                if past.command.incident == incident.id and past.command.kind not in _BESIDE
            ),
            key=lambda past: past.at,
        )
        yield Span(name="gathered", begin=incident.opened_at, end=actions[0].at if actions else closed_at)
        for number, past in enumerate(actions):
            yield Span(name=past.command.kind.value, begin=past.at, end=past.ended_at)
            if past.ended_at is not None:
                later = actions[number + 1].at if number + 1 < len(actions) else closed_at
                yield Span(name="first step", begin=past.ended_at, end=later)


def _drop_oldest(table: dict[str, T], most: int) -> None:
    while len(table) > most:
        del table[next(iter(table))]
