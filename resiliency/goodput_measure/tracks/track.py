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
from typing import NamedTuple

from resiliency.events import EventType
from resiliency.goodput_measure.lanes import Painter, Row, least, sweep
from resiliency.goodput_measure.lives import Life, lives_of
from resiliency.goodput_measure.marks import Marks
from resiliency.goodput_measure.tracks.lane import GrowingLane

#: So many of the types of marks belong to the time before the first step.
_BEFORE_STEPS = 5
_BEGINNING = -(2**63)


class Growth(NamedTuple):
    """A life that has new marks, from index `start` on, and what it was before; a new one as it is.

    Attributes:
        last: its last sign of life before, or its first one.
        resumed_from: the step that it was known to have continued.
    """

    life: Life
    start: int
    working: int
    last: int
    resumed_from: int | None


class RankTrack:
    """`lives` are sorted, and `workings` says when each began to work."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.lives: list[Life] = []
        self.workings: list[int] = []
        self.lane = GrowingLane()
        self._newest: dict[int | None, Life] = {}  # of each attempt
        self._changed = 0  # the first life whose territory may have changed
        # For each life, as it was painted:
        self._painted: list[int] = []  # its marks; 0 where it was not
        self._begins: list[int] = []
        self._edges: list[int] = []  # where its territory begins: these ascend
        self._limits: list[int | None] = []

    def take(self, pending: dict[int | None, Marks]) -> tuple[list[Growth], bool]:
        """Add marks by attempt; returns what grew, and whether all lives are in the order that they had.

        They are not where marks are older than others of their process.  Then nothing that was derived from
        the lives holds.
        """
        grown: list[Growth] = []
        fresh: list[Life] = []
        in_order = True
        for attempt, marks in pending.items():
            marks.sort()
            newest = self._newest.get(attempt)
            if newest is not None and not marks.follows(newest.marks):
                marks, in_order = self._withdraw(attempt, marks), False
            elif newest is not None:
                own = marks.index_of(EventType.PROCESS_STARTED)
                if own != 0:
                    grown.append(self._grow(newest, marks if own is None else marks[:own]))
                marks = Marks() if own is None else marks[own:]
            for life in lives_of(self.rank, attempt, marks):
                self._newest[attempt] = life
                fresh.append(life)
                grown.append(Growth(life, 0, life.working, life.marks.time_of(0), None))
        if fresh:
            fresh.sort(key=_order)
            self.change_from(len(self.lives) - 1)
            self.lives += fresh
            self.workings += (life.working for life in fresh)
            self._sort_from(len(self.lives) - len(fresh))
        return grown, in_order

    def forget(self) -> None:
        """Nothing that was painted holds."""
        self.lane = GrowingLane()
        self._changed = 0
        self._keep_painted(0)

    def change_from(self, index: int) -> None:
        self._changed = max(min(self._changed, index), 0)

    def change_after(self, time: int) -> None:
        """Something else than marks became known about the job at `time`."""
        self.change_from(bisect_left(self.workings, time) - 1)

    def change_resumes(self, until: int, step: int) -> None:
        """Lives that began work by `until` continued from `step` or later ones."""
        for index in reversed(range(len(self._limits))):
            limit = self._limits[index]
            if limit is not None and limit <= step:
                return  # as are those before it: limits ascend
            if self.lives[index].last < until:
                self.change_from(index)

    def repaint(self, painter: Painter) -> tuple[list[Row], list[Row]]:
        """Bring the lane up to date; returns what was removed of it, and what was added."""
        lives, first = self.lives, min(self._changed, max(len(self._begins) - 1, 0))
        if self._changed >= len(lives):
            return [], []
        limits: list[int | None] = []
        limit: int | None = None
        for index in reversed(range(first, len(lives))):
            limit = least(limit, painter.resumes.least_after(lives[index].last))
            limits.append(limit)
            limit = least(limit, lives[index].resumed_from)
        begin = self._begins[first] if self._begins else painter.begin(lives[0], None)
        edge = self._edges[first] if self._edges else begin
        removed: list[Row] = []
        added: list[Row] = []
        for index in range(first, len(lives)):
            life, limit = lives[index], limits.pop()
            following = lives[index + 1] if index + 1 < len(lives) else None
            end = painter.end(life, following)
            next_begin = begin if following is None else painter.begin(following, end)
            high = None if following is None else max(edge, next_begin)
            after = self._painted_until(index, limit, high) if index == first else None
            low = edge if after is None else life.marks.time_of(after)
            rows = painter.paint(
                life, begin=begin, end=end, limit=limit, after=after,
                following=None if following is None else (following, next_begin),
            )  # fmt: skip
            if index == first:
                # The first life may be another one than it was, and have begun later.
                removed = self.lane.cut(low if index or after is not None else _BEGINNING)
                self._keep_painted(first)
            if high is None:
                high = max((row[1] for row in rows), default=low)
            self.lane.extend(swept := sweep(rows, low, high))
            added.extend(swept)
            self._painted.append(len(life.marks))
            self._begins.append(begin)
            self._edges.append(edge)
            self._limits.append(limit)
            begin, edge = next_begin, high
        self._changed = len(lives)
        return removed, added

    def _painted_until(self, index: int, limit: int | None, high: int | None) -> int | None:
        """Index of the mark of a finished step up to which the lane stays as it is; None without one."""
        count = self._painted[index] if index < len(self._painted) else 0
        life = self.lives[index]
        if not count or life.marks.has_types_below(_BEFORE_STEPS, count):
            return None
        at = life.marks.last_index_of(EventType.STEP_FINISHED, count)
        if limit != self._limits[index]:
            life.check_steps()
            first = life.marks.index_of(EventType.STEP_FINISHED)
            if not life.is_monotone or life.marks.index_of(EventType.CHECKPOINT_LOADED, start=first or 0):
                return None
            while at is not None and ((step := life.marks.step_of(at)) is None or step > (limit or 0)):
                at = life.marks.last_index_of(EventType.STEP_FINISHED, at)
        if at is None:
            return None
        time = life.marks.time_of(at)
        ends = [end for end in (high, *self._edges[index + 1 : index + 2]) if end is not None]
        return at if self._edges[index] <= time <= min(ends, default=time) else None

    def _grow(self, life: Life, marks: Marks) -> Growth:
        growth = Growth(life, len(life.marks), life.working, life.last, life.resumed_from)
        life.add_marks(marks)
        index = next(place for place in reversed(range(len(self.lives))) if self.lives[place] is life)
        self.workings[index] = life.working
        self.change_from(index - (life.working != growth.working))
        self._sort_from(index)
        return growth

    def _withdraw(self, attempt: int | None, late: Marks) -> Marks:
        """All marks of an attempt, with `late` ones; its lives are no longer among those of the rank."""
        marks = Marks()
        for life in self.lives:
            if life.attempt == attempt:
                marks.extend(life.marks)
        marks.extend(late)
        self.lives = [life for life in self.lives if life.attempt != attempt]
        self.workings = [life.working for life in self.lives]
        return marks

    def _sort_from(self, index: int) -> None:
        """Put the lives in their order, where those from `index` on are not."""
        around = self.lives[max(index - 1, 0) :]
        if all(_order(one) <= _order(other) for one, other in pairwise(around)):
            return
        before = list(self.lives)
        self.lives.sort(key=_order)
        first = next(place for place, life in enumerate(self.lives) if life is not before[place])
        self.workings[first:] = (life.working for life in self.lives[first:])
        self._keep_painted(first)
        self.change_from(first - 1)

    def _keep_painted(self, count: int) -> None:
        for column in (self._painted, self._begins, self._edges, self._limits):
            del column[count:]


def _order(life: Life) -> tuple[int, int, int]:
    return life.order
