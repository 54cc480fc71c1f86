# SPDX-License-Identifier: Apache-2.0
"""Command line: the published goodput of a job, and with its full event log the ledger.

    python3 -m resiliency.goodput_measure.calculator --job-name J --log-file J-goodput.log \
        --reference-step-time 8

Exit codes: 0 calculated, 1 the logs hold no event of this job, 2 a flag or a source that cannot work,
3 calculated from the lesser part of a log whose other lines could not be parsed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path

from resiliency.errors import ConfigError, ResiliencyError
from resiliency.events import JsonValue, RunEvent
from resiliency.goodput_measure.jobs import Fleet, JobEvents, JobResult, Options
from resiliency.goodput_measure.live.figures import figures_of_result
from resiliency.goodput_measure.live.follow import follow, running_jobs
from resiliency.goodput_measure.live.prometheus import MetricsServer, as_metrics, serving, write_metrics
from resiliency.goodput_measure.lives import to_us
from resiliency.goodput_measure.published import GoodputReport, calculate
from resiliency.goodput_measure.reader import ReadStats, read_cloud, read_events
from resiliency.goodput_measure.report import fleet_text, job_text
from resiliency.goodput_measure.timeline.file import SUFFIXES, write_timeline
from resiliency.goodput_measure.tracker import GOODPUT_TYPES, published_record
from resiliency.runtime import SystemClock, no_garbage_collection

__all__ = ["GoodputReport", "calculate", "main"]

OK, NO_EVENTS, BAD_FLAGS, MOSTLY_DAMAGED = 0, 1, 2, 3


class _NoEvents(Exception):
    """The logs can be read and hold nothing of this job."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the calculator; returns the exit code."""
    try:
        arguments = _checked(_parser().parse_args(argv))
        with no_garbage_collection():  # millions of small values are kept, and none refers to itself
            code = OK if _run(arguments) else MOSTLY_DAMAGED
        sys.stdout.flush()  # a closed pipe shows here, not at the interpreter's end
        return code
    except _NoEvents as error:
        print(f"calculator: {error}", file=sys.stderr)
        return NO_EVENTS
    except ResiliencyError as error:
        print(f"calculator: {error}", file=sys.stderr)
        return BAD_FLAGS
    except BrokenPipeError:
        # `| head` has seen enough.  The interpreter would flush once more and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python3 -m resiliency.goodput_measure.calculator",
        description="How much of a job's time became training that lasted.",
        epilog="Exit codes: 0 calculated, 1 no events of this job, 2 a flag or source that cannot work, "
        "3 calculated, but most lines could not be parsed.",
    )
    add = parser.add_argument
    add(
        "--job-name",
        required=True,
        nargs="+",
        metavar="NAME",
        help="jobs to measure, as in JOB_IDENTIFIER; of several also what they are together",
    )
    add(
        "--log-file",
        nargs="+",
        metavar="FILE",
        help="goodput logs (<job>-goodput.log), one per host if hosts share no directory; "
        "default: what --event-log holds of it, else Google Cloud Logging",
    )
    add(
        "--event-log",
        nargs="+",
        metavar="FILE",
        help="full event logs (<job>-events.jsonl) of all hosts; adds the ledger and the incidents",
    )
    add(
        "--reference-step-time",
        type=float,
        metavar="SECONDS",
        help="time of an undisturbed step; default: median in --event-log",
    )
    add(
        "--gcloud-logging-lookback-days",
        type=float,
        default=7.0,
        metavar="DAYS",
        help="how far back to read the cloud log (default: %(default)g)",
    )
    add("--export", metavar="FILE.json", help="also write the metrics as JSON")
    add("--timeline", metavar="FILE", help="also draw the ledger, to .png or .html; needs --event-log")
    add(
        "--window",
        type=float,
        default=3600.0,
        metavar="SECONDS",
        help="length of the window of rolling goodput (default: %(default)g)",
    )
    add(
        "--what-if-interval",
        nargs="+",
        type=int,
        metavar="STEPS",
        help="intervals between saves to replay; default: a quarter to four times the job's own",
    )
    add(
        "--follow",
        nargs="?",
        type=float,
        const=5.0,
        metavar="SECONDS",
        help="read --event-log while it is written, and print a line in each period (default: %(const)g); "
        "ends with the jobs, or at Ctrl-C, with the report",
    )
    add("--prometheus", metavar="FILE.prom", help="also write metrics, in each period of --follow")
    add("--prometheus-port", type=int, metavar="PORT", help="serve the metrics of --follow under /metrics")
    add(
        "--prometheus-listen",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="interface of that port (default: %(default)s); it has no login",
    )
    add(
        "--progress",
        action=argparse.BooleanOptionalAction,
        help="progress bar on stderr; default: for large files on a terminal",
    )
    add(
        "--verbose", action="store_true", help="say what was read, and show the first lines that could not be"
    )
    return parser


