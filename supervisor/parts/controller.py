# SPDX-License-Identifier: Apache-2.0
"""The controller process: what it is told goes through the log into its state, and commands come out.

The log goes first, always: a call of the sensor or of the actuator is answered when the decision about it is
on the disk, and a command leaves only then.  Commands are sent again until their outcome is here, which makes
an actuator that was away, a lost call and the controller's own restart the same case.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime, timezone

from resiliency.errors import ControlPlaneError
from resiliency.runtime import awake_s
from resiliency.tasks import wait_for
from supervisor.control import ControllerCore
from supervisor.decision.controller import Input
from supervisor.event_log import EventLog, LogDeposed, LogError, Record
from supervisor.parts.job_events import JobEvents
from supervisor.parts.journal import Journal
from supervisor.parts.settings import PartSettings
from supervisor.parts.status import Surroundings, find_host, make_status
from supervisor.parts.tasks import Contact, Tasks
from supervisor.transport.client import Remote
from supervisor.transport.errors import Reason, Refused, Unreachable
from supervisor.transport.limits import Backoff
from supervisor.transport.operators import operator_service
from supervisor.transport.server import Service
from supervisor.transport.services import (
    Known,
    Observations,
    ask_sights,
    controller_service,
    send_commands,
    send_thaw,
)
from supervisor.values import Event, EventType, Evidence, Outcome, Request, cut_text
from supervisor.view.status import (
    MOST_RECORDS,
    ActReply,
    ActRequest,
    History,
    HistoryRequest,
    RecordStatus,
    Status,
)

logger = logging.getLogger(__name__)

#: How often commands without an outcome are sent again, and longest pause between tries to do so.
RESEND_S = 2.0
#: Time alone is looked at least that often, whatever the state says.
LOOK_S = 5.0
#: Hosts in one page of what the controller knows: of 64 workers each they fit a message.
KNOWN_HOSTS = 250
#: For the sensor's part of a status.
SIGHTS_S = 2.0


class ControllerPart:
    """All of one controller; `run` returns when it is cancelled, or raises `LogDeposed` when it must end.

    Args:
        log: open; closed by the caller.
    """

    def __init__(self, settings: PartSettings, log: EventLog) -> None:
        self._settings = settings
        policy = settings.policy(settings.thresholds, shadow=settings.shadow)
        self._core = ControllerCore(policy, log, awake_s())
        self._core.recorded = self._note
        self._log = log
        self._began = awake_s()
        self._tasks = Tasks()
        self._wake = asyncio.Event()
        self._commands = asyncio.Event()
        self._commands.set()
        self._requests = 0
        self._journal = Journal()
        for written in log.newest(limit=MOST_RECORDS):
            self._journal.add(written.record)
        self._job_events = JobEvents(
            settings.state_dir,
            [one.incident.id for one in self._journal.incidents.values() if one.closed_at is not None],
        )
        self._closed = asyncio.Event()
        self._counters: Counter[tuple[str, tuple[tuple[str, str], ...]]] = Counter()
        self._log_problem = ""
        self._actuator = Remote(settings.addresses["actuator"], settings.security)
        self._from_sensor = Contact("sensor", settings.addresses["sensor"])
        self._to_actuator = Contact("actuator", self._actuator.address)
        state = self._core.state
        logger.info(
            "controller of epoch %d: %d hosts, %d jobs, %d incidents, %d commands under way",
            *(log.epoch, len(state.hosts), len(state.workloads), len(state.incidents), len(state.commands)),
        )

    def services(self) -> list[Service]:
        return [
            controller_service(self._take_observations, self._take_outcomes, self._known),
            operator_service(self.status, self.act, self.history),
        ]

    async def run(self) -> None:
        try:
            await self._tasks.run_all(self._watch_time(), self._send_commands(), self._write_closed())
        finally:
            with suppress(LogError):  # what is lost is told again
                self._core.flush()
            await self._actuator.close()

    # ------------------------------------------------------------------------------------- inputs

    async def _take_observations(self, seen: Observations) -> int:
        self._take(
            (
                *seen.workloads,
                *seen.hosts,
                *seen.progress,
                *((seen.silence,) if seen.silence is not None else ()),
                *seen.events,
            )
        )
        self._from_sensor.succeeded()
        return self._log.epoch

    async def _take_outcomes(self, outcomes: tuple[Outcome, ...]) -> None:
        self._take(outcomes)

    def _known(self, after: str) -> Known:
        hosts = sorted(
            (host for host in self._core.state.hosts.values() if host.id > after), key=lambda host: host.id
        )
        return Known(
            epoch=self._log.epoch,
            workloads=() if after else tuple(self._core.state.workloads.values()),
            hosts=tuple(hosts[:KNOWN_HOSTS]),
            more=len(hosts) > KNOWN_HOSTS,
            progress=() if after else tuple(self._core.progress(awake_s())),
        )

    def _take(self, inputs: Iterable[Input]) -> None:
        """Decide, and write it down; what leaves afterwards leaves by `_send_commands`.

        Raises:
            Refused: the log takes nothing, so nothing was decided; the caller tells it again later.
        """
        try:
            commands = self._core.take_all(inputs, awake_s())
        except LogDeposed as error:
            self._tasks.fail(error)
            raise Refused(str(error), reason=Reason.INTERNAL) from error
        except LogError as error:
            if not self._log_problem:
                logger.error("%s", error)
            self._log_problem = str(error)
            self._counters["log_errors", ()] += 1
            raise Refused(str(error), reason=Reason.INTERNAL) from error
        if self._log_problem:
            logger.warning("event log: it takes records again")
            self._log_problem = ""
        if commands:
            self._commands.set()
        self._wake.set()

    def _note(self, record: Record) -> None:
        """One record is in the log."""
        self._journal.add(record)
        if any(table == "incidents" and row is None for table, _, row in record.changes):
            self._closed.set()
        self._counters["records", ()] += 1
        if record.kind == "Event":
            self._counters["events", (("type", record.given["type"]),)] += 1
            if any(table == "diagnoses" and row is not None for table, _, row in record.changes):
                self._counters["diagnoses", (("cause", record.given["evidence"][0]["cause"]),)] += 1
        elif record.kind == "Outcome":
            ended = self._journal.commands.get(record.given["command"])
            kind = ended.command.kind.value if ended else "unknown"
            labels = (("kind", kind), ("outcome", record.given["status"]))
            self._counters["commands", labels] += 1
        for note in record.notes:
            logger.info("%s", note)

    async def _write_closed(self) -> None:
        """Incidents that have closed, for the goodput of their jobs."""
        while True:
            await self._closed.wait()
            self._closed.clear()
            self._job_events.add_closed(await self.status(), datetime.now(timezone.utc))

    async def _watch_time(self) -> None:
        look_at = awake_s() + LOOK_S
        while True:
            now = awake_s()
            waits = (self._core.wake_after(now), look_at - now)
            self._wake.clear()
            with suppress(asyncio.TimeoutError):
                await wait_for(self._wake.wait(), max(0.05, min(wait for wait in waits if wait is not None)))
                if awake_s() < look_at:  # steps alone come more often than that
                    continue  # something else has changed: how long to wait is another question now
            look_at = awake_s() + LOOK_S
            try:
                self._take((None,))
            except Refused:
                await asyncio.sleep(RESEND_S)

    # ------------------------------------------------------------------------------------- commands

    async def _send_commands(self) -> None:
        backoff = Backoff(most_s=RESEND_S)
        sent: set[str] = set()
        while True:
            with suppress(asyncio.TimeoutError):
                await wait_for(self._commands.wait(), RESEND_S)
            new = self._commands.is_set()
            self._commands.clear()
            under_way = self._core.resume()
            first = [command for command in under_way if command.id not in sent]
            sent = {command.id for command in under_way}
            try:
                # Also with none: a sign of life that tells whether the actuator is there.
                due = list(first if new and first else under_way)
                await send_commands(self._actuator, due, deadline_s=RESEND_S)
                self._to_actuator.succeeded()
                backoff.reset()
            except (Refused, Unreachable) as error:
                sent.clear()
                self._to_actuator.failed(error)
                await self._actuator.close()
                await asyncio.sleep(backoff.next_s())

    # ------------------------------------------------------------------------------------- operators

    async def status(self) -> Status:
        """The fleet as it is now; the sensor's part of it is missing where the sensor does not answer."""
        sights = None
        if self._settings.addresses["sensor"]:
            try:
                async with self._sensor() as sensor:
                    sights = await ask_sights(sensor, timeout_s=SIGHTS_S)
                self._from_sensor.succeeded()
            except ControlPlaneError as error:
                self._from_sensor.failed(error)
        now = awake_s()
        around = Surroundings(
            epoch=self._log.epoch,
            uptime_s=now - self._began,
            shadow=self._settings.shadow,
            log_problem=self._log_problem,
            parts=(self._from_sensor, self._to_actuator),
            counters=dict(self._counters),
            sights=None if sights is None else {sight.host: sight for sight in sights},
        )
        # Beside this loop, which goes on: a state is never changed, its successor is another one.
        return await asyncio.to_thread(
            make_status,
            self._core.state,
            self._core.at(now),
            self._settings.thresholds,
            self._journal.copy(),
            around,
        )

    async def act(self, request: ActRequest) -> ActReply:
        """Take a person's request as an event."""
        host = ""
        if request.request in (Request.CORDON, Request.UNCORDON, Request.DRAIN):
            found = find_host(self._core.state, request.host)
            if found is None:
                raise Refused(
                    f"no host has the id or the name {request.host[:80]!r}.",
                    hint="The status lists all hosts.",
                    reason=Reason.INVALID,
                )
            host = found.id
        elif request.host or (request.request is Request.FREEZE and request.workload):
            raise Refused(
                f"{request.request.value} is for the whole fleet"
                + (", or for a job." if request.request is Request.THAW else "."),
                reason=Reason.INVALID,
            )
        elif request.workload and request.workload not in self._core.state.workloads:
            raise Refused(f"no job has the name {request.workload[:80]!r}.", reason=Reason.INVALID)
        self._requests += 1
        event = _event_of(request, host, f"person:{self._log.epoch}:{self._requests}")
        self._take((event,))
        text = f"{request.request.value} logged"
        if request.request is Request.THAW and not request.workload:
            text += await self._thaw_sensor()
        elif host:
            text += (
                " and handed to the actuator" if not self._settings.shadow else "; shadow: nothing is done"
            )
        return ActReply(event=event.id, text=text)

    def _sensor(self) -> Remote:
        """A connection for one call: operators' calls must not end each other's when one fails."""
        return Remote(self._settings.addresses["sensor"], self._settings.security)

    async def _thaw_sensor(self) -> str:
        """Hosts that are silent together are called lost by the sensor, so it must know."""
        fleet = self._core.state.fleet.get("")
        if fleet is None or not fleet.silent:
            return ""
        if not self._settings.addresses["sensor"]:
            return "; SENSOR_ADDRESS is not set, so the sensor still waits for the silent hosts"
        try:
            async with self._sensor() as sensor:
                await send_thaw(sensor, timeout_s=SIGHTS_S)
        except ControlPlaneError as error:
            return f"; the sensor still waits for the silent hosts: {error}"
        return ", and the silent hosts count as lost"

    async def history(self, request: HistoryRequest) -> History:
        now = self._core.at(awake_s())
        try:
            written = self._log.newest(limit=request.limit, since=request.since)
        except LogError as error:
            raise Refused(str(error), reason=Reason.INTERNAL) from error
        return History(
            epoch=self._log.epoch,
            records=tuple(
                RecordStatus(
                    number=one.number,
                    epoch=one.epoch,
                    age_s=max(0.0, now - one.record.now),
                    kind=one.record.kind,
                    given="" if one.record.given is None else json.dumps(one.record.given),
                    changed=tuple(f"{table} {key}".rstrip() for table, key, _ in one.record.changes),
                    notes=one.record.notes,
                )
                for one in written
            ),
        )


def _event_of(request: ActRequest, host: str, id: str) -> Event:
    """The first piece of evidence says who asks, the second why."""
    who = Evidence(id=f"{id}/0", witness="operator", text=cut_text(request.by)[:64] or "operator")
    why = Evidence(id=f"{id}/1", witness="operator", text=cut_text(request.why) or "no reason given")
    return Event(
        id=id,
        type=EventType.OPERATOR,
        evidence=(who, why),
        host=host,
        workload=request.workload,
        request=request.request,
    )
