# SPDX-License-Identifier: Apache-2.0
"""Which hosts there are, and which of them a job holds."""

from __future__ import annotations

from dataclasses import replace

from supervisor.decision.cordons import move_cordon, see_cordon
from supervisor.decision.diagnoses import diagnosed_hosts
from supervisor.decision.incidents import downtime_s, is_still_lost
from supervisor.decision.state import Incident, Losses, Seen
from supervisor.decision.turn import EventReport, Turn
from supervisor.decision.verdicts import forgive, lift_stop
from supervisor.policy.spares import REMEMBERED_S
from supervisor.values import Change, DeviceState, Event, EventType, HostInfo, WorkloadInfo

#: Tables whose rows hold hosts.
_HOLDERS = ("incidents", "commands")


def take_host(turn: Turn, host: HostInfo) -> None:
    """A host as its daemon describes it; the orchestrator and our own commands say what is cordoned."""
    known = turn.state.hosts.get(host.id)
    if known is None and host.state is DeviceState.FAILED and is_history(turn, host):
        return
    if known is not None and is_awaited(turn, known) and not (host.workload or host.workers):
        host = replace(host, workload=known.workload)
    closed = known.cordoned if known is not None else move_cordon(turn, host) or host.cordoned
    turn.put("hosts", host.id, replace(host, cordoned=closed))


def lose_host(turn: Turn, host: HostInfo) -> None:
    """Note that a host is lost, and count that: not one that was lost or cordoned before."""
    if host.state is not DeviceState.FAILED and not host.cordoned:
        known = turn.state.losses.get(host.name, Losses(at=()))
        turn.put("losses", host.name, Losses(at=(*known.at[-7:], turn.now)))  # enough to tell
    turn.put("hosts", host.id, replace(host, state=DeviceState.FAILED))


def is_awaited(turn: Turn, host: HostInfo) -> bool:
    """Whether an action has given a spare to a job, whose launcher there has not been heard of yet."""
    return bool(host.workload) and not host.workers and host.workload in turn.state.incidents


def take_workload(turn: Turn, job: WorkloadInfo) -> None:
    """A job as its launchers describe it; under a known name it may be another one."""
    known = turn.state.workloads.get(job.workload)
    if known is not None and not job.run:
        job = replace(job, run=known.run, first_attempt=known.first_attempt)
    if known is not None and job.is_new_run(known, turn.view.attempt(job.workload)):
        if is_restarted(turn, job.workload):
            begin_run(turn, job)
        else:
            lost = losses(turn, job.workload)
            forget_job(turn, job.workload, "its name is used again")
            if lost is not None:
                turn.put("incidents", job.workload, lost)
    elif known is not None and not known.is_of_run(job.run):
        lift_stop(turn, job.workload)
    turn.put("workloads", job.workload, job)


def is_restarted(turn: Turn, name: str) -> bool:
    """Whether a new run is what our own action for the job has led to, so that its budgets go on."""
    incident = turn.state.incidents.get(name)
    if incident is None or f"job:{name}" in turn.state.verdicts:
        return False
    acted_at = incident.done_at if not incident.command else turn.now
    return acted_at is not None and turn.now - acted_at < downtime_s(turn, name)


def losses(turn: Turn, name: str) -> Incident | None:
    """What is left of the job's incident for another job on its hosts: those that are lost."""
    incident = turn.state.incidents.get(name)
    reports = incident.past + incident.reports if incident is not None else ()
    lost = [each for each in reports if is_still_lost(turn, each, name)]
    lost = [replace(each, run="") for each in lost if each.type is not EventType.WORKER_HB]
    if incident is None or not lost:
        return None
    return Incident(
        id=turn.next_id("incidents", "i"),
        subject=name,
        opened_at=turn.now,
        reported_at=turn.now,
        decide_at=turn.now + turn.limits.coalesce_s,
        reports=tuple(lost),
    )


