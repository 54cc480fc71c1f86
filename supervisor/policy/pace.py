# SPDX-License-Identifier: Apache-2.0
"""Times that follow from the steps of one job.

Numbers of the supervisor's own are for jobs whose launcher tells no condition, and one number for jobs with
steps of 0.3 s and of 320 s cannot be right: each is the least, and the job's own steps say the rest.
"""

from __future__ import annotations

from collections import deque

#: A step was finished within so many usual ones: the job advances.
ADVANCING_STEPS = 2.0
#: No step within so many usual ones, and so many times the longest one: the job stands still.
STILL_STEPS, STILL_LONGEST = 10.0, 2.0
#: Steps from which the usual one is taken.
_KEPT = 256


def advancing_s(least_s: float, usual_step_s: float) -> float:
    """A job that finished a step within that time advances."""
    return max(least_s, ADVANCING_STEPS * usual_step_s)


def still_s(least_s: float, usual_step_s: float, longest_step_s: float = 0.0) -> float:
    """A job without a step for that time stands still."""
    return max(least_s, STILL_STEPS * usual_step_s, STILL_LONGEST * longest_step_s)


class StepTimes:
    """Learns from the steps of one job, as they are reported."""

    def __init__(self) -> None:
        self._steps: deque[float] = deque(maxlen=_KEPT)
        self._usual_s: float | None = None
        #: The longest step so far; until a second step is known, the time to the first one.
        self.longest_s = 0.0

    @property
    def usual_s(self) -> float:
        """The median; 0 before two steps are known."""
        if self._usual_s is None:
            self._usual_s = sorted(self._steps)[len(self._steps) // 2] if self._steps else 0.0
        return self._usual_s

    def begin(self, seconds: float) -> None:
        """The first step of an attempt came so long after the attempt began."""
        if not self._steps:
            self.longest_s = max(seconds, 0.0)

    def learn(self, seconds: float) -> None:
        """The job took so long from one step to the next."""
        self.longest_s = max(seconds, self.longest_s if self._steps else 0.0)
        self._steps.append(seconds)
        self._usual_s = None

    def assume(self, usual_step_s: float) -> None:
        """Take the usual step that another process has learned; own steps go before it."""
        if usual_step_s and not self._steps:
            self.learn(usual_step_s)
