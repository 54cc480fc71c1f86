# SPDX-License-Identifier: Apache-2.0
"""The daemon process: reporters on one side, the streams to sensor and actuator on the other.

    launcher --> LocalServer --> HostWorkers --> stream to the sensor (reports)
    launcher <-- LocalServer <-- Fence <-------- stream to the actuator (commands; outcomes back)

Each side may be away for any time.  Nothing is queued for the sensor: it gets the newest report, in which
findings of the watchdogs stay until they have surely arrived.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from resiliency import __version__
from resiliency.errors import ConfigError
from resiliency.files import write_durably
from resiliency.runtime import AwakeClock, was_stopped_for
from resiliency.tasks import first_of, wait_for
from supervisor.daemon.host_check import check_host, while_idle
from supervisor.daemon.local_server import LocalServer
from supervisor.daemon.settings import DaemonSettings
from supervisor.daemon.standalone import read_annotations
from supervisor.daemon.topology import find_place, merge_facts
from supervisor.daemon.workers import HostWorkers
from supervisor.plain import InvalidValue
from supervisor.protocol import PROTOCOL_VERSION, fleet_pb2
from supervisor.protocol.convert import from_message, to_message
from supervisor.protocol.host_commands import Fence, HostCommand, HostCommandKind
from supervisor.transport.client import ClientStream, Remote, keep_stream
from supervisor.transport.errors import Refused, Unreachable
from supervisor.transport.limits import Backoff, check_epoch
from supervisor.transport.server import serve
from supervisor.transport.services import ACTUATOR_CONNECT, SENSOR_CONNECT, Probe, daemon_service
from supervisor.values import Finding, HostFacts, HostInfo, Outcome, OutcomeStatus, cut_text
from supervisor.watchdogs.pending import PendingFindings
from supervisor.watchdogs.runner import WatchdogRunner

logger = logging.getLogger(__name__)

#: Changes within this time go in one report.
COALESCE_S = 0.1
#: A server that has not welcomed the daemon by then is left, and tried again.
WELCOME_TIMEOUT_S = 10.0
#: Longest pause between tries to reach sensor and actuator: they see all hosts within 5 s of their start.
RETRY_S = 3.0


class HostDaemon:
    """All of one daemon; `run` returns when it is cancelled."""

    def __init__(self, settings: DaemonSettings) -> None:
        self._settings = settings
        self._began = time.monotonic()
        host = HostInfo(
            id=settings.host_id,
            name=settings.host,
            address=f"{settings.address}:{settings.port}",
            workers_per_host=settings.workers_per_host,
        )
        self._workers = HostWorkers(host, uuid.uuid4().hex, AwakeClock())
        self._local = LocalServer(self._workers, changed=self._changed, token=settings.launcher_token)
        self._fence_path = settings.state_dir / f"fence-{settings.host}-{settings.launcher_port}.json"
        self._fence = _load_fence(self._fence_path)
        self._findings = PendingFindings(settings.state_dir / f"findings-{settings.host}.json")
        #: What the metadata server and the orchestrator said about this host.
        self._metadata, self._facts = HostFacts(), HostFacts()
        self._sentences: tuple[str, ...] = ()  # about the pod's annotations
        self._wakers: set[asyncio.Event] = set()
        self._outcomes: asyncio.Queue[Outcome] = asyncio.Queue(1024)
        self._commands: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        settings = self._settings
        async with AsyncExitStack() as stack:
            launcher_port = await stack.enter_async_context(self._local.serve(settings.launcher_port))
            port: int | None = None
            if settings.security.can_serve:
                settings.security.warn_of_plaintext(settings.listen)
                service = daemon_service(self._probe)
                port = await stack.enter_async_context(
                    serve([service], address=settings.listen, port=settings.port, security=settings.security)
                )
                self._workers.host = replace(self._workers.host, address=f"{settings.address}:{port}")
            else:
                logger.warning("no second path to this host: a server needs SUPERVISOR_TLS_CERT and _KEY")
            logger.info(
                "host daemon of %s ready: launchers at port %d, the supervisor at port %s",
                settings.host,
                launcher_port,
                port,
            )
            streams = [
                keep_stream(
                    Remote(address, settings.security),
                    method,
                    use,
                    what=what,
                    backoff=Backoff(most_s=RETRY_S),
                )
                for what, address, method, use in (
                    ("sensor", settings.environment.sensor_address, SENSOR_CONNECT, self._to_sensor),
                    ("actuator", settings.environment.actuator_address, ACTUATOR_CONNECT, self._to_actuator),
                )
                if address
            ]
            if not streams:
                logger.warning("SENSOR_ADDRESS and ACTUATOR_ADDRESS are not set: nothing is reported")
                streams = [_forever()]
            if settings.watchdogs.names:
                streams.append(self._watch())
            if settings.metadata is not None:
                streams.append(self._find_place(settings.metadata))
            await first_of(*streams)

    async def _watch(self) -> None:
        self._findings.load()
        runner = WatchdogRunner(
            self._settings.watchdogs,
            host=self._settings.host,
            state_dir=self._settings.state_dir,
            found=self._take_findings,
        )
        await runner.run()

    def _take_findings(self, findings: Sequence[Finding]) -> None:
        if self._findings.add(findings):
            self._changed()

    async def _find_place(self, metadata: tuple[str, int]) -> None:
        self._metadata = await find_place(metadata) or HostFacts()
        self._set_place()
        await _forever()

    def _set_place(self) -> None:
        """The labels of the node go first: a person may have set them."""
        if self._settings.metadata is None:
            return
        place = merge_facts(self._facts, self._metadata)
        host = replace(
            self._workers.host, subblock=place.subblock, superblock=place.superblock, zone=place.zone
        )
        if host != self._workers.host:
            self._workers.host = host
            logger.info("place of this host: %s", ", ".join(host.domains) or "unknown")
            self._local.tell_domains()
            self._changed()

    def _set_pod(self) -> None:
        pod = self._facts.pod
        if not self._settings.standalone or pod == self._workers.pod:
            return
        workload, sentences = read_annotations(pod) if pod is not None else (None, ())
        for sentence in sentences:
            if sentence not in self._sentences:
                logger.warning("pod of %s: %s", workload.workload if workload else "", sentence)
        self._sentences = sentences
        self._workers.take_pod(pod, workload)
        logger.info("pod of this host: %s", f"{pod.workload}, {pod.state.value}" if pod else "none")
        self._changed()

    # --------------------------------------------------------------------------------------- to the sensor

    async def _to_sensor(self, stream: ClientStream) -> None:
        welcome = await self._greet(stream)
        logger.info("sensor: connected, a report each %g s", welcome.report_period_s)
        changed = self._waker()
        resend = asyncio.Event()
        try:
            await first_of(
                self._send_reports(stream, changed, resend, welcome.report_period_s),
                _read_orders(stream, changed, resend),
            )
        finally:
            self._wakers.discard(changed)

    async def _send_reports(
        self, stream: ClientStream, changed: asyncio.Event, resend: asyncio.Event, period_s: float
    ) -> None:
        sent: set[Any] = set()
        self._findings.begin_stream()
        while True:
            changed.clear()
            if resend.is_set():
                resend.clear()
                sent = set()
            sent = await self._send_host(stream, sent)
            findings = self._findings.current()
            report = self._workers.report()
            report = replace(report, findings=(*findings, *report.findings))
            await stream.send(fleet_pb2.HostMessage(report=to_message(report)))
            self._findings.note_sent(findings)
            await asyncio.sleep(COALESCE_S)
            with suppress(asyncio.TimeoutError):
                await wait_for(changed.wait(), max(period_s - COALESCE_S, 0.0))

    async def _send_host(self, stream: ClientStream, sent: set[Any]) -> set[Any]:
        """Send what describes host and workload, unless it is among `sent`; returns what is sent now."""
        host, workload = self._workers.host_info(), self._workers.reported_workload
        if workload is not None and workload not in sent:
            await stream.send(fleet_pb2.HostMessage(workload=to_message(workload)))
        if host not in sent:
            await stream.send(fleet_pb2.HostMessage(host=to_message(host)))
        return {host, workload}

    # --------------------------------------------------------------------------------------- to the actuator

    async def _to_actuator(self, stream: ClientStream) -> None:
        await self._greet(stream)
        logger.info("actuator: connected")
        changed = self._waker()
        try:
            await first_of(
                self._send_outcomes(stream),
                self._send_hosts(stream, changed),
                self._read_commands(stream),
            )
        finally:
            self._wakers.discard(changed)

    async def _send_hosts(self, stream: ClientStream, changed: asyncio.Event) -> None:
        sent: set[Any] = set()
        while True:
            changed.clear()
            sent = await self._send_host(stream, sent)
            await asyncio.sleep(COALESCE_S)
            await changed.wait()

    async def _send_outcomes(self, stream: ClientStream) -> None:
        while True:
            outcome = await self._outcomes.get()
            # Lost with the stream, if it ends now: the actuator asks again with the same id.
            await stream.send(fleet_pb2.HostMessage(outcome=to_message(outcome)))

    async def _read_commands(self, stream: ClientStream) -> None:
        while True:
            order = await stream.receive()
            try:
                if order.WhichOneof("body") == "facts":
                    self._facts = from_message(HostFacts, order.facts)
                    self._set_place()
                    self._set_pod()
                if order.WhichOneof("body") != "command":
                    continue
                command = from_message(HostCommand, order.command)
                check_epoch(command.epoch)
            except InvalidValue as error:
                logger.warning("order of the actuator refused: %s", error)
                continue
            task = asyncio.create_task(self._execute(command))
            self._commands.add(task)
            task.add_done_callback(self._commands.discard)

    async def _execute(self, command: HostCommand) -> None:
        """Carry one command out, once, and queue its outcome."""
        entered, answer = self._fence.try_enter(command)
        if entered:
            _save_fence(self._fence_path, self._fence)  # before the effect: a crash must not allow it twice
            logger.warning(
                "command %s: %s, %s", command.id, command.kind.value, command.reason or "no reason"
            )
            if was_stopped_for(command.deadline_s):
                text = f"expired: it may be older than its {command.deadline_s:g} s"
                failed = OutcomeStatus.FAILED
                answer = Outcome(command=command.id, epoch=command.epoch, status=failed, text=text)
            else:
                answer = await self._carry_out(command)
            self._fence.record(answer)
            _save_fence(self._fence_path, self._fence)
            logger.warning("command %s: %s, %s", command.id, answer.status.value, answer.text or "no details")
        if answer is not None and not self._outcomes.full():
            self._outcomes.put_nowait(answer)

    async def _carry_out(self, command: HostCommand) -> Outcome:
        if command.kind is HostCommandKind.CHECK_HOST:
            return await self._check(command)
        workload = self._workers.workload
        status = OutcomeStatus.FAILED
        if workload is None or workload.workload != command.workload:
            found = workload.workload if workload else "no workload"
            text = f"this host works for {found!r}, not for {command.workload!r}"
        else:
            try:
                return await self._local.execute(command)
            except asyncio.TimeoutError:
                status = OutcomeStatus.TIMED_OUT
                text = f"the launcher did not answer within {command.deadline_s:g} s"
            except (Refused, OSError) as error:
                text = str(error)
        return Outcome(command=command.id, epoch=command.epoch, status=status, text=cut_text(text))

    async def _check(self, command: HostCommand) -> Outcome:
        """Check this host while no launcher is there: ranks would be slowed down by it, and it by them."""
        changed = self._waker()
        status = OutcomeStatus.DONE
        try:
            end = time.monotonic() + command.deadline_s
            while not self._workers.is_idle:
                changed.clear()
                await wait_for(changed.wait(), max(end - time.monotonic(), 0.0))
            found = await while_idle(self._workers, check_host(self._settings.state_dir), changed)
            if found is None:
                status, text = OutcomeStatus.FAILED, "a launcher came during the check"
            else:
                self._take_findings([found.finding(f"{self._workers.host.id}/check/{command.id}")])
                text = ": ".join(filter(None, (found.health.value, found.why)))
        except asyncio.TimeoutError:
            status, text = OutcomeStatus.TIMED_OUT, "a launcher was there until the deadline"
        except OSError as error:
            status, text = OutcomeStatus.FAILED, f"the check cannot be started: {error}"
        finally:
            self._wakers.discard(changed)
        return Outcome(command=command.id, epoch=command.epoch, status=status, text=cut_text(text))

    # --------------------------------------------------------------------------------------- both

    async def _greet(self, stream: ClientStream) -> Any:
        hello = fleet_pb2.Hello(
            protocol=PROTOCOL_VERSION,
            release=__version__,
            incarnation=self._workers.incarnation,
            host=to_message(self._workers.host_info()),
        )
        await stream.send(fleet_pb2.HostMessage(hello=hello))
        try:
            order = await wait_for(stream.receive(), WELCOME_TIMEOUT_S)
        except asyncio.TimeoutError:
            raise Unreachable(f"no welcome within {WELCOME_TIMEOUT_S:g} s.") from None
        if order.WhichOneof("body") != "welcome" or not 0 < order.welcome.report_period_s <= 86_400:
            raise Unreachable("the answer to a hello is not a welcome.")
        return order.welcome

    def _waker(self) -> asyncio.Event:
        event = asyncio.Event()
        self._wakers.add(event)
        return event

    def _changed(self) -> None:
        for event in self._wakers:
            event.set()

    def _probe(self) -> Probe:
        return Probe(
            host=self._settings.host,
            incarnation=self._workers.incarnation,
            age_s=time.monotonic() - self._began,
            report=self._workers.peek(),
        )


async def _read_orders(stream: ClientStream, changed: asyncio.Event, resend: asyncio.Event) -> None:
    while True:
        if (await stream.receive()).WhichOneof("body") == "resend":
            resend.set()
            changed.set()


async def _forever() -> None:
    await asyncio.Event().wait()


def _load_fence(path: Path) -> Fence:
    """What is in the file.

    Raises:
        ConfigError: it cannot be understood; without it, a command could be carried out twice.
    """
    try:
        return Fence.from_dict(json.loads(path.read_text()))
    except FileNotFoundError:
        return Fence()
    except (OSError, ValueError, InvalidValue) as error:
        raise ConfigError(
            f"--state_dir: {path} cannot be read: {error}.",
            hint="Remove it once no command is on its way to this host.",
            flag="--state_dir",
            path=str(path),
        ) from error


def _save_fence(path: Path, fence: Fence) -> None:
    """Replace the file; a disk that refuses costs the memory across a restart, not the command."""
    try:
        write_durably(path, json.dumps(fence.to_dict()).encode())
    except OSError as error:
        logger.error("fence not kept: %s; a restart of this daemon forgets its commands", error)
