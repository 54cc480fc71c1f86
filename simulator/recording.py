# SPDX-License-Identifier: Apache-2.0
"""``simulator_entrypoint.py trace``: failures of a job, from its event log, as CSV that ``--trace`` plays.

An interruption of the job is one failure, as in the ledger of goodput: however many ranks fell with the first
one, and at the time of the last step before it where no event knows better.  A fault that was injected has
its true time, kind and length, and the interruption that followed is not another one.
"""

from __future__ import annotations

import argparse
import csv
import sys
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from resiliency.errors import ConfigError
from resiliency.events import EventType, JsonValue, RunEvent
from resiliency.goodput_measure.incidents import Incident
from resiliency.goodput_measure.ledger import LedgerBuilder
from resiliency.goodput_measure.lives import to_us
from resiliency.goodput_measure.reader import ReadStats, read_events
from simulator.command_line import PROGRAM, Parser, underscored
from simulator.faults import COLUMNS, RULES, Kind, kind_named, seconds

DESCRIPTION = """\
Write the failures that a job had as CSV, so that the simulator makes them happen to another job:

  simulator_entrypoint.py trace runs/demo/demo-events.jsonl --output demo.csv
  simulator_entrypoint.py --job test --gpus_per_node 8 --nnodes 2 --trace demo.csv --speed 60 --dry_run

One row for each interruption, or fault that was injected: seconds since the first worker started, kind, node,
GPU, cause.  Lines of a log that are damaged are named and left out.  See docs/simulator.md."""

#: What a launcher's diagnosis (field `cause` of `diagnosed`) is played as; other ones end a rank: kill.
_BY_DIAGNOSIS = {
    "hang": Kind.STOP,
    "host_lost": Kind.HOST_KILL,
    "preempted": Kind.HOST_KILL,
    "gpu_fault": Kind.XID_CRASH,
    "gpu_missing": Kind.XID_CRASH,
    "disk_full": Kind.DISK_FULL,
}
_UNDIAGNOSED = ("unknown", "peer_lost")
#: Faults of `resiliency.testing`, which write their text alone; others of them end the rank.
_BY_TEST_FAULT = {"rank_hung": Kind.STOP}
#: The types of a goodput log, which has no failures.
_GOODPUT = frozenset(
    {
        *(EventType.USER_SCHEDULED, EventType.JOB_STARTED, EventType.CHECKPOINT_LOADED),
        *(EventType.CHECKPOINT_SAVED, EventType.USER_TERMINATED, EventType.JOB_TERMINATED),
    }
)
_STARTS = (EventType.WORKERS_STARTED, EventType.PROCESS_STARTED)


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """One failure, in the fields of a trace; None: the log does not say.  `at_us`: since the epoch."""

    at_us: int
    kind: Kind
    node: int | None = None
    gpu: int | None = None
    duration_s: float | None = None
    value: int | None = None
    cause: str = ""


@dataclass
class _Log:
    """What is kept of the events of one job while they are read."""

    builder: LedgerBuilder = field(default_factory=LedgerBuilder)
    injected: list[RunEvent] = field(default_factory=list)
    reported: list[RunEvent] = field(default_factory=list)
    is_full: bool = False
    begin_us: int | None = None
    nodes: dict[str, int] = field(default_factory=dict)
    ranks: defaultdict[int, set[int]] = field(default_factory=lambda: defaultdict(set))

    def add_event(self, event: RunEvent) -> None:
        self.builder.add_event(event)
        self.is_full = self.is_full or event.type not in _GOODPUT
        if event.type in _STARTS:
            self.begin_us = min(to_us(event.time), self.begin_us or to_us(event.time))
        ranks = [] if event.rank is None else [event.rank]
        if event.type is EventType.WORKERS_STARTED:
            ranks = _whole_numbers(event.fields.get("ranks"))
        if ranks:
            self.ranks[event.node_rank].update(ranks)
            self.nodes[event.host] = event.node_rank
        if event.type is EventType.FAULT_INJECTED:
            self.injected.append(event)
        elif event.type in (EventType.FAULT_DETECTED, EventType.DIAGNOSED, EventType.HANG_DETECTED):
            self.reported.append(event)


@dataclass(frozen=True, kw_only=True)
class Recording:
    """The failures of a job in order.

    Attributes:
        begin_us, end_us: of the job: its first worker, its last event; microseconds since the epoch.
        nnodes, gpus_per_node: of the job; None where no event tells.
    """

    job: str
    begin_us: int
    end_us: int
    nnodes: int | None
    gpus_per_node: int | None
    failures: tuple[Recorded, ...]


