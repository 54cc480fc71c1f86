# SPDX-License-Identifier: Apache-2.0
"""Virtual time: what is due next happens next, and nothing else takes time."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable


class Loop:
    """Callbacks in the order of their times, equal times in the order in which they were asked for."""

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.random = random.Random(seed)  # noqa: S311 - a repeatable history is what is wanted
        self.steps = 0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def after(self, delay: float, call: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._due, (self.now + delay, self._count, call))

    def step(self) -> bool:
        if not self._due:
            return False
        self.now, _, call = heapq.heappop(self._due)
        self.steps += 1
        call()
        return True


class Wire:
    """Messages between two parts: each arrives some time later, some twice, some much later than the next."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self.last = 0.0  # when what was sent in order will have arrived

    def send_in_order(self, deliver: Callable[[], None]) -> None:
        """As a stream does: late, but never before what was sent earlier."""
        loop = self._loop
        self.last = max(self.last, loop.now + 0.005 + 0.05 * loop.random.random())
        loop.after(self.last - loop.now, deliver)

    def send(self, deliver: Callable[[], None], *, after: float = 0.0) -> None:
        loop, draw = self._loop, self._loop.random.random
        delay = max(after - loop.now, 0.0) + 0.005 + 0.05 * draw()
        loop.after(delay + (3.0 * draw() if draw() < 0.02 else 0.0), deliver)
        if draw() < 0.02:
            loop.after(delay + 2.0 * draw(), deliver)
