# SPDX-License-Identifier: Apache-2.0
"""An incident of the supervisor as run events of its job: goodput shows detection, decision and action.

Only actions that restarted the job become events, growth among them: an event says that the job was
interrupted, and the ledger counts from it.  Ages become times of this machine's clock, as the other events
of a job have theirs: clocks agree to within the time that a restart takes.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta

from resiliency.events import EventType, JsonValue, RunEvent
from supervisor.values import CommandKind, OutcomeStatus
from supervisor.view.status import CommandStatus, IncidentStatus
from supervisor.view.words import what_happened

#: Ranks, and observations, that one event names at most.
MOST_NAMED = 100


def run_events(
    incident: IncidentStatus, commands: Iterable[CommandStatus], *, job_name: str, now: datetime
) -> tuple[RunEvent, ...]:
    """What happened to the job, in the order of time; empty where the supervisor did not restart it.

    Call it once for an incident, when it has closed: the same incident gives the same events.

    Args:
        incident, commands: of one status document; commands of other incidents are skipped.
        job_name: as the launchers' ``--job-name``.
        now: the moment of the document, aware.
    """
    acted = sorted(
        (
            command
            for command in commands
            if command.incident == incident.id
            and (command.kind.restarts or command.kind is CommandKind.SCALE_UP)
            and command.outcome is OutcomeStatus.DONE
        ),
        key=lambda command: -command.age_s,
    )
    if not acted:
        return ()
    cause = "; ".join(dict.fromkeys(map(what_happened, incident.reports))) or incident.subject
    ranks = sorted({rank for report in incident.reports for rank in report.ranks})
    evidence: list[JsonValue] = [one.text or one.id for report in incident.reports for one in report.evidence]
    fields: dict[str, JsonValue] = {
        "cause": cause,
        "incident": incident.id,
        "detected_by": "supervisor",
        "evidence": evidence[:MOST_NAMED],
    }
    if ranks:
        fields["ranks"] = list(ranks[:MOST_NAMED])

    def event(type: EventType, age_s: float, given: dict[str, JsonValue]) -> RunEvent:
        return RunEvent(
            type=type,
            time=now - timedelta(seconds=age_s),
            job_name=job_name,
            host=next((report.host for report in incident.reports if report.host), ""),
            rank=ranks[0] if type is EventType.FAULT_DETECTED and len(ranks) == 1 else None,
            fields=given,
        )

    # A job that only grew had no fault; its decision alone opens an interruption in the ledger.
    failed = any(command.kind is not CommandKind.SCALE_UP for command in acted)
    events = [event(EventType.FAULT_DETECTED, incident.age_s, fields)] if failed else []
    for command in acted:
        seconds = command.seconds or 0.0
        names: dict[str, JsonValue] = {"incident": incident.id, "action": command.kind.value}
        targets: dict[str, JsonValue] = {
            name: value
            for name in ("host", "spare", "replicas")
            if (value := getattr(command, name)) not in ("", None)
        }
        events.append(event(EventType.ACTION_DECIDED, command.age_s, {**names, **targets, "cause": cause}))
        ended = {**names, "outcome": OutcomeStatus.DONE.value, "duration_s": seconds}
        events.append(event(EventType.ACTION_ENDED, max(command.age_s - seconds, 0.0), ended))
    return tuple(events)
