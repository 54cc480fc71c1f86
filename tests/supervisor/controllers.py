# SPDX-License-Identifier: Apache-2.0
"""A controller with hosts and a job, driven by the test."""

from __future__ import annotations

from collections.abc import Callable

from supervisor.decision.controller import BaseController, Input
from supervisor.decision.state import State
from supervisor.policy.thresholds import Thresholds
from supervisor.values import (
    Command,
    CommandKind,
    DeviceState,
    Event,
    EventType,
    Evidence,
    HostInfo,
    Outcome,
    OutcomeStatus,
    Progress,
    WorkloadInfo,
)

LIMITS = Thresholds(max_fruitless=2, spare_floor=1)


class Controller:
    """A controller, its state and its clock; commands are done at once unless a test says otherwise."""

    def __init__(
        self,
        *,
        policy: Callable[..., BaseController] = BaseController,
        spares: int = 1,
        shadow: bool = False,
        name: str = "train",
        **workload: object,
    ) -> None:
        self.logic = policy(LIMITS, shadow=shadow)
        self.state = State.empty()
        self.now = 100.0
        self.sent: list[Command] = []
        self.notes: list[str] = []
        self.events = 0
        self.name = name
        self.give(WorkloadInfo(workload=name, replicas=2, **workload))
        for host in ("h0", "h1"):
            self.give(_host(host, name, DeviceState.RUNNING))
        for number in range(spares):
            self.give(_host(f"s{number}"))
        self.advance(500)
        self.now += 60.0

    def give(self, given: Input) -> list[Command]:
        decision = self.logic.decide(self.state, given, self.now, epoch=7)
        self.state = decision.state
        self.sent += decision.commands
        self.notes += decision.notes
        return list(decision.commands)

    def advance(self, step: int, attempt: int = 0) -> None:
        self.give(Progress(workload=self.name, step=step, attempt=attempt))

    def event(self, type: EventType, host: str = "h1", **fields: object) -> Event:
        self.events += 1
        number = f"s:{self.events}"
        code = fields.pop("code", None)
        evidence = Evidence(id=f"{number}/0", witness="test", text="as asked", code=code, device="gpu0")
        return Event(id=number, type=type, evidence=(evidence,), workload=self.name, host=host, **fields)

    def happens(self, type: EventType, host: str = "h1", **fields: object) -> list[CommandKind]:
        """The event, and the time in which its echoes would arrive."""
        self.give(self.event(type, host, **fields))
        return self.wait(LIMITS.coalesce_s)

    def wait(self, seconds: float) -> list[CommandKind]:
        self.now += seconds
        return [command.kind for command in self.give(None)]

    def end(self, status: OutcomeStatus = OutcomeStatus.DONE) -> list[CommandKind]:
        kinds = []
        for flight in list(self.state.commands.values()):
            took = flight.command.spare if status is OutcomeStatus.DONE else ""
            outcome = Outcome(command=flight.command.id, epoch=7, status=status, spare=took)
            kinds += [command.kind for command in self.give(outcome)]
        return kinds

    def stuck(self) -> list[CommandKind]:
        """All commands are done, and no step comes."""
        return self.end() + self.wait(LIMITS.workload_downtime_threshold_s)


def _host(name: str, workload: str = "", state: DeviceState = DeviceState.SPARE) -> HostInfo:
    return HostInfo(id=name, name=name, workload=workload, state=state, workers_per_host=1)


def diagnosed(
    fleet: Controller,
    host: str = "h1",
    *,
    cause: str = "gpu_missing",
    advice: str = "replace_host",
    confidence: str = "high",
    text: str = "rank 1 finds no GPU",
    age_s: float = 0.0,
    **fields: object,
) -> Event:
    """What the launcher of a host says about its attempt."""
    fleet.events += 1
    number = f"d{fleet.events}"
    evidence = Evidence(
        **{"id": number, "witness": "launcher", "text": text, "age_s": age_s},
        **{"cause": cause, "advice": advice, "confidence": confidence},
    )
    fields.setdefault("ranks", (1,))
    return Event(
        id=f"s:{number}",
        type=EventType.DIAGNOSIS,
        evidence=(evidence,),
        workload=fleet.name,
        host=host,
        **fields,
    )


def checked(fleet: Controller, host: str, health: str, *, gpus: str = "gpu0", text: str = "") -> Event:
    """The answer of a host that was asked to check itself."""
    fleet.events += 1
    evidence = Evidence(id=f"k{fleet.events}", witness="check", text=text, device=gpus, cause=health)
    return Event(
        id=f"s:{fleet.events}", type=EventType.NODE_CHECK, evidence=(evidence,), host=host, workload=""
    )
