# SPDX-License-Identifier: Apache-2.0
"""The command line of the simulator, checked before anything is done."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from typing import NoReturn

from resiliency.errors import ConfigError
from resiliency.runtime import JOB_ENV, RUN_DIR_ENV
from simulator.faults import RULES, Kind, kind_named, microseconds
from simulator.journal import default_directory
from simulator.published import Published, publication, publications
from simulator.schedule import Poisson, Rows, Shape, Share, Source, read_trace, rows_of_flag

PROGRAM = "simulator_entrypoint.py"
DESCRIPTION = """\
Injure a training job on purpose, by a schedule that every node computes alike from the seed.

Start it once on every node of the job, with the same flags and the node's own --node_rank:

  simulator_entrypoint.py --job demo --gpus_per_node 2 --enable_gpu_failure --fault_interval 60 --dry_run
  simulator_entrypoint.py --job demo --gpus_per_node 2 --enable_gpu_failure --fault_interval 60

The first prints the schedule and does nothing; the second waits for the job's workers and plays it.  Only
processes of this job and this user are touched; what can be undone is undone at the end, and after a SIGKILL
at the next start.  The failures of a real job, from its event log: simulator_entrypoint.py trace --help.
See docs/simulator.md."""
EPILOG = """\
kinds of faults:
  kill         SIGKILL to the process on a GPU; without GPUs, to the worker of that local rank
  stop         SIGSTOP, and SIGCONT after a while: a hang
  slow         a CPU quota for a while, in percent of one CPU; else niceness 19
  power_cap    a power cap for a GPU for a while, in watts; without GPUs: as slow
  xid          a line "NVRM: Xid (PCI:...): CODE, reason" in the kernel log
  xid_crash    the line, and the process on the GPU is killed
  host_kill    SIGKILL to all processes of the job on a node, with its launcher if it is the job's by name
  memory       a process that holds a percentage of the available memory for a while
  disk_full    no room on the file system of --disk_dir for a while, but for VALUE MiB
  network_cut  nothing leaves the job's network namespace for a while (root; a namespace of the job's own)

exit codes: 0 done or declined; 1 a fault or its end failed, or no job came; 2 refused, nothing injured"""


class Parser(argparse.ArgumentParser):
    """One whose errors are ours."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}.", hint="See --help.")


@dataclass(frozen=True, kw_only=True)
class Options:
    """A command line that can work.

    Attributes:
        parent: number of the process that is injured instead of the job's workers: the one that started this.
        sources: of the schedule.
        injectors: classes of the user as ``MODULE:CLASS``, before those that come with the simulator.
        notes: lines about them, for readers of a printed schedule.
        run_dir: of the job's event log; None writes no events.
    """

    job: str
    node_rank: int
    any_group_rank: bool
    parent: int | None
    shape: Shape
    seed: int
    sources: tuple[Source, ...]
    injectors: tuple[str, ...]
    notes: tuple[str, ...]
    dry_run: bool
    undo_only: bool
    yes: bool
    skip_impossible: bool
    state_dir: Path
    disk_dir: Path | None
    kernel_log: str
    run_dir: Path | None
    start_timeout: timedelta
    job_end_grace: timedelta


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog=PROGRAM,
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _job_flags(parser.add_argument_group("the job, and this node of it"))
    _what_flags(parser.add_argument_group("what fails"))
    _when_flags(parser.add_argument_group("when"))
    _how_flags(parser.add_argument_group("how"))
    return parser


