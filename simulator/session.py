# SPDX-License-Identifier: Apache-2.0
"""One run of the simulator on one node: print, or undo what is left, ask, wait for the job, play.

What a killed simulator left is undone before anything can refuse this run, or a question holds it up.
"""

from __future__ import annotations

import csv
import importlib
import logging
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TextIO

from resiliency import log
from resiliency.errors import ConfigError
from resiliency.events import EventStream, FileSink, events_path
from resiliency.runtime import RunInfo
from simulator.command_line import Options
from simulator.faults import COLUMNS, Kind, PlannedFault, seconds
from simulator.injectors import Injector, refusal_of
from simulator.injectors.gpu import Nvml, PowerCap, Xid
from simulator.injectors.host import FullDisk, MemoryPressure, NetworkCut
from simulator.injectors.processes import CpuQuota, Kill, Niceness, Stop
from simulator.job import Job, ParentJob
from simulator.journal import Journal, Recovered
from simulator.player import Player, recover
from simulator.schedule import schedule

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run(options: Options) -> int:
    """Run the simulator; returns 0, or 1 when a fault failed, or an effect of this or an earlier run stays.

    Raises:
        ConfigError: the flags cannot work on this host; nothing was injured.
        FaultMissed: the job was not there in time.
    """
    if options.undo_only:
        return _undo_only(options)
    faults = schedule(options.sources, options.shape)
    if options.dry_run:
        _print_schedule(faults, options, sys.stdout)
        return 0
    log.configure(RunInfo(job_name=options.job, host=RunInfo.from_env().host))
    logging.getLogger("simulator").setLevel(logging.getLogger("resiliency").level)
    job = _job(options)
    injectors = all_injectors(job, options)
    left = _undo_leftovers(injectors, options).kept
    own = _possible([fault for fault in faults if fault.node == options.node_rank], injectors, options)
    if not options.yes and sys.stdin is not None and sys.stdin.isatty() and not _agreed(own, options):
        return 1 if left else 0
    with ExitStack() as stack:
        stack.enter_context(_blocked_signals())
        journal = Journal(options.state_dir)
        stack.callback(journal.close)
        events = stack.enter_context(_event_stream(options))
        player = Player(own, job, injectors, journal, wait=_wait, events=events, grace=options.job_end_grace)
        logger.info("waiting for job %s; %d faults for this node", options.job, len(own))
        if not player.wait_for_job(options.start_timeout):
            return 1 if left else 0
        logger.info("job is there: the schedule begins")
        summary = player.play()
        logger.info("simulator ended: %s", summary)
        return 1 if summary.failed or summary.kept or left else 0


def _job(options: Options) -> Job:
    if options.parent is None:
        return Job(options.job, None if options.any_group_rank else options.node_rank)
    # The environment of a program's child is the program's.
    info = RunInfo.from_env()
    node_rank = None if options.any_group_rank else options.node_rank
    return ParentJob(options.job, node_rank, options.parent, rank=info.rank, local_rank=info.local_rank or 0)


def all_injectors(job: Job, options: Options) -> list[Injector]:
    """The user's, in the order of their flags, then those that come with the simulator.

    Raises:
        ConfigError: a class of the user cannot be loaded, is no injector, or has a name that is taken.
    """
    found = standard_injectors(job, options)
    taken = {each.name for each in found}
    own: list[Injector] = []
    for text in options.injectors:
        made = _made(text, job)
        if made.name in taken:
            raise ConfigError(
                f"--injector {text}: its name is {made.name!r}, which another injector has.",
                hint="Give it a name of its own: the journal tells by it which injector undoes an effect.",
            )
        taken.add(made.name)
        own.append(made)
    return own + found


def _made(text: str, job: Job) -> Injector:
    module, _, name = text.partition(":")
    try:
        made: Injector = getattr(importlib.import_module(module), name)(job)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"--injector {text}: cannot make it: {error}.",
            hint="Write MODULE:CLASS; the module is found on PYTHONPATH, and the class takes the job.",
        ) from error
    wanted = (*Injector.__annotations__, "refusal", "aim_fault", "inject", "end_effect")
    if lacking := [each for each in wanted if not hasattr(made, each)]:
        raise ConfigError(
            f"--injector {text}: it is no injector, it has no {', '.join(lacking)}.",
            hint="See simulator.injectors.Injector.",
        )
    return made


