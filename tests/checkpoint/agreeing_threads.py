# SPDX-License-Identifier: Apache-2.0
"""The ranks of a job as threads of one process, which agree without a process group."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from resiliency.checkpoint.ranks import RankGroup

SOON_S = 120.0
T = TypeVar("T")


class Together(RankGroup):
    """The ranks of a job as threads of one process."""

    def __init__(self, rank: int, everyone: threading.Barrier, values: list[Any]) -> None:
        self.rank, self.world_size = rank, everyone.parties
        self.everyone = everyone
        self.values = values

    def gather(self, value: T) -> list[T]:
        self.values[self.rank] = value
        self.everyone.wait(SOON_S)
        values = list(self.values)
        self.everyone.wait(SOON_S)
        return values


def ends_of(world_size: int, run: Callable[[RankGroup], T]) -> list[T | BaseException]:
    """What each rank returns or raises."""
    everyone, values = threading.Barrier(world_size), [None] * world_size
    results: list[Any] = [None] * world_size

    def rank(number: int) -> None:
        try:
            results[number] = run(Together(number, everyone, values))
        except BaseException as error:
            results[number] = error

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON_S)
        assert not thread.is_alive()
    return results
