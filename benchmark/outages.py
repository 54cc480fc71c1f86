# SPDX-License-Identifier: Apache-2.0
"""Outages of what a job needs, under our launcher with restarts enough: is the job there afterwards?

    python3 benchmark/outages.py --seconds 5 30 120 600 --markdown note.md

Each run is one job of two ranks without torch whose rank 0 fails, attempt after attempt, for as long as its
storage, data service, object store or DNS is away: before the first step, in a step, or in a save.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from statistics import median

from measuring import count, machine
from outage_job import KINDS, PLACES
from tqdm import tqdm

from resiliency.events import EventType, RunEvent

PROJECT = Path(__file__).resolve().parents[1]
#: Beyond the outage itself: starts on a busy machine, the longest pause between attempts, and the job.
MORE_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """`back_s`: from the end of the outage until the job had what it needs."""

    kind: str
    place: str
    away_s: float
    exit_code: int | None
    restarts: int
    back_s: float | None
    last_words: str


def run_one(kind: str, place: str, away_s: float, root: Path) -> Outcome:
    """One job under the launcher."""
    root.mkdir(parents=True)
    argv: list[str | Path] = [
        sys.executable,
        PROJECT / "launcher.py",
        "--run-dir",
        root / "run",
        "--nproc-per-node=2",
    ]
    argv += ["--max-restarts=1000", PROJECT / "benchmark" / "outage_job.py", kind, place, str(away_s), root]
    code: int | None = None
    with (root / "output").open("wb") as output:
        env = os.environ | {"PYTHONPATH": str(PROJECT)}
        launcher = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=env
        )
    with suppress(subprocess.TimeoutExpired):
        code = launcher.wait(away_s + MORE_S)
    if code is None:
        launcher.terminate()
        launcher.wait()
    lines = [line for file in (root / "run").glob("*-events.jsonl") for line in file.read_text().splitlines()]
    starts = [one for one in map(RunEvent.from_json, lines) if one.type is EventType.WORKERS_STARTED]
    over = root / "over"
    back_s = None
    if over.exists():
        back_s = float(over.read_text()) - float((root / "asked").read_text()) - away_s
    words = (root / "output").read_text(errors="replace").strip().splitlines()
    return Outcome(
        kind=kind, place=place, away_s=away_s, exit_code=code, restarts=len(starts) - 1, back_s=back_s,
        last_words=words[-1][:200] if words and code else "",
    )  # fmt: skip


def as_table(outcomes: Sequence[Outcome]) -> str:
    """Markdown."""
    lines = [
        "| What is away | where | s | jobs that came through | restarts | median s until it was used again |",
        "|---|---|---|---|---|---|",
    ]
    cells = sorted({(one.kind, one.place, one.away_s) for one in outcomes})
    for kind, place, away_s in cells:
        here = [one for one in outcomes if (one.kind, one.place, one.away_s) == (kind, place, away_s)]
        good = sum(one.exit_code == 0 for one in here)
        back = [one.back_s for one in here if one.back_s is not None]
        restarts = median(one.restarts for one in here)
        again = f"{median(back):.1f}" if back else ""
        name = kind.replace("_", " ")
        lines.append(f"| {name} | {place} | {away_s:g} | {good} of {len(here)} | {restarts:g} | {again} |")
    lost = [one for one in outcomes if one.exit_code != 0]
    lines += ["", f"{len(lost)} of {len(outcomes)} jobs were lost."]
    return "\n".join(
        [*lines, *(f"- {one.kind} {one.place}: {one.exit_code}, {one.last_words}" for one in lost)]
    )


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="outages.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seconds", type=float, nargs="+", default=[5.0, 30.0], metavar="S", help="(default: 5 30)"
    )
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND",
                        help=f"default: all of {', '.join(KINDS)}")  # fmt: skip
    parser.add_argument("--places", nargs="+", choices=PLACES, default=PLACES, metavar="PLACE",
                        help=f"default: {', '.join(PLACES)}")  # fmt: skip
    parser.add_argument("--runs", type=count, default=1, metavar="N", help="of each (default: 1)")
    parser.add_argument("--jobs", type=count, default=4, metavar="N", help="at a time (default: 4)")
    parser.add_argument("--export", type=Path, metavar="FILE.json", help="write every outcome there")
    parser.add_argument("--markdown", type=Path, metavar="FILE.md", help="write the table there")
    return parser


def main() -> int:
    """Exit codes: 0 each job came through, 1 not."""
    args = build_parser().parse_args()
    root = Path(tempfile.mkdtemp(prefix="outages-"))
    print(json.dumps(machine()))
    began = time.monotonic()
    outcomes: list[Outcome] = []
    with ThreadPoolExecutor(args.jobs) as pool:
        running = [
            pool.submit(run_one, kind, place, away_s, root / f"{kind}-{place}-{away_s:g}-{run}")
            for away_s in sorted(args.seconds, reverse=True)
            for kind in args.kinds
            for place in args.places
            for run in range(args.runs)
        ]
        for one in tqdm(as_completed(running), total=len(running), unit="job", file=sys.stderr):
            outcomes.append(one.result())
    lost = any(one.exit_code != 0 for one in outcomes)
    if lost:
        print(f"what the jobs wrote is in {root}", file=sys.stderr)
    else:
        shutil.rmtree(root, ignore_errors=True)
    if args.export:
        args.export.write_text(json.dumps([asdict(one) for one in outcomes], indent=1))
    table = f"{as_table(outcomes)}\n\nTook {time.monotonic() - began:.0f} s."
    print(table)
    if args.markdown:
        today = datetime.now(timezone.utc).date()
        args.markdown.write_text(f"# Outages of what a job needs, {today}\n\n{table}\n")
    return int(lost)


if __name__ == "__main__":
    sys.exit(main())
