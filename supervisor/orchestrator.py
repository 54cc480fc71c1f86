# SPDX-License-Identifier: Apache-2.0
"""The seam to what owns the hosts: Kubernetes, Ray, processes of one machine, or the simulation."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from supervisor.values import Change, Command, Evidence, HostFacts, OutcomeStatus

#: Tells the sensor what the orchestrator did to a host: id, change, and the orchestrator's word on it.
TellChange = Callable[[str, Change, Evidence], None]
#: Tells the daemon of a host, by the host's name, what the orchestrator knows of it.
TellFacts = Callable[[str, HostFacts], None]


def ignore_facts(host: str, facts: HostFacts) -> None:
    """For those who have no daemons to tell."""
    del host, facts


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What came of one try of a command.

    Attributes:
        status: DONE, FENCED, FAILED, or WITHDRAWN: nothing was done, as what was done before is under way.
        passing: of a failure: worth another try (a conflict, an overload, a connection that broke).
        epoch: of FENCED: the higher one that was seen.
        spare: see `Outcome`.
    """

    status: OutcomeStatus
    text: str = ""
    passing: bool = False
    epoch: int = 0
    spare: str = ""


class Orchestrator(Protocol):
    """Carries out commands.  Neither method blocks; each calls `answer` once, or never.

    An implementation remembers the highest epoch that it saw and refuses lower ones with FENCED, and
    remembers the ids that it has carried out, where the actuator's own memory does not reach (on the object
    that it changes): a repeated id is answered with DONE and has no second effect.
    """

    def perform(self, command: Command, answer: Callable[[Answer], None]) -> None: ...

    def look(self, host: str, answer: Callable[[bool | None], None]) -> None:
        """Is the host there, by another path than the sensor's?  None is "cannot tell"."""
        ...


class RunningOrchestrator(Orchestrator, Protocol):
    """One with tasks of its own, which run within `running`."""

    def running(
        self, tell: TellChange, tell_facts: TellFacts = ignore_facts
    ) -> AbstractAsyncContextManager[None]: ...
