# SPDX-License-Identifier: Apache-2.0
"""One run of goodput_under_failures.py: launcher, training, simulator, and what was kept of the time.

The window begins when the simulator has seen the job, which is after its first step, and is as long for all.
Contestants differ in launcher and saver alone: same training, same interval of saves, same schedule.
"""

from __future__ import annotations

import bisect
import csv
import itertools
import math
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from failures_jobs import EVENTS, UNDISTURBED, Contestant, Notes, Training
from restart_runs import Launcher, launchers

from resiliency.errors import ResiliencyError
from resiliency.events import EventType, JsonValue, events_path
from resiliency.goodput_measure.ledger import LedgerBuilder
from resiliency.goodput_measure.reader import read_events
from resiliency.goodput_measure.windows import window_of
from resiliency.launch.standby import CACHE_DIR_ENV
from resiliency.runtime import JOB_ENV, RUN_DIR_ENV, RunInfo
from resiliency.testing.processes import Command
from simulator.command_line import parse
from simulator.faults import COLUMNS, PlannedFault
from simulator.schedule import schedule

ROOT = Path(__file__).resolve().parents[1]
#: Its own: another measurement on this machine must not be injured.
JOB = f"failures-{os.getpid()}"
RANKS = 2
MEMORY = "/dev/shm"  # noqa: S108 (captures belong into memory)
#: The simulator's journal, in the directory of a run.
_STATE = "simulator"
#: How long a simulator may take to see a job, a job to come back after its window, and both to end.
_LOOK_S, _BACK_S, END_S = 60.0, 60.0, 60.0
#: By how much the ledger may differ from the count of rank 0's notes, as a share of a window.
LEDGER_TOLERANCE = 0.001


class RunFailed(ResiliencyError):
    """A run that cannot be measured."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What happens in each run of a measurement; durations in seconds.

    Attributes:
        faults: of each run, at the times of a Poisson process that has so many in the window.
    """

    training: Training
    faults: int
    fault_interval_s: float
    kinds: str
    seed: int
    save_every: int

    @property
    def wall_s(self) -> float:
        return self.faults * self.fault_interval_s

    def schedule(self) -> list[PlannedFault]:
        """The simulator's own, with the time at which one fault more would come as the end of the window."""
        words = ["--job", JOB, "--gpus_per_node", str(RANKS), "--kinds", self.kinds, "--seed", str(self.seed)]
        words += ["--fault_interval", f"{self.fault_interval_s:g}"]
        drawn: list[PlannedFault] = []
        length_s = self.wall_s
        while len(drawn) <= self.faults:
            length_s *= 2
            options = parse([*words, "--duration_s", f"{length_s:g}"], {})
            drawn = schedule(options.sources, options.shape)
        scale = self.wall_s * 1e6 / drawn[self.faults].at_us
        return [replace(one, at_us=round(one.at_us * scale)) for one in drawn[: self.faults]]


