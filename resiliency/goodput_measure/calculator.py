# SPDX-License-Identifier: Apache-2.0
"""Command line: the published goodput of a job, and with its full event log the ledger.

    python3 -m resiliency.goodput_measure.calculator --job-name J --log-file J-goodput.log \
        --reference-step-time 8

Exit codes: 0 calculated, 1 the logs hold no event of this job, 2 a flag or a source that cannot work,
3 calculated from the lesser part of a log whose other lines could not be parsed.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from resiliency.errors import ConfigError, ResiliencyError
from resiliency.events import JsonValue, RunEvent
from resiliency.goodput_measure.ledger import Ledger, build_ledger
from resiliency.goodput_measure.published import GoodputReport, calculate
from resiliency.goodput_measure.reader import ReadStats, read_cloud, read_events
from resiliency.goodput_measure.report import goodput_text, ledger_text
from resiliency.goodput_measure.timeline import SUFFIXES, write_timeline
from resiliency.goodput_measure.tracker import GOODPUT_TYPES, published_record
from resiliency.runtime import SystemClock

__all__ = ["GoodputReport", "calculate", "main"]

OK, NO_EVENTS, BAD_FLAGS, MOSTLY_DAMAGED = 0, 1, 2, 3


class _NoEvents(Exception):
    """The logs can be read and hold nothing of this job."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the calculator; returns the exit code."""
    try:
        arguments = _checked(_parser().parse_args(argv))
        with _no_collections():
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


@contextmanager
def _no_collections() -> Iterator[None]:
    """Without looking for cycles: millions of small values are kept, and none refers to itself."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python3 -m resiliency.goodput_measure.calculator",
        description="How much of a job's time became training that lasted.",
        epilog="Exit codes: 0 calculated, 1 no events of this job, 2 a flag or source that cannot work, "
        "3 calculated, but most lines could not be parsed.",
    )
    add = parser.add_argument
    add("--job-name", required=True, help="job to measure, as in JOB_IDENTIFIER")
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
    if arguments.timeline is not None:
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
    job_name: str = arguments.job_name
    stats = ReadStats()
    goodput_events: list[RunEvent] = []
    ledger: Ledger | None = None
    is_sound = True
    if arguments.event_log:
        ledger = build_ledger(_full_events(arguments, stats, goodput_events))
    if arguments.log_file or ledger is None:
        if ledger is not None:
            _report_reading(stats, arguments.verbose)
        is_sound = not stats.is_mostly_damaged
        stats = ReadStats()
        goodput_events = list(_goodput_events(arguments, stats))
    _report_reading(stats, arguments.verbose)
    if not goodput_events:
        raise _NoEvents(_missing("goodput event", job_name, stats))
    step_time: float | None = arguments.reference_step_time
    if step_time is None and ledger is not None:
        step_time = ledger.median_step_s
    report = calculate(goodput_events, step_time)
    print(goodput_text(report))
    if ledger is not None:
        print("\n" + ledger_text(ledger, report))
    if arguments.export:
        _export(Path(arguments.export), report, ledger, stats)
    if arguments.timeline and ledger is not None:
        write_timeline(ledger, arguments.timeline)
        print(f"\ntimeline: {arguments.timeline}")
    return is_sound and not stats.is_mostly_damaged


def _full_events(
    arguments: argparse.Namespace, stats: ReadStats, goodput_events: list[RunEvent]
) -> Iterator[RunEvent]:
    """All events of the job; those that the published formula counts are noted on the way."""
    for path in arguments.event_log:
        for event in read_events(path, job_name=arguments.job_name, stats=stats, progress=arguments.progress):
            if published_record(event) is not None:
                goodput_events.append(event)
            yield event
    if not stats.events:
        raise _NoEvents(_missing("event", arguments.job_name, stats))


def _goodput_events(arguments: argparse.Namespace, stats: ReadStats) -> Iterator[RunEvent]:
    job_name: str = arguments.job_name
    if not arguments.log_file:
        since = SystemClock().now() - timedelta(days=arguments.gcloud_logging_lookback_days)
        yield from read_cloud(job_name, since=since, types=GOODPUT_TYPES, stats=stats)
        return
    for path in arguments.log_file:
        for event in read_events(
            path, job_name=job_name, types=GOODPUT_TYPES, stats=stats, progress=arguments.progress
        ):
            # A full event log may be given here too, and in it every rank tells of its load.
            if published_record(event) is not None:
                yield event


def _missing(what: str, job_name: str, stats: ReadStats) -> str:
    found = ", ".join(f"{name} ({count})" for name, count in stats.jobs.most_common(20))
    if stats.is_mostly_damaged:
        first = stats.examples[0]
        found = f"{found or 'none'}; {stats.unparsable} of them could not be parsed, the first {first}"
    return (
        f"there is no {what} of job {job_name!r} among {stats.lines} lines.  "
        f"Jobs in there: {found or 'none'}.  Choose one with --job-name."
    )


def _report_reading(stats: ReadStats, verbose: bool) -> None:
    if verbose:
        print(f"read {stats.lines} lines, {stats.events} events of the job", file=sys.stderr)
    if stats.unparsable:
        torn = ", the last one torn" if stats.torn_at_end else ""
        print(
            f"warning: {stats.unparsable} of {stats.lines} lines could not be parsed{torn}", file=sys.stderr
        )
        for example in stats.examples if verbose else stats.examples[: stats.is_mostly_damaged]:
            print(f"  {example}", file=sys.stderr)


def _export(path: Path, report: GoodputReport, ledger: Ledger | None, stats: ReadStats) -> None:
    record: dict[str, JsonValue] = {**report.to_json(), "unparsable_lines": stats.unparsable}
    if ledger is not None:
        record["ledger"] = ledger.to_json()
    try:
        path.write_text(json.dumps(record, indent=2) + "\n")
    except OSError as error:
        raise ConfigError(
            f"cannot write --export {str(path)!r}: {error.strerror}.", path=str(path)
        ) from error
    print(f"\nexport: {path}")


if __name__ == "__main__":
    sys.exit(main())
