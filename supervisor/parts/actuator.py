# SPDX-License-Identifier: Apache-2.0
"""The actuator process: commands of the controller to hosts and to the orchestrator, outcomes back.

It keeps nothing on a disk.  The controller sends each command again until it has the outcome, so an actuator
that was away begins where hosts and orchestrator are: they know which commands they have carried out.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from resiliency.errors import ControlPlaneError
from resiliency.tasks import wait_for
from supervisor.execution import Act, Executor, Look, Pace
from supervisor.orchestrator import Answer, Orchestrator
from supervisor.parts.host_commands import HostCommands
from supervisor.parts.settings import PartSettings
from supervisor.parts.tasks import Contact, Tasks
from supervisor.protocol.host_commands import HostCommandKind
from supervisor.transport.client import Remote
from supervisor.transport.errors import Reason, Refused, Unreachable
from supervisor.transport.host_streams import HostStreams
from supervisor.transport.limits import Backoff
from supervisor.transport.server import Service
from supervisor.transport.services import actuator_service, ask_evidence, send_change, send_outcomes
from supervisor.values import Change, Command, CommandKind, Evidence, HostFacts, Outcome, OutcomeStatus

logger = logging.getLogger(__name__)

#: How often deadlines are looked at.
TICK_S = 0.25
#: For all tries to send outcomes, for which the controller asks again, and one change, which is sent again.
SEND_S = 5.0
#: Longest pause between tries to reach the sensor, and changes that may wait for it.
RETRY_S, MOST_CHANGES = 5.0, 1000
#: Longest wait for the orchestrator's word on a host.
LOOK_S = 2.0
#: Longest wait for a launcher to say that it leaves.
LEAVE_S = 2.0


class ActuatorPart:
    """All of one actuator; `run` returns when it is cancelled.

    Args:
        orchestrator: that owns the hosts.
    """

    def __init__(self, settings: PartSettings, orchestrator: Orchestrator, pace: Pace | None = None) -> None:
        self._executor = Executor(pace)
        self._try_s = (pace or Pace()).try_s
        self._orchestrator = orchestrator
        self._tasks = Tasks()
        self._hosts = HostCommands()
        self._streams = HostStreams(
            part="actuator", report_period_s=settings.report_period_s, listener=self._hosts
        )
        self._hosts.streams = self._streams
        self._attempts: dict[str, int | None] = {}
        self._outcomes: dict[str, Outcome] = {}
        self._ended = asyncio.Event()
        self._changes: dict[str, tuple[str, Change, Evidence]] = {}  # not told yet, by the evidence's id
        self._changed = asyncio.Event()
        self._settings = settings
        self._controller = Remote(settings.addresses["controller"], settings.security)

    def services(self) -> list[Service]:
        return [actuator_service(self._streams, self)]

    async def run(self) -> None:
        try:
            await self._tasks.run_all(self._tick(), self._send_outcomes(), self._send_changes())
        finally:
            await self._controller.close()

    async def take_commands(self, commands: tuple[Command, ...]) -> None:
        for command in commands:
            self._do(self._executor.submit(command, time.monotonic()))

    async def look_at_host(self, host: str) -> bool | None:
        answer: asyncio.Future[bool | None] = asyncio.get_running_loop().create_future()

        def answered(there: bool | None) -> None:
            if not answer.done():
                answer.set_result(there)

        self._orchestrator.look(host, answered)
        try:
            return await wait_for(answer, LOOK_S)
        except asyncio.TimeoutError:
            return None

    def tell_change(self, host: str, change: Change, evidence: Evidence) -> None:
        """What the orchestrator did to a host goes to the sensor, however long that is away."""
        self._changes[evidence.id] = (host, change, evidence)
        if len(self._changes) > MOST_CHANGES:
            dropped, change, _ = self._changes.pop(next(iter(self._changes)))
            logger.error("change %s of %s dropped: %d newer ones wait", change.value, dropped, MOST_CHANGES)
        self._changed.set()

    def tell_facts(self, host: str, facts: HostFacts) -> None:
        """What the orchestrator knows of a host goes to its daemon."""
        self._hosts.tell_facts(host, facts)

    async def _send_changes(self) -> None:
        """In their order; repeated, one is the same by its evidence's id."""
        contact = Contact("sensor", self._settings.addresses["sensor"])
        backoff = Backoff(most_s=RETRY_S)
        while True:
            await self._changed.wait()
            try:
                async with self._sensor() as sensor:
                    for name, (host, change, evidence) in list(self._changes.items()):
                        await self._send_change(sensor, host, change, evidence)
                        self._changes.pop(name, None)
            except (Refused, Unreachable) as error:
                contact.failed(error)
                await asyncio.sleep(backoff.next_s())
                continue
            contact.succeeded()
            backoff.reset()
            if not self._changes:
                self._changed.clear()

    async def _send_change(self, sensor: Remote, host: str, change: Change, evidence: Evidence) -> None:
        try:
            await send_change(sensor, host, change, evidence, deadline_s=SEND_S)
        except Refused as error:
            if error.reason is not Reason.INVALID:
                raise
            logger.error("change %s of %s is not one that the sensor takes: %s", change.value, host, error)

    def _sensor(self) -> Remote:
        """A connection for one call: calls side by side must not end each other's when one fails."""
        return Remote(self._settings.addresses["sensor"], self._settings.security)

    # ------------------------------------------------------------------------------------- carrying out

    async def _tick(self) -> None:
        while True:
            self._do(self._executor.tick(time.monotonic()))
            await asyncio.sleep(TICK_S)

    def _do(self, acts: list[Act]) -> None:
        for act in acts:
            if isinstance(act, Outcome):
                self._end(act)
            elif isinstance(act, Look):
                self._tasks.start(self._look(act.command))
            else:
                self._perform(act.command, act.number)

    def _end(self, outcome: Outcome) -> None:
        if outcome.command not in self._outcomes:
            logger.info("command %s: %s, %s", outcome.command, outcome.status.value, outcome.text or "-")
        self._attempts.pop(outcome.command, None)
        self._outcomes[outcome.command] = outcome
        self._ended.set()

    async def _look(self, command: Command) -> None:
        holds = None
        try:
            async with self._sensor() as sensor:
                answer = await ask_evidence(sensor, command, timeout_s=Pace().look_s)
            holds = answer.holds
            self._attempts[command.id] = answer.attempt
        except ControlPlaneError as error:
            logger.info("command %s waits: its evidence cannot be looked at: %s", command.id, error)
        self._do(self._executor.looked(command.id, holds, time.monotonic()))

    def _perform(self, command: Command, number: int) -> None:
        logger.warning(
            "command %s: %s of %s, try %d",
            *(command.id, command.kind.value),
            " ".join(part for part in (command.workload, command.host, command.spare) if part),
            number,
        )

        def answered(answer: Answer) -> None:
            self._do(self._executor.answered(command.id, number, answer, time.monotonic()))

        if command.kind is CommandKind.DUMP_STACKS:
            self._tasks.start(self._ask_hosts(command, HostCommandKind.DUMP_STACKS, answered))
        elif command.kind is CommandKind.CHECK_HOST:
            self._tasks.start(self._ask_hosts(command, HostCommandKind.CHECK_HOST, answered))
        elif command.kind is CommandKind.IN_JOB_RESET:

            def prepared(answer: Answer) -> None:
                if answer.status is not OutcomeStatus.DONE:
                    answered(answer)
                else:  # launchers that had ended run again
                    self._tasks.start(self._ask_hosts(command, HostCommandKind.RESTART_RANKS, answered))

            self._orchestrator.perform(command, prepared)
        elif command.kind is CommandKind.HOT_SWAP:
            self._tasks.start(self._swap(command, answered))
        else:
            self._orchestrator.perform(command, answered)

    async def _ask_hosts(
        self, command: Command, kind: HostCommandKind, answered: Callable[[Answer], None]
    ) -> None:
        attempt = self._attempts.get(command.id) if kind is HostCommandKind.RESTART_RANKS else None
        only, within_s = "", self._try_s
        if kind is HostCommandKind.CHECK_HOST:
            only, within_s = command.host, command.deadline_s  # it may wait for the end of a launcher
        answered(await self._hosts.ask(command, kind, attempt=attempt, within_s=within_s, only=only))

    async def _swap(self, command: Command, answered: Callable[[Answer], None]) -> None:
        """Have a host that is there leave by its launcher, then replaced.

        Stopped by its orchestrator alone, its ranks would wait for those of the other hosts to stop with
        them, which stand still.  A host that does not answer is lost, or nearly so: nothing waits for it.
        """
        await self._hosts.ask(command, HostCommandKind.LEAVE, within_s=LEAVE_S, only=command.host)
        self._orchestrator.perform(command, answered)

    # ------------------------------------------------------------------------------------- outcomes

    async def _send_outcomes(self) -> None:
        contact = Contact("controller", self._controller.address)
        while True:
            await self._ended.wait()
            self._ended.clear()
            sent = dict(self._outcomes)
            try:
                await send_outcomes(self._controller, list(sent.values()), deadline_s=SEND_S)
                contact.succeeded()
            except (Refused, Unreachable) as error:
                # Not kept: the controller sends the command again, and gets the same outcome.
                contact.failed(error)
                await self._controller.close()
            for name, outcome in sent.items():
                if self._outcomes.get(name) is outcome:
                    del self._outcomes[name]
