# SPDX-License-Identifier: Apache-2.0
"""Reports join the incident of their job; steps close it."""

from __future__ import annotations

from dataclasses import replace

from supervisor.decision.state import Incident, Mark
from supervisor.decision.turn import EventReport, Turn
from supervisor.policy.pace import still_s
from supervisor.policy.verdict import STOPPED
from supervisor.values import (
    Command,
    CommandKind,
    DeviceState,
    Event,
    EventType,
    HostInfo,
    LauncherState,
    Progress,
)


def take_progress(turn: Turn, progress: Progress) -> None:
    """A job has finished a step; a best one lifts the verdict on it."""
    name = progress.workload
    job = turn.state.workloads.get(name)
    if job is not None and not job.is_of_run(progress.run):
        return
    mark = turn.state.progress.get(name)
    at = turn.now - progress.age_s
    new = Mark(
        step=progress.step,
        attempt=progress.attempt,
        at=at,
        best=max(mark.best if mark is not None else 0, progress.step),
        usual_step_s=progress.usual_step_s or (mark.usual_step_s if mark is not None else 0.0),
    )
    if mark is None:
        turn.put("progress", name, new)
    elif (progress.attempt, progress.step) > (mark.attempt, mark.step) or (
        # The job went back to an earlier checkpoint, without a restart.
        progress.attempt == mark.attempt and progress.step < mark.step and at > mark.at
    ):
        turn.put("progress", name, new)
        verdict = turn.state.verdicts.get(f"job:{name}")
        # Steps after a launcher has stopped its job are those of another start; its last ones are read late.
        if verdict is not None and (at > verdict.at if verdict.cause == STOPPED else new.best > mark.best):
            turn.put("verdicts", f"job:{name}", None)
        close_if_advancing(turn, name)


def close_if_advancing(turn: Turn, name: str) -> None:
    """A step after the last action ends the incident, if it is well after the last report.

    Ranks that another attempt has replaced since finish no late steps: its first is enough.
    """
    incident, mark = turn.state.incidents.get(name), turn.state.progress[name]
    if incident is None or incident.command:
        return
    fine_after = incident.done_at if incident.done_at is not None else 0.0
    if incident.reports:
        replaced = all(each.is_of_ranks and each.attempt < mark.attempt for each in incident.reports)
        fine_after = max(fine_after, incident.reported_at + turn.limits.advancing_s * (not replaced))
    if mark.at > fine_after:
        for host in lost_hosts(turn, incident):  # the job goes on without them
            turn.put("hosts", host, replace(turn.state.hosts[host], workload=""))
        turn.put("incidents", name, None)
        turn.put("accounts", name, replace(turn.account(name), quiet_since=turn.now))
        turn.notes.append(f"incident {incident.id} closed: {name} finished step {mark.step}")


def note_attempt(turn: Turn, event: Event) -> None:
    """All ranks of an attempt run, by the word of their launchers."""
    job, incident = turn.state.workloads.get(event.workload), turn.state.incidents.get(event.workload)
    if (
        job is not None
        and incident is not None
        and job.is_of_run(event.run)
        and event.attempt > incident.runs
    ):
        turn.put("incidents", incident.subject, replace(incident, runs=event.attempt))


def leave_to_launchers(turn: Turn, incident: Incident) -> bool:
    """True, and the incident waits, where only ranks were reported that run again, or an action was done.

    Their launchers know better than a number how long the next step may take.
    """
    left = tuple(each for each in incident.reports if not incident.is_over(each))
    hosts = [host for host in turn.state.hosts.values() if host.workload == incident.subject]
    run = all(host.state is DeviceState.RUNNING for host in hosts)
    if left or incident.runs <= incident.attempt or not run:
        return False
    over = incident.reports
    past = tuple(each for each in incident.past if not (over and incident.is_over(each))) + over
    turn.put("incidents", incident.subject, replace(incident, reports=(), past=past))
    text = f"attempt {incident.runs} runs, and is left to its launchers"
    wait_until(turn, incident.subject, turn.now + downtime_s(turn, incident.subject), text)
    return True


def is_still_lost(turn: Turn, event: Event, workload: str) -> bool:
    """Whether an event told of a host that the job holds, or of ranks there, and they are not back."""
    host = turn.state.hosts.get(event.host)
    return (
        event.type in (EventType.WORKER_HB, EventType.HOST_HB, EventType.ORCHESTRATOR)
        and host is not None
        and host.state is DeviceState.FAILED
        and host.workload == workload
    )


def lost_hosts(turn: Turn, incident: Incident) -> set[str]:
    """Hosts that its job lost in this incident, and that are not back."""
    reports = (*incident.past, *incident.reports)
    lost = [each for each in reports if not each.is_of_ranks]
    return {each.host for each in lost if is_still_lost(turn, each, incident.subject)}


def note_absence(turn: Turn) -> None:
    """What is overdue says that this process was stopped, and what it reads now may be as old as that.

    A step that was finished before its incident was reported, and is read only now, must not end it.
    """
    for subject, incident in list(turn.state.incidents.items()):
        waits = incident.reports and not incident.command
        if waits and turn.now - incident.decide_at > turn.limits.tick_s:
            turn.put("incidents", subject, replace(incident, reported_at=turn.now))


