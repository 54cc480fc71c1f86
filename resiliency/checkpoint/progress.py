# SPDX-License-Identifier: Apache-2.0
"""A progress bar for people who wait for a large read; silent for everybody else.

It shows on a terminal only, and only for what takes a while: logs and small checkpoints stay clean.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from tqdm import tqdm

#: Less than this is read before a bar could be looked at.
LARGE_BYTES = 256 << 20


class Progress:
    """A `Pace` that shows how far a read is; a context manager.

    Args:
        what: stands before the bar.
        shown: False to stay silent in any case, such as on all ranks but one.
    """

    def __init__(self, what: str, *, shown: bool = True) -> None:
        self._what = what
        self._shown = shown
        self._bar: tqdm[NoReturn] | None = None
        self._lock = threading.Lock()  # readers call from several threads, and tqdm only adds

    def expect(self, size_bytes: int) -> None:
        """Say how much will be read; without it nothing is shown."""
        if self._shown and size_bytes >= LARGE_BYTES and sys.stderr.isatty():
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
        if self._bar is not None:
            with self._lock:
                self._bar.update(size_bytes)

    def close(self) -> None:
        """Leave the bar as it is; idempotent."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
