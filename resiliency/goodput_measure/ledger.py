# SPDX-License-Identifier: Apache-2.0
"""The ledger: every microsecond of every rank has exactly one cause.

Wall time runs from the first to the last event of the job, and each rank that ever appeared has a
lane of that length.  Causes are painted on the lane as intervals; where two overlap, the one that
says more wins (a held save over the step around it, a step over the restart around it), and what
nothing covers is `other`.  So no lane can have a gap or an overlap, whatever the log looks like,
and the sum over all causes is wall time x ranks as whole numbers, not approximately.

A step is *lost* when a later life of its rank, or of the job after the rank was gone, continued
from an earlier step; otherwise it is *kept*.  What a killed rank had begun is lost too.

`LedgerBuilder` takes events at any time and in any order.  What it made of the events before is painted again
only where new ones change it, and `figures` costs what is new, however long the job has run.
"""

from __future__ import annotations

import statistics
from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain, islice

from resiliency.errors import ConfigError
from resiliency.events import EventType, JsonValue, RunEvent
from resiliency.goodput_measure.incidents import Failure, Incident, IncidentFinder, LauncherFact
from resiliency.goodput_measure.lanes import PRIORITY, Bucket, Painter, Resumes, Span, Spans, least
from resiliency.goodput_measure.lives import Growth, from_us, mark_of, to_us
from resiliency.goodput_measure.marks import Marks
from resiliency.goodput_measure.tracks.measures import RunningMedian, TimeUnion
from resiliency.goodput_measure.tracks.track import RankTrack

#: A job that terminated and is silent for so long has ended, also where a host never said so.
_SILENT_US = 600_000_000

_KEPT, _OTHER = PRIORITY[Bucket.KEPT_STEPS], PRIORITY[Bucket.OTHER]
_NO_HOST = (-(2**63), "")
#: Events that may be written on another machine after the job's end.
_OF_OTHERS = frozenset({EventType.ACTION_DECIDED, EventType.ACTION_ENDED, EventType.FAULT_INJECTED})

