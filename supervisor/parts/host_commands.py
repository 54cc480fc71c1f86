# SPDX-License-Identifier: Apache-2.0
"""Commands and facts for hosts, over the streams that their daemons hold open to the actuator."""

from __future__ import annotations

import asyncio

from resiliency.tasks import end_tasks, wait_for
from supervisor.orchestrator import Answer
from supervisor.protocol.host_commands import HostCommand, HostCommandKind
from supervisor.transport.host_streams import HostStreams
from supervisor.values import Command, HostFacts, HostInfo, Outcome, OutcomeStatus, Value, cut_text


class HostCommands:
    """The hosts of an actuator: which are there, for which job, and what they answered.

    `streams` is set by the owner before the first host connects.
    """

    streams: HostStreams

    def __init__(self) -> None:
        self._hosts: dict[str, HostInfo] = {}  # by name
        self._facts: dict[str, HostFacts] = {}  # of hosts that are connected or not, by name
        self._waiting: dict[tuple[str, str], asyncio.Future[Outcome]] = {}  # by host name and command id

    def host_connected(self, host: HostInfo, incarnation: str) -> None:
        del incarnation
        self._hosts[host.name] = host
        if host.name in self._facts:
            self.streams.try_send_facts(host.name, self._facts[host.name])

    def tell_facts(self, host: str, facts: HostFacts) -> None:
        """Send `facts` to `host` now, if it is connected, and each time that it connects."""
        self._facts[host] = facts
        self.streams.try_send_facts(host, facts)

    def host_message(self, host: str, value: Value) -> None:
        if isinstance(value, HostInfo):
            self._hosts[host] = value
        elif isinstance(value, Outcome):
            waiting = self._waiting.get((host, value.command))
            if waiting is not None and not waiting.done():
                waiting.set_result(value)

    def host_lost(self, host: str, incarnation: str) -> None:
        del incarnation
        self._hosts.pop(host, None)
        for (name, _), waiting in self._waiting.items():
            if name == host and not waiting.done():
                waiting.cancel()

    async def ask(
        self,
        command: Command,
        kind: HostCommandKind,
        *,
        within_s: float,
        attempt: int | None = None,
        only: str = "",
    ) -> Answer:
        """Give `command` to all hosts of its job that are connected; done when one of them has done it.

        One answer is enough, and the first ends the wait: a launcher that restarts its ranks has those of all
        hosts restart, and the attempt in the command keeps the others from doing so a second time.  Stacks
        are wanted of all hosts: for them the wait goes on.  A host that has heard a later controller does not
        speak for the others, which have the command too: one that came from another fleet has.

        Args:
            only: id of the one host that is meant; empty: all.
        """
        names = [
            name
            for name, host in self._hosts.items()
            if (host.workload == command.workload or not command.workload) and only in ("", host.id)
        ]
        if not names:
            return Answer(
                status=OutcomeStatus.FAILED,
                text=f"no host of {command.workload or only} is connected to the actuator",
                passing=True,
            )
        of_incident = f" for {command.incident}" if command.incident else ""
        asked = HostCommand(
            epoch=command.epoch,
            id=command.id,
            kind=kind,
            workload=command.workload,
            reason=cut_text(f"{command.kind.value} {command.id}{of_incident}"),
            deadline_s=within_s,
            attempt=attempt,
        )
        outcomes = await self._first_outcomes(names, asked, within_s)
        text = cut_text("; ".join(dict.fromkeys(outcome.text for outcome in outcomes if outcome.text)))
        statuses = [outcome.status for outcome in outcomes]
        if OutcomeStatus.DONE in statuses:
            return Answer(status=OutcomeStatus.DONE, text=text)
        if outcomes and len(outcomes) == len(names) and set(statuses) == {OutcomeStatus.FENCED}:
            seen = max(outcome.epoch for outcome in outcomes)
            return Answer(status=OutcomeStatus.FENCED, text=text, epoch=seen)
        # A check that was cut short is made again as another command: its host carries this one out once.
        if OutcomeStatus.FAILED in statuses or (outcomes and kind is HostCommandKind.CHECK_HOST):
            return Answer(status=OutcomeStatus.FAILED, text=text)
        waited = f"none of {len(names)} hosts of {command.workload or only} answered within {within_s:g} s"
        return Answer(status=OutcomeStatus.FAILED, text=waited, passing=True)

    async def _first_outcomes(self, names: list[str], command: HostCommand, within_s: float) -> list[Outcome]:
        """Outcomes up to the first that decides, in their order; all of them where none does."""
        first_decides = command.kind is not HostCommandKind.DUMP_STACKS
        asking = [asyncio.ensure_future(self._ask_one(name, command, within_s)) for name in names]
        outcomes: list[Outcome] = []
        try:
            for answered in asyncio.as_completed(asking):
                outcome = await answered
                if outcome is not None:
                    outcomes.append(outcome)
                    if first_decides and outcome.status is OutcomeStatus.DONE:
                        break
        finally:
            await end_tasks(asking)
        return outcomes

    async def _ask_one(self, name: str, command: HostCommand, within_s: float) -> Outcome | None:
        key = (name, command.id)
        waiting = self._waiting[key] = asyncio.get_running_loop().create_future()
        try:
            if not self.streams.try_send_command(name, command):
                return None
            return await wait_for(waiting, within_s)
        except asyncio.TimeoutError:
            return None
        except asyncio.CancelledError:
            if not waiting.cancelled():
                raise
            return None  # its stream has ended
        finally:
            if self._waiting.get(key) is waiting:
                del self._waiting[key]
