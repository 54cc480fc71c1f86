# SPDX-License-Identifier: Apache-2.0
"""What must never be, whatever goes wrong, by what is true and not by what the logic believes."""

from __future__ import annotations

import math
from collections import Counter

from supervisor.decision.controller import Input
from supervisor.decision.state import State
from supervisor.detection.sightings import SILENT_SHARE
from supervisor.execution import Pace
from supervisor.policy.thresholds import Thresholds
from supervisor.simulation.faults import SimFault, hit_hosts
from supervisor.simulation.plane import Plane
from supervisor.values import (
    Command,
    CommandKind,
    Event,
    EventType,
    HostInfo,
    LauncherState,
    Outcome,
    OutcomeStatus,
    Progress,
    Silence,
    WorkloadInfo,
)

#: While nothing else has happened, all that launchers say is read at once.
_OF_HOSTS = frozenset(
    {"worker dies", "host dies", "job hangs", "job hangs at its start", "job is slow", "xid", "ecc"}
)
#: Longest time from a launcher's report to the controller, over two wires.
_READ_S = 7.0
#: A step is known that long after it was finished, if it ever is.
_TELLS_S = 60.0
#: Longest time from a checkpoint to a growth that waited for it: hosts report every ten seconds.
_KEPT_WITHIN_S = 15.0


class Violation(AssertionError):
    """An invariant does not hold."""


