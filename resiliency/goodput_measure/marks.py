# SPDX-License-Identifier: Apache-2.0
"""What the events of a rank leave behind: 25 bytes each, because a log holds one for every step.

`Marks` is a sequence of `Mark` values that stores columns.  A file of 100 MB becomes some 15 MB, and a
search for a kind of event is a search in bytes.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, overload

from resiliency.events import EventType

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
_CODES = {kind: code for code, kind in enumerate(RANK_TYPES)}
_NONE = -1


class Mark(NamedTuple):
    """What the ledger needs of a rank's event.  Microseconds; `time` since the epoch."""

    time: int
    type: EventType
    step: int | None = None
    duration: int | None = None  # of a finished step
    tier: str | None = None  # of a loaded checkpoint


class Marks(Sequence[Mark]):
    """Marks of one rank, in columns.  What `sort` promises holds for the marks of a `Life`."""

    __slots__ = ("_codes", "_durations", "_steps", "_tiers", "_times")

    def __init__(self) -> None:
        self._times = array("q")
        self._codes = bytearray()
        self._steps = array("q")
        self._durations = array("q")
        self._tiers: dict[int, str] = {}  # by index; only loads have one

    def append(self, mark: Mark) -> None:
        time, kind, step, duration, tier = mark
        if tier is not None:
            self._tiers[len(self._codes)] = tier
        self._times.append(time)
        self._codes.append(_CODES[kind])
        self._steps.append(_NONE if step is None else step)
        self._durations.append(_NONE if duration is None else duration)

    def extend(self, others: Marks) -> None:
        """Append all of `others`."""
        for index, tier in others._tiers.items():
            self._tiers[len(self._codes) + index] = tier
        self._times += others._times
        self._codes += others._codes
        self._steps += others._steps
        self._durations += others._durations

    def __len__(self) -> int:
        return len(self._codes)

    @overload
    def __getitem__(self, index: int) -> Mark: ...

    @overload
    def __getitem__(self, index: slice) -> Marks: ...

    def __getitem__(self, index: int | slice) -> Mark | Marks:
        if isinstance(index, slice):
            return self._subset(range(*index.indices(len(self))))
        index = range(len(self))[index]  # negative ones, and the IndexError
        step, duration = self._steps[index], self._durations[index]
        return Mark(
            self._times[index],
            RANK_TYPES[self._codes[index]],
            None if step == _NONE else step,
            None if duration == _NONE else duration,
            self._tiers.get(index),
        )

    def rows(self, start: int = 0) -> Iterator[tuple[int, EventType, int | None, int | None]]:
        """(time, type, step, duration) of the marks from `start` on: as iteration, but cheaper."""
        columns: Iterable[Sequence[int]] = (self._times, self._codes, self._steps, self._durations)
        if start:
            columns = (column[start:] for column in columns)
        for time, code, step, duration in zip(*columns, strict=True):
            yield (
                time,
                RANK_TYPES[code],
                None if step == _NONE else step,
                None if duration == _NONE else duration,
            )

    def sort(self) -> None:
        """Order by time, and by the life of a rank at equal times; keeps the order of equal ones."""
        keys = list(zip(self._times, self._codes, strict=True))
        if keys == sorted(keys):
            return
        order = sorted(range(len(self)), key=keys.__getitem__)
        sorted_marks = self._subset(order)
        self._times, self._codes = sorted_marks._times, sorted_marks._codes
        self._steps, self._durations = sorted_marks._steps, sorted_marks._durations
        self._tiers = sorted_marks._tiers

    def step_durations(self, start: int = 0) -> Iterator[int]:
        """Of the steps from index `start` on: as measured, or from the end of the one before."""
        code = _CODES[EventType.STEP_FINISHED]
        before = self._codes.rfind(code, 0, start) if start else -1
        previous = None if before < 0 else self._times[before]
        at = self._codes.find(code, start)
        while at >= 0:
            if self._durations[at] != _NONE:
                yield self._durations[at]
            elif previous is not None:
                yield self._times[at] - previous
            previous = self._times[at]
            at = self._codes.find(code, at + 1)

    def finished_steps(self, start: int = 0) -> list[int]:
        """Numbers of the steps that finished from index `start` on, of those that have one."""
        code = _CODES[EventType.STEP_FINISHED]
        columns = zip(self._codes[start:], self._steps[start:], strict=True)
        return [step for of, step in columns if of == code and step != _NONE]

    def index_of(self, *types: EventType, start: int = 0) -> int | None:
        """Index of the first mark of one of `types`, from `start` on."""
        found: int | None = None
        for kind in types:
            # Only what is before the best one counts: a kind that is missing costs no look at the rest.
            at = self._codes.find(_CODES[kind], start, found)
            if at >= 0:
                found = at
        return found

    def last_index_of(self, type: EventType, until: int | None = None) -> int | None:
        """Index of the last mark of `type` before index `until`."""
        at = self._codes.rfind(_CODES[type], 0, until)
        return None if at < 0 else at

    def first_after(self, types: int) -> int | None:
        """Time of the first mark of another type than the first `types` of `RANK_TYPES`."""
        for index, code in enumerate(self._codes):
            if code >= types:
                return self._times[index]
        return None

    def has_types_below(self, types: int, start: int) -> bool:
        """Whether a mark from `start` on is of one of the first `types` of `RANK_TYPES`."""
        return any(code < types for code in self._codes[start:])

    def first_tier(self) -> str | None:
        """The tier of the first loaded checkpoint that names one."""
        return next((tier for _, tier in sorted(self._tiers.items()) if tier), None)

    # A mark costs ten times as much as one of its fields.

    def time_of(self, index: int) -> int:
        return self._times[index]

    def step_of(self, index: int) -> int | None:
        step = self._steps[index]
        return None if step == _NONE else step

    def type_of(self, index: int) -> EventType:
        return RANK_TYPES[self._codes[index]]

    def of_type(self, type: EventType) -> Iterator[Mark]:
        """The marks of one type, in order."""
        at = self._codes.find(_CODES[type])
        while at >= 0:
            yield self[at]
            at = self._codes.find(_CODES[type], at + 1)

    # For these the marks must be sorted.

    def first(self, type: EventType) -> int | None:
        """Time of the first mark of `type`."""
        index = self._codes.find(_CODES[type])
        return None if index < 0 else self._times[index]

    def index_after(self, time: int) -> int:
        """Index of the first mark that is later than `time`."""
        return bisect_right(self._times, time)

    def count_of(self, type: EventType, after: int, until: int) -> int:
        """Marks of `type` after one time, and not after another."""
        low, high = bisect_right(self._times, after), bisect_right(self._times, until)
        return self._codes.count(_CODES[type], low, high)

    def follows(self, other: Marks) -> bool:
        """Whether the marks come after those of `other`, which may have none."""
        if not other or not self:
            return True
        return (other._times[-1], other._codes[-1]) <= (self._times[0], self._codes[0])

    def _subset(self, order: Sequence[int]) -> Marks:
        subset = Marks()
        subset._times = array("q", map(self._times.__getitem__, order))
        subset._codes = bytearray(map(self._codes.__getitem__, order))
        subset._steps = array("q", map(self._steps.__getitem__, order))
        subset._durations = array("q", map(self._durations.__getitem__, order))
        if self._tiers:
            tiers = ((place, self._tiers.get(index)) for place, index in enumerate(order))
            subset._tiers = {place: tier for place, tier in tiers if tier is not None}
        return subset