__all__ = ["Bucket", "Figures", "Ledger", "LedgerBuilder", "Span", "build_ledger"]


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Where the time of a job went, in sums.  Times are microseconds since the epoch.

    Attributes:
        totals: microseconds per cause over all ranks; they add up to ``wall_us * ranks``.
        kept_by_any: time in which any rank did a step that is kept.
        holds: how often a rank waited for a save.
        first_step_at: when the first step of any rank began.
        saves: (time, step) of committed checkpoints.
        commit_s: median time from the start of a save to its commit.
        first_step: that the job began with.
    """

    job_name: str
    start: int
    end: int
    ranks: int = 0
    totals: Mapping[Bucket, int] = field(default_factory=lambda: dict.fromkeys(Bucket, 0))
    kept_by_any: int = 0
    holds: int = 0
    first_step_at: int | None = None
    incidents: tuple[Incident, ...] = ()
    saves: tuple[tuple[int, int | None], ...] = ()
    median_step_s: float | None = None
    commit_s: float | None = None
    first_step: int = 0

    @property
    def wall_us(self) -> int:
        return self.end - self.start

    def share(self, bucket: Bucket) -> float | None:
        """Part of all rank time that `bucket` took; None when there is no rank time."""
        available = self.wall_us * self.ranks
        return self.totals[bucket] / available if available else None

    @property
    def goodput(self) -> float | None:
        """Kept steps as a part of all rank time."""
        return self.share(Bucket.KEPT_STEPS)

    @property
    def ettr(self) -> float | None:
        """Part of wall time in which any rank was in a step that was kept.

        The effective training time ratio asks about the job and not about its machines: a rank
        that idles after a scale-down lowers `goodput` and leaves this alone.
        """
        return self.kept_by_any / self.wall_us if self.wall_us else None


@dataclass(frozen=True, kw_only=True)
class Ledger(Figures):
    """The same, span by span."""

    lanes: Mapping[int, Spans]  # rank -> its wall time, without gap or overlap
    hosts: Mapping[int, str] = field(default_factory=dict)  # rank -> host that it was last seen on
    faults: tuple[Failure, ...] = ()

    def to_json(self) -> dict[str, JsonValue]:
        """Totals and incidents; the lanes stay in the event log."""
        return {
            "start": from_us(self.start).isoformat(),
            "end": from_us(self.end).isoformat(),
            "wall_us": self.wall_us,
            "ranks": self.ranks,
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


#: Rank -> attempt -> marks.
_MarksOfRanks = defaultdict[int, defaultdict[int | None, Marks]]


def _marks_of_ranks() -> _MarksOfRanks:
    return defaultdict(lambda: defaultdict(Marks))


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
        self._marks: _MarksOfRanks = _marks_of_ranks()  # that no track has taken
        self._tracks: dict[int, RankTrack] = {}  # by rank, in order
        self._hosts: dict[int, tuple[int, str]] = {}  # rank -> (newest event, host)
        self._saves: list[tuple[int, int | None]] = []
        self._started_at = 0  # when a launcher last started
        self._ended_at: int | None = None  # when the job was last said to have terminated
        self._launchers: dict[str, _Launcher] = defaultdict(_Launcher)  # by host
        self._finder = IncidentFinder()
        self._starts: list[int] = []  # of workers, sorted
        self._resumes = Resumes()
        self._known_from: int | None = None  # the earliest news about the job that no track knows
        self._step_us = RunningMedian()  # as measured, or between the ends of two steps in a row
        self._kept = TimeUnion()  # of all lanes

    def add_event(self, event: RunEvent) -> None:
        """In any order."""
        time = to_us(event.time)
        self.job_name = self.job_name or event.job_name
        # A supervisor learns of the end of its action on another machine, and may do so after the job's end;
        # a failure simulator may injure a host just then.
        if event.type not in _OF_OTHERS:
            if self.start is None or time < self.start:
                self.start = time
            if self.end is None or time > self.end:
                self.end = time
            launcher = self._launchers[event.host]
            if time > launcher.newest:
                launcher.newest = time
            if event.type is EventType.JOB_STARTED:
                launcher.running += 1
                self._started_at = max(time, self._started_at)
            elif event.type is EventType.JOB_TERMINATED:
                launcher.running -= 1
                self._ended_at = max(time, self._ended_at or time)
        rank = event.rank
        if rank is not None and (mark := mark_of(event, time)) is not None:
            self._marks[rank][event.attempt].append(mark)
            seen_at, host = self._hosts.get(rank, _NO_HOST)
            if time > seen_at or (time == seen_at and event.host > host):
                self._hosts[rank] = (time, event.host)
        elif event.type is EventType.FAULT_INJECTED:
            kind = event.fields.get("fault", event.fields.get("kind", ""))
            self._finder.add_fault(Failure(time, rank, str(kind)))
            self._known_from = least(self._known_from, time)
        elif event.type is EventType.CHECKPOINT_SAVED:
            self._saves.append((time, event.step))
        else:
            cause, action = (str(event.fields.get(name, "")) for name in ("cause", "action"))
            self._finder.add_fact(LauncherFact(time, event.type, rank, cause, action))
            if event.type is EventType.WORKERS_STARTED:
                insort(self._starts, time)
                self._known_from = least(self._known_from, time)

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
        figures = self.figures(until=until)
        return Ledger(
            **vars(figures),
            lanes={
                rank: track.lane.framed(figures.start, figures.end) for rank, track in self._tracks.items()
            },
            hosts={rank: host for rank, (_, host) in self._hosts.items()},
            faults=tuple(self._finder.faults),
        )

    def figures(self, *, until: int | None = None) -> Figures:
        """The sums of `build`, at the price of what is new, and of a look at each rank and each save.

        Args:
            until: as `build`.
        Raises:
            ConfigError: there is no event of the job.
        """
        if self.start is None or self.end is None:
            raise ConfigError(
                "there is no event to build a ledger from.", hint="Is this the job's event log?"
            )
        self._update()
        end = self.end if until is None else max(self.end, until)
        lanes = [track.lane for track in self._tracks.values()]
        totals = [sum(of) for of in zip(*(lane.totals for lane in lanes), strict=True)] or [0] * len(Bucket)
        for lane in lanes:
            for low, high, cause in lane.between(end, lane.end):  # a supervisor acted after the job's end
                totals[cause] -= high - low
        totals[_OTHER] += (end - self.start) * len(lanes) - sum(totals)
        first_steps = (at for lane in lanes if (at := lane.first_step_at) is not None)
        return Figures(
            job_name=self.job_name,
            start=self.start,
            end=end,
            ranks=len(lanes),
            totals=dict(zip(Bucket, totals, strict=True)),
            kept_by_any=self._kept.total,
            holds=sum(lane.holds_before(end) for lane in lanes),
            first_step_at=min(first_steps, default=None),
            incidents=self._finder.incidents,
            saves=tuple(sorted(self._saves, key=lambda save: (save[0], -1 if save[1] is None else save[1]))),
            median_step_s=_seconds(self._step_us.median),
            commit_s=self._median_commit_s(),
            first_step=self._first_step(),
        )

    def kept_between(self, start: int, end: int) -> int:
        """Rank time of kept steps in [start, end), as of the last `figures`."""
        lanes = (track.lane for track in self._tracks.values())
        return sum(lane.kept_before(end) - lane.kept_before(start) for lane in lanes)

    def _first_step(self) -> int:
        """That the job began with."""
        begun = (track.lives[0].resumed_from for track in self._tracks.values())
        return min((step for step in begun if step is not None), default=0)

    def _update(self) -> None:
        """Bring incidents, lanes and sums up to date."""
        if not all(
            rank not in self._tracks or self._tracks[rank].is_followed_by(of_rank)
            for rank, of_rank in self._marks.items()
        ):
            self._start_over()
        marks, self._marks = self._marks, _marks_of_ranks()
        if marks.keys() - self._tracks.keys():
            ranks = sorted(marks.keys() | self._tracks.keys())
            self._tracks = {rank: self._tracks.get(rank) or RankTrack(rank) for rank in ranks}
        grown = [growth for rank, of_rank in marks.items() for growth in self._tracks[rank].take(of_rank)]
        self._step_us.add(chain.from_iterable(one.life.marks.step_durations(one.start) for one in grown))
        for one in grown:
            self._finder.note_growth(one)
        changed = self._tracks if self._share(grown) else marks
        painter = Painter(
            self._finder.incidents,
            faults=[fault.time for fault in self._finder.faults],
            starts=self._starts,
            resumes=self._resumes,
        )
        since: int | None = None
        for rank in changed:
            since = least(since, self._tracks[rank].repaint(painter))
        if since is not None:
            self._kept.cut(since)
            for track in self._tracks.values():
                for low, high, cause in track.lane.between(since, track.lane.end):
                    if cause == _KEPT:
                        self._kept.add(low, high)

    def _share(self, grown: Iterable[Growth]) -> bool:
        """Tell all tracks what is new about the job; returns whether anything is."""
        resumed = ((one.life.working, one.resumed_from) for one in grown)
        news = [(time, step) for time, step in resumed if step is not None and self._resumes.add(time, step)]
        if news:
            until, lowest = max(time for time, _ in news), min(step for _, step in news)
            for track in self._tracks.values():
                track.change_resumes(lowest, until)
        changed_at = self._finder.update([track.lives for track in self._tracks.values()])
        since, self._known_from = least(self._known_from, changed_at), None
        if since is not None:
            for track in self._tracks.values():
                track.change_after(since)
        return bool(news) or since is not None

    def _start_over(self) -> None:
        """Marks came that are older than others of their process: all is derived from the marks again."""
        late, self._marks = self._marks, _marks_of_ranks()
        for rank, track in self._tracks.items():
            for life in track.lives:
                self._marks[rank][life.attempt].extend(life.marks)
        for rank, of_rank in late.items():
            for attempt, marks in of_rank.items():
                self._marks[rank][attempt].extend(marks)
        self._tracks = {}
        self._resumes = Resumes()
        self._step_us, self._kept = RunningMedian(), TimeUnion()
        self._finder.forget_lives()

    def _median_commit_s(self) -> float | None:
        """From the moment when the first rank began a save to its commit."""
        begun: dict[int | None, list[int]] = defaultdict(list)  # a step is saved again after a restart
        for track in islice(self._tracks.values(), 1):
            for life in track.lives:
                for mark in life.marks.of_type(EventType.SAVE_STARTED):
                    insort(begun[mark.step], mark.time)
        durations = [
            time - begun[step][place - 1]
            for time, step in self._saves
            if (place := bisect_right(begun.get(step, ()), time))
        ]
        return statistics.median(durations) / 1e6 if durations else None


def _seconds(us: float | None) -> float | None:
    return None if us is None else us / 1e6