def record(
    paths: Sequence[Path], job: str = "", *, default_kind: Kind = Kind.KILL, gpus_per_node: int | None = None
) -> Recording:
    """Read the full event logs of one job, of one or several hosts.

    Args:
        job: its name; "" where the logs are of one job.
        default_kind: of failures of which the log does not tell the kind.
        gpus_per_node: None: as many as a node has ranks in the log.
    Raises:
        ConfigError: a log cannot be read, most of it is damaged, it has no event of the job, or it is a
            goodput log, which has no failures; the message names file and line.
    """
    log, jobs = _Log(), dict[str, int]()
    for path in paths:
        stats = ReadStats()
        for event in read_events(path, job_name=job or None, stats=stats):
            log.add_event(event)
        _check(path, stats)
        for name, count in stats.jobs.items():
            jobs[name] = jobs.get(name, 0) + count
    names = ", ".join(map(str, paths))
    found = ", ".join(f"{name} ({count} events)" for name, count in jobs.items()) or "none"
    if not job and len(jobs) > 1:
        raise ConfigError(f"{names}: there are several jobs: {found}.", hint="Choose one with --job.")
    if (job and job not in jobs) or not jobs:
        raise ConfigError(f"{names}: there is no event of {f'job {job}' if job else 'a job'}; jobs: {found}.")
    if not log.is_full:
        raise ConfigError(
            f"{names}: this is a goodput log, which has no failures.",
            hint="Name the full event log, NAME-events.jsonl in the job's --run-dir.",
        )
    return _recording(log, default_kind, gpus_per_node)


def _check(path: Path, stats: ReadStats) -> None:
    """Damage is reported with file and line; a log that is mostly damage is no log.

    Raises:
        ConfigError: it is.
    """
    if not stats.unparsable:
        return
    what = f"{stats.unparsable} of {stats.lines} lines are no whole event, the first {stats.examples[0]}"
    if stats.is_mostly_damaged:
        raise ConfigError(f"{what}.", hint="Is this the event log of a job?", path=str(path))
    print(f"{PROGRAM} trace: warning: {what}; they are left out.", file=sys.stderr)


def _recording(log: _Log, default_kind: Kind, gpus_per_node: int | None) -> Recording:
    ledger = log.builder.build()
    gpus = gpus_per_node or max(map(len, log.ranks.values()), default=None)
    failures = [_injected(event, gpus) for event in log.injected]
    ends = [incident.started or _NEVER for incident in ledger.incidents]
    reported: defaultdict[int, list[RunEvent]] = defaultdict(list)
    for event in sorted(log.reported, key=lambda event: event.time):
        reported[bisect_left(ends, to_us(event.time))].append(event)
    for incident in ledger.incidents:
        events = reported[incident.index]
        # Workers are stopped, too, because hosts join or the job ends.
        is_failure = any(event.type is not EventType.HANG_DETECTED for event in events)
        if is_failure and not incident.fault_known:
            failures.append(_interruption(incident, events, log.nodes, default_kind, gpus))
    failures.sort(key=lambda failure: failure.at_us)
    highest = max((rank for ranks in log.ranks.values() for rank in ranks), default=None)
    return Recording(
        job=log.builder.job_name,
        begin_us=log.begin_us or ledger.start,
        end_us=max([ledger.end, *(failure.at_us for failure in failures)]),
        nnodes=None if highest is None or gpus is None else highest // gpus + 1,
        gpus_per_node=gpus,
        failures=tuple(failures),
    )


#: Later than every event: an interruption that ended with the job takes in all that follows.
_NEVER = 1 << 62


def _injected(event: RunEvent, gpus: int | None) -> Recorded:
    fields = event.fields
    text = str(fields.get("fault", ""))
    try:
        kind = Kind(str(fields.get("kind", "")))
    except ValueError:
        kind = _BY_TEST_FAULT.get(text.partition(",")[0], Kind.KILL)
    duration, value = fields.get("duration_s"), fields.get("value")
    node, gpu = (event.node_rank, None) if event.rank is None or gpus is None else divmod(event.rank, gpus)
    rule = RULES[kind]
    return Recorded(
        at_us=to_us(event.time),
        kind=kind,
        node=node,
        gpu=gpu if rule.on_gpu else None,
        duration_s=duration if rule.lasts and isinstance(duration, (int, float)) and duration > 0 else None,
        value=value if rule.unit and isinstance(value, int) else None,
        cause=str(fields.get("cause", "") or text),
    )


