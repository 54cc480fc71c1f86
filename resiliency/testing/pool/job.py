# SPDX-License-Identifier: Apache-2.0
"""What the pool and its ranks say to each other.  Both sides import this; it needs no torch.

For every job: the pool sends a `Job`; the rank loads the function and answers `READY`; when all
ranks are ready the pool sends `GO`; the rank joins the process group, runs the function, leaves
the group and answers with a `Reply`.  So the time that a process needs to start never counts as
time that a collective needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from resiliency.testing.faults import Fault, FaultInjector, Phase

READY = "ready"
GO = "go"


@dataclass(frozen=True, kw_only=True)
class Job:
    """One function for one rank.  `call` holds the pickled function and its arguments."""

    call: bytes
    rank: int
    world_size: int
    store_path: str | None  # None: no process group
    start_timeout_s: float
    operation_timeout_s: float
    faults: tuple[Fault, ...]
    env: Mapping[str, str]
    sys_path: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Reply:
    """The pickled value, or the text of the error.

    A rank is not `reusable` when the job left threads behind; it ends after this reply.
    """

    value: bytes = b""
    error: str = ""
    reusable: bool = True


_injector: FaultInjector | None = None


def fault_point(*, step: int | None = None, phase: Phase = Phase.STEP_FINISHED) -> None:
    """In a rank of the pool: let the faults that `RankPool.run` placed here strike."""
    if _injector is not None:
        _injector.at(step=step, phase=phase)


@contextmanager
def active(injector: FaultInjector) -> Iterator[None]:
    """Make `fault_point` use this injector."""
    global _injector
    with injector:
        _injector = injector
        try:
            yield
        finally:
            _injector = None