def open_incident(turn: Turn, event: Event, *, subject: str = "") -> None:
    """A report joins the incident of its `subject`, or opens one; default: of its job."""
    host = turn.state.hosts.get(event.host)
    if host is not None and not event.workload:  # the sensor hears later that a spare has a job
        event = replace(event, workload=host.workload)
    job, mark = turn.state.workloads.get(event.workload), turn.state.progress.get(event.workload)
    if job is not None and not job.is_of_run(event.run) and not _concerns_next_run(event, host):
        return  # of an earlier job of that name
    if mark and event.type in (EventType.WORKER_HB, EventType.HANG) and event.attempt < mark.attempt:
        return  # of ranks that a restart has replaced since
    # A host that was swapped out may still be reported under its old job, which is not concerned.
    left = host is not None and not host.workload
    subject = subject or (f"host:{event.host}" if left or not event.workload else event.workload)
    # What is old has had its echoes: of a silence only those that are found at the same look are to come.
    gathered = min(found.age_s for found in event.evidence)
    least = min(turn.limits.coalesce_s, turn.limits.tick_s)
    soon = turn.now + max(turn.limits.coalesce_s - gathered, least)
    incident = turn.state.incidents.get(subject)
    if incident is not None and incident.is_echo(event, turn.now, turn.limits.launcher_grace_s):
        turn.notes.append(f"incident {incident.id}: {event.type.value} of {event.host or subject} is an echo")
        return
    if incident is None:
        number = turn.next_id("incidents", "i")
        turn.put(
            "incidents",
            subject,
            Incident(
                id=number,
                subject=subject,
                opened_at=turn.now,
                reported_at=turn.now,
                decide_at=soon,
                reports=(event,),
            ),
        )
        turn.notes.append(f"incident {number} opened: {event.type.value} of {event.host or subject}")
        return
    incident = _without_vain_reset(turn, incident, event, soon)
    # What waited for something else is looked at again with the news.
    turn.put(
        "incidents",
        subject,
        replace(
            incident,
            reports=(*(each for each in incident.reports if not _is_replaced(each, event)), event),
            reported_at=turn.now,
            decide_at=min(incident.decide_at, soon) if incident.reports else soon,
        ),
    )


def _is_replaced(old: Event, new: Event) -> bool:
    """Whether `new` says all that `old` did, or the same of later ranks.

    A job that restarts its ranks in vain reports them for days.
    """

    def whose(event: Event) -> tuple[object, ...]:
        return event.type, event.host, event.run, event.launcher, event.change

    def what(event: Event) -> tuple[object, ...]:
        found = {
            (each.code, each.device, each.cause, each.advice, each.confidence) for each in event.evidence
        }
        return event.attempt, event.ranks, found

    later = (new.is_of_ranks or new.type is EventType.DIAGNOSIS) and old.attempt < new.attempt
    return whose(old) == whose(new) and (later or what(old) == what(new))


def _concerns_next_run(event: Event, host: HostInfo | None) -> bool:
    """What is wrong with a host is wrong for another job of the name too, if that has the host."""
    return not event.is_of_ranks and host is not None and host.workload == event.workload


def _without_vain_reset(turn: Turn, incident: Incident, event: Event, decide_at: float) -> Incident:
    """Ranks that are restarted in place meet on all hosts: without one of them that never ends.

    The ranks of the other hosts fail first, as a rule, and the silence of the host is noticed after that.  A
    launcher that gave up has ended, and its host is missing as one that is lost.
    """
    flight = turn.state.commands.get(incident.command)
    gave_up = event.launcher is LauncherState.GAVE_UP
    lost = gave_up or event.type in (EventType.HOST_HB, EventType.ORCHESTRATOR)
    if not lost or flight is None or flight.command.kind is not CommandKind.IN_JOB_RESET:
        return incident
    turn.put("commands", incident.command, None)
    pay_back(turn, flight.command)
    why = f"the launcher of {event.host} gave up" if gave_up else f"{event.host} is lost"
    turn.notes.append(f"in_job_reset {incident.command} is not waited for: {why}")
    reports = incident.past + incident.reports
    return replace(incident, command="", reports=reports, past=(), decide_at=decide_at)


def pay_back(turn: Turn, command: Command) -> None:
    """Nothing was restarted: the budget gets it back; `fruitless` does not, or this might never end."""
    account = turn.account(command.workload)
    name = "in_job" if command.kind is CommandKind.IN_JOB_RESET else "workload"
    budget = getattr(account, name)
    resets = (CommandKind.IN_JOB_RESET, CommandKind.WORKLOAD_RESET, CommandKind.WORKLOAD_RECREATION)
    if command.kind in resets and budget.spent:
        paid = replace(budget, spent=budget.spent - 1)
        in_job, workload = (paid, account.workload) if name == "in_job" else (account.in_job, paid)
        turn.put("accounts", command.workload, replace(account, in_job=in_job, workload=workload))


def downtime_s(turn: Turn, name: str) -> float:
    """How long a job may be without a step after an action."""
    job, mark = turn.state.workloads.get(name), turn.state.progress.get(name)
    least_s = turn.limits.workload_downtime_threshold_s
    return (job.downtime_threshold_s if job else 0) or still_s(least_s, mark.usual_step_s if mark else 0.0)


def wait_until(turn: Turn, subject: str, until: float, note: str) -> None:
    """The policy is asked again at `until`."""
    turn.settled = True
    incident = turn.state.incidents[subject]
    turn.put("incidents", subject, replace(incident, decide_at=max(until, turn.now + 0.1), note=note))


def note_refusal(turn: Turn, report: EventReport, text: str) -> None:
    turn.notes.append(f"incident {report.incident.id}: {text}")
