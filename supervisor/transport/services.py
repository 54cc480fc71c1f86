# SPDX-License-Identifier: Apache-2.0
"""The services of the protocol with values at both ends: what to serve, and how to call it.

Who may call what is decided here: training hosts may open their streams and probe a
daemon, and nothing else.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from supervisor.detection import HostSight
from supervisor.protocol import fleet_pb2
from supervisor.protocol.convert import from_message, to_message
from supervisor.transport.client import Remote
from supervisor.transport.errors import Reason, Refused, Unreachable
from supervisor.transport.host_streams import HostStreams
from supervisor.transport.limits import BATCH_BYTES, BATCH_ITEMS, check_epoch
from supervisor.transport.server import Service
from supervisor.values import (
    Change,
    Command,
    DaemonReport,
    Event,
    Evidence,
    HostInfo,
    LauncherState,
    Outcome,
    Progress,
    Silence,
    WorkloadInfo,
)

T = TypeVar("T")

SENSOR, CONTROLLER, ACTUATOR, HOST_DAEMON = (
    fleet_pb2.DESCRIPTOR.services_by_name[name] for name in ("Sensor", "Controller", "Actuator", "HostDaemon")
)
SENSOR_CONNECT = SENSOR.methods_by_name["Connect"]
ACTUATOR_CONNECT = ACTUATOR.methods_by_name["Connect"]

#: Longest time for one try of a call between parts.
CALL_TIMEOUT_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Observations:
    """What a sensor tells a controller at once."""

    events: tuple[Event, ...] = ()
    hosts: tuple[HostInfo, ...] = ()
    workloads: tuple[WorkloadInfo, ...] = ()
    progress: tuple[Progress, ...] = ()
    silence: Silence | None = None


@dataclass(frozen=True, kw_only=True)
class EvidenceCheck:
    """A sensor's answer about a command.

    Attributes:
        holds: whether its evidence still does; None if the sensor cannot tell.
        attempt: that the job's hosts are at; None where none has said.
    """

    holds: bool | None
    attempt: int | None = None


@dataclass(frozen=True, kw_only=True)
class Known:
    """One page of what a controller of this epoch knows; workloads and progress are on the first one."""

    epoch: int
    workloads: tuple[WorkloadInfo, ...] = ()
    hosts: tuple[HostInfo, ...] = ()
    more: bool = False
    progress: tuple[Progress, ...] = ()


class SensorHandlers(Protocol):
    """What a sensor answers, beside its streams of hosts."""

    async def check_evidence(self, command: Command) -> EvidenceCheck: ...

    def take_change(self, host: str, change: Change, evidence: Evidence) -> None: ...

    def sights(self, after: str) -> tuple[list[HostSight], bool]:
        """Hosts behind `after` in the order of their ids, and whether there are more."""
        ...

    def thaw(self) -> None: ...


def sensor_service(streams: HostStreams, handlers: SensorHandlers) -> Service:
    async def check_evidence(message: Any) -> Any:
        seen = await handlers.check_evidence(from_message(Command, message))
        return fleet_pb2.Holding(**_given(holds=seen.holds, attempt=seen.attempt))

    async def report_change(message: Any) -> Any:
        if message.change not in {change.value for change in Change}:
            allowed = ", ".join(change.value for change in Change)
            raise Refused(
                f"a change is one of {allowed}, found {message.change!r:.40}.", reason=Reason.INVALID
            )
        evidence = from_message(Evidence, message.evidence)
        handlers.take_change(message.host, Change(message.change), evidence)
        return fleet_pb2.Accepted(count=1)

    async def list_sights(message: Any) -> Any:
        sights, more = handlers.sights(message.after)
        return fleet_pb2.Sights(hosts=[_sight_message(sight) for sight in sights], more=more)

    async def thaw(_: Any) -> Any:
        handlers.thaw()
        return fleet_pb2.Accepted(count=1)

    return Service(
        descriptor=SENSOR,
        handlers={
            "Connect": streams.connect,
            "CheckEvidence": check_evidence,
            "ReportChange": report_change,
            "ListSights": list_sights,
            "Thaw": thaw,
        },
    )


def _given(**fields: Any) -> Any:
    """The fields of a message without those that are None."""
    return {name: value for name, value in fields.items() if value is not None}


def _sight_message(sight: HostSight) -> Any:
    return fleet_pb2.HostSight(
        host=sight.host,
        connected=sight.connected,
        age_s=sight.age_s,
        silent=sight.silent,
        attempt=sight.attempt,
        launcher=sight.launcher.value,
        steps=[fleet_pb2.RankStep(rank=rank, step=step) for rank, step in sight.steps],
        condition=sight.condition,
    )


async def ask_evidence(remote: Remote, command: Command, *, timeout_s: float) -> EvidenceCheck:
    """Ask a sensor whether the evidence of `command` still holds.

    Raises:
        Refused, Unreachable: see `Remote.call`; to the caller the same as "cannot tell".
    """
    method = SENSOR.methods_by_name["CheckEvidence"]
    reply = await remote.call(method, to_message(command), timeout_s=timeout_s)
    return EvidenceCheck(
        holds=reply.holds if reply.HasField("holds") else None,
        attempt=reply.attempt if reply.HasField("attempt") else None,
    )


async def send_change(
    remote: Remote, host: str, change: Change, evidence: Evidence, *, deadline_s: float
) -> None:
    """Tell a sensor what the orchestrator did to a host; repeated, it is the same by the evidence's id."""
    message = fleet_pb2.HostChange(host=host, change=change.value, evidence=to_message(evidence))
    method = SENSOR.methods_by_name["ReportChange"]
    await remote.call_until(method, message, timeout_s=CALL_TIMEOUT_S, deadline_s=deadline_s)


