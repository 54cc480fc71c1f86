# SPDX-License-Identifier: Apache-2.0
"""The twins behave as the real things do, except that the test decides when."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest

from resiliency.errors import ConfigError
from resiliency.events import EventSink, EventStream, EventType
from resiliency.runtime import Clock, RunInfo, SystemClock
from resiliency.testing import FailingSink, ManualClock, MemorySink


@pytest.mark.parametrize("clock", [SystemClock(), ManualClock()])
def test_every_clock_holds_aware_utc_and_never_goes_back(clock: Clock) -> None:
    first, now = clock.monotonic(), clock.now()
    assert clock.monotonic() >= first
    assert now.utcoffset() == timedelta(0)


def test_time_passes_only_when_told() -> None:
    clock = ManualClock(datetime(2031, 5, 1, 12, tzinfo=timezone(timedelta(hours=2))))
    clock.advance(timedelta(minutes=1))
    assert clock.monotonic() == 60.0
    assert clock.now() == datetime(2031, 5, 1, 10, 1, tzinfo=timezone.utc)


def test_a_step_of_the_wall_clock_does_not_touch_durations() -> None:
    clock = ManualClock()
    clock.set_wall_time(datetime(2000, 1, 1, tzinfo=timezone.utc))
    assert (clock.monotonic(), clock.now().year) == (0.0, 2000)


def test_a_clock_refuses_to_go_back_or_to_be_naive() -> None:
    with pytest.raises(ConfigError, match="zero or more, found -1 day"):
        ManualClock().advance(timedelta(seconds=-1))
    with pytest.raises(ConfigError, match=r"naive time 2030-01-01T00:00:00\..*timezone\.utc"):
        ManualClock(datetime(2030, 1, 1))


def test_a_memory_sink_keeps_events_in_order_and_finds_them_by_type() -> None:
    sink = MemorySink()
    with EventStream(RunInfo(), [sink], ManualClock()) as events:
        for step in (1, 2):
            events.emit(EventType.STEP_FINISHED, step=step)
        events.emit(EventType.SAVE_STARTED)
    assert [event.step for event in sink.of_type(EventType.STEP_FINISHED)] == [1, 2]
    assert len(sink.events) == 3
    assert sink.closed


def test_a_failing_sink_fails_when_told() -> None:
    inner = MemorySink()
    sink: EventSink = (failing := FailingSink(inner))
    event = EventStream(RunInfo(), [sink]).emit(EventType.JOB_STARTED)
    failing.error = OSError(28, "No space left on device")
    with pytest.raises(OSError, match="No space left"):
        sink.emit(event)
    assert (len(inner.events), failing.refused) == (1, 1)
