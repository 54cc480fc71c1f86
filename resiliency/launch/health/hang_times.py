# SPDX-License-Identifier: Apache-2.0
"""How long ranks may stand still before a look at them, and before the launcher acts: learned, with floors.

Both times follow from the steps of this job.  A job with steps of a second is looked at after five seconds;
one with an evaluation of five minutes after every hundred steps is not restarted for it.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from resiliency.errors import ConfigError

#: At least so long before a look, which takes two or three seconds more.
LOOK_S = 5.0
#: And so many times the 99th percentile of a step.
LOOK_STEPS = 2.5
#: And so long where a rank has not finished a step: it imports, reads its checkpoint, compiles.
FIRST_STEP_S = 120.0
#: Before the launcher ends ranks that are to blame beyond doubt.  It ends no others by itself: an evaluation,
#: a compilation or what follows the last step may take hours.
ACT_S, ACT_STEPS = 180.0, 8.0
_KEPT = 1024


@dataclass(frozen=True, kw_only=True)
class HangTimeout:
    """--hang-timeout-s.  `seconds`: None is learned; infinite is never."""

    seconds: float | None = None

    @classmethod
    def parse(cls, text: str) -> HangTimeout:
        """
        Raises:
            ConfigError: neither auto, nor off, nor a number above 0.
        """
        if text in ("auto", "off"):
            return cls(seconds=None if text == "auto" else math.inf)
        try:
            seconds = float(text)
        except ValueError:
            seconds = 0.0
        if not (math.isfinite(seconds) and seconds > 0):
            raise ConfigError(
                f"--hang-timeout-s must be auto, off or a number of seconds above 0, found {text!r}.",
                flag="--hang-timeout-s",
            )
        return cls(seconds=seconds)


class HangTimes:
    """Learns from the times between steps of one attempt after the other."""

    def __init__(self, timeout: HangTimeout) -> None:
        self._timeout = timeout
        self._steps: deque[float] = deque(maxlen=_KEPT)

    def learn(self, seconds: float) -> None:
        """A rank took so long from one step to the next."""
        self._steps.append(seconds)

    @property
    def p99_s(self) -> float:
        """99th percentile of the last thousand steps; 0 before any."""
        ordered = sorted(self._steps)
        return ordered[math.ceil(0.99 * len(ordered)) - 1] if ordered else 0.0

    @property
    def look_s(self) -> float:
        return max(LOOK_S, LOOK_STEPS * self.p99_s)

    def act_s(self, *, certain: bool) -> float:
        """After so long the launcher ends ranks; with `certain`, it knows which are to blame."""
        if self._timeout.seconds is not None:
            return self._timeout.seconds
        if certain:
            return max(ACT_S, ACT_STEPS * self.p99_s)
        return math.inf
