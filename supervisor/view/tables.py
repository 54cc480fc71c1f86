# SPDX-License-Identifier: Apache-2.0
"""Status and history as text for a terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from supervisor.view.status import CommandStatus, History, HostStatus, IncidentStatus, Status
from supervisor.view.words import (
    ago,
    alarms,
    count,
    diagnosis_text,
    duration,
    incident_state,
    job_state,
    printable,
    span_text,
    states_of,
    steps_of,
    troubles,
    what_happened,
)

#: Longest cell; a terminal is for an overview, ``--json`` has all of it.
_WIDEST = 60
#: Rows of a part whose length grows with the fleet or with time.
_MOST = 20


def status_text(status: Status, *, every_host: bool = False) -> str:
    """What holds now, most urgent first.  `every_host`: also the hosts that are well."""
    return printable("\n\n".join(_parts(status, every_host))) + "\n"


def history_text(history: History) -> str:
    """One block for each record, oldest first; records in which nothing happened are left out."""
    lines: list[str] = []
    for record in history.records:
        if record.kind == "Tick" and not record.notes:
            continue
        lines.append(
            f"{record.number:>8}  {ago(record.age_s):>16}  {record.kind}  {_cut(_given(record.given), 200)}"
        )
        lines += [f"{'':>26}  {note}" for note in record.notes]
    return printable("\n".join(lines or ["No record."])) + "\n"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned by width."""
    cut = [[_cut(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *cut, strict=True)]
    lines = [header, ["-" * width for width in widths], *cut]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _parts(status: Status, every_host: bool) -> Iterator[str]:
    release = f" of release {status.release}" if status.release else ""
    yield f"Controller{release}, epoch {status.epoch}, up {duration(status.uptime_s)}" + "".join(
        f"\n! {alarm}" for alarm in alarms(status)
    )
    states = ", ".join(f"{number} {state.value}" for state, number in states_of(status.hosts).items())
    yield (
        f"{count(len(status.hosts), 'host')}: {states}\n"
        f"{status.cordons_left} of {count(status.max_cordons, 'cordon')} left, "
        f"{count(status.spare_floor, 'spare')} kept back"
    )
    if status.jobs:
        yield "Jobs\n" + table(
            ("Job", "Hosts", "Step", "Last step", "Attempt", "Restarts left", "Actions left", "State"),
            [
                (
                    job.workload,
                    f"{len(job.hosts)} of {job.hosts_needed}",
                    "-" if job.step is None else str(job.step),
                    ago(job.step_age_s),
                    str(job.attempt),
                    f"{job.in_job.left} of {job.in_job.limit} in place, "
                    f"{job.restarts.left} of {job.restarts.limit} whole",
                    f"{job.actions_left} of {job.actions_at_once}",
                    job_state(job),
                )
                for job in status.jobs
            ],
        )
    diagnosed = [job for job in status.jobs if job.diagnosis is not None]
    if diagnosed:  # whole sentences, which no cell has room for
        yield "Last diagnoses\n" + "\n".join(
            f"{job.workload}: {_cut(diagnosis_text(job.diagnosis), 500)}" for job in diagnosed[:_MOST]
        )
    yield from _incidents(status.incidents)
    yield from _commands(status.commands)
    yield from _hosts(status.hosts, every_host)
    if status.verdicts:
        rows = [
            (one.subject, one.text or one.cause, ago(one.age_s), duration(one.expires_s))
            for one in status.verdicts
        ]
        yield "Verdicts\n" + table(("About", "Verdict", "Since", "Holds for"), rows[:_MOST])
    if status.decisions:
        lines = [f"{ago(note.age_s):>16}  {note.text}" for note in status.decisions[:_MOST]]
        yield "\n".join(["What was decided", *lines])


def _incidents(incidents: Sequence[IncidentStatus]) -> Iterator[str]:
    for incident in [one for one in incidents if one.closed_age_s is None]:
        lines = [
            f"Incident {incident.id} of {incident.subject}, {ago(incident.age_s)}: {incident_state(incident)}"
        ]
        for report in incident.reports[:_MOST]:
            lines.append(f"  {what_happened(report)}{' (acted on)' if report.acted_on else ''}")
            lines += [f"    {one.witness}: {_cut(one.text, 120) or one.id}" for one in report.evidence[:5]]
        if incident.spans:
            lines.append(f"  {', '.join(span_text(span) for span in incident.spans)}")
        yield "\n".join(lines)


def _commands(commands: Sequence[CommandStatus]) -> Iterator[str]:
    if commands:
        yield "Commands\n" + table(
            ("Command", "For", "Decided", "Outcome"),
            [
                (
                    command.kind.value,
                    " ".join(filter(None, (command.workload, command.host))) or "-",
                    ago(command.age_s),
                    "under way"
                    if command.outcome is None
                    else f"{command.outcome.value} after {duration(command.seconds)} {command.text}".rstrip(),
                )
                for command in commands[:_MOST]
            ],
        )


def _hosts(hosts: Sequence[HostStatus], every_host: bool) -> Iterator[str]:
    shown = [host for host in hosts if every_host or troubles(host)]
    if not shown:
        return
    rows = [
        (
            host.name if host.name == host.id else f"{host.name} ({host.id})",
            host.state.value,
            host.workload or "-",
            steps_of(host),
            ago(host.report_age_s),
            "; ".join(troubles(host)) or "well",
        )
        for host in (shown if every_host else shown[:_MOST])
    ]
    title = "Hosts" if every_host else "Hosts to look at"
    left = len(shown) - len(rows)
    more = f"\nand {left} more: --hosts shows all" if left else ""
    yield f"{title}\n" + table(("Host", "State", "Job", "Step", "Last report", "What"), rows) + more


def _given(text: str) -> str:
    """An input as ``field=value``, without what is empty; of evidence the words."""
    try:
        fields = json.loads(text)
    except ValueError:
        return text
    if not isinstance(fields, dict):
        return text
    words = []
    for name, value in fields.items():
        if name == "evidence" and isinstance(value, list):
            seen = (f"{one.get('witness')}: {one.get('text')}" for one in value if isinstance(one, dict))
            words.append("; ".join(seen))
        elif value and value != "unknown":
            shown = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
            words.append(f"{name}={shown}")
    return ", ".join(words)


def _cut(text: str, widest: int = _WIDEST) -> str:
    return text if len(text) <= widest else f"{text[: widest - 3]}..."