def _interruption(
    incident: Incident, events: Sequence[RunEvent], nodes: Mapping[str, int], default: Kind, gpus: int | None
) -> Recorded:
    diagnosed = next((event for event in events if event.type is EventType.DIAGNOSED), None)
    hung = next(
        (
            event
            for event in events
            # A hang that ended by itself was followed by a step.
            if event.type is EventType.HANG_DETECTED
            and incident.fault < to_us(event.time) <= incident.detected
        ),
        None,
    )
    died = next((e for e in events if e.type is EventType.FAULT_DETECTED and "exit_code" in e.fields), None)
    cause = "" if diagnosed is None else str(diagnosed.fields.get("cause", ""))
    kind = _BY_DIAGNOSIS.get(cause)
    if kind is None and hung is not None and cause in ("", *_UNDIAGNOSED):
        kind = Kind.STOP
    if kind is None:
        known = died is not None or cause not in ("", *_UNDIAGNOSED)
        kind = Kind.KILL if known else default
    by = [event for event in (diagnosed, hung) if event is not None]
    ranks = [*(rank for event in by for rank in _whole_numbers(event.fields.get("ranks")))]
    ranks += [died.rank] if died is not None and died.rank is not None else list(incident.ranks)
    node, gpu = divmod(ranks[0], gpus) if ranks and gpus else (None, None)
    if node is None and diagnosed is not None:
        hosts = diagnosed.fields.get("hosts")
        named = hosts if isinstance(hosts, list) else []
        node = next((nodes[host] for host in named if isinstance(host, str) and host in nodes), None)
    return Recorded(
        at_us=incident.fault,
        kind=kind,
        node=node,
        gpu=gpu if RULES[kind].on_gpu else None,
        cause=cause or incident.cause,
    )


def _whole_numbers(value: JsonValue) -> list[int]:
    return [one for one in value if isinstance(one, int)] if isinstance(value, list) else []


def write_trace(recording: Recording, out: TextIO) -> None:
    """As CSV that ``--trace`` reads: the columns of a schedule, "" for what the log does not say."""
    length_us = recording.end_us - recording.begin_us
    size = [("--nnodes", recording.nnodes), ("--gpus_per_node", recording.gpus_per_node)]
    flags = [f"{flag} {number}" for flag, number in size if number is not None]
    flags += [f"--duration_s {length_us // 1_000_000 + 1}"]  # the last one is before the end
    out.write(f"# {len(recording.failures)} failures of job {_one_line(recording.job)}\n")
    out.write(f"# of a job with {' '.join(flags)}\n")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for failure in recording.failures:
        cells: Iterable[object] = (
            failure.node,
            failure.gpu,
            None if failure.duration_s is None else f"{failure.duration_s:.6f}",
            failure.value,
            _one_line(failure.cause),
        )
        at = seconds(max(failure.at_us - recording.begin_us, 0))
        writer.writerow([at, failure.kind.value, *("" if cell is None else cell for cell in cells)])


def _one_line(text: str) -> str:
    return " ".join(text.split())


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog=f"{PROGRAM} trace",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "log",
        type=Path,
        nargs="+",
        metavar="LOG",
        help="the job's full event log; of several hosts, each one's",
    )
    parser.add_argument("--job", default="", metavar="NAME", help="where a log has events of several jobs")
    parser.add_argument("--output", type=Path, metavar="FILE.csv", help="where the rows go (standard output)")
    parser.add_argument(
        "--default_kind",
        default=Kind.KILL.value,
        metavar="KIND",
        help="of failures of which the log does not tell the kind (kill)",
    )
    parser.add_argument(
        "--gpus_per_node", type=int, metavar="N", help="of that job (as many as a node has ranks in the log)"
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command; returns 0.

    Raises:
        ConfigError: a flag or a log cannot work, or the file cannot be written.
    """
    args = build_parser().parse_args([underscored(word) for word in argv])
    if args.gpus_per_node is not None and args.gpus_per_node < 1:
        raise ConfigError(f"--gpus_per_node must be 1 or more, found {args.gpus_per_node}.")
    found = record(
        args.log, args.job, default_kind=kind_named(args.default_kind), gpus_per_node=args.gpus_per_node
    )
    with ExitStack() as stack:
        out = sys.stdout
        try:
            if args.output is not None:
                out = stack.enter_context(args.output.open("w", newline="", encoding="utf-8"))
            write_trace(found, out)
        except OSError as error:
            raise ConfigError(f"--output {args.output} cannot be written: {error.strerror}.") from error
    if not found.failures:
        print(f"{PROGRAM} trace: job {found.job} had no failure", file=sys.stderr)
    return 0
