# SPDX-License-Identifier: Apache-2.0
"""Small sensors and actuators for tests of the wire: each answers what the test gave it."""

from __future__ import annotations

from dataclasses import dataclass, field

from supervisor.detection import HostSight
from supervisor.transport.services import EvidenceCheck, Known
from supervisor.values import Change, Command, Evidence


@dataclass
class TestSensor:
    """`holding`: the answer for each command id; others are "cannot tell"."""

    __test__ = False
    holding: dict[str, EvidenceCheck] = field(default_factory=dict)
    seen: list[HostSight] = field(default_factory=list)
    changes: list[tuple[str, Change, Evidence]] = field(default_factory=list)
    thawed: int = 0

    async def check_evidence(self, command: Command) -> EvidenceCheck:
        return self.holding.get(command.id, EvidenceCheck(holds=None))

    def take_change(self, host: str, change: Change, evidence: Evidence) -> None:
        self.changes.append((host, change, evidence))

    def sights(self, after: str) -> tuple[list[HostSight], bool]:
        """One a page."""
        rest = [sight for sight in self.seen if sight.host > after]
        return rest[:1], len(rest) > 1

    def thaw(self) -> None:
        self.thawed += 1


@dataclass
class TestActuator:
    """`there`: the orchestrator's word on each host; of others it cannot tell."""

    __test__ = False
    there: dict[str, bool] = field(default_factory=dict)
    commands: list[Command] = field(default_factory=list)

    async def take_commands(self, commands: tuple[Command, ...]) -> None:
        self.commands.extend(commands)

    async def look_at_host(self, host: str) -> bool | None:
        return self.there.get(host)


def nothing_known(after: str) -> Known:
    del after
    return Known(epoch=1)
