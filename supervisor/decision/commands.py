# SPDX-License-Identifier: Apache-2.0
"""Commands: sent, charged to their job, and what their outcomes change."""

from __future__ import annotations

from dataclasses import replace

from supervisor.decision.incidents import downtime_s, is_still_lost, open_incident, pay_back
from supervisor.decision.state import MOST_EPOCH, Account, Cordon, Flight, Incident
from supervisor.decision.turn import Turn
from supervisor.decision.verdicts import condemn, forgive, lift_guess
from supervisor.policy.budget import backoff_s
from supervisor.values import (
    Change,
    Command,
    CommandKind,
    Event,
    EventType,
    Evidence,
    LauncherState,
    Outcome,
    OutcomeStatus,
    Request,
)

#: Owners of cordons that are not the supervisor's: one asked for it, the cluster or its tools made the other.
PERSON, ORCHESTRATOR = "a person", "the orchestrator"
#: Commands that close or open a host; the newest one for it counts.
CORDONS = (CommandKind.CORDON_HOST, CommandKind.DRAIN_HOST, CommandKind.UNCORDON_HOST)


def obey(turn: Turn, event: Event) -> None:
    """A person's request goes around the policy and its guards, and is logged with who asked."""
    fleet = turn.view.fleet
    who = event.evidence[0].text.replace(" ", "-")[:64] or "operator"
    turn.notes.append(f"{event.request.value if event.request else ''} {event.host} asked for by {who}")
    if event.request is Request.FREEZE:
        turn.put("fleet", "", replace(fleet, frozen_by=who))
    elif event.request is Request.THAW:
        turn.put("fleet", "", replace(fleet, frozen_by=""))
        if f"job:{event.workload}" in turn.state.verdicts:
            turn.put("verdicts", f"job:{event.workload}", None)
            turn.put("accounts", event.workload, Account(quiet_since=turn.now))
            incident = turn.state.incidents.get(event.workload)
            if incident is not None:  # it waits for the end of the verdict
                tries = min(incident.stuck, 1)
                turn.put("incidents", event.workload, replace(incident, decide_at=turn.now, stuck=tries))
    else:
        kinds = {
            Request.CORDON: CommandKind.CORDON_HOST,
            Request.UNCORDON: CommandKind.UNCORDON_HOST,
            Request.DRAIN: CommandKind.DRAIN_HOST,
        }
        assert event.request is not None
        host = turn.state.hosts.get(event.host)
        # The host's launcher leaves the job in order, and nobody else will say that the job lacks a host.
        workload = host.workload if host is not None and event.request is Request.DRAIN else ""
        send_command(turn, kinds[event.request], host=event.host, workload=workload)


def take_outcome(turn: Turn, outcome: Outcome) -> None:
    """A command has ended: its incident waits for a step now, or is decided upon again."""
    flight = turn.state.commands.get(outcome.command)
    if flight is None:
        return
    command, status = flight.command, outcome.status
    if status is OutcomeStatus.FENCED and outcome.epoch <= turn.epoch:
        return  # an answer to an earlier epoch of this log; the command was sent again with this one
    turn.put("commands", outcome.command, None)
    if status is OutcomeStatus.FENCED:
        note_fence(turn, command, outcome)
    else:
        turn.notes.append(f"{command.kind.value} {command.id} {status.value}: {outcome.text}")
    if command.kind in CORDONS:
        take_cordon_outcome(turn, command, status)
    elif status is OutcomeStatus.DONE:
        take_effect(turn, command, outcome.spare)
    elif status is OutcomeStatus.WITHDRAWN and command.kind.restarts:
        pay_back(turn, command)
    elif status is OutcomeStatus.FENCED:
        take_back(turn, command)
    elif command.kind is CommandKind.HOT_SWAP and status is not OutcomeStatus.WITHDRAWN and outcome.spare:
        # Another spare next time.
        condemn(turn, f"host:{outcome.spare}", "swap failed", (command.id,), turn.limits.suspicion_s)
    if command.spare and status is not OutcomeStatus.DONE:
        lift_guess(turn, command.host)  # the host stays in its job
    if command.kind is CommandKind.CHECK_HOST and status is not OutcomeStatus.DONE:
        known = turn.state.checks.get(command.host)
        turn.put("checks", command.host, replace(known, evidence=()) if known is not None else None)
    if command.kind is CommandKind.DRAIN_HOST and command.workload and status is OutcomeStatus.DONE:
        open_incident(turn, drained(command), subject=command.workload)
    incident = turn.state.incidents.get(command.workload)
    if incident is not None and incident.command == command.id:
        turn.put("incidents", command.workload, _go_on(turn, incident, command, outcome))


