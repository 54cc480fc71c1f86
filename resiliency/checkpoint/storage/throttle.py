# SPDX-License-Identifier: Apache-2.0
"""A bandwidth cap: of what goes to shared storage, and of copies to other hosts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Throttle:
    """Spreads what all threads move so that it stays below a bandwidth (a token bucket).

    What passes while the limit is lifted neither waits nor counts: later bytes pay for none of it.

    Args:
        bytes_per_s: 0 for no limit; may be set at any time.  Another limit counts at once: who waits by
            the one before goes on.
    """

    def __init__(self, bytes_per_s: int = 0) -> None:
        self._rate = bytes_per_s
        self._free_at = time.monotonic()
        self._is_lifted = False
        #: One more whenever those who wait need wait no longer.
        self._releases = 0
        self._released = threading.Condition()

    @property
    def bytes_per_s(self) -> int:
        return self._rate

    @bytes_per_s.setter
    def bytes_per_s(self, limit: int) -> None:
        with self._released:
            if limit != self._rate:
                self._rate = limit
                self._release()

    def lift(self) -> None:
        """No limit from now on, also for who waits."""
        with self._released:
            self._is_lifted = True
            self._release()

    def restore(self) -> None:
        with self._released:
            self._is_lifted = False

    def wait(
        self,
        size_bytes: int,
        every_s: float = threading.TIMEOUT_MAX,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Wait for the turn of `size_bytes`, and call `meanwhile` every so often."""
        with self._released:
            if not self._rate or self._is_lifted:
                return
            before = self._releases
            begins = max(self._free_at, time.monotonic())
            self._free_at = begins + size_bytes / self._rate
        while (left_s := begins - time.monotonic()) > 0:
            with self._released:
                if self._released.wait_for(lambda: self._releases != before, min(left_s, every_s)):
                    return
            if meanwhile and left_s > every_s:
                meanwhile()

    def _release(self) -> None:
        """Those who wait go on, and nobody waits any more for what they were to send."""
        self._free_at = time.monotonic()
        self._releases += 1
        self._released.notify_all()
