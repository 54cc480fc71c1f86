# SPDX-License-Identifier: Apache-2.0
"""The sensor's logic: a failure detector without I/O, fed with messages and time.

It only detects, and does so once: each condition (this host is lost, these ranks are silent, this job hangs)
is one event from its beginning to its end, with the evidence that it was concluded from; when it ends, its
evidence is withdrawn, and `holds` says so to an actuator that is about to act upon it.

Two things it never does.  It never trusts a clock of others: ages are counted on from the moment of
arrival.  And it never takes its own absence for theirs: time that it did not look is no time for anybody
(`_pass_time`), so all deadlines move by what it was late.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, replace

from supervisor.policy.silence import is_correlated
from supervisor.policy.thresholds import Thresholds
from supervisor.values import (
    Change,
    Command,
    DaemonReport,
    DeviceState,
    Event,
    EventType,
    Evidence,
    HostInfo,
    LauncherState,
    Progress,
    Silence,
    WorkloadInfo,
    host_state,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """`host` is to be looked at by a second path; the answer goes to `Detector.witness_answered`."""

    host: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Poll:
    """The daemon of `host` should report now: what it said last may be a period old."""

    host: str


Output = Event | HostInfo | WorkloadInfo | Progress | Silence | Probe | Poll

#: Events that are no condition (an Xid, a change of a node) are repeated that long in a snapshot.
_RECENT_S = 600.0
#: Earlier daemons of one host whose late reports are told apart from the present one's.
_EARLIER = 64
#: Hosts of a job that are asked where it is; one that answers is enough.
_POLLED = 4
#: Findings and withdrawn evidence that are remembered: memory has a bound, daemons have none.
_REMEMBERED = 10_000


class _Host:
    """What the detector knows of one host; all times are its own effective time."""

    __slots__ = (
        "attempt",
        "blind",
        "connected",
        "earlier",
        "failed",
        "heard",
        "incarnation",
        "info",
        "launcher",
        "lost",
        "probed_at",
        "scheduled",
        "seen_alive",
        "sequence",
        "states",
        "steps",
    )

    def __init__(self, info: HostInfo, now: float) -> None:
        self.info = info
        self.heard = now
        self.connected = True
        self.lost = False
        self.blind = False  # its daemon is gone, the host is not
        self.probed_at = -1e18  # when a second witness was asked last
        self.seen_alive = -1e18  # when it saw the host last
        self.scheduled = False
        self.incarnation = ""
        self.earlier: set[str] = set()
        self.sequence = -1
        self.attempt = 0
        self.launcher = LauncherState.UNKNOWN
        self.states: dict[int, DeviceState] = {}  # by local rank
        self.failed: set[int] = set()
        self.steps: dict[int, int] = {}  # by global rank


class _Job:
    __slots__ = (
        "answered",
        "attempt",
        "dirty",
        "hang_reported",
        "hosts",
        "info",
        "offered",
        "step",
        "step_at",
        "stuck_since",
        "surely_at",
    )

    def __init__(self, info: WorkloadInfo, now: float) -> None:
        self.info = info
        self.hosts: set[str] = set()
        self.attempt = 0
        self.step: int | None = None
        self.step_at = now  # of the last step; as late as it can have been
        self.surely_at = now  # as early as it can have been
        self.stuck_since = now
        self.dirty = False
        self.answered = True  # the last poll, by any host
        self.hang_reported = False
        self.offered: tuple[float, int, int] | None = None


class Detector:
    """One sensor's view of the fleet.  Methods take `now` of one monotonic clock and return what to tell.

    Args:
        incarnation: unique among all sensors of this fleet, ever: event ids begin with it.
    """

    def __init__(self, incarnation: str, thresholds: Thresholds, now: float) -> None:
        self._incarnation = incarnation
        self._limits = thresholds
        self._looked_at = now
        self._late_s = 0.0
        self._unread_s = 0.0
        self._unread_until = now
        self._checked_jobs_at = now
        self._events = 0
        self._hosts: dict[str, _Host] = {}
        self._jobs: dict[str, _Job] = {}
        self._due: list[tuple[float, str]] = []
        self._silent: set[str] = set()
        self._frozen = False
        # A sensor that has just begun has heard of nobody: it says nothing about silence for one timeout.
        self._settles_at: float | None = now + thresholds.heartbeat_timeout_s
        self._open: dict[tuple[str, str], Event] = {}
        self._recent: list[tuple[float, Event]] = []
        self._findings: dict[str, None] = {}
        self._withdrawn: dict[str, None] = {}

    # -------------------------------------------------------------------------------- messages

    def register_workload(self, info: WorkloadInfo, now: float) -> list[Output]:
        time = self._pass_time(now)
        job = self._jobs.get(info.workload)
        if job is None:
            self._jobs[info.workload] = job = _Job(info, time)
            job.hosts.update(
                name for name, host in self._hosts.items() if host.info.workload == info.workload
            )
        elif job.info == info:
            return []
        job.info = info
        return [info]

    def register_host(self, info: HostInfo, now: float) -> list[Output]:
        """A daemon opened its stream; also each time that its host, job or cordon changes."""
        time = self._pass_time(now)
        host = self._hosts.get(info.id)
        if host is None:
            self._hosts[info.id] = host = _Host(info, time)
            self._schedule(info.id, host, time)
        elif host.info.workload != info.workload:
            self._leave_job(host)
            host.states.clear()
            host.failed.clear()
            host.steps.clear()
            host.attempt = 0
        if info.workload in self._jobs:
            self._jobs[info.workload].hosts.add(info.id)
        # A daemon does not know whether its node is cordoned, the orchestrator does.
        host.info = replace(info, cordoned=info.cordoned or host.info.cordoned)
        return self._heard(info.id, host, time) or [host.info]

    def expect_workload(self, info: WorkloadInfo, now: float) -> list[Output]:
        """A job that the controller knows; what its launchers say about it goes before."""
        return [] if info.workload in self._jobs else self.register_workload(info, now)

    def expect_host(self, info: HostInfo, now: float) -> list[Output]:
        """A host that the controller knows: after its own restart a sensor misses those that do not come."""
        time = self._pass_time(now)
        if info.id not in self._hosts:
            self._hosts[info.id] = host = _Host(info, time)
            host.connected = False
            host.lost = info.state is DeviceState.FAILED
            if info.workload in self._jobs:
                self._jobs[info.workload].hosts.add(info.id)
            self._schedule(info.id, host, time)
        return []

    def forget_host(self, id: str, now: float) -> list[Output]:
        """The orchestrator took the host out of the fleet for good."""
        self._pass_time(now)
        host = self._hosts.pop(id, None)
        if host is not None:
            self._leave_job(host)
            self._silent.discard(id)
            self._close(("host", id))
            self._close(("daemon", id))
            self._close(("worker", id))
        return []

    def report(self, report: DaemonReport, now: float) -> list[Output]:
        """One message of a daemon; late and repeated ones change nothing, nor do those of unregistered hosts.

        After a stream ended a report is one of before, or its daemon has yet to register again.
        """
        time = self._pass_time(now)
        host = self._hosts.get(report.host)
        if host is None or not host.connected or report.incarnation in host.earlier:
            return []
        if report.incarnation != host.incarnation:
            if len(host.earlier) >= _EARLIER:
                host.earlier.clear()
            host.earlier.add(host.incarnation)
            host.incarnation = report.incarnation
        elif report.sequence <= host.sequence:
            return []
        host.sequence = report.sequence
        said = self._heard(report.host, host, time)
        said += self._take_findings(report, time)
        if report.attempt < host.attempt:
            return said
        if report.attempt > host.attempt:
            host.attempt = report.attempt
            host.states.clear()
            host.steps.clear()
            host.failed.clear()
            self._close(("worker", report.host))
        host.launcher = report.launcher
        said += self._take_workers(report, host, time)
        return said

    def stream_ended(self, id: str, now: float) -> list[Output]:
        """The host's stream broke: daemon, host or network; a second witness is asked at once."""
        time = self._pass_time(now)
        host = self._hosts.get(id)
        if host is None or not host.connected:
            return []
        host.connected = False
        host.seen_alive = -1e18  # what was seen before says nothing about now
        host.probed_at = time
        self._silent.add(id)
        return [Probe(host=id)]

    def witness_answered(self, id: str, alive: bool | None, witness: str, now: float) -> list[Output]:
        """A second witness looked at a host; None is "cannot tell", which says nothing."""
        time = self._pass_time(now)
        host = self._hosts.get(id)
        if host is None or alive is None or id not in self._silent or host.lost:
            return []
        if alive:
            host.seen_alive = time
            return [] if host.connected else self._lose_daemon(id, host, witness)
        said = [] if self._frozen else self._weigh_silence(time)
        if not self._frozen:
            said += self._lose_host(id, host, time, (f"{witness}: the host is gone",))
        return said

    def orchestrator_changed(self, id: str, change: Change, evidence: Evidence, now: float) -> list[Output]:
        """A node or pod changed; the orchestrator's word that a host is gone needs no second witness."""
        self._pass_time(now)
        if evidence.id in self._findings:
            return []
        self._remember(self._findings, evidence.id)
        time = self._looked_at - self._late_s
        host = self._hosts.get(id)
        workload = host.info.workload if host else ""
        if host is not None and change is Change.GONE:
            host.lost = True
            self._silent.discard(id)
        if host is not None and change in (Change.CORDONED, Change.UNCORDONED):
            host.info = replace(host.info, cordoned=change is Change.CORDONED)
        event = self._event(EventType.ORCHESTRATOR, (evidence,), workload=workload, host=id, change=change)
        return [self._keep_recent(event, time)]

    def thaw(self, now: float) -> list[Output]:
        """A person says that the silent hosts are lost indeed."""
        time = self._pass_time(now)
        if not self._frozen:
            return []
        said: list[Output] = []
        for name in sorted(self._silent):
            said += self._lose_host(name, self._hosts[name], time, ("operator: thaw",))
        return [*said, *self._weigh_silence(time)]

    # -------------------------------------------------------------------------------- time

    def tick(self, now: float) -> list[Output]:
        """Look at all deadlines; called at least each `tick_s`."""
        time = self._pass_time(now)
        said: list[Output] = []
        due: list[str] = []
        while self._due and self._due[0][0] <= time:
            due.append(heapq.heappop(self._due)[1])
        late = []
        for name in due:
            host = self._hosts.get(name)
            if host is None:
                continue
            host.scheduled = False
            if self._expects(host):
                late += [name] * (time - host.heard >= self._limits.heartbeat_timeout_s)
                said += self._watch(name, host, time)
                self._schedule(name, host, time)
        # Only now: of hosts that fell silent together, some are looked at before others.
        said += self._weigh_silence(time)
        if self._settles_at is not None and time >= self._settles_at:
            self._settles_at = None
            said += [] if self._frozen else [self._silence()]
        for name in late:
            said += self._time_out(name, self._hosts[name], time)
        if time - self._checked_jobs_at >= self._limits.tick_s:
            self._checked_jobs_at = time
            for name, job in self._jobs.items():
                said += self._watch_job(name, job, time)
        return said

    def _pass_time(self, now: float) -> float:
        """Effective time: the clock's, less all the time that this process was late."""
        gap = now - self._looked_at
        self._looked_at = now
        if gap > 2 * self._limits.tick_s:
            # None of it counts: what was sent meanwhile is still to be read, and may be as old as that.
            self._late_s += gap
            self._unread_s, self._unread_until = gap, now + 2 * self._limits.tick_s
        elif now >= self._unread_until:
            self._unread_s = 0.0
        return now - self._late_s

    def _expects(self, host: _Host) -> bool:
        return not host.lost and host.info.state is not DeviceState.COMPLETE

    def _schedule(self, id: str, host: _Host, time: float) -> None:
        """One entry per host, at the moment when it would be late; what was heard since moves it on."""
        if not host.scheduled:
            host.scheduled = True
            timeout = self._limits.heartbeat_timeout_s
            silent = time - host.heard
            wait = (
                timeout / 2 - silent
                if silent < timeout / 2
                else timeout - silent
                if silent < timeout
                else self._limits.tick_s
            )
            heapq.heappush(self._due, (time + wait, id))

    def _watch(self, id: str, host: _Host, time: float) -> list[Output]:
        """Half of its time gone: it counts as silent, and a second witness is asked before the rest is."""
        if time - host.heard < self._limits.heartbeat_timeout_s / 2:
            return []
        self._silent.add(id)
        # A witness's word lasts as long as a heartbeat does, so it is asked twice in that time.
        if time - host.probed_at < self._limits.heartbeat_timeout_s / 2:
            return []
        host.probed_at = time
        return [Probe(host=id)]

    def _time_out(self, id: str, host: _Host, time: float) -> list[Output]:
        if self._frozen or host.lost or time - host.heard < self._limits.heartbeat_timeout_s:
            return []
        if time - host.seen_alive < self._limits.heartbeat_timeout_s:
            return self._lose_daemon(id, host, "witness")
        return self._lose_host(id, host, time, (f"stream: silent for {time - host.heard:.1f} s",))

    def _weigh_silence(self, time: float) -> list[Output]:
        """Freeze where too many are silent at once; thaw, with fresh time for all, where that has healed."""
        enough = len(self._silent) >= self._limits.silence_min_hosts
        if not (enough or self._frozen):
            return []
        expected = sum(1 for host in self._hosts.values() if self._expects(host))
        timeout = self._limits.heartbeat_timeout_s
        silent = [name for name in self._silent if time - self._hosts[name].seen_alive >= timeout]
        correlated = is_correlated(
            len(silent),
            expected,
            share=self._limits.silence_share,
            at_least=self._limits.silence_min_hosts,
        )
        if correlated == self._frozen:
            return []
        self._frozen = correlated
        if not correlated:
            for name in silent:
                host = self._hosts[name]
                host.heard = max(host.heard, time)
        return [Silence(frozen=correlated, silent=len(silent), hosts=expected)]

    # -------------------------------------------------------------------------------- conditions

    def _heard(self, id: str, host: _Host, time: float) -> list[Output]:
        host.heard = time
        host.connected = True
        self._silent.discard(id)
        said: list[Output] = []
        if host.blind:
            host.blind = False
            self._close(("daemon", id))
        if host.lost:
            host.lost = False
            self._close(("host", id))
            said.append(host.info)
        self._schedule(id, host, time)
        return said

    def _lose_host(self, id: str, host: _Host, time: float, texts: Iterable[str]) -> list[Output]:
        host.lost = True
        self._silent.discard(id)
        self._close(("daemon", id))
        info = replace(host.info, state=DeviceState.FAILED)
        evidence = self._evidence(*texts, age_s=max(0.0, time - host.heard))
        event = self._event(
            EventType.HOST_HB,
            evidence,
            workload=info.workload,
            host=id,
            attempt=host.attempt,
            ranks=tuple(sorted(host.steps)),
        )
        self._open["host", id] = event
        return [info, event, *self.poll(info.workload)]

    def _lose_daemon(self, id: str, host: _Host, witness: str) -> list[Output]:
        if host.blind:
            return []
        host.blind = True
        event = self._event(
            EventType.DAEMON_LOST,
            self._evidence(f"{witness}: the host is there, its daemon is silent"),
            workload=host.info.workload,
            host=id,
            attempt=host.attempt,
        )
        self._open["daemon", id] = event
        return [event]

    def _take_findings(self, report: DaemonReport, time: float) -> list[Output]:
        said: list[Output] = []
        host = self._hosts[report.host]
        fresh = [found for found in report.findings if found.evidence.id not in self._findings]
        for kind in dict.fromkeys(found.type for found in fresh):
            # All Xids of one report are one event, so that the gravest decides.
            evidence = tuple(found.evidence for found in fresh if found.type is kind)
            event = self._event(
                kind, evidence, workload=host.info.workload, host=report.host, attempt=report.attempt
            )
            said.append(self._keep_recent(event, time))
        for found in fresh:
            self._remember(self._findings, found.evidence.id)
        return said

    def _take_workers(self, report: DaemonReport, host: _Host, time: float) -> list[Output]:
        lost: dict[int, str] = {}
        job = self._jobs.get(host.info.workload)
        if job is not None:
            job.answered = True
        for worker in report.workers:
            host.states[worker.local_rank] = worker.state
            silent = worker.heartbeat_age_s
            if worker.state is DeviceState.FAILED:
                if worker.local_rank not in host.failed:
                    lost[worker.global_rank] = "launcher: failed"
                    host.failed.add(worker.local_rank)
            elif worker.state is DeviceState.RUNNING and silent is not None:
                if silent < self._limits.heartbeat_timeout_s:
                    host.failed.discard(worker.local_rank)
                elif worker.local_rank not in host.failed:
                    lost[worker.global_rank] = f"worker: silent for {silent:.1f} s"
                    host.failed.add(worker.local_rank)
            else:
                host.failed.discard(worker.local_rank)
            if worker.step is not None and worker.step_age_s is not None:
                host.steps[worker.global_rank] = worker.step
                if job is not None:
                    self._take_step(job, report.attempt, worker.step, time - worker.step_age_s)
        said = self._change_state(report.host, host)
        if not host.failed:
            self._close(("worker", report.host))
        if lost:
            evidence = self._evidence(*(f"rank {rank}: {text}" for rank, text in sorted(lost.items())[:16]))
            event = self._event(
                EventType.WORKER_HB,
                evidence,
                workload=host.info.workload,
                host=report.host,
                ranks=tuple(sorted(lost)),
                attempt=report.attempt,
                launcher=report.launcher,
            )
            self._open["worker", report.host] = event
            said += [event, *self.poll(host.info.workload)]
        return said

    def _change_state(self, id: str, host: _Host) -> list[Output]:
        state = host_state(tuple(host.states.values()), host.info.workers_per_host)
        if state is host.info.state:
            return []
        host.info = replace(host.info, state=state)
        if state is DeviceState.COMPLETE:
            self._silent.discard(id)
        return [host.info]

    def _take_step(self, job: _Job, attempt: int, step: int, at: float) -> None:
        if attempt < job.attempt:
            return
        newer = attempt > job.attempt
        if newer or job.step is None or step > job.step:
            job.attempt, job.step, job.step_at = attempt, step, at
            job.surely_at = at - self._unread_s
            job.stuck_since = max(job.stuck_since, at)
            job.hang_reported = False
            job.dirty = True
            self._close(("hang", job.info.workload))
            self._close(("no progress", job.info.workload))

    def _watch_job(self, name: str, job: _Job, time: float) -> list[Output]:
        said: list[Output] = []
        if job.dirty and job.step is not None:
            job.dirty = False
            said.append(self._progress(job, time))
        limit = self._limits.hang_threshold_s
        if limit and job.step is not None and not job.hang_reported and time - job.step_at >= limit:
            said += self._hang(name, job, time)
        downtime = job.info.downtime_threshold_s
        if downtime and time - job.stuck_since >= downtime and job.hosts:
            job.stuck_since = time
            event = self._event(
                EventType.NO_PROGRESS,
                self._evidence(f"steps: none finished for {downtime:g} s", age_s=downtime),
                workload=name,
                attempt=job.attempt,
            )
            self._open["no progress", name] = event
            said.append(event)
        if job.info.scaling and job.info.replicas < job.info.max_replicas:
            said += self._offer(name, job, time)
        return said

    def _hang(self, name: str, job: _Job, time: float) -> list[Output]:
        # A host that was lost and replaced may never have said that it left.
        hosts = [self._hosts[name] for name in job.hosts if not self._hosts[name].lost]
        calm = (LauncherState.RUNNING, LauncherState.UNKNOWN)
        if len(hosts) < job.info.hosts:
            return []
        for host in hosts:
            if host.failed or host.info.id in self._silent or host.launcher not in calm:
                return []  # that is something else than a hang, or no longer this attempt
            if host.info.state is not DeviceState.RUNNING or host.attempt != job.attempt:
                return []
        least = min((min(host.steps.values(), default=0) for host in hosts), default=0)
        behind = {
            rank: host.info.id
            for host in hosts
            for rank, step in host.steps.items()
            if step == least and least != job.step
        }
        named = set(behind.values())
        job.hang_reported = True
        event = self._event(
            EventType.HANG,
            self._evidence(
                f"steps: all alive, none finished for {time - job.step_at:.0f} s, last {job.step}",
                age_s=max(0.0, time - job.step_at),
            ),
            workload=name,
            host=next(iter(named)) if len(named) == 1 else "",
            ranks=tuple(sorted(behind)),
            attempt=job.attempt,
        )
        self._open["hang", name] = event
        return [event]

    def _offer(self, workload: str, job: _Job, time: float) -> list[Output]:
        spares = sum(
            host.info.state is DeviceState.SPARE
            and not (host.info.workload or host.info.cordoned or host.lost or name in self._silent)
            for name, host in self._hosts.items()
        )
        wanted = job.info.nodes_per_replica
        if spares < wanted:
            return []
        if job.offered is not None:
            at, replicas, count = job.offered
            # The same offer again only after a while: it may have been refused for a reason that passes.
            if (replicas, count) == (job.info.replicas, spares) and time - at < self._limits.scale_up_hold_s:
                return []
        job.offered = (time, job.info.replicas, spares)
        text = f"capacity: {spares} spares, a replica needs {wanted}"
        return [self._event(EventType.SCALE_UP, self._evidence(text), workload=workload)]

    # -------------------------------------------------------------------------------- answers

    def snapshot(self, now: float) -> list[Output]:
        """What a controller that was away must know; events that it may know already keep their ids."""
        time = self._pass_time(now)
        said: list[Output] = [job.info for job in self._jobs.values()]
        said += [
            replace(host.info, state=DeviceState.FAILED) if host.lost else host.info
            for host in self._hosts.values()
        ]
        said += [self._progress(job, time) for job in self._jobs.values() if job.step is not None]
        if self._settles_at is None or self._frozen:
            said.append(self._silence())
        return [*said, *self._open.values(), *(event for at, event in self._recent if time - at < _RECENT_S)]

    def poll(self, workload: str) -> list[Output]:
        """Ask where a job is; before `holds` is asked, so that its answer is not a heartbeat period old."""
        job = self._jobs.get(workload)
        if job is None:
            return []
        there = self._hosts_there(job)
        job.answered = not there
        # One that has no stream cannot be asked, and while none answers nobody can tell.
        there = [name for name in there if self._hosts[name].connected]
        return [Poll(host=name) for name in heapq.nsmallest(_POLLED, there)]

    def _hosts_there(self, job: _Job) -> list[str]:
        return [name for name in job.hosts if not self._hosts[name].lost]

    def holds(self, command: Command, now: float) -> bool | None:
        """Whether what `command` was decided upon is still so; None until a host of its job answers `poll`.

        Evidence of a condition that has ended is none, and a job that advances needs no restart, whatever
        spoke for one.
        """
        time = self._pass_time(now)
        job = self._jobs.get(command.workload)
        if job is not None and command.kind.restarts:
            if not job.answered and self._hosts_there(job):
                return None
            if job.step is not None and time - job.surely_at < self._limits.advancing_s:
                return False
        return not command.evidence or any(name not in self._withdrawn for name in command.evidence)

    # -------------------------------------------------------------------------------- small parts

    def _silence(self) -> Silence:
        return Silence(frozen=self._frozen, silent=len(self._silent), hosts=len(self._hosts))

    def _progress(self, job: _Job, time: float) -> Progress:
        age_s = max(0.0, time - job.surely_at)
        return Progress(
            workload=job.info.workload, step=job.step or 0, attempt=job.attempt, age_s=round(age_s, 3)
        )

    def _leave_job(self, host: _Host) -> None:
        if host.info.workload in self._jobs:
            self._jobs[host.info.workload].hosts.discard(host.info.id)

    def _event(
        self,
        type: EventType,
        evidence: tuple[Evidence, ...],
        *,
        workload: str = "",
        host: str = "",
        ranks: tuple[int, ...] = (),
        attempt: int = 0,
        launcher: LauncherState = LauncherState.UNKNOWN,
        change: Change | None = None,
    ) -> Event:
        self._events += 1
        return Event(
            id=f"{self._incarnation}:{self._events}",
            type=type,
            evidence=evidence,
            workload=workload,
            host=host,
            ranks=ranks,
            attempt=attempt,
            launcher=launcher,
            change=change,
        )

    def _evidence(self, *texts: str, age_s: float = 0.0) -> tuple[Evidence, ...]:
        """Each text begins with its witness and a colon."""
        return tuple(
            Evidence(
                id=f"{self._incarnation}:{self._events + 1}/{index}",
                witness=text.partition(":")[0].split()[0],
                text=text,
                age_s=age_s,
            )
            for index, text in enumerate(texts)
        )

    def _keep_recent(self, event: Event, time: float) -> Event:
        self._recent = [(at, each) for at, each in self._recent[-1000:] if time - at < _RECENT_S]
        self._recent.append((time, event))
        return event

    def _close(self, condition: tuple[str, str]) -> None:
        event = self._open.pop(condition, None)
        if event is not None:
            for evidence in event.evidence:
                self._remember(self._withdrawn, evidence.id)

    def _remember(self, memory: dict[str, None], id: str) -> None:
        memory[id] = None
        if len(memory) > _REMEMBERED:
            del memory[next(iter(memory))]