def begin_run(turn: Turn, job: WorkloadInfo) -> None:
    """Its attempts may be lower than before; the action is not judged before it had its time."""
    name, mark = job.workload, turn.state.progress.get(job.workload)
    if mark is not None:
        turn.put("progress", name, replace(mark, attempt=job.first_attempt, step=0))
    incident = replace(turn.state.incidents[name], attempt=-1, runs=-1)
    turn.put("incidents", name, incident)
    if not incident.command:
        until = turn.now + downtime_s(turn, name)
        left = incident.past + incident.reports
        turn.put("incidents", name, replace(incident, reports=(), past=left, decide_at=until))


def forget_job(turn: Turn, name: str, why: str) -> None:
    """Nothing that was known of the job is held against the next one of its name."""
    for table, key in (
        *((table, name) for table in ("workloads", "progress", "accounts", "incidents")),
        *((table, f"job:{name}") for table in ("verdicts", "gone")),
        *(("diagnoses", host) for host in diagnosed_hosts(turn.state, name)),
    ):
        turn.put(table, key, None)
    turn.notes.append(f"job {name} forgotten: {why}")


def take_change(turn: Turn, event: Event) -> None:
    host = turn.state.hosts.get(event.host)
    if event.change in (Change.CORDONED, Change.LEAVING):
        see_cordon(turn, event)
    elif event.change is Change.UNCORDONED:
        if host is not None:
            turn.put("hosts", host.id, replace(host, cordoned=False))
        forgive(turn, event.host)


def is_history(turn: Turn, host: HostInfo) -> bool:
    """Whether a lost host is one that was forgotten, and that a sensor still tells of."""
    others = turn.state.names.get(host.name, ())
    return host.workload not in turn.state.workloads or any(other != host.id for other in others)


def forget_gone(turn: Turn) -> None:
    """Forget what has been gone for long: jobs that no host works for, and lost hosts that nothing holds.

    A job, after the time that it may be without a step; an open incident keeps it, and a verdict on it until
    that expires.  A host, after the time that a verdict on it would hold.
    """
    state = turn.state
    for name, known in list(state.losses.items()):
        if turn.now - known.at[-1] >= REMEMBERED_S:
            turn.put("losses", name, None)
    kept = {host.workload for host in state.hosts.values() if host.state is not DeviceState.FAILED}
    kept |= {flight.command.workload for flight in state.commands.values()}
    for name in list(state.workloads):
        verdict = state.verdicts.get(f"job:{name}")
        disputed = name in state.incidents if verdict is None else turn.now < verdict.expires_at
        if _is_over(turn, f"job:{name}", name in kept or disputed, downtime_s(turn, name)):
            forget_job(turn, name, "no host works for it any more")
            for host in [host for host in turn.state.hosts.values() if host.workload == name]:
                turn.put("hosts", host.id, replace(host, workload=""))
    for host in list(turn.state.hosts.values()):
        there = host.state is not DeviceState.FAILED
        if there and f"host:{host.id}" not in turn.state.gone:
            continue
        if _is_over(turn, f"host:{host.id}", there or is_held(turn, host), turn.limits.verdict_s):
            forget(turn, host, "it is lost, and nothing holds it")


def _is_over(turn: Turn, key: str, held: bool, after_s: float) -> bool:
    """Whether nothing has held what `key` names for `after_s`."""
    gone = turn.state.gone.get(key)
    if held or gone is None:
        turn.put("gone", key, None if held else Seen(at=turn.now))
        return False
    return turn.now - gone.at >= after_s


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
                forget(turn, host, f"{host.name} has another id")


def forget(turn: Turn, host: HostInfo, why: str) -> None:
    forgive(turn, host.id)
    for key in [key for key in turn.state.suspicions if key.startswith(f"{host.id}/")]:
        turn.put("suspicions", key, None)
    turn.put("hosts", host.id, None)
    turn.put("diagnoses", host.id, None)
    turn.put("checks", host.id, None)
    turn.put("gone", f"host:{host.id}", None)
    turn.notes.append(f"host {host.id} forgotten: {why}")


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
    left = host.id in report.incident.handled and host.id not in report.incident.no_spare
    return host.workload == job.workload or not (host.workload or left)
