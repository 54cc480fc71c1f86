# SPDX-License-Identifier: Apache-2.0
"""The services of the protocol with values at both ends: what to serve, and how to call it.

Who may call what is decided here: training hosts may open their streams, and nothing else.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from supervisor.protocol import fleet_pb2
from supervisor.protocol.convert import from_message, to_message
from supervisor.transport.client import Remote
from supervisor.transport.errors import Reason, Refused
from supervisor.transport.host_streams import HostStreams
from supervisor.transport.limits import BATCH_ITEMS
from supervisor.transport.server import Service
from supervisor.values import Command, DaemonReport, Event, HostInfo, Outcome, Progress, Silence, WorkloadInfo

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
    """What a sensor tells a controller at once.  `complete`: this is all that it knows."""

    events: tuple[Event, ...] = ()
    hosts: tuple[HostInfo, ...] = ()
    workloads: tuple[WorkloadInfo, ...] = ()
    progress: tuple[Progress, ...] = ()
    silence: Silence | None = None
    complete: bool = False


def sensor_service(streams: HostStreams, holds: Callable[[Command], bool | None]) -> Service:
    """What a sensor serves; `holds` says whether a command's evidence still does, None if it cannot tell."""

    async def check_evidence(message: Any) -> Any:
        seen = holds(from_message(Command, message))
        return fleet_pb2.Holding() if seen is None else fleet_pb2.Holding(holds=seen)

    return Service(
        descriptor=SENSOR,
        handlers={"Connect": streams.connect, "CheckEvidence": check_evidence},
        for_hosts=frozenset({"Connect"}),
    )


async def ask_evidence(remote: Remote, command: Command, *, timeout_s: float) -> bool | None:
    """Ask a sensor whether the evidence of `command` still holds; None if it cannot tell.

    Raises:
        Refused, Unreachable: see `Remote.call`; to the caller the same as None.
    """
    method = SENSOR.methods_by_name["CheckEvidence"]
    reply = await remote.call(method, to_message(command), timeout_s=timeout_s)
    return bool(reply.holds) if reply.HasField("holds") else None


def controller_service(
    on_observations: Callable[[Observations], Awaitable[None]],
    on_outcomes: Callable[[tuple[Outcome, ...]], Awaitable[None]],
) -> Service:
    """What a controller serves; each handler returns when it has made durable what it was given."""

    async def report_events(batch: Any) -> Any:
        seen = Observations(
            events=_values(Event, batch.events),
            hosts=_values(HostInfo, batch.hosts),
            workloads=_values(WorkloadInfo, batch.workloads),
            progress=_values(Progress, batch.progress),
            silence=from_message(Silence, batch.silence) if batch.HasField("silence") else None,
            complete=batch.complete,
        )
        await on_observations(seen)
        return fleet_pb2.Accepted(count=len(seen.events))

    async def report_outcomes(batch: Any) -> Any:
        outcomes = _values(Outcome, batch.outcomes)
        await on_outcomes(outcomes)
        return fleet_pb2.Accepted(count=len(outcomes))

    return Service(
        descriptor=CONTROLLER, handlers={"ReportEvents": report_events, "ReportOutcomes": report_outcomes}
    )


def actuator_service(
    streams: HostStreams, on_commands: Callable[[tuple[Command, ...]], Awaitable[None]]
) -> Service:
    async def execute(batch: Any) -> Any:
        commands = _values(Command, batch.commands)
        await on_commands(commands)
        return fleet_pb2.Accepted(count=len(commands))

    return Service(
        descriptor=ACTUATOR,
        handlers={"Connect": streams.connect, "Execute": execute},
        for_hosts=frozenset({"Connect"}),
    )


async def send_observations(remote: Remote, seen: Observations, *, deadline_s: float) -> None:
    """Tell a controller; again until it has accepted, or `deadline_s` is over.

    A large one goes in several batches, of which only one that holds all carries `complete`.

    Raises:
        Refused, Unreachable: see `Remote.call_until`; batches before may have arrived, and may be repeated.
    """
    parts = list(_batches(seen))
    for events, hosts, workloads, progress in parts:
        batch = fleet_pb2.EventBatch(
            events=[to_message(value) for value in events],
            hosts=[to_message(value) for value in hosts],
            workloads=[to_message(value) for value in workloads],
            progress=[to_message(value) for value in progress],
            silence=to_message(seen.silence) if seen.silence is not None else None,
            complete=seen.complete and len(parts) == 1,
        )
        method = CONTROLLER.methods_by_name["ReportEvents"]
        await remote.call_until(method, batch, timeout_s=CALL_TIMEOUT_S, deadline_s=deadline_s)


def _batches(
    seen: Observations,
) -> Iterator[tuple[Sequence[Event], Sequence[HostInfo], Sequence[WorkloadInfo], Sequence[Progress]]]:
    longest = max(len(seen.events), len(seen.hosts), len(seen.workloads), len(seen.progress), 1)
    for start in range(0, longest, BATCH_ITEMS):
        end = start + BATCH_ITEMS
        yield (
            seen.events[start:end],
            seen.hosts[start:end],
            seen.workloads[start:end],
            seen.progress[start:end],
        )


async def send_commands(remote: Remote, commands: Sequence[Command], *, deadline_s: float) -> None:
    """Hand `commands` to an actuator, which drops ids that it has."""
    for start in range(0, len(commands), BATCH_ITEMS):
        part = commands[start : start + BATCH_ITEMS]
        batch = fleet_pb2.CommandBatch(commands=[to_message(command) for command in part])
        method = ACTUATOR.methods_by_name["Execute"]
        await remote.call_until(method, batch, timeout_s=CALL_TIMEOUT_S, deadline_s=deadline_s)


async def send_outcomes(remote: Remote, outcomes: Sequence[Outcome], *, deadline_s: float) -> None:
    """Tell a controller how commands ended."""
    for start in range(0, len(outcomes), BATCH_ITEMS):
        part = outcomes[start : start + BATCH_ITEMS]
        batch = fleet_pb2.OutcomeBatch(outcomes=[to_message(outcome) for outcome in part])
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
    return tuple(from_message(kind, message) for message in messages)  # type: ignore[type-var]
