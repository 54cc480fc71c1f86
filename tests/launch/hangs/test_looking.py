# SPDX-License-Identifier: Apache-2.0
"""A look at ranks: what it may take for idle, and that it harms nobody.  What is found is of that moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch.distributed as dist

from resiliency.events import EventStream
from resiliency.launch import reaction
from resiliency.launch.fleet.link import NullReporter
from resiliency.launch.hangs import looking
from resiliency.launch.hangs.hosts import HostAnswer, HostBoard, JobView, SaidFinding
from resiliency.launch.hangs.looking import Watched
from resiliency.launch.hangs.watch import HangWatch
from resiliency.launch.health import hang_times
from resiliency.launch.health.causes import Diagnosis
from resiliency.launch.health.hang_times import HangTimeout
from resiliency.launch.rendezvous.shared_lines import SharedLines
from resiliency.progress import STEP_PAGE_ENV, RankProgress, StepPage
from resiliency.runtime import STOP_NOTES_ENV, RunInfo
from tests.waiting import wait_for_seconds, wait_until

#: Finishes the steps that it is told, on a line each; or becomes another program, or the same one again.
PROGRAM = """
import os, sys
from resiliency.progress import report_step
print("runs", flush=True)
for line in iter(sys.stdin.readline, ""):
    if line.startswith("sleep"):
        os.execvp("sleep", ["sleep", "100"])
    if line.startswith("again"):
        os.execv(sys.executable, [sys.executable, "-c", os.environ["PROGRAM"]])
    report_step(int(line))
    print(line, end="", flush=True)
"""


class Rank:
    """A process that reports steps into slot 0 of `page`."""

    def __init__(self, page: StepPage, directory: Path) -> None:
        shown = {STEP_PAGE_ENV: page.variable(0), STOP_NOTES_ENV: str(directory), "PROGRAM": PROGRAM}
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, **shown},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self.process.pid
        self.hear("runs")

    def hear(self, word: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == f"{word}\n"

    def tell(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()

    def finish_step(self, step: int) -> None:
        self.tell(str(step))
        self.hear(str(step))

    def look(self, directory: Path) -> looking.Look:
        watched = {0: looking.Watched(pid=self.pid, step=1, still_s=9.0, stopped_s=0.0)}
        found = looking.look(watched, str(directory), "h", wait)
        assert found is not None
        return found


def wait(seconds: float) -> bool:
    wait_for_seconds(seconds)
    return False


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank of a test answers at once, but for a machine that is busy with others."""
    monkeypatch.setattr(looking, "ANSWER_S", 30.0)


@pytest.fixture
def page() -> Iterator[StepPage]:
    with ExitStack() as stack:
        page = StepPage(1)
        stack.callback(page.close)
        yield page


@pytest.fixture
def rank(page: StepPage, tmp_path: Path) -> Iterator[Rank]:
    rank = Rank(page, tmp_path)
    try:
        rank.finish_step(1)
        yield rank
    finally:
        rank.process.kill()
        rank.process.communicate()


def test_a_rank_that_has_become_another_program_is_not_ended_by_a_look(rank: Rank, tmp_path: Path) -> None:
    assert '"<string>"' in rank.look(tmp_path).stacks[0]
    rank.tell("again")
    rank.hear("runs")  # what it is told before, the program before may read
    rank.finish_step(2)
    assert looking.ask({0: rank.pid}, str(tmp_path)).keys() == {0}
    assert '"<string>"' in rank.look(tmp_path).stacks[0]
    rank.tell("sleep")
    name = Path(f"/proc/{rank.pid}/comm")
    wait_until(lambda: name.read_text() == "sleep\n", "the rank is no other program")
    assert "gives no Python stacks" in rank.look(tmp_path).stacks[0]
    assert rank.process.poll() is None


def test_a_rank_whose_system_calls_are_not_shown_does_not_count_as_idle(
    rank: Rank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may wait in native code, for others: a kernel may show what a process reads, and no more."""
    (view,) = rank.look(tmp_path).views
    assert (view.idle, view.waits) == (True, False)
    monkeypatch.setattr(reaction, "_WAITS", {})
    (view,) = rank.look(tmp_path).views
    assert (view.idle, view.waits) == (None, False)


class Told(NullReporter):
    """Keeps whom the supervisor is told to blame."""

    def __init__(self) -> None:
        self.ranks: list[tuple[int, ...]] = []

    def report_diagnosis(self, found: Diagnosis) -> None:
        self.ranks.append(found.ranks)


def test_what_is_found_holds_for_the_ranks_as_they_were_seen(
    page: StepPage, rank: Rank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A verdict on a rank that has gone on meanwhile ends it neither then nor when it stands still again."""
    monkeypatch.setattr(hang_times, "LOOK_S", 0.5)
    monkeypatch.setattr(hang_times, "LOOK_STEPS", 0.0)
    store = dist.HashStore()
    lines = SharedLines(lambda function: function(store))
    first = HostBoard(lines, JobView(run="r", attempt=0, node=0, hosts=2))
    told = Told()

    def answered() -> list[HostAnswer] | None:
        first.ask()
        return first.gather(wait)

    watch = HangWatch(
        page,
        directory=tmp_path,
        host="h1",
        events=EventStream(RunInfo()),
        reporter=told,
        timeout=HangTimeout(),
        lines=lines,
    )
    try:
        watch.begin(JobView(run="r", attempt=0, node=1, hosts=2), {0: (1, rank.pid)})
        wait_until(answered, "no answer")
        first.tell(SaidFinding(sentence="rank 1 does nothing", accused=(1,)))
        wait_until(lambda: told.ranks == [(1,)], "the supervisor was not told")
        first.tell(SaidFinding(sentence="no rank is behind"))
        wait_until(lambda: told.ranks == [(1,), ()], "what the supervisor was told was not taken back")
        rank.finish_step(2)
        first.tell(SaidFinding(sentence="rank 1 does nothing", end=(1,)))
        wait_until(answered, "no answer")
        assert rank.process.poll() is None
        first.tell(SaidFinding(sentence="rank 1 does nothing", end=(1,)))
        assert rank.process.wait(60.0) == -signal.SIGKILL
    finally:
        watch.close()


class ProgressOfTwo(StepPage):
    """One has finished its step a moment after the other, and neither does anything since."""

    def __init__(self, times: tuple[float, float]) -> None:
        self.times = times

    def read(self, local_rank: int) -> RankProgress:
        return RankProgress(step=7, step_time=self.times[local_rank], heartbeat_time=None, reports=True)


def test_a_look_waits_for_the_rank_that_finished_the_same_step_a_moment_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hang_times, "LOOK_S", 1.0)
    seen: list[float] = []
    looked = threading.Event()

    def look(ranks: Mapping[int, Watched], *_: object) -> None:
        seen.extend(rank.still_s for rank in ranks.values())
        looked.set()

    monkeypatch.setattr("resiliency.launch.hangs.watch.look", look)
    now = time.monotonic()
    watch = HangWatch(
        ProgressOfTwo((now - 0.6, now - 0.3)),
        directory=tmp_path,
        host="h0",
        events=EventStream(RunInfo()),
        reporter=NullReporter(),
        timeout=HangTimeout(),
    )
    try:
        watch.begin(JobView(run="r", attempt=0, node=0, hosts=1), {0: (0, os.getpid()), 1: (1, os.getpid())})
        assert looked.wait(60.0)
    finally:
        watch.close()
    assert min(seen) >= 1.0
