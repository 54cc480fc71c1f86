# SPDX-License-Identifier: Apache-2.0
"""What the events of a rank leave behind: 25 bytes each, because a log holds one for every step.

`Marks` is a sequence of `Mark` values that stores columns.  A file of 100 MB becomes some 15 MB, and a
search for a kind of event is a search in bytes.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
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

    def __init__(self, marks: Iterable[Mark] = ()) -> None:
        self._times = array("q")
        self._codes = bytearray()
        self._steps = array("q")
        self._durations = array("q")
        self._tiers: dict[int, str] = {}  # by index; only loads have one
        for mark in marks:
            self.append(mark)

    def append(self, mark: Mark) -> None:
        time, kind, step, duration, tier = mark
        if tier is not None:
            self._tiers[len(self._codes)] = tier
        self._times.append(time)
        self._codes.append(_CODES[kind])
        self._steps.append(_NONE if step is None else step)
        self._durations.append(_NONE if duration is None else duration)

    def __len__(self) -> int:
        return len(self._codes)

    @overload
    def __getitem__(self, index: int) -> Mark: ...

    @overload
    def __getitem__(self, index: slice) -> Marks: ...

    def __getitem__(self, index: int | slice) -> Mark | Marks:
        if isinstance(index, slice):
            return self._picked(range(*index.indices(len(self))))
        index = range(len(self))[index]  # negative ones, and the IndexError
        step, duration = self._steps[index], self._durations[index]
        return Mark(
            self._times[index],
            RANK_TYPES[self._codes[index]],
            None if step == _NONE else step,
            None if duration == _NONE else duration,
            self._tiers.get(index),
        )

    def __iter__(self) -> Iterator[Mark]:
        for index in range(len(self)):
            yield self[index]

    def rows(self) -> Iterator[tuple[int, EventType, int | None, int | None]]:
        """(time, type, step, duration) of each mark: as iteration, at a third of its price."""
        for time, code, step, duration in zip(
            self._times, self._codes, self._steps, self._durations, strict=True
        ):
            yield (
                time,
                RANK_TYPES[code],
                None if step == _NONE else step,
                None if duration == _NONE else duration,
            )

    def sort(self) -> None:
        """Order by time, and by the life of a rank at equal times; keeps the order of equal ones."""
        times, codes = self._times, self._codes
        if all(a <= b for a, b in pairwise(zip(times, codes, strict=True))):
            return
        order = sorted(range(len(self)), key=lambda index: (times[index], codes[index]))
        sorted_marks = self._picked(order)
        self._times, self._codes = sorted_marks._times, sorted_marks._codes
        self._steps, self._durations = sorted_marks._steps, sorted_marks._durations
        self._tiers = sorted_marks._tiers

    def index_of(self, *types: EventType, start: int = 0) -> int | None:
        """Index of the first mark of one of `types`, from `start` on."""
        found = [at for kind in types if (at := self._codes.find(_CODES[kind], start)) >= 0]
        return min(found, default=None)

    def of_type(self, type: EventType) -> Iterator[Mark]:
        """The marks of one type, in order."""
        at = self._codes.find(_CODES[type])
        while at >= 0:
            yield self[at]
            at = self._codes.find(_CODES[type], at + 1)

    # For these the marks must be sorted.

    def first(self, type: EventType) -> int | None:
        """Time of the first mark of `type`."""
        index = self.index_of(type)
        return None if index is None else self._times[index]

    def last_of(self, type: EventType, until: int) -> int | None:
        """Time of the last mark of `type` that is not after `until`."""
        index = self._codes.rfind(_CODES[type], 0, bisect_right(self._times, until))
        return None if index < 0 else self._times[index]

    def count_of(self, type: EventType, after: int, until: int) -> int:
        """Marks of `type` after one time, and not after another."""
        low, high = bisect_right(self._times, after), bisect_right(self._times, until)
        return self._codes.count(_CODES[type], low, high)

    def highest_step(self, type: EventType, until: int) -> int | None:
        """The highest step of the marks of `type` that are not after `until`."""
        code, high = _CODES[type], bisect_right(self._times, until)
        highest = max(
            (step for step, of in zip(self._steps[:high], self._codes, strict=False) if of == code),
            default=_NONE,
        )
        return None if highest == _NONE else highest

    def _picked(self, order: Sequence[int]) -> Marks:
        picked = Marks()
        picked._times = array("q", map(self._times.__getitem__, order))
        picked._codes = bytearray(map(self._codes.__getitem__, order))
        picked._steps = array("q", map(self._steps.__getitem__, order))
        picked._durations = array("q", map(self._durations.__getitem__, order))
        if self._tiers:
            tiers = ((place, self._tiers.get(index)) for place, index in enumerate(order))
            picked._tiers = {place: tier for place, tier in tiers if tier is not None}
        return picked
