# SPDX-License-Identifier: Apache-2.0
"""From the lives of a rank to its lane: intervals with causes, and one cause where they overlap.

`Painter` says what a rank was doing, generously: intervals may overlap, and some may stick out.
`resolve` then cuts the lane so that every microsecond has one cause.  Being exact is the duty of
`resolve` alone, so a strange log can make the ledger wrong about a cause but never about the sum.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from itertools import chain, islice, zip_longest
from typing import NamedTuple, overload

from resiliency.events import EventType
from resiliency.goodput_measure.incidents import Incident
from resiliency.goodput_measure.lives import STEPPING, Life
from resiliency.goodput_measure.marks import Marks


class Bucket(str, Enum):
    """Causes.  A later one wins where two overlap."""

    OTHER = "other"  # before the first start, after the end, between steps
    RESTART = "restart"  # detected -> new process: stop, rendezvous, start
    DECISION = "decision"  # of that: detected -> the supervisor decided
    SWAP = "swap"  # of that: decided to exchange a host -> exchanged
    CAPACITY = "capacity"  # of that: the set of hosts changed -> all of them have met
    STARTUP = "startup"  # interpreter and imports
    INITIALIZATION = "initialization"  # process groups, model, first batch
    DETECTION = "detection"  # fault -> detected
    LOST_STEPS = "lost_steps"  # done again later, or cut off by a kill
    KEPT_STEPS = "kept_steps"  # training that lasted
    RESTORE = "restore"
    SAVE_HELD = "save_held"  # training waits for a save


#: Actions of the supervisor after which the job waits for other hosts than it had.
_CHANGES_HOSTS = frozenset({"hot_swap", "workload_recreation", "scale_down"})
_PRIORITY = {bucket: priority for priority, bucket in enumerate(Bucket)}
_BY_PRIORITY = tuple(Bucket)


class Span(NamedTuple):
    """[start, end) in microseconds since the epoch."""

    start: int
    end: int
    bucket: Bucket


class Spans(Sequence[Span]):
    """Spans that follow each other without a gap, 9 bytes each.  Built by `resolve`."""

    __slots__ = ("_causes", "_end", "_starts")

    def __init__(self, end: int) -> None:
        self._starts = array("q")
        self._causes = bytearray()
        self._end = end

    def append(self, start: int, priority: int) -> None:
        """Add a span that begins where the one before it ends."""
        self._starts.append(start)
        self._causes.append(priority)

    def __len__(self) -> int:
        return len(self._causes)

    @overload
    def __getitem__(self, index: int) -> Span: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Span, ...]: ...

    def __getitem__(self, index: int | slice) -> Span | tuple[Span, ...]:
        if isinstance(index, slice):
            return tuple(self[place] for place in range(*index.indices(len(self))))
        index = range(len(self))[index]  # negative ones, and the IndexError
        end = self._starts[index + 1] if index + 1 < len(self) else self._end
        return Span(self._starts[index], end, _BY_PRIORITY[self._causes[index]])

    def __iter__(self) -> Iterator[Span]:
        for start, end, priority in self.rows():
            yield Span(start, end, _BY_PRIORITY[priority])

    def between(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """As `rows`, cut to [start, end)."""
        for index in range(max(bisect_right(self._starts, start) - 1, 0), bisect_left(self._starts, end)):
            low, high, _ = self[index]
            if (low := max(low, start)) < (high := min(high, end)):
                yield low, high, self._causes[index]

    def rows(self) -> Iterator[tuple[int, int, int]]:
        """(start, end, place of the cause among all causes) of each span: as iteration, but faster."""
        ends = chain(islice(self._starts, 1, None), (self._end,))
        return zip(self._starts, ends, self._causes, strict=False)


def resolve(intervals: Iterable[Span], start: int, end: int) -> Spans:
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
    spans = Spans(end)
    since = at = start
    cause = -1
    for time, change, priority in [*edges, (end, 0, 0)]:
        if time > at:
            if (now := causes.bit_length() - 1) != cause:
                if at > since:
                    spans.append(since, cause)
                since, cause = at, now
            at = time
        open_count[priority] += change
        bit = 1 << priority
        causes = causes | bit if open_count[priority] else causes & ~bit
    if at > since:
        spans.append(since, cause)
    return spans


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
                incident = self._incident(life, lives[index + 1])
                spans += [_clip(span, detected, following) for span in _supervised(incident)]
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


def _supervised(incident: Incident | None) -> list[Span]:
    """The parts of a restart that belong to the supervisor and to the orchestrator."""
    if incident is None or incident.decided is None:
        return []
    decided, acted = incident.decided, incident.acted
    spans = [Span(incident.detected, decided, Bucket.DECISION)]
    if acted is None:
        return spans
    if incident.action == "hot_swap":
        spans.append(Span(decided, acted, Bucket.SWAP))
    if incident.action in _CHANGES_HOSTS and incident.rendezvous is not None:
        spans.append(Span(acted, incident.rendezvous, Bucket.CAPACITY))
    return spans


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
    at = life.marks.index_of(EventType.RESTORE_STARTED)
    while at is not None:
        spans.append(Span(life.marks[at].time, _restore_end(life.marks, at + 1, fault), Bucket.RESTORE))
        at = life.marks.index_of(EventType.RESTORE_STARTED, start=at + 1)
    return spans


def _restore_end(marks: Marks, after: int, fault: int) -> int:
    index = marks.index_of(EventType.CHECKPOINT_LOADED, *STEPPING, start=after)
    if index is not None and marks[index].type is EventType.CHECKPOINT_LOADED:
        return marks[index].time
    # Nothing was loaded (nothing to load, or the rank died): until it did something else.
    return marks[after].time if after < len(marks) else fault


def _steps(life: Life, limit: int | None) -> list[Span]:
    """Steps, kept where no later life continued from before them, and the holds of saves."""
    spans: list[Span] = []
    since = life.first_step_started
    limits = _limits(life.marks, limit)
    held: int | None = None  # since when a save holds training
    for index, (time, kind, step, duration) in enumerate(life.marks.rows()):
        if held is not None:
            spans.append(Span(held, time, Bucket.SAVE_HELD))
            held = None
        if kind is EventType.STEP_FINISHED and since is not None:
            limit = limits(index)
            start = since if duration is None else max(since, time - duration)
            lost = limit is not None and step is not None and step > limit
            spans.append(Span(start, time, Bucket.LOST_STEPS if lost else Bucket.KEPT_STEPS))
            since = time
        elif kind is EventType.SAVE_STARTED:
            held = time
    return spans


def _limits(marks: Marks, limit: int | None) -> Callable[[int], int | None]:
    """For the index of a mark, the least step that is loaded after it, or after the life (`limit`)."""
    loads: list[tuple[int, int | None]] = []  # index of a load, and the least step that is loaded from it on
    at = marks.index_of(EventType.CHECKPOINT_LOADED)
    while at is not None:
        loads.append((at, marks[at].step))
        at = marks.index_of(EventType.CHECKPOINT_LOADED, start=at + 1)
    least = limit
    for place in reversed(range(len(loads))):
        index, step = loads[place]
        least = _least(least, step)
        loads[place] = (index, least)
    if not loads:
        return lambda index: limit
    return lambda index: next((step for place, step in loads if place > index), limit)


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
