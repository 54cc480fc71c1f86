# SPDX-License-Identifier: Apache-2.0
"""How far a large read is: a bar on a terminal, a line now and then in a log.

Only for what takes a while: small checkpoints stay silent.
"""

from __future__ import annotations

import logging
import sys
import threading
from typing import TYPE_CHECKING, NoReturn

from resiliency.runtime import Clock, SystemClock

if TYPE_CHECKING:
    from tqdm import tqdm

logger = logging.getLogger(__name__)

#: Less than this is read before a bar could be looked at.
LARGE_BYTES = 256 << 20
#: Between two lines in a log.
TELL_EVERY_S = 10.0


class ReadProgress:
    """A `Pace` that shows how far a read is; a context manager.

    Args:
        what: stands before the bar.
        shown: False to stay silent in any case, such as on all ranks but one.
    """

    def __init__(self, what: str, *, shown: bool = True, clock: Clock | None = None) -> None:
        self._what = what
        self._shown = shown
        self._clock = clock or SystemClock()
        self._bar: tqdm[NoReturn] | None = None
        self._lock = threading.Lock()  # readers call from several threads, and tqdm only adds
        self._expected = self._done = 0
        self._began = self._reported_at = 0.0

    def expect(self, size_bytes: int) -> None:
        """Say how much will be read; without it nothing is shown."""
        if not self._shown or size_bytes < LARGE_BYTES:
            return
        self._expected, self._done = size_bytes, 0
        self._began = self._reported_at = self._clock.monotonic()
        if sys.stderr.isatty():
            from tqdm import tqdm  # only here: a program that never shows a bar need not load it

            self._bar = tqdm(
                total=size_bytes,
                desc=self._what,
                unit="B",
                unit_scale=True,
                unit_divisor=1024,
                file=sys.stderr,
            )

    def __call__(self, size_bytes: int) -> None:
        if not self._expected:
            return
        with self._lock:
            self._done += size_bytes
            if self._bar is not None:
                self._bar.update(size_bytes)
            elif (now := self._clock.monotonic()) - self._reported_at >= TELL_EVERY_S:
                self._reported_at = now
                done, expected = self._done / 2**30, self._expected / 2**30
                rate = done / (now - self._began)
                logger.info("%s: %.1f of %.1f GiB read, %.2f GiB/s", self._what, done, expected, rate)

    def close(self) -> None:
        """Leave the bar as it is; idempotent."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def __enter__(self) -> ReadProgress:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
