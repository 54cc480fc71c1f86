# SPDX-License-Identifier: Apache-2.0
"""Times that ranks may stand still before a look at them, and before the launcher acts: learned, with floors.

Both times follow from the steps of this job.  A job with steps of a second is looked at after five seconds;
one with an evaluation of five minutes after every hundred steps is not restarted for it.  Until two steps are
known, the time to the first one, with its imports and its restore, is what is usual.
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
#: Before an accusation is more than a warning: jobs pause for some seconds, and go on.
ACCUSE_S = 60.0
#: Before the launcher ends ranks that are to blame beyond doubt.  It ends no others by itself: an evaluation,
#: a compilation or what follows the last step may take hours.
ACT_S, ACT_STEPS = 180.0, 8.0
#: And so many times the longest pause after which this job went on.
ACT_PAUSES = 2.0
#: At least so long where no rank is stopped and a rank has not finished a step, or the job not two.
FIRST_ACT_S = 1800.0
_KEPT = 1024
#: Steps after which the first one says nothing more.
_KNOWN = 2


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
        self._first_s = 0.0
        self._newest = -1
        self._known = 0

    def learn(self, seconds: float, step: int) -> None:
        """A rank took so long from one step to the next, which is `step`."""
        self._steps.append(seconds)
        if step > self._newest:
            self._newest = step
            self._known += 1

    def learn_first(self, seconds: float) -> None:
        """A rank took so long from the begin of an attempt to its first step."""
        self._first_s = max(self._first_s, seconds)

    @property
    def is_set(self) -> bool:
        """True where the user has set the time after which the launcher acts."""
        return self._timeout.seconds is not None

    @property
    def p99_s(self) -> float:
        """99th percentile of the last thousand steps; 0 before any."""
        ordered = sorted(self._steps)
        return ordered[math.ceil(0.99 * len(ordered)) - 1] if ordered else 0.0

    @property
    def usual_s(self) -> float:
        """A step takes at most so long, as far as is known."""
        return max(self.p99_s, 0.0 if self._known >= _KNOWN else self._first_s)

    @property
    def look_s(self) -> float:
        return max(LOOK_S, LOOK_STEPS * self.usual_s)

    @property
    def accuse_s(self) -> float:
        """For so long an accusation has to hold before it is an error, and told to the supervisor."""
        return max(ACCUSE_S, self.look_s)

    def act_s(self, *, certain: bool, stopped: bool = False, started: bool = True) -> float:
        """Time after which the launcher ends ranks.

        Args:
            certain: they are to blame.
            stopped: because the kernel does not run them.
            started: each of them has finished a step of this attempt.
        """
        is_first = not (started or stopped)
        if self._timeout.seconds is not None:
            return max(self._timeout.seconds, FIRST_ACT_S if is_first else 0.0)
        if not certain:
            return math.inf
        seconds = max(ACT_S, ACT_STEPS * self.usual_s)
        if stopped:
            return seconds
        longest_s = max(self._steps, default=0.0)
        return max(seconds, ACT_PAUSES * longest_s, FIRST_ACT_S if is_first or self._known < _KNOWN else 0.0)
