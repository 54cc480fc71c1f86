# SPDX-License-Identifier: Apache-2.0
"""Work in threads that use the caller's memory."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

import pytest

from resiliency.checkpoint.errands import side_by_side


def test_an_interrupt_is_raised_when_the_work_has_ended() -> None:
    interrupted, never, ended = threading.Event(), threading.Event(), []

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    def work(number: int) -> None:
        if number == 0:
            os.kill(os.getpid(), signal.SIGINT)
        assert interrupted.wait(60)
        never.wait(0.3)  # slow work, which orders nothing
        ended.append(number)

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            side_by_side([lambda: work(0), lambda: work(1)], "errand")
    finally:
        signal.signal(signal.SIGINT, before)
    assert sorted(ended) == [0, 1]
