# SPDX-License-Identifier: Apache-2.0
"""A lane that grows: it is cut where something became known, and goes on from there."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from resiliency.goodput_measure.lanes import PRIORITY, Bucket, Row, Spans

_KEPT, _LOST, _HELD = (PRIORITY[of] for of in (Bucket.KEPT_STEPS, Bucket.LOST_STEPS, Bucket.SAVE_HELD))


class GrowingLane(Spans):
    """The spans of one rank from its first sign of life on, with their sums.

    Attributes:
        totals: microseconds of each cause, in the order of `Bucket`.
    """

    __slots__ = ("_holds", "_kept", "totals")

    def __init__(self) -> None:
        super().__init__(0)
        self.totals = [0] * len(PRIORITY)
        self._holds = 0  # spans in which a save held training
        self._kept = array("q")  # for each span, what was kept before it

    def cut(self, at: int) -> None:
        """Remove all that is not before `at`."""
        if at >= self._end:
            return
        for low, high, cause in self.between(at, self._end):
            self.totals[cause] -= high - low
        first = bisect_left(self._starts, at)
        self._holds -= self._causes.count(_HELD, first)
        del self._starts[first:], self._causes[first:], self._kept[first:]
        self._end = at

    def extend(self, rows: Sequence[Row]) -> None:
        """Append rows of which each begins where the one before it ends, and the first at the end."""
        if not rows:
            return
        starts, causes, sums, totals = self._starts, self._causes, self._kept, self.totals
        last = causes[-1] if causes else -1
        for low, high, cause in rows:
            if cause != last:
                self._holds += cause == _HELD
                starts.append(low)
                causes.append(cause)
                sums.append(totals[_KEPT])
                last = cause
            totals[cause] += high - low
        self._end = rows[-1][1]

    @property
    def first_step_at(self) -> int | None:
        """When the first step began."""
        first = min((at for of in (_KEPT, _LOST) if (at := self._causes.find(of)) >= 0), default=None)
        return None if first is None else self._starts[first]

    def holds_before(self, time: int) -> int:
        """Spans in which a save held training, of those that began before `time`."""
        return self._holds - self._causes.count(_HELD, bisect_left(self._starts, time))

    def kept_before(self, time: int) -> int:
        """How much of the time before `time` was kept, in microseconds."""
        place = bisect_right(self._starts, time) - 1
        if place < 0:
            return 0
        inside = min(time, self._end) - self._starts[place] if self._causes[place] == _KEPT else 0
        return self._kept[place] + inside
