# SPDX-License-Identifier: Apache-2.0
"""Work in threads that use the caller's memory."""

from __future__ import annotations

import signal
import threading
from types import FrameType

import pytest

from resiliency.checkpoint.threads import run_parallel


@pytest.mark.parametrize("by", [0, 1], ids=["while tasks are handed out", "while all are under way"])
def test_an_interrupt_is_raised_when_the_work_that_was_begun_has_ended(by: int) -> None:
    interrupted, never = threading.Event(), threading.Event()
    main = threading.main_thread().ident
    assert main is not None
    begun: list[int] = []
    ended: list[int] = []

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        if not interrupted.is_set():
            interrupted.set()
            raise KeyboardInterrupt

    def work(number: int) -> None:
        begun.append(number)
        while number == by and not interrupted.is_set():
            # Again and again: one that comes just before the main thread waits is seen when that wait ends.
            signal.pthread_kill(main, signal.SIGINT)
            interrupted.wait(0.05)
        assert interrupted.wait(60)
        never.wait(0.3)  # slow work, which orders nothing
        ended.append(number)

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_parallel([lambda: work(0), lambda: work(1)], "errand")
    finally:
        signal.signal(signal.SIGINT, before)
    assert sorted(ended) == sorted(begun)
    assert by in ended