def _checked(arguments: argparse.Namespace) -> argparse.Namespace:
    step_time: float | None = arguments.reference_step_time
    if step_time is not None and not (math.isfinite(step_time) and step_time > 0):
        raise ConfigError(f"--reference-step-time must be seconds above 0, found {step_time:g}.")
    days: float = arguments.gcloud_logging_lookback_days
    if not 0 < days <= 3650:
        raise ConfigError(f"--gcloud-logging-lookback-days must be above 0 and at most 3650, found {days:g}.")
    for flag, value in (("--window", arguments.window), ("--follow", arguments.follow)):
        if value is not None and not 0 < value <= 1e9:
            raise ConfigError(f"{flag} must be seconds above 0, found {value:g}.")
    if any(steps < 1 for steps in arguments.what_if_interval or ()):
        raise ConfigError("--what-if-interval must be steps above 0.")
    for flag in ("follow", "prometheus"):
        if getattr(arguments, flag) is not None and arguments.event_log is None:
            raise ConfigError(f"--{flag} needs --event-log.")
    if arguments.follow is not None and arguments.log_file:
        raise ConfigError("--follow reads --event-log: leave --log-file out.")
    if arguments.prometheus_port is not None and arguments.follow is None:
        raise ConfigError("--prometheus-port needs --follow.", hint="--prometheus writes a file once.")
    if arguments.timeline is not None:
        if len(arguments.job_name) > 1:
            raise ConfigError("--timeline shows one job: give one --job-name.")
        if arguments.event_log is None:
            raise ConfigError(
                "--timeline needs --event-log.", hint="The goodput log does not know the ranks."
            )
        if Path(arguments.timeline).suffix.lower() not in SUFFIXES:
            raise ConfigError(
                f"--timeline must end in {' or '.join(SUFFIXES)}, found {arguments.timeline!r}."
            )
    return arguments


def _run(arguments: argparse.Namespace) -> bool:
    """Print the report; False if most of what was read could not be parsed."""
    jobs = {name: JobEvents(name) for name in arguments.job_name}
    options = Options(
        step_s=arguments.reference_step_time,
        window_us=round(arguments.window * 1e6),
        intervals=arguments.what_if_interval or (),
    )
    if arguments.follow is not None:
        stats = ReadStats()
        results = _follow(arguments, jobs, options, stats)
        is_sound = not stats.is_mostly_damaged
    else:
        stats, is_sound = _read(arguments, jobs)
        results = [job.result(options) for job in jobs.values()]
        if arguments.prometheus:
            known = (figures_of_result(result) for result in results)
            _write_metrics(arguments, as_metrics(job for job in known if job is not None))
    _report(arguments, results, stats)
    return is_sound


def _report(arguments: argparse.Namespace, results: list[JobResult], stats: ReadStats) -> None:
    print("\n\n".join(job_text(result) for result in results))
    if len(results) > 1:
        print("\n" + fleet_text(results))
    if arguments.export:
        _export(Path(arguments.export), results, stats)
    if arguments.timeline and (measured := results[0].measured) is not None:
        write_timeline(measured.ledger, arguments.timeline)
        print(f"\ntimeline: {arguments.timeline}")


def _read(arguments: argparse.Namespace, jobs: Mapping[str, JobEvents]) -> tuple[ReadStats, bool]:
    """Read all events of `jobs`; returns what the last files were like, and whether all are sound."""
    stats = ReadStats()
    is_sound = True
    for path in arguments.event_log or ():
        for event in read_events(path, stats=stats, progress=arguments.progress):
            if (job := jobs.get(event.job_name)) is not None:
                job.add_full(event)
    for job in jobs.values():
        if arguments.event_log and not job.is_full:
            raise _NoEvents(_missing("event", job.name, stats))
    if arguments.log_file or not arguments.event_log:
        if arguments.event_log:
            _report_reading(stats, jobs, arguments.verbose)
        is_sound = not stats.is_mostly_damaged
        stats = ReadStats()
        for job in jobs.values():
            job.goodput_events.clear()
        for event in _goodput_events(arguments, stats):
            # A full event log may be given here too, and in it every rank tells of its load.
            if (job := jobs.get(event.job_name)) is not None and published_record(event) is not None:
                job.goodput_events.append(event)
    _report_reading(stats, jobs, arguments.verbose)
    for job in jobs.values():
        if not job.goodput_events:
            raise _NoEvents(_missing("goodput event", job.name, stats))
    return stats, is_sound and not stats.is_mostly_damaged


