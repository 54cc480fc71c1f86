# SPDX-License-Identifier: Apache-2.0
"""Long reads in a log, where nobody sees a bar; the bar is tested with the command that shows it."""

from __future__ import annotations

import logging
from datetime import timedelta

import pytest

from resiliency.checkpoint.progress import LARGE_BYTES, TELL_EVERY_S, ReadProgress
from resiliency.testing import ManualClock


def test_without_a_terminal_a_long_read_tells_now_and_then_how_far_it_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    clock = ManualClock()
    with ReadProgress("restoring step 7", clock=clock) as progress:
        progress.expect(4 << 30)
        for _ in range(4):
            progress(1 << 29)
            clock.advance(timedelta(seconds=TELL_EVERY_S / 2))
    assert [record.getMessage() for record in caplog.records] == [
        "restoring step 7: 1.5 of 4.0 GiB read, 0.15 GiB/s"
    ]


@pytest.mark.parametrize(("shown", "size"), [(False, 4 << 30), (True, LARGE_BYTES - 1)])
def test_other_ranks_and_short_reads_say_nothing(
    caplog: pytest.LogCaptureFixture, shown: bool, size: int
) -> None:
    caplog.set_level(logging.INFO)
    clock = ManualClock()
    with ReadProgress("restoring step 7", shown=shown, clock=clock) as progress:
        progress.expect(size)
        clock.advance(timedelta(seconds=2 * TELL_EVERY_S))
        progress(1 << 20)
    assert caplog.records == []