def _go_on(turn: Turn, incident: Incident, command: Command, outcome: Outcome) -> Incident | None:
    """The incident after its action has ended; None where nothing is wrong any more."""
    status = outcome.status
    if command.kind is CommandKind.SCALE_UP:
        # It was opened for room to grow: what is wrong was reported since.
        left = _still_wrong(incident, command) if status is OutcomeStatus.DONE else incident.reports
        later = replace(incident, command="", reports=left, past=(), decide_at=turn.now)
        return later if left else None
    if status is OutcomeStatus.DONE:
        return _wait_for_step(turn, incident, command, left=_still_wrong(incident, command))
    if status is OutcomeStatus.WITHDRAWN:
        # A last step may have been read late: the job still lacks the hosts and ranks that it lost.
        lost = tuple(report for report in incident.past if is_still_lost(turn, report, command.workload))
        past = tuple(report for report in incident.past if report not in lost)
        incident = replace(incident, past=past, attempt=-1)
        return _wait_for_step(turn, incident, None, left=lost + incident.reports)
    fenced = status is OutcomeStatus.FENCED
    vain = command.kind is CommandKind.HOT_SWAP and not (fenced or outcome.spare)
    return replace(
        incident,
        command="",
        reports=incident.past + incident.reports,
        past=(),
        decide_at=turn.now + (turn.limits.backoff_s if fenced else 0.0),
        not_swapped=(*incident.not_swapped, *([command.host] * vain)),
    )


def _wait_for_step(
    turn: Turn, incident: Incident, done: Command | None, *, left: tuple[Event, ...]
) -> Incident:
    """What is left is decided upon soon, and the rest again where no step comes in time."""
    return replace(
        incident,
        command="",
        reports=left,
        done_at=turn.now,
        decide_at=turn.now + (turn.limits.coalesce_s if left else downtime_s(turn, incident.subject)),
        relaunched=done is not None and done.kind.relaunches,
    )


def _still_wrong(incident: Incident, command: Command) -> tuple[Event, ...]:
    """Of what was reported while `command` was under way, what it did not mend.

    Ranks were restarted with the others, but for those of an attempt that it began; hosts are still lost, and
    launchers that gave up were started again only by an action that starts them all.
    """
    return tuple(
        report
        for report in incident.reports
        if report.attempt > incident.attempt
        or (report.type is not EventType.WORKER_HB and report.host not in incident.handled)
        or (not report.is_of_ranks and report.host in incident.no_spare)
        or (report.asks_for_another_host and report.host != command.host)
        or (
            report.launcher is LauncherState.GAVE_UP
            and report.host != command.host
            and not command.kind.relaunches
        )
    )


def note_fence(turn: Turn, command: Command, outcome: Outcome) -> None:
    """A higher epoch was seen where the command was to have its effect: the command has ended.

    This controller may have been deposed, so it does not raise its own epoch: of two controllers with a log
    each, none would be fenced.  The next start of this log begins above.
    """
    fleet = turn.view.fleet
    if fleet.fenced_by < outcome.epoch < MOST_EPOCH:
        turn.put("fleet", "", replace(fleet, fenced_by=outcome.epoch))
    turn.notes.append(
        f"{command.kind.value} {command.id} fenced: epoch {outcome.epoch} was seen, this controller has epoch"
        f" {turn.epoch}; end the other controller, or start this one again if there is none"
    )


def take_back(turn: Turn, command: Command) -> None:
    """A command that was fenced had no effect: no verdict rests on it, and no spare is blamed for it.

    Its budget stays spent: hosts that refuse a reset in place must not keep the job on that rung.
    """
    account = turn.account(command.workload)
    if command.kind.restarts and account.fruitless:
        turn.put("accounts", command.workload, replace(account, fruitless=account.fruitless - 1))


