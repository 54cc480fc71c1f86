# SPDX-License-Identifier: Apache-2.0
"""The status document out of the controller's state: a pure function of one moment."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from resiliency import __version__
from supervisor.decision.diagnoses import gravest_diagnosis
from supervisor.decision.guards import View
from supervisor.decision.state import Diagnosed, Incident, State
from supervisor.detection import HostSight
from supervisor.parts.journal import Journal
from supervisor.parts.tasks import Contact
from supervisor.policy.budget import Budget
from supervisor.policy.thresholds import Thresholds
from supervisor.values import DeviceState, Event, HostInfo, LauncherState, WorkloadInfo
from supervisor.view.status import (
    BudgetStatus,
    CommandStatus,
    CounterStatus,
    DiagnosisStatus,
    EvidenceStatus,
    HostStatus,
    IncidentStatus,
    JobStatus,
    LabelStatus,
    NoteStatus,
    PartStatus,
    ReportStatus,
    SpanStatus,
    Status,
    VerdictStatus,
    WorkerStatus,
)

#: Notes in one document; the history has more.
DECISIONS = 50


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What a status says about the process itself and its neighbours.

    Attributes:
        sights: the sensor's view by host; None where it could not be asked.
        counters: value by name and labels.
    """

    epoch: int
    uptime_s: float
    shadow: bool
    log_problem: str
    parts: tuple[Contact, ...]
    counters: Mapping[tuple[str, tuple[tuple[str, str], ...]], int]
    sights: Mapping[str, HostSight] | None


def find_host(state: State, name: str) -> HostInfo | None:
    """By its id, else the one with this name that was registered last."""
    named = [host for host in state.hosts.values() if host.name == name]
    return state.hosts.get(name) or (named[-1] if named else None)


def make_status(
    state: State, now: float, limits: Thresholds, journal: Journal, around: Surroundings
) -> Status:
    """The document at `now` of the log's clock.  Seconds for the largest fleets, so in any thread: nothing
    that is given may change meanwhile."""
    view = View(state=state, now=now, limits=limits)
    fleet = view.fleet
    window = [
        mark for mark in state.cordons.values() if now - mark.at < limits.cordon_window_s and not mark.by
    ]
    working: dict[str, list[str]] = defaultdict(list)
    for host in state.hosts.values():
        if host.state is not DeviceState.FAILED:
            working[host.workload].append(host.id)
    return Status(
        release=__version__,
        epoch=around.epoch,
        uptime_s=around.uptime_s,
        shadow=around.shadow,
        frozen=fleet.silent or bool(fleet.frozen_by),
        frozen_by=fleet.frozen_by,
        silent=fleet.silent,
        spare_floor=limits.spare_floor,
        cordons_left=max(0, limits.max_cordons - len(window)),
        max_cordons=limits.max_cordons,
        log_problem=around.log_problem,
        fenced_by=fleet.fenced_by if fleet.fenced_by > around.epoch else 0,
        parts=tuple(
            PartStatus(name=part.name, address=part.address, contact_age_s=part.age_s, problem=part.problem)
            for part in around.parts
        ),
        hosts=tuple(_host(host, view, around.sights) for _, host in sorted(state.hosts.items())),
        jobs=tuple(_jobs(view, working, around.sights or {})),
        incidents=tuple(_incidents(view, journal)),
        commands=tuple(_commands(view, journal)),
        verdicts=tuple(
            VerdictStatus(
                subject=key,
                cause=verdict.cause,
                text=verdict.text,
                evidence=verdict.evidence,
                age_s=_age(now, verdict.at),
                expires_s=max(0.0, verdict.expires_at - now),
            )
            for key, verdict in state.verdicts.items()
            if verdict.holds(now)
        ),
        decisions=tuple(
            NoteStatus(age_s=_age(now, at), text=text)
            for at, text in list(journal.notes)[: -DECISIONS - 1 : -1]
        ),
        counters=tuple(
            CounterStatus(
                name=name,
                value=value,
                labels=tuple(LabelStatus(name=label, value=text) for label, text in labels),
            )
            for (name, labels), value in sorted(around.counters.items())
        ),
    )


def _age(now: float, at: float) -> float:
    return max(0.0, now - at)


def _host(host: HostInfo, view: View, sights: Mapping[str, HostSight] | None) -> HostStatus:
    sight = sights.get(host.id) if sights is not None else None
    verdict = view.state.verdicts.get(f"host:{host.id}")
    steps = dict(sight.steps) if sight else {}
    return HostStatus(
        id=host.id,
        name=host.name,
        state=host.state,
        address=host.address,
        workload=host.workload,
        workers_per_host=host.workers_per_host,
        domains=host.domains,
        cordoned=host.cordoned,
        connected=None if sights is None else sight is not None and sight.connected,
        report_age_s=sight.age_s if sight else None,
        silent=sight.silent if sight else False,
        attempt=sight.attempt if sight else 0,
        launcher=sight.launcher if sight else LauncherState.UNKNOWN,
        workers=tuple(
            WorkerStatus(
                global_rank=worker.global_rank,
                local_rank=worker.local_rank,
                state=worker.state,
                step=steps.get(worker.global_rank),
            )
            for worker in host.workers
        ),
        verdict=(verdict.text or verdict.cause) if verdict and verdict.holds(view.now) else "",
        diagnosis=_diagnosis(view.state.diagnoses.get(host.id), view.now),
    )


