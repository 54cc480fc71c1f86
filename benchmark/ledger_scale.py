# SPDX-License-Identifier: Apache-2.0
"""How long the goodput report of a large job takes, and how much memory.

    python3 benchmark/ledger_scale.py --megabytes 100 --ranks 1000

Writes the event log of a job that steps, saves, fails and restarts, as its ranks and launcher would have
written it.  Then the calculator reads it in a process of its own, whose time and largest memory are printed.

    python3 benchmark/ledger_scale.py --ranks 1000 --incidents 10 100 1000

measures logs with so many incidents and two steps between them, with the time that the report took after the
log was read, and the exponent with which both grow.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from measuring import count, machine

from resiliency.events import EventType, JsonValue, RunEvent
from resiliency.goodput_measure.jobs import JobEvents, Options
from resiliency.goodput_measure.reader import read_events
from resiliency.goodput_measure.report import job_text
from resiliency.runtime import no_garbage_collection

JOB = "scale"
_BEGIN = datetime(2026, 3, 1, tzinfo=timezone.utc)
_RANKS_PER_HOST = 8
_SAVE_EVERY = 20
#: What the report may take, at the size of the defaults.
BAR_S, BAR_MIB = 60.0, 500.0


@dataclass(frozen=True)
class Cost:
    """What one report took.  `wall_s` and `cpu_s` in seconds."""

    wall_s: float
    cpu_s: float
    memory_mib: float


def main() -> int:
    """Exit codes: 0 within the bars, 1 above one of them."""
    parser = argparse.ArgumentParser(
        prog="ledger_scale.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=count, default=100, metavar="MB", help="default: %(default)s")
    parser.add_argument("--ranks", type=count, default=1000, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--step-s", type=float, default=1.0, metavar="S", help="duration of a step (default: %(default)g)"
    )
    parser.add_argument(
        "--incidents", type=count, nargs="+", metavar="N", help="measure logs of so many, of any size"
    )
    parser.add_argument("--export", type=Path, metavar="FILE.json", help="write every figure there")
    args = parser.parse_args()
    facts = machine()
    if args.incidents:
        grown = [measure_incidents(number, args.ranks) for number in args.incidents]
        if args.export:
            of_all = {"machine": facts, "ranks": args.ranks, "incidents": [vars(one) for one in grown]}
            args.export.write_text(json.dumps(of_all, indent=2) + "\n")
        for what, costs in (
            ("reading", [one.read_s for one in grown]),
            ("report", [one.report_s for one in grown]),
        ):
            powers = (
                math.log(cost / before) / math.log(more.incidents / fewer.incidents)
                for before, cost, fewer, more in zip(costs, costs[1:], grown, grown[1:], strict=False)
            )
            print(f"{what} grows with incidents to the power of {', '.join(f'{one:.2f}' for one in powers)}")
        return int(max(one.report_s for one in grown) > BAR_S)
    with tempfile.TemporaryDirectory(prefix="ledger-scale-") as directory:
        log = Path(directory) / f"{JOB}-events.jsonl"
        lines = write_log(log, args.megabytes * 1_000_000, ranks=args.ranks, step_s=args.step_s)
        print(f"{lines} events of {args.ranks} ranks, {log.stat().st_size / 1e6:.0f} MB")
        plain = measure(log)
        print(as_text("report", plain))
        page = Path(directory) / "timeline.html"
        drawn = measure(log, "--timeline", str(page))
        print(as_text(f"report and page of {page.stat().st_size / 1e6:.1f} MB", drawn))
    if args.export:
        record: dict[str, Any] = {"machine": facts, "lines": lines, "megabytes": args.megabytes}
        record |= {"ranks": args.ranks, "report": vars(plain), "with_page": vars(drawn)}
        args.export.write_text(json.dumps(record, indent=2) + "\n")
    return int(max(plain.wall_s, drawn.wall_s) > BAR_S or max(plain.memory_mib, drawn.memory_mib) > BAR_MIB)


def as_text(what: str, cost: Cost) -> str:
    return (
        f"{what}: {cost.wall_s:.1f} s ({cost.cpu_s:.1f} s of a core; bar {BAR_S:g}), "
        f"{cost.memory_mib:.0f} MiB (bar {BAR_MIB:g})"
    )


def measure(log: Path, *flags: str) -> Cost:
    """Run the calculator on `log`, in a process of its own."""
    command = [sys.executable, "-m", "resiliency.goodput_measure.calculator", "--job-name", JOB]
    began = time.monotonic()
    process = subprocess.Popen(
        [*command, "--event-log", str(log), *flags], stdout=subprocess.DEVNULL, cwd=Path(__file__).parents[1]
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return Cost(time.monotonic() - began, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


@dataclass(frozen=True)
class Grown:
    """What a log with so many incidents took, in seconds of a core, and in memory."""

    incidents: int
    events: int
    read_s: float
    report_s: float
    memory_mib: float


def measure_incidents(incidents: int, ranks: int) -> Grown:
    """Read and report a log in this process, and print what that took."""
    with tempfile.TemporaryDirectory(prefix="ledger-scale-") as directory, no_garbage_collection():
        log = Path(directory) / f"{JOB}-events.jsonl"
        events = write_log(log, ranks=ranks, incidents=incidents)
        job = JobEvents(JOB)
        began = time.process_time()
        for event in read_events(log, progress=False):
            job.add_full(event)
        read = time.process_time()
        result = job.result(Options())
        job_text(result)
        done = time.process_time()
    if result.measured is None or len(result.measured.ledger.incidents) != incidents:
        raise RuntimeError(f"expected {incidents} incidents in the report.")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    grown = Grown(incidents, events, read - began, done - read, peak)
    print(
        f"{ranks} ranks, {incidents} incidents, {events} events: read in {grown.read_s:.1f} s, "
        f"reported in {grown.report_s:.1f} s, {peak:.0f} MiB",
        flush=True,
    )
    return grown


def write_log(
    path: Path,
    size_bytes: int | None = None,
    *,
    ranks: int,
    step_s: float = 1.0,
    incidents: int | None = None,
) -> int:
    """Write the events of a job until the file has `size_bytes`; returns their number.

    Args:
        incidents: how many the job has, with two steps between them; None means without an end.
    """
    written = lines = 0
    with path.open("w") as file:
        for event in _job(ranks, step_s, incidents):
            written += file.write(event.to_json() + "\n")
            lines += 1
            if size_bytes is not None and written >= size_bytes:
                break
    return lines


def _job(ranks: int, step_s: float, incidents: int | None) -> Iterator[RunEvent]:
    """Every 40 to 120 steps, or after two, a rank is killed, and all come back to the newest save."""
    numbers = random.Random(1)  # noqa: S311 (a history, no secret)
    step = saved = attempt = 0
    now = _BEGIN

    def event(
        type: EventType, rank: int | None = None, *, step: int | None = None, **fields: JsonValue
    ) -> RunEvent:
        node = (rank or 0) // _RANKS_PER_HOST
        return RunEvent(
            type=type, time=now + timedelta(microseconds=rank or 0), job_name=JOB, host=f"host-{node:04d}",
            node_rank=node, rank=rank, attempt=attempt, step=step, fields=fields,
        )  # fmt: skip

    def everyone(type: EventType, after_s: float, **given: Any) -> Iterator[RunEvent]:
        nonlocal now
        now += timedelta(seconds=after_s)
        return (event(type, rank, **given) for rank in range(ranks))

    def launcher(type: EventType, after_s: float, rank: int | None = None, **fields: Any) -> RunEvent:
        nonlocal now
        now += timedelta(seconds=after_s)
        return event(type, rank, **fields)

    yield launcher(EventType.JOB_STARTED, 0.0)
    while True:
        yield launcher(EventType.RENDEZVOUS_DONE, 1.0)
        yield from everyone(EventType.PROCESS_STARTED, 0.0)
        yield launcher(EventType.WORKERS_STARTED, 0.0)
        yield from everyone(EventType.IMPORTED, 3.0)
        yield from everyone(EventType.INITIALIZED, 2.0)
        yield from everyone(EventType.RESTORE_STARTED, 0.0)
        yield from everyone(EventType.CHECKPOINT_LOADED, 1.0, step=saved, tier="local")
        step = saved
        for _ in range(numbers.randrange(40, 120) if incidents is None else 2):
            step += 1
            busy_s = step_s * (0.98 + 0.01 * numbers.random())
            yield from everyone(EventType.STEP_FINISHED, step_s, step=step, duration_s=busy_s)
            if step % (_SAVE_EVERY if incidents is None else 2) == 0:
                yield from everyone(EventType.SAVE_STARTED, 0.002, step=step)
                yield from everyone(EventType.SAVE_RELEASED, 0.007, step=step)
                saved = step
                yield launcher(EventType.CHECKPOINT_SAVED, 0.001, rank=0, step=step)
        if incidents is not None and attempt == incidents:
            yield launcher(EventType.JOB_TERMINATED, 0.5)
            return
        failed = numbers.randrange(ranks)
        yield launcher(EventType.FAULT_INJECTED, 0.3 * step_s, rank=failed, fault="kill")
        yield launcher(EventType.FAULT_DETECTED, 0.2, rank=failed, cause="SIGKILL")
        yield launcher(EventType.WORKERS_STOPPED, 0.4)
        attempt += 1


if __name__ == "__main__":
    sys.exit(main())
