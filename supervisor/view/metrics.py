# SPDX-License-Identifier: Apache-2.0
"""The status document in Prometheus' text format.

Labels are names of jobs, kinds and states, never ids of hosts or incidents: the number of time series does
not grow with the fleet's size or its age.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator

from resiliency.prometheus import Metric, Sample, to_text
from supervisor.values import CommandKind, DeviceState
from supervisor.view.status import JobStatus, Status
from supervisor.view.words import STATES

PREFIX = "resiliency_supervisor_"

_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


#: Every family, in the order in which it is written.
METRICS = (
    Metric("info", "gauge", "1; the label is the release of the controller."),
    Metric("epoch", "gauge", "Epoch of the controller; grows with each of its starts."),
    Metric("uptime_seconds", "gauge", "Age of the controller process."),
    Metric("shadow", "gauge", "1 while decisions are noted and no command is given."),
    Metric("frozen", "gauge", "1 while nothing is done, by cause: operator or silence."),
    Metric("log_writable", "gauge", "0 while the event log takes nothing, so that nothing is decided."),
    Metric("part_healthy", "gauge", "0 where the last call from or to a part failed."),
    Metric("part_contact_age_seconds", "gauge", "Since the last call from or to a part that succeeded."),
    Metric("hosts", "gauge", "Hosts by state."),
    Metric("hosts_cordoned", "gauge", "Hosts that no job may be put on."),
    Metric("hosts_silent", "gauge", "Hosts that the sensor waits for longer than it should have to."),
    Metric("hosts_disconnected", "gauge", "Hosts without an open stream to the sensor."),
    Metric("hosts_verdict", "gauge", "Hosts on which no job is put, because of a verdict that holds."),
    Metric(
        "report_age_seconds_max", "gauge", "Age of the oldest last report of a host that works for a job."
    ),
    Metric("spare_floor", "gauge", "Spares that no job may grow into."),
    Metric("cordons_left", "gauge", "Hosts that may be cordoned now."),
    Metric("incidents_open", "gauge", "Open incidents."),
    Metric("incident_age_seconds_max", "gauge", "Age of the oldest open incident."),
    Metric("commands_in_flight", "gauge", "Commands without an outcome, by kind."),
    Metric("job_hosts", "gauge", "Hosts that work for a job."),
    Metric("job_hosts_needed", "gauge", "Hosts that make a job's present size."),
    Metric("job_replicas", "gauge", "Data-parallel replicas of a job."),
    Metric("job_step", "gauge", "Last finished step of a job's present attempt."),
    Metric("job_step_age_seconds", "gauge", "Since a job's last finished step."),
    Metric("job_best_step", "gauge", "Highest finished step of a job."),
    Metric("job_attempt", "gauge", "Attempt of a job's newest step."),
    Metric("job_restarts_left", "gauge", "Restarts that a job has left, by kind: in_job or workload."),
    Metric("job_restarts_limit", "gauge", "Restarts that a job may have at most, by the same kinds."),
    Metric("job_actions_left", "gauge", "Actions that may be taken for a job at once now."),
    Metric("job_fruitless_actions", "gauge", "Actions in a row that brought a job no new best step."),
    Metric("job_incident_open", "gauge", "1 while a job has an open incident."),
    Metric("job_given_up", "gauge", "1 while a verdict holds that nothing more is done for a job."),
    Metric("events_total", "counter", "Events that the controller took, by type."),
    Metric("diagnoses_total", "counter", "Diagnoses that launchers made, by cause."),
    Metric("commands_total", "counter", "Commands that ended, by kind and outcome."),
    Metric("log_errors_total", "counter", "Writes to the event log that failed."),
    Metric("records_total", "counter", "Records written to the event log."),
)


def metrics_text(status: Status) -> str:
    """`status` as one exposition; a gauge of which nothing is known has no sample."""
    counters = tuple(_counters(status))
    known = {metric.name for metric in METRICS}
    others = [
        Metric(name, "counter", "A count of the controller.")
        for name in dict.fromkeys(name for name, _, _ in counters)
        if name not in known
    ]
    return to_text(PREFIX, (*METRICS, *others), (*_fleet(status), *_jobs(status.jobs), *counters))


def _fleet(status: Status) -> Iterator[Sample]:
    def fleet(name: str, value: float | None, **labels: str) -> Sample:
        return name, labels, value

    hosts = status.hosts
    yield fleet("info", 1, release=status.release)
    yield fleet("epoch", status.epoch)
    yield fleet("uptime_seconds", status.uptime_s)
    yield fleet("shadow", status.shadow)
    yield fleet("frozen", bool(status.frozen_by), cause="operator")
    yield fleet("frozen", status.silent, cause="silence")
    yield fleet("log_writable", not status.log_problem)
    for part in status.parts:
        yield fleet("part_healthy", not part.problem, part=part.name)
        yield fleet("part_contact_age_seconds", part.contact_age_s, part=part.name)
    states = Counter(host.state for host in hosts)
    for state in STATES:
        yield fleet("hosts", states[state], state=state.value)
    yield fleet("hosts_cordoned", sum(host.cordoned for host in hosts))
    yield fleet("hosts_silent", sum(host.silent for host in hosts))
    if not any(host.connected is None for host in hosts):
        yield fleet("hosts_disconnected", sum(not host.connected for host in hosts))
    yield fleet("hosts_verdict", sum(bool(host.verdict) for host in hosts))
    at_work = (host for host in hosts if host.workload and host.state is DeviceState.RUNNING)
    ages = (host.report_age_s for host in at_work if host.report_age_s is not None)
    yield fleet("report_age_seconds_max", max(ages, default=None))
    yield fleet("spare_floor", status.spare_floor)
    yield fleet("cordons_left", status.cordons_left)
    open_ages = [incident.age_s for incident in status.incidents if incident.closed_age_s is None]
    yield fleet("incidents_open", len(open_ages))
    yield fleet("incident_age_seconds_max", max(open_ages, default=0))
    under_way = Counter(command.kind for command in status.commands if command.outcome is None)
    for kind in CommandKind:
        yield fleet("commands_in_flight", under_way[kind], kind=kind.value)


def _jobs(jobs: Iterable[JobStatus]) -> Iterator[Sample]:
    for job in jobs:
        label = {"workload": job.workload}
        yield "job_hosts", label, len(job.hosts)
        yield "job_hosts_needed", label, job.hosts_needed
        yield "job_replicas", label, job.replicas
        yield "job_step", label, job.step
        yield "job_step_age_seconds", label, job.step_age_s
        yield "job_best_step", label, job.best_step
        yield "job_attempt", label, job.attempt
        yield "job_restarts_left", {**label, "kind": "in_job"}, job.in_job.left
        yield "job_restarts_left", {**label, "kind": "workload"}, job.restarts.left
        yield "job_restarts_limit", {**label, "kind": "in_job"}, job.in_job.limit
        yield "job_restarts_limit", {**label, "kind": "workload"}, job.restarts.limit
        yield "job_actions_left", label, job.actions_left
        yield "job_fruitless_actions", label, job.fruitless
        yield "job_incident_open", label, bool(job.incident)
        yield "job_given_up", label, bool(job.verdict)


def _counters(status: Status) -> Iterator[Sample]:
    for counter in status.counters:
        # A name that Prometheus refuses would make it refuse the whole page.
        if _NAME.fullmatch(counter.name) and all(_NAME.fullmatch(label.name) for label in counter.labels):
            labels = {label.name: label.value for label in counter.labels}
            yield f"{counter.name}_total", labels, counter.value