@dataclass(frozen=True, kw_only=True)
class Run:
    """What became of one run.

    Attributes:
        steps: made in the window and not lost in it; a step that was repeated counts once.
        faults: that the simulator injected, in seconds since the window began.
        recoveries_s: for each fault, the time to the first step that had not been made before it; None when
            the window ended first.
        kept_time_s: time in steps that lasted, as the notes of rank 0 tell.
        causes_s: where the window went on average over the ranks, as the ledger tells; empty for launchers
            and savers that write no events.
        ended_s: when the job ended by itself, in seconds since the window began; None: it did not.
        trains_on: it finished a step after its window.
        incidents_s: of a supervisor, in their order: the parts of each and how long they took.
    """

    contestant: str
    round: int
    wall_s: float
    steps: int = 0
    faults: Sequence[float] = ()
    recoveries_s: Sequence[float | None] = field(default=())
    kept_time_s: float = 0.0
    causes_s: Mapping[str, float] = field(default_factory=dict)
    planned: int = 0
    ended_s: float | None = None
    trains_on: bool = False
    incidents_s: Sequence[Mapping[str, float]] = ()
    error: str = ""

    def kept_share(self, rate: float) -> float:
        """Steps kept over steps possible, at `rate` steps a second."""
        return self.steps / (self.wall_s * rate)

    def lost_s(self, rate: float) -> float:
        return self.wall_s * (1 - self.kept_share(rate))

    def to_json(self, rate: float) -> dict[str, JsonValue]:
        known = [seconds for seconds in self.recoveries_s if seconds is not None]
        return {
            "contestant": self.contestant,
            "round": self.round,
            "error": self.error,
            "wall_s": self.wall_s,
            "steps": self.steps,
            "possible_steps": self.wall_s * rate,
            "kept_share": self.kept_share(rate),
            "lost_s": self.lost_s(rate),
            "kept_time_s": self.kept_time_s,
            "causes_s": dict(self.causes_s),
            "ended_s": self.ended_s,
            "trains_on": self.trains_on,
            "incidents_s": [dict(spans) for spans in self.incidents_s],
            "planned": self.planned,
            "incidents": len(self.faults),
            "faults_s": list(self.faults),
            "recoveries_s": list(self.recoveries_s),
            "recovery_mean_s": statistics.fmean(known) if known else None,
            "recovery_median_s": statistics.median(known) if known else None,
            "recovery_worst_s": max(known, default=None),
        }


def kept(notes: Notes, begin: float, end: float) -> tuple[int, float]:
    """Steps that a window ended, and seconds that it spent, in steps that no later attempt began before.

    The first note of an attempt is the step that it begins with.
    """
    steps, seconds, least = 0, 0.0, math.inf
    for before, note in reversed(list(itertools.pairwise(notes))):
        if note.step != before.step + 1:
            least = min(least, note.step)  # an attempt began here
        elif note.step <= least:
            began = before.time if note.began is None else note.began
            steps += begin < note.time <= end
            seconds += max(min(note.time, end) - max(began, begin), 0.0)
    return steps, seconds


def causes(logs: Iterable[Path], begin: float, end: float) -> dict[str, float]:
    """Where a window went, as the ledger tells; seconds on average over the ranks.

    Raises:
        RunFailed: the ledger of the job does not add up to its wall time x ranks.
    """
    builder = LedgerBuilder()
    for path in logs:
        for event in read_events(path, progress=False):
            builder.add_event(event)
    ledger = builder.build()
    if sum(ledger.totals.values()) != ledger.wall_us * len(ledger.lanes) or not ledger.lanes:
        raise RunFailed(f"the ledger of {len(ledger.lanes)} ranks does not add up to its wall time x ranks.")
    window = window_of(ledger, round(begin * 1e6), round(end * 1e6))
    return {cause.value: us / 1e6 / len(ledger.lanes) for cause, us in window.totals.items() if us}


def recoveries(notes: Notes, faults: Sequence[float], end: float) -> list[float | None]:
    """For each fault the seconds to the first step beyond all that were made before it."""
    times = [note.time for note in notes]
    furthest: list[int] = []
    for note in notes:
        furthest.append(max(note.step, furthest[-1] if furthest else 0))
    found: list[float | None] = []
    for fault in faults:
        at = bisect.bisect_right(times, fault)
        reached = furthest[at - 1] if at else 0
        # The furthest step never goes back, so the first one beyond is found by halving.
        new = bisect.bisect_right(furthest, reached)
        known = new < len(notes) and notes[new].time <= end
        found.append(notes[new].time - fault if known else None)
    return found


def undisturbed_rate(training: Training, directory: Path, wall_s: float) -> float:
    """Steps a second without failures and saves.

    Raises:
        RunFailed, TimeoutError, EOFError: it cannot be measured.
    """
    with _job(training, UNDISTURBED, directory, save_every=1, wall_s=wall_s) as job:
        begin = _wait_for_first_step(training, job)
        if (ended := _wait(job, begin + wall_s)) is not None:
            raise RunFailed(_ended_early(job, begin + wall_s - ended))
        _end(job)
    return kept(training.notes(directory, JOB), begin, begin + wall_s)[0] / wall_s


