# SPDX-License-Identifier: Apache-2.0
"""One rank: its lives so far, and its lane, of which only what may have changed is painted again.

A lane consists of territories, one for each life: from when it took over to when the next one did.  What a
territory shows depends on its life, on the life after it, on incidents and starts of workers at that time,
and on the steps that were continued later.  So new marks of the last life change its territory alone, and of
that the part after the last finished step.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple

from resiliency.events import EventType
from resiliency.goodput_measure.lanes import Painter, least, sweep
from resiliency.goodput_measure.lives import Growth, Life, lives_of
from resiliency.goodput_measure.marks import Marks
from resiliency.goodput_measure.tracks.lane import GrowingLane

#: So many of the types of marks belong to the time before the first step.
_BEFORE_STEPS = 5
_BEGINNING = -(2**63)
_ORDER, _WORKING = attrgetter("order"), attrgetter("working")


class _Territory(NamedTuple):
    """What the territory of a life was painted from.

    Attributes:
        marks: number of them.
        begin: when the life took over.
        edge: the same, but not before the edge of the life before it.
        limit: the least step that was continued after the life.
    """

    marks: int
    begin: int
    edge: int
    limit: int | None


class RankTrack:
    """The lives of a rank, in their order, and their lane."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.lives: list[Life] = []
        self.lane = GrowingLane()
        self._newest: dict[int | None, Life] = {}  # of each attempt
        self._painted: list[_Territory] = []  # of the first lives
        self._changed = 0  # the first life whose territory may have changed

    def is_followed_by(self, pending: dict[int | None, Marks]) -> bool:
        """Whether these marks, by attempt, come after those of the same processes; sorts them."""
        for marks in pending.values():
            marks.sort()
        return all(
            (newest := self._newest.get(attempt)) is None or marks.follows(newest.marks)
            for attempt, marks in pending.items()
        )

    def take(self, pending: dict[int | None, Marks]) -> list[Growth]:
        """Add marks by attempt that come after those before; returns what grew."""
        grown: list[Growth] = []
        fresh: list[Life] = []
        for attempt, marks in pending.items():
            if (newest := self._newest.get(attempt)) is not None:
                own = marks.index_of(EventType.PROCESS_STARTED)  # from here on they are of other processes
                if own != 0:
                    grown.append(self._grow(newest, marks if own is None else marks[:own]))
                marks = Marks() if own is None else marks[own:]
            for life in lives_of(self.rank, attempt, marks):
                self._newest[attempt] = life
                fresh.append(life)
                grown.append(Growth.of_new(life))
        if fresh:
            fresh.sort(key=_ORDER)
            known = len(self.lives)
            self.change_from(known - 1)
            self.lives += fresh
            self._sort_from(known)
        for growth in grown:
            if growth.resumed_from is not None:
                self.change_resumes(growth.resumed_from)
        return grown

    def change_from(self, index: int) -> None:
        self._changed = max(min(self._changed, index), 0)

    def change_after(self, time: int) -> None:
        """Something else than marks became known about the job at `time`."""
        self.change_from(bisect_left(self.lives, time, key=_WORKING) - 1)

    def change_resumes(self, step: int, until: int | None = None) -> None:
        """A life continued from `step`: one of this rank, or one of another that began work by `until`."""
        for index in reversed(range(len(self._painted))):
            limit = self._painted[index].limit
            if limit is not None and limit <= step:
                return  # as are those before it: limits ascend
            if until is None or self.lives[index].last < until:
                self.change_from(index)

    def repaint(self, painter: Painter) -> int | None:
        """Bring the lane up to date; returns from when on it is another, None where it is not."""
        lives, first = self.lives, self._changed
        if first >= len(lives):
            return None
        limits: list[int | None] = []
        limit: int | None = None
        for life in reversed(lives[first:]):
            limit = least(limit, painter.resumes.least_after(life.last))
            limits.append(limit)
            limit = least(limit, life.resumed_from)
        if self._painted:
            _, begin, edge, _ = self._painted[first]
        else:
            begin = edge = painter.begin(lives[0], None)
        changed_at = _BEGINNING  # the first life may be another one than it was, and have begun later
        for index in range(first, len(lives)):
            life, limit = lives[index], limits.pop()
            following = lives[index + 1] if index + 1 < len(lives) else None
            end = painter.end(life, following)
            next_begin = begin if following is None else painter.begin(following, end)
            high = None if following is None else max(edge, next_begin)
            after = self._painted_until(index, limit) if index == first else None
            low = edge if after is None else life.marks.time_of(after)
            rows = painter.paint(
                life, begin=begin, end=end, limit=limit, after=after,
                following=None if following is None else (following, next_begin),
            )  # fmt: skip
            if index == first:
                if index or after is not None:
                    changed_at = low
                self.lane.cut(changed_at)
                del self._painted[first:]
            if high is None:
                high = max((row[1] for row in rows), default=low)
            self.lane.extend(sweep(rows, low, high))
            self._painted.append(_Territory(len(life.marks), begin, edge, limit))
            begin, edge = next_begin, high
        self._changed = len(lives)
        return changed_at

    def _painted_until(self, index: int, limit: int | None) -> int | None:
        """Index of the mark of a finished step up to which the lane stays as it is; None without one."""
        if index >= len(self._painted):
            return None
        life, was = self.lives[index], self._painted[index]
        if life.marks.has_types_below(_BEFORE_STEPS, was.marks):
            return None
        at = life.marks.last_index_of(EventType.STEP_FINISHED, was.marks)
        if limit != was.limit:  # then steps beyond it are lost, which are the last ones in most lives
            life.check_steps()
            while at is not None and ((step := life.marks.step_of(at)) is None or step > (limit or 0)):
                at = life.marks.last_index_of(EventType.STEP_FINISHED, at)
        if at is None or (limit != was.limit and not life.is_monotone):
            return None
        return at if life.marks.time_of(at) >= was.edge else None

    def _grow(self, life: Life, marks: Marks) -> Growth:
        growth = life.grow(marks)
        index = next(place for place in reversed(range(len(self.lives))) if self.lives[place] is life)
        self.change_from(index - (life.working != growth.working))
        self._sort_from(index)
        return growth

    def _sort_from(self, index: int) -> None:
        """Put the lives in their order, where those from `index` on are not."""
        around = self.lives[max(index - 1, 0) :]
        if all(_ORDER(one) <= _ORDER(other) for one, other in pairwise(around)):
            return
        before = list(self.lives)
        self.lives.sort(key=_ORDER)
        first = next(place for place, life in enumerate(self.lives) if life is not before[place])
        del self._painted[first:]
        self.change_from(first - 1)
