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

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from resiliency.errors import ConfigError
from resiliency.events import EventType, JsonValue, RunEvent
from resiliency.goodput_measure.incidents import Fault, Incident, LauncherFact, find_incidents
from resiliency.goodput_measure.lanes import Bucket, Painter, Span, resolve
from resiliency.goodput_measure.lives import Life, Mark, from_us, mark_of, split_lives, to_us

__all__ = ["Bucket", "Ledger", "Span", "build_ledger"]


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """Where the time of a job went.  Times are microseconds since the epoch."""

    job_name: str
    start: int
    end: int
    lanes: Mapping[int, tuple[Span, ...]]  # rank -> its wall time, without gap or overlap
    hosts: Mapping[int, str] = field(default_factory=dict)  # rank -> host that it was last seen on
    incidents: tuple[Incident, ...] = ()
    faults: tuple[Fault, ...] = ()
    saves: tuple[tuple[int, int | None], ...] = ()  # (time, step) of committed checkpoints
    median_step_s: float | None = None

    @property
    def wall_us(self) -> int:
        return self.end - self.start

    @cached_property
    def totals(self) -> dict[Bucket, int]:
        """Microseconds per cause over all ranks; they add up to ``wall_us * len(lanes)``."""
        totals = dict.fromkeys(Bucket, 0)
        for lane in self.lanes.values():
            for span in lane:
                totals[span.bucket] += span.end - span.start
        return totals

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
        kept = sorted(
            span[:2] for lane in self.lanes.values() for span in lane if span.bucket is Bucket.KEPT_STEPS
        )
        covered, until = 0, self.start
        for start, end in kept:
            covered += max(end - max(start, until), 0)
            until = max(until, end)
        return covered / self.wall_us

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
    facts = _Facts()
    for event in events:
        if job_name in (None, event.job_name):
            facts.add(event)
    if facts.start is None or facts.end is None:
        raise ConfigError("there is no event to build a ledger from.", hint="Is this the job's event log?")
    lives = {rank: split_lives(rank, marks) for rank, marks in sorted(facts.marks.items())}
    incidents = find_incidents(facts.launcher, list(lives.values()), facts.faults)
    painter = Painter(
        lives.values(),
        incidents,
        faults=(fault.time for fault in facts.faults),
        starts=(fact.time for fact in facts.launcher if fact.type is EventType.WORKERS_STARTED),
    )
    return Ledger(
        job_name=facts.job_name,
        start=facts.start,
        end=facts.end,
        lanes={
            rank: resolve(painter.paint(of_rank), facts.start, facts.end) for rank, of_rank in lives.items()
        },
        hosts=facts.hosts,
        incidents=incidents,
        faults=tuple(sorted(facts.faults, key=lambda fault: fault.time)),
        saves=tuple(sorted(facts.saves, key=lambda save: save[0])),
        median_step_s=_median_step_s(lives.values()),
    )


class _Facts:
    """One pass over the events, keeping only what the ledger needs."""

    def __init__(self) -> None:
        self.job_name = ""
        self.start: int | None = None
        self.end: int | None = None
        self.marks: dict[int, list[tuple[int | None, Mark]]] = defaultdict(list)
        self.hosts: dict[int, str] = {}
        self.launcher: list[LauncherFact] = []
        self.faults: list[Fault] = []
        self.saves: list[tuple[int, int | None]] = []

    def add(self, event: RunEvent) -> None:
        time = to_us(event.time)
        self.job_name = self.job_name or event.job_name
        self.start = time if self.start is None else min(self.start, time)
        self.end = time if self.end is None else max(self.end, time)
        if event.rank is not None and (mark := mark_of(event, time)) is not None:
            self.marks[event.rank].append((event.attempt, mark))
            self.hosts[event.rank] = event.host
        elif event.type is EventType.FAULT_INJECTED:
            kind = event.fields.get("fault", event.fields.get("kind", ""))
            self.faults.append(Fault(time, event.rank, str(kind)))
        elif event.type is EventType.CHECKPOINT_SAVED:
            self.saves.append((time, event.step))
        else:
            cause = str(event.fields.get("cause", ""))
            self.launcher.append(LauncherFact(time, event.type, event.rank, cause))


def _median_step_s(lives: Iterable[Sequence[Life]]) -> float | None:
    """Median duration of a step: as measured, or between the ends of two steps in a row."""
    durations: list[int] = []
    for life in (life for of_rank in lives for life in of_rank):
        previous: Mark | None = None
        for mark in life.marks:
            if mark.type is not EventType.STEP_FINISHED:
                continue
            if mark.duration is not None:
                durations.append(mark.duration)
            elif previous is not None:
                durations.append(mark.time - previous.time)
            previous = mark
    return statistics.median(durations) / 1e6 if durations else None