def run_once(name: str, number: int, plan: Plan, directory: Path) -> Run:
    """Run one contestant through the plan.

    Raises:
        RunFailed: the simulator failed, or the ledger does not add up.
        TimeoutError, EOFError: it did not start; the message quotes its output.
    """
    training = plan.training
    with _job(training, training.contestants[name], directory, plan.save_every, plan.wall_s) as job:
        _wait_for_first_step(training, job)
        with simulating(plan, directory) as simulator:
            simulator.wait_for_line("job is there", timeout=_LOOK_S)
            begin = time.time()
            end = begin + plan.wall_s
            ended = _wait(job, end)
        if ended is None:
            _wait_until_back(training, directory, end)
        _end(job)
    return counted(name, number, plan, directory, [directory / EVENTS], begin=begin, ended=ended)


def log_of_faults(directory: Path) -> RunInfo:
    """Where a simulator tells what it has injected into the run in `directory`."""
    return RunInfo(job_name=JOB, run_dir=str(directory / "run"))


def counted(
    name: str,
    number: int,
    plan: Plan,
    directory: Path,
    run_dirs: Iterable[Path],
    *,
    begin: float,
    ended: float | None,
    incidents_s: Sequence[Mapping[str, float]] = (),
) -> Run:
    """A run by what its notes and events say.

    Args:
        run_dirs: run directories of those that write events.
        begin, ended: of the window; of the job, if it ended by itself.

    Raises:
        RunFailed: the ledger does not add up.
    """
    path, end = events_path(log_of_faults(directory)), begin + plan.wall_s
    events = list(read_events(path, progress=False)) if path.exists() else []
    injected = [event.time.timestamp() for event in events if event.type is EventType.FAULT_INJECTED]
    notes = plan.training.notes(directory, JOB)
    logs = [events_path(RunInfo(job_name=JOB, run_dir=str(one))) for one in run_dirs]
    logs = [log for log in logs if log.exists()]
    steps, seconds = kept(notes, begin, end)
    if steps > (different := len({note.step for note in notes if begin < note.time <= end})):
        raise RunFailed(f"{steps} steps are counted, and rank 0 noted {different} different ones.")
    run = Run(
        contestant=name,
        round=number,
        wall_s=plan.wall_s,
        planned=plan.faults,
        ended_s=None if ended is None else ended - begin,
        incidents_s=incidents_s,
        steps=steps,
        kept_time_s=seconds,
        causes_s=causes([*logs, *filter(Path.exists, [path])], begin, end) if logs else {},
        faults=[fault - begin for fault in injected],
        recoveries_s=recoveries(notes, injected, end),
        trains_on=any(note.time > end for note in notes[-1:]),
    )
    return replace(run, error=_difference(run, plan.training.noted))


def _difference(run: Run, noted: Iterable[str]) -> str:
    """Two counts of the same time: by the notes of one rank, and by the events of all.

    "" where they differ by `LEDGER_TOLERANCE` at most, or by one step at each end and for each incident.
    """
    if not run.causes_s or not run.steps:
        return ""
    accounted = sum(run.causes_s.get(cause, 0.0) for cause in noted)
    step_s = run.kept_time_s / run.steps
    allowed = max(run.wall_s * LEDGER_TOLERANCE, step_s * (2 + len(run.faults)))
    if abs(accounted - run.kept_time_s) <= allowed:
        return ""
    return (
        f"the ledger tells {accounted:.2f} s of kept steps, and rank 0 noted {run.kept_time_s:.2f} s of"
        f" {run.wall_s:g} s."
    )


@contextmanager
def simulating(plan: Plan, directory: Path) -> Iterator[Command]:
    """A simulator that has undone all effects when this ends, whatever ended it.

    Raises:
        RunFailed: it failed, or did not end; what it left is in its journal.
    """
    with Command(_simulator(plan, directory), cwd=directory, log=directory / "simulator.txt") as simulator:
        try:
            yield simulator
        finally:
            simulator.signal(signal.SIGTERM)
            with suppress(TimeoutError):
                simulator.wait(timeout=END_S)
        if simulator.returncode != 0:
            ended = "did not end" if simulator.returncode is None else f"ended with {simulator.returncode}"
            raise RunFailed(
                f"the simulator {ended}: faults are missing, or their effects are not undone.",
                hint="Its last lines:\n" + "\n".join(simulator.lines[-20:]),
            )


