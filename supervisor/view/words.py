# SPDX-License-Identifier: Apache-2.0
"""Numbers and states as people read them, the same on the page and in the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from supervisor.values import DeviceState
from supervisor.view.status import (
    DiagnosisStatus,
    HostStatus,
    IncidentStatus,
    JobStatus,
    ReportStatus,
    SpanStatus,
    Status,
)

#: From what needs a look to what does not.
STATES = (DeviceState.FAILED, DeviceState.RUNNING, DeviceState.SPARE, DeviceState.COMPLETE)


def duration(seconds: float | None) -> str:
    """``0.4 s``, ``12 s``, ``3 min 04 s``, ``1 h 02 min``, ``2 d 03 h``; ``-`` for None."""
    if seconds is None:
        return "-"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600:02d} h"


def ago(seconds: float | None) -> str:
    """``12 s ago``; ``never`` for None."""
    return "never" if seconds is None else f"{duration(seconds)} ago"


def printable(text: str) -> str:
    """`text` without what steers a terminal: lines of a host's kernel log and names come in here."""
    return "".join(char if char.isprintable() or char == "\n" else " " for char in text)


def count(number: int, word: str) -> str:
    """``1 host``, ``2 hosts``."""
    return f"{number} {word}{'' if number == 1 else 's'}"


def brief(items: Sequence[object], most: int = 8) -> str:
    """``0, 1, 2``; a long list by its beginning, with the number that is left out."""
    texts = [str(item) for item in items[:most]]
    return ", ".join([*texts, *([f"and {len(items) - most} more"] if len(items) > most else [])])


def states_of(hosts: Iterable[HostStatus]) -> dict[DeviceState, int]:
    """How many hosts are in each state; all states, in the order of `STATES`."""
    found = Counter(host.state for host in hosts)
    return {state: found[state] for state in STATES}


def troubles(host: HostStatus) -> list[str]:
    """Why a person should look at `host`; empty for a host that is well."""
    return [
        text
        for text, holds in (
            ("failed", host.state is DeviceState.FAILED),
            ("silent", host.silent),
            ("not connected", host.connected is False),
            ("cordoned", host.cordoned),
            (f"verdict: {host.verdict}", bool(host.verdict)),
        )
        if holds
    ]


def steps_of(host: HostStatus) -> str:
    """``120``, or ``118 to 120`` where its ranks differ; ``-`` before the first."""
    steps = sorted({worker.step for worker in host.workers if worker.step is not None})
    if not steps:
        return "-"
    return str(steps[0]) if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"


def alarms(status: Status) -> list[str]:
    """What holds for the whole fleet and keeps the supervisor from its work, a sentence each."""
    found = []
    if status.frozen_by:
        found.append(f"Frozen by {status.frozen_by}: nothing is done until a thaw.")
    if status.silent:
        found.append("Frozen: many hosts are silent at once, more than fail together.")
    elif status.frozen and not status.frozen_by:
        found.append("Frozen: nothing is done.")
    if status.shadow:
        found.append("Shadow mode: decisions are noted, and no command is given.")
    if status.log_problem:
        found.append(f"The event log takes nothing, so nothing is decided: {status.log_problem}")
    if status.fenced_by:
        found.append(
            f"Commands are refused: a controller of epoch {status.fenced_by} was heard, this one has"
            f" {status.epoch}. End one of the two; if there is no other, start this one again."
        )
    for part in status.parts:
        if part.problem:
            found.append(
                f"No contact with the {part.name} since {duration(part.contact_age_s)}: {part.problem}"
            )
    return found


def what_happened(report: ReportStatus) -> str:
    """``hang of ranks 3, 4``, ``host_hb on host-7``."""
    where = f" on {report.host}" if report.host else ""
    ranks = f", {'rank' if len(report.ranks) == 1 else 'ranks'} {brief(report.ranks)}" if report.ranks else ""
    return f"{report.cause or report.type.value}{where}{ranks}"


def diagnosis_text(found: DiagnosisStatus | None) -> str:
    """``gpu_missing 12 s ago, attempt 3: rank 3 on n1 finds no GPU; advice replace_host``; ``-`` for None."""
    if found is None:
        return "-"
    return f"{found.cause} {ago(found.age_s)}, attempt {found.attempt}: {found.text}; advice {found.advice}"


def span_text(span: SpanStatus) -> str:
    """``gathered 1.2 s``; ``hot_swap since 40 s`` while it lasts."""
    lasts = f"since {duration(span.age_s)}" if span.seconds is None else duration(span.seconds)
    return f"{span.name} {lasts}"


def incident_state(incident: IncidentStatus) -> str:
    """What is done for an incident, in a few words."""
    if incident.closed_age_s is not None:
        return f"closed {ago(incident.closed_age_s)}, {count(incident.actions, 'action')}"
    if incident.command:
        return f"action under way: {incident.command}"
    waits = "" if incident.next_look_s is None else f"next look in {duration(incident.next_look_s)}"
    return "; ".join(filter(None, (incident.note, waits))) or "open"


def job_state(job: JobStatus) -> str:
    """Why something or nothing is done for a job."""
    if job.verdict:
        return f"given up: {job.verdict}"
    if job.incident:
        return f"incident {job.incident}"
    if len(job.hosts) < job.hosts_needed:
        return f"{job.hosts_needed - len(job.hosts)} of {count(job.hosts_needed, 'host')} missing"
    if not (job.in_job.limit or job.restarts.limit):
        return "no restart budget: --max-restarts and --max-workload-restarts of its launchers are 0"
    return f"well: {job.condition}" if job.condition else "well"


def is_well(job: JobStatus) -> bool:
    """True where no person has to look at a job."""
    return job_state(job).startswith("well")
