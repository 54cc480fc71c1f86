# SPDX-License-Identifier: Apache-2.0
"""Figures that are kept up to date value by value: a median, and the length of a union of intervals."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right, insort

#: A chunk that grows longer is split, so that a value costs the move of some kilobytes at most.
_LONGEST = 1024


class SortedValues:
    """Whole numbers in order, in chunks."""

    def __init__(self) -> None:
        self._chunks: list[array[int]] = []
        self._highest: list[int] = []  # of each chunk
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def lowest(self) -> int:
        return self._chunks[0][0]

    @property
    def highest(self) -> int:
        return self._highest[-1]

    def add(self, value: int) -> None:
        self._count += 1
        if not self._chunks:
            self._chunks.append(array("q", (value,)))
            self._highest.append(value)
            return
        place = min(bisect_left(self._highest, value), len(self._chunks) - 1)
        chunk = self._chunks[place]
        insort(chunk, value)
        self._highest[place] = chunk[-1]
        if len(chunk) > _LONGEST:
            half = len(chunk) // 2
            self._chunks[place : place + 1] = chunk[:half], chunk[half:]
            self._highest[place : place + 1] = chunk[half - 1], chunk[-1]

    def remove(self, value: int) -> None:
        """Remove `value`, which is there."""
        place = bisect_left(self._highest, value)
        chunk = self._chunks[place]
        del chunk[bisect_left(chunk, value)]
        self._count -= 1
        if chunk:
            self._highest[place] = chunk[-1]
        else:
            del self._chunks[place], self._highest[place]


class RunningMedian:
    """The median of whole numbers that come and go."""

    def __init__(self) -> None:
        self._low, self._high = SortedValues(), SortedValues()  # as many, or one more low one

    def add(self, value: int) -> None:
        (self._low if len(self._low) and value <= self._low.highest else self._high).add(value)
        self._balance()

    def remove(self, value: int) -> None:
        """Remove `value`, which is there."""
        (self._low if value <= self._low.highest else self._high).remove(value)
        self._balance()

    @property
    def median(self) -> float | None:
        """None without values."""
        if not self._low:
            return None
        if len(self._low) > len(self._high):
            return self._low.highest
        return (self._low.highest + self._high.lowest) / 2

    def _balance(self) -> None:
        while len(self._low) < len(self._high):
            self._low.add(moved := self._high.lowest)
            self._high.remove(moved)
        while len(self._low) > len(self._high) + 1:
            self._high.add(moved := self._low.highest)
            self._low.remove(moved)


class TimeUnion:
    """The time that any of several intervals covers, in microseconds."""

    def __init__(self) -> None:
        self.total = 0
        self._starts: list[int] = []
        self._ends: list[int] = []

    def add(self, start: int, end: int) -> None:
        """Cover [start, end)."""
        low, high = bisect_left(self._ends, start), bisect_right(self._starts, end)
        if low < high:
            start, end = min(start, self._starts[low]), max(end, self._ends[high - 1])
            for place in range(low, high):
                self.total -= self._ends[place] - self._starts[place]
        self._starts[low:high] = (start,)
        self._ends[low:high] = (end,)
        self.total += end - start

    def cut(self, at: int) -> None:
        """Cover nothing from `at` on."""
        first = bisect_right(self._ends, at)
        for place in range(first, len(self._starts)):
            self.total -= self._ends[place] - self._starts[place]
        begun = self._starts[first] if first < len(self._starts) else at
        del self._starts[first:], self._ends[first:]
        if begun < at:
            self.add(begun, at)