def _job_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--job",
        default="",
        metavar="NAME",
        help=f"its JOB_IDENTIFIER, or TORCHELASTIC_RUN_ID under torchrun (--rdzv-id); default: {JOB_ENV}",
    )
    group.add_argument(
        "--node_rank", type=int, metavar="N", help="GROUP_RANK of this node's workers (NODE_RANK, else 0)"
    )
    group.add_argument(
        "--any_group_rank",
        action="store_true",
        help="all workers of the job on this machine are this node's: where the rendezvous chooses ranks",
    )
    group.add_argument(
        "--parent",
        type=int,
        metavar="PID",
        help="injure the process that starts this simulator, whose number this is, and no other: for a"
        " program that injures itself; only host_kill and network_cut strike its job, by the name of --job",
    )
    group.add_argument("--nnodes", type=int, default=1, metavar="N", help="nodes of the job (1)")
    group.add_argument("--gpus_per_node", type=int, default=8, metavar="N", help="GPUs or workers a node (8)")


def _what_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--enable_gpu_failure", action="store_true", help="the same as --kinds kill")
    group.add_argument("--enable_gpu_slowdown", action="store_true", help="the same as --kinds power_cap")
    group.add_argument("--enable_xid_failure", action="store_true", help="the same as --kinds xid")
    group.add_argument(
        "--xid_crash", action="store_true", help="with --enable_xid_failure: xid_crash instead"
    )
    group.add_argument(
        "--kinds",
        action="append",
        default=[],
        metavar="KIND[=WEIGHT],...",
        help="kinds to draw from, see below; a kind with weight 3 is drawn three times as often (1)",
    )
    group.add_argument(
        "--profile",
        choices=list(publications()),
        help="draw causes as often as a publication found them; sources are in simulator/published.json",
    )
    group.add_argument(
        "--gpu_slowdown_duration_s", default="30", metavar="S", help="how long power_cap and slow last (30)"
    )
    group.add_argument(
        "--fault_duration_s", default="30", metavar="S", help="how long other kinds that end last (30)"
    )


def _when_flags(group: argparse._ArgumentGroup) -> None:
    mean = group.add_mutually_exclusive_group()
    mean.add_argument(
        "--fault_interval", metavar="S", help="mean seconds between faults of the whole job (10); Poisson"
    )
    mean.add_argument("--mtbf_gpu_s", metavar="S", help="instead: mean seconds between faults of one GPU")
    mean.add_argument("--mtbf_host_s", metavar="S", help="instead: mean seconds between faults of one node")
    group.add_argument(
        "--at",
        action="append",
        default=[],
        metavar="SECONDS,KIND[,KEY=VALUE...]",
        help="a fault at a fixed time; keys node, gpu (default: drawn), duration, value, cause; repeatable",
    )
    group.add_argument(
        "--trace",
        type=Path,
        metavar="FILE.csv",
        help="faults recorded from a real job; columns time_s, kind and, if wanted, node, gpu, duration_s,"
        " value, cause; --dry_run prints this form",
    )
    group.add_argument(
        "--speed",
        default="1",
        metavar="X",
        help="times of --trace and rates of --profile, X times as fast (1)",
    )
    group.add_argument(
        "--as_gpus", type=int, metavar="N", help="with --profile: fail as often as a job of N GPUs"
    )
    group.add_argument("--seed", type=int, default=42, metavar="N", help="of all draws (42)")
    group.add_argument("--duration_s", default="3600", metavar="S", help="length of the schedule (3600)")
    group.add_argument(
        "--start_timeout_s", default="600", metavar="S", help="how long to wait for the job to start (600)"
    )
    group.add_argument(
        "--job_end_grace_s",
        default="15",
        metavar="S",
        help="end when the job had no process for so long (15)",
    )


