# SPDX-License-Identifier: Apache-2.0
"""A clock that a test owns: the twin of `resiliency.runtime.SystemClock`."""

from __future__ import annotations

import threading
from datetime import datetime, timedelta, timezone

from resiliency.errors import ConfigError

#: Where a `ManualClock` starts unless told otherwise; a round moment is easy to read in a failure.
EPOCH = datetime(2030, 1, 1, tzinfo=timezone.utc)


class ManualClock:
    """Stands still until `advance`.  Thread-safe.

    `set_wall_time` moves the wall clock alone, as a time server does: monotonic time must not
    notice, and code that measures durations with `now` is found out.
    """

    def __init__(self, start: datetime = EPOCH) -> None:
        self._lock = threading.Lock()
        self._monotonic_s = 0.0
        self._now = _aware(start)

    def monotonic(self) -> float:
        with self._lock:
            return self._monotonic_s

    def now(self) -> datetime:
        with self._lock:
            return self._now

    def advance(self, duration: timedelta) -> None:
        """Let `duration` pass on both clocks.

        Raises:
            ConfigError: the duration is negative; monotonic time never goes back.
        """
        if duration < timedelta(0):
            raise ConfigError(f"a clock advances by zero or more, found {duration}.")
        with self._lock:
            self._monotonic_s += duration.total_seconds()
            self._now += duration

    def set_wall_time(self, now: datetime) -> None:
        """Step the wall clock, forwards or backwards."""
        with self._lock:
            self._now = _aware(now)


def _aware(moment: datetime) -> datetime:
    if moment.tzinfo is None:
        raise ConfigError(
            f"clocks hold aware UTC, found the naive time {moment.isoformat()}.",
            hint="Pass tzinfo=timezone.utc.",
        )
    return moment.astimezone(timezone.utc)
