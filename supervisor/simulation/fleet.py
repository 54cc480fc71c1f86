# SPDX-License-Identifier: Apache-2.0
"""What is true: virtual hosts that train, their daemons, and the orchestrator that owns them."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from resiliency.launch.health.condition import JobCondition, Requeue
from supervisor.orchestrator import Answer
from supervisor.simulation.loop import Loop
from supervisor.values import (
    Command,
    CommandKind,
    DaemonReport,
    DeviceState,
    EventType,
    Evidence,
    Finding,
    HostInfo,
    LauncherState,
    OutcomeStatus,
    WorkerInfo,
    WorkerReport,
    WorkloadInfo,
    host_state,
)

RESTART_S = 6.0
#: A launcher reports a failed rank first, and what it does about it so much later; then the other launchers
#: of a job that it gave up find out.
REACTION_S, OTHERS_REACT_S = 0.2, 1.0
#: How long launchers take to stop their ranks before they start again.
STOPS_S = (3.0, 12.0)
#: How often a launcher tells its daemon the steps of its ranks; of an attempt the first is passed on at once.
TELLS_S = 1.0
#: How long the launcher of a host that is back takes to its rendezvous.
MEETS_S = 15.0
#: How long a launcher that tells how its job is lets ranks hang.
HANG_ENDS_S = 60.0
#: Attempts of one start of a whole job by its orchestrator.
GENERATION = 1000
CHECKPOINT_STEPS = 60


@dataclass
class SimHost:
    """One machine: what it is, and what is wrong with it."""

    info: HostInfo
    alive: bool = True
    daemon: bool = True
    stopped_at: float | None = None  # its launcher is stopped since, and its ranks go on
    cut: bool = False  # nothing that it sends arrives
    deaf: bool = False  # nothing that it is sent arrives
    slow_s: float = 0.0  # what it sends is that late
    broken: bool = False  # hardware: what runs on it fails again
    failed: bool = False  # a rank is dead
    launcher: LauncherState = LauncherState.RUNNING
    reacted_at: float = 0.0  # when `launcher` became what it is, after a failure
    incarnation: int = 0
    sequence: int = 0
    described: HostInfo | None = None  # as the sensor was told last
    findings: list[Finding] = field(default_factory=list)
    connected: bool = False
    back_at: float = 0.0  # when its stream began
    heard_at: float = 0.0  # by the sensor
    late_at: float = -math.inf  # when a report came after the host had counted as silent


@dataclass
class SimJob:
    """One training: steps are a function of time while nothing is wrong with any of its hosts.

    Attributes:
        loads_s: from the start of its ranks to the beginning of the first step.
        evaluates: it does so each so many steps, for so many seconds.
        tells: its launchers tell how it is.
    """

    info: WorkloadInfo
    hosts: list[str]
    step_s: float
    loads_s: float = 0.0
    evaluates: tuple[int, float] | None = None
    tells: bool = False
    attempt: int = 0
    generation: int = 0
    base: int = 0
    began: int = 0
    since: float | None = None
    starts_at: float | None = None
    hung_by: str = ""
    fragile: bool = False  # it fails again soon after each start
    stalls: bool = False  # its next start never comes to a step

    def step(self, now: float) -> int:
        return self.base if self.since is None else self.base + self._steps_in(now - self.since)[0]

    def step_at(self, now: float) -> float:
        """When the last step was finished."""
        return self.stopped_at if self.since is None else self.since + self._steps_in(now - self.since)[1]

    def _steps_in(self, seconds: float) -> tuple[int, float]:
        """Steps that are finished after `seconds` of training, and after how many the last of them was."""
        rounds, left, each, pause_s = 0.0, seconds, 0, 0.0
        if self.evaluates is not None:
            each, pause_s = self.evaluates
            rounds, left = divmod(seconds, each * self.step_s + pause_s)
        steps = min(int(left / self.step_s), each or sys.maxsize)
        since = -pause_s if rounds and not steps else steps * self.step_s
        return int(rounds) * each + steps, rounds * (each * self.step_s + pause_s) + since

    def condition(self, launcher: LauncherState, now: float) -> JobCondition | None:
        """The condition that its launchers report."""
        if not self.tells:
            return None
        if launcher is not LauncherState.RUNNING:
            gave_up = launcher is LauncherState.GAVE_UP
            return JobCondition(state=launcher, requeue=Requeue.LATER if gave_up else None)
        still_s = now - self.step_at(now)
        return JobCondition(
            state=launcher, still_s=still_s if still_s > max(5.0, 2.5 * self.step_s) else None
        )

    stopped_at: float = 0.0

    def kept_step(self, now: float) -> int:
        """Of the last checkpoint: a stop costs the steps since."""
        return self.step(now) // CHECKPOINT_STEPS * CHECKPOINT_STEPS

    def stop(self, now: float) -> None:
        if self.since is not None:
            self.stopped_at = self.step_at(now)
            self.base, self.since = self.step(now), None
        self.starts_at = None


class Fleet:
    """All hosts and jobs.  `changed` is called with each host whose registration changed."""

    def __init__(self, loop: Loop, workers_per_host: int) -> None:
        self.loop = loop
        self.workers_per_host = workers_per_host
        self.hosts: dict[str, SimHost] = {}
        self.jobs: dict[str, SimJob] = {}
        self.runs = 0
        self.changed: Callable[[SimHost], None] = lambda host: None
        #: Called with each host that has something to report at once.
        self.news: Callable[[SimHost], None] = lambda host: None

    def job_of(self, host: SimHost) -> SimJob | None:
        return self.jobs.get(host.info.workload)

    def is_whole(self, job: SimJob) -> bool:
        hosts = [self.hosts[name] for name in job.hosts]
        return len(hosts) == job.info.hosts and all(host.alive and not host.failed for host in hosts)

    def is_free(self, host: SimHost) -> bool:
        """Whether a scheduler may put a pod there: it looks at devices, and at no zone."""
        info = host.info
        return not (info.workload or info.cordoned) and info.workers_per_host == self.workers_per_host

    def has_launchers(self, job: SimJob) -> bool:
        """Whether no launcher of the job has given up, and so ended."""
        return all(self.hosts[name].launcher is not LauncherState.GAVE_UP for name in job.hosts)

    def is_running(self, job: SimJob) -> bool:
        return job.since is not None

    # -------------------------------------------------------------------------------- what happens

    def fail_worker(self, host: SimHost, launcher: LauncherState) -> None:
        """A rank of the host dies; all ranks of its job stop, as they wait for it in a collective."""
        job = self.job_of(host)
        if job is None or not host.alive or host.info.id not in job.hosts:
            return
        host.failed = True
        job.stop(self.loop.now)
        if job.tells:  # with the failure itself
            host.launcher, host.reacted_at = launcher, self.loop.now
        self.news(host)
        attempt = job.attempt

        def react() -> None:
            if job.attempt == attempt and host.failed and host.alive and host.info.id in job.hosts:
                self._react(job, host, launcher)

        self.loop.after(REACTION_S, react)

    def _react(self, job: SimJob, host: SimHost, launcher: LauncherState) -> None:
        if host.launcher is LauncherState.GAVE_UP:
            return
        host.launcher, host.reacted_at = launcher, self.loop.now
        self.news(host)
        attempt = job.attempt

        def end_others() -> None:
            for name in job.hosts if job.attempt == attempt else ():
                other = self.hosts[name]
                if other.alive and other.launcher is not LauncherState.GAVE_UP:
                    other.launcher, other.reacted_at = LauncherState.GAVE_UP, self.loop.now
                    self.news(other)

        def heal() -> None:
            if not (host.failed and host.alive and host.info.id in job.hosts and self.has_launchers(job)):
                return
            if job.attempt == attempt and not all(self.hosts[name].alive for name in job.hosts):
                self.loop.after(RESTART_S, heal)  # the launchers wait for that of the host
            else:
                self.restart(job)

        if launcher is LauncherState.GAVE_UP:
            self.loop.after(OTHERS_REACT_S, end_others)
        else:
            self.loop.after(self.loop.random.choice(STOPS_S), heal)

    def kill_host(self, host: SimHost) -> None:
        """A rank of another host fails with it; where its launcher has a restart, it waits for the host."""
        host.alive = host.daemon = host.connected = False
        job = self.job_of(host)
        if job is None:
            return
        others = [self.hosts[name] for name in job.hosts if self.hosts[name].alive]
        if job.since is not None and others:
            again = job.info.max_in_job_restarts > 0
            launcher = LauncherState.RESTARTING if again else LauncherState.GAVE_UP
            self.loop.after(REACTION_S, lambda: self.fail_worker(others[0], launcher))
        job.stop(self.loop.now)

    def boot_host(self, host: SimHost, *, launches: bool) -> None:
        """It is back, with nothing of what ran on it, but for its launcher if that is started again."""
        if host.alive:
            return
        host.alive = host.daemon = True
        host.incarnation += 1
        host.sequence = 0
        host.failed = bool(host.info.workload) and not launches
        host.launcher = LauncherState.GAVE_UP if host.failed else LauncherState.RUNNING
        job = self.job_of(host)
        if job is not None and launches:
            self.loop.after(MEETS_S, partial(self._meet, job, job.attempt))

    def _meet(self, job: SimJob, attempt: int) -> None:
        there = all(self.hosts[name].alive for name in job.hosts) and self.has_launchers(job)
        if there and job.attempt == attempt and job.since is None:
            self.restart(job)

    def begin_run(self, job: SimJob) -> None:
        """A person starts another job under the name, on the same hosts: it counts from the beginning."""
        job.stop(self.loop.now)
        job.attempt, job.base, job.generation = -1, 0, 0
        job.fragile = job.stalls = False
        self._begin_launchers(job, 0)
        self.restart(job)

    def start_again(self, job: SimJob) -> None:
        """The orchestrator starts all launchers of the job again, and counts its starts."""
        job.generation += 1
        job.attempt = job.generation * GENERATION - 1
        self._begin_launchers(job, job.attempt + 1)
        self.restart(job)

    def _begin_launchers(self, job: SimJob, first_attempt: int) -> None:
        self.runs += 1
        job.info = replace(job.info, run=f"run{self.runs}", first_attempt=first_attempt)

    def restart(self, job: SimJob) -> None:
        """All ranks begin again from the last checkpoint, once all hosts of the job are there."""
        now = self.loop.now
        job.stop(now)
        job.attempt += 1
        job.began = job.base = job.kept_step(now)
        job.hung_by = ""
        for name in job.hosts:
            host = self.hosts[name]
            host.failed = False
            host.launcher = LauncherState.RUNNING
            self.changed(host)  # launchers say what they belong to at each rendezvous
            self.news(host)
        attempt = job.attempt
        self.loop.after(RESTART_S + job.loads_s, lambda: self._start(job, attempt))

    def _start(self, job: SimJob, attempt: int) -> None:
        if job.attempt != attempt or job.since is not None:
            return
        if not self.is_whole(job):
            self.loop.after(RESTART_S, lambda: self._start(job, attempt))
            return
        if job.stalls:
            job.stalls = False
            self._end_hang(job, self.hosts[job.hosts[0]])
            return
        job.since = self.loop.now
        self.loop.after(
            job.step_s + TELLS_S * self.loop.random.random(), lambda: self._tell_first_step(job, attempt)
        )
        bad = next((self.hosts[name] for name in job.hosts if self.hosts[name].broken), None)
        if bad is not None or job.fragile:
            again = bad or self.hosts[job.hosts[0]]
            self.loop.after(0.5 * job.step_s, lambda: self._fail_again(job, attempt, again))

    def _tell_first_step(self, job: SimJob, attempt: int) -> None:
        for name in job.hosts if job.attempt == attempt and job.step(self.loop.now) > job.began else ():
            self.news(self.hosts[name])

    def _fail_again(self, job: SimJob, attempt: int, host: SimHost) -> None:
        if job.attempt == attempt and host.info.id in job.hosts and (host.broken or job.fragile):
            self.fail_worker(host, LauncherState.GAVE_UP)

    def hang(self, job: SimJob, host: SimHost) -> None:
        if job.since is not None:
            job.stop(self.loop.now)
            job.hung_by = host.info.id
            self._end_hang(job, host)

    def _end_hang(self, job: SimJob, host: SimHost) -> None:
        """A launcher that judges its ranks ends those that hang, and restarts them."""
        attempt = job.attempt

        def end() -> None:
            if job.attempt == attempt and job.since is None and not host.failed:
                self.fail_worker(host, LauncherState.RESTARTING)

        if job.tells:
            self.loop.after(HANG_ENDS_S, end)

    def find(self, host: SimHost, type: EventType, code: int | None, cause: str = "") -> None:
        name = f"{host.info.id}/f{self.loop.steps}.{len(host.findings)}"
        evidence = Evidence(
            id=name, witness="watchdog", text="as drawn", code=code, device="gpu0", cause=cause
        )
        host.findings.append(Finding(type=type, evidence=evidence))

    def diagnose(self, host: SimHost, cause: str, *, attempt: int, run: str) -> None:
        """The launcher of the host says so, and that the host is to be replaced."""
        evidence = Evidence(
            id=f"{host.info.id}/d{self.loop.steps}.{len(host.findings)}",
            witness="launcher",
            text="as drawn",
            cause=cause,
            advice="replace_host",
            confidence="high",
        )
        finding = Finding(type=EventType.DIAGNOSIS, evidence=evidence, attempt=attempt, run=run)
        host.findings.append(finding)

    def describe(self, host: SimHost) -> HostInfo:
        """What the host's daemon says of it, with its ranks."""
        workers = tuple(
            WorkerInfo(
                id=f"{host.info.workload}/{worker.global_rank}",
                local_rank=worker.local_rank,
                global_rank=worker.global_rank,
                state=worker.state,
            )
            for worker in self._workers(host)
        )
        state = host_state(tuple(worker.state for worker in workers), self.workers_per_host)
        return replace(host.info, workers=workers, state=state)

    def _workers(self, host: SimHost) -> tuple[WorkerReport, ...]:
        job, stopped_s = self.job_of(host), self._stopped_s(host)
        if job is None or host.info.id not in job.hosts:
            return ()
        now = self.loop.now - stopped_s
        # Of this attempt only: where it began is no step that it has finished.
        step = job.step(now) if job.step(now) > job.began else 0
        if job.hung_by == host.info.id:
            step -= 1
        first = job.hosts.index(host.info.id) * self.workers_per_host
        return tuple(
            WorkerReport(
                local_rank=rank,
                global_rank=first + rank,
                state=DeviceState.FAILED if host.failed and rank == 0 else DeviceState.RUNNING,
                heartbeat_age_s=0.1 + stopped_s,
                step=step if step > 0 else None,
                step_age_s=max(0.0, self.loop.now - job.step_at(now)) if step > 0 else None,
                kept_step=job.kept_step(now) if step > 0 else None,
            )
            for rank in range(self.workers_per_host)
        )

    def _stopped_s(self, host: SimHost) -> float:
        """Seconds for which its launcher has been stopped."""
        return 0.0 if host.stopped_at is None else self.loop.now - host.stopped_at

    def report(self, host: SimHost) -> DaemonReport:
        """What the host's daemon says now."""
        job = self.job_of(host)
        report = DaemonReport(
            host=host.info.id,
            incarnation=f"{host.info.id}.{host.incarnation}",
            sequence=host.sequence,
            attempt=job.attempt if job else 0,
            launcher=host.launcher,
            workers=self._workers(host),
            findings=tuple(host.findings[-4:]),
            run=job.info.run if job else "",
            condition=job.condition(host.launcher, self.loop.now - self._stopped_s(host)) if job else None,
        )
        host.sequence += 1
        return report

    def assign(self, host: SimHost, workload: str) -> None:
        host.info = replace(host.info, workload=workload)
        host.failed = False
        self.changed(host)


