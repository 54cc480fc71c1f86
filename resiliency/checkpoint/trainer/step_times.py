# SPDX-License-Identifier: Apache-2.0
"""What saves cost training after their call returned.

A save that returns at once may still slow the steps that follow: its copy shares the memory bus, its
writer the CPU and the disk.  So the steps after a save are compared with steps that no save
disturbed, in the same run; only the sum of what the call held and of this excess says what a save
costs.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

#: Steps after a save that count as disturbed by it.
WINDOW_STEPS = 10
#: Undisturbed steps whose median is the baseline; fewer than `_ENOUGH` say nothing.
_REMEMBERED = 64
_ENOUGH = 5


@dataclass(frozen=True, kw_only=True)
class Excess:
    """How much longer the steps after the save of `step` took than undisturbed ones.

    Attributes:
        steps: how many were looked at: ten, or as many as there were until the next save.
        excess_s: sum over them, without what the save held; negative if they were faster.
    """

    step: int
    steps: int
    excess_s: float


class StepTimes:
    """Tells undisturbed steps from those after a save; one call a step, without locks.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last: tuple[float, float] | None = None
        self._undisturbed: deque[float] = deque(maxlen=_REMEMBERED)
        self._saved: int | None = None
        self._after: list[float] = []

    @property
    def undisturbed_s(self) -> float:
        """Median time of a step that no save disturbed; 0 before there was one."""
        return statistics.median(self._undisturbed) if self._undisturbed else 0.0

    def tick(self, held_total_s: float) -> Excess | None:
        """A step is done; the excess of the last save once its window is full.

        Args:
            held_total_s: how long saves and fences have held training so far; it is no excess.
        """
        now, before = self._clock(), self._last
        self._last = now, held_total_s
        if before is None:
            return None
        took = now - before[0] - (held_total_s - before[1])
        if self._saved is None:
            self._undisturbed.append(took)
            return None
        self._after.append(took)
        return self._close() if len(self._after) == WINDOW_STEPS else None

    def saved(self, step: int) -> Excess | None:
        """The step of the last `tick` is being saved.

        Returns the excess of the save before, if its window was still open.
        """
        closed = self._close() if self._after else None
        self._saved = step
        return closed

    def _close(self) -> Excess | None:
        assert self._saved is not None
        step, after = self._saved, self._after
        self._saved, self._after = None, []
        if len(self._undisturbed) < _ENOUGH:
            return None
        baseline = statistics.median(self._undisturbed)
        return Excess(step=step, steps=len(after), excess_s=sum(after) - baseline * len(after))
