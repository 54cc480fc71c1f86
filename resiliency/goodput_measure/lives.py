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
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta, timezone
from typing import NamedTuple

from resiliency.events import EventType, RunEvent
from resiliency.goodput_measure.marks import RANK_TYPES, Mark, Marks

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MICROSECOND = timedelta(microseconds=1)

#: So many of the types of marks, process_started and imported, a standby process reaches without work.
_BEFORE_WORK = 2
_RESUMING = (EventType.STEP_FINISHED, EventType.CHECKPOINT_LOADED)
#: Stages of a restart that a life reaches.
REACHED = (
    EventType.IMPORTED,
    EventType.INITIALIZED,
    EventType.CHECKPOINT_LOADED,
    EventType.STEP_FINISHED,
)
STEPPING = (EventType.STEP_FINISHED, EventType.STEP_STARTED)
_RANK_TYPES = frozenset(RANK_TYPES)
#: A longer step is damage, and as a whole number it must fit into 64 bits.
_LONGEST_US = 2**53


def to_us(time: datetime) -> int:
    """Microseconds since the epoch, exactly."""
    since = time - _EPOCH
    return (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds


def from_us(time_us: int) -> datetime:
    """Aware UTC of `time_us`."""
    return _EPOCH + time_us * _MICROSECOND


class Life:
    """One process of one rank; `marks` are sorted and never empty.

    A life may grow: `grow` appends what the process said next.
    """

    __slots__ = (
        "_checked",
        "_first_step",
        "_resumed_from",
        "_top",
        "attempt",
        "is_monotone",
        "marks",
        "rank",
        "working",
    )

    def __init__(self, rank: int, attempt: int | None, marks: Marks) -> None:
        self.rank = rank
        self.attempt = attempt
        self.marks = marks
        #: First sign that the process works for the job and does not stand by.
        self.working = self._work_began()
        #: Whether no step that it finished is below one before it, of those that were looked at.
        self.is_monotone = True
        self._first_step: int | None = None
        self._resumed_from: int | None = None
        self._checked = 0  # marks whose steps were looked at
        self._top: int | None = None  # highest step of these

    def grow(self, marks: Marks) -> Growth:
        """Append marks that follow those of this life, and hold no other process."""
        start, working, last, known = len(self.marks), self.working, self.last, self.resumed_from
        is_standby = self.marks.first_after(_BEFORE_WORK) is None
        self.marks.extend(marks)
        if is_standby:
            self.working = self._work_began()
        return Growth(self, start, working, last, self.resumed_from if known is None else None)

    def _work_began(self) -> int:
        began = self.marks.first_after(_BEFORE_WORK)
        return self.last if began is None else began

    @property
    def order(self) -> tuple[int, int, int]:
        """By what the lives of a rank are sorted."""
        return self.working, self.last, self.marks.time_of(0)

    @property
    def last(self) -> int:
        """Last sign of life."""
        return self.marks.time_of(-1)

    @property
    def finished(self) -> int | None:
        """When the rank ended by its own will; None when it did not say so."""
        return self.first(EventType.RANK_FINISHED)

    @property
    def first_step(self) -> int | None:
        """Index of the first mark of a step."""
        if self._first_step is None:
            self._first_step = self.marks.index_of(*STEPPING)
        return self._first_step

    def first(self, type: EventType) -> int | None:
        """Time of the first mark of `type`."""
        return self.marks.first(type)

    @property
    def first_step_started(self) -> int | None:
        """When the first step began, as said or as its duration tells."""
        index = self.first_step
        if index is None:
            return None
        mark = self.marks[index]
        return mark.time - (mark.duration or 0)  # a step that started has none

    @property
    def resumed_from(self) -> int | None:
        """The step that this life continued; inferred from its first step when nothing was said."""
        if self._resumed_from is None:
            at = self.marks.index_of(*_RESUMING)
            while at is not None:
                if (step := self.marks.step_of(at)) is not None:
                    self._resumed_from = step - (self.marks.type_of(at) is EventType.STEP_FINISHED)
                    break
                at = self.marks.index_of(*_RESUMING, start=at + 1)
        return self._resumed_from

    def finished_step(self, until: int) -> tuple[int | None, int | None]:
        """When the last step that ended by `until` did so, and the highest step that had ended by then."""
        high = self.marks.index_after(until)
        at = self.marks.last_index_of(EventType.STEP_FINISHED, high)
        if at is None:
            return None, None
        self.check_steps()
        step = self.marks.step_of(at)
        if step is None or not self.is_monotone:
            step = max(self.marks[:high].finished_steps(), default=None)
        return self.marks.time_of(at), step

    def check_steps(self) -> None:
        """Bring `is_monotone` up to date."""
        if self._checked == len(self.marks):
            return
        steps = self.marks.finished_steps(self._checked)
        if self._top is not None:
            steps.insert(0, self._top)
        if steps:
            self.is_monotone = self.is_monotone and steps == sorted(steps)
            self._top = max(steps)
        self._checked = len(self.marks)


class Growth(NamedTuple):
    """A life that has new marks, from index `start` on; one that begins has no other ones.

    Attributes:
        working: when it seemed to begin to work before.
        last: its last sign of life before, or its first one.
        resumed_from: the step that it continued, where that is known now and was not before.
    """

    life: Life
    start: int
    working: int
    last: int
    resumed_from: int | None

    @classmethod
    def of_new(cls, life: Life) -> Growth:
        return cls(life, 0, life.working, life.marks.time_of(0), life.resumed_from)

    @property
    def tells_of_start(self) -> bool:
        """Whether the new marks tell more of how the life came up than those before."""
        marks, start = self.life.marks, self.start
        return (
            self.resumed_from is not None
            or self.life.working != self.working
            or marks.index_of(EventType.CHECKPOINT_LOADED, start=start) is not None
            or any((at := marks.index_of(kind)) is not None and at >= start for kind in REACHED)
        )


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
    lives = [life for attempt, of in by_attempt.items() for life in lives_of(rank, attempt, of)]
    return sorted(lives, key=lambda life: life.order)


def lives_of(rank: int, attempt: int | None, marks: Marks) -> Iterator[Life]:
    """The lives of one attempt of one rank, in order; sorts the marks that it is given."""
    marks.sort()
    begin = 0
    while begin < len(marks):
        end = marks.index_of(EventType.PROCESS_STARTED, start=begin + 1)
        yield Life(rank, attempt, marks if begin == 0 and end is None else marks[begin:end])
        begin = len(marks) if end is None else end


def _duration_us(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if not (math.isfinite(value) and value >= 0):
        return None
    return duration if (duration := round(value * 1_000_000)) <= _LONGEST_US else None
