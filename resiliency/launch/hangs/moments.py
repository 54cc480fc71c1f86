# SPDX-License-Identifier: Apache-2.0
"""How much of a step is a rank's own: looks at its main thread, at random moments of a window.

A look takes the state of the thread from the kernel, and the functions that it is in from the rank itself,
where a thread notes them in some ten microseconds.  A thread that sleeps outside of the data loader waits for
other ranks.  On a GPU it may wait for its own device: then all ranks look alike, and none looks slow.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from resiliency.launch.hangs.looking import ask
from resiliency.launch.health.evidence import Frame
from resiliency.launch.health.phases import RankPhase, phase_of
from resiliency.launch.health.stragglers import OwnTime
from resiliency.proc_stat import stat_fields
from resiliency.rank.inspection import RankAnswer, questions_file

_WAITS, _STOPPED, _RUNS = "SI", "Tt", "RD"


class MomentsOfRank:
    """One rank's main thread, from a window's begin to its end."""

    def __init__(self, pid: int, directory: str) -> None:
        self.pid = pid
        self._questions = os.open(questions_file(directory, pid), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self.restart(None)

    def restart(self, step: int | None) -> None:
        """A window begins, after `step`."""
        self.step = step
        self._began = time.monotonic()
        self._delayed_s = _delayed_s(self.pid)
        self._states: Counter[str] = Counter()

    def look(self) -> None:
        state = (stat_fields(self.pid) or [""])[0][:1]
        self._states[state] += 1
        if state in _WAITS + _RUNS:
            with suppress(OSError):  # it is about to end, or does not read: the pipe is full
                os.write(self._questions, state.encode())

    def own_time(self, answer: RankAnswer, *, rank: int, host: str, step: int) -> OwnTime | None:
        """Of the window, which ends with `step`; None where most of it was no ordinary step."""
        counts: Counter[str] = Counter()
        reported: Counter[str] = Counter()
        for one in answer.moments:
            phase = phase_of(tuple(Frame(file=file, line=0, function=name) for file, name in one.calls))
            reported[one.state] += one.count
            if phase is RankPhase.DATA:
                counts["data"] += one.count
            elif phase.has_no_usual_time:
                counts["other"] += one.count
            else:
                counts["waiting" if one.state in _WAITS else "busy"] += one.count
        # The interpreter was not free, in a call that does not let go of it: that is no waiting for others,
        # and work only where it ran.  It may sleep in such a call, as in a save to storage that hangs.
        counts["busy"] += sum(max(0, self._states[state] - reported[state]) for state in _RUNS)
        counts["other"] += sum(max(0, self._states[state] - reported[state]) for state in _WAITS)
        counts["stopped"] = sum(self._states[state] for state in _STOPPED)
        samples = sum(counts.values()) - counts["other"]
        if counts["other"] > samples / 4 or not samples or self.step is None:
            return None
        return OwnTime(
            rank=rank,
            host=host,
            seconds=time.monotonic() - self._began,
            steps=step - self.step,
            samples=samples,
            waiting=counts["waiting"],
            data=counts["data"],
            stopped=counts["stopped"],
            delayed_s=_delayed_s(self.pid) - self._delayed_s,
            groups=tuple(f"{group.name} {group.members}" for group in answer.groups),
        )

    def close(self) -> None:
        os.close(self._questions)


def ask_moments(ranks: Mapping[int, MomentsOfRank], directory: str) -> dict[int, RankAnswer]:
    """What was noted since the last time, by rank, of those that answer in time."""
    return ask({rank: moments.pid for rank, moments in ranks.items()}, directory)


def _delayed_s(pid: int) -> float:
    """For so long the main thread has had work and no core; 0 where the kernel does not count."""
    try:
        return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0
