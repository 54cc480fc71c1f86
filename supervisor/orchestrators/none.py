# SPDX-License-Identifier: Apache-2.0
"""No orchestrator: launchers restart their ranks in place, and a person does the rest."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from supervisor.orchestrator import Answer, TellChange, TellFacts, ignore_facts
from supervisor.values import Command, CommandKind, OutcomeStatus

#: Without an object to write it on, a cordon is in the controller's state alone, which all decisions look at;
#: launchers restart their ranks themselves.
_NOT_OURS = (CommandKind.CORDON_HOST, CommandKind.UNCORDON_HOST, CommandKind.IN_JOB_RESET)


class NoOrchestrator:
    """Refuses what needs an orchestrator, with a sentence."""

    @asynccontextmanager
    async def running(self, tell: TellChange, tell_facts: TellFacts = ignore_facts) -> AsyncIterator[None]:
        del tell, tell_facts
        yield

    def perform(self, command: Command, answer: Callable[[Answer], None]) -> None:
        if command.kind in _NOT_OURS:
            answer(Answer(status=OutcomeStatus.DONE, text="nothing to do"))
            return
        answer(
            Answer(
                status=OutcomeStatus.FAILED,
                text=f"{command.kind.value} needs an orchestrator; this actuator has none (--orchestrator)",
            )
        )

    def look(self, host: str, answer: Callable[[bool | None], None]) -> None:
        del host
        answer(None)
