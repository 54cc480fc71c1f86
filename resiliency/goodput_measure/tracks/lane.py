# SPDX-License-Identifier: Apache-2.0
"""A lane that grows: it is cut where something became known, and goes on from there."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence

from resiliency.goodput_measure.lanes import PRIORITY, Bucket, Row, Spans

_KEPT, _LOST, _HELD = (PRIORITY[of] for of in (Bucket.KEPT_STEPS, Bucket.LOST_STEPS, Bucket.SAVE_HELD))
_STEPS = (_KEPT, _LOST)


class GrowingLane(Spans):
    """The spans of one rank from its first sign of life on, with the sum of what was kept before each.

    Attributes:
        holds: spans in which a save held training.
    """

    __slots__ = ("_first_step", "_kept", "holds")

    def __init__(self) -> None:
        super().__init__(0)
        self.holds = 0
        self._kept = array("q")
        self._first_step: int | None = None  # place of the first span in which a step was done

    def cut(self, at: int) -> list[Row]:
        """Remove all that is not before `at`, and return it."""
        if at >= self._end:
            return []
        first = max(bisect_right(self._starts, at) - 1, 0)
        removed = [(low, high, cause) for low, high, cause in self._rows_from(first, at) if low < high]
        first += first < len(self) and self._starts[first] < at
        self.holds -= self._causes.count(_HELD, first)
        del self._starts[first:], self._causes[first:], self._kept[first:]
        self._end = at
        if self._first_step is not None and self._first_step >= first:
            self._first_step = None
        return removed

    def extend(self, rows: Sequence[Row]) -> None:
        """Append rows of which each begins where the one before it ends, and the first at the end."""
        if not rows:
            return
        starts, causes, sums = self._starts, self._causes, self._kept
        kept, last = self._kept_until(rows[0][0]), causes[-1] if causes else -1
        for low, high, cause in rows:
            if cause != last:
                if cause == _HELD:
                    self.holds += 1
                elif self._first_step is None and cause in _STEPS:
                    self._first_step = len(causes)
                starts.append(low)
                causes.append(cause)
                sums.append(kept)
                last = cause
            if cause == _KEPT:
                kept += high - low
        self._end = rows[-1][1]

    @property
    def first_step_at(self) -> int | None:
        """When the first step began."""
        return None if self._first_step is None else self._starts[self._first_step]

    def kept_before(self, time: int) -> int:
        """How much of the time before `time` was kept, in microseconds."""
        return self._kept_until(min(time, self._end))

    def _kept_until(self, time: int) -> int:
        """As `kept_before`; what goes on at the end is taken to last until `time`."""
        place = bisect_left(self._starts, time) - 1
        if place < 0:
            return 0
        inside = time - self._starts[place] if self._causes[place] == _KEPT else 0
        return self._kept[place] + inside

    def _rows_from(self, first: int, at: int) -> Iterator[Row]:
        for place in range(first, len(self)):
            high = self._starts[place + 1] if place + 1 < len(self) else self._end
            yield max(self._starts[place], at), high, self._causes[place]