class SimOrchestrator:
    """Carries out commands on the fleet, by epoch and id as an adapter must; its API fails as asked.

    Attributes:
        down: no call gets an answer, or any effect.
        flaky: share of calls that fail, lose their answer or take long.
    """

    def __init__(self, fleet: Fleet, witness: Callable[[Command], None]) -> None:
        self.fleet = fleet
        self.down = False
        self.flaky = 0.0
        self._witness = witness
        self._highest_epoch = 0
        #: Commands that were carried out, and the host that took a place.
        self._done: dict[str, str] = {}
        self._took = ""

    def perform(self, command: Command, answer: Callable[[Answer], None]) -> None:
        loop = self.fleet.loop
        draw = loop.random.random
        if self.down:
            return
        trouble = draw() < self.flaky
        kind = draw()
        if trouble and kind < 0.4:
            passing = Answer(status=OutcomeStatus.FAILED, text="conflict", passing=True)
            loop.after(0.2, lambda: answer(passing))
            return
        lost = trouble and kind < 0.7

        def carry_out() -> None:
            result = self._carry_out(command)
            if not lost:
                loop.after(0.1, lambda: answer(result))

        # Launchers wait for the stacks of all ranks.
        usual_s = 4.0 if command.kind is CommandKind.DUMP_STACKS else 0.5
        loop.after((15.0 if trouble and not lost else usual_s) * draw(), carry_out)

    def look(self, host: str, answer: Callable[[bool | None], None]) -> None:
        loop = self.fleet.loop
        if self.down or loop.random.random() < self.flaky:
            loop.after(1.0, lambda: answer(None))
            return
        loop.after(0.1 + 0.4 * loop.random.random(), lambda: answer(self.fleet.hosts[host].alive))

    def is_repeated(self, command: Command) -> bool:
        return command.id in self._done

    def is_fenced(self, command: Command) -> bool:
        return command.epoch < self._highest_epoch

    def _carry_out(self, command: Command) -> Answer:
        if self.is_fenced(command):
            text = "a newer controller has spoken"
            return Answer(status=OutcomeStatus.FENCED, text=text, epoch=self._highest_epoch)
        self._highest_epoch = max(self._highest_epoch, command.epoch)
        if self.is_repeated(command):
            return self._answer_of(command, "was done before")
        self._took = ""
        refusal = self._effect(command)
        if refusal:
            return Answer(status=OutcomeStatus.FAILED, text=refusal)
        self._done[command.id] = self._took
        self._witness(command)
        return self._answer_of(command)

    def _answer_of(self, command: Command, text: str = "") -> Answer:
        """Launchers that restart their ranks in place answer when all hosts of the job have met again."""
        job = self.fleet.jobs.get(command.workload)
        if command.kind is not CommandKind.IN_JOB_RESET or job is None:
            spare = self._done.get(command.id, "")
            return Answer(status=OutcomeStatus.DONE, text=text, spare=spare)
        deaf = all(self.fleet.hosts[name].deaf for name in job.hosts)
        if deaf or not (self.fleet.is_whole(job) and self.fleet.has_launchers(job)):
            return Answer(status=OutcomeStatus.FAILED, text="no launcher answered", passing=True)
        return Answer(status=OutcomeStatus.DONE, text=text)

    def _effect(self, command: Command) -> str:
        fleet, kind = self.fleet, command.kind
        job, host = fleet.jobs.get(command.workload), fleet.hosts.get(command.host)
        if kind is CommandKind.CHECK_HOST:
            assert host is not None
            if host.info.workload or not host.alive:
                return "a launcher is there"
            fleet.find(host, EventType.NODE_CHECK, None, cause="faulty" if host.broken else "ok")
            return ""
        if kind in (CommandKind.CORDON_HOST, CommandKind.DRAIN_HOST, CommandKind.UNCORDON_HOST):
            assert host is not None
            host.info = replace(host.info, cordoned=kind is not CommandKind.UNCORDON_HOST)
            return ""
        if job is None or kind is CommandKind.DUMP_STACKS:
            return "" if job else "no such job"
        if kind is CommandKind.IN_JOB_RESET and not fleet.has_launchers(job):
            return ""  # no launcher is left that could do it, as its answer will say
        if command.spare:
            # A scheduler takes any node that fits: the spare of the command is the controller's guess.
            free = [one for one in fleet.hosts.values() if one.alive and fleet.is_free(one)]
            if not free or command.host not in job.hosts:
                return "no spare is free, or the host is not of the job"
            spare = fleet.loop.random.choice(free)
            self._took = spare.info.id
            job.hosts[job.hosts.index(command.host)] = self._took
            fleet.assign(fleet.hosts[command.host], "")
            fleet.assign(spare, command.workload)
            spare.launcher = LauncherState.RUNNING
            if kind is CommandKind.HOT_SWAP and not fleet.has_launchers(job):
                return ""  # the spare's launcher waits for those of the others, which have ended
        elif kind is CommandKind.SCALE_DOWN:
            self._shrink(job, command)
        elif kind is CommandKind.SCALE_UP:
            refusal = self._grow(job, command)
            if refusal:
                return refusal
        if kind in (CommandKind.IN_JOB_RESET, CommandKind.HOT_SWAP):
            fleet.restart(job)
        else:
            fleet.start_again(job)
        return ""

    def _shrink(self, job: SimJob, command: Command) -> None:
        assert command.replicas is not None
        job.info = replace(job.info, replicas=command.replicas)
        # The lost ones first, then the last.
        names = sorted(
            job.hosts,
            key=lambda name: (name != command.host, self.fleet.hosts[name].alive, -job.hosts.index(name)),
        )
        for name in names[: len(job.hosts) - job.info.hosts]:
            job.hosts.remove(name)
            self.fleet.assign(self.fleet.hosts[name], "")

    def _grow(self, job: SimJob, command: Command) -> str:
        assert command.replicas is not None
        larger = replace(job.info, replicas=command.replicas)
        free = [
            host
            for host in self.fleet.hosts.values()
            if host.alive and not host.broken and self.fleet.is_free(host)
        ]
        needed = larger.hosts - len(job.hosts)
        if len(free) < needed:
            return "there is no room any more"
        job.info = larger
        for host in free[:needed]:
            job.hosts.append(host.info.id)
            self.fleet.assign(host, job.info.workload)
        return ""
