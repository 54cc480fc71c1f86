# SPDX-License-Identifier: Apache-2.0
"""A job that is measured while its events come: equal to a fresh read, at the price of what is new."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resiliency.events import EventType as E
from resiliency.events import RunEvent
from resiliency.goodput_measure import lanes
from resiliency.goodput_measure.jobs import JobEvents, Options
from resiliency.goodput_measure.ledger import Bucket, Ledger
from resiliency.goodput_measure.live.figures import figures_of_result, figures_so_far
from resiliency.goodput_measure.live.follow import LogTail
from resiliency.goodput_measure.lives import Life, to_us
from resiliency.goodput_measure.marks import Marks
from resiliency.goodput_measure.reader import ReadStats, read_events
from resiliency.goodput_measure.tracks import track
from resiliency.goodput_measure.tracks.measures import RunningMedian, TimeUnion
from tests.goodput.histories import chaos, damaged_job, live_job
from tests.goodput.story import Story, event

OPTIONS = Options(window_us=7_000_000)


def fresh(events: Iterable[RunEvent]) -> JobEvents:
    job = JobEvents("demo")
    for one in events:
        job.add_full(one)
    return job


def check_equal(growing: JobEvents, read: Sequence[RunEvent], until: int | None) -> None:
    whole = fresh([event(-1, E.JOB_STARTED), *read])  # the published formula wants one of its events
    result = whole.result(OPTIONS, until=until)
    assert result.measured is not None
    assert figures_so_far(growing, OPTIONS, until=until) == figures_of_result(result)
    ledger = growing.builder.build(until=until)
    assert replace(ledger, lanes={}) == replace(result.measured.ledger, lanes={})
    assert {rank: tuple(lane) for rank, lane in ledger.lanes.items()} == {
        rank: tuple(lane) for rank, lane in result.measured.ledger.lanes.items()
    }

    check_sums(ledger)


def check_sums(ledger: Ledger) -> None:
    """The sums, which grew with the lanes, are those of the spans."""
    spans = sorted(span for lane in ledger.lanes.values() for span in lane)
    totals = dict.fromkeys(Bucket, 0)
    kept_by_any = kept_until = 0
    for start, end, bucket in spans:
        totals[bucket] += end - start
        if bucket is Bucket.KEPT_STEPS:
            kept_by_any += max(end - max(start, kept_until), 0)
            kept_until = max(end, kept_until)
    assert (ledger.totals, ledger.kept_by_any) == (totals, kept_by_any)
    assert ledger.holds == sum(span.bucket is Bucket.SAVE_HELD for span in spans)
    stepped = (span.start for span in spans if span.bucket in (Bucket.KEPT_STEPS, Bucket.LOST_STEPS))
    assert (ledger.first_step_at or ledger.end) == min(stepped, default=ledger.end)


def in_order(events: Sequence[RunEvent]) -> list[RunEvent]:
    return sorted(events, key=lambda one: one.time)


@settings(max_examples=150, deadline=None)
@given(
    chaos() | chaos().map(in_order) | damaged_job() | damaged_job().map(in_order),
    st.lists(st.integers(0, 400), max_size=6),
    st.booleans(),
    st.lists(st.booleans(), min_size=7, max_size=7),
)
def test_figures_and_ledger_are_those_of_a_fresh_read_wherever_a_job_is_cut(
    events: Sequence[RunEvent], cuts: list[int], runs: bool, looked: list[bool]
) -> None:
    growing = fresh([event(-1, E.JOB_STARTED)])
    at = 0
    for cut, looks in zip(
        [*sorted(min(cut, len(events)) for cut in cuts), len(events)], looked, strict=False
    ):
        for one in events[at:cut]:
            growing.add_full(one)
        at = cut
        if looks or cut == len(events):
            newest = max((to_us(one.time) for one in events[:cut]), default=0)
            check_equal(growing, events[:cut], newest + 1_500_000 if runs else None)


@settings(max_examples=60, deadline=None)
@given(live_job(), st.integers(4, 20), st.integers(0, 2))
def test_figures_and_ledger_are_those_of_a_fresh_read_at_each_look_at_a_live_job(
    events: list[RunEvent], stride: int, ahead_s: int
) -> None:
    growing = fresh([event(-1, E.JOB_STARTED)])
    for begin in range(0, len(events), stride):
        for one in events[begin : begin + stride]:
            growing.add_full(one)
        newest = max(to_us(one.time) for one in events[: begin + stride])
        check_equal(growing, events[: begin + stride], newest + ahead_s * 1_000_000 if ahead_s else None)


def of_rank(attempt: int, *marks: tuple[float, E, int | None]) -> list[RunEvent]:
    return [event(time, kind, rank=0, attempt=attempt, step=step) for time, kind, step in marks]


def restarted(detected: float, started: float) -> list[RunEvent]:
    return [event(detected, E.FAULT_DETECTED, rank=0), event(started, E.WORKERS_STARTED)]


@pytest.mark.parametrize(
    "looks",
    [
        pytest.param(
            [
                of_rank(
                    0, (0, E.PROCESS_STARTED, None), *((9 + n, E.STEP_FINISHED, 1 + n % 5) for n in (0, 4, 7))
                ),
                of_rank(1, (20, E.PROCESS_STARTED, None), (21, E.CHECKPOINT_LOADED, 4)),
            ],
            id="steps that went back are lost one by one",
        ),
        pytest.param(
            [
                of_rank(
                    0, (0, E.PROCESS_STARTED, None), *((10 + n, E.STEP_FINISHED, n) for n in range(1, 5))
                ),
                of_rank(0, (16, E.CHECKPOINT_LOADED, 2), (17, E.STEP_FINISHED, 3)),
            ],
            id="a process goes back to a checkpoint",
        ),
        pytest.param(
            [
                of_rank(0, (0, E.PROCESS_STARTED, None), (10, E.STEP_FINISHED, 1)),
                of_rank(1, (12, E.PROCESS_STARTED, None), (13, E.INITIALIZED, None)),
                of_rank(0, (14, E.STEP_FINISHED, 2), (16, E.STEP_FINISHED, 3)),
                of_rank(0, (17, E.STEP_FINISHED, 4)),
                of_rank(1, (18, E.STEP_FINISHED, 4)),
                of_rank(0, (19, E.STEP_FINISHED, 5)),
                of_rank(1, (20, E.STEP_FINISHED, 5)),
            ],
            id="two processes of a rank at once",
        ),
        pytest.param(
            [
                [*of_rank(0, (0, E.PROCESS_STARTED, None), (10, E.STEP_FINISHED, 1)), *restarted(20, 22)],
                of_rank(0, (19, E.STEP_FINISHED, 2)),
            ],
            id="the last step before an incident is told late",
        ),
        pytest.param(
            [
                [*restarted(20, 22), *of_rank(1, (30, E.PROCESS_STARTED, None), (35, E.IMPORTED, None))],
                [*restarted(45, 46), event(47, E.IMPORTED, rank=1, attempt=0)],
                [*of_rank(1, (50, E.INITIALIZED, None)), event(46, E.PROCESS_STARTED, rank=1, attempt=0)],
            ],
            id="a standby process begins to work while another log comes late",
        ),
        pytest.param(
            [
                of_rank(0, (0, E.PROCESS_STARTED, None), (10, E.STEP_FINISHED, 1)),
                of_rank(2, (30, E.PROCESS_STARTED, None), (40, E.STEP_FINISHED, 2)),
                of_rank(1, (15, E.PROCESS_STARTED, None), (20, E.INITIALIZED, None)),
            ],
            id="a process is told after the one that followed it",
        ),
    ],
)
def test_what_is_told_late_or_out_of_order_counts_as_in_a_fresh_read(looks: list[list[RunEvent]]) -> None:
    growing, read = fresh([event(-1, E.JOB_STARTED)]), list[RunEvent]()
    for events in looks:
        read += events
        for one in events:
            growing.add_full(one)
        check_equal(growing, read, None)


@settings(max_examples=60, deadline=None)
@given(damaged_job(), st.lists(st.integers(0, 20_000), max_size=5), st.booleans())
def test_a_log_that_is_cut_anywhere_also_in_a_line_reads_like_the_whole(
    tmp_path_factory: pytest.TempPathFactory, events: Sequence[RunEvent], cuts: list[int], newline: bool
) -> None:
    path = tmp_path_factory.mktemp("cut") / "log"
    lines = [event(-1, E.JOB_STARTED).to_json(), "damaged", *(one.to_json() for one in events)]
    data = "\n".join(lines).encode() + b"\n" * newline
    stats, growing = ReadStats(), JobEvents("demo")
    tail = LogTail(path, stats)
    at = 0
    for cut in [*sorted(min(cut, len(data)) for cut in cuts), len(data)]:
        with path.open("ab") as file:
            file.write(data[at:cut])
        at = cut
        for one in tail.poll():
            growing.add_full(one)
        if growing.goodput_events:
            figures_so_far(growing, OPTIONS)
    for one in tail.finish():
        growing.add_full(one)
    whole_stats = ReadStats()
    whole = fresh(read_events(path, stats=whole_stats)).result(OPTIONS)
    assert figures_so_far(growing, OPTIONS) == figures_of_result(whole)
    assert growing.result(OPTIONS).to_json() == whole.to_json()
    assert stats.lines == whole_stats.lines
    assert stats.examples == whole_stats.examples


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.integers(0, 60), max_size=60), max_size=6), st.integers(2, 9))
def test_a_running_median_is_the_median(portions: list[list[int]], longest: int) -> None:
    running = RunningMedian()
    there: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("resiliency.goodput_measure.tracks.measures._LONGEST", longest)
        for portion in portions:
            there += portion
            running.add(portion)
            assert running.median == (statistics.median(there) if there else None)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.integers(1, 9)) | st.integers(0, 50),
        max_size=30,
    )
)
def test_a_union_of_time_is_the_time_that_any_covers(changes: list[tuple[int, int] | int]) -> None:
    union = TimeUnion()
    covered: set[int] = set()
    for change in changes:
        if isinstance(change, int):
            union.cut(change)
            covered = {at for at in covered if at < change}
        else:
            start, length = change
            union.add(start, start + length)
            covered |= set(range(start, start + length))
        assert union.total == len(covered)


class Counted:
    """Counts the marks, lives and incidents that are looked at, in place of the time that this takes."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.looks = 0
        for owner, name in (
            (lanes.Painter, "paint"),
            (lanes.Painter, "end"),
            (Life, "finished_step"),
            (Life, "first"),
        ):
            patch.setattr(owner, name, self._counting(getattr(owner, name)))
        sweep = lanes.sweep

        def counting_sweep(rows: list[lanes.Row], start: int, end: int) -> list[lanes.Row]:
            self.looks += len(rows)
            return sweep(rows, start, end)

        patch.setattr(track, "sweep", counting_sweep)

    def _counting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*arguments: Any, **options: Any) -> Any:
            self.looks += 1
            return function(*arguments, **options)

        return counting

    def during(self, function: Callable[[], object]) -> int:
        before = self.looks
        function()
        return self.looks - before


