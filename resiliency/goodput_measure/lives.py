# SPDX-License-Identifier: Apache-2.0
"""One rank's process lives, rebuilt from events that may be late, missing or out of order.

A life is one training process: it is created, imports, initializes, restores, steps, ends.  The
attempt number alone does not name it (a job that is started anew counts attempts from 0 again),
and time alone does not either (a standby process is created and imported during the life before
its own).  So events are grouped by attempt, split where a second process appears within one
attempt number, and the lives are then ordered by when they began to do the job's work.

Times are whole microseconds since the epoch: sums of whole numbers are exact.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

from resiliency.events import EventType, RunEvent
from resiliency.goodput_measure.marks import RANK_TYPES, Mark, Marks

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MICROSECOND = timedelta(microseconds=1)

#: A standby process reaches these before it is given work.
_BEFORE_WORK = frozenset({EventType.PROCESS_STARTED, EventType.IMPORTED})
STEPPING = (EventType.STEP_STARTED, EventType.STEP_FINISHED)
_RANK_TYPES = frozenset(RANK_TYPES)
#: A longer step is damage, and as a whole number it must fit into 64 bits.
_LONGEST_US = 2**53


def to_us(time: datetime) -> int:
    """Microseconds since the epoch, exactly."""
    return (time - _EPOCH) // _MICROSECOND


def from_us(time_us: int) -> datetime:
    """Aware UTC of `time_us`."""
    return _EPOCH + time_us * _MICROSECOND


@dataclass(frozen=True)
class Life:
    """One process of one rank; `marks` are sorted and never empty."""

    rank: int
    attempt: int | None
    marks: Marks

    @property
    def last(self) -> int:
        """Last sign of life."""
        return self.marks[-1].time

    @property
    def working(self) -> int:
        """First sign that the process works for the job and does not stand by."""
        return next((time for time, kind, *_ in self.marks.rows() if kind not in _BEFORE_WORK), self.last)

    @property
    def finished(self) -> int | None:
        """When the rank ended by its own will; None when it did not say so."""
        return self.first(EventType.RANK_FINISHED)

    @property
    def stepped(self) -> bool:
        return self.marks.index_of(*STEPPING) is not None

    def first(self, type: EventType) -> int | None:
        """Time of the first mark of `type`."""
        return self.marks.first(type)

    @property
    def first_step_started(self) -> int | None:
        """When the first step began, as said or as its duration tells."""
        index = self.marks.index_of(*STEPPING)
        if index is None:
            return None
        mark = self.marks[index]
        return mark.time if mark.type is EventType.STEP_STARTED else mark.time - (mark.duration or 0)

    @property
    def resumed_from(self) -> int | None:
        """The step that this life continued; inferred from its first step when nothing was said."""
        for _, kind, step, _ in self.marks.rows():
            if step is not None:
                if kind is EventType.CHECKPOINT_LOADED:
                    return step
                if kind is EventType.STEP_FINISHED:
                    return step - 1
        return None


def mark_of(event: RunEvent, time: int | None = None) -> Mark | None:
    """The mark that `event` leaves on its rank; None when it leaves none.

    Args:
        time: of the event, for callers that have it in microseconds.
    """
    if event.rank is None or event.type not in _RANK_TYPES:
        return None
    duration = tier = None
    if event.type is EventType.STEP_FINISHED:
        duration = _duration_us(event.fields.get("duration_s"))
    elif event.type is EventType.CHECKPOINT_LOADED:
        tier = str(event.fields["tier"]) if "tier" in event.fields else None
    return Mark(to_us(event.time) if time is None else time, event.type, event.step, duration, tier)


def split_lives(rank: int, marks: Iterable[tuple[int | None, Mark]]) -> list[Life]:
    """Order the (attempt, mark) pairs of one rank into its lives."""
    by_attempt: dict[int | None, Marks] = defaultdict(Marks)
    for attempt, mark in marks:
        by_attempt[attempt].append(mark)
    return lives_of(rank, by_attempt)


def lives_of(rank: int, by_attempt: Mapping[int | None, Marks]) -> list[Life]:
    """The lives of one rank in order; sorts the marks that it is given."""
    lives = []
    for attempt, marks in by_attempt.items():
        marks.sort()
        begin = 0
        while begin < len(marks):
            end = marks.index_of(EventType.PROCESS_STARTED, start=begin + 1)
            lives.append(Life(rank, attempt, marks if begin == 0 and end is None else marks[begin:end]))
            begin = len(marks) if end is None else end
    return sorted(lives, key=lambda life: (life.working, life.last))


def _duration_us(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if not (math.isfinite(value) and value >= 0):
        return None
    return duration if (duration := round(value * 1_000_000)) <= _LONGEST_US else None
