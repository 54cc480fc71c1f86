# SPDX-License-Identifier: Apache-2.0
"""Looking at an agent that tidies up after it has reported a save."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")


def settled(look: Callable[[], _T]) -> _T:
    """What `look` sees once it has seen the same for half a second."""
    deadline = time.monotonic() + 60
    seen, since = look(), time.monotonic()
    while time.monotonic() - since < 0.5:
        assert time.monotonic() < deadline, f"it never settles: {seen}"
        threading.Event().wait(0.05)
        now = look()
        if now != seen:
            seen, since = now, time.monotonic()
    return seen
