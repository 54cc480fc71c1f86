# SPDX-License-Identifier: Apache-2.0
"""Which hosts there are, and which of them a job holds."""

from __future__ import annotations

from dataclasses import replace

from supervisor.decision.turn import EventReport, Turn
from supervisor.decision.verdicts import forgive
from supervisor.values import Change, DeviceState, Event, HostInfo

#: Tables whose rows hold hosts.
_HOLDERS = ("incidents", "commands")


def take_host(turn: Turn, host: HostInfo) -> None:
    """A host as its daemon describes it; the orchestrator and our own commands say what is cordoned."""
    known = turn.state.hosts.get(host.id)
    if known is None and is_replaced(turn, host):
        return
    turn.put("hosts", host.id, replace(host, cordoned=known.cordoned if known else host.cordoned))


def take_change(turn: Turn, host: HostInfo, event: Event) -> None:
    if event.change in (Change.CORDONED, Change.LEAVING):
        turn.put("hosts", host.id, replace(host, cordoned=True))
    elif event.change is Change.UNCORDONED:
        turn.put("hosts", host.id, replace(host, cordoned=False))
        forgive(turn, host.id)


def is_replaced(turn: Turn, host: HostInfo) -> bool:
    """A lost host that was forgotten, and that a sensor still tells of: another one has its name."""
    others = turn.state.names.get(host.name, ())
    return host.state is DeviceState.FAILED and any(other != host.id for other in others)


def forget_replaced(turn: Turn) -> None:
    """Forget hosts that are gone for good: lost, held by nothing, and their names have new ids.

    Only names of hosts that have changed are looked at, and all where something that held one has ended.
    """
    state = turn.state
    if any(row is None for (table, _), row in turn.changes.items() if table in _HOLDERS):
        names = list(state.names)
    else:
        names = [row.name for (table, _), row in turn.changes.items() if table == "hosts" and row]
    for name in names:
        left = len(state.names.get(name, ()))
        for known in state.names[name] if left > 1 else ():
            host = state.hosts[known]
            if left > 1 and host.state is DeviceState.FAILED and not is_held(turn, host):
                left -= 1
                forget(turn, host)


def forget(turn: Turn, host: HostInfo) -> None:
    forgive(turn, host.id)
    for key in [key for key in turn.state.suspicions if key.startswith(f"{host.id}/")]:
        turn.put("suspicions", key, None)
    turn.put("hosts", host.id, None)
    turn.notes.append(f"host {host.id} forgotten: {host.name} has another id")


def is_held(turn: Turn, host: HostInfo) -> bool:
    """By a job, an incident, or a command under way."""
    state = turn.state
    incidents = state.incidents.values()
    return bool(
        host.workload
        or any(host.id in (flight.command.host, flight.command.spare) for flight in state.commands.values())
        or any(
            host.id in (*one.handled, *(each.host for each in one.past + one.reports)) for one in incidents
        )
    )


def is_of_job(report: EventReport) -> bool:
    """Whether the job lacks the report's host: it works for the job, or has left it by itself."""
    host, job = report.host, report.workload
    if host is None or job is None:
        return host is None
    return host.workload == job.workload or not (host.workload or host.id in report.incident.handled)