async def ask_sights(remote: Remote, *, timeout_s: float) -> list[HostSight]:
    """How a sensor sees all hosts.

    Raises:
        Refused, Unreachable: see `Remote.call`.
    """
    method = SENSOR.methods_by_name["ListSights"]
    seen: list[HostSight] = []
    while True:
        after = seen[-1].host if seen else ""
        reply = await remote.call(method, fleet_pb2.SightsRequest(after=after), timeout_s=timeout_s)
        seen += [
            HostSight(
                host=one.host,
                connected=one.connected,
                age_s=one.age_s,
                silent=one.silent,
                attempt=one.attempt,
                launcher=LauncherState(one.launcher),
                steps=tuple((step.rank, step.step) for step in one.steps),
                condition=one.condition,
            )
            for one in reply.hosts
        ]
        if not reply.more or not reply.hosts:
            return seen


async def send_thaw(remote: Remote, *, timeout_s: float) -> None:
    """Tell a sensor that the hosts that are silent are lost indeed."""
    await remote.call(SENSOR.methods_by_name["Thaw"], fleet_pb2.ThawRequest(), timeout_s=timeout_s)


def controller_service(
    on_observations: Callable[[Observations], Awaitable[int]],
    on_outcomes: Callable[[tuple[Outcome, ...]], Awaitable[None]],
    known: Callable[[str], Known],
) -> Service:
    """What a controller serves; the first two return when they have made durable what they were given.

    Args:
        on_observations: returns the controller's epoch.
        known: a page of hosts behind the given id, in the order of their ids.
    """

    async def report_events(batch: Any) -> Any:
        seen = Observations(
            events=_values(Event, batch.events),
            hosts=_values(HostInfo, batch.hosts),
            workloads=_values(WorkloadInfo, batch.workloads),
            progress=_values(Progress, batch.progress),
            silence=from_message(Silence, batch.silence) if batch.HasField("silence") else None,
        )
        epoch = await on_observations(seen)
        return fleet_pb2.Accepted(count=len(seen.events), epoch=epoch)

    async def report_outcomes(batch: Any) -> Any:
        outcomes = _values(Outcome, batch.outcomes)
        for outcome in outcomes:
            check_epoch(outcome.epoch)
        await on_outcomes(outcomes)
        return fleet_pb2.Accepted(count=len(outcomes))

    async def list_known(message: Any) -> Any:
        page = known(message.after)
        hosts = next(_batches((to_message(host) for host in page.hosts), _size_of), [])
        return fleet_pb2.Known(
            epoch=page.epoch,
            workloads=[to_message(workload) for workload in page.workloads],
            hosts=hosts,
            more=page.more or len(hosts) < len(page.hosts),
            progress=[to_message(progress) for progress in page.progress],
        )

    return Service(
        descriptor=CONTROLLER,
        handlers={
            "ReportEvents": report_events,
            "ReportOutcomes": report_outcomes,
            "ListKnown": list_known,
        },
    )


async def ask_known(remote: Remote, *, timeout_s: float) -> Known:
    """All that a controller knows: jobs and hosts.

    Raises:
        Refused, Unreachable: see `Remote.call`; also where the controller changed between two pages.
    """
    method = CONTROLLER.methods_by_name["ListKnown"]
    pages: list[Any] = []
    while True:
        after = pages[-1].hosts[-1].id if pages else ""
        page = await remote.call(method, fleet_pb2.KnownRequest(after=after), timeout_s=timeout_s)
        pages.append(page)
        if page.epoch != pages[0].epoch:
            raise Unreachable("the controller started again while it was asked.", address=remote.address)
        if not page.more or not page.hosts:
            return Known(
                epoch=page.epoch,
                workloads=_all(WorkloadInfo, (one for page in pages for one in page.workloads)),
                hosts=_all(HostInfo, (one for page in pages for one in page.hosts)),
                progress=_all(Progress, (one for page in pages for one in page.progress)),
            )


class ActuatorHandlers(Protocol):
    """What an actuator answers, beside its streams of hosts."""

    async def take_commands(self, commands: tuple[Command, ...]) -> None: ...

    async def look_at_host(self, host: str) -> bool | None:
        """The orchestrator's word on whether the host is there; None is "cannot tell"."""
        ...


