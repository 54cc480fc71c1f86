# SPDX-License-Identifier: Apache-2.0
"""One run of goodput_under_failures.py: launcher, training, simulator, and what was kept of the time.

The window begins when the simulator has seen the job, which is after its first step, and is as long for all.
Contestants differ in launcher and saver alone: same training, same interval of saves, same schedule.
"""

from __future__ import annotations

import bisect
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
from dataclasses import dataclass, field
from pathlib import Path

from restart_runs import OURS as OURS_LAUNCHER
from restart_runs import launchers

from resiliency.errors import ResiliencyError
from resiliency.events import EventType, JsonValue, events_path
from resiliency.goodput_measure.ledger import LedgerBuilder
from resiliency.goodput_measure.reader import read_events
from resiliency.goodput_measure.windows import window_of
from resiliency.launch.standby import CACHE_DIR_ENV
from resiliency.runtime import JOB_ENV, RUN_DIR_ENV, RunInfo
from resiliency.testing.processes import Command

ROOT = Path(__file__).resolve().parents[1]
#: Its own: another measurement on this machine must not be injured.
JOB = f"failures-{os.getpid()}"
RANKS = 2
_MEMORY = "/dev/shm"  # noqa: S108 (captures belong into memory)
OURS = "ours"
#: The simulator's journal, in the directory of a run.
_STATE = "simulator"
#: What launcher and ranks tell of themselves, beside it.
_LAUNCHER = "launcher"
#: How long a launcher may take to the first step, and to end.
_START_S, _END_S = 180.0, 60.0


class RunFailed(ResiliencyError):
    """A job ended before its window did."""


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """A launcher of `restart_runs`, and how its ranks save."""

    launcher: str
    save: str