class Invariants:
    """Watches one run: what the controller was told and decided, and what the orchestrator carried out."""

    def __init__(self, plane: Plane, limits: Thresholds) -> None:
        self._plane = plane
        self._limits = limits
        self._effects: Counter[str] = Counter()
        self._highest_epoch = 0
        self._cordons: list[tuple[float, tuple[str, ...], str]] = []
        self._restarts: dict[str, list[tuple[float, int, float]]] = {}  # time, best step, the log's time
        self._last_action: dict[str, tuple[tuple[object, ...], float]] = {}  # for what, and when
        self._resets: dict[tuple[str, CommandKind], set[str]] = {}
        self._ended: set[str] = set()  # commands whose outcome was told
        self._reported_step: dict[str, tuple[int, int]] = {}
        self._reported_step_at: dict[str, float] = {}
        self._runs: dict[str, tuple[str, int]] = {}  # run and its first attempt, by job
        self._decided: set[str] = set()
        self._grown: dict[str, int] = {}
        self._said: dict[str, Event] = {}
        self._reported_at: dict[tuple[str, LauncherState], float] = {}
        self._lost_at: dict[str, float] = {}  # when evidence confirmed that a host is gone
        #: Hosts that a fault has touched; all others are there and are heard from begin to end.
        self._disturbed: set[str] = set()
        #: Hosts that were lost in one moment with too many others for that to be believed.
        self._fell_together: set[str] = set()
        self._incident_of: dict[str, str] = {}
        self._hears_all = True
        self._dumps: dict[str, tuple[str, float]] = {}  # by incident: the command, and when it was begun
        self._excused: set[str] = set()  # losses after whose end a job may be tried anew
        self._tried_again: dict[str, float] = {}  # of the log's clock
        self._for_ended: dict[str, str] = {}  # commands for jobs whose launchers had given up
        plane.decided = self.command_decided
        plane.performing = self.command_starts
        plane.effected = self.effect_happened
        plane.on_input = self.controller_input
        plane.recovered = self.controller_recovered

    @property
    def effects(self) -> int:
        return len(self._effects)

    # -------------------------------------------------------------------------------- at each moment

    def fault_hits(self, fault: SimFault) -> None:
        self._hears_all = self._hears_all and fault.kind in _OF_HOSTS
        if fault.kind in ("host dies", "daemon dies", "partition"):
            hit = hit_hosts(self._plane, fault)
            newly = [host.info.id for host in hit if host.alive and host.daemon and not host.cut]
            self._disturbed.update(host.info.id for host in hit)
            many = len(newly) > self._limits.silence_share * len(self._plane.fleet.hosts)
            many = many and len(newly) >= self._limits.silence_min_hosts
            if many and fault.kind == "host dies" and not fault.seconds:
                self._fell_together.update(newly)

    def controller_input(self, given: Input) -> None:
        now = self._plane.loop.now
        if isinstance(given, Progress) and self._is_news(given):
            step, at = (given.attempt, given.step), now - given.age_s
            if step == self._reported_step.get(given.workload):  # it was read late, and is reported again
                at = min(at, self._reported_step_at[given.workload])
            self._reported_step[given.workload], self._reported_step_at[given.workload] = step, at
        if (
            isinstance(given, Silence)
            and given.frozen
            and len(self._disturbed | self._late_hosts()) < self._limits.silence_min_hosts
        ):
            raise Violation(f"frozen for {given.silent} silent hosts, and no fault touched so many")
        if isinstance(given, WorkloadInfo):
            self._note_run(given)
        if isinstance(given, Outcome):
            self._ended.add(given.command)
            if given.status is OutcomeStatus.WITHDRAWN:
                self._check_withdrawn(given.command)
        if isinstance(given, Event):
            self._forget_vain_resets()
            if given.type is EventType.HOST_HB and given.id not in self._said:
                self._check_lost(given)
            if given.id not in self._said and (given.confirms_loss or given.ends_attempt):
                self._lost_at.update((found.id, now) for found in given.evidence)
            self._said[given.id] = given
            self._reported_at[given.host, given.launcher] = now

    def _is_news(self, given: Progress) -> bool:
        known = self._reported_step.get(given.workload, (-1, -1))
        of_run = given.run in ("", self._runs.get(given.workload, ("", 0))[0])
        return of_run and (given.attempt, given.step) >= known

    def _late_hosts(self) -> set[str]:
        """Hosts of which a message was so long on its way that they may have counted as silent."""
        now, timeout_s = self._plane.loop.now, self._limits.heartbeat_timeout_s
        return {
            name
            for name, host in self._plane.fleet.hosts.items()
            if now - host.late_at < timeout_s or now - host.heard_at > SILENT_SHARE * timeout_s
        }

    def _note_run(self, job: WorkloadInfo) -> None:
        """Another job under the name of one before has all its tries."""
        name, (_, first) = job.workload, self._runs.get(job.workload, ("", 0))
        if self._runs.get(name) and self._runs[name][0] != job.run and job.first_attempt <= first:
            for table in (self._restarts, self._last_action, self._reported_step, self._reported_step_at):
                table.pop(name, None)
            for kind in CommandKind:
                self._resets.pop((name, kind), None)
            # A host that is lost is lost to this one too.
            for event in self._said.values():
                if event.type is EventType.HOST_HB and event.workload == name:
                    self._incident_of.pop(event.id, None)
        self._runs[name] = job.run, job.first_attempt

    def _check_lost(self, event: Event) -> None:
        """No host is called lost that is there and is heard, nor one of many that fell silent together."""
        witnessed = not event.evidence[0].text.startswith("operator")
        host = self._plane.fleet.hosts[event.host]
        if host.alive and host.daemon and event.host not in self._disturbed and witnessed:
            raise Violation(f"healthy host {event.host} was declared lost: {event.evidence[0].text}")
        # One that another fault has started again leaves the others too few to be doubted.
        hosts = self._plane.fleet.hosts
        gone = sum(not hosts[name].alive for name in self._fell_together)
        many = gone >= self._limits.silence_min_hosts and gone > self._limits.silence_share * len(hosts)
        if event.host in self._fell_together and many and witnessed:
            raise Violation(f"{event.host} was declared lost, one of too many at once to be believed")

    def command_decided(self, command: Command) -> None:
        plane, now = self._plane, self._plane.loop.now
        if command.id in self._decided:
            raise Violation(f"command id {command.id} was used twice")
        self._decided.add(command.id)
        if not command.incident:
            return
        self._check_incident(command)
        self._check_diagnosed(command)
        fleet = plane.core.state.fleet.get("")
        if fleet is not None and (fleet.silent or fleet.frozen_by):
            raise Violation(f"{command.kind.value} {command.id} was decided while the fleet was frozen")
        verdict = plane.core.state.verdicts.get(f"job:{command.workload}")
        if verdict is not None and verdict.at < plane.core.now < verdict.expires_at:
            raise Violation(f"{command.kind.value} {command.id} for {command.workload}, which was given up")
        under_way = [
            flight.command.id
            for flight in plane.core.state.commands.values()
            if flight.command.workload == command.workload and flight.command.kind.restarts
        ]
        if len(under_way) > 1:
            raise Violation(f"{command.workload} has {len(under_way)} actions under way: {under_way}")
        if command.kind.restarts and not command.evidence:
            raise Violation(f"{command.kind.value} {command.id} has no evidence")
        reported_at = self._reported_step_at.get(command.workload, -math.inf)
        lost_at = max((self._lost_at.get(each, -math.inf) for each in command.evidence), default=-math.inf)
        recent = now - reported_at < self._limits.advancing_s - 0.5
        if command.kind.restarts and recent and reported_at > lost_at + 0.5:
            raise Violation(
                f"{command.kind.value} {command.id} for {command.workload},"
                f" which advanced {now - reported_at:.1f} s ago"
            )
        if command.spare:
            self._check_spare(command)
        if command.kind is CommandKind.SCALE_UP:
            self._check_growth(command)
        if command.kind in (CommandKind.IN_JOB_RESET, CommandKind.WORKLOAD_RESET):
            self._check_launcher(command)
        if command.kind.restarts and self._hears_all:
            self._check_ended(command)
        if command.kind.restarts:
            self._count_restart(command, now)
            self._check_pause(command)

    def _check_diagnosed(self, command: Command) -> None:
        """What launchers say takes away no host that works."""
        said = {each.type for each in self._said.values() if each.host == command.host}
        takes = command.kind in (CommandKind.CORDON_HOST, CommandKind.HOT_SWAP)
        blamed = EventType.DIAGNOSIS in said and said <= {EventType.WORKER_HB, EventType.DIAGNOSIS}
        if takes and blamed and not self._plane.fleet.hosts[command.host].broken:
            raise Violation(f"{command.kind.value} {command.id} takes {command.host} away, which works")

    def _check_incident(self, command: Command) -> None:
        """An event is acted upon in one incident; told again later, it is no new one."""
        for incident in self._plane.core.state.incidents.values():
            if incident.id != command.incident:
                continue
            for report in incident.past:
                if self._incident_of.setdefault(report.id, incident.id) != incident.id:
                    raise Violation(
                        f"event {report.id} of {self._incident_of[report.id]} led to {command.kind.value}"
                        f" {command.id} of {incident.id} as well"
                    )

    def _check_spare(self, command: Command) -> None:
        """What was known of it allows the job's ranks, and no zone but the job's only one."""
        hosts = self._plane.core.state.hosts
        spare, lost = hosts[command.spare], hosts[command.host]
        zones = {host.zone for host in (*self._hosts_of(command.workload), lost)}
        if spare.workers_per_host != lost.workers_per_host:
            raise Violation(f"{command.id} takes {spare.id}, which has {spare.workers_per_host} workers")
        if len(zones) == 1 and spare.zone not in zones:
            raise Violation(f"{command.id} takes {spare.id}, which is in another zone than its job")

    def _hosts_of(self, workload: str) -> list[HostInfo]:
        return [host for host in self._plane.core.state.hosts.values() if host.workload == workload]

    def _check_growth(self, command: Command) -> None:
        state, hosts = self._plane.core.state, self._hosts_of(command.workload)
        workers, zones = {host.workers_per_host for host in hosts}, {host.zone for host in hosts}
        spares = sum(
            host.state.value == "spare"
            and not (host.workload or host.cordoned)
            and (not workers or host.workers_per_host in workers)
            and (len(zones) != 1 or host.zone in zones)
            for host in state.hosts.values()
        )
        job = state.workloads[command.workload]
        needed = ((command.replicas or 0) - job.replicas) * job.nodes_per_replica
        if spares - needed < self._limits.spare_floor:
            raise Violation(f"{command.workload} grows by {needed} of {spares} spares, below the floor")
        if not job.scaling or (command.replicas or 0) > job.max_replicas:
            raise Violation(f"{command.workload} grows beyond its bounds")
        quiet = state.accounts[command.workload].quiet_since if command.workload in state.accounts else 0.0
        now = self._plane.core.now
        job_now, loop_now = self._plane.fleet.jobs[command.workload], self._plane.loop.now
        lost_s = (job_now.step(loop_now) - job_now.kept_step(loop_now)) * job_now.step_s
        # A policy of a user's may come upon it at another time.
        is_offered = state.incidents[command.workload].opened_at == now
        if is_offered and lost_s > _KEPT_WITHIN_S:
            raise Violation(f"{command.workload} grows {lost_s:.0f} s of steps after its last checkpoint")
        if quiet and now - quiet < self._limits.scale_up_hold_s - 1.0:
            raise Violation(f"{command.workload} grows {now - quiet:.0f} s after its last incident")

    def _check_launcher(self, command: Command) -> None:
        """The launcher said that it is at it, moments ago, and nothing else was said about the job."""
        incident = self._plane.core.state.incidents[command.workload]
        now = self._plane.core.now
        reports = incident.past + incident.reports
        young = now - incident.opened_at < self._limits.launcher_grace_s - 1.0
        if self._hears_all and young and all(map(self._is_at_it, reports)):
            raise Violation(f"{command.kind.value} {command.id} while the launcher restarts the ranks itself")
        ended = [report for report in reports if report.launcher.value == "gave_up"]
        if command.kind is CommandKind.IN_JOB_RESET and ended:
            raise Violation(
                f"{command.id} asks the launcher of {ended[0].host}, which has ended, for a restart"
            )

    def _is_at_it(self, report: Event) -> bool:
        at_it = report.host and self._has_said(report.host, LauncherState.RESTARTING)
        return report.type is EventType.WORKER_HB and bool(at_it)

    def _has_said(self, name: str, state: LauncherState) -> bool:
        """Whether the host's launcher is at `state`, and the controller was told, or should have been."""
        host = self._plane.fleet.hosts[name]
        reported = host.reacted_at <= self._reported_at.get((name, state), -math.inf)
        return host.launcher is state and (reported or self._plane.loop.now - host.reacted_at > _READ_S)

    def _check_ended(self, command: Command) -> None:
        """Launchers that gave up have said so, and only an action that starts all again can work."""
        plane = self._plane
        hosts = {name: plane.fleet.hosts[name] for name in plane.fleet.jobs[command.workload].hosts}
        ended = [
            name
            for name, host in hosts.items()
            if host.alive and host.launcher is LauncherState.GAVE_UP
            if name not in (*self._disturbed, command.host) and self._has_said(name, host.launcher)
        ]
        if ended and not command.kind.relaunches:
            raise Violation(f"{command.kind.value} {command.id} although the launcher of {ended[0]} gave up")
        if ended:
            self._for_ended[command.id] = command.workload

    def _check_withdrawn(self, id: str) -> None:
        # An actuator that died after the effect does not know of it: to the controller nobody was cordoned.
        self._cordons = [each for each in self._cordons if each[2] != id]
        job = self._plane.fleet.jobs.get(self._for_ended.get(id, ""))
        if self._hears_all and job is not None and not self._plane.fleet.has_launchers(job):
            raise Violation(f"command {id} was withdrawn, and {job.info.workload} has launchers that gave up")

    def _count_restart(self, command: Command, now: float) -> None:
        name = command.workload
        job, best = self._plane.core.state.workloads[name], self._best(name)
        history = self._restarts.setdefault(name, [])
        history.append((now, best, self._plane.core.now))
        recent = [at for at, _, _ in history if now - at < self._limits.action_period_s]
        if len(recent) > self._limits.actions_at_once + 1:
            raise Violation(f"{name} had {len(recent)} actions within {self._limits.action_period_s:g} s")
        verdict = self._plane.core.state.verdicts.get(f"job:{name}")
        # With a spare, or a host that is back, it may be tried anew, once for each loss.
        losses = {each.id: each.host for each in self._said.values() if each.type is EventType.HOST_HB}
        back = {one for one, host in losses.items() if self._plane.fleet.hosts[host].alive} - self._excused
        if command.spare or back:
            self._excused |= back
            self._tried_again[name] = self._plane.core.now
        # Once a verdict has expired it has as many tries as before, too.
        since = verdict.expires_at if verdict is not None else self._tried_again.get(name, 0.0)
        fruitless = [at for at, step, logged in history if step == best and logged >= since]
        most = self._limits.max_fruitless + job.max_in_job_restarts + job.max_workload_restarts
        if len(fruitless) > most:
            raise Violation(f"{name} had {len(fruitless)} actions without a step, its most is {most}")

    def _check_pause(self, command: Command) -> None:
        """A second try for the same hosts, without a step since the first, waits."""
        core = self._plane.core
        incident = core.state.incidents[command.workload]
        what = (incident.id, self._best(command.workload), frozenset(incident.handled), bool(command.spare))
        before, at = self._last_action.get(command.workload, ((), 0.0))
        woken = self._tried_again.get(command.workload) == core.now
        if before == what and not woken and core.now - at < self._limits.backoff_s - 0.1:
            raise Violation(f"{command.id} follows a fruitless action after {core.now - at:.1f} s")
        self._last_action[command.workload] = (what, core.now)

    def _count_reset(self, command: Command) -> None:
        """Budgets: what was given, and one more for each so many steps."""
        if command.workload not in self._plane.core.state.workloads:
            return
        job = self._plane.core.state.workloads[command.workload]
        counted = self._resets.setdefault((command.workload, command.kind), set())
        counted |= {command.id} & set(self._plane.core.state.commands)
        used = len(counted)
        given = self._best(command.workload) // self._limits.steps_per_restart
        if command.kind is CommandKind.IN_JOB_RESET and used > job.max_in_job_restarts + given:
            raise Violation(f"{command.workload} had {used} in-job resets, its budget is used up")

    def _forget_vain_resets(self) -> None:
        """One that is waited for no longer, as a lost host made it vain, is not charged."""
        for counted in self._resets.values():
            counted &= self._ended | set(self._plane.core.state.commands)

    def _best(self, name: str) -> int:
        mark = self._plane.core.state.progress.get(name)
        return mark.best if mark else 0

    def command_starts(self, command: Command) -> None:
        """The first try of a command; its evidence was looked at again a moment ago."""
        plane, job = self._plane, self._plane.fleet.jobs.get(command.workload)
        now = plane.loop.now
        if command.kind is CommandKind.DUMP_STACKS:
            self._dumps[command.incident] = command.id, now
        if job is None or not command.kind.restarts or not command.incident:
            return
        dump, at = self._dumps.get(command.incident, ("", 0.0))
        if dump and not self._effects[dump] and now - at < Pace().stacks_s - 0.5:
            raise Violation(
                f"{command.id} restarts the ranks of {command.workload} before their stacks are here"
            )
        self._check_gone(command)
        running_s = now - job.since if job.since is not None else 0.0
        heard = any(
            plane.fleet.hosts[name].alive
            and plane.fleet.hosts[name].daemon
            and plane.fleet.hosts[name].connected  # a daemon that has just come back has said nothing yet
            and not plane.fleet.hosts[name].cut
            for name in job.hosts
        )
        long_s = 3 * plane.period_s
        known = heard and plane.sensor.up and not plane.sensor_was_away(within_s=long_s)
        if known and running_s > long_s and job.step_s < 2.0:
            raise Violation(f"{command.kind.value} {command.id} restarts {command.workload}, which advances")

    def _check_gone(self, command: Command) -> None:
        """A host that was called lost, and is back and well since it was last heard, is not taken away."""
        host = self._plane.fleet.hosts.get(command.host)
        if host is None:
            return
        reasons = [
            each for each in self._said.values() if {one.id for one in each.evidence} & {*command.evidence}
        ]
        known = {one.id for each in reasons for one in each.evidence}
        lost = all(each.type is EventType.HOST_HB for each in reasons) and known >= {*command.evidence}
        here = host.alive and host.daemon and host.connected and not host.cut
        well = not host.failed and host.launcher is not LauncherState.GAVE_UP
        if lost and here and well and self._plane.loop.now - host.back_at > _READ_S:
            raise Violation(f"{command.kind.value} {command.id} takes {command.host} away, which is back")

    def effect_happened(self, command: Command) -> None:
        now = self._plane.loop.now
        if command.id not in self._decided:
            raise Violation(f"{command.kind.value} {command.id} had an effect, and no log holds it")
        self._effects[command.id] += 1
        if self._effects[command.id] > 1:
            raise Violation(f"command {command.id} had {self._effects[command.id]} effects")
        if command.epoch < self._highest_epoch:
            raise Violation(
                f"command {command.id} of epoch {command.epoch} after one of {self._highest_epoch}"
            )
        self._highest_epoch = command.epoch
        self._count_reset(command)
        if command.kind is CommandKind.CORDON_HOST and command.incident:
            self._cordons.append((now, self._plane.fleet.hosts[command.host].info.domains[:1], command.id))
            recent = [
                domain for at, domain, _ in self._cordons if now - at < self._limits.cordon_window_s * 0.9
            ]
            if len(recent) > self._limits.max_cordons:
                raise Violation(f"{len(recent)} hosts were cordoned within one window")
            if max(Counter(recent).values()) > self._limits.max_cordons_per_domain:
                raise Violation("too many hosts of one domain were cordoned within one window")
        job = self._plane.fleet.jobs.get(command.workload)
        if job is not None and job.info.replicas < job.info.min_replicas:
            raise Violation(f"{command.workload} runs with {job.info.replicas} replicas, below its least")

    def controller_recovered(self, found: State, expected: State) -> None:
        if found != expected:
            tables = [name for name in vars(expected) if getattr(found, name) != getattr(expected, name)]
            raise Violation(f"the log gave back another state than was written, in {tables}")

        self._decided.update(found.commands)

    # -------------------------------------------------------------------------------- at the end

    def unsettled(self) -> str:
        """What is neither in progress nor in a stated verdict; empty if all is."""
        plane, state = self._plane, self._plane.core.state
        if not (plane.brain.up and plane.sensor.up and plane.actuator.up):
            return "a part of the supervisor is away"
        fleet = state.fleet.get("")
        for name, job in plane.fleet.jobs.items():
            verdict = state.verdicts.get(f"job:{name}")
            if verdict is not None and plane.core.now < verdict.expires_at:
                best = state.progress[name].best if name in state.progress else 0
                if job.since is not None and job.step(plane.loop.now) > best + _TELLS_S / job.step_s:
                    return f"{name} was given up, and trains"
                continue
            if fleet is not None and (fleet.silent or fleet.frozen_by):
                return "the fleet is frozen"
            if job.since is None:
                return f"{name} does not train"
            if name in state.incidents:
                return f"{name} trains, its incident is open: {state.incidents[name].note}"
        return f"commands without outcome: {sorted(state.commands)}" if state.commands else ""