def actuator_service(streams: HostStreams, handlers: ActuatorHandlers) -> Service:
    async def execute(batch: Any) -> Any:
        commands = _values(Command, batch.commands)
        for command in commands:
            check_epoch(command.epoch)
        await handlers.take_commands(commands)
        return fleet_pb2.Accepted(count=len(commands))

    async def look_at_host(message: Any) -> Any:
        return fleet_pb2.LookReply(**_given(there=await handlers.look_at_host(message.host)))

    return Service(
        descriptor=ACTUATOR,
        handlers={"Connect": streams.connect, "Execute": execute, "LookAtHost": look_at_host},
    )


async def ask_orchestrator(remote: Remote, host: str, *, timeout_s: float) -> bool | None:
    """Ask an actuator whether its orchestrator sees `host`; None if it cannot tell.

    Raises:
        Refused, Unreachable: see `Remote.call`; to the caller the same as None.
    """
    method = ACTUATOR.methods_by_name["LookAtHost"]
    reply = await remote.call(method, fleet_pb2.LookRequest(host=host), timeout_s=timeout_s)
    return bool(reply.there) if reply.HasField("there") else None


async def send_observations(remote: Remote, seen: Observations, *, deadline_s: float) -> int:
    """Tell a controller; again until it has accepted, or `deadline_s` is over.  Returns its epoch.

    A large one goes in several batches.

    Raises:
        Refused, Unreachable: see `Remote.call_until`; batches before may have arrived, and may be repeated.
    """
    reports = [
        *(("workloads", to_message(value)) for value in seen.workloads),
        *(("hosts", to_message(value)) for value in seen.hosts),
        *(("progress", to_message(value)) for value in seen.progress),
        *(("events", to_message(value)) for value in seen.events),
    ]
    parts = list(_batches(reports, lambda one: _size_of(one[1]))) or [[]]
    epoch = 0
    for part in parts:
        batch = fleet_pb2.EventBatch(
            **{name: [one for field, one in part if field == name] for name, _ in part},
            silence=to_message(seen.silence) if seen.silence is not None else None,
        )
        method = CONTROLLER.methods_by_name["ReportEvents"]
        reply = await remote.call_until(method, batch, timeout_s=CALL_TIMEOUT_S, deadline_s=deadline_s)
        epoch = reply.epoch
    return epoch


def _batches(items: Iterable[T], size_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Cut `items` so that each batch fits a message."""
    batch: list[T] = []
    used = 0
    for one in items:
        size = size_of(one)
        if batch and (len(batch) >= BATCH_ITEMS or used + size > BATCH_BYTES):
            yield batch
            batch, used = [], 0
        batch.append(one)
        used += size
    if batch:
        yield batch


def _size_of(message: Any) -> int:
    return int(message.ByteSize())


async def send_commands(remote: Remote, commands: Sequence[Command], *, deadline_s: float) -> None:
    """Hand `commands` to an actuator, which drops ids that it has."""
    for part in _batches((to_message(command) for command in commands), _size_of):
        batch = fleet_pb2.CommandBatch(commands=part)
        method = ACTUATOR.methods_by_name["Execute"]
        await remote.call_until(method, batch, timeout_s=CALL_TIMEOUT_S, deadline_s=deadline_s)


async def send_outcomes(remote: Remote, outcomes: Sequence[Outcome], *, deadline_s: float) -> None:
    """Tell a controller how commands ended."""
    for part in _batches((to_message(outcome) for outcome in outcomes), _size_of):
        batch = fleet_pb2.OutcomeBatch(outcomes=part)
        method = CONTROLLER.methods_by_name["ReportOutcomes"]
        await remote.call_until(method, batch, timeout_s=CALL_TIMEOUT_S, deadline_s=deadline_s)


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What a daemon answers on the second path.  `age_s`: since the daemon started."""

    host: str
    incarnation: str
    age_s: float
    report: DaemonReport


def daemon_service(probe: Callable[[], Probe]) -> Service:
    async def answer(_: Any) -> Any:
        seen = probe()
        return fleet_pb2.ProbeReply(
            host=seen.host,
            incarnation=seen.incarnation,
            age_s=seen.age_s,
            report=to_message(seen.report),
        )

    return Service(descriptor=HOST_DAEMON, handlers={"Probe": answer})


async def probe_daemon(remote: Remote, *, timeout_s: float) -> Probe:
    """Ask a daemon directly.

    Raises:
        Refused, Unreachable: it did not answer with a report.
    """
    method = HOST_DAEMON.methods_by_name["Probe"]
    reply = await remote.call(method, fleet_pb2.ProbeRequest(), timeout_s=timeout_s)
    return Probe(
        host=reply.host,
        incarnation=reply.incarnation,
        age_s=reply.age_s,
        report=from_message(DaemonReport, reply.report),
    )


def _values(kind: type[T], messages: Any) -> tuple[T, ...]:
    if len(messages) > BATCH_ITEMS:
        raise Refused(
            f"a batch holds at most {BATCH_ITEMS} values, found {len(messages)}.", reason=Reason.INVALID
        )
    return _all(kind, messages)


def _all(kind: type[T], messages: Iterable[Any]) -> tuple[T, ...]:
    return tuple(from_message(kind, message) for message in messages)  # type: ignore[type-var]
