# SPDX-License-Identifier: Apache-2.0
"""An event loop whose clock stands still while something happens, and jumps to the next timer otherwise.

The cluster in memory and its clients are in one loop, so minutes of real waits pass in a second, and a
duration that is measured is that of the waits alone, on a busy machine, too.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Awaitable
from contextlib import closing
from typing import TypeVar
from unittest import mock

T = TypeVar("T")
_STEP_S = 1e-6
#: Real time that the kernel has to bring what was sent within this process, also on a busy machine.
_KERNEL_S, _BUSY_KERNEL_S = 0.0002, 0.02


class _Clock:
    def __init__(self) -> None:
        self.passed_s = 0.0
        self._monotonic, self._time = time.monotonic(), time.time()

    def monotonic(self) -> float:
        return self._monotonic + self.passed_s

    def gettime(self, _: int) -> float:
        return self.monotonic()

    def time(self) -> float:
        return self._time + self.passed_s


class _Selector(selectors.SelectSelector):
    """Waits for no timer: what the loop would wait for is added to the clock."""

    def __init__(self, clock: _Clock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = self._look(timeout)
        # Some time passes always: a timer that is due in less than the clock's resolution counts as due.
        self._clock.passed_s += _STEP_S if ready else max(timeout or 0.0, _STEP_S)
        return ready

    def _look(self, timeout: float | None) -> list[tuple[selectors.SelectorKey, int]]:
        """What is ready now; a look that ends late tells of a busy machine, whose kernel is late, too."""
        begun = time.perf_counter()
        ready = super().select(min(timeout, _KERNEL_S) if timeout is not None else None)
        if not ready and timeout and time.perf_counter() - begun > 2 * _KERNEL_S:
            ready = super().select(min(timeout, _BUSY_KERNEL_S))
        return ready


def run_in_virtual_time(work: Awaitable[T], *, limit_s: float = 3600.0) -> T:
    """What `work` returns; all clocks of `time` are the loop's meanwhile."""
    clock = _Clock()
    with (
        mock.patch.object(time, "monotonic", clock.monotonic),
        mock.patch.object(time, "time", clock.time),
        mock.patch.object(time, "clock_gettime", clock.gettime),
        closing(asyncio.SelectorEventLoop(_Selector(clock))) as loop,
    ):
        asyncio.set_event_loop(loop)
        try:
            return loop.run_until_complete(asyncio.wait_for(work, limit_s))
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
            asyncio.set_event_loop(None)
