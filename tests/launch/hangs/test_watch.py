# SPDX-License-Identifier: Apache-2.0
"""What the watch says and does while ranks stand still, look after look; times are scaled down."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from resiliency.events import EventStream
from resiliency.launch.fleet.link import NullReporter
from resiliency.launch.hangs import watch
from resiliency.launch.hangs.hosts import JobView
from resiliency.launch.hangs.looking import Look, Watched
from resiliency.launch.health import hang_times
from resiliency.launch.health.causes import Diagnosis
from resiliency.launch.health.hang_times import HangTimeout
from resiliency.launch.health.hangs import RankView
from resiliency.launch.health.phases import RankPhase
from resiliency.progress import RankProgress, StepPage
from resiliency.rank.inspection import GroupState
from resiliency.runtime import RunInfo
from tests.waiting import wait_for_seconds, wait_until

LOOK_S, ACCUSE_S, ACT_S, FIRST_ACT_S = 0.1, 0.4, 0.8, 30.0
#: Nothing happens within so long where nothing is to happen.
LONG_S = 2 * ACT_S


class StillPage(StepPage):
    """Ranks that finish no step after `step`, at these times."""

    def __init__(self, *times: float, step: int | None = 7) -> None:
        self.times, self.step = times, step

    def read(self, local_rank: int) -> RankProgress:
        step_time = None if self.step is None else self.times[local_rank]
        return RankProgress(step=self.step, step_time=step_time, heartbeat_time=None, reports=True)


class Told(NullReporter):
    """Keeps what the supervisor is told."""

    def __init__(self) -> None:
        self.ranks: list[tuple[int, ...]] = []

    def report_diagnosis(self, found: Diagnosis) -> None:
        self.ranks.append(found.ranks)


class Job:
    """Rank 0 waits in a collective that rank 1 has not begun; what rank 1 shows is said, look by look."""

    def __init__(self, shows: Callable[[int], Mapping[str, object]], *, waits: bool, ranks: int) -> None:
        self.processes = [subprocess.Popen(["sleep", "1000"]) for _ in range(ranks)]
        self.told = Told()
        self.looks = 0
        self._shows, self._waits = shows, waits

    def look(self, ranks: Mapping[int, Watched]) -> Look:
        self.looks += 1
        views = []
        for rank, seen in ranks.items():
            groups = (GroupState(name="0", members="2", begun=8 - rank),)
            view = RankView(
                rank=rank,
                host="h",
                step=seen.step,
                still_s=seen.still_s,
                stopped_s=seen.stopped_s,
                groups=groups,
            )
            if rank == 0:
                phase = RankPhase.COLLECTIVE if self._waits else RankPhase.OTHER
                views.append(replace(view, phase=phase, waits=self._waits, idle=True))
            else:
                view = replace(view, phase=RankPhase.OTHER, idle=True, quiet_s=1000.0)
                views.append(replace(view, **self._shows(self.looks)))  # type: ignore[arg-type]
        return Look(views=tuple(views), stacks={})

    @property
    def has_ended(self) -> bool:
        return self.processes[-1].poll() is not None

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> Iterator[Callable[..., Job]]:
    caplog.set_level(logging.INFO)
    times = {"LOOK": LOOK_S, "FIRST_STEP": LOOK_S, "ACCUSE": ACCUSE_S, "ACT": ACT_S, "FIRST_ACT": FIRST_ACT_S}
    for name, seconds in times.items():
        monkeypatch.setattr(hang_times, f"{name}_S", seconds)
    monkeypatch.setattr(watch, "_LOOK_EVERY_S", 0.02)
    monkeypatch.setattr(hang_times, "_KNOWN", 0)
    jobs: list[Job] = []
    ends: list[Callable[[], None]] = []

    def look(ranks: Mapping[int, Watched], *_: object) -> Look:
        (job,) = [job for job in jobs if job.processes[0].pid == ranks[0].pid]
        return job.look(ranks)

    monkeypatch.setattr(watch, "look", look)

    def start(
        shows: Callable[[int], Mapping[str, object]],
        *,
        timeout: str = "auto",
        step: int | None = 7,
        waits: bool = True,
        ranks: int = 2,
    ) -> Job:
        job = Job(shows, waits=waits, ranks=ranks)
        jobs.append(job)
        now = time.monotonic()
        hangs = watch.HangWatch(
            StillPage(now, now, step=step),
            directory=tmp_path,
            host="h",
            events=EventStream(RunInfo()),
            reporter=job.told,
            timeout=HangTimeout.parse(timeout),
        )
        ends.extend([job.end, hangs.close])
        pids = {rank: (rank, process.pid) for rank, process in enumerate(job.processes)}
        hangs.begin(JobView(run="r", attempt=len(jobs), node=0, hosts=1), pids)
        return job

    yield start
    for end in reversed(ends):
        end()


def levels(caplog: pytest.LogCaptureFixture, attempt: int = 1) -> list[str]:
    said = f"job stands still in attempt {attempt}"
    return [record.levelname for record in caplog.records if record.message.startswith(said)]


def test_an_accusation_is_a_warning_then_an_error_and_at_last_the_end_of_the_rank(
    start: Callable[..., Job], caplog: pytest.LogCaptureFixture
) -> None:
    job = start(lambda look: {})
    wait_until(lambda: job.has_ended, "it is not ended")
    assert job.processes[1].wait() == -signal.SIGKILL
    assert job.processes[0].poll() is None
    assert job.looks >= 3
    assert (levels(caplog)[:2], job.told.ranks) == (["WARNING", "ERROR"], [(1,)])


INNOCENTS: dict[str, tuple[Callable[[int], Mapping[str, object]], dict[str, object]]] = {
    "it did something between two looks": (lambda look: {"quiet_s": 0.0}, {}),
    "one look of several found it at work": (lambda look: {"idle": look % 3 != 0}, {}),
    "it waits for something outside": (lambda look: {"outside": "10.0.0.7:443"}, {}),
    "a person has it in a debugger": (lambda look: {"phase": RankPhase.PERSON}, {"timeout": "0.5"}),
    "it exports what it has trained": (lambda look: {"ends": True}, {"timeout": "0.5", "waits": False}),
    "it has not begun to train": (
        lambda look: {"phase": RankPhase.STARTING},
        {"timeout": "0.5", "step": None},
    ),
}


def test_ranks_are_not_ended_that_may_go_on(
    start: Callable[..., Job], caplog: pytest.LogCaptureFixture
) -> None:
    jobs = {why: start(shows, **settings) for why, (shows, settings) in INNOCENTS.items()}
    wait_for_seconds(LONG_S)
    wait_until(lambda: min(job.looks for job in jobs.values()) > 3, "they are not inspected")
    for attempt, (why, job) in enumerate(jobs.items(), 1):
        assert not job.has_ended, why
        assert (set(levels(caplog, attempt)), job.told.ranks) == ({"WARNING"}, []), why


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_job_whose_ranks_are_all_stopped_is_left_alone(
    start: Callable[..., Job], caplog: pytest.LogCaptureFixture, ranks: int
) -> None:
    job = start(lambda look: {}, ranks=ranks)
    for process in job.processes:
        process.send_signal(signal.SIGSTOP)
    wait_until(lambda: levels(caplog)[-1:] == ["ERROR"], "they are not named")
    wait_for_seconds(LONG_S)
    assert not any(process.poll() for process in job.processes)


def test_a_look_in_which_the_host_was_suspended_says_nothing(
    start: Callable[..., Job], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asleep_s = [0.0]
    monkeypatch.setattr(watch, "awake_s", lambda: time.monotonic() - sum(asleep_s))

    def suspended(look: int) -> Mapping[str, object]:
        asleep_s.append(3600.0)
        return {}

    job = start(suspended, timeout="0.01")
    wait_until(lambda: job.looks > 5, "it is not inspected")
    assert (levels(caplog), job.told.ranks, job.has_ended) == ([], [], False)


def test_a_rank_that_others_wait_for_is_ended_after_the_time_that_the_user_has_set(
    start: Callable[..., Job],
) -> None:
    job = start(lambda look: {"outside": "10.0.0.7:443"}, timeout="0.5")
    wait_until(lambda: job.has_ended, "it is not ended")
    assert job.told.ranks == []


@pytest.mark.parametrize("shows", [{"ends": True}, {"raised": "KeyError"}])
def test_a_rank_that_ends_is_named_only_where_that_takes_long(
    shows: dict[str, object], start: Callable[..., Job], caplog: pytest.LogCaptureFixture
) -> None:
    began = time.monotonic()
    job = start(lambda look: {"outside": "a pipe", **shows})
    wait_until(lambda: levels(caplog), "it is not named")
    assert time.monotonic() - began >= ACCUSE_S
    assert not job.has_ended


def test_a_look_waits_for_the_rank_that_finished_the_same_step_a_moment_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hang_times, "LOOK_S", 1.0)
    seen: list[float] = []
    looked = threading.Event()

    def look(ranks: Mapping[int, Watched], *_: object) -> None:
        seen.extend(rank.still_s for rank in ranks.values())
        looked.set()

    monkeypatch.setattr(watch, "look", look)
    now = time.monotonic()
    hangs = watch.HangWatch(
        StillPage(now - 0.6, now - 0.3),
        directory=tmp_path,
        host="h0",
        events=EventStream(RunInfo()),
        reporter=NullReporter(),
        timeout=HangTimeout(),
    )
    try:
        hangs.begin(JobView(run="r", attempt=0, node=0, hosts=1), {0: (0, os.getpid()), 1: (1, os.getpid())})
        assert looked.wait(60.0)
    finally:
        hangs.close()
    assert min(seen) >= 1.0


def test_steps_on_both_sides_of_a_suspension_are_neither_old_nor_learned(tmp_path: Path) -> None:
    resumed_at = time.monotonic()
    page = StillPage(resumed_at - 3600.0)
    rank = watch._Seen(local_rank=0, pid=os.getpid(), since=resumed_at, count=6)
    attempt = watch._Attempt(
        job=JobView(run="r", attempt=0, node=0, hosts=1), ranks={0: rank}, resumed_at=resumed_at
    )
    hangs = watch.HangWatch(
        page,
        directory=tmp_path,
        host="h",
        events=EventStream(RunInfo()),
        reporter=NullReporter(),
        timeout=HangTimeout(),
    )
    try:
        hangs._sample(attempt, resumed_at)  # it had finished one since the last look
        assert (rank.count, rank.since) == (7, resumed_at)
        page.times, page.step = (resumed_at + 2.0,), 8
        hangs._sample(attempt, resumed_at + 2.0)
        assert hangs._times.p99_s == 0.0
        page.times, page.step = (resumed_at + 5.0,), 9
        hangs._sample(attempt, resumed_at + 5.0)
        assert hangs._times.p99_s == pytest.approx(3.0)
    finally:
        hangs.close()
