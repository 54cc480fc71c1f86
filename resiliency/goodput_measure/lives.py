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
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import NamedTuple

from resiliency.events import EventType, RunEvent

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MICROSECOND = timedelta(microseconds=1)

#: What the training thread of a rank says; the order settles equal times.
RANK_TYPES = (
    EventType.PROCESS_STARTED,
    EventType.IMPORTED,
    EventType.RESTORE_STARTED,
    EventType.CHECKPOINT_LOADED,
    EventType.INITIALIZED,
    EventType.STEP_STARTED,
    EventType.STEP_FINISHED,
    EventType.SAVE_STARTED,
    EventType.SAVE_RELEASED,
    EventType.RANK_FINISHED,
)
_ORDER = {kind: order for order, kind in enumerate(RANK_TYPES)}
#: A standby process reaches these before it is given work.
_BEFORE_WORK = frozenset({EventType.PROCESS_STARTED, EventType.IMPORTED})
STEPPING = frozenset({EventType.STEP_STARTED, EventType.STEP_FINISHED})


def to_us(time: datetime) -> int:
    """Microseconds since the epoch, exactly."""
    return (time - _EPOCH) // _MICROSECOND


def from_us(time_us: int) -> datetime:
    """Aware UTC of `time_us`."""
    return _EPOCH + time_us * _MICROSECOND


class Mark(NamedTuple):
    """What the ledger needs of a rank's event; small, because a log holds one for every step."""

    time: int
    type: EventType
    step: int | None = None
    duration: int | None = None  # of a finished step
    tier: str | None = None  # of a loaded checkpoint


@dataclass(frozen=True)
class Life:
    """One process of one rank; `marks` are sorted and never empty."""

    rank: int
    attempt: int | None
    marks: tuple[Mark, ...]

    @property
    def last(self) -> int:
        """Last sign of life."""
        return self.marks[-1].time

    @property
    def working(self) -> int:
        """First sign that the process works for the job and does not stand by."""
        return next((mark.time for mark in self.marks if mark.type not in _BEFORE_WORK), self.last)

    @property
    def finished(self) -> int | None:
        """When the rank ended by its own will; None when it did not say so."""
        return self.first(EventType.RANK_FINISHED)

    @property
    def stepped(self) -> bool:
        return any(mark.type in STEPPING for mark in self.marks)

    def first(self, type: EventType) -> int | None:
        """Time of the first mark of `type`."""
        return next((mark.time for mark in self.marks if mark.type is type), None)

    @property
    def first_step_started(self) -> int | None:
        """When the first step began, as said or as its duration tells."""
        for mark in self.marks:
            if mark.type is EventType.STEP_STARTED:
                return mark.time
            if mark.type is EventType.STEP_FINISHED:
                return mark.time - (mark.duration or 0)
        return None

    @property
    def first_step_finished(self) -> int | None:
        return self.first(EventType.STEP_FINISHED)

    @property
    def resumed_from(self) -> int | None:
        """The step that this life continued; inferred from its first step when nothing was said."""
        for mark in self.marks:
            if mark.step is not None:
                if mark.type is EventType.CHECKPOINT_LOADED:
                    return mark.step
                if mark.type is EventType.STEP_FINISHED:
                    return mark.step - 1
        return None


def mark_of(event: RunEvent, time: int | None = None) -> Mark | None:
    """The mark that `event` leaves on its rank; None when it leaves none.

    Args:
        time: of the event, for callers that have it in microseconds.
    """
    if event.rank is None or event.type not in _ORDER:
        return None
    duration = tier = None
    if event.type is EventType.STEP_FINISHED:
        duration = _duration_us(event.fields.get("duration_s"))
    elif event.type is EventType.CHECKPOINT_LOADED:
        tier = str(event.fields["tier"]) if "tier" in event.fields else None
    return Mark(to_us(event.time) if time is None else time, event.type, event.step, duration, tier)


def split_lives(rank: int, marks: Iterable[tuple[int | None, Mark]]) -> list[Life]:
    """Order the (attempt, mark) pairs of one rank into its lives."""
    by_attempt: dict[int | None, list[Mark]] = defaultdict(list)
    for attempt, mark in marks:
        by_attempt[attempt].append(mark)
    lives = []
    for attempt, group in by_attempt.items():
        group.sort(key=lambda mark: (mark.time, _ORDER[mark.type]))
        current: list[Mark] = []
        for mark in group:
            if mark.type is EventType.PROCESS_STARTED and current:
                lives.append(Life(rank, attempt, tuple(current)))
                current = []
            current.append(mark)
        lives.append(Life(rank, attempt, tuple(current)))
    return sorted(lives, key=lambda life: (life.working, life.last))


def _duration_us(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return round(value * 1_000_000) if math.isfinite(value) and value >= 0 else None