def failing(incidents: int) -> Story:
    story = Story(4).start().steps(2, save_every=2)
    for _ in range(incidents):
        story.fault(1).start(restore=story.step).steps(2, save_every=2)
    return story


def test_ten_times_the_incidents_are_ten_times_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    few, many = (
        counted.during(lambda incidents=incidents: fresh(failing(incidents).events).result(OPTIONS))
        for incidents in (9, 99)
    )
    assert 9 < many / few < 11


def test_a_look_at_a_long_job_costs_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    costs = []
    for incidents, steps in ((2, 10), (40, 10), (2, 2000)):
        story = failing(incidents).steps(steps)
        growing = fresh(story.events)
        of_job = []
        for _ in range(4):
            told = len(story.events)
            figures_so_far(growing, OPTIONS)
            for one in story.steps(1).events[told:]:
                growing.add_full(one)
            of_job.append(counted.during(lambda growing=growing: figures_so_far(growing, OPTIONS)))
        # Nothing is looked at when nothing is new; a restart takes back the steps since the save.
        assert counted.during(lambda growing=growing: figures_so_far(growing, OPTIONS, until=10**16)) == 0
        told = len(story.events)
        for one in story.fault(2).start(restore=story.step - 2).steps(1).events[told:]:
            growing.add_full(one)
        costs.append((of_job, counted.during(lambda growing=growing: figures_so_far(growing, OPTIONS))))
    assert costs[0] == costs[1] == costs[2]
    assert max(costs[0][0]) <= 4 * 10


def test_a_rank_that_finishes_steps_without_end_is_not_looked_at_from_its_beginning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked: list[int] = []
    rows = Marks.rows

    def counting(self: Marks, start: int = 0) -> Iterator[Any]:
        looked.append(len(self) - start)
        return rows(self, start)

    monkeypatch.setattr(Marks, "rows", counting)
    story = Story(2).start().steps(500, save_every=5)
    growing = fresh(story.events)
    figures_so_far(growing, OPTIONS)
    looked.clear()
    told = len(story.events)
    for one in story.steps(3, save_every=5).events[told:]:
        growing.add_full(one)
    figures_so_far(growing, OPTIONS)
    assert 0 < sum(looked) < 50
