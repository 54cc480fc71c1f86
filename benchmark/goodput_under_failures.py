# SPDX-License-Identifier: Apache-2.0
"""What launchers and checkpointers keep of the time under the same failures.

    python3 benchmark/goodput_under_failures.py --rounds 3 --export failures.json --plot failures.png

The same light training runs under each contestant in turn for the same time, while the failure simulator
injures it by the same seeded schedule.  Kept steps are compared with the possible ones: the undisturbed rate,
without failures and saves, that is measured in the same round.  A run that fails is reported, makes the exit
code 1, and does not stop the others.  With --wall-s 480 a round of six contestants takes about 50 minutes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from types import FrameType

from failures_runs import CONTESTANTS, OURS, Plan, Run, journals, run_once, undisturbed_rate
from measuring import count, machine
from tqdm import tqdm

from resiliency.errors import ResiliencyError
from resiliency.events import JsonValue

#: What a run may fail with without a bug of ours: it is reported, and the next one starts.
_RUN_ERRORS = (ResiliencyError, TimeoutError, EOFError, OSError)
Measured = Sequence[tuple[Run, float]]


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="goodput_under_failures.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=count, default=3, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--wall-s",
        type=_seconds,
        default=480.0,
        metavar="S",
        help="window of each run (default: %(default)g)",
    )
    parser.add_argument(
        "--fault-interval-s",
        type=_seconds,
        default=60.0,
        metavar="S",
        help="mean time between failures, from the simulator's Poisson schedule (default: %(default)g)",
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
    parser.add_argument(
        "--save-every", type=count, default=50, metavar="STEPS", help="for all savers (default: %(default)s)"
    )
    parser.add_argument(
        "--undisturbed-s",
        type=_seconds,
        default=30.0,
        metavar="S",
        help="how long each round measures the undisturbed rate (default: %(default)g)",
    )
    parser.add_argument(
        "--contestants",
        nargs="+",
        choices=list(CONTESTANTS),
        default=list(CONTESTANTS),
        metavar="NAME",
        help=f"which of {', '.join(CONTESTANTS)} (default: all)",
    )
    parser.add_argument("--directory", type=Path, help="where jobs write; default: a temporary directory")
    parser.add_argument("--keep", action="store_true", help="keep what the jobs wrote, with their output")
    parser.add_argument("--export", type=Path, metavar="FILE.json", help="write every figure there")
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
    for path in filter(None, (args.export, args.plot)):
        if not path.resolve().parent.is_dir():
            parser.error(f"the directory of {path} does not exist")
    if args.directory:
        args.directory.mkdir(parents=True, exist_ok=True)
    facts = machine()
    root = Path(tempfile.mkdtemp(prefix="failures-", dir=args.directory))
    try:
        measured = run_all(args, root)
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
    print(as_text(measured))
    if args.export:
        args.export.write_text(json.dumps(to_json(measured, args, facts), indent=2) + "\n")
    if args.plot:
        _draw(measured, args.plot)
    if args.keep:
        print(f"Job directories: {root}")
    return 1 if any(run.error for run, _ in measured) else 0


def run_all(args: argparse.Namespace, root: Path) -> list[tuple[Run, float]]:
    """Every run, with the undisturbed rate of its round in steps a second."""
    measured = []
    with tqdm(total=args.rounds * (len(args.contestants) + 1), unit="run", file=sys.stderr) as bar:
        for number in range(1, args.rounds + 1):
            bar.set_description(f"round {number}, undisturbed")
            rate = undisturbed_rate(root / f"{number}-undisturbed", args.undisturbed_s)
            bar.update()
            plan = Plan(
                wall_s=args.wall_s,
                fault_interval_s=args.fault_interval_s,
                kinds=args.kinds,
                seed=args.seed + number - 1,
                save_every=args.save_every,
            )
            for name in args.contestants:
                bar.set_description(f"round {number}, {name}")
                directory = root / f"{number}-{name.replace(' ', '-')}"
                try:
                    run = run_once(name, number, plan, directory)
                except _RUN_ERRORS as failure:
                    run = Run(contestant=name, round=number, wall_s=args.wall_s, error=str(failure))
                measured.append((run, rate))
                bar.update()
    return measured


def as_text(measured: Measured) -> str:
    """The table: medians over rounds, and the worst round."""
    lines = [
        f"{'contestant':26} {'kept':>7} {'worst':>7} {'lost s':>8} {'worst':>8} {'incidents':>9}"
        "   to the next new step, s: mean median worst"
    ]
    lost = lost_by_contestant(measured)
    for name, seconds in lost.items():
        runs = [(run, rate) for run, rate in measured if run.contestant == name and not run.error]
        kept = [run.kept_share(rate) for run, rate in runs]
        back = [each for run, _ in runs for each in run.recoveries_s if each is not None]
        times = f"{statistics.fmean(back):.2f} {statistics.median(back):.2f} {max(back):.2f}" if back else "-"
        lines.append(
            f"{name:26} {statistics.median(kept):7.1%} {min(kept):7.1%} {statistics.median(seconds):8.1f}"
            f" {max(seconds):8.1f} {sum(len(run.faults) for run, _ in runs):9}   {times}"
        )
    if OURS in lost:
        own = statistics.median(lost[OURS])
        for name, seconds in lost.items():
            if name != OURS and own > 0:
                lines.append(f"{name} loses {statistics.median(seconds) / own:.2f} x as much time as {OURS}")
    lines += _causes(measured)
    failed = [run for run, _ in measured if run.error]
    return "\n".join(
        [*lines, *(f"FAILED round {run.round}, {run.contestant}: {run.error}" for run in failed)]
    )


def _causes(measured: Measured) -> list[str]:
    """Where the time went, for contestants whose runs have a ledger: medians of rounds."""
    lines = []
    for name in dict.fromkeys(run.contestant for run, _ in measured):
        runs = [run.causes_s for run, _ in measured if run.contestant == name and run.causes_s]
        found = {cause: statistics.median(run.get(cause, 0.0) for run in runs) for cause in _words(runs)}
        if found:
            lines.append(
                f"{name}, s by cause: " + ", ".join(f"{cause} {s:.1f}" for cause, s in found.items())
            )
    return lines


def _words(runs: Iterable[Mapping[str, float]]) -> list[str]:
    return list(dict.fromkeys(cause for run in runs for cause in run))


def lost_by_contestant(measured: Measured) -> dict[str, list[float]]:
    """Lost seconds of each round; contestants that no round measured are left out."""
    lost: dict[str, list[float]] = {}
    for run, rate in measured:
        if not run.error:
            lost.setdefault(run.contestant, []).append(run.lost_s(rate))
    return lost


def to_json(
    measured: Measured, args: argparse.Namespace, facts: dict[str, JsonValue]
) -> dict[str, JsonValue]:
    words = ("rounds", "wall_s", "fault_interval_s", "kinds", "seed", "save_every", "undisturbed_s")
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": facts,
        "plan": {word: getattr(args, word) for word in words},
        "undisturbed_steps_per_s": {str(run.round): rate for run, rate in measured},
        "runs": [run.to_json(rate) for run, rate in measured],
    }


def _draw(measured: Measured, path: Path) -> None:
    from matplotlib.figure import Figure

    lost = lost_by_contestant(measured)
    figure = Figure(figsize=(8, 1 + 0.6 * len(lost)), layout="constrained")
    axes = figure.subplots()
    names = list(lost)[::-1]
    axes.barh(names, [statistics.median(lost[name]) for name in names], color="#4477aa")
    for place, name in enumerate(names):
        axes.plot(lost[name], [place] * len(lost[name]), "k|", markersize=12)
    axes.set_xlabel("lost seconds: median of rounds, each round a mark")
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(main())
