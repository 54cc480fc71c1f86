# SPDX-License-Identifier: Apache-2.0
"""Ranks that hang or are slow, in real jobs of our launcher: who is named, and after how long.

    python3 benchmark/health_campaign.py --seeds 50 --markdown note.md

Each seed is one job of four gloo ranks, in which one fault after the other happens to ranks drawn by lot:
stopped in step 1, stopped or stuck before a collective, stuck in a data worker or in a save, throttled to
60 % of its speed, a data worker that sleeps.  A fault ends when the launcher has named a rank, or after a
minute.
A rank that is accused though nothing happened to it is a false accusation.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

from health_faults import RANKS, Fault, FaultKind, schedule
from measuring import count, machine
from tqdm import tqdm

from resiliency.errors import ResiliencyError
from resiliency.events import EventType, RunEvent

PROJECT = Path(__file__).resolve().parents[1]
#: A hang is to be named within so many seconds, or 4 steps, of which each takes less here.
HANG_BOUND_S, SLOW_BOUND_S = 10.0, 45.0
#: So long a fault waits to be named, and a job for its next line.
GIVE_UP_S = 60.0
#: Of a throttled rank: runs, then is stopped.
RUNS_S, STOPS_S = 0.012, 0.008
_POLL_S = 0.02
_ACCUSATIONS = ("stopped", "behind")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Of one fault.  `named`: whether it was its rank alone; `latency_s`: None where nobody was named."""

    seed: int
    kind: str
    rank: int
    named: bool
    latency_s: float | None
    sentence: str


@dataclass(frozen=True, kw_only=True)
class JobOutcome:
    """`false`: sentences that accuse ranks to which nothing happened."""

    seed: int
    outcomes: tuple[Outcome, ...]
    false: tuple[str, ...]
    seconds: float


class CampaignJob:
    """One launcher with four ranks, and what its events say."""

    def __init__(self, seed: int, root: Path, kinds: Collection[FaultKind]) -> None:
        self.seed = seed
        self._faults = [fault for fault in schedule(seed) if fault.kind in kinds]
        self._root = root
        self._read: dict[Path, int] = {}
        self._accused: list[tuple[frozenset[int], str, float]] = []

    def run(self) -> JobOutcome:
        """
        Raises:
            ResiliencyError: the job did not do what it was told.
        """
        began = time.monotonic()
        self._root.mkdir(parents=True)
        (self._root / "schedule.json").write_text(json.dumps([one.to_json() for one in self._faults]))
        for fault in self._faults:
            os.mkfifo(self._root / f"gate-{fault.number}")
        argv: list[str | Path] = [sys.executable, PROJECT / "launcher.py", "--run-dir", self._root / "run"]
        argv += [f"--nproc-per-node={RANKS}", "--hang-timeout-s=off"]
        argv += [PROJECT / "benchmark" / "health_workload.py", self._root]
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROJECT)}
        with (self._root / "output").open("wb") as output:
            launcher = subprocess.Popen(argv, stdout=output, stderr=subprocess.STDOUT, env=env)
        try:
            outcomes = tuple(self._try(fault, launcher) for fault in self._faults)
            (self._root / "end").touch()
            if launcher.wait(GIVE_UP_S):
                raise ResiliencyError(f"seed {self.seed}: the job failed, see {self._root}/output.")
        finally:
            with suppress(subprocess.TimeoutExpired):
                launcher.terminate()
                launcher.wait(GIVE_UP_S)
            launcher.kill()
        self._look()
        wrong = [text for ranks, text, at in self._accused if not self._is_true(ranks, at)]
        return JobOutcome(
            seed=self.seed, outcomes=outcomes, false=tuple(wrong), seconds=time.monotonic() - began
        )

    # ------------------------------------------------------------------------------------------- one fault

    def _try(self, fault: Fault, launcher: subprocess.Popen[bytes]) -> Outcome:
        time.sleep(fault.quiet_s)
        self._look()
        (self._root / f"armed-{fault.number}").touch()
        begin = self._root / f"begin-{fault.number}"
        self._wait(begin.exists, launcher, f"fault {fault} did not begin")
        at, pid = begin.read_text().split()
        over = threading.Event()
        throttle = threading.Thread(target=_throttle, args=(int(pid), over))
        if fault.kind is FaultKind.THROTTLED:
            throttle.start()
        found: tuple[frozenset[int], str, float] | None = None
        until = time.monotonic() + GIVE_UP_S
        while found is None and time.monotonic() < until and launcher.poll() is None:
            time.sleep(_POLL_S)
            found = next((one for one in self._look(fault) if one[2] >= float(at)), None)
        (self._root / f"over-{fault.number}").touch()
        over.set()
        if throttle.is_alive():
            throttle.join()
        self._release(fault, int(pid))
        return Outcome(
            seed=self.seed,
            kind=fault.kind.name,
            rank=fault.rank,
            named=found is not None and found[0] == {fault.rank},
            latency_s=None if found is None else found[2] - float(at),
            sentence="" if found is None else found[1],
        )

    def _release(self, fault: Fault, pid: int) -> None:
        gate = self._root / f"gate-{fault.number}"
        if fault.is_stop:
            os.kill(pid, signal.SIGCONT)
        elif fault.kind is FaultKind.SAVE:
            gate.read_bytes()
        elif fault.kind in (FaultKind.LOADER, FaultKind.STUCK):
            gate.write_bytes(b"go on")

    def _wait(self, what: Any, launcher: subprocess.Popen[bytes], why: str) -> None:
        until = time.monotonic() + GIVE_UP_S
        while not what():
            if time.monotonic() > until or launcher.poll() is not None:
                raise ResiliencyError(f"seed {self.seed}: {why}, see {self._root}/output.")
            time.sleep(_POLL_S)

    # ---------------------------------------------------------------------------------------------- events

    def _look(self, fault: Fault | None = None) -> list[tuple[frozenset[int], str, float]]:
        """New findings that are of the kind of `fault`: ranks, sentence, time.  Keeps all accusations."""
        found = []
        for event in self._new_events():
            slow = event.type is EventType.STRAGGLER_SUSPECTED
            said: Any = event.fields
            one = (frozenset(said["ranks"]), str(said["cause"]), event.time.timestamp())
            if slow or said["kind"] in _ACCUSATIONS:
                self._accused.append(one)
            if fault is not None and slow != fault.kind.is_hang and said.get("kind") != "together":
                found.append(one)
        return found

    def _new_events(self) -> Iterator[RunEvent]:
        for file in sorted((self._root / "run").glob("*-events.jsonl")):
            text = file.read_text()
            whole = text.rfind("\n") + 1
            for line in text[self._read.get(file, 0) : whole].splitlines():
                event = RunEvent.from_json(line)
                if event.type in (EventType.HANG_DETECTED, EventType.STRAGGLER_SUSPECTED):
                    yield event
            self._read[file] = whole

    def _is_true(self, ranks: frozenset[int], at: float) -> bool:
        """Whether that happened to all of these ranks, then or in the seconds before."""
        happened = set()
        for fault in self._faults:
            begin, over = self._root / f"begin-{fault.number}", self._root / f"over-{fault.number}"
            if begin.exists() and float(begin.read_text().split()[0]) <= at <= over.stat().st_mtime + 10.0:
                happened.add(fault.rank)
        return ranks <= happened


