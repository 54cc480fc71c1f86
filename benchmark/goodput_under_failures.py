# SPDX-License-Identifier: Apache-2.0
"""What launchers and checkpointers keep of the time under the same failures.

    python3 benchmark/goodput_under_failures.py --rounds 3 --export failures.json --markdown failures.md
    python3 benchmark/goodput_under_failures.py --training nemo --rounds 1 --markdown failures-nemo.md
    python3 benchmark/goodput_under_failures.py --hosts --rounds 1 --markdown failures-hosts.md

The same training runs under each contestant in turn for the same time, while the failure simulator injures it
by the same seeded schedule.  Kept steps are compared with the possible ones: the undisturbed rate, without
failures and saves, that is measured in the same round.  A run that cannot be measured is reported, makes the
exit code 1, and does not stop the others; --export is written after each run.

With eight faults a run takes 8 minutes (light) or 16 (nemo), and a round of all contestants 50 or 90.
With --hosts the light training has three hosts and a spare, and each of four faults takes a host with its
disk and memory: a run takes 12 minutes, a round 40.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType

import failures_hosts
import failures_runs
from failures_jobs import HOST_LOSSES, TRAININGS, Training
from failures_report import Report, as_markdown, as_text, draw, measured_with
from failures_runs import Plan, Run, journals
from measuring import count, machine
from restart_runs import launchers
from tqdm import tqdm

from resiliency.errors import ResiliencyError

#: What a run may fail with without a bug of ours: it is reported, and the next one starts.
_RUN_ERRORS = (ResiliencyError, TimeoutError, EOFError, OSError)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="goodput_under_failures.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--training", choices=list(TRAININGS), default="light", help="what is trained (default: %(default)s)"
    )
    parser.add_argument(
        "--hosts", action="store_true", help="lose whole hosts, and no ranks; for the light training"
    )
    parser.add_argument("--rounds", type=count, default=3, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--faults",
        type=count,
        metavar="N",
        help="in the window of each run (default: 8; --hosts: 4)",
    )
    parser.add_argument(
        "--fault-interval-s",
        type=_seconds,
        metavar="S",
        help="mean time between failures; a window is as long as --faults of them (default: 60; nemo: 120;"
        " --hosts: 180)",
    )
    parser.add_argument(
        "--kinds",
        default="kill",
        help="what fails, in the simulator's words; a launcher that finds no hangs waits out each stop"
        " (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=42, metavar="N", help="of round 1; round 2 has the next one (%(default)s)"
    )
    parser.add_argument("--save-every", type=count, metavar="STEPS", help="for all savers (default: 50)")
    parser.add_argument(
        "--undisturbed-s",
        type=_seconds,
        default=30.0,
        metavar="S",
        help="how long each round measures the undisturbed rate (default: %(default)g)",
    )
    named = "; ".join(f"{one.name}: {', '.join(one.contestants)}" for one in TRAININGS.values())
    named += f"; --hosts: {', '.join(HOST_LOSSES.contestants)}"
    parser.add_argument(
        "--contestants", nargs="+", metavar="NAME", help=f"which of these (default: all).  {named}"
    )
    parser.add_argument("--directory", type=Path, help="where jobs write; default: a temporary directory")
    parser.add_argument("--keep", action="store_true", help="keep what the jobs wrote, with their output")
    parser.add_argument("--export", type=Path, metavar="FILE.json", help="write every figure there")
    parser.add_argument("--markdown", type=Path, metavar="FILE.md", help="write a dated note there")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the lost time there")
    return parser


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be above 0, found {text!r}")
    return value


def main() -> int:
    """Exit codes: 0 all runs were measured, 1 some were not, 128 + N ended by SIGHUP or SIGTERM, number N."""
    with _ending_by_signals():
        return _measure()


@contextmanager
def _ending_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind as Ctrl-C does: job and simulator are ended, effects are undone."""

    def end(number: int, frame: FrameType | None) -> None:
        # A second one must not interrupt the ending.
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    # What was ignored stays so: nohup.
    before = {
        number: handler
        for number in (signal.SIGTERM, signal.SIGHUP)
        if (handler := signal.getsignal(number)) is not signal.SIG_IGN
    }
    for number in before:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _measure() -> int:
    parser = build_parser()
    args = parser.parse_args()
    if args.hosts and (args.training != "light" or args.kinds != "kill"):
        parser.error("--hosts is of the light training, and loses hosts: leave out --training and --kinds")
    training = HOST_LOSSES if args.hosts else TRAININGS[args.training]
    args.contestants = args.contestants or list(training.contestants)
    if unknown := [name for name in args.contestants if name not in training.contestants]:
        parser.error(
            f"--contestants: {args.training} has no {unknown[0]!r}; it has {', '.join(training.contestants)}"
        )
    args.fault_interval_s = args.fault_interval_s or training.fault_interval_s
    args.faults = args.faults or training.faults
    args.save_every = args.save_every or training.save_every
    for path in filter(None, (args.export, args.markdown, args.plot)):
        if not path.resolve().parent.is_dir():
            parser.error(f"the directory of {path} does not exist")
    if args.directory:
        args.directory.mkdir(parents=True, exist_ok=True)
    report = Report(training=training, command=_command(args), machine=machine(), runs=())
    root = Path(tempfile.mkdtemp(prefix="failures-", dir=args.directory))
    try:
        for so_far in measure_all(args, report, root):
            report = so_far
            if args.export:
                args.export.write_text(json.dumps(report.to_json(), indent=2) + "\n")
    finally:
        left = journals(root)
        for path in left:
            print(
                "The simulator left effects.  Undo them: python3 simulator/simulator_entrypoint.py"
                f" --undo_only --state_dir {path.parent}",
                file=sys.stderr,
            )
        if not args.keep and not left:
            shutil.rmtree(root)
    print(as_text(report))
    if args.markdown:
        args.markdown.write_text(as_markdown(report))
    if args.plot:
        draw(report).savefig(args.plot)
    if args.keep:
        print(f"Job directories: {root}")
    return 1 if report.failed else 0


