# SPDX-License-Identifier: Apache-2.0
"""Goodput as text: the published table, the ledger beside it, and one line per incident."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from resiliency.goodput_measure.incidents import Incident, stages_of
from resiliency.goodput_measure.jobs import Fleet, JobLedger, JobResult
from resiliency.goodput_measure.ledger import Bucket, Ledger
from resiliency.goodput_measure.lives import from_us
from resiliency.goodput_measure.published import GoodputReport
from resiliency.goodput_measure.reliability import Reliability
from resiliency.goodput_measure.what_if import IntervalCost
from resiliency.goodput_measure.windows import Rolling

#: Causes in the order in which a reader wants them, with what they mean.
MEANINGS = {
    Bucket.KEPT_STEPS: "training that lasted",
    Bucket.LOST_STEPS: "steps done again later, or cut off",
    Bucket.SAVE_HELD: "training waited for a save",
    Bucket.RESTORE: "loading a checkpoint",
    Bucket.STARTUP: "interpreter and imports",
    Bucket.INITIALIZATION: "process groups, model, first batch",
    Bucket.DETECTION: "fault until it was noticed",
    Bucket.RESTART: "noticed until a new process ran",
    Bucket.DECISION: "noticed until the supervisor decided",
    Bucket.SWAP: "a host was exchanged for a spare",
    Bucket.CAPACITY: "waiting until all hosts had met",
    Bucket.OTHER: "between steps, before start, after end",
}


def goodput_text(report: GoodputReport) -> str:
    """The published metrics as a table, with the notes under it."""
    rows = [
        ("Total Events", str(report.total_events)),
        ("Job Started Count", str(report.job_started_count)),
        ("Checkpoints Loaded", str(report.checkpoints_loaded)),
        ("Checkpoints Saved", str(report.checkpoints_saved)),
        ("Total Runtime", duration(report.total_runtime_s)),
        ("Min Loaded Step", str(report.min_loaded_step)),
        ("Max Saved Step", or_none(report.max_saved_step)),
        ("Step Difference", str(report.step_difference)),
        ("Reference Step Time", _seconds(report.reference_step_time_s)),
        ("Effective Computation Time", duration(report.effective_computation_time_s)),
        ("Goodput Percentage", _percent(report.goodput_percentage)),
    ]
    text = f"Goodput of job {report.job_name}\n\n" + table(("Metric", "Value"), rows)
    return text + "".join(f"\nnote: {note}" for note in report.notes)


def job_text(result: JobResult) -> str:
    """All that is known of one job."""
    if result.measured is None:
        return goodput_text(result.report)
    job = result.measured
    parts = [goodput_text(result.report), ledger_text(job.ledger, result.report)]
    if job.rolling is not None:
        parts.append(_rolling_text(job.rolling))
    if job.reliability.outages:
        parts += [_attempts_text(job), _reliability_text(job.reliability)]
    if job.costs:
        parts.append(_costs_text(job.costs))
    return "\n\n".join(parts)


def fleet_text(results: Sequence[JobResult]) -> str:
    """One row for each job, and one for all."""
    rows = []
    for result in results:
        if result.measured is None:
            rows.append((result.report.job_name, "-", "-", "-", "-", "-", "-", "-"))
            continue
        ledger, found = result.measured.ledger, result.measured.reliability
        rows.append(
            (
                result.report.job_name,
                str(len(ledger.lanes)),
                duration(ledger.wall_us / 1e6),
                share(ledger.goodput),
                share(ledger.ettr),
                str(len(found.outages)),
                duration(found.mttf_s),
                duration(found.mttr_s),
            )
        )
    fleet = Fleet.of(results)
    time = duration(sum(fleet.totals.values()) / 1e6)
    summary = ("all", "", f"{time} of ranks", share(fleet.goodput), "", str(fleet.outages))
    rows.append((*summary, duration(fleet.mttf_s), duration(fleet.mttr_s)))
    header = ("Job", "Ranks", "Wall", "Goodput", "ETTR", "Outages", "MTTF", "MTTR")
    return f"{len(results)} jobs\n" + table(header, rows)


def ledger_text(ledger: Ledger, report: GoodputReport) -> str:
    """Every cause with its time, the three definitions of goodput side by side, and the incidents."""
    ranks = len(ledger.lanes)
    available = ledger.wall_us * ranks
    rows = [
        (bucket.value, duration(ledger.totals[bucket] / 1e6), share(ledger.share(bucket)), meaning)
        for bucket, meaning in MEANINGS.items()
    ]
    rows.append(("sum", duration(sum(ledger.totals.values()) / 1e6), share(1.0 if available else None), ""))
    definitions = [
        ("kept steps / (wall x ranks)", share(ledger.goodput), "all machine time"),
        ("ETTR: kept step on any rank / wall", share(ledger.ettr), "the job's own progress"),
        (
            "published: saved steps x reference / runtime",
            _percent(report.goodput_percentage),
            "no step events",
        ),
    ]
    parts = [
        f"Ledger of {ranks} rank{'s' * (ranks != 1)} over {duration(ledger.wall_us / 1e6)}",
        table(("Cause", "Rank time", "Share", "Meaning"), rows),
        table(("Goodput as", "Value", "Asks about"), definitions),
    ]
    if ledger.incidents:
        parts.append(incidents_text(ledger.incidents))
    return "\n\n".join(parts)


def incidents_text(incidents: Iterable[Incident]) -> str:
    """One row per incident: seconds from stage to stage, and what it cost."""
    incidents = tuple(incidents)
    stages = stages_of(incidents)
    names = [stage.replace("_", " ") for stage in stages]
    rows = [
        (
            str(incident.index),
            ",".join(map(str, incident.ranks)) or "?",
            incident.cause or "?",
            *(_bare_seconds(incident.spans.get(stage)) for stage in stages),
            _bare_seconds(incident.total_s),
            or_none(incident.lost_steps),
        )
        for incident in incidents
    ]
    header = ("#", "Rank", "Cause", *names, "total", "lost steps")
    return "Incidents: seconds that each stage took after the one before it\n" + table(header, rows)


def _rolling_text(curve: Rolling) -> str:
    (low_at, low), (_, newest) = curve.lowest, curve.newest
    return (
        f"Rolling goodput over {duration(curve.length_us / 1e6)}: lowest {share(low)} (until "
        f"{from_us(low_at):%Y-%m-%d %H:%M} UTC), median {share(curve.median)}, newest {share(newest)}"
    )


def _attempts_text(job: JobLedger) -> str:
    causes = {incident.detected: incident.cause or "?" for incident in job.ledger.incidents}
    rows = [
        (
            str(index),
            duration((window.start - job.ledger.start) / 1e6),
            duration((window.end - window.start) / 1e6),
            share(window.goodput),
            causes.get(window.end, "-"),
        )
        for index, window in enumerate(job.attempts)
    ]
    header = ("#", "From", "Lasted", "Goodput", "Ended by")
    return "Attempts: from one detection to the next\n" + table(header, rows)


def _reliability_text(found: Reliability) -> str:
    rows = [
        ("time to failure", found.uptimes),
        ("time to repair", found.repairs),
        *((f"  {cause}", repairs) for cause, repairs in found.by_cause.items() if len(found.by_cause) > 1),
    ]
    cells = [
        (name, str(of.count), *map(duration, (of.mean, of.median, of.p90, of.p99, of.worst)))
        for name, of in rows
        if of is not None
    ]
    header = ("Distribution", "Count", "mean", "median", "90 %", "99 %", "worst")
    return (
        f"MTTF {duration(found.mttf_s)}, MTTR {duration(found.mttr_s)}: {len(found.outages)} outages in "
        f"{duration(found.trained_s)} of training\n" + table(header, cells)
    )


def _costs_text(costs: Sequence[IntervalCost]) -> str:
    rows = [
        (
            f"{cost.interval_steps}",
            f"{cost.saves}",
            duration(cost.held_s),
            duration(cost.lost_s),
            duration(cost.total_s),
            cost.note,
        )
        for cost in costs
    ]
    header = ("Steps", "Saves", "Held", "Lost", "Total", "")
    return "Interval between saves: what it would have cost, with the same failures\n" + table(header, rows)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned by width: numbers to the right, words to the left."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    numeric = [all(_is_number(row[index]) for row in rows) for index in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(cells, widths, numeric, strict=True)
        ]
        return "  ".join(padded).rstrip()

    return "\n".join([line(header), line(["-" * width for width in widths]), *map(line, rows)])


def duration(seconds: float | None) -> str:
    """``1 h 02 min``, ``3 min 04 s``, ``5.06 s``; ``unknown`` for None."""
    if seconds is None:
        return "unknown"
    if seconds < 60:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def _is_number(text: str) -> bool:
    return text[:1].isdigit() or text in ("-", "?", "", "unknown")


def or_none(value: int | None) -> str:
    return "-" if value is None else str(value)


def _seconds(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4g} s"


def _bare_seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2f} %"


def share(value: float | None) -> str:
    return _percent(None if value is None else 100 * value)
