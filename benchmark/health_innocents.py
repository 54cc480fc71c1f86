# SPDX-License-Identifier: Apache-2.0
"""Sound jobs that look as if they hung, under our launcher: each has to end by itself, left alone.

    python3 benchmark/health_innocents.py --runs 25 --markdown note.md

Each run is one job of three gloo ranks with the launcher's defaults, in which one rank or all do for a while
what sound programs do: wait for a service, a lock, a child or a person, evaluate, save, start or end slowly,
take long or uneven steps.  The launcher's time before it ends ranks is scaled from three minutes to
``--act-s``, and a behaviour lasts twice as long.  Harm is a restart, an exit code other than 0, or a log line
of level ERROR.
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
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

from innocent_job import BEHAVIOURS, suspended_job
from innocent_services import OtherSide
from measuring import count, machine
from tqdm import tqdm

from resiliency.events import EventType, RunEvent

PROJECT = Path(__file__).resolve().parents[1]
RANKS = 3
#: A run that takes longer stands still.
GIVE_UP_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Of one run.  `harm`: sentences, empty for a job that was left alone."""

    behaviour: str
    seconds: float
    exit_code: int | None
    restarts: int
    harm: tuple[str, ...]
    named: tuple[str, ...]


def run_one(name: str, root: Path, act_s: float) -> Outcome:
    """One job under the launcher; whatever is left of it is ended."""
    root.mkdir(parents=True)
    seconds = 2 * act_s
    other = OtherSide(root, seconds)
    argv: list[str | Path] = [
        sys.executable,
        PROJECT / "benchmark" / "scaled_launcher.py",
        str(act_s),
        "--run-dir",
        root / "run",
    ]
    argv += [f"--nproc-per-node={RANKS}", "--max-restarts=3"]
    argv += [PROJECT / "benchmark" / "innocent_job.py", name, root, str(seconds)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROJECT)}
    began = time.monotonic()
    code: int | None = None
    try:
        with (root / "output").open("wb") as output:
            launcher = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=env,
                start_new_session=True,
            )  # fmt: skip
        try:
            if BEHAVIOURS[name].run is suspended_job:
                _suspend(root, launcher, act_s)
            with suppress(subprocess.TimeoutExpired):
                code = launcher.wait(GIVE_UP_S)
        finally:
            if code is None:
                launcher.terminate()
                with suppress(subprocess.TimeoutExpired):
                    launcher.wait(30)
                launcher.kill()
                launcher.wait()
    finally:
        other.close()
    text = (root / "output").read_text(errors="replace")
    errors = [line for line in text.splitlines() if " ERROR " in line or line.startswith("ERROR")]
    starts = [event for event in _events(root) if event.type is EventType.WORKERS_STARTED]
    found = [event for event in _events(root) if event.type is EventType.HANG_DETECTED]
    harm = [f"exit code {code}"] if code else []
    harm += [f"{len(starts) - 1} restarts"] if len(starts) != 1 else []
    harm += [line[:200] for line in errors]
    return Outcome(
        behaviour=name,
        seconds=time.monotonic() - began,
        exit_code=code,
        restarts=len(starts) - 1,
        harm=tuple(harm),
        named=tuple(f"{event.fields['kind']}: {event.fields['cause']}" for event in found),
    )


def _suspend(root: Path, launcher: subprocess.Popen[bytes], act_s: float) -> None:
    """As a laptop that is closed, or a batch system that takes the machine for a while."""
    until = time.monotonic() + GIVE_UP_S
    while not all((root / f"suspend-{rank}").exists() for rank in range(RANKS)):
        if time.monotonic() > until or launcher.poll() is not None:
            return
        time.sleep(0.05)
    everyone = _tree(launcher.pid)
    for pid in everyone:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    time.sleep(2 * act_s)
    for pid in everyone:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _tree(pid: int) -> list[int]:
    found, left = [], [pid]
    while left:
        found.append(one := left.pop())
        with suppress(OSError):
            for task in os.listdir(f"/proc/{one}/task"):
                left += map(int, Path(f"/proc/{one}/task/{task}/children").read_text().split())
    return found


def _events(root: Path) -> list[RunEvent]:
    lines = [line for file in (root / "run").glob("*-events.jsonl") for line in file.read_text().splitlines()]
    return [RunEvent.from_json(line) for line in lines]


def as_table(outcomes: Sequence[Outcome]) -> str:
    """Markdown."""
    by_name: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        by_name[outcome.behaviour].append(outcome)
    lines = ["| Behaviour | runs | ended or restarted | accused | said of it |", "|---|---|---|---|---|"]
    for name, all_of in by_name.items():
        ended = sum(bool(one.exit_code or one.restarts or one.exit_code is None) for one in all_of)
        accused = sum(bool(one.harm) for one in all_of)
        said = next((one.named[-1] for one in all_of if one.named), "nothing")[:100]
        lines.append(f"| {name.replace('_', ' ')} | {len(all_of)} | {ended} | {accused} | {said} |")
    harmed = [one for one in outcomes if one.harm or one.exit_code is None]
    lines += ["", f"{len(harmed)} of {len(outcomes)} jobs were harmed."]
    return "\n".join(
        [*lines, *(f"- {one.behaviour}: {'; '.join(one.harm) or 'stood still'}" for one in harmed)]
    )


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="health_innocents.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--runs", type=count, default=1, metavar="N", help="of each behaviour (default: 1)")
    parser.add_argument("--jobs", type=count, default=4, metavar="N", help="at a time (default: 4)")
    parser.add_argument(
        "--act-s", type=float, default=10.0, metavar="S", help="stands for the three minutes (default: 10)"
    )
    parser.add_argument("--behaviours", nargs="+", choices=BEHAVIOURS, default=BEHAVIOURS, metavar="NAME",
                        help=f"default: all of {', '.join(BEHAVIOURS)}")  # fmt: skip
    parser.add_argument("--export", type=Path, metavar="FILE.json", help="write every outcome there")
    parser.add_argument("--markdown", type=Path, metavar="FILE.md", help="write the table there")
    parser.add_argument("--keep", action="store_true", help="keep what the jobs wrote")
    return parser


def main() -> int:
    """Exit codes: 0 all jobs were left alone, 1 not."""
    args = build_parser().parse_args()
    root = Path(tempfile.mkdtemp(prefix="innocents-"))
    print(json.dumps(machine()))
    outcomes: list[Outcome] = []
    with ThreadPoolExecutor(args.jobs) as pool:
        running = [
            pool.submit(run_one, name, root / f"{name}-{run}", args.act_s)
            for run in range(args.runs)
            for name in args.behaviours
        ]
        for one in tqdm(as_completed(running), total=len(running), unit="job", file=sys.stderr):
            outcomes.append(one.result())
    outcomes.sort(key=lambda one: list(BEHAVIOURS).index(one.behaviour))
    harmed = any(one.harm or one.exit_code is None for one in outcomes)
    if args.keep or harmed:
        print(f"what the jobs wrote is in {root}", file=sys.stderr)
    else:
        shutil.rmtree(root, ignore_errors=True)
    if args.export:
        args.export.write_text(json.dumps([asdict(one) for one in outcomes], indent=1))
    print(as_table(outcomes))
    if args.markdown:
        today = datetime.now(timezone.utc).date()
        args.markdown.write_text(f"# Sound jobs that look as if they hung, {today}\n\n{as_table(outcomes)}\n")
    return int(harmed)


if __name__ == "__main__":
    sys.exit(main())