def _command(args: argparse.Namespace) -> str:
    """What repeats this measurement; where this one wrote its files is left out."""
    words = ["python3 benchmark/goodput_under_failures.py", f"--training {args.training}"]
    words += ["--hosts"] if args.hosts else [f"--kinds {args.kinds}"]
    words += [
        f"--rounds {args.rounds}",
        f"--faults {args.faults}",
        f"--seed {args.seed}",
    ]
    words += [f"--fault-interval-s {args.fault_interval_s:g}", f"--save-every {args.save_every}"]
    return " ".join([*words, f"--contestants {measured_with(args.contestants)}"])


def measure_all(args: argparse.Namespace, report: Report, root: Path) -> Iterator[Report]:
    """Every run; a report after each."""
    names, left_out = _present(report.training, args.contestants)
    report = replace(report, left_out={**left_out, **report.training.left_out})
    # Either: how the undisturbed rate is measured, and a contestant.
    measure = failures_hosts if report.training.hosts > 1 else failures_runs
    with tqdm(total=args.rounds * (len(names) + 1), unit="run", file=sys.stderr) as bar:
        for number in range(1, args.rounds + 1):
            bar.set_description(f"round {number}, undisturbed")
            try:
                rate = measure.undisturbed_rate(
                    report.training, root / f"{number}-undisturbed", args.undisturbed_s
                )
            except _RUN_ERRORS as failure:
                run = Run(
                    contestant="undisturbed", round=number, wall_s=args.undisturbed_s, error=str(failure)
                )
                report = replace(report, runs=[*report.runs, (run, 1.0)])
                bar.update(len(names) + 1)
                yield report
                continue
            bar.update()
            plan = Plan(
                training=report.training,
                faults=args.faults,
                fault_interval_s=args.fault_interval_s,
                kinds=args.kinds,
                seed=args.seed + number - 1,
                save_every=args.save_every,
            )
            for name in names:
                bar.set_description(f"round {number}, {name}")
                directory = root / f"{number}-{name.replace(' ', '-')}"
                try:
                    run = measure.run_once(name, number, plan, directory)
                except _RUN_ERRORS as failure:
                    run = Run(contestant=name, round=number, wall_s=plan.wall_s, error=str(failure))
                report = replace(report, runs=[*report.runs, (run, rate)])
                bar.update()
                yield report


def _present(training: Training, wanted: list[str]) -> tuple[list[str], dict[str, str]]:
    """Contestants whose launcher is installed, and why the others take no part."""
    known = launchers(0.1)
    programs = {name: Path(known[training.contestants[name].launcher].argv[0]) for name in wanted}
    left_out = {name: f"{path.name} is not installed" for name, path in programs.items() if not path.exists()}
    return [name for name in wanted if name not in left_out], left_out


if __name__ == "__main__":
    sys.exit(main())
