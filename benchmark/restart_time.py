# SPDX-License-Identifier: Apache-2.0
"""From a killed rank to the first new step, under our launcher, torchrun and NVRx's ft_launcher.

    python3 benchmark/restart_time.py --workload light --runs 5

The same training script runs under each launcher in turn (A B C A B C ...); its last rank kills
itself after a checkpoint, and the restart is measured span by span.  With ``--fault hung`` it stops
itself, and the restart is measured from the moment at which a launcher has found that out and ends it.
With ``--fault host`` each of two hosts has one rank, and a third is spare; all processes of one are killed,
and the restart is measured from that kill.
A run that fails is reported, makes the exit code 1, and does not stop the others.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import get_args

import restart_hosts
from measuring import count, machine
from restart_report import Report, Result, as_markdown, as_png, as_text
from restart_runs import (
    DEFAULT_LAUNCHERS,
    HOST_LAUNCHERS,
    OURS,
    WATCHFUL,
    WORKLOADS,
    Failure,
    Launcher,
    Workload,
    launchers,
    run_once,
)
from tqdm import tqdm

from resiliency.errors import ResiliencyError

_COMPARED = {"killed": DEFAULT_LAUNCHERS, "hung": WATCHFUL, "host": HOST_LAUNCHERS}
#: What a run may fail with without a bug of ours: it is reported, and the next one starts.
_RUN_ERRORS = (ResiliencyError, TimeoutError, EOFError, OSError)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="restart_time.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    known = list(launchers(0.1, hosts=2))
    parser.add_argument(
        "--workload",
        choices=list(WORKLOADS),
        default="light",
        help="light: torch and gloo, about a minute a round; nemo: real training, about 3 min a round "
        "(on two cores; default: %(default)s)",
    )
    parser.add_argument(
        "--fault",
        choices=get_args(Failure),
        default="killed",
        help="what happens to the last rank; hung: for nemo, and for launchers that notice; host: two "
        "hosts of one rank, one of which is killed as a whole, and a spare (default: %(default)s)",
    )
    parser.add_argument("--runs", type=count, metavar="N", help="rounds (default: 5)")
    parser.add_argument(
        "--quick", action="store_true",
        help="does it run at all: a fifth of the steps, too few for what is prepared in the background, and "
        "one round",
    )  # fmt: skip
    parser.add_argument(
        "--launchers", nargs="+", choices=known, metavar="NAME",
        help=f"which of {', '.join(known)} (default: those of the fault)",
    )  # fmt: skip
    parser.add_argument(
        "--monitor-interval", type=_seconds, default=0.1, metavar="SECONDS",
        help="how often launchers look at their workers, for all of them (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--directory", type=Path, help="where jobs write; default: a temporary directory")
    parser.add_argument("--keep", action="store_true", help="keep what the jobs wrote, with their output")
    parser.add_argument("--export", type=Path, metavar="FILE.json", help="write every figure there")
    parser.add_argument("--markdown", type=Path, metavar="FILE.md", help="write a dated note there")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the spans there")
    return parser


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be above 0, found {text!r}")
    return value


def main() -> int:
    """Exit codes: 0 all runs were measured, 1 some were not."""
    parser = build_parser()
    args = parser.parse_args()
    workload = WORKLOADS[args.workload]
    workload = workload.for_hosts() if args.fault == "host" else replace(workload, failure=args.fault)
    workload = workload.quick() if args.quick else workload
    args.runs = args.runs or (1 if args.quick else 5)
    args.launchers = args.launchers or _COMPARED[args.fault]
    chosen = {
        name: launcher
        for name, launcher in launchers(args.monitor_interval, workload.hosts).items()
        if name == OURS or name in args.launchers  # ours is what all ratios are to
    }
    _check(parser, args, chosen)
    facts = machine()
    root = Path(tempfile.mkdtemp(prefix="restart-", dir=args.directory))
    try:
        results = run_all(chosen, workload, args.runs, root)
    finally:
        if not args.keep:
            shutil.rmtree(root)
    report = Report(
        workload=workload,
        monitor_interval_s=args.monitor_interval,
        launchers=tuple(chosen),
        results=tuple(results),
        date=datetime.now(timezone.utc),
        command=_command(args, chosen),
        machine=facts,
    )
    _publish(report, args)
    if args.keep:
        print(f"Job directories: {root}")
    return 1 if report.failures else 0


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace, chosen: dict[str, Launcher]) -> None:
    """Refuse now what would cost the results half an hour later."""
    if args.fault == "hung" and args.workload != "nemo":
        parser.error("--fault hung needs --workload nemo: the light one sends no heartbeats")
    if args.fault == "hung" and (blind := set(args.launchers) - set(WATCHFUL)):
        parser.error(f"--fault hung: {', '.join(sorted(blind))} never notices a rank that hangs")
    for name, launcher in chosen.items():
        if shutil.which(launcher.argv[0]) is None:
            parser.error(f"{name} needs {launcher.argv[0]}, which does not exist: is its package installed?")
    for path in filter(None, (args.export, args.markdown, args.plot)):
        if not path.resolve().parent.is_dir():
            parser.error(f"the directory of {path} does not exist")
    if args.directory:
        args.directory.mkdir(parents=True, exist_ok=True)


def _publish(report: Report, args: argparse.Namespace) -> None:
    if args.export:
        args.export.write_text(json.dumps(report.to_json(), indent=2) + "\n")
    print(as_text(report))
    if args.markdown:
        args.markdown.write_text(as_markdown(report))
    if args.plot and len(report.failures) < len(report.results):
        as_png(report).savefig(args.plot)


def _command(args: argparse.Namespace, chosen: Iterable[str]) -> str:
    """What repeats this measurement; where this one wrote its files is nobody's business."""
    words = ["python3 benchmark/restart_time.py", f"--workload {args.workload}", f"--runs {args.runs}"]
    words += [f"--fault {args.fault}"] if args.fault != "killed" else []
    words += ["--quick"] if args.quick else []
    words.append(f"--monitor-interval {args.monitor_interval:g}")
    words.append(f"--launchers {' '.join(chosen)}")
    return " ".join(words)


def run_all(chosen: dict[str, Launcher], workload: Workload, rounds: int, root: Path) -> list[Result]:
    """Run every launcher once per round, and say what became of each run."""
    results = []
    with tqdm(total=rounds * len(chosen), unit="run", file=sys.stderr) as bar:
        for number in range(1, rounds + 1):
            for name, launcher in chosen.items():
                bar.set_description(f"round {number}, {name}")
                begin = time.monotonic()
                try:
                    directory = root / f"{number}-{name}"
                    if workload.hosts > 1:
                        restart = restart_hosts.run_once(name, launcher, workload, directory)
                    else:
                        restart = run_once(launcher, workload, directory)
                    error = ""
                except _RUN_ERRORS as failure:
                    restart, error = None, str(failure)
                wall_s = time.monotonic() - begin
                results.append(
                    Result(round=number, launcher=name, wall_s=wall_s, restart=restart, error=error)
                )
                bar.update()
    return results


if __name__ == "__main__":
    sys.exit(main())