def _goodput_events(arguments: argparse.Namespace, stats: ReadStats) -> Iterator[RunEvent]:
    for path in arguments.log_file or ():
        yield from read_events(path, types=GOODPUT_TYPES, stats=stats, progress=arguments.progress)
    if not arguments.log_file:
        since = SystemClock().now() - timedelta(days=arguments.gcloud_logging_lookback_days)
        for job_name in arguments.job_name:
            yield from read_cloud(job_name, since=since, types=GOODPUT_TYPES, stats=stats)


def _follow(
    arguments: argparse.Namespace, jobs: Mapping[str, JobEvents], options: Options, stats: ReadStats
) -> list[JobResult]:
    """Print a line for each job and look, until the jobs or this program end; returns the results then."""
    clock = SystemClock()
    with ExitStack() as stack:
        stop = stack.enter_context(_stopped_by_signals())
        server: MetricsServer | None = None
        if arguments.prometheus_port is not None:
            server = stack.enter_context(serving(arguments.prometheus_port, arguments.prometheus_listen))
            print(f"metrics: http://{arguments.prometheus_listen}:{server.port}/metrics", flush=True)
        for figures in follow(
            arguments.event_log, jobs, options,
            stats=stats, every_s=arguments.follow, clock=clock, wait=stop.wait,
        ):  # fmt: skip
            if server is not None or arguments.prometheus:
                text = as_metrics(figures)
                _write_metrics(arguments, text)
                if server is not None:
                    server.text = text
            for job in figures:
                print(job, flush=True)
    now = to_us(clock.now())
    running = running_jobs(jobs, now)
    results = [
        job.result(options, until=now if job in running else None)
        for job in jobs.values()
        if job.goodput_events
    ]
    _report_reading(stats, jobs, arguments.verbose)
    if not results:
        raise _NoEvents(_missing("event", ", ".join(jobs), stats))
    print()
    return results


@contextmanager
def _stopped_by_signals() -> Iterator[threading.Event]:
    """An event that SIGINT and SIGTERM set: the report comes after them."""
    stop = threading.Event()
    before = {
        number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _write_metrics(arguments: argparse.Namespace, text: str) -> None:
    if arguments.prometheus:
        write_metrics(text, arguments.prometheus)


def _missing(what: str, job_name: str, stats: ReadStats) -> str:
    found = ", ".join(f"{name} ({count})" for name, count in stats.jobs.most_common(20))
    if stats.is_mostly_damaged:
        first = stats.examples[0]
        found = f"{found or 'none'}; {stats.unparsable} of them could not be parsed, the first {first}"
    return (
        f"there is no {what} of job {job_name!r} among {stats.lines} lines.  "
        f"Jobs in there: {found or 'none'}.  Choose one with --job-name."
    )


def _report_reading(stats: ReadStats, jobs: Iterable[str], verbose: bool) -> None:
    if verbose:
        events = sum(stats.jobs[name] for name in jobs)
        print(f"read {stats.lines} lines, {events} events of the job", file=sys.stderr)
    if stats.unparsable:
        torn = ", the last one torn" if stats.torn_at_end else ""
        print(
            f"warning: {stats.unparsable} of {stats.lines} lines could not be parsed{torn}", file=sys.stderr
        )
        for example in stats.examples if verbose else stats.examples[: stats.is_mostly_damaged]:
            print(f"  {example}", file=sys.stderr)


def _export(path: Path, results: Sequence[JobResult], stats: ReadStats) -> None:
    record: dict[str, JsonValue] = {"unparsable_lines": stats.unparsable}
    if len(results) == 1:
        record = {**results[0].to_json(), **record}
    else:
        record["jobs"] = [result.to_json() for result in results]
        record["fleet"] = Fleet.of(results).to_json()
    try:
        path.write_text(json.dumps(record, indent=2) + "\n")
    except OSError as error:
        raise ConfigError(
            f"cannot write --export {str(path)!r}: {error.strerror}.", path=str(path)
        ) from error
    print(f"\nexport: {path}")


if __name__ == "__main__":
    sys.exit(main())
