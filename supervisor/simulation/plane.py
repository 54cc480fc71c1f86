# SPDX-License-Identifier: Apache-2.0
"""The supervisor's processes in the virtual fleet: the real logic, and ways to stop it anywhere."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from functools import partial

from supervisor.control import ControllerCore
from supervisor.decision.controller import BaseController, Input
from supervisor.decision.state import State
from supervisor.detection import Detector, Output, Poll, Probe
from supervisor.detection.sightings import SILENT_SHARE
from supervisor.event_log import EventLog, LogDeposed, LogFull, Record
from supervisor.execution import Act, Executor, Look, Pace, Perform
from supervisor.orchestrator import Answer
from supervisor.policy.thresholds import Thresholds
from supervisor.simulation.fleet import Fleet, SimHost, SimOrchestrator
from supervisor.simulation.loop import Loop, Wire
from supervisor.values import (
    Command,
    Event,
    EventType,
    Evidence,
    HostInfo,
    Outcome,
    Progress,
    Request,
    WorkloadInfo,
)

#: How long parts wait before they connect again, and how often commands without outcome are repeated.
RECONNECT_S = 1.0
REPEAT_S = 20.0
#: How long daemons have to answer a poll before evidence is judged.
POLL_S = 0.5


class Crash(Exception):
    """The controller process dies here."""


class CrashingLog(EventLog):
    """The real log, with a process that may die before or after a write, or a disk that is full.

    Attributes:
        committed: what is in the log by the test's own account.
    """

    def __init__(self, connection: sqlite3.Connection, committed: State) -> None:
        self.committed = committed
        self.notes: list[tuple[float, str]] = []
        self.crash_at: str = ""
        self.full = False
        super().__init__(connection, compact_after=40, keep=0)

    def append(self, records: Sequence[Record]) -> None:
        if self.full:
            raise LogFull("event log: the disk is full.")
        # Where a command is decided, or lost, is where a crash can do harm.
        is_hit = any(table == "commands" for record in records for table, _, _ in record.changes)
        if is_hit and self.crash_at == "before":
            raise Crash
        super().append(records)
        for record in records:
            self.committed = self.committed.with_changes(record.changes)
            self.notes.extend((record.now, note) for note in record.notes)
        if is_hit and self.crash_at == "after":
            raise Crash


class Part:
    """A process that may be away (its messages are lost) or stopped (they wait)."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.up = True
        self.paused = False
        self.cut = False
        self.away_at = -1e9
        #: What its monotonic clock reads beyond the time that has passed: it began somewhere else, or jumped.
        self.ahead_s = 0.0
        self.woken: Callable[[], None] = lambda: None
        self._waiting: list[Callable[[], None]] = []

    @property
    def now(self) -> float:
        """By its own clock."""
        return self.loop.now + self.ahead_s

    def deliver(self, call: Callable[[], None]) -> None:
        if not self.up:
            return
        if self.paused:
            self._waiting.append(call)
        else:
            call()

    def pause(self, seconds: float) -> None:
        self.paused = True
        self.loop.after(seconds, self._go_on)

    def _go_on(self) -> None:
        self.paused = False
        self.away_at = self.loop.now
        # Its timers are due before it reads what has come meanwhile.
        self.woken()
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            self.deliver(call)


