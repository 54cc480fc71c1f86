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
import math
from collections.abc import Sequence
from dataclasses import replace

from resiliency.launch.health.causes import Advice
from supervisor.detection.conditions import Conditions
from supervisor.detection.jobs import JobWatch
from supervisor.detection.sightings import (
    NEVER,
    SILENT_SHARE,
    HostSight,
    Output,
    Poll,
    Probe,
    SeenHost,
    SeenJob,
)
from supervisor.detection.silence import FleetSilence
from supervisor.policy.thresholds import Thresholds
from supervisor.values import (
    STREAM,
    Change,
    Command,
    DaemonReport,
    DeviceState,
    EventType,
    Evidence,
    HostInfo,
    LauncherState,
    Progress,
    WorkloadInfo,
    host_state,
)

#: Earlier daemons of one host whose late reports are told apart from the present one's.
_EARLIER = 64
#: What a launcher does about ranks that failed; it reports the failure first, and this a moment later.
_REACTIONS = {
    LauncherState.RESTARTING: "launcher: restarts its ranks",
    LauncherState.GAVE_UP: "launcher: gave up, and has ended",
}
#: Hosts of a job that are asked where it is; one that answers is enough.
_POLLED = 4


class Detector:
    """One sensor's view of the fleet.  Methods take `now` of one monotonic clock and return what to tell.

    Args:
        incarnation: unique among all sensors of this fleet, ever: event ids begin with it.
    """

    def __init__(self, incarnation: str, thresholds: Thresholds, now: float) -> None:
        self._limits = thresholds
        self._looked_at = now
        self._late_s = 0.0
        self._unread_s = 0.0
        self._unread_until = now
        self._checked_jobs_at = now
        self._checked_hosts_at = now
        self._hosts: dict[str, SeenHost] = {}
        self._jobs: dict[str, SeenJob] = {}
        self._due: list[tuple[float, str]] = []
        self._missing: list[tuple[float, str]] = []  # when workers will be lost, by host
        self._silence = FleetSilence(thresholds, self._hosts)
        self._silent = self._silence.silent
        # A sensor that has just begun has heard of nobody: it says nothing about silence for one timeout.
        self._settles_at: float | None = now + thresholds.heartbeat_timeout_s
        self._conditions = Conditions(incarnation)
        self._job_watch = JobWatch(thresholds, self._hosts, self._silent, self._conditions)

    # -------------------------------------------------------------------------------- messages

    def register_workload(self, info: WorkloadInfo, now: float) -> list[Output]:
        time = self._pass_time(now)
        job = self._jobs.get(info.workload)
        if job is not None and not info.run:  # a launcher that has not met the others yet
            info = replace(info, run=job.info.run, first_attempt=job.info.first_attempt)
        if job is None:
            self._jobs[info.workload] = job = SeenJob(info, time)
            job.hosts.update(
                name for name, host in self._hosts.items() if host.info.workload == info.workload
            )
        elif job.info == info or info.run in job.earlier:
            return []
        elif job.info.run and job.info.run != info.run:
            job = self._begin_run(job, info, time)
        job.info = info
        self._conditions.runs[info.workload] = info.run
        return [info]

    def _begin_run(self, job: SeenJob, info: WorkloadInfo, time: float) -> SeenJob:
        """The job was started again; under its name it may be another one, of which nothing is known yet."""
        earlier = job.earlier if len(job.earlier) < _EARLIER else frozenset()
        job.earlier = earlier | {job.info.run}
        # No time of an earlier run is time without a step of this one.
        job.stuck_since = job.began_at = time
        if not info.is_new_run(job.info, max(job.attempt, job.named)):
            return job
        for condition in ("hang", "no progress", "attempt"):
            self._conditions.close((condition, info.workload))
        for name in job.hosts:
            self._hosts[name].forget_attempt()
            self._conditions.close(("worker", name))
        again = self._jobs[info.workload] = SeenJob(info, time, job.earlier)
        again.hosts = job.hosts
        return again

    def register_host(self, info: HostInfo, now: float) -> list[Output]:
        """A daemon opened its stream; also each time that its host, job or cordon changes."""
        time = self._pass_time(now)
        host = self._hosts.get(info.id)
        if host is None:
            self._hosts[info.id] = host = SeenHost(info, time)
            self._schedule(info.id, host, time)
        elif host.info.workload != info.workload:
            self._leave_job(host)
            host.forget_attempt()
        if info.workload in self._jobs:
            self._jobs[info.workload].hosts.add(info.id)
        host.left = ""
        # A daemon does not know whether its node is cordoned, the orchestrator does.
        host.info = replace(info, cordoned=info.cordoned or host.info.cordoned)
        return self._heard(info.id, host, time) or [host.info]

    def expect_workload(self, info: WorkloadInfo, now: float) -> list[Output]:
        """A job that the controller knows; what its launchers say about it goes before."""
        return [] if info.workload in self._jobs else self.register_workload(info, now)

    def expect_progress(self, progress: Progress, now: float) -> list[Output]:
        """How far the controller knows a job to be: a sensor that has begun since heard of no step."""
        time = self._pass_time(now)
        job = self._jobs.get(progress.workload)
        if job is None or not job.info.is_of_run(progress.run):
            return []
        job.times.assume(progress.usual_step_s)
        if job.step is None:
            job.attempt, job.step = progress.attempt, progress.step
            job.step_at = job.surely_at = time - progress.age_s
        return []

    def expect_host(self, info: HostInfo, now: float) -> list[Output]:
        """A host that the controller knows: after its own restart a sensor misses those that do not come."""
        time = self._pass_time(now)
        if info.id not in self._hosts:
            self._hosts[info.id] = host = SeenHost(info, time)
            host.connected = False
            # One whose ranks failed is there, as far as is known: if it is gone since, that is news.
            ranks_failed = any(worker.state is DeviceState.FAILED for worker in info.workers)
            host.lost = info.state is DeviceState.FAILED and not ranks_failed
            if info.workload in self._jobs:
                self._jobs[info.workload].hosts.add(info.id)
            self._schedule(info.id, host, time)
        return []

    def forget_host(self, id: str, now: float) -> list[Output]:
        """The orchestrator took the host out of the fleet for good."""
        self._pass_time(now)
        self._forget(id)
        return []

    def _forget(self, id: str) -> None:
        host = self._hosts.pop(id, None)
        if host is not None:
            self._leave_job(host)
            self._silent.discard(id)
            self._conditions.close(("host", id))
            self._conditions.close(("daemon", id))
            self._conditions.close(("worker", id))

    def forget_replaced(self, known: Sequence[HostInfo], now: float) -> list[str]:
        """Forget lost hosts that the controller has: it knows their names by other ids.  Returns them."""
        ids, names = {host.id for host in known}, {host.name for host in known}
        gone = [
            name
            for name, host in self._hosts.items()
            if host.lost and name not in ids and host.info.name in names
        ]
        for name in gone:
            self.forget_host(name, now)
        return gone

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
        said += self._take_back(report, host)
        job = self._jobs.get(host.info.workload)
        if report.attempt < host.attempt or not (job is None or job.info.is_of_run(report.run)):
            return said
        if job is not None and report.run:
            job.named = max(job.named, report.attempt)
        if report.attempt > host.attempt:
            host.attempt = report.attempt
            self._begin_attempt(host, time)
            host.states.clear()
            host.steps.clear()
            host.heartbeats.clear()
            host.failed.clear()
            self._conditions.close(("worker", report.host))
        reacted, ends = report.launcher is not host.launcher, host.ends_job
        host.launcher, host.condition = report.launcher, report.condition
        reacts = report.launcher in _REACTIONS and (reacted or host.ends_job is not ends)
        said += self._take_workers(report, host, time, reacts=reacts)
        return said

    def stream_ended(self, id: str, now: float) -> list[Output]:
        """The host's stream broke: daemon, host or network; a second witness is asked at once."""
        time = self._pass_time(now)
        host = self._hosts.get(id)
        if host is None or not host.connected:
            return []
        host.connected = False
        host.seen_alive = NEVER  # what was seen before says nothing about now
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
        host.seen_alive = NEVER
        said = [] if self._silence.frozen else self._silence.weigh(time)
        if not self._silence.frozen:
            said += self._lose_if_believed(id, host, time, f"{witness}: the host is gone")
        return said

    def orchestrator_changed(self, id: str, change: Change, evidence: Evidence, now: float) -> list[Output]:
        """A node or pod changed; the orchestrator's word that a host is gone needs no second witness."""
        time = self._pass_time(now)
        if not self._conditions.is_new_finding(evidence.id):
            return []
        self._conditions.remember_finding(evidence.id)
        host = self._hosts.get(id)
        workload = host.info.workload if host else ""
        if host is not None and change is Change.GONE:
            host.lost = True
            self._silent.discard(id)
        if host is not None and change in (Change.CORDONED, Change.UNCORDONED):
            host.info = replace(host.info, cordoned=change is Change.CORDONED)
        event = self._conditions.event(
            EventType.ORCHESTRATOR, (evidence,), workload=workload, host=id, change=change
        )
        self._conditions.note_loss(event, time)
        return [self._conditions.keep_recent(event, time)]

    def thaw(self, now: float) -> list[Output]:
        """A person says that the silent hosts are lost indeed."""
        time = self._pass_time(now)
        if not self._silence.frozen:
            return []
        said: list[Output] = []
        for name in sorted(self._silent):
            said += self._lose_host(name, self._hosts[name], time, "operator: thaw")
        return [*said, *self._silence.weigh(time)]

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
            if host.is_expected:
                late += [name] * (time - host.heard >= self._limits.heartbeat_timeout_s)
                said += self._watch(name, host, time)
                self._schedule(name, host, time)
        said += self._ask_for_workers(time)
        # Only now: of hosts that fell silent together, some are looked at before others.
        said += self._silence.weigh(time)
        if self._settles_at is not None and time >= self._settles_at:
            self._settles_at = None
            said += [] if self._silence.frozen else [self._silence.value()]
        for name in late:
            said += self._time_out(name, self._hosts[name], time)
        if time - self._checked_jobs_at >= self._limits.tick_s:
            self._checked_jobs_at = time
            for name, job in self._jobs.items():
                said += self._job_watch.watch(name, job, time)
            self._forget_gone(time)
        return said

    def _forget_gone(self, time: float) -> None:
        """Jobs that no host works for, and lost hosts, by the controller's own rule: it forgets them too."""
        for name, job in list(self._jobs.items()):
            if any(not self._hosts[host].lost for host in job.hosts):
                job.left_at = None
            elif job.left_at is None:
                job.left_at = time
            elif time - job.left_at >= (
                job.info.downtime_threshold_s or self._limits.workload_downtime_threshold_s
            ):
                del self._jobs[name]
                self._conditions.runs.pop(name, None)
                self._conditions.close(("attempt", name))
        if time - self._checked_hosts_at < self._limits.heartbeat_timeout_s:
            return
        self._checked_hosts_at = time
        for name, host in list(self._hosts.items()):
            if host.lost and time - host.heard >= self._limits.verdict_s:
                self._forget(name)

    @property
    def host_count(self) -> int:
        return len(self._hosts)

    def knows_host(self, id: str) -> bool:
        return id in self._hosts

    def _ask_for_workers(self, time: float) -> list[Output]:
        """A worker is asked for when its time is over, and not a period later."""
        said: list[Output] = []
        while self._missing and self._missing[0][0] <= time:
            name = heapq.heappop(self._missing)[1]
            host = self._hosts.get(name)
            if host is None:
                continue
            host.missing = False
            if host.missed_at > time:
                self._expect_workers(name, host)  # it has said more since
            elif not (host.lost or name in self._silent):
                host.missed_at = math.inf
                said.append(Poll(host=name))
        return said

    def _expect_workers(self, id: str, host: SeenHost) -> None:
        if host.missed_at < math.inf and not host.missing:
            host.missing = True
            heapq.heappush(self._missing, (host.missed_at, id))

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

    def _schedule(self, id: str, host: SeenHost, time: float) -> None:
        """One entry per host, at the moment when it would be late; what was heard since moves it on."""
        if not host.scheduled:
            host.scheduled = True
            wait = host.look_in(time, self._limits)
            heapq.heappush(self._due, (time + wait, id))

    def _watch(self, id: str, host: SeenHost, time: float) -> list[Output]:
        """More than half of its time gone: it counts as silent, and a second witness is asked in time."""
        timeout_s = self._limits.heartbeat_timeout_s
        if time - host.heard < timeout_s * SILENT_SHARE:
            return []
        self._silent.add(id)
        # It is asked once more at the end.
        if time - host.probed_at < timeout_s * (1 - SILENT_SHARE):
            return []
        host.probed_at = time
        return [Probe(host=id)]

    def _time_out(self, id: str, host: SeenHost, time: float) -> list[Output]:
        if self._silence.frozen or host.lost or time - host.heard < self._limits.heartbeat_timeout_s:
            return []
        if time - host.seen_alive < self._limits.heartbeat_timeout_s:
            return self._lose_daemon(id, host, "witness")
        return self._lose_if_believed(id, host, time, f"{STREAM}: silent for {time - host.heard:.1f} s")

    # -------------------------------------------------------------------------------- conditions

    def _heard(self, id: str, host: SeenHost, time: float) -> list[Output]:
        host.heard = time
        host.connected = True
        self._silent.discard(id)
        said: list[Output] = []
        if host.blind:
            host.blind = False
            self._conditions.close(("daemon", id))
        if host.lost:
            host.lost = False
            self._conditions.close(("host", id))
            said.append(host.info)
        self._schedule(id, host, time)
        return said

    def _lose_if_believed(self, id: str, host: SeenHost, time: float, text: str) -> list[Output]:
        """Where too many are silent beside it, they are looked at again, and it waits for its timeout."""
        doubts = self._silence.doubts(host.probed_at)
        if not doubts:
            return self._lose_host(id, host, time, text)
        others = [name for name in doubts if self._hosts[name].probed_at < host.probed_at]
        for name in others:
            self._hosts[name].probed_at = time
        return [Probe(host=name) for name in others]

    def _lose_host(self, id: str, host: SeenHost, time: float, text: str) -> list[Output]:
        host.lost = True
        self._silent.discard(id)
        self._conditions.close(("daemon", id))
        info = replace(host.info, state=DeviceState.FAILED)
        evidence = self._conditions.evidence(text, age_s=max(0.0, time - host.heard))
        event = self._conditions.event(
            EventType.HOST_HB,
            evidence,
            workload=info.workload,
            host=id,
            attempt=host.attempt,
            ranks=tuple(sorted(host.steps)),
        )
        self._conditions.keep_open(("host", id), event)
        self._conditions.note_loss(event, time)
        return [info, event, *self.poll(info.workload)]

    def _lose_daemon(self, id: str, host: SeenHost, witness: str) -> list[Output]:
        if host.blind:
            return []
        host.blind = True
        event = self._conditions.event(
            EventType.DAEMON_LOST,
            self._conditions.evidence(f"{witness}: the host is there, its daemon is silent"),
            workload=host.info.workload,
            host=id,
            attempt=host.attempt,
        )
        self._conditions.keep_open(("daemon", id), event)
        return [event]

    def _begin_attempt(self, host: SeenHost, time: float) -> None:
        job = self._jobs.get(host.info.workload)
        if job is not None and host.attempt > job.newest:
            job.newest, job.began_at = host.attempt, time

    def _take_findings(self, report: DaemonReport, time: float) -> list[Output]:
        said: list[Output] = []
        host = self._hosts[report.host]
        fresh = [found for found in report.findings if self._conditions.is_new_finding(found.evidence.id)]
        diagnoses = [found for found in fresh if found.type is EventType.DIAGNOSIS]
        job = self._jobs.get(host.info.workload)
        newest = max(report.attempt, job.newest if job is not None else 0)
        for kind in dict.fromkeys(found.type for found in fresh if found not in diagnoses):
            # All Xids of one report are one event, so that the gravest decides.
            evidence = tuple(found.evidence for found in fresh if found.type is kind)
            event = self._conditions.event(
                kind, evidence, workload=host.info.workload, host=report.host, attempt=report.attempt
            )
            said.append(self._conditions.keep_recent(event, time))
        for found in diagnoses:  # each is of an attempt of its own
            if found.attempt < newest:
                continue  # it comes late: a host that is broken fails again
            event = self._conditions.event(
                EventType.DIAGNOSIS,
                (found.evidence,),
                workload=host.info.workload,
                host=report.host,
                ranks=found.ranks,
                attempt=found.attempt,
            )
            said.append(self._conditions.keep_recent(replace(event, run=found.run), time))
        for found in fresh:
            self._conditions.remember_finding(found.evidence.id)
        return said

    def _take_workers(
        self, report: DaemonReport, host: SeenHost, time: float, *, reacts: bool
    ) -> list[Output]:
        lost: dict[int, str] = {}
        ages_s: list[float] = []
        host.missed_at = math.inf
        job = self._jobs.get(host.info.workload)
        attempt = job.attempt if job is not None else 0
        # Else it may be as old as this process was late, or of a host that waits and knows no step.
        knows = report.workers or host.states or (job is not None and not self._has_workers(job))
        for worker in report.workers:
            if why := host.take_worker(worker, time, self._limits.heartbeat_timeout_s):
                lost[worker.global_rank] = why
                ages_s.append(0.0 if worker.state is DeviceState.FAILED else worker.heartbeat_age_s or 0.0)
            if worker.step is not None and worker.step_age_s is not None:
                before = host.steps.get(worker.global_rank)
                host.steps[worker.global_rank] = worker.step
                if job is not None:
                    at = time - worker.step_age_s
                    self._job_watch.take_step(
                        *(job, report.attempt, worker.step, at, self._unread_s), before=before
                    )
                    if worker.kept_step is not None:
                        self._job_watch.take_kept(job, report.attempt, worker.kept_step)
        if job is not None and not self._unread_s and knows and self._tells_most(report.host, job):
            job.answered = True
        self._expect_workers(report.host, host)
        said = self._release_left(job) if job is not None and job.attempt > attempt else []
        said += self._change_state(report.host, host)
        gave_up = report.launcher is LauncherState.GAVE_UP and bool(host.info.workload)
        if not (host.failed or gave_up):
            self._conditions.close(("worker", report.host))
        if lost or (reacts and (host.failed or gave_up)):
            texts = [f"rank {rank}: {text}" for rank, text in sorted(lost.items())[:16]]
            if reacts:
                why = report.condition.why if report.condition is not None else ""
                texts.append(_REACTIONS[report.launcher] + (f": {why}" if why else ""))
            evidence = self._conditions.evidence(*texts, age_s=min(ages_s, default=0.0))
            if reacts and host.ends_job:
                evidence = (*evidence[:-1], replace(evidence[-1], advice=Advice.STOP.value))
            event = self._conditions.event(
                EventType.WORKER_HB,
                evidence,
                workload=host.info.workload,
                host=report.host,
                ranks=tuple(sorted(lost)),
                attempt=report.attempt,
                launcher=report.launcher,
            )
            self._conditions.keep_open(("worker", report.host), event)
            self._conditions.note_loss(event, time)
            said += [event, *self.poll(host.info.workload)]
        return said

    def _tells_most(self, name: str, job: SeenJob) -> bool:
        """Whether no other host knows more of the job's steps.

        One whose ranks are lost may have a launcher that is stopped, beside ranks that go on.
        """
        return not self._hosts[name].failed or not any(
            host.connected and host.states and not host.failed and other not in self._silent
            for other in self._job_watch.hosts_there(job)
            for host in (self._hosts[other],)
        )

    def _has_workers(self, job: SeenJob) -> bool:
        there = (self._hosts[name] for name in self._job_watch.hosts_there(job))
        return any(host.connected and host.states for host in there)

    def _release_left(self, job: SeenJob) -> list[Output]:
        """Free the hosts whose launchers gave up, and that the job has finished a later step without."""
        said: list[Output] = []
        for name in sorted(job.hosts):
            host = self._hosts[name]
            if host.launcher is LauncherState.GAVE_UP and host.attempt < job.attempt:
                job.hosts.discard(name)
                self._conditions.close(("worker", name))
                host.left, host.info = host.info.workload, replace(host.info, workload="")
                said.append(host.info)
        return said

    def _take_back(self, report: DaemonReport, host: SeenHost) -> list[Output]:
        """A host was freed because what its launcher said came later than a step of the others."""
        job = self._jobs.get(host.left)
        again = report.attempt > host.attempt and report.launcher is not LauncherState.GAVE_UP
        if job is None or not again or not job.info.is_of_run(report.run):
            return []
        host.info, host.left = replace(host.info, workload=host.left), ""
        job.hosts.add(report.host)
        return [host.info]

    def _change_state(self, id: str, host: SeenHost) -> list[Output]:
        state = host_state(tuple(host.states.values()), host.info.workers_per_host)
        if state is host.info.state:
            return []
        host.info = replace(host.info, state=state)
        if state is DeviceState.COMPLETE:
            self._silent.discard(id)
        return [host.info]

    # -------------------------------------------------------------------------------- answers

    def snapshot(self, now: float) -> list[Output]:
        """What a controller that was away must know; events that it may know already keep their ids."""
        time = self._pass_time(now)
        said: list[Output] = [job.info for job in self._jobs.values()]
        said += [
            replace(host.info, state=DeviceState.FAILED) if host.lost else host.info
            for host in self._hosts.values()
        ]
        said += [self._job_watch.progress(job, time) for job in self._jobs.values() if job.step is not None]
        if self._settles_at is None or self._silence.frozen:
            said.append(self._silence.value())
        return [*said, *self._conditions.reported(time)]

    def poll(self, workload: str) -> list[Output]:
        """Ask where a job is; before `holds` is asked, so that its answer is not a heartbeat period old."""
        job = self._jobs.get(workload)
        if job is None:
            return []
        there = self._job_watch.hosts_there(job)
        job.answered = not there
        # One that has no stream cannot be asked, and while none answers nobody can tell.
        there = [name for name in there if self._hosts[name].connected]
        # Nor does one that waits for a place know a step.
        there = [name for name in there if self._hosts[name].states] or there
        return [Poll(host=name) for name in heapq.nsmallest(_POLLED, there)]

    def holds(self, command: Command, now: float) -> bool | None:
        """Whether what `command` was decided upon is still so; None until a host of its job answers `poll`.

        Evidence of a condition that has ended is none, and a job that advances needs no restart, whatever
        spoke for one.  Steps from before a confirmed loss of a host are no advance.  What another sensor
        concluded about a host is not known here: the host's present state answers for it.
        """
        time = self._pass_time(now)
        job = self._jobs.get(command.workload)
        if job is not None and not job.info.is_of_run(command.run):
            return False
        if job is not None and command.kind.restarts:
            if not job.answered and self._job_watch.hosts_there(job):
                return None
            since = job.step_at > self._conditions.lost_at(command.evidence)
            if since and self._job_watch.advances(job, time):
                return False
        answers = [self._is_so(each, command.host) for each in command.evidence]
        if not answers or True in answers:
            return True
        return None if None in answers else False

    def _is_so(self, evidence: str, host: str) -> bool | None:
        if host and self._conditions.is_foreign(evidence):
            return self._is_unwell(host)
        return not self._conditions.is_withdrawn(evidence)

    def _is_unwell(self, id: str) -> bool | None:
        """Whether a host is lost, or has lost ranks; None as long as it was not heard, and may yet be."""
        host = self._hosts.get(id)
        if host is None or (self._settles_at is not None and not host.connected):
            return None
        if host.lost:
            return True
        if not host.connected or host.sequence < 0:
            return None
        return bool(host.failed) or host.launcher is LauncherState.GAVE_UP

    def attempt_of(self, workload: str) -> int | None:
        """The newest attempt that hosts of a job are at; None where none has said."""
        job = self._jobs.get(workload)
        attempts = [self._hosts[name].attempt for name in self._job_watch.hosts_there(job)] if job else []
        return max(attempts, default=None)

    def sights(self, after: str, most: int, now: float) -> tuple[list[HostSight], bool]:
        """Up to `most` hosts behind the id `after` in the order of their ids; whether there are more."""
        time = self._pass_time(now)
        names = heapq.nsmallest(most + 1, (name for name in self._hosts if name > after))
        sights = [self._hosts[name].sight(name in self._silent, time) for name in names[:most]]
        return sights, len(names) > most

    def _leave_job(self, host: SeenHost) -> None:
        if host.info.workload in self._jobs:
            self._jobs[host.info.workload].hosts.discard(host.info.id)
