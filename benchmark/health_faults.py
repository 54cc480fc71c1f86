# SPDX-License-Identifier: Apache-2.0
"""Faults of `health_campaign.py`, as values: what happens to which rank, at which step and place of it."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

RANKS = 4
#: In each step: one before the backward pass, those of DDP in it, one after it.
COLLECTIVES = 3


class FaultKind(Enum):
    """The value is for people."""

    STEP_ONE = "stopped in step 1"
    STOPPED = "stopped before a collective"
    STUCK = "stuck in its code before a collective"
    LOADER = "stuck in its data loader's worker"
    SAVE = "stuck in a save"
    THROTTLED = "throttled to 60 %"
    WORKER = "its data worker sleeps"

    @property
    def is_hang(self) -> bool:
        return self not in (FaultKind.THROTTLED, FaultKind.WORKER)

    @property
    def is_collective(self) -> bool:
        return self in (FaultKind.STEP_ONE, FaultKind.STOPPED, FaultKind.STUCK)


@dataclass(frozen=True)
class Fault:
    """`collective`: before which one of a step; `quiet_s`: seconds of undisturbed training before."""

    number: int
    kind: FaultKind
    rank: int
    collective: int
    quiet_s: float

    @property
    def is_stop(self) -> bool:
        return self.kind in (FaultKind.STEP_ONE, FaultKind.STOPPED)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"kind": self.kind.name}

    @classmethod
    def from_json(cls, said: dict[str, Any]) -> Fault:
        return cls(**said | {"kind": FaultKind[said["kind"]]})


def schedule(seed: int) -> list[Fault]:
    """One fault of each kind, the one of step 1 first; the others in any order, at any rank and place."""
    draw = random.Random(seed)  # noqa: S311 (a seeded schedule, no secret)
    kinds = [kind for kind in FaultKind if kind is not FaultKind.STEP_ONE]
    draw.shuffle(kinds)
    return [
        Fault(
            number=number,
            kind=kind,
            rank=draw.randrange(RANKS),
            collective=draw.randrange(COLLECTIVES),
            quiet_s=draw.uniform(2.0, 4.0) if number else 0.0,
        )
        for number, kind in enumerate([FaultKind.STEP_ONE, *kinds])
    ]
