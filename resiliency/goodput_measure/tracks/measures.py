# SPDX-License-Identifier: Apache-2.0
"""Figures that are kept up to date value by value: a median, and the length of a union of intervals."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable
from operator import itemgetter

#: A chunk that grows longer is split, so that a value costs the move of some kilobytes at most.
_LONGEST = 1024
_HIGHEST = itemgetter(-1)


class RunningMedian:
    """The median of whole numbers, which are kept in order, 8 bytes each."""

    def __init__(self) -> None:
        self._chunks: list[array[int]] = []  # none is empty

    def add(self, values: Iterable[int]) -> None:
        chunks = self._chunks
        if not chunks:
            ordered = array("q", sorted(values))
            chunks += (ordered[at : at + _LONGEST] for at in range(0, len(ordered), _LONGEST))
            return
        for value in values:
            place = bisect_left(chunks, value, hi=len(chunks) - 1, key=_HIGHEST)
            chunk = chunks[place]
            insort(chunk, value)
            if len(chunk) > _LONGEST:
                half = len(chunk) // 2
                chunks[place : place + 1] = chunk[:half], chunk[half:]

    @property
    def median(self) -> float | None:
        """None without values."""
        count = sum(map(len, self._chunks))
        return (self._at((count - 1) // 2) + self._at(count // 2)) / 2 if count else None

    def _at(self, index: int) -> int:
        for chunk in self._chunks:
            if index < len(chunk):
                return chunk[index]
            index -= len(chunk)
        raise IndexError(index)


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