def journals(root: Path) -> list[Path]:
    """Journals of simulators that left effects, in the directories of runs below `root`."""
    return sorted(root.glob(f"*/{_STATE}/*.journal"))


@contextmanager
def _job(
    training: Training, contestant: Contestant, directory: Path, save_every: int, wall_s: float
) -> Iterator[Command]:
    directory.mkdir(parents=True)
    ends_at = time.monotonic() + 2 * training.start_s + wall_s + _BACK_S + END_S
    launcher = launchers(0.1)[contestant.launcher]
    environment: Mapping[str, str] = {
        **launcher.env,
        JOB_ENV: JOB,
        RUN_DIR_ENV: str(directory / EVENTS),
        "GOODPUT_USE_FILE_TRACKING": "1",
        "OMP_NUM_THREADS": "1",
        CACHE_DIR_ENV: str(directory.parent / "cache"),
    }
    # A job that did not finish leaves its captures there for the next start, which there is none of here.
    with tempfile.TemporaryDirectory(prefix="failures-", dir=MEMORY) as memory:
        script = training.argv(
            contestant, directory, job=JOB, save_every=save_every, memory=memory, ends_at=ends_at
        )
        with Command(
            [*patient(launcher), *script], env=environment, cwd=directory, log=directory / "output.txt"
        ) as command:
            yield command


def patient(launcher: Launcher) -> list[str]:
    """Its command line, with as many restarts as any schedule needs."""
    before = ("", *launcher.argv)
    return [
        "1000" if flag == "--max-restarts" else word
        for flag, word in zip(before, launcher.argv, strict=False)
    ]


def _simulator(plan: Plan, directory: Path) -> list[str]:
    trace = directory / "schedule.csv"
    with trace.open("w", newline="") as file:
        csv.writer(file).writerows([COLUMNS, *(fault.row for fault in plan.schedule())])
    return [
        *(sys.executable, str(ROOT / "simulator" / "simulator_entrypoint.py"), "--job", JOB, "--yes"),
        *("--gpus_per_node", str(RANKS), "--any_group_rank", "--trace", str(trace)),
        *("--duration_s", f"{plan.wall_s:g}", "--run_dir", str(directory / "run")),
        # Its own: a journal of a run that was killed is that run's.
        *("--state_dir", str(directory / _STATE)),
    ]


def _wait_for_first_step(training: Training, job: Command) -> float:
    job.wait_for_line(training.first_step, timeout=training.start_s)
    return time.time()


def _wait(job: Command, until: float) -> float | None:
    """When the job ended by itself; None: it did not before `until`."""
    with suppress(TimeoutError):
        job.wait(timeout=max(until - time.time(), 0.0))
        return time.time()
    return None


def _ended_early(job: Command, seconds: float) -> str:
    tail = "\n".join(job.lines[-20:])
    return (
        f"the job ended {seconds:.0f} s before its window, with exit code {job.returncode}; at last:\n{tail}"
    )


def _wait_until_back(training: Training, directory: Path, end: float) -> None:
    """Until a step is noted that ended after the window: which steps were lost is known then."""
    deadline = time.monotonic() + _BACK_S
    while time.monotonic() < deadline:
        if any(note.time > end for note in training.notes(directory, JOB)[-1:]):
            return
        time.sleep(0.2)


def _end(job: Command) -> None:
    """In order, so that what a launcher keeps outside of its processes is removed."""
    job.signal(signal.SIGTERM)
    with suppress(TimeoutError):
        job.wait(timeout=END_S)
        # Agents commit what is captured, and free its memory, after their launcher has ended.
        job.survivors(timeout=END_S)