def _how_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--injector",
        action="append",
        default=[],
        metavar="MODULE:CLASS",
        help="carry out kinds by a class of your own, made with the job (a simulator.job.Job), where it can;"
        " repeatable, the first one that works on this host wins; see docs/simulator.md",
    )
    group.add_argument("--dry_run", action="store_true", help="print the schedule of all nodes, do nothing")
    group.add_argument("--yes", action="store_true", help="do not ask on a terminal")
    group.add_argument("--undo_only", action="store_true", help="undo what a killed simulator left, then end")
    group.add_argument(
        "--skip_impossible", action="store_true", help="leave out kinds that this host cannot do"
    )
    group.add_argument(
        "--disk_dir", type=Path, metavar="DIR", help="for disk_full: on a file system of the job's own"
    )
    group.add_argument(
        "--kernel_log", default="/dev/kmsg", metavar="FILE", help="for xid: where the line goes (/dev/kmsg)"
    )
    group.add_argument(
        "--run_dir", metavar="DIR", help=f"the job's, for events that goodput reads; default: {RUN_DIR_ENV}"
    )
    group.add_argument(
        "--state_dir",
        type=Path,
        metavar="DIR",
        help="for the journal of effects (/var/tmp/..., on this host)",
    )


def parse(argv: Sequence[str], env: Mapping[str, str]) -> Options:
    """Read flags; dashes and underscores in their names mean the same.

    Raises:
        ConfigError: a flag is unknown or cannot work.
    """
    args = build_parser().parse_args([underscored(word) for word in argv])
    shape = Shape(
        nnodes=args.nnodes,
        gpus_per_node=args.gpus_per_node,
        length_us=microseconds(args.duration_s, "--duration_s"),
    )
    node_rank = args.node_rank if args.node_rank is not None else _node_rank(env)
    if not 0 <= node_rank < shape.nnodes:
        raise ConfigError(
            f"--node_rank must be 0 to {shape.nnodes - 1}, found {node_rank}.", hint="See --nnodes."
        )
    job = args.job or env.get(JOB_ENV, "")
    if not job and not (args.dry_run or args.undo_only):
        raise ConfigError(
            "--job is missing: without a name every process of this machine could be meant.",
            hint=f"Start the job with {JOB_ENV}=NAME in its environment, and give the same name here.",
        )
    run_dir = args.run_dir or env.get(RUN_DIR_ENV)
    sources, notes = ((), ()) if args.undo_only else _sources(args, shape)
    return Options(
        job=job,
        node_rank=node_rank,
        any_group_rank=args.any_group_rank,
        parent=args.parent,
        shape=shape,
        seed=args.seed,
        sources=sources,
        injectors=tuple(args.injector),
        notes=notes,
        dry_run=args.dry_run,
        undo_only=args.undo_only,
        yes=args.yes,
        skip_impossible=args.skip_impossible,
        state_dir=args.state_dir or default_directory(),
        disk_dir=args.disk_dir,
        kernel_log=args.kernel_log,
        run_dir=Path(run_dir) if run_dir else None,
        start_timeout=_duration(args.start_timeout_s, "--start_timeout_s"),
        job_end_grace=_duration(args.job_end_grace_s, "--job_end_grace_s"),
    )


def _sources(args: argparse.Namespace, shape: Shape) -> tuple[tuple[Source, ...], tuple[str, ...]]:
    slow_us = microseconds(args.gpu_slowdown_duration_s, "--gpu_slowdown_duration_s")
    other_us = microseconds(args.fault_duration_s, "--fault_duration_s")
    if not slow_us or not other_us:
        raise ConfigError("--gpu_slowdown_duration_s and --fault_duration_s must be above 0.")
    lasts = {kind: slow_us if kind in (Kind.SLOW, Kind.POWER_CAP) else other_us for kind in Kind}
    speed = _speed(args.speed)
    sources: list[Source] = []
    notes: list[str] = []
    shares = _shares(args)
    if shares and args.profile:
        raise ConfigError(
            "--profile and --kinds (or an --enable flag) exclude each other.", hint="Choose one."
        )
    given = _mean_us(args, shape)
    if shares:
        # Ten seconds between faults is the default that users were promised.
        mean = Fraction(10_000_000) if given is None else given
        sources.append(Poisson(mean_us=mean, shares=shares, seed=args.seed, lasts_us=lasts))
    elif args.profile:
        found = publication(args.profile)
        notes += [f"{found.name}: {found.what}", f"source: {found.source}"]
        mean = _profile_mean_us(found, shape, args.as_gpus, speed) if given is None else given
        sources.append(Poisson(mean_us=mean, shares=found.shares, seed=args.seed, lasts_us=lasts))
    elif given is not None:
        raise ConfigError(
            "a mean time between faults needs kinds to draw from.", hint="Add --kinds or --profile."
        )
    if args.as_gpus is not None and (not args.profile or given is not None or args.as_gpus < 1):
        raise ConfigError("--as_gpus is 1 or more, and needs --profile without a mean time of your own.")
    fixed = rows_of_flag(args.at)
    if fixed:
        sources.append(Rows(rows=fixed, seed=args.seed, lasts_us=lasts))
    if args.trace:
        sources.append(Rows(rows=read_trace(args.trace), seed=args.seed, lasts_us=lasts, speed=speed))
    if not sources:
        raise ConfigError(
            "nothing is to fail.",
            hint="Add --enable_gpu_failure, --enable_gpu_slowdown, --enable_xid_failure, --kinds, --profile,"
            " --at or --trace.",
        )
    return tuple(sources), tuple(notes)