class Plane:
    """Sensor, controller, actuator and log over one fleet.

    Attributes:
        decided: called with each command, before it leaves.
        performing: called with each command at its first try.
    """

    def __init__(
        self,
        fleet: Fleet,
        controller: Callable[[], BaseController],
        thresholds: Thresholds,
        period_s: float,
    ) -> None:
        self.fleet = fleet
        self.loop = fleet.loop
        self.thresholds = thresholds
        self.period_s = period_s
        self.wire = Wire(self.loop)
        self.stream = Wire(self.loop)
        self.make_controller = controller
        self.effects: list[tuple[float, Command]] = []
        self.decided: Callable[[Command], None] = lambda command: None
        self.performing: Callable[[Command], None] = lambda command: None
        self.effected: Callable[[Command], None] = lambda command: None
        self.on_input: Callable[[Input], None] = lambda given: None
        self.recovered: Callable[[State, State], None] = lambda found, expected: None
        self.orchestrator = SimOrchestrator(fleet, lambda command: self.effected(command))
        self.sensor = Part(self.loop)
        self.brain = Part(self.loop)
        self.actuator = Part(self.loop)
        self.sensor.woken = self._look
        self.executor = Executor(Pace(try_s=20.0))
        self._incarnations = 0
        self._operator_events = 0
        self._resyncs = False
        self._wakes_at = 0.0
        self._deposed: list[tuple[ControllerCore, float]] = []
        self.detector = self._new_detector()
        self.database = sqlite3.connect(":memory:")
        self.log = CrashingLog(self.database, State.empty())
        self.core = ControllerCore(self.make_controller(), self.log, self.brain.now)
        fleet.changed = self._register
        fleet.news = self.send_report
        for host in fleet.hosts.values():
            self._connect(host)
            self.loop.after(period_s * self.loop.random.random(), partial(self._heartbeat, host))
        self._tick_sensor()
        self._tick_actuator()
        self._repeat_commands()

    def add_host(self, host: SimHost) -> None:
        """A machine that was not there at the beginning."""
        self.fleet.hosts[host.info.id] = host
        self._connect(host)
        self.loop.after(self.period_s * self.loop.random.random(), partial(self._heartbeat, host))

    def close(self) -> None:
        self.database.close()

    def history(self) -> list[str]:
        """What was decided, with the time of the log's clock."""
        return [f"{now:7.1f} s {note}" for now, note in self.log.notes]

    def clock_jumps(self) -> None:
        """The sensor's: its machine was moved, and nothing was on its way longer than usual."""
        self.sensor.ahead_s += 3600.0

    def stop_all(self, seconds: float) -> None:
        """The machine of all three parts stands still."""
        for part in (self.sensor, self.brain, self.actuator):
            part.pause(seconds)

    def sensor_was_away(self, *, within_s: float) -> bool:
        return self.loop.now - self.sensor.away_at < within_s

    # -------------------------------------------------------------------------------- daemons

    def _reaches(self, host: SimHost) -> bool:
        return host.alive and host.daemon and not host.cut

    def _heartbeat(self, host: SimHost) -> None:
        self.loop.after(self.period_s, lambda: self._heartbeat(host))
        self.send_report(host)

    def send_report(self, host: SimHost) -> None:
        """Also between beats: a daemon tells at once what changed."""
        if not self._reaches(host) or not self.sensor.up:
            return
        if not host.connected:
            self._connect(host)
        elif host.described != self.fleet.describe(host):
            self._register(host)
        report = self.fleet.report(host)

        def arrive() -> None:
            if self.loop.now - host.heard_at > SILENT_SHARE * self.thresholds.heartbeat_timeout_s:
                host.late_at = self.loop.now
            host.heard_at = self.loop.now
            self._to_sensor(host, lambda: self.detector.report(report, self.sensor.now))

        self.loop.after(host.slow_s, lambda: self.wire.send(arrive))

    def _connect(self, host: SimHost) -> None:
        if self._reaches(host) and self.sensor.up:
            host.connected, host.back_at = True, self.loop.now
            self._register(host)

    def _register(self, host: SimHost) -> None:
        if not self._reaches(host) or not host.connected:
            return
        info, job = self.fleet.describe(host), self.fleet.job_of(host)
        host.described = info

        def arrive() -> list[Output]:
            now = self.sensor.now
            said = self.detector.register_workload(job.info, now) if job else []
            return said + self.detector.register_host(info, now)

        self.loop.after(0.02, lambda: self._to_sensor(host, arrive))

    def end_stream(self, host: SimHost) -> None:
        """What the sensor's side of a connection notices."""
        host.connected = False
        if not host.cut:
            self.loop.after(
                0.05,
                lambda: self.sensor.deliver(
                    lambda: self._say(self.detector.stream_ended(host.info.id, self.sensor.now))
                ),
            )

    def _to_sensor(self, host: SimHost, take: Callable[[], list[Output]]) -> None:
        if not host.cut:
            self.sensor.deliver(lambda: self._say(take()))

    # -------------------------------------------------------------------------------- sensor

    def _new_detector(self) -> Detector:
        self._incarnations += 1
        return Detector(f"s{self._incarnations}", self.thresholds, self.sensor.now)

    def _tick_sensor(self) -> None:
        self.loop.after(self.thresholds.tick_s, self._tick_sensor)
        if self.sensor.up and not self.sensor.paused:
            self._look()

    def _look(self) -> None:
        self._say(self.detector.tick(self.sensor.now))

    def crash_sensor(self, seconds: float) -> None:
        """It forgets everything; daemons connect again."""
        self.sensor.up = False
        for host in self.fleet.hosts.values():
            host.connected = False

        def start() -> None:
            self.sensor.up = True
            self.sensor.away_at = self.loop.now
            self.detector = self._new_detector()
            for host in self.fleet.hosts.values():
                self.loop.after(RECONNECT_S * self.loop.random.random(), partial(self._connect, host))
            self.loop.after(RECONNECT_S, self._resync)

        self.loop.after(seconds, start)

    def _say(self, said: list[Output]) -> None:
        for each in said:
            if isinstance(each, Probe):
                self._probe(each.host)
            elif isinstance(each, Poll):
                host = self.fleet.hosts[each.host]
                if not host.deaf:
                    self.wire.send(partial(self.send_report, host))
            else:
                self.tell(each)

    def _probe(self, name: str) -> None:
        self.orchestrator.look(
            name,
            lambda alive: self.sensor.deliver(
                lambda: self._say(
                    self.detector.witness_answered(name, alive, "orchestrator", self.sensor.now)
                )
            ),
        )

    # -------------------------------------------------------------------------------- controller

    def tell(self, given: Input) -> None:
        teller = self.actuator if isinstance(given, Outcome) else self.sensor
        if given is None or (isinstance(given, Event) and given.type is EventType.OPERATOR):
            teller = self.brain  # a person and a clock are never cut off

        def arrive() -> None:
            if teller is self.brain or self._can_speak(teller, self.brain):
                self.brain.deliver(lambda: self._take(given))

        if isinstance(given, Event | Outcome | Progress):
            # What was said of hosts and jobs before is in an earlier batch, or before it in the same one.
            self.wire.send(arrive, after=self.stream.last)
        else:
            self.stream.send_in_order(arrive)

    def cut_off(self, part: Part, seconds: float) -> None:
        """Nothing passes between `part` and the other two; what was lost is told again afterwards."""
        part.cut = True

        def heal() -> None:
            part.cut = False
            self._resync()

        self.loop.after(seconds, heal)

    def _can_speak(self, one: Part, other: Part) -> bool:
        return not (one.cut or other.cut)

    def ask(self, request: Request, host: str = "", workload: str = "") -> None:
        """What a person types."""
        fleet = self.core.state.fleet.get("")
        if request is Request.THAW and fleet is not None and fleet.silent and not fleet.frozen_by:
            # Nobody but the sensor has frozen it: the person says that the silent hosts are lost indeed.
            self.sensor.deliver(lambda: self._say(self.detector.thaw(self.sensor.now)))
            return
        self._operator_events += 1
        name = f"person:{self._operator_events}"
        evidence = (Evidence(id=f"{name}/0", witness="operator", text="a person"),)
        event = Event(
            id=name, type=EventType.OPERATOR, evidence=evidence, host=host, workload=workload, request=request
        )
        self.tell(event)

    def _take(self, given: Input) -> None:
        if not self.brain.up:
            return
        for deposed in list(self._deposed):
            self._let_deposed_take(deposed, given)
        try:
            commands = self.core.take(given, self.brain.now)
        except Crash:
            if self.log.crash_at == "after":
                self.on_input(given)
            self.crash_controller(5.0)
            return
        except LogFull:
            # Nothing was decided; what is known is told again once there is room.
            if not self._resyncs:
                self._resyncs = True
                self.loop.after(REPEAT_S, self._resync)
            return
        self.on_input(given)
        for command in commands:
            self.decided(command)
            self._command(command)
        self._wake_later()

    def _wake_later(self) -> None:
        wake = self.core.wake_after(self.brain.now)
        if wake is None:
            return
        at, core = self.loop.now + max(wake, 0.05), self.core
        # Of several alarms for one core only the earliest counts; it sets the next.
        if not self.loop.now < self._wakes_at <= at:
            self._wakes_at = at
            self.loop.after(at - self.loop.now, lambda: self.brain.deliver(lambda: self._wake(core)))

    def _wake(self, core: ControllerCore) -> None:
        if core is self.core:
            self._take(None)

    def _let_deposed_take(self, deposed: tuple[ControllerCore, float], given: Input) -> None:
        """It does not know yet that another one has taken over; what it decides must have no effect."""
        core, ahead_s = deposed
        try:
            for command in core.take(given, self.loop.now + ahead_s):
                self._command(command)
        except (LogDeposed, LogFull, Crash):
            self._deposed.remove(deposed)

    def _command(self, command: Command) -> None:
        def arrive() -> None:
            if self._can_speak(self.brain, self.actuator):
                self.actuator.deliver(lambda: self._do(self.executor.submit(command, self.loop.now)))

        self.wire.send(arrive)

    def crash_controller(self, seconds: float) -> None:
        self.brain.up = False
        committed = self.log.committed

        def start() -> None:
            if not self.brain.up:
                self.brain.up = True
                self._start_controller(committed)

        self.loop.after(seconds, start)

    def second_controller(self) -> None:
        """Another one takes over while commands of the first are still on their way."""
        if self.brain.up:
            self._deposed.append((self.core, self.brain.ahead_s))
            self._start_controller(self.log.committed)

    def _start_controller(self, committed: State) -> None:
        self.brain.ahead_s = 1e6 * self.loop.random.random() - self.loop.now
        full, notes = self.log.full, self.log.notes
        self.log = CrashingLog(self.database, committed)
        self.log.full, self.log.notes = full, notes
        self._wakes_at = 0.0
        self.recovered(self.log.replayed.state, committed)
        self.core = ControllerCore(self.make_controller(), self.log, self.brain.now)
        for command in self.core.resume():
            self._command(command)
        self.tell(None)
        self._resync()

    def _resync(self) -> None:
        """Sensor and controller have met again: each tells what the other may have missed."""
        self._resyncs = False
        if self.brain.up and self._can_speak(self.sensor, self.brain):
            workloads, hosts = list(self.core.state.workloads.values()), list(self.core.state.hosts.values())
            progress = self.core.progress(self.brain.now)
            self.sensor.deliver(lambda: self._expect(workloads, hosts, progress))

    def _expect(self, workloads: list[WorkloadInfo], hosts: list[HostInfo], steps: list[Progress]) -> None:
        now = self.sensor.now
        for workload in workloads:
            self._say(self.detector.expect_workload(workload, now))
        for host in hosts:
            self._say(self.detector.expect_host(host, now))
        for progress in steps:
            self._say(self.detector.expect_progress(progress, now))
        self._say(self.detector.snapshot(now))

    def _repeat_commands(self) -> None:
        self.loop.after(REPEAT_S, self._repeat_commands)
        if self.brain.up and not self.brain.paused:
            for command in self.core.resume():
                self._command(command)

    # -------------------------------------------------------------------------------- actuator

    def _tick_actuator(self) -> None:
        self.loop.after(1.0, self._tick_actuator)
        if self.actuator.up and not self.actuator.paused:
            self._do(self.executor.tick(self.loop.now))

    def crash_actuator(self, seconds: float) -> None:
        self.actuator.up = False

        def start() -> None:
            self.actuator.up = True
            self.executor = Executor(Pace(try_s=20.0))

        self.loop.after(seconds, start)

    def _do(self, acts: list[Act]) -> None:
        for act in acts:
            if isinstance(act, Outcome):
                self.tell(act)
            elif isinstance(act, Look):
                self._look_again(act.command)
            else:
                self._perform(act)

    def _look_again(self, command: Command) -> None:
        executor = self.executor

        def answer(holds: bool | None) -> None:
            self.actuator.deliver(
                lambda: (
                    self._do(self.executor.looked(command.id, holds, self.loop.now))
                    if executor is self.executor
                    else None
                )
            )

        def ask() -> None:
            self._say(self.detector.poll(command.workload))
            self.loop.after(POLL_S, lambda: self.sensor.deliver(tell))

        def tell() -> None:
            holds = self.detector.holds(command, self.sensor.now)
            self.wire.send(lambda: answer(holds))

        if self._can_speak(self.actuator, self.sensor):
            self.wire.send(lambda: self.sensor.deliver(ask))

    def _perform(self, act: Perform) -> None:
        executor = self.executor
        if act.number == 1:
            self.performing(act.command)

        def answer(result: Answer) -> None:
            self.actuator.deliver(
                lambda: (
                    self._do(self.executor.answered(act.command.id, act.number, result, self.loop.now))
                    if executor is self.executor
                    else None
                )
            )

        self.orchestrator.perform(act.command, answer)
