# SPDX-License-Identifier: Apache-2.0
"""The ledger: every microsecond of every rank has exactly one cause.

Wall time runs from the first to the last event of the job, and each rank that ever appeared has a
lane of that length.  Causes are painted on the lane as intervals; where two overlap, the one that
says more wins (a held save over the step around it, a step over the restart around it), and what
nothing covers is `other`.  So no lane can have a gap or an overlap, whatever the log looks like,
and the sum over all causes is wall time x ranks as whole numbers, not approximately.

A step is *lost* when a later life of its rank, or of the job after the rank was gone, continued
from an earlier step; otherwise it is *kept*.  What a killed rank had begun is lost too.
"""

from __future__ import annotations

import heapq
import statistics
from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from resiliency.errors import ConfigError
from resiliency.events import EventType, JsonValue, RunEvent
from resiliency.goodput_measure.incidents import Failure, Incident, LauncherFact, find_incidents
from resiliency.goodput_measure.lanes import Bucket, Painter, Span, Spans, resolve
from resiliency.goodput_measure.lives import Life, from_us, lives_of, mark_of, to_us
from resiliency.goodput_measure.marks import Marks

#: A job that terminated and is silent for so long has ended, also where a host never said so.
_SILENT_US = 600_000_000

__all__ = ["Bucket", "Ledger", "LedgerBuilder", "Span", "build_ledger"]


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """Where the time of a job went.  Times are microseconds since the epoch."""

    job_name: str
    start: int
    end: int
    lanes: Mapping[int, Spans]  # rank -> its wall time, without gap or overlap
    hosts: Mapping[int, str] = field(default_factory=dict)  # rank -> host that it was last seen on
    incidents: tuple[Incident, ...] = ()
    faults: tuple[Failure, ...] = ()
    saves: tuple[tuple[int, int | None], ...] = ()  # (time, step) of committed checkpoints
    median_step_s: float | None = None
    commit_s: float | None = None  # median time from the start of a save to its commit
    first_step: int = 0  # that the job began with

    @property
    def wall_us(self) -> int:
        return self.end - self.start

    @cached_property
    def totals(self) -> dict[Bucket, int]:
        """Microseconds per cause over all ranks; they add up to ``wall_us * len(lanes)``."""
        totals = [0] * len(Bucket)
        for lane in self.lanes.values():
            for start, end, cause in lane.rows():
                totals[cause] += end - start
        return dict(zip(Bucket, totals, strict=True))

    def share(self, bucket: Bucket) -> float | None:
        """Part of all rank time that `bucket` took; None when there is no rank time."""
        available = self.wall_us * len(self.lanes)
        return self.totals[bucket] / available if available else None

    @property
    def goodput(self) -> float | None:
        """Kept steps as a part of all rank time."""
        return self.share(Bucket.KEPT_STEPS)

    @cached_property
    def ettr(self) -> float | None:
        """Part of wall time in which any rank was in a step that was kept.

        The effective training time ratio asks about the job and not about its machines: a rank
        that idles after a scale-down lowers `goodput` and leaves this alone.
        """
        if not self.wall_us:
            return None
        kept: list[tuple[int, int]] = []
        for lane in self.lanes.values():
            # Ranks step together: what is united stays as small as the steps of one rank.
            of_rank = [(span.start, span.end) for span in lane if span.bucket is Bucket.KEPT_STEPS]
            kept = _united(heapq.merge(kept, of_rank))
        return sum(end - start for start, end in kept) / self.wall_us

    def to_json(self) -> dict[str, JsonValue]:
        """Totals and incidents; the lanes stay in the event log."""
        return {
            "start": from_us(self.start).isoformat(),
            "end": from_us(self.end).isoformat(),
            "wall_us": self.wall_us,
            "ranks": len(self.lanes),
            "totals_us": {bucket.value: total for bucket, total in self.totals.items()},
            "goodput": self.goodput,
            "ettr": self.ettr,
            "median_step_s": self.median_step_s,
            "incidents": [incident.to_json() for incident in self.incidents],
        }


def build_ledger(events: Iterable[RunEvent], job_name: str | None = None) -> Ledger:
    """Derive the ledger of one job from its full event log.

    Args:
        events: of all hosts, in any order; consumed once and not kept.
        job_name: only this job's events; None means that all belong to one job.
    Raises:
        ConfigError: there is no event of the job.
    """
    builder = LedgerBuilder()
    for event in events:
        if job_name in (None, event.job_name):
            builder.add_event(event)
    return builder.build()


@dataclass(slots=True)
class _Launcher:
    """What a host said of its launchers: its newest event, and how many started and did not terminate."""

    newest: int = 0
    running: int = 0