def _shares(args: argparse.Namespace) -> list[Share]:
    wanted = ",".join(args.kinds)
    if args.xid_crash and not args.enable_xid_failure:
        raise ConfigError("--xid_crash needs --enable_xid_failure.", hint="Or use --kinds xid_crash.")
    weights: dict[Kind, int] = {}
    for enabled, kind in (
        (args.enable_gpu_failure, Kind.KILL),
        (args.enable_gpu_slowdown, Kind.POWER_CAP),
        (args.enable_xid_failure, Kind.XID_CRASH if args.xid_crash else Kind.XID),
    ):
        if enabled:
            weights[kind] = 1
    for word in filter(None, (part.strip() for part in wanted.split(","))):
        name, separator, weight = word.partition("=")
        if separator and not (weight.isascii() and weight.isdigit() and 0 < int(weight) <= 1_000_000):
            raise ConfigError(f"--kinds {word}: a weight is a whole number from 1 to 1000000.")
        weights[kind_named(name)] = int(weight) if separator else 1
    # In the order of the kinds, not of the flags, which may differ between nodes.
    return [Share(kind, weights[kind]) for kind in RULES if kind in weights]


def _mean_us(args: argparse.Namespace, shape: Shape) -> Fraction | None:
    for name, parts in (("fault_interval", 1), ("mtbf_gpu_s", shape.gpus), ("mtbf_host_s", shape.nnodes)):
        text = getattr(args, name)
        if text is not None:
            whole = microseconds(text, f"--{name}")
            if not whole:
                raise ConfigError(f"--{name} must be above 0.")
            return Fraction(whole, parts)
    return None


def _profile_mean_us(found: Published, shape: Shape, as_gpus: int | None, speed: Fraction) -> Fraction:
    return found.gpu_mean_us / (as_gpus or shape.gpus) / speed


def _speed(text: str) -> Fraction:
    try:
        speed = Fraction(text)
    except (ValueError, ZeroDivisionError):
        speed = Fraction(0)
    if speed <= 0:
        raise ConfigError(f"--speed must be a number above 0, found {text!r}.")
    return speed


def _duration(text: str, flag: str) -> timedelta:
    try:
        return timedelta(microseconds=microseconds(text, flag))
    except OverflowError:
        raise ConfigError(f"{flag} is too long: {text}.") from None


def _node_rank(env: Mapping[str, str]) -> int:
    text = env.get("NODE_RANK") or "0"
    if text.isascii() and text.isdigit():
        return int(text)
    raise ConfigError(f"environment variable NODE_RANK must be a whole number, found {text!r}.")


def underscored(word: str) -> str:
    """A flag with the underscores of its definition; other words as they are."""
    if not word.startswith("--"):
        return word
    name, separator, value = word.partition("=")
    return "--" + name[2:].replace("-", "_") + separator + value