def take_cordon_outcome(turn: Turn, command: Command, status: OutcomeStatus) -> None:
    """A host is closed or open now, or the supervisor tries it again later; a person sees what failed."""
    host, by = turn.state.hosts.get(command.host), PERSON if command.is_of_person else ""
    opens, blocks = command.kind is CommandKind.UNCORDON_HOST, host.blocks if host is not None else ()
    row = turn.state.cordons.get(command.host) or Cordon(host=command.host, at=turn.now, domains=blocks)
    done = status is OutcomeStatus.DONE
    if (row.by and not by) or (by and not done):
        return  # it is closed by another's word since, or a person's request failed
    if done and host is not None:
        turn.put("hosts", host.id, replace(host, cordoned=not opens))
    if done and opens and (by or host is None):
        forgive(turn, command.host)
    elif done:
        turn.put("cordons", command.host, replace(row, by=by, tries=0, retry_at=0.0))
    elif status is not OutcomeStatus.WITHDRAWN:
        wait_s = backoff_s(row.tries + 1, base_s=turn.limits.backoff_s, limit_s=turn.limits.backoff_limit_s)
        turn.put("cordons", row.host, replace(row, tries=row.tries + 1, retry_at=turn.now + wait_s))
    elif opens:  # the orchestrator knows it for another's
        turn.put("cordons", row.host, replace(row, by=ORCHESTRATOR))
    else:  # nothing speaks for it any more; a swap may have closed the host
        forgive(turn, row.host)
        turn.put("cordons", row.host, row if host is not None and host.cordoned else None)


def take_effect(turn: Turn, command: Command, took: str = "") -> None:
    """What is known of hosts and jobs follows what was done; their daemons say the rest later.

    Args:
        took: the host that took the place of another, where the command names a spare.
    """
    host, job = turn.state.hosts.get(command.host), turn.state.workloads.get(command.workload)
    if host is not None and (command.spare or command.kind is CommandKind.SCALE_DOWN):
        turn.put("hosts", host.id, replace(host, workload=""))
    if command.spare and took in turn.state.hosts:
        spare = turn.state.hosts[took]
        turn.put("hosts", spare.id, replace(spare, workload=command.workload))
    if job is not None and command.replicas is not None:
        turn.put("workloads", job.workload, replace(job, replicas=command.replicas))


def send_command(
    turn: Turn,
    kind: CommandKind,
    *,
    workload: str = "",
    host: str = "",
    spare: str = "",
    replicas: int | None = None,
    incident: str = "",
    evidence: tuple[str, ...] = (),
    deadline_s: float | None = None,
    why: str = "",
) -> str:
    """Make a command and put it among those under way; in a shadow it is noted only.  Returns its id.

    Args:
        why: of one that neither an incident nor a person has asked for.
    """
    command = Command(
        epoch=turn.epoch,
        id=turn.next_id("commands", "c"),
        kind=kind,
        workload=workload,
        host=host,
        spare=spare,
        replicas=replicas,
        incident=incident,
        evidence=evidence,
        deadline_s=deadline_s or turn.limits.container_termination_threshold_s,
        run=job.run if (job := turn.state.workloads.get(workload)) is not None else "",
    )
    target = " ".join(part for part in (workload, host, spare and f"by {spare}") if part)
    reason = why or f"for {incident or 'a person'}"
    if turn.shadow:
        turn.notes.append(f"shadow: {kind.value} of {target} would be done {reason}")
        return command.id
    turn.notes.append(f"{kind.value} {command.id} of {target} {reason}")
    turn.put("commands", command.id, Flight(command=command, at=turn.now))
    turn.commands.append(command)
    return command.id


def charge(turn: Turn, name: str, kind: CommandKind) -> None:
    """Take an action from the job's budgets and bucket."""
    if not kind.restarts:
        return
    account, best = turn.account(name), turn.view.best_step(name)
    per = turn.limits.steps_per_restart
    in_job, workload = account.in_job.at(best, per), account.workload.at(best, per)
    turn.put(
        "accounts",
        name,
        replace(
            account,
            in_job=in_job.spend() if kind is CommandKind.IN_JOB_RESET else in_job,
            workload=workload.spend()
            if kind in (CommandKind.WORKLOAD_RESET, CommandKind.WORKLOAD_RECREATION)
            else workload,
            bucket=account.bucket.take(turn.now, period_s=turn.limits.action_period_s),
            fruitless=1 if best > account.best or not account.fruitless else account.fruitless + 1,
            best=best,
            acted_at=turn.now,
        ),
    )


def drained(command: Command) -> Event:
    """What the controller knows itself: the job of `command` has one host less."""
    evidence = Evidence(id=f"{command.id}/drained", witness="controller", text="a person drained it")
    return Event(
        id=evidence.id,
        type=EventType.ORCHESTRATOR,
        evidence=(evidence,),
        workload=command.workload,
        host=command.host,
        change=Change.GONE,
    )
