# SPDX-License-Identifier: Apache-2.0
"""What copies on other hosts cost and give back: making them, restoring from them, training beside them.

    python3 benchmark/replication.py --directory /mnt/disk
    python3 benchmark/replication.py --directory /mnt/disk --gib 1 --rounds 7 --export figures.json

Two ranks play two hosts of one machine, each with its own name, local directory and agent, and talk
over loopback.  After a step was saved and copied by a real job, each round measures in turn:

  copies    a committed step to the other host: ours, against a raw socket that sends the same bytes
            (into memory, and into a synced file), and NVRx's CliqueReplicationStrategy (both hosts at
            once, as are ours beside it)
  recovery  a restore in which rank 0's host was lost, so that its state comes from the other host,
            against both ranks reading their own disks, and against a raw read of the same files
  saves     training held by a save, and excess of the ten steps after it, with a copy and without

Ratios are taken within a round; the order turns around from round to round.  Run it on a machine that
does nothing else: two ranks and two agents want four cores.  Beyond the state itself a rank needs up to
five times its size in memory, and both together fourteen times on disk.

What cannot run is listed with its error and not tried again; the rest goes on.

Exit codes: 0 everything was measured, 1 some of it was not, 2 the arguments are wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from measuring import count, file_system, machine
from replication_copies import nvrx_copy, our_copy, raw_socket
from replication_hosts import HOSTS, Place, Saved, save_once, saved_bytes
from replication_recovery import raw_read, restore
from replication_report import TITLES, Failure, Figures, Report, as_markdown, as_text
from replication_saves import save_while_training
from tqdm import tqdm

from resiliency.log import LEVEL_ENV
from resiliency.testing.processes import MARKER_ENV, processes_marked
from resiliency.testing.rank_pool import RankOutcome, RankPool

#: A measurement that takes longer has failed.
_WAIT_S = 300.0
_QUICK_GIB, _DEFAULT_GIB = 0.004, 0.25
_DEFAULT_ROUNDS = 5
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 (captures belong into memory)

#: Part -> its measurements, by their names in the report.
PARTS = {
    "copies": ("raw_memory", "raw_file", "ours_one_way", "ours_both_ways", "nvrx_both_ways"),
    "recovery": ("raw_read", "own_disk", "from_peer"),
    "saves": ("replicas_off", "replicas_on"),
}
#: Runs in a rank process, with its number.
Measurement = Callable[[int], dict[str, float]]


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="replication.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--gib", type=_gib, metavar="GIB", help=f"state of each rank (default: {_DEFAULT_GIB})"
    )
    parser.add_argument(
        "--parts", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART",
        help=f"measure none but these of: {', '.join(PARTS)}",
    )  # fmt: skip
    parser.add_argument(
        "--rounds", type=count, metavar="N",
        help=f"medians of that many, after one that does not count (default: {_DEFAULT_ROUNDS})",
    )  # fmt: skip
    parser.add_argument(
        "--quick", action="store_true",
        help="4 MiB and one round: whether everything works; the times say nothing",
    )  # fmt: skip
    parser.add_argument("--directory", type=Path, help="on the disk to measure (default: a temporary one)")
    parser.add_argument("--export", type=Path, metavar="FILE.json", help="write every figure there")
    parser.add_argument("--markdown", type=Path, metavar="FILE.md", help="write a dated note there")
    return parser


def _gib(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0.001 <= float(text) < 1024:
            return float(text)
    raise argparse.ArgumentTypeError(f"must be a number of GiB from 0.001 on, found {text!r}")


def main() -> int:
    parser = build_parser()
    args = parser.parse_args()
    args.gib = args.gib or (_QUICK_GIB if args.quick else _DEFAULT_GIB)
    args.rounds = args.rounds or (1 if args.quick else _DEFAULT_ROUNDS)
    directory = args.directory or Path(tempfile.gettempdir())
    size_bytes = int(args.gib * 2**30)
    _check(parser, args, directory, size_bytes)
    facts = machine() | {"storage": file_system(directory)}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nothing is left behind then, either
    began = time.monotonic()
    with _place(directory, size_bytes) as place, RankPool() as pool:
        run = _Run(pool, place)
        run.all(args.parts, args.rounds, warm_up=not args.quick)
    report = Report(
        rounds=run.rounds,
        failures=run.failures,
        saved_bytes=run.saved_bytes,
        date=datetime.now(timezone.utc),
        command=_command(args),
        machine=facts,
        wall_s=time.monotonic() - began,
    )
    if args.export:
        args.export.write_text(json.dumps(report.to_json(), indent=2) + "\n")
    print(as_text(report))
    if args.markdown:
        args.markdown.write_text(as_markdown(report))
    return 1 if report.failures else 0


def _check(
    parser: argparse.ArgumentParser, args: argparse.Namespace, directory: Path, size_bytes: int
) -> None:
    """Refuse now what would cost the results minutes later."""
    for path in filter(None, (args.export, args.markdown)):
        if not path.resolve().parent.is_dir():
            parser.error(f"the directory of {path} does not exist")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--directory {directory}: {error.strerror}")
    kinds = {
        "memory": (5 * HOSTS * size_bytes, psutil.virtual_memory().available),
        "shared memory": (3 * HOSTS * size_bytes, shutil.disk_usage(_SHARED_MEMORY).free),
        "disk": (14 * size_bytes, shutil.disk_usage(directory).free),
    }
    for kind, (needed, free) in kinds.items():
        if needed > free:
            parser.error(
                f"{needed / 2**30:.1f} GiB of {kind} are needed, {free / 2**30:.1f} GiB are free: "
                f"choose a smaller --gib than {args.gib:g}"
            )


class _Run:
    """Measures round by round, in rank processes; a measurement that failed once is left out then."""

    def __init__(self, pool: RankPool, place: Place) -> None:
        self._pool = pool
        self._place = place
        self.rounds: list[dict[str, Figures]] = []
        self.failures: list[Failure] = []
        self.saved_bytes = 0

    def all(self, parts: Sequence[str], rounds: int, *, warm_up: bool) -> None:
        """Everything, the step to start from first; without that there is nothing to measure."""
        names = [name for part in parts for name in PARTS[part]]
        with tqdm(total=1 + len(names) * (rounds + warm_up), unit="part", file=sys.stderr) as bar:
            bar.set_description("save to start from")
            saved = self._try("the save to start from", 0, partial(save_once, place=self._place))
            bar.update()
            if saved is None:
                return
            self.saved_bytes = saved_bytes(self._place.saved(0))
            measurements = _measurements(self._place, tuple(saved))
            for number in range(0 if warm_up else 1, rounds + 1):
                found = {}
                for name in names if number % 2 else reversed(names):
                    bar.set_description(f"round {number}: {TITLES[name]}", refresh=True)
                    if name not in {failure.name for failure in self.failures}:
                        ranks = self._try(name, number, measurements[name])
                        if ranks is not None:
                            found[name] = _slowest(ranks)
                    bar.update()
                if number:
                    self.rounds.append(found)

    def _try(self, name: str, number: int, job: Callable[[int], Any]) -> list[Any] | None:
        """What each rank returned, or None if one did not."""
        report = self._pool.run(job, HOSTS, timeout=_WAIT_S, operation_timeout=_WAIT_S)
        if all(outcome is RankOutcome.OK for outcome in report.outcomes):
            return report.values
        ends = [f"rank {end.rank} {end.outcome.value}: {_last_line(end.error)}" for end in report.ranks]
        self.failures.append(Failure(name=name, round=number, error="; ".join(ends)))
        return None


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["without a word"])[-1]


def _slowest(ranks: Sequence[Figures]) -> Figures:
    return {figure: max(found[figure] for found in ranks) for figure in ranks[0]}


def _measurements(place: Place, saved: tuple[Saved, ...]) -> dict[str, Measurement]:
    return {
        "raw_memory": partial(raw_socket, place=place, written=False),
        "raw_file": partial(raw_socket, place=place, written=True),
        "ours_one_way": partial(our_copy, place=place, both=False),
        "ours_both_ways": partial(our_copy, place=place, both=True),
        "nvrx_both_ways": partial(nvrx_copy, place=place),
        "raw_read": partial(raw_read, place=place),
        "own_disk": partial(restore, place=place, saved=saved, lost=False),
        "from_peer": partial(restore, place=place, saved=saved, lost=True),
        "replicas_off": partial(save_while_training, place=place, batch=saved[0].batch, replicas=0),
        "replicas_on": partial(save_while_training, place=place, batch=saved[0].batch, replicas=1),
    }


@contextlib.contextmanager
def _place(directory: Path, size_bytes: int) -> Iterator[Place]:
    """Directories that are gone afterwards, and with them every agent that did not leave by itself."""
    mark = uuid.uuid4().hex
    os.environ.setdefault(LEVEL_ENV, "WARNING")  # of the agents, which share this terminal
    os.environ[MARKER_ENV] = ":".join(filter(None, (os.environ.get(MARKER_ENV), mark)))
    with (
        tempfile.TemporaryDirectory(prefix="replication-", dir=directory, ignore_cleanup_errors=True) as disk,
        tempfile.TemporaryDirectory(
            prefix="replication-", dir=_SHARED_MEMORY, ignore_cleanup_errors=True
        ) as memory,
    ):
        try:
            yield Place(
                disk=Path(disk), memory=Path(memory), job=f"replication-{mark[:8]}", size_bytes=size_bytes
            )
        finally:
            # Children of ours are multiprocessing's servers, which end with this process.
            left = [process for process in processes_marked(mark) if process.ppid() != os.getpid()]
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, timeout=10)


def _command(args: argparse.Namespace) -> str:
    """What repeats this measurement; where this one wrote its files is nobody's business."""
    words = [
        "python3 benchmark/replication.py --directory DISK",
        f"--gib {args.gib:g}",
        f"--rounds {args.rounds}",
    ]
    if args.quick:
        words.append("--quick")
    if args.parts != list(PARTS):
        words.append(f"--parts {' '.join(args.parts)}")
    return " ".join(words)


if __name__ == "__main__":
    sys.exit(main())
