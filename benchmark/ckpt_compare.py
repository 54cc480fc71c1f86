# SPDX-License-Identifier: Apache-2.0
"""Our checkpoints beside torch.save, torch.distributed.checkpoint, three libraries and the machine's limits.

    python3 benchmark/ckpt_compare.py --directory /mnt/disk
    python3 benchmark/ckpt_compare.py --directory /mnt/disk --cells 1x2 --contestants ours "NVRx async"

For each cell (GiB of state per rank x ranks) the limits of the machine come first: memory copy, raw
write with fsync, raw read.  Then every contestant trains, saves and restores in fresh processes.
Reported per save: how long training was held, how much longer the next ten steps took, when the
checkpoint was durable, and the memory it took; then the first save, and restores from memory, from a
disk, and from files that the page cache has.
Where the engine misses a bar, the report says by how much.

Run it on a machine that does nothing else, on the disk that checkpoints go to.  Beyond the state
itself a rank needs up to three times its size in memory and three times on disk.  A contestant that
fails is listed with its error, makes the exit code 1, and does not stop the others.  DLRover,
lm-resiliency and NVRx's local checkpoints take part where they are installed
(pip install -e '.[compare]' -c constraints.txt).
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path

import psutil
from ckpt_cells import Cell, CellResult, run_cell
from ckpt_contestants import CONTESTANTS, DLROVER, FROM_MEMORY, LM_RESILIENCY, NVRX_LOCAL, OURS, is_installed
from ckpt_groups import Groups, RankFailed
from ckpt_report import Report, as_markdown, as_png, as_text
from measuring import count, file_system, machine
from tqdm import tqdm

from resiliency.errors import ConfigError

#: What should fit into twelve minutes on two idle cores where the optional ones are not installed: all
#: contestants for the smallest state, those that hold training the least for larger ones, and our own limits
#: for the largest.
DEFAULT_PLAN = {
    "0.25x1": tuple(CONTESTANTS),
    "0.25x2": (
        *(OURS, "DCP async, thread, tuned", "DCP async, process, tuned", "NVRx async", "torch.save"),
        *(DLROVER, NVRX_LOCAL, LM_RESILIENCY),
    ),
    "1x1": (OURS, "DCP async, thread, tuned"),
    "2x1": (OURS,),
}
QUICK_PLAN = {"0.004x1": tuple(CONTESTANTS), "0.004x2": tuple(CONTESTANTS)}
Plan = list[tuple[Cell, list[str]]]


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ckpt_compare.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cells", nargs="+", type=parse_cell, metavar="GIBxRANKS",
        help="what to measure, under all contestants (default: "
        f"{' '.join(DEFAULT_PLAN)}, the larger ones under fewer contestants)",
    )  # fmt: skip
    parser.add_argument(
        "--contestants", nargs="+", choices=list(CONTESTANTS), metavar="NAME",
        help=f"none but these of: {'; '.join(CONTESTANTS)}",
    )  # fmt: skip
    parser.add_argument("--rounds", type=count, metavar="N", help="medians of that many (default: 5)")
    parser.add_argument(
        "--quick", action="store_true",
        help="4 MiB and one round: whether everything works; the times say nothing",
    )  # fmt: skip
    parser.add_argument(
        "--minutes", type=float, default=math.inf, metavar="M",
        help="begin no contestant after that time; the report lists those left out (default: no limit)",
    )  # fmt: skip
    parser.add_argument("--directory", type=Path, help="on the disk to measure (default: a temporary one)")
    parser.add_argument("--export", type=Path, metavar="FILE.json", help="write every figure there")
    parser.add_argument("--markdown", type=Path, metavar="FILE.md", help="write a dated note there")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw it there")
    return parser


def parse_cell(text: str) -> Cell:
    """``0.25x2``: 0.25 GiB on each of two ranks."""
    size, _, ranks = text.partition("x")
    try:
        cell = Cell(int(float(size) * 2**30), int(ranks))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must look like 0.25x2 (GiB x ranks), found {text!r}") from None
    if cell.size_bytes < 2**20 or cell.ranks < 1:
        raise argparse.ArgumentTypeError(f"needs at least 0.001 GiB and 1 rank, found {text!r}")
    return cell


def main() -> int:
    """Exit codes: 0 everything was measured, 1 some of it was not."""
    parser = build_parser()
    args = parser.parse_args()
    plan = make_plan(args)
    rounds = args.rounds or (1 if args.quick else 5)
    _check(parser, args, plan)
    root = args.directory or Path(tempfile.gettempdir())
    root.mkdir(parents=True, exist_ok=True)
    facts = machine() | {"storage": file_system(root)}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nothing is left behind then, either
    began = time.monotonic()
    wanted = dict.fromkeys(name for _, names in plan for name in names)
    there = [(cell, [name for name in names if is_installed(name)]) for cell, names in plan]
    results = run_all(there, rounds, root, began + 60 * args.minutes)
    measured = {result.cell for result in results}
    report = Report(
        results=tuple(results),
        left_out=tuple(str(cell) for cell, _ in plan if cell not in measured),
        rounds=rounds,
        date=datetime.now(timezone.utc),
        command=_command(args),
        machine=facts,
        wall_s=time.monotonic() - began,
        not_installed=tuple(name for name in wanted if not is_installed(name)),
    )
    _publish(report, args)
    return 1 if report.failures or len(results) < len(plan) else 0


def make_plan(args: argparse.Namespace) -> Plan:
    """The cells to measure, each with its contestants."""
    if args.cells:
        return [(cell, args.contestants or list(CONTESTANTS)) for cell in args.cells]
    plan = QUICK_PLAN if args.quick else DEFAULT_PLAN
    return [
        (parse_cell(cell), [name for name in names if name in (args.contestants or names)])
        for cell, names in plan.items()
    ]


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace, plan: Plan) -> None:
    """Refuse now what would cost the results ten minutes later."""
    for path in filter(None, (args.export, args.markdown, args.plot)):
        if not path.resolve().parent.is_dir():
            parser.error(f"the directory of {path} does not exist")
    absent = [name for name in args.contestants or () if not is_installed(name)]
    if absent:
        parser.error(f"not installed: {', '.join(absent)}; pip install -e '.[compare]' -c constraints.txt")
    largest = max(cell.size_bytes * cell.ranks for cell, _ in plan)
    free = psutil.virtual_memory().available
    if 5 * largest > free:  # state, gradients, two slots, and what is being measured
        parser.error(
            f"{5 * largest / 2**30:.1f} GiB of memory are needed for the largest cell,"
            f" {free / 2**30:.1f} GiB are free: choose smaller --cells"
        )


def run_all(plan: Plan, rounds: int, root: Path, deadline: float) -> list[CellResult]:
    """Measure cell by cell.  One whose limits cannot be measured is said and left out."""
    results = []
    units = sum(1 + 2 * len(names) + len(FROM_MEMORY & set(names)) for _, names in plan)
    with tqdm(total=units, unit="part", file=sys.stderr) as bar, Groups() as groups:
        for cell, names in plan:
            if time.monotonic() > deadline:
                break

            def progress(what: str, cell: Cell = cell) -> None:
                bar.set_description(f"{cell}: {what}", refresh=False)
                bar.update()

            try:
                results.append(run_cell(groups, cell, names, rounds, root, progress, deadline))
            except RankFailed as failure:
                bar.write(f"FAILED {cell}: {failure}", file=sys.stderr)
    return results


def _publish(report: Report, args: argparse.Namespace) -> None:
    if args.export:
        args.export.write_text(json.dumps(report.to_json(), indent=2) + "\n")
    print(as_text(report))
    if args.markdown:
        args.markdown.write_text(as_markdown(report, args.plot.name if args.plot else ""))
    if args.plot and report.results:
        as_png(report).savefig(args.plot)


def _command(args: argparse.Namespace) -> str:
    """What repeats this measurement; where this one wrote its files is nobody's business."""
    words = ["python3 benchmark/ckpt_compare.py --directory DISK"]
    if args.quick:
        words.append("--quick")
    if args.cells:
        cells = (f"{cell.size_bytes / 2**30:g}x{cell.ranks}" for cell in args.cells)
        words.append(f"--cells {' '.join(cells)}")
    if args.contestants:
        words.append("--contestants " + " ".join(f'"{name}"' for name in args.contestants))
    if args.rounds:
        words.append(f"--rounds {args.rounds}")
    if args.minutes < math.inf:
        words.append(f"--minutes {args.minutes:g}")
    return " ".join(words)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ConfigError as error:
        sys.exit(str(error))
