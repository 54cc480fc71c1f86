# SPDX-License-Identifier: Apache-2.0
"""What a daemon knows of the workers of its host: a table without I/O, over a clock that is passed in.

A *reporter* is one connection: a launcher, which speaks for all ranks of the host, or a program that speaks
for one. When its connection ends, what it said stays, and grows old: the sensor decides what silence means.
After `GONE_S` it has long decided, and a reporter that has not come back holds the host no longer. So it is
with a launcher that gave up and says that it ends: its job has not ended, and waits for the supervisor. When
all have said that they end, their last states are told for `ENDED_S` more; then the host is a spare again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from resiliency.launch.health.condition import JobCondition
from resiliency.runtime import Clock
from supervisor.plain import InvalidValue, from_report
from supervisor.transport.errors import Reason, Refused
from supervisor.values import (
    DaemonReport,
    DeviceState,
    EventType,
    Evidence,
    Finding,
    HostInfo,
    LauncherState,
    PodFacts,
    WorkerInfo,
    WorkerReport,
    WorkloadInfo,
    check_condition,
    cut_text,
    host_state,
)

logger = logging.getLogger(__name__)

#: Reporters that have detached and are kept for their last states.
_MOST_ENDED = 64
#: A reporter without a connection whose job has not ended; a living one tries again every few seconds.
GONE_S = 600.0
ENDED_S = 30.0
#: Diagnoses in one report of a launcher, the newest of those that it has made.
_MOST_DIAGNOSES = 8


@dataclass
class Reporter:
    """One launcher or program, and the last that it said."""

    kind: str
    workload: WorkloadInfo
    connected: bool = True
    attempt: int = 0
    launcher: LauncherState = LauncherState.UNKNOWN
    condition: JobCondition | None = None
    workers: tuple[WorkerReport, ...] = ()
    #: What a launcher says about the ends of its attempts; in each of its reports, so that none is lost.
    diagnoses: tuple[Finding, ...] = ()
    #: Why its last report holds a condition or diagnoses that this release does not take.
    ignored: tuple[str, ...] = ()
    #: Monotonic time at which `workers` arrived.
    at: float = 0.0
    #: It has said that it ends, and its job with it, so that its silence means nothing.
    ended: bool = False
    #: Monotonic time at which its connection ended.
    left_at: float = 0.0


@dataclass
class HostWorkers:
    """The table.

    Args:
        host: this host without workers.
        incarnation: of this daemon process.
    """

    host: HostInfo
    incarnation: str
    clock: Clock
    reporters: dict[str, Reporter] = field(default_factory=dict)
    #: Of a job without a launcher: its pod, which speaks where nobody else does (standalone mode).
    pod: PodFacts | None = None
    _pod: Reporter | None = None
    _sequence: int = -1

    def join(self, key: str, kind: str, workload: WorkloadInfo) -> Reporter:
        """A reporter has connected.

        Args:
            key: of the reporter: a launcher's is the same after a reconnection, so that it replaces itself.
        Raises:
            Refused: it cannot report beside those that are connected.
        """
        if kind not in ("launcher", "worker"):
            raise Refused(f"kind must be launcher or worker, found {kind!r:.40}.", reason=Reason.INVALID)
        for other_key, other in list(self.reporters.items()):
            if not other.connected or other_key == key:
                continue
            if other.workload.workload != workload.workload:
                raise Refused(
                    f"this host works for {other.workload.workload!r}, whose {other.kind} is connected; "
                    f"{workload.workload!r} must wait for its end.",
                    reason=Reason.INVALID,
                )
            if "launcher" in (kind, other.kind):
                raise Refused(
                    f"a {other.kind} of {workload.workload!r} is connected already: a host has one launcher, "
                    "or programs that each report for themselves.",
                    reason=Reason.INVALID,
                )
        for old in [old for old, other in self.reporters.items() if not other.connected]:
            # A new start of the host's part of a job: what the one before said is of no interest any more.
            other = self.reporters[old]
            if old != key and (
                other.workload.workload != workload.workload or kind == "launcher" or other.kind == "launcher"
            ):
                del self.reporters[old]
        while len(self.reporters) > max(_MOST_ENDED, self.host.workers_per_host):
            self.reporters.pop(next(iter(self.reporters)))
        known = self.reporters.get(key)
        if known is None or known.kind != kind:
            known = self.reporters[key] = Reporter(kind, workload)
        known.connected, known.ended, known.workload = True, False, workload
        return known

    def take_pod(self, pod: PodFacts | None, workload: WorkloadInfo | None) -> None:
        """The orchestrator's word on this host's pod, and what its annotations say; None: it has none."""
        if pod is not None and (self.pod is None or self.pod.id != pod.id):
            # What programs of an earlier pod said is of no interest any more.
            self.reporters = {key: one for key, one in self.reporters.items() if one.connected}
        self.pod, self._pod = pod, None
        if pod is None or workload is None:
            return
        # A pod that failed may have another in its place soon: its workers are silent from now on.
        state = DeviceState.COMPLETE if pod.state is DeviceState.COMPLETE else DeviceState.RUNNING
        count = 0 if pod.state is DeviceState.SPARE else self.host.workers_per_host
        workers = tuple(
            WorkerReport(
                local_rank=rank, global_rank=pod.index * count + rank, state=state, heartbeat_age_s=0.0
            )
            for rank in range(count)
        )
        self._pod = Reporter("pod", workload, workers=workers, at=self.clock.monotonic())

    def _speakers(self) -> list[Reporter]:
        """Reporters; without any the pod, whose workers live as long as it runs."""
        now = self.clock.monotonic()
        self.reporters = {
            key: one
            for key, one in self.reporters.items()
            if one.connected or one.ended or now - one.left_at < GONE_S
        }
        if all(one.ended and now - one.left_at >= ENDED_S for one in self.reporters.values()):
            self.reporters = {}
        if self.reporters or self._pod is None or self.pod is None:
            return list(self.reporters.values())
        if self.pod.state is DeviceState.RUNNING:
            self._pod.at = self.clock.monotonic()
        return [self._pod]

    def update(self, reporter: Reporter, said: Mapping[str, Any]) -> None:
        """Take in one report.

        Raises:
            InvalidValue, Refused: it breaks the rules; what was known stays.
        """
        attempt = said.get("attempt", 0)
        workers = said.get("workers", [])
        if not isinstance(attempt, int) or not 0 <= attempt < 2**63:
            raise InvalidValue(f"attempt must be 0 or more, found {attempt!r:.40}.")
        if not isinstance(workers, list) or len(workers) > self.host.workers_per_host:
            raise Refused(
                f"a report must list at most {self.host.workers_per_host} workers (--workers_per_host), "
                f"found {len(workers) if isinstance(workers, list) else workers!r:.40}.",
                reason=Reason.INVALID,
            )
        try:
            launcher = LauncherState(said.get("launcher", LauncherState.UNKNOWN.value))
        except ValueError:
            allowed = ", ".join(state.value for state in LauncherState)
            raise InvalidValue(
                f"launcher must be one of {allowed}, found {said.get('launcher')!r:.40}."
            ) from None
        workload = reporter.workload
        if "run" in said:
            of_run = {"run": said["run"], "first_attempt": said.get("first_attempt", 0)}
            workload = WorkloadInfo.from_dict({**workload.to_dict(), **of_run})
        values = tuple(from_report(WorkerReport, worker) for worker in workers)
        ranks = [worker.local_rank for worker in values]
        for key, other in list(self.reporters.items()):
            # A program that was started again speaks for its rank from now on.
            if not other.connected and any(worker.local_rank in ranks for worker in other.workers):
                del self.reporters[key]
        others = [other for other in self.reporters.values() if other is not reporter]
        taken = {worker.local_rank for other in others for worker in other.workers}
        if len(set(ranks)) < len(ranks) or (reporter.kind == "worker" and taken & set(ranks)):
            raise Refused(f"a local rank is reported twice: {sorted(ranks)}.", reason=Reason.INVALID)
        if len(taken | set(ranks)) > self.host.workers_per_host:
            raise Refused(
                f"more than {self.host.workers_per_host} workers report (--workers_per_host).",
                reason=Reason.INVALID,
            )
        reporter.workload = workload
        reporter.attempt, reporter.launcher, reporter.workers = attempt, launcher, values
        self._take_words(reporter, said)
        reporter.at = self.clock.monotonic()

    def _take_words(self, reporter: Reporter, said: Mapping[str, Any]) -> None:
        """A condition or diagnosis with unknown words is named, once, and the rest of the report counts."""
        found: list[Finding] = []
        ignored: list[str] = []
        reporter.condition = None
        try:
            reporter.condition = _condition(said.get("condition"), reporter.launcher)
        except InvalidValue as error:
            ignored.append(f"condition: {error}")
        diagnoses = said.get("diagnoses")
        for one in diagnoses[-_MOST_DIAGNOSES:] if isinstance(diagnoses, list) else ():
            try:
                found.append(_diagnosis(one))
            except InvalidValue as error:
                ignored.append(f"diagnosis: {error}")
        for sentence in dict.fromkeys(ignored):
            if sentence not in reporter.ignored:
                logger.warning("launcher report taken without its %s", sentence)
        reporter.diagnoses, reporter.ignored = tuple(found), tuple(ignored)

    def leave(self, reporter: Reporter, *, ended: bool) -> None:
        """A connection is gone; `ended` says that the reporter had announced it."""
        reporter.connected = False
        reporter.ended = ended and reporter.launcher is not LauncherState.GAVE_UP
        reporter.left_at = self.clock.monotonic()
        if ended:
            final = (DeviceState.COMPLETE, DeviceState.FAILED)
            reporter.workers = tuple(worker for worker in reporter.workers if worker.state in final)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is there that ranks of a job could belong to."""
        pod_runs = self.pod is not None and self.pod.state is DeviceState.RUNNING
        return not pod_runs and not any(one.connected for one in self.reporters.values())

    def launcher_key(self) -> str | None:
        """The launcher that can take commands."""
        return next(
            (key for key, one in self.reporters.items() if one.connected and one.kind == "launcher"), None
        )

    @property
    def workload(self) -> WorkloadInfo | None:
        """Of the reporters; None before the first, and when all have said that they end."""
        active = [one for one in self._speakers() if not one.ended]
        if not active:
            return None
        last = active[-1]
        if last.kind == "pod":  # it tells no steps, so that their absence means nothing
            return replace(last.workload, downtime_threshold_s=0.0)
        said = self._pod.workload if self._pod is not None else None
        if said is not None and last.kind == "worker" and said.workload == last.workload.workload:
            return said  # programs know its name only
        return last.workload

    @property
    def reported_workload(self) -> WorkloadInfo | None:
        """As `workload`; None from a reporter that is away: its job may have another size by now."""
        here = any(one.connected for one in self._speakers() if not one.ended)
        return self.workload if here else None

    def host_info(self) -> HostInfo:
        """This host with its workers, as it is now."""
        workload = self.workload
        workers = tuple(
            WorkerInfo(
                id=f"{one.workload.workload}/{worker.global_rank}",
                local_rank=worker.local_rank,
                global_rank=worker.global_rank,
                state=worker.state,
            )
            for one in self._speakers()
            for worker in one.workers
        )
        states = tuple(worker.state for worker in workers)
        return replace(
            self.host,
            workers=workers,
            workload=workload.workload if workload else "",
            state=host_state(states, self.host.workers_per_host),
        )

    def report(self) -> DaemonReport:
        """All that is known, with ages as of now."""
        self._sequence += 1
        return self._report(self._sequence)

    def peek(self) -> DaemonReport:
        """The same for the second path, which has no sequence of its own."""
        return self._report(max(self._sequence, 0))

    def _report(self, sequence: int) -> DaemonReport:
        now = self.clock.monotonic()
        ordered = self._speakers()
        launchers = [one for one in ordered if one.kind == "launcher"]
        return DaemonReport(
            host=self.host.id,
            incarnation=self.incarnation,
            sequence=sequence,
            attempt=max((one.attempt for one in ordered), default=0),
            launcher=launchers[-1].launcher if launchers else LauncherState.UNKNOWN,
            run=launchers[-1].workload.run if launchers else "",
            condition=_older_condition(launchers[-1], now) if launchers else None,
            workers=tuple(_older(worker, now - one.at) for one in ordered for worker in one.workers),
            findings=tuple(
                _older_finding(found, now - one.at) for one in launchers for found in one.diagnoses
            ),
        )