def _throttle(pid: int, over: threading.Event) -> None:
    with suppress(ProcessLookupError):
        while not over.wait(RUNS_S):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(STOPS_S)
            os.kill(pid, signal.SIGCONT)


# ---------------------------------------------------------------------------------------------------- report


def as_table(jobs: Sequence[JobOutcome]) -> str:
    """Markdown."""
    lines = [
        "| Fault | times | named alone, in time | nobody or another one | median s | longest s |",
        "|---|---|---|---|---|---|",
    ]
    for kind in FaultKind:
        bound_s = HANG_BOUND_S if kind.is_hang else SLOW_BOUND_S
        all_of = [one for job in jobs for one in job.outcomes if one.kind == kind.name]
        if not all_of:
            continue
        times = [one.latency_s for one in all_of if one.named and one.latency_s is not None]
        good = sum(seconds <= bound_s for seconds in times)
        longest = f"{median(times):.1f} | {max(times):.1f}" if times else " | "
        lines.append(f"| {kind.value} | {len(all_of)} | {good} | {len(all_of) - len(times)} | {longest} |")
    false = [text for job in jobs for text in job.false]
    hours = sum(job.seconds for job in jobs) / 3600
    lines += ["", f"False accusations: {len(false)}, in {hours:.1f} hours of {RANKS} ranks."]
    return "\n".join([*lines, *(f"- {text}" for text in false)])


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="health_campaign.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=count, default=50, metavar="N", help="jobs (default: %(default)s)")
    parser.add_argument("--first-seed", type=int, default=0, metavar="N", help="(default: %(default)s)")
    parser.add_argument(
        "--jobs",
        type=count,
        default=1,
        metavar="N",
        help="at a time, each with four ranks (default: 1)",
    )
    names = [kind.name.lower() for kind in FaultKind]
    parser.add_argument(
        "--faults", nargs="+", choices=names, default=names, metavar="FAULT",
        help=f"of each job: {', '.join(names)} (default: all)",
    )  # fmt: skip
    parser.add_argument("--export", type=Path, metavar="FILE.json", help="write every outcome there")
    parser.add_argument("--markdown", type=Path, metavar="FILE.md", help="write the table there")
    parser.add_argument("--keep", action="store_true", help="keep what the jobs wrote")
    return parser


def main() -> int:
    """Exit codes: 0 all was named as it should be, 1 not."""
    args = build_parser().parse_args()
    kinds = [FaultKind[name.upper()] for name in args.faults]
    root = Path(tempfile.mkdtemp(prefix="health-"))
    print(json.dumps(machine()))
    jobs: list[JobOutcome] = []
    failed = 0
    try:
        with ThreadPoolExecutor(args.jobs) as pool:
            running = [
                pool.submit(CampaignJob(seed, root / str(seed), kinds).run)
                for seed in range(args.first_seed, args.first_seed + args.seeds)
            ]
            for one in tqdm(as_completed(running), total=len(running), unit="job", file=sys.stderr):
                try:
                    jobs.append(one.result())
                except (ResiliencyError, OSError) as error:
                    failed += 1
                    print(error, file=sys.stderr)
    finally:
        if not args.keep and not failed:
            shutil.rmtree(root, ignore_errors=True)
    jobs.sort(key=lambda job: job.seed)
    if args.export:
        args.export.write_text(json.dumps([asdict(job) for job in jobs], indent=1))
    print(as_table(jobs))
    if args.markdown:
        today = datetime.now(timezone.utc).date()
        args.markdown.write_text(f"# Ranks that hang or are slow, {today}\n\n{as_table(jobs)}\n")
    outcomes = [outcome for job in jobs for outcome in job.outcomes]
    return int(failed > 0 or any(job.false for job in jobs) or not all(one.named for one in outcomes))


if __name__ == "__main__":
    sys.exit(main())
