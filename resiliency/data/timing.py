# SPDX-License-Identifier: Apache-2.0
"""Times between points of a script, as lines for people."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import datetime
from typing import TextIO


class TimestampedTimer:
    """Prints on rank 0 how long each part of a script took.

        timer = TimestampedTimer()
        load()
        timer.report("loading")     # [2026-11-23 07:10:05] loading    2,013.512 ms       2.01 s total

    Args:
        report: text of the first line; None means "Start".
        start_time: seconds of `clock` at which the first part began; None means now.
        running: seconds that were already counted, for example before a restart.
        stream: where lines go; None means standard output as it is at each line.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        report: str | None = None,
        start_time: float | None = None,
        running: float = 0.0,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._stream = stream
        self.start_time = clock() if start_time is None else start_time
        self.running = running
        self._print(report or "Start", 0.0)

    def report(self, text: str, ret: bool = False) -> float | None:
        """Print the time since the last report; on all ranks the time is counted.

        Args:
            ret: whether to return it, in seconds.
        """
        now = self._clock()
        duration_s, self.start_time = now - self.start_time, now
        self.running += duration_s
        self._print(text, duration_s)
        return duration_s if ret else None

    def _print(self, text: str, duration_s: float) -> None:
        if os.environ.get("RANK", "0") == "0":
            when = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S")
            line = f"[{when}] {text:<60}{1000 * duration_s:>14,.3f} ms {self.running:>12,.2f} s total"
            print(line, file=self._stream or sys.stdout, flush=True)
