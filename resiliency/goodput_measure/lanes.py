# SPDX-License-Identifier: Apache-2.0
"""From the lives of a rank to its lane: intervals with causes, and one cause where they overlap.

`Painter` says what a rank was doing in each of its lives, generously: intervals may overlap, and some may
stick out.  `sweep` then cuts the time of that life so that every microsecond has one cause.  Being exact is
the duty of `sweep` alone, so a strange log can make the ledger wrong about a cause but never about the sum.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from itertools import chain, islice
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
PRIORITY = {bucket: priority for priority, bucket in enumerate(Bucket)}
_BY_PRIORITY = tuple(Bucket)
#: An interval: start, end, and the priority of its cause.
Row = tuple[int, int, int]


class Span(NamedTuple):
    """[start, end) in microseconds since the epoch."""

    start: int
    end: int
    bucket: Bucket


_LOST, _KEPT, _HELD = (PRIORITY[of] for of in (Bucket.LOST_STEPS, Bucket.KEPT_STEPS, Bucket.SAVE_HELD))
_STARTUP, _INITIALIZATION = PRIORITY[Bucket.STARTUP], PRIORITY[Bucket.INITIALIZATION]
_RESTORE, _RESTART, _DETECTION = (PRIORITY[of] for of in (Bucket.RESTORE, Bucket.RESTART, Bucket.DETECTION))


class Spans(Sequence[Span]):
    """Spans that follow each other without a gap, 9 bytes each."""

    __slots__ = ("_causes", "_end", "_starts")

    def __init__(self, end: int) -> None:
        self._starts = array("q")
        self._causes = bytearray()
        self._end = end

    def append(self, start: int, priority: int) -> None:
        """Add a span that begins where the one before it ends."""
        self._starts.append(start)
        self._causes.append(priority)

    def framed(self, start: int, end: int) -> Spans:
        """A copy for [start, end): the same where both are, and `other` elsewhere."""
        copy = Spans(end)
        copy._starts, copy._causes = self._starts[:], self._causes[:]
        while copy._causes and copy._starts[-1] >= end:
            copy._starts.pop()
            copy._causes.pop()
        if start < end and (not copy._causes or copy._starts[0] > start):
            if copy._causes and copy._causes[0] == PRIORITY[Bucket.OTHER]:
                copy._starts[0] = start
            else:
                copy._starts.insert(0, start)
                copy._causes.insert(0, PRIORITY[Bucket.OTHER])
        if copy._causes and self._causes and self._end < end and copy._causes[-1] != PRIORITY[Bucket.OTHER]:
            copy.append(self._end, PRIORITY[Bucket.OTHER])
        return copy

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

    @property
    def end(self) -> int:
        return self._end

    def between(self, start: int, end: int) -> Iterator[Row]:
        """As `rows`, cut to [start, end)."""
        first, last = max(bisect_right(self._starts, start) - 1, 0), bisect_left(self._starts, end)
        ends = self._starts[first + 1 : last + 1]
        if last == len(self):
            ends.append(self._end)
        for low, high, cause in zip(self._starts[first:last], ends, self._causes[first:last], strict=False):
            if low < start:
                low = start
            if high > end:
                high = end
            if low < high:
                yield low, high, cause

    def rows(self) -> Iterator[Row]:
        """(start, end, place of the cause among all causes) of each span: as iteration, but faster."""
        ends = chain(islice(self._starts, 1, None), (self._end,))
        return zip(self._starts, ends, self._causes, strict=False)


def sweep(rows: Iterable[Row], start: int, end: int) -> list[Row]:
    """Cut [start, end) into rows of one cause each; the strongest of overlapping ones wins."""
    edges: list[Row] = []
    for low, high, priority in rows:
        if low < start:
            low = start
        if high > end:
            high = end
        if low < high:
            edges.append((low, 1, priority))
            edges.append((high, -1, priority))
    edges.sort()
    edges.append((end, 0, 0))
    open_count = [0] * len(_BY_PRIORITY)
    causes = open_count[0] = 1  # OTHER lies under everything; one bit for each cause that is open
    since = at = start
    cause = -1
    swept: list[Row] = []
    for time, change, priority in edges:
        if time > at:
            if (now := causes.bit_length() - 1) != cause:
                if at > since:
                    swept.append((since, at, cause))
                since, cause = at, now
            at = time
        open_count[priority] += change
        if open_count[priority]:
            causes |= 1 << priority
        else:
            causes &= ~(1 << priority)
    if at > since:
        swept.append((since, at, cause))
    return swept


class Painter:
    """Says in intervals what the lives of a rank were, given what is known of the job.

    Args:
        faults, starts: times, sorted, of injected faults and of starts of workers.
        resumes: of all ranks.
    """

    def __init__(
        self,
        incidents: Sequence[Incident],
        *,
        faults: Sequence[int],
        starts: Sequence[int],
        resumes: Resumes,
    ) -> None:
        self._incidents = incidents
        self._detected = [incident.detected for incident in incidents]
        self._faults = faults
        self._starts = starts
        self.resumes = resumes

    def end(self, life: Life, following: Life | None) -> tuple[int, int]:
        """(when the fault struck this rank, when that was detected); both its end if it just ended."""
        last = life.last
        incident = self._incident(life, following)
        if incident is not None:
            if life.finished is not None:
                return last, max(incident.detected, last)
            fault = max(incident.fault, last)
            return fault, max(incident.detected, fault)
        if following is not None and life.finished is None:
            # No launcher saw it (its log is missing); an injected fault still tells the time.
            index = bisect_right(self._faults, last)
            if index < len(self._faults) and self._faults[index] < following.marks.time_of(0):
                return self._faults[index], self._faults[index]
        return last, last

    def begin(self, life: Life, previous: tuple[int, int] | None) -> int:
        """When `life` took over: its creation, or for a standby process the hand-over.

        Args:
            previous: end of the life before it.
        """
        created = life.marks.time_of(0)
        if previous is None or created >= previous[1]:
            return created
        index = bisect_right(self._starts, previous[1])
        if index < len(self._starts) and self._starts[index] <= life.working:
            return self._starts[index]
        return max(min(previous[1], life.working), previous[0])

    def paint(
        self,
        life: Life,
        *,
        begin: int,
        end: tuple[int, int],
        limit: int | None,
        following: tuple[Life, int] | None,
        after: int | None = None,
    ) -> list[Row]:
        """Intervals in no order, that may overlap and stick out.

        Args:
            begin, end: of the life, as `begin` and `end` tell them.
            limit: the least step that was continued after the life; steps beyond it are lost.
            following: the life after it, and when that took over.
            after: index of the mark of a finished step: what was before it is not asked for.
        """
        fault, detected = end
        finished = life.finished
        rows = [*_phases(life, begin, fault), *_steps(life, limit, after)]
        if finished is None:
            if life.first_step is not None:
                cut_off = _HELD if life.marks.type_of(-1) is EventType.SAVE_STARTED else _LOST
                rows.append((life.last, fault, cut_off))
            rows.append((fault, detected, _DETECTION))  # until somebody noticed
        if following is not None:
            incident = self._incident(life, following[0])
            if finished is None or incident is not None:
                rows.append((detected, following[1], _RESTART))
                for low, high, priority in _supervised(incident):
                    rows.append((max(low, detected), min(high, following[1]), priority))
        return rows

    def _incident(self, life: Life, following: Life | None) -> Incident | None:
        """The incident that ended `life`."""
        index = bisect_right(self._detected, life.working)
        if index == len(self._incidents):
            return None
        incident = self._incidents[index]
        return incident if following is None or incident.detected <= following.working else None


class Resumes:
    """From which steps the job continued, and when: what makes earlier steps lost.

    Of the lives that continued from a step only those are kept after which none continued from a step as low.
    """

    def __init__(self) -> None:
        self._times: list[int] = []  # both ascend
        self._steps: list[int] = []

    def add(self, time: int, step: int) -> bool:
        """A life that began work at `time` continued from `step`; returns whether that makes a difference."""
        times, steps = self._times, self._steps
        at = bisect_left(times, time)
        if at < len(times) and steps[at] <= step:
            return False
        high = at + (at < len(times) and times[at] == time)
        low = bisect_left(steps, step, 0, high)
        times[low:high] = [time]
        steps[low:high] = [step]
        return True

    def least_after(self, time: int) -> int | None:
        """The earliest step that was continued by any life that began work after `time`."""
        index = bisect_right(self._times, time)
        return self._steps[index] if index < len(self._steps) else None


def _supervised(incident: Incident | None) -> list[Row]:
    """The parts of a restart that belong to the supervisor and to the orchestrator."""
    if incident is None or incident.decided is None:
        return []
    decided, acted = incident.decided, incident.acted
    rows = [(incident.detected, decided, PRIORITY[Bucket.DECISION])]
    if acted is None:
        return rows
    if incident.action == "hot_swap":
        rows.append((decided, acted, PRIORITY[Bucket.SWAP]))
    if incident.action in _CHANGES_HOSTS and incident.rendezvous is not None:
        rows.append((acted, incident.rendezvous, PRIORITY[Bucket.CAPACITY]))
    return rows


def _phases(life: Life, begin: int, fault: int) -> list[Row]:
    """Startup, initialization and restore: from creation to the first step."""
    marks = life.marks
    ready = life.first_step_started
    if ready is None:
        ready = life.finished or max(fault, life.last)
    imported = life.first(EventType.IMPORTED)
    if imported is None:
        known = (life.first(EventType.RESTORE_STARTED), life.first(EventType.INITIALIZED), ready)
        imported = min(time for time in known if time is not None)
    rows = [(min(begin, marks.time_of(0)), imported, _STARTUP), (imported, ready, _INITIALIZATION)]
    at = marks.index_of(EventType.RESTORE_STARTED)
    while at is not None:
        rows.append((marks.time_of(at), _restore_end(marks, at + 1, fault), _RESTORE))
        at = marks.index_of(EventType.RESTORE_STARTED, start=at + 1)
    return rows


def _restore_end(marks: Marks, after: int, fault: int) -> int:
    index = marks.index_of(EventType.CHECKPOINT_LOADED, *STEPPING, start=after)
    if index is not None and marks.type_of(index) is EventType.CHECKPOINT_LOADED:
        return marks.time_of(index)
    # Nothing was loaded (nothing to load, or the rank died): until it did something else.
    return marks.time_of(after) if after < len(marks) else fault


def _steps(life: Life, limit: int | None, after: int | None) -> Iterator[Row]:
    """Steps, kept where no later life continued from before them, and the holds of saves.

    Args:
        after: index of the mark of a finished step, where those after it are wanted.
    """
    marks = life.marks
    # Nothing is known before these.
    first = marks.index_of(EventType.STEP_FINISHED, EventType.SAVE_STARTED) if after is None else after + 1
    if first is None:
        return
    since = life.first_step_started if after is None else marks.time_of(after)
    is_loaded_later = marks.index_of(EventType.CHECKPOINT_LOADED, start=first) is not None
    limits = _limits(marks, limit) if is_loaded_later else None
    held: int | None = None  # since when a save holds training
    for index, (time, kind, step, duration) in enumerate(marks.rows(first), first):
        if held is not None:
            yield held, time, _HELD
            held = None
        if kind is EventType.STEP_FINISHED and since is not None:
            if limits is not None:
                limit = limits(index)
            start = since if duration is None else max(since, time - duration)
            yield start, time, _LOST if limit is not None and step is not None and step > limit else _KEPT
            since = time
        elif kind is EventType.SAVE_STARTED:
            held = time


def _limits(marks: Marks, limit: int | None) -> Callable[[int], int | None]:
    """For the index of a mark, the least step that is loaded after it, or after the life (`limit`)."""
    places: list[int] = []  # of loads
    at = marks.index_of(EventType.CHECKPOINT_LOADED)
    while at is not None:
        places.append(at)
        at = marks.index_of(EventType.CHECKPOINT_LOADED, start=at + 1)
    if not places:
        return lambda index: limit
    lowest = [limit]
    for place in reversed(places):
        lowest.append(least(lowest[-1], marks.step_of(place)))
    lowest.reverse()
    return lambda index: lowest[bisect_right(places, index)]


def least(first: int | None, second: int | None) -> int | None:
    """The smaller one; None is larger than all."""
    if first is None or second is None:
        return second if first is None else first
    return min(first, second)