CONTESTANTS = {
    OURS: Contestant(launcher="launcher.py", save="ours"),
    "ours + local tier": Contestant(launcher="launcher.py", save="ours-local"),
    "torchrun + DCP async": Contestant(launcher="torchrun", save="dcp"),
    "ft_launcher + DCP async": Contestant(launcher="ft_launcher", save="dcp"),
    "ft_launcher + NVRx async": Contestant(launcher="ft_launcher", save="nvrx"),
    "launcher.py + DCP async": Contestant(launcher="launcher.py", save="dcp"),
}
#: Nothing fails, and nothing is saved: what was possible.
UNDISTURBED = Contestant(launcher="torchrun", save="none")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What happens in each run of a measurement; durations in seconds."""

    wall_s: float
    fault_interval_s: float
    kinds: str
    seed: int
    save_every: int


@dataclass(frozen=True, kw_only=True)
class Run:
    """What became of one run.

    Attributes:
        steps: made in the window; a step that was repeated counts once.
        faults: that the simulator injected, in seconds since the window began.
        recoveries_s: for each fault, the time to the first step that had not been made before it; None when
            the window ended first.
        kept_time_s: time in steps that lasted, as the notes of rank 0 tell.
        causes_s: where the window went on average over the ranks, as the ledger tells; empty for launchers
            and savers that write no events.
    """

    contestant: str
    round: int
    wall_s: float
    steps: int = 0
    faults: Sequence[float] = ()
    recoveries_s: Sequence[float | None] = field(default=())
    kept_time_s: float = 0.0
    causes_s: Mapping[str, float] = field(default_factory=dict)
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
            "incidents": len(self.faults),
            "faults_s": list(self.faults),
            "recoveries_s": list(self.recoveries_s),
            "recovery_mean_s": statistics.fmean(known) if known else None,
            "recovery_median_s": statistics.median(known) if known else None,
            "recovery_worst_s": max(known, default=None),
        }


Notes = Sequence[tuple[float, int]]


def read_notes(path: Path) -> list[tuple[float, int]]:
    """(time, step) of each finished step; a last line that was torn by a kill is left out."""
    lines = path.read_text().split("\n")[:-1]
    return [(float(when), int(step)) for when, step in (line.split() for line in lines)]


def steps_between(notes: Notes, begin: float, end: float) -> int:
    """How far training came in a window: a step that was made again counts once."""
    before = [step for when, step in notes if when <= begin]
    until = [step for when, step in notes if when <= end]
    return max(until, default=0) - max(before, default=0)


def kept_time(notes: Notes, begin: float, end: float) -> float:
    """Seconds of a window in steps that no later attempt began before.

    The first note of an attempt is the step that it begins with.
    """
    kept, least = 0.0, math.inf
    for (before, last), (when, step) in reversed(list(itertools.pairwise(notes))):
        if step != last + 1:
            least = min(least, step)  # an attempt began here
        elif step <= least:
            kept += max(min(when, end) - max(before, begin), 0.0)
    return kept


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
    times = [when for when, _ in notes]
    furthest: list[int] = []
    for _, step in notes:
        furthest.append(max(step, furthest[-1] if furthest else 0))
    found: list[float | None] = []
    for fault in faults:
        at = bisect.bisect_right(times, fault)
        reached = furthest[at - 1] if at else 0
        # The furthest step never goes back, so the first one beyond is found by halving.
        new = bisect.bisect_right(furthest, reached)
        known = new < len(notes) and notes[new][0] <= end
        found.append(notes[new][0] - fault if known else None)
    return found


def undisturbed_rate(directory: Path, wall_s: float) -> float:
    """Steps a second without failures and saves."""
    with _job(UNDISTURBED, directory, save_every=1, wall_s=wall_s) as job:
        begin = _wait_for_first_step(job)
        _wait(job, begin + wall_s)
        _end(job)
    return steps_between(read_notes(directory / "steps"), begin, begin + wall_s) / wall_s


def run_once(name: str, number: int, plan: Plan, directory: Path) -> Run:
    """Run one contestant through the plan.

    Raises:
        RunFailed: it ended before the window did, or the simulator failed.
        TimeoutError, EOFError: it did not start; the message quotes its output.
    """
    with _job(CONTESTANTS[name], directory, plan.save_every, plan.wall_s) as job:
        _wait_for_first_step(job)
        with simulating(plan, directory) as simulator:
            simulator.wait_for_line("job is there", timeout=_START_S)
            begin = time.time()
            _wait(job, begin + plan.wall_s)
        _end(job)
    end = begin + plan.wall_s
    path = events_path(RunInfo(job_name=JOB, run_dir=str(directory / "run")))
    events = list(read_events(path, progress=False)) if path.exists() else []
    injected = [event.time.timestamp() for event in events if event.type is EventType.FAULT_INJECTED]
    notes = read_notes(directory / "steps")
    own = events_path(RunInfo(job_name=JOB, run_dir=str(directory / _LAUNCHER)))
    return Run(
        contestant=name,
        round=number,
        wall_s=plan.wall_s,
        kept_time_s=kept_time(notes, begin, end),
        causes_s=causes(filter(Path.exists, (own, path)), begin, end) if own.exists() else {},
        steps=steps_between(notes, begin, end),
        faults=[fault - begin for fault in injected],
        recoveries_s=recoveries(notes, injected, end),
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
                simulator.wait(timeout=_END_S)
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
def _job(contestant: Contestant, directory: Path, save_every: int, wall_s: float) -> Iterator[Command]:
    directory.mkdir(parents=True)
    ends_at = time.monotonic() + 2 * _START_S + wall_s + _END_S
    launcher = launchers(0.1)[contestant.launcher]
    argv = ["1000" if before == "--max-restarts" else word for before, word in _pairs(launcher.argv)]
    script = [str(ROOT / "benchmark" / "failures_workload.py"), "--directory", str(directory)]
    environment: Mapping[str, str] = {
        **launcher.env,
        JOB_ENV: JOB,
        RUN_DIR_ENV: str(directory / _LAUNCHER),
        "OMP_NUM_THREADS": "1",
        CACHE_DIR_ENV: str(directory.parent / "cache"),
    }
    # A job that did not finish leaves its captures there for the next start, which there is none of here.
    with (
        tempfile.TemporaryDirectory(prefix="failures-", dir=_MEMORY) as memory,
        Command(
            [
                *argv,
                *script,
                "--save",
                contestant.save,
                "--save-every",
                str(save_every),
                "--memory",
                memory,
                "--ends-at",
                str(ends_at),
                *(["--events"] if contestant.launcher == OURS_LAUNCHER else []),
            ],
            env=environment,
            cwd=directory,
            log=directory / "output.txt",
        ) as command,
    ):
        yield command


def _pairs(words: Sequence[str]) -> list[tuple[str, str]]:
    """Each word with the one before it."""
    return list(zip(("", *words), words, strict=False))


def _simulator(plan: Plan, directory: Path) -> list[str]:
    return [
        *(sys.executable, str(ROOT / "simulator" / "simulator_entrypoint.py"), "--job", JOB, "--yes"),
        *("--gpus_per_node", str(RANKS), "--any_group_rank", "--kinds", plan.kinds),
        *("--fault_interval", f"{plan.fault_interval_s:g}", "--duration_s", f"{plan.wall_s:g}"),
        *("--seed", str(plan.seed), "--run_dir", str(directory / "run")),
        # Its own: a journal of a run that was killed is that run's.
        *("--state_dir", str(directory / _STATE)),
    ]


def _wait_for_first_step(job: Command) -> float:
    job.wait_for_line(r"^first step 1$", timeout=_START_S)
    return time.time()


def _wait(job: Command, until: float) -> None:
    with suppress(TimeoutError):
        code = job.wait(timeout=max(until - time.time(), 0.0))
        raise RunFailed(
            f"the job ended {until - time.time():.0f} s before its window, with exit code {code}.",
            hint="Its last lines:\n" + "\n".join(job.lines[-20:]),
        )


def _end(job: Command) -> None:
    """In order, so that what a launcher keeps outside of its processes is removed."""
    job.signal(signal.SIGTERM)
    with suppress(TimeoutError):
        job.wait(timeout=_END_S)
        # Agents commit what is captured, and free its memory, after their launcher has ended.
        job.survivors(timeout=_END_S)