def _condition(said: Any, launcher: LauncherState) -> JobCondition | None:
    """The condition of its job that a launcher reports; None where it reports none.

    Raises:
        InvalidValue: a field is missing, of another type or out of its range, or a word is not known.
    """
    if said is None:
        return None
    condition = from_report(JobCondition, said)
    check_condition(condition, launcher, condition)
    return condition


def _older_condition(reporter: Reporter, now: float) -> JobCondition | None:
    known = reporter.condition
    if known is None or known.still_s is None:
        return known
    return replace(known, still_s=known.still_s + max(now - reporter.at, 0.0))


def _diagnosis(said: Any) -> Finding:
    """A diagnosis of a launcher, by the names that its report has.

    Raises:
        InvalidValue: a field is missing or of another type, or a word is not known.
    """
    if not isinstance(said, dict):
        raise InvalidValue(f"a diagnosis must be a table of fields, found {said!r:.40}.")
    words = {**said, "text": cut_text(str(said.get("text", ""))), "witness": "launcher"}
    evidence = from_report(Evidence, words).to_dict()
    return from_report(Finding, {**said, "type": EventType.DIAGNOSIS.value, "evidence": evidence})


def _older_finding(found: Finding, seconds: float) -> Finding:
    age_s = found.evidence.age_s + max(seconds, 0.0)
    return replace(found, evidence=replace(found.evidence, age_s=age_s))


def _older(worker: WorkerReport, seconds: float) -> WorkerReport:
    def later(age_s: float | None) -> float | None:
        return None if age_s is None else age_s + max(seconds, 0.0)

    return replace(
        worker,
        heartbeat_age_s=later(worker.heartbeat_age_s),
        monitor_age_s=later(worker.monitor_age_s),
        step_age_s=later(worker.step_age_s),
    )
