# SPDX-License-Identifier: Apache-2.0
"""Ranks as threads of one process that agree where to stop."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar, cast

from resiliency.checkpoint.ranks import RankGroup
from resiliency.checkpoint.stop.termination import Terminated, TerminationOptions
from tests.checkpoint.agreeing_threads import ends_of

SOON_S = 120.0
QUIET = TerminationOptions(deadline=timedelta(seconds=30), signals=())
T = TypeVar("T")


def together(world_size: int, run: Callable[[RankGroup], T]) -> list[T]:
    """What each rank returns."""
    results = ends_of(world_size, run)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, Terminated):
            raise result
    return cast(list[T], results)