class LedgerBuilder:
    """Takes the events of one job, keeps what the ledger needs of them, and makes it at any time."""

    def __init__(self) -> None:
        self.job_name = ""
        self.start: int | None = None
        self.end: int | None = None
        self._marks: dict[int, dict[int | None, Marks]] = defaultdict(lambda: defaultdict(Marks))
        self._hosts: dict[int, str] = {}
        self._launcher: list[LauncherFact] = []
        self._faults: list[Failure] = []
        self._saves: list[tuple[int, int | None]] = []
        self._started_at = 0  # when a launcher last started
        self._ended_at: int | None = None  # when the job was last said to have terminated
        self._launchers: dict[str, _Launcher] = defaultdict(_Launcher)  # by host

    def add_event(self, event: RunEvent) -> None:
        """In any order."""
        time = to_us(event.time)
        self.job_name = self.job_name or event.job_name
        # A supervisor learns of the end of its action on another machine, and may do so after the job's end;
        # a failure simulator may injure a host just then.
        if event.type not in (EventType.ACTION_DECIDED, EventType.ACTION_ENDED, EventType.FAULT_INJECTED):
            self.start = time if self.start is None else min(self.start, time)
            self.end = time if self.end is None else max(self.end, time)
            launcher = self._launchers[event.host]
            launcher.newest = max(launcher.newest, time)
            if event.type is EventType.JOB_STARTED:
                launcher.running += 1
                self._started_at = max(time, self._started_at)
            elif event.type is EventType.JOB_TERMINATED:
                launcher.running -= 1
                self._ended_at = max(time, self._ended_at or time)
        if event.rank is not None and (mark := mark_of(event, time)) is not None:
            self._marks[event.rank][event.attempt].append(mark)
            self._hosts[event.rank] = event.host
        elif event.type is EventType.FAULT_INJECTED:
            kind = event.fields.get("fault", event.fields.get("kind", ""))
            self._faults.append(Failure(time, event.rank, str(kind)))
        elif event.type is EventType.CHECKPOINT_SAVED:
            self._saves.append((time, event.step))
        else:
            cause, action = (str(event.fields.get(name, "")) for name in ("cause", "action"))
            self._launcher.append(LauncherFact(time, event.type, event.rank, cause, action))

    def has_ended(self, now: int | None = None) -> bool:
        """Whether the job terminated, and no host runs it.

        Events may be later than the last termination: clocks differ, and a commit may outlive the training.
        They mean that the job runs where their host has a launcher that did not terminate.  One that was
        killed with its host never will, so ten minutes of silence end a job as well.

        Args:
            now: in microseconds since the epoch; None asks about the events alone.
        """
        if self._ended_at is None or self.end is None or self._started_at > self._ended_at:
            return False
        if now is not None and now - self.end >= _SILENT_US:
            return True
        return not any(of.newest > self._ended_at and of.running > 0 for of in self._launchers.values())

    def build(self, *, until: int | None = None) -> Ledger:
        """The ledger of all events so far.

        Args:
            until: for a job that runs: now, in microseconds since the epoch.  What happened since the last
                event is then part of the wall time, as `other`.
        Raises:
            ConfigError: there is no event of the job.
        """
        if self.start is None or self.end is None:
            raise ConfigError(
                "there is no event to build a ledger from.", hint="Is this the job's event log?"
            )
        end = self.end if until is None else max(self.end, until)
        lives = {rank: lives_of(rank, marks) for rank, marks in sorted(self._marks.items())}
        incidents = find_incidents(self._launcher, list(lives.values()), self._faults)
        painter = Painter(
            lives.values(),
            incidents,
            faults=(fault.time for fault in self._faults),
            starts=(fact.time for fact in self._launcher if fact.type is EventType.WORKERS_STARTED),
        )
        return Ledger(
            job_name=self.job_name,
            start=self.start,
            end=end,
            lanes={rank: resolve(painter.paint(of_rank), self.start, end) for rank, of_rank in lives.items()},
            hosts=dict(self._hosts),
            incidents=incidents,
            faults=tuple(sorted(self._faults, key=lambda fault: fault.time)),
            saves=tuple(sorted(self._saves, key=lambda save: save[0])),
            median_step_s=_median_step_s(lives.values()),
            commit_s=_median_commit_s(next(iter(lives.values()), []), self._saves),
            first_step=min(
                (step for of_rank in lives.values() if (step := of_rank[0].resumed_from) is not None),
                default=0,
            ),
        )


def _united(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Intervals without overlap, from intervals that are sorted by their start."""
    united: list[tuple[int, int]] = []
    for start, end in intervals:
        if united and start <= united[-1][1]:
            united[-1] = (united[-1][0], max(united[-1][1], end))
        else:
            united.append((start, end))
    return united


def _median_step_s(lives: Iterable[Sequence[Life]]) -> float | None:
    """Median duration of a step: as measured, or between the ends of two steps in a row."""
    durations = array("q")
    for life in (life for of_rank in lives for life in of_rank):
        previous: int | None = None
        for time, kind, _, duration in life.marks.rows():
            if kind is not EventType.STEP_FINISHED:
                continue
            if duration is not None:
                durations.append(duration)
            elif previous is not None:
                durations.append(time - previous)
            previous = time
    return statistics.median(durations) / 1e6 if durations else None


def _median_commit_s(lives: Sequence[Life], saves: Iterable[tuple[int, int | None]]) -> float | None:
    """From the moment when the rank with these lives began a save to its commit."""
    begun: dict[int | None, list[int]] = defaultdict(list)  # a step is saved again after a restart
    for life in lives:
        for mark in life.marks.of_type(EventType.SAVE_STARTED):
            begun[mark.step].append(mark.time)
    newest = (
        (time, max((at for at in begun.get(step, ()) if at <= time), default=None)) for time, step in saves
    )
    durations = [time - at for time, at in newest if at is not None]
    return statistics.median(durations) / 1e6 if durations else None