def _diagnosis(row: Diagnosed | None, now: float) -> DiagnosisStatus | None:
    if row is None:
        return None
    found = row.event.evidence[0]
    return DiagnosisStatus(
        host=row.event.host,
        attempt=row.event.attempt,
        cause=found.cause,
        advice=found.advice,
        confidence=found.confidence,
        ranks=row.event.ranks,
        text=found.text,
        age_s=_age(now, row.at),
    )


def _jobs(
    view: View, working: Mapping[str, list[str]], sights: Mapping[str, HostSight]
) -> Iterator[JobStatus]:
    for name, job in sorted(view.state.workloads.items()):
        yield _job(job, sorted(working[name]), view, sights)


def _job(job: WorkloadInfo, hosts: list[str], view: View, sights: Mapping[str, HostSight]) -> JobStatus:
    name, limits = job.workload, view.limits
    account, mark = view.account(name), view.state.progress.get(name)
    verdict = view.state.verdicts.get(f"job:{name}")
    incident = view.state.incidents.get(name)
    return JobStatus(
        workload=name,
        job=job.job,
        container=job.container,
        replicas=job.replicas,
        min_replicas=job.min_replicas,
        max_replicas=job.max_replicas,
        nodes_per_replica=job.nodes_per_replica,
        scaling=job.scaling,
        hosts=tuple(hosts),
        hosts_needed=job.hosts,
        step=mark.step if mark else None,
        step_age_s=_age(view.now, mark.at) if mark else None,
        best_step=mark.best if mark else 0,
        attempt=mark.attempt if mark else 0,
        in_job=_budget(account.in_job, job.max_in_job_restarts, view, name),
        restarts=_budget(account.workload, job.max_workload_restarts, view, name),
        actions_left=account.bucket.left(
            view.now, capacity=limits.actions_at_once, period_s=limits.action_period_s
        ),
        actions_at_once=limits.actions_at_once,
        fruitless=account.fruitless,
        next_action_s=max(0.0, view.next_action_at(name, repeated=True) - view.now),
        incident=incident.id if incident else "",
        verdict=(verdict.text or verdict.cause) if verdict and verdict.holds(view.now) else "",
        # One host asks the others, and names ranks of them.
        condition=max((sights[name].condition for name in hosts if name in sights), key=len, default=""),
        diagnosis=_diagnosis(gravest_diagnosis(view.state, name), view.now),
    )


def _budget(budget: Budget, limit: int, view: View, workload: str) -> BudgetStatus:
    per = view.limits.steps_per_restart
    left = budget.at(view.best_step(workload), per).left(limit)
    return BudgetStatus(left=left, limit=limit, steps_per_restart=per)


def _incidents(view: View, journal: Journal) -> Iterable[IncidentStatus]:
    for incident in sorted(view.state.incidents.values(), key=lambda one: -one.opened_at):
        yield _incident(incident, None, view, journal)
    closed = [past for past in journal.incidents.values() if past.closed_at is not None]
    for past in sorted(closed, key=lambda past: -(past.closed_at or 0.0)):
        yield _incident(past.incident, past.closed_at, view, journal)


def _incident(incident: Incident, closed_at: float | None, view: View, journal: Journal) -> IncidentStatus:
    waits = closed_at is None and not incident.command
    return IncidentStatus(
        id=incident.id,
        subject=incident.subject,
        age_s=_age(view.now, incident.opened_at),
        closed_age_s=None if closed_at is None else _age(view.now, closed_at),
        reports=tuple(
            _report(event, acted_on)
            for events, acted_on in ((incident.past, True), (incident.reports, False))
            for event in events
        ),
        command=incident.command if closed_at is None else "",
        actions=incident.actions,
        note=incident.note or ("waits for a spare" if incident.no_spare else ""),
        next_look_s=max(0.0, incident.decide_at - view.now) if waits else None,
        spans=tuple(
            SpanStatus(
                name=span.name,
                age_s=_age(view.now, span.begin),
                seconds=None if span.end is None else max(0.0, span.end - span.begin),
            )
            for span in journal.spans(incident, closed_at)
        ),
    )


def _report(event: Event, acted_on: bool) -> ReportStatus:
    return ReportStatus(
        event=event.id,
        type=event.type,
        host=event.host,
        ranks=event.ranks,
        acted_on=acted_on,
        cause=event.evidence[0].cause,
        evidence=tuple(
            EvidenceStatus(id=one.id, witness=one.witness, text=one.text, code=one.code, device=one.device)
            for one in event.evidence
        ),
    )


def _commands(view: View, journal: Journal) -> Iterable[CommandStatus]:
    under_way = [(flight.command, flight.at, None, None) for flight in view.state.commands.values()]
    ended = [
        (past.command, past.at, past.ended_at, past.outcome)
        for past in journal.commands.values()
        if past.ended_at is not None
    ]
    for group in (under_way, ended):
        for command, at, ended_at, outcome in sorted(group, key=lambda one: -one[1]):
            yield CommandStatus(
                id=command.id,
                kind=command.kind,
                workload=command.workload,
                host=command.host,
                spare=command.spare,
                replicas=command.replicas,
                incident=command.incident,
                evidence=command.evidence,
                age_s=_age(view.now, at),
                outcome=outcome.status if outcome else None,
                text=outcome.text if outcome else "",
                seconds=None if ended_at is None else _age(ended_at, at),
            )
