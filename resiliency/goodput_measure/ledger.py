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
from array import array
from bisect import insort
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from resiliency.errors import ConfigError
from resiliency.events import EventType, JsonValue, RunEvent
from resiliency.goodput_measure.incidents import Failure, Incident, IncidentFinder, LauncherFact
from resiliency.goodput_measure.lanes import PRIORITY, Bucket, Painter, Resumes, Span, Spans
from resiliency.goodput_measure.lives import Life, from_us, mark_of, to_us
from resiliency.goodput_measure.marks import Marks
from resiliency.goodput_measure.tracks.measures import TimeUnion
from resiliency.goodput_measure.tracks.sums import Sums
from resiliency.goodput_measure.tracks.track import Growth, RankTrack

#: A job that terminated and is silent for so long has ended, also where a host never said so.
_SILENT_US = 600_000_000

_KEPT, _HELD, _OTHER = (PRIORITY[of] for of in (Bucket.KEPT_STEPS, Bucket.SAVE_HELD, Bucket.OTHER))
_NO_HOST = (-(2**63), "")
#: Events that may be written on another machine after the job's end.
_OF_OTHERS = frozenset({EventType.ACTION_DECIDED, EventType.ACTION_ENDED, EventType.FAULT_INJECTED})

__all__ = ["Bucket", "Figures", "Ledger", "LedgerBuilder", "Span", "build_ledger"]


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
        kept = TimeUnion()
        for lane in self.lanes.values():
            for start, end, cause in lane.rows():
                if cause == _KEPT:
                    kept.add(start, end)
        return kept.total / self.wall_us

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


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The sums of a ledger, without the ledger.  Times as there.

    Attributes:
        kept_in_window: rank time of kept steps in the last part of the wall time, as long as was asked for.
        first_step_at: when the first step of any rank began.
        own_interval: median steps between saves.
        last_saved: the highest step that was saved.
    """

    job_name: str
    start: int
    end: int
    ranks: int
    totals: dict[Bucket, int]
    kept_in_window: int
    kept_by_any: int
    holds: int
    incidents: tuple[Incident, ...]
    median_step_s: float | None
    commit_s: float | None
    own_interval: float | None
    last_saved: int | None
    first_step: int
    first_step_at: int | None


class LedgerBuilder:
    """Takes the events of one job, keeps what the ledger needs of them, and makes it at any time."""

    def __init__(self) -> None:
        self.job_name = ""
        self.start: int | None = None
        self.end: int | None = None
        self._marks: dict[int, dict[int | None, Marks]] = {}  # that no track has taken
        self._tracks: dict[int, RankTrack] = {}  # by rank, in order
        self._hosts: dict[int, tuple[int, str]] = {}  # rank -> (newest event, host)
        self._saves: list[tuple[int, int | None]] = []
        self._started_at = 0  # when a launcher last started
        self._ended_at: int | None = None  # when the job was last said to have terminated
        self._launchers: dict[str, _Launcher] = defaultdict(_Launcher)  # by host
        self._finder = IncidentFinder()
        self._starts: list[int] = []  # of workers, sorted
        self._resumes = Resumes()
        self._painter: Painter | None = None  # None where what it knows of the job has changed
        self._known_from: int | None = None  # the earliest news about the job that no track knows
        self._sums: Sums | None = None  # None until figures are asked for

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
            of_rank = self._marks.get(rank)
            if of_rank is None:
                of_rank = self._marks[rank] = {}
            marks = of_rank.get(event.attempt)
            if marks is None:
                marks = of_rank[event.attempt] = Marks()
            marks.append(mark)
            seen_at, host = self._hosts.get(rank, _NO_HOST)
            if time > seen_at or (time == seen_at and event.host > host):
                self._hosts[rank] = (time, event.host)
        elif event.type is EventType.FAULT_INJECTED:
            kind = event.fields.get("fault", event.fields.get("kind", ""))
            self._finder.add_fault(Failure(time, rank, str(kind)))
            self._note_news(time)
        elif event.type is EventType.CHECKPOINT_SAVED:
            self._saves.append((time, event.step))
            if self._sums is not None:
                self._sums.saves.add_save(time, event.step)
        else:
            cause, action = (str(event.fields.get(name, "")) for name in ("cause", "action"))
            self._finder.add_fact(LauncherFact(time, event.type, rank, cause, action))
            if event.type is EventType.WORKERS_STARTED:
                insort(self._starts, time)
                self._note_news(time)

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
        self._update()
        end = self.end if until is None else max(self.end, until)
        tracks = self._tracks
        first_rank = next(iter(tracks.values())).lives if tracks else []
        return Ledger(
            job_name=self.job_name,
            start=self.start,
            end=end,
            lanes={rank: track.lane.framed(self.start, end) for rank, track in tracks.items()},
            hosts={rank: host for rank, (_, host) in self._hosts.items()},
            incidents=self._finder.incidents,
            faults=tuple(self._finder.faults),
            saves=tuple(sorted(self._saves, key=lambda save: (save[0], -1 if save[1] is None else save[1]))),
            median_step_s=_median_step_s(track.lives for track in tracks.values()),
            commit_s=_median_commit_s(first_rank, self._saves),
            first_step=self._first_step(),
        )

    def figures(self, *, window_us: int, until: int | None = None) -> Figures:
        """The sums of `build`, at the price of what is new, and of a look at each rank.

        Args:
            window_us: how much of the end of the wall time `kept_in_window` is about.
            until: as `build`.
        Raises:
            ConfigError: there is no event of the job.
        """
        if self.start is None or self.end is None:
            raise ConfigError("there is no event to take figures from.", hint="Is this the job's event log?")
        self._update()
        if self._sums is None:
            self._sums = Sums(self._tracks, self._saves)
        sums, lanes = self._sums, [track.lane for track in self._tracks.values()]
        end = self.end if until is None else max(self.end, until)
        totals, holds = list(sums.totals), sums.holds
        for lane in lanes:
            if lane.end > end:  # a supervisor acted after the job's end
                for low, high, cause in lane.between(end, lane.end):
                    totals[cause] -= high - low
                    holds -= cause == _HELD and low > end
        totals[_OTHER] += (end - self.start) * len(lanes) - sum(totals)
        window_start = max(end - window_us, self.start)
        first_steps = [at for lane in lanes if (at := lane.first_step_at) is not None]
        return Figures(
            job_name=self.job_name,
            start=self.start,
            end=end,
            ranks=len(lanes),
            totals=dict(zip(Bucket, totals, strict=True)),
            kept_in_window=sum(lane.kept_before(end) - lane.kept_before(window_start) for lane in lanes),
            kept_by_any=sums.kept.total,
            holds=holds,
            incidents=self._finder.incidents,
            median_step_s=_seconds(sums.step_us.median),
            commit_s=_seconds(sums.saves.commit_us.median),
            own_interval=sums.saves.gaps.median,
            last_saved=sums.saves.last_step,
            first_step=self._first_step(),
            first_step_at=min(first_steps, default=None),
        )

    def _first_step(self) -> int:
        """That the job began with."""
        begun = (track.lives[0].resumed_from for track in self._tracks.values())
        return min((step for step in begun if step is not None), default=0)

    def _note_news(self, time: int) -> None:
        self._painter = None
        self._known_from = time if self._known_from is None else min(time, self._known_from)

    def _update(self) -> None:
        """Bring incidents, lanes and sums up to date."""
        marks, self._marks = self._marks, {}
        if new_ranks := marks.keys() - self._tracks.keys():
            if self._tracks and min(new_ranks) < next(iter(self._tracks)):
                self._sums = None  # commits are measured at the first rank
            self._tracks.update((rank, RankTrack(rank)) for rank in new_ranks)
            in_place = sorted(self._tracks.items())
            self._tracks.clear()
            self._tracks.update(in_place)
        in_order = True
        resumed: list[tuple[int, int]] = []
        for rank, of_rank in marks.items():
            grown, kept_order = self._tracks[rank].take(of_rank)
            in_order &= kept_order
            for growth in grown:
                self._note_growth(growth, resumed)
                if self._sums is not None:
                    self._sums.add_steps(growth.life, growth.start)
                    if rank == next(iter(self._tracks)):
                        self._sums.saves.add_begun(growth.life, growth.start)
        if not in_order:
            self._forget()
        if not in_order or self._share(resumed):
            self._repaint(self._tracks.values())
        else:
            self._repaint(self._tracks[rank] for rank in marks)

    def _note_growth(self, growth: Growth, resumed: list[tuple[int, int]]) -> None:
        life = growth.life
        step = life.resumed_from
        has_resumed = growth.resumed_from is None and step is not None
        if has_resumed:
            resumed.append((life.working, step or 0))
        newest = self._finder.newest
        is_late = newest is not None and growth.last <= newest
        if is_late or has_resumed or life.working != growth.working or life.has_news(growth.start):
            self._finder.note_lives(began=min(growth.working, life.working), new_marks=growth.last)

    def _share(self, resumed: Iterable[tuple[int, int]]) -> bool:
        """Tell all tracks what is new about the job; returns whether anything is."""
        news = [(time, step) for time, step in resumed if self._resumes.add(time, step)]
        since = self._finder.update(self._tracks.values())
        if since is not None:
            self._note_news(since)
        if not news and self._known_from is None:
            return False
        until, least = max((time for time, _ in news), default=0), min((step for _, step in news), default=0)
        for track in self._tracks.values():
            if news:
                track.change_resumes(until, least)
            if self._known_from is not None:
                track.change_after(self._known_from)
        self._known_from = None
        return True

    def _forget(self) -> None:
        """Marks came that are older than others of their process: all is derived from the lives again."""
        self._resumes = Resumes()
        self._painter = self._sums = None
        for track in self._tracks.values():
            track.forget()
            for life in track.lives:
                if (step := life.resumed_from) is not None:
                    self._resumes.add(life.working, step)
        self._finder.forget_lives()
        self._finder.update(self._tracks.values())
        self._known_from = None

    def _repaint(self, tracks: Iterable[RankTrack]) -> None:
        if self._painter is None:
            self._painter = Painter(
                self._finder.incidents,
                faults=[fault.time for fault in self._finder.faults],
                starts=self._starts,
                resumes=self._resumes,
            )
        for track in tracks:
            holds = track.lane.holds
            removed, added = track.repaint(self._painter)
            if self._sums is not None:
                self._sums.change_rows(removed, added)
                self._sums.holds += track.lane.holds - holds
        if self._sums is not None:
            self._sums.settle()


def _seconds(us: float | None) -> float | None:
    return None if us is None else us / 1e6


def _median_step_s(lives: Iterable[Sequence[Life]]) -> float | None:
    """Median duration of a step: as measured, or between the ends of two steps in a row."""
    durations = array("q")
    for of_rank in lives:
        for life in of_rank:
            durations.extend(life.marks.step_durations())
    return statistics.median(durations) / 1e6 if durations else None


def _median_commit_s(lives: Sequence[Life], saves: Iterable[tuple[int, int | None]]) -> float | None:
    """From the moment when the rank with these lives began a save to its commit."""
    begun: dict[int | None, list[int]] = defaultdict(list)  # a step is saved again after a restart
    for life in lives:
        for mark in life.marks.of_type(EventType.SAVE_STARTED):
            begun[mark.step].append(mark.time)
    for times in begun.values():
        times.sort()
    newest = (
        (time, next((at for at in reversed(begun.get(step, ())) if at <= time), None)) for time, step in saves
    )
    durations = [time - at for time, at in newest if at is not None]
    return statistics.median(durations) / 1e6 if durations else None