def standard_injectors(job: Job, options: Options) -> list[Injector]:
    """Those that come with the simulator; the first one that works on a host wins."""
    gpus = Nvml()
    return [
        Kill(job, gpus),
        Stop(job, gpus),
        PowerCap(job, gpus),
        CpuQuota(job),
        Niceness(job),
        Xid(job, gpus, options.kernel_log),
        MemoryPressure(),
        FullDisk(options.disk_dir, [options.state_dir, *([options.run_dir] if options.run_dir else [])]),
        NetworkCut(job),
    ]


def _undo_only(options: Options) -> int:
    log.configure(RunInfo(job_name=options.job or "simulator", host=RunInfo.from_env().host))
    logging.getLogger("simulator").setLevel(logging.getLogger("resiliency").level)
    found = _undo_leftovers(all_injectors(Job(options.job or "none", None), options), options)
    left = len(_journals(options))
    print(f"{found.undone} effects undone; {left} journals of living simulators, or not undone, are left")
    return 1 if found.kept else 0


def _undo_leftovers(injectors: Sequence[Injector], options: Options) -> Recovered:
    """Undo what killed simulators left; without any, nothing is created."""
    if not _journals(options):
        return Recovered()
    with _blocked_signals(), closing(Journal(options.state_dir)) as journal:
        return recover(journal, injectors)


def _journals(options: Options) -> list[Path]:
    return list(options.state_dir.glob("*.journal"))


def _possible(
    faults: Sequence[PlannedFault], injectors: Sequence[Injector], options: Options
) -> list[PlannedFault]:
    """The faults that an injector of this host can carry out.

    Raises:
        ConfigError: one cannot, and --skip_impossible is not given.
    """
    refused = refusals({fault.kind for fault in faults}, injectors)
    if refused and not options.skip_impossible:
        raise ConfigError(
            "this host cannot do " + " ".join(f"{kind.value}: {reason}" for kind, reason in refused.items()),
            hint="Leave these kinds out (--kinds), or skip them with --skip_impossible.",
        )
    log_left_out(refused)
    return [fault for fault in faults if fault.kind not in refused]


def refusals(kinds: Iterable[Kind], injectors: Sequence[Injector]) -> dict[Kind, str]:
    """The kinds that no injector can carry out on this host, with the reasons as sentences."""
    refused: dict[Kind, str] = {}
    for kind in sorted(kinds, key=lambda kind: kind.value):
        reasons = [refusal_of(each) for each in injectors if kind in each.kinds]
        if all(reasons):
            refused[kind] = " ".join(reasons)
    return refused


def log_left_out(refused: Mapping[Kind, str]) -> None:
    """Name the kinds of a schedule that are left out."""
    for kind, reason in refused.items():
        logger.warning("all faults of kind %s are left out: %s", kind.value, reason)


def _print_schedule(faults: Iterable[PlannedFault], options: Options, out: TextIO) -> None:
    """As CSV that --trace reads; the same bytes on every node."""
    shape = options.shape
    listed = list(faults)
    out.write(
        f"# {len(listed)} faults in {seconds(shape.length_us)} s for {shape.nnodes} nodes with"
        f" {shape.gpus_per_node} GPUs each, seed {options.seed}\n"
    )
    for line in options.notes:
        out.write(f"# {line}\n")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(fault.row for fault in listed)


def _agreed(faults: Sequence[PlannedFault], options: Options) -> bool:
    kinds: dict[str, int] = {}
    for fault in faults:
        kinds[fault.kind.value] = kinds.get(fault.kind.value, 0) + 1
    what = ", ".join(f"{number} x {kind}" for kind, number in sorted(kinds.items())) or "no fault"
    print(f"This will injure job {options.job} on this node (rank {options.node_rank}): {what}.")
    for fault in faults[:5]:
        print(f"  {fault.text}")
    if len(faults) > 5:
        print(f"  and {len(faults) - 5} more; --dry_run prints all.")
    try:
        return input("Go on? [y/N] ").strip().lower() in ("y", "yes")
    except (EOFError, KeyboardInterrupt):
        return False


def _wait(timeout_s: float) -> bool:
    return signal.sigtimedwait(_SIGNALS, timeout_s) is not None


@contextmanager
def _blocked_signals() -> Iterator[None]:
    """They wait for `_wait` to take them: no handler runs between an effect and its journal."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _event_stream(options: Options) -> Iterator[EventStream | None]:
    if options.run_dir is None:
        yield None
        return
    info = RunInfo(
        job_name=options.job,
        host=RunInfo.from_env().host,
        node_rank=options.node_rank,
        run_dir=str(options.run_dir),
    )
    try:
        sink = FileSink(events_path(info))
    except OSError as error:
        raise ConfigError(f"--run_dir {options.run_dir} cannot be written: {error.strerror}.") from error
    with EventStream(info, [sink]) as stream:
        yield stream
