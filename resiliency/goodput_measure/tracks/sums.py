# SPDX-License-Identifier: Apache-2.0
"""Sums over the lanes of a job that change with each lane, so that figures cost what is new."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping

from resiliency.events import EventType
from resiliency.goodput_measure.lanes import PRIORITY, Bucket, Row
from resiliency.goodput_measure.lives import Life
from resiliency.goodput_measure.tracks.measures import RunningMedian, TimeUnion
from resiliency.goodput_measure.tracks.track import RankTrack

_KEPT = PRIORITY[Bucket.KEPT_STEPS]


class Sums:
    """Of the lanes of `tracks`, which are painted, and of the saves of the job.

    Attributes:
        totals: microseconds of each cause, in the order of `Bucket`.
        holds: spans in which a save held training.
        kept: the time in which any rank did a step that is kept.
        step_us: durations of steps: as measured, or between the ends of two steps in a row.
    """

    def __init__(self, tracks: Mapping[int, RankTrack], saves: Iterable[tuple[int, int | None]]) -> None:
        self._tracks = tracks
        self.totals = [0] * len(PRIORITY)
        self.kept = TimeUnion()
        self.step_us = RunningMedian()
        self.saves = SaveSums()
        self.holds = 0
        self._removed_from: int | None = None
        self._added: list[Row] = []
        for track in tracks.values():
            rows = list(track.lane.rows())
            self.change_rows((), rows)
            self.holds += track.lane.holds
            for life in track.lives:
                self.add_steps(life, 0)
        for time, step in saves:
            self.saves.add_save(time, step)
        for life in next(iter(tracks.values())).lives if tracks else ():
            self.saves.add_begun(life, 0)
        self.settle()

    def change_rows(self, removed: Iterable[Row], added: Iterable[Row]) -> None:
        """Count what a lane lost and gained.  `kept` is up to date after `settle`."""
        for low, high, cause in removed:
            self.totals[cause] -= high - low
            if cause == _KEPT:
                self._removed_from = low if self._removed_from is None else min(low, self._removed_from)
        for row in added:
            low, high, cause = row
            self.totals[cause] += high - low
            if cause == _KEPT:
                self._added.append(row)

    def settle(self) -> None:
        added, self._added = self._added, []
        if self._removed_from is not None:
            self.kept.cut(self._removed_from)
            for track in self._tracks.values():
                if track.lane.end > self._removed_from:
                    added += track.lane.between(self._removed_from, track.lane.end)
            self._removed_from = None
        for low, high, cause in added:
            if cause == _KEPT:
                self.kept.add(low, high)

    def add_steps(self, life: Life, start: int) -> None:
        """Count the steps of the marks of `life` from index `start` on."""
        for duration in life.marks.step_durations(start):
            self.step_us.add(duration)


class SaveSums:
    """Steps between saves, and how long a save takes from its start to its commit."""

    def __init__(self) -> None:
        self.gaps = RunningMedian()  # in steps
        self.commit_us = RunningMedian()
        self.last_step: int | None = None
        self._steps: list[int] = []  # that were saved, in order
        self._begun: dict[int | None, list[int]] = defaultdict(list)  # times; a step may be saved again
        self._commits: dict[int | None, list[tuple[int, int | None]]] = defaultdict(list)  # (time, how long)

    def add_save(self, time: int, step: int | None) -> None:
        """A commit."""
        took = self._took(time, step)
        self._commits[step].append((time, took))
        if took is not None:
            self.commit_us.add(took)
        if step is not None:
            self.last_step = step if self.last_step is None else max(step, self.last_step)
            self._add_step(step)

    def add_begun(self, life: Life, start: int) -> None:
        """The saves that began by the marks of `life` from index `start` on."""
        changed = set()
        for time, kind, step, _ in life.marks.rows(start):
            if kind is EventType.SAVE_STARTED:
                self._begun[step].append(time)
                changed.add(step)
        for step in changed & self._commits.keys():  # the log of a commit was read before that of the save
            commits = self._commits[step]
            for index, (time, before) in enumerate(commits):
                if (took := self._took(time, step)) != before and took is not None:
                    if before is not None:
                        self.commit_us.remove(before)
                    self.commit_us.add(took)
                    commits[index] = (time, took)

    def _took(self, time: int, step: int | None) -> int | None:
        begun = max((at for at in self._begun.get(step, ()) if at <= time), default=None)
        return None if begun is None else time - begun

    def _add_step(self, step: int) -> None:
        place = bisect_left(self._steps, step)
        if place < len(self._steps) and self._steps[place] == step:
            return
        below = self._steps[place - 1] if place else None
        above = self._steps[place] if place < len(self._steps) else None
        if below is not None and above is not None:
            self.gaps.remove(above - below)
        if below is not None:
            self.gaps.add(step - below)
        if above is not None:
            self.gaps.add(above - step)
        self._steps.insert(place, step)
