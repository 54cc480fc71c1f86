# SPDX-License-Identifier: Apache-2.0
"""The sensor process: streams of hosts on one side, the detector in between, the controller on the other.

The controller is away, slow or new at times.  The sensor keeps no queue for it: after a call that failed, or
when the controller's epoch changed, the two tell each other all that they know (`_meet`), and go on from
there with what is new.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Coroutine, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from resiliency.errors import ControlPlaneError
from resiliency.tasks import end_tasks, wait_for
from supervisor.detection import Detector, HostSight, Output, Poll, Probe
from supervisor.parts.descriptions import JobDescriptions
from supervisor.parts.settings import PartSettings
from supervisor.parts.tasks import Contact, Tasks
from supervisor.transport.client import Remote
from supervisor.transport.errors import Refused, Unreachable
from supervisor.transport.host_streams import HostStreams
from supervisor.transport.limits import BATCH_ITEMS, Backoff
from supervisor.transport.server import Service
from supervisor.transport.services import (
    EvidenceCheck,
    Observations,
    ask_known,
    ask_orchestrator,
    probe_daemon,
    send_observations,
    sensor_service,
)
from supervisor.values import (
    Change,
    Command,
    DaemonReport,
    Event,
    Evidence,
    HostInfo,
    Progress,
    Silence,
    Value,
    WorkloadInfo,
)

logger = logging.getLogger(__name__)

#: How long hosts have to answer a poll before evidence is judged.
POLL_S, LOOK_S = 0.5, 0.02
#: A sign of life to the controller where there is no news; a controller that started again is noticed by it.
IDLE_S = 1.0
#: Longest pause between tries to reach the controller.
RETRY_S = 2.0
#: For all tries of one batch.
SEND_S = 5.0
#: News that no decision waits for are gathered that long: a fleet that connects is told of in few calls.
GATHER_S = 0.05
#: For each path to a host that is probed, and how many are probed at once.
PROBE_S, PROBES_AT_ONCE = 2.0, 64
#: Before each look at a host whose stream has ended.
PROBE_PAUSES_S = (0.0, 0.5, 1.5)


class News:
    """What the controller has not been told yet: of each thing the newest, events in their order."""

    def __init__(self) -> None:
        self._events: dict[str, Event] = {}
        self._hosts: dict[str, HostInfo] = {}
        self._workloads: dict[str, WorkloadInfo] = {}
        self._progress: dict[str, Progress] = {}
        self._silence: Silence | None = None
        self.arrived = asyncio.Event()

    def add(self, report: Event | HostInfo | WorkloadInfo | Progress | Silence) -> None:
        if isinstance(report, Event):
            self._events[report.id] = report
        elif isinstance(report, HostInfo):
            self._hosts[report.id] = report
        elif isinstance(report, WorkloadInfo):
            self._workloads[report.workload] = report
        elif isinstance(report, Progress):
            self._progress[report.workload] = report
        else:
            self._silence = report
        self.arrived.set()

    @property
    def is_pressing(self) -> bool:
        return bool(self._events) or self._silence is not None

    def take(self) -> Observations:
        """All of it, which is none afterwards."""
        seen = Observations(
            events=tuple(self._events.values()),
            hosts=tuple(self._hosts.values()),
            workloads=tuple(self._workloads.values()),
            progress=tuple(self._progress.values()),
            silence=self._silence,
        )
        self.clear()
        return seen

    def clear(self) -> None:
        for table in (self._events, self._hosts, self._workloads, self._progress):
            table.clear()
        self._silence = None
        self.arrived.clear()


class SensorPart:
    """All of one sensor; `run` returns when it is cancelled."""

    def __init__(self, settings: PartSettings) -> None:
        self._settings = settings
        self._limits = settings.thresholds
        self._detector = Detector(uuid.uuid4().hex[:12], settings.thresholds, time.monotonic())
        self._streams = HostStreams(part="sensor", report_period_s=settings.report_period_s, listener=self)
        self._news = News()
        self._hosts: dict[str, HostInfo] = {}  # by id, for their addresses
        self._ids: dict[str, str] = {}  # by name
        self._descriptions = JobDescriptions()
        self._tasks = Tasks()
        self._probes = asyncio.Semaphore(PROBES_AT_ONCE)
        self._controller = Remote(settings.addresses["controller"], settings.security)

    def services(self) -> list[Service]:
        return [sensor_service(self._streams, self)]

    async def run(self) -> None:
        try:
            await self._tasks.run_all(self._tick(), self._to_controller())
        finally:
            await self._controller.close()

    # ------------------------------------------------------------------------------------- streams of hosts

    def host_connected(self, host: HostInfo, incarnation: str) -> None:
        del incarnation
        self._ids[host.name] = host.id
        self._register(host)

    def host_message(self, host: str, value: Value) -> None:
        if isinstance(value, DaemonReport):
            self._say(self._detector.report(value, time.monotonic()))
        elif isinstance(value, HostInfo):
            self._register(value)
        elif isinstance(value, WorkloadInfo):
            self._register_jobs(self._descriptions.take_description(self._ids[host], value))

    def host_lost(self, host: str, incarnation: str) -> None:
        del incarnation
        self._register_jobs(self._descriptions.forget_host(self._ids[host]))
        self._say(self._detector.stream_ended(self._ids[host], time.monotonic()))

    def _register_jobs(self, described: Iterable[WorkloadInfo]) -> None:
        for info in described:
            self._say(self._detector.register_workload(with_defaults(info, self._settings), time.monotonic()))

    def _register(self, host: HostInfo) -> None:
        self._hosts[host.id] = host
        self._register_jobs(self._descriptions.take_job(host.id, host.workload))
        self._say(self._detector.register_host(host, time.monotonic()))

    # ------------------------------------------------------------------------------------- the detector

    async def _tick(self) -> None:
        while True:
            self._say(self._detector.tick(time.monotonic()))
            self._forget_hosts()
            await asyncio.sleep(self._limits.tick_s / 2)

    def _forget_hosts(self) -> None:
        """Those that the detector has forgotten."""
        if len(self._hosts) > self._detector.host_count:
            self._hosts = {key: host for key, host in self._hosts.items() if self._detector.knows_host(key)}
            self._ids = {name: key for name, key in self._ids.items() if key in self._hosts}

    def _say(self, said: Iterable[Output]) -> None:
        for one in said:
            if isinstance(one, Probe):
                self._tasks.start(self._probe(one.host))
            elif isinstance(one, Poll):
                host = self._hosts.get(one.host)
                if host is not None:
                    self._streams.try_ask_resend(host.name)
            else:
                if isinstance(one, Event):
                    logger.info("event %s: %s of %s, %s", one.id, one.type.value, _whom(one), _why(one))
                self._news.add(one)

    async def _probe(self, id: str) -> None:
        """Look at a host by two other paths, side by side, and a little later again while it is there.

        The parts of a host that is lost do not all end in the same instant.
        """
        for pause_s in PROBE_PAUSES_S:
            await asyncio.sleep(pause_s)
            host = self._hosts.get(id)
            if pause_s and (host is None or host.name in self._streams.hosts):
                return
            async with self._probes:
                alive, witness = await first_alive(
                    daemon=self._ask_daemon(id), orchestrator=self._ask_orchestrator(id)
                )
            self._say(self._detector.witness_answered(id, alive, witness, time.monotonic()))
            if not alive:
                return

    async def _ask_daemon(self, id: str) -> bool | None:
        host = self._hosts.get(id)
        if host is None or not host.address:
            return None
        try:
            async with Remote(host.address, self._settings.security.for_daemons) as remote:
                seen = await probe_daemon(remote, timeout_s=PROBE_S)
        except ControlPlaneError:
            return None
        return seen.report.host == id or None

    async def _ask_orchestrator(self, id: str) -> bool | None:
        address = self._settings.addresses["actuator"]
        if not address:
            return None
        try:
            async with Remote(address, self._settings.security) as actuator:
                return await ask_orchestrator(actuator, id, timeout_s=PROBE_S)
        except ControlPlaneError:
            return None

    # ------------------------------------------------------------------------------------- the controller

    async def _to_controller(self) -> None:
        contact = Contact("controller", self._controller.address)
        backoff = Backoff(most_s=RETRY_S)
        while True:
            try:
                epoch = await self._meet()
                contact.succeeded(f"epoch {epoch}")
                backoff.reset()
                while await self._send_news() == epoch:
                    pass
            except (Refused, Unreachable) as error:
                contact.failed(error)
                await self._controller.close()
                await asyncio.sleep(backoff.next_s())

    async def _meet(self) -> int:
        """Learn what the controller knows, and tell it all that it may have missed; returns its epoch."""
        known = await ask_known(self._controller, timeout_s=SEND_S)
        now = time.monotonic()
        for workload in known.workloads:
            self._say(self._detector.expect_workload(workload, now))
        for host in known.hosts:
            self._hosts.setdefault(host.id, host)
            self._say(self._detector.expect_host(host, now))
        for progress in known.progress:
            self._say(self._detector.expect_progress(progress, now))
        for gone in self._detector.forget_replaced(known.hosts, now):
            self._hosts.pop(gone, None)
        self._news.clear()  # the snapshot has all of it
        self._say(self._detector.snapshot(now))
        await send_observations(self._controller, self._news.take(), deadline_s=SEND_S)
        return known.epoch

    async def _send_news(self) -> int:
        with suppress(asyncio.TimeoutError):
            await wait_for(self._news.arrived.wait(), IDLE_S)
        if not self._news.is_pressing:
            await asyncio.sleep(GATHER_S)
        return await send_observations(self._controller, self._news.take(), deadline_s=SEND_S)

    # ------------------------------------------------------------------------------------- calls

    async def check_evidence(self, command: Command) -> EvidenceCheck:
        self._say(self._detector.poll(command.workload))
        end = time.monotonic() + POLL_S
        while (holds := self._detector.holds(command, time.monotonic())) is None and time.monotonic() < end:
            await asyncio.sleep(LOOK_S)
        return EvidenceCheck(holds=holds, attempt=self._detector.attempt_of(command.workload))

    def take_change(self, host: str, change: Change, evidence: Evidence) -> None:
        self._say(self._detector.orchestrator_changed(host, change, evidence, time.monotonic()))

    def sights(self, after: str) -> tuple[list[HostSight], bool]:
        return self._detector.sights(after, BATCH_ITEMS, time.monotonic())

    def thaw(self) -> None:
        self._say(self._detector.thaw(time.monotonic()))


async def first_alive(**asked: Coroutine[Any, Any, bool | None]) -> tuple[bool | None, str]:
    """What witnesses say of a host, and which of them: the first that sees it ends the wait for the others.

    A daemon that is stopped answers at its deadline only, by which the host may have been called lost.
    """
    said: tuple[bool | None, str] = (None, next(iter(asked)))
    waiting = {asyncio.ensure_future(answer): name for name, answer in asked.items()}
    try:
        while waiting and not said[0]:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for one in done:
                name = waiting.pop(one)
                if (alive := one.result()) is not None and not said[0]:
                    said = (alive, name)
        return said
    finally:
        await end_tasks(waiting)


def with_defaults(info: WorkloadInfo, settings: PartSettings) -> WorkloadInfo:
    """`info` with what the environment says where the job says nothing; its bounds of size are its own."""
    in_bounds = info.min_replicas <= info.replicas <= info.max_replicas
    return replace(
        info,
        scaling=info.scaling or (settings.environment.scaling and in_bounds),
        max_in_job_restarts=info.max_in_job_restarts or settings.environment.max_in_job_restarts,
        max_workload_restarts=info.max_workload_restarts or settings.environment.max_workload_restarts,
    )


def _whom(event: Event) -> str:
    return " ".join(part for part in (event.workload, event.host) if part) or "the fleet"


def _why(event: Event) -> str:
    return event.evidence[0].text or event.evidence[0].witness
