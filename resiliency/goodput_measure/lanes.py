# SPDX-License-Identifier: Apache-2.0
"""From the lives of a rank to its lane: intervals with causes, and one cause where they overlap.

`Painter` says what a rank was doing, generously: intervals may overlap, and some may stick out.
`resolve` then cuts the lane so that every microsecond has one cause.  Being exact is the duty of
`resolve` alone, so a strange log can make the ledger wrong about a cause but never about the sum.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from enum import Enum
from itertools import zip_longest
from typing import NamedTuple

from resiliency.events import EventType
from resiliency.goodput_measure.incidents import Incident
from resiliency.goodput_measure.lives import STEPPING, Life, Mark


class Bucket(str, Enum):
    """Causes.  A later one wins where two overlap."""

    OTHER = "other"  # before the first start, after the end, between steps
    RESTART = "restart"  # detected -> new process: stop, rendezvous, start
    STARTUP = "startup"  # interpreter and imports
    INITIALIZATION = "initialization"  # process groups, model, first batch
    DETECTION = "detection"  # fault -> detected
    LOST_STEPS = "lost_steps"  # done again later, or cut off by a kill
    KEPT_STEPS = "kept_steps"  # training that lasted
    RESTORE = "restore"
    SAVE_HELD = "save_held"  # training waits for a save


_PRIORITY = {bucket: priority for priority, bucket in enumerate(Bucket)}
_BY_PRIORITY = tuple(Bucket)


class Span(NamedTuple):
    """[start, end) in microseconds since the epoch."""

    start: int
    end: int
    bucket: Bucket


def resolve(intervals: Iterable[Span], start: int, end: int) -> tuple[Span, ...]:
    """Cut [start, end) into spans of one cause each; the strongest of overlapping intervals wins."""
    edges: list[tuple[int, int, int]] = []
    for interval in intervals:
        low, high = max(interval.start, start), min(interval.end, end)
        if low < high:
            priority = _PRIORITY[interval.bucket]
            edges += [(low, 1, priority), (high, -1, priority)]
    edges.sort()
    open_count = [0] * len(_BY_PRIORITY)
    causes = open_count[0] = 1  # OTHER lies under everything; one bit for each cause that is open
    spans: list[Span] = []
    since = at = start
    cause = -1
    for time, change, priority in [*edges, (end, 0, 0)]:
        if time > at:
            if (now := causes.bit_length() - 1) != cause:
                if at > since:
                    spans.append(Span(since, at, _BY_PRIORITY[cause]))
                since, cause = at, now
            at = time
        open_count[priority] += change
        bit = 1 << priority
        causes = causes | bit if open_count[priority] else causes & ~bit
    if at > since:
        spans.append(Span(since, at, _BY_PRIORITY[cause]))
    return tuple(spans)


class Painter:
    """Turns the lives of a rank into intervals with causes."""

    def __init__(
        self,
        lives: Iterable[Sequence[Life]],
        incidents: Sequence[Incident],
        *,
        faults: Iterable[int],
        starts: Iterable[int],
    ) -> None:
        self._incidents = incidents
        self._detected = [incident.detected for incident in incidents]
        self._faults = sorted(faults)
        self._starts = sorted(starts)
        self._resumes = _Resumes(lives)

    def paint(self, lives: Sequence[Life]) -> list[Span]:
        """Intervals of one rank, in no order, that may overlap."""
        spans: list[Span] = []
        ends = [self._end(life, after) for life, after in zip_longest(lives, lives[1:])]
        begins = [self._begin(life, ends[index - 1] if index else None) for index, life in enumerate(lives)]
        limit: int | None = None
        for index in reversed(range(len(lives))):
            life, (fault, detected) = lives[index], ends[index]
            following = begins[index + 1] if index + 1 < len(lives) else None
            limit = _least(limit, self._resumes.least_after(life.last))
            painted = [
                *_phases(life, begins[index], fault),
                *_steps(life, limit),
                *_ending(life, fault, detected),
            ]
            window_end = max(span.end for span in painted) if following is None else following
            spans += [_clip(span, begins[index], window_end) for span in painted]
            if following is not None and (life.finished is None or self._incident(life, lives[index + 1])):
                spans.append(Span(detected, following, Bucket.RESTART))
            limit = _least(limit, life.resumed_from)
        return spans

    def _incident(self, life: Life, following: Life | None) -> Incident | None:
        """The incident that ended `life`."""
        index = bisect_right(self._detected, life.working)
        if index == len(self._incidents):
            return None
        incident = self._incidents[index]
        return incident if following is None or incident.detected <= following.working else None

    def _end(self, life: Life, following: Life | None) -> tuple[int, int]:
        """(when the fault struck this rank, when that was detected); both its end if it just ended."""
        incident = self._incident(life, following)
        if incident is not None:
            if life.finished is not None:
                return life.last, max(incident.detected, life.last)
            fault = max(incident.fault, life.last)
            return fault, max(incident.detected, fault)
        if following is not None and life.finished is None:
            # No launcher saw it (its log is missing); an injected fault still tells the time.
            index = bisect_right(self._faults, life.last)
            if index < len(self._faults) and self._faults[index] < following.marks[0].time:
                return self._faults[index], self._faults[index]
        return life.last, life.last

    def _begin(self, life: Life, previous: tuple[int, int] | None) -> int:
        """When `life` took over: its creation, or for a standby process the hand-over."""
        if previous is None or life.marks[0].time >= previous[1]:
            return life.marks[0].time
        index = bisect_right(self._starts, previous[1])
        if index < len(self._starts) and self._starts[index] <= life.working:
            return self._starts[index]
        return max(min(previous[1], life.working), previous[0])


class _Resumes:
    """From which steps the job continued, and when: what makes earlier steps lost."""

    def __init__(self, lives: Iterable[Sequence[Life]]) -> None:
        found = sorted(
            (life.working, step)
            for of_rank in lives
            for life in of_rank
            if (step := life.resumed_from) is not None
        )
        self._times = [time for time, _ in found]
        self._least = [step for _, step in found]
        for index in reversed(range(len(found) - 1)):
            self._least[index] = min(self._least[index], self._least[index + 1])

    def least_after(self, time: int) -> int | None:
        """The earliest step that was continued by any life that began work after `time`."""
        index = bisect_right(self._times, time)
        return self._least[index] if index < len(self._least) else None


def _phases(life: Life, begin: int, fault: int) -> list[Span]:
    """Startup, initialization and restore: from creation to the first step."""
    ready = life.first_step_started
    if ready is None:
        ready = life.finished or max(fault, life.last)
    imported = life.first(EventType.IMPORTED)
    if imported is None:
        known = (life.first(EventType.RESTORE_STARTED), life.first(EventType.INITIALIZED), ready)
        imported = min(time for time in known if time is not None)
    spans = [
        Span(min(begin, life.marks[0].time), imported, Bucket.STARTUP),
        Span(imported, ready, Bucket.INITIALIZATION),
    ]
    for index, mark in enumerate(life.marks):
        if mark.type is EventType.RESTORE_STARTED:
            spans.append(Span(mark.time, _restore_end(life.marks[index + 1 :], fault), Bucket.RESTORE))
    return spans


def _restore_end(following: Sequence[Mark], fault: int) -> int:
    for mark in following:
        if mark.type is EventType.CHECKPOINT_LOADED:
            return mark.time
        if mark.type in STEPPING:
            break
    # Nothing was loaded (nothing to load, or the rank died): until it did something else.
    return following[0].time if following else fault


def _steps(life: Life, limit: int | None) -> list[Span]:
    """Steps, kept where no later life continued from before them, and the holds of saves."""
    spans: list[Span] = []
    since = life.first_step_started
    later_load = limit
    loads: list[int | None] = []  # for each mark, the least step that is loaded after it
    for mark in reversed(life.marks):
        loads.append(later_load)
        if mark.type is EventType.CHECKPOINT_LOADED:
            later_load = _least(later_load, mark.step)
    for index, (mark, limit_after) in enumerate(zip(life.marks, reversed(loads), strict=True)):
        if mark.type is EventType.STEP_FINISHED and since is not None:
            start = since if mark.duration is None else max(since, mark.time - mark.duration)
            lost = limit_after is not None and mark.step is not None and mark.step > limit_after
            spans.append(Span(start, mark.time, Bucket.LOST_STEPS if lost else Bucket.KEPT_STEPS))
            since = mark.time
        elif mark.type is EventType.SAVE_STARTED and index + 1 < len(life.marks):
            spans.append(Span(mark.time, life.marks[index + 1].time, Bucket.SAVE_HELD))
    return spans


def _ending(life: Life, fault: int, detected: int) -> list[Span]:
    """What the rank was doing when the fault struck, and the time until somebody noticed."""
    if life.finished is not None:
        return []
    cut_off = Bucket.SAVE_HELD if life.marks[-1].type is EventType.SAVE_STARTED else Bucket.LOST_STEPS
    spans = [Span(fault, detected, Bucket.DETECTION)]
    if life.stepped:
        spans.append(Span(life.last, fault, cut_off))
    return spans


def _clip(span: Span, low: int, high: int) -> Span:
    if low <= span.start and span.end <= high:
        return span  # as almost all
    return span._replace(start=max(span.start, low), end=min(span.end, high))


def _least(first: int | None, second: int | None) -> int | None:
    if first is None or second is None:
        return second if first is None else first
    return min(first, second)
