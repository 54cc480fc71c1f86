# SPDX-License-Identifier: Apache-2.0
"""Events arrive whole, in spite of kills, slow storage and failing sinks, and never hold training."""

from __future__ import annotations

import copy
import json
import logging
import math
import os
import signal
import sys
import textwrap
import threading
from contextlib import ExitStack
from datetime import datetime, timedelta, timezone
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resiliency.events import (
    BackgroundSink,
    EventStream,
    EventType,
    FileSink,
    RunEvent,
    events_path,
)
from resiliency.runtime import RunInfo
from resiliency.testing import FailingSink, ManualClock, MemorySink
from resiliency.testing.processes import Command

SOON = timedelta(seconds=10)

texts = st.text(st.characters(codec="utf-8"))
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
numbers = st.none() | st.integers(0, 2**53)
events = st.builds(
    RunEvent,
    type=st.sampled_from(EventType),
    time=st.datetimes(
        datetime(1971, 1, 1),
        datetime(2200, 1, 1),
        timezones=st.builds(lambda hours: timezone(timedelta(hours=hours)), st.integers(-12, 14)),
    ),
    job_name=texts,
    host=texts,
    node_rank=st.integers(0, 10_000),
    rank=numbers,
    attempt=numbers,
    step=numbers,
    fields=st.dictionaries(texts, json_values, max_size=3),
)


@given(events)
def test_an_event_survives_the_wire_as_one_line(event: RunEvent) -> None:
    line = event.to_json()
    assert "\n" not in line
    assert RunEvent.from_json(line) == event


@given(events, st.randoms())
def test_an_event_survives_a_store_that_knows_only_floats_and_no_order(
    event: RunEvent, random: Random
) -> None:
    record = json.loads(event.to_json())
    names = list(record)
    random.shuffle(names)
    kept = {name: float(record[name]) if type(record[name]) is int else record[name] for name in names}
    found = RunEvent.from_json(json.dumps(kept))
    assert found == event
    assert {type(number) for number in (found.node_rank, found.rank, found.step)} <= {int, type(None)}


def test_the_wire_form_is_what_readers_were_promised() -> None:
    event = RunEvent(
        type=EventType.CHECKPOINT_SAVED,
        time=datetime(2030, 1, 2, 3, 4, 5, 6, timezone(timedelta(hours=1))),
        job_name="j",
        host="h",
        rank=0,
        step=7,
    )
    assert event.to_json() == (
        '{"timestamp":"2030-01-02T02:04:05.000006+00:00","job_name":"j",'
        '"event_type":"checkpoint_saved","host":"h","node_rank":0,"rank":0,"step":7}'
    )


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"timestamp": None}, "timestamp"),
        ({"timestamp": "yesterday"}, "yesterday"),
        ({"event_type": "lunch"}, "lunch"),
        ({"job_name": None}, "job_name"),
        ({"rank": "3"}, r"rank must be a whole number from 0 to 2\*\*53, found '3'"),
        ({"step": 1.5}, "step must be a whole number .* found 1.5"),
        ({"step": True}, "step must be a whole number .* found True"),
        ({"step": -1}, "step must be a whole number .* found -1"),
        ({"step": -1.0}, "step must be a whole number .* found -1.0"),
        ({"step": 2**53 + 1}, "step must be a whole number .* found 9007199254740993"),
        ({"step": 1e300}, r"step must be a whole number .* found 1e\+300"),
        ({"attempt": math.nan}, "attempt must be a whole number .* found nan"),
        ({"attempt": math.inf}, "attempt must be a whole number .* found inf"),
        ({"rank": -math.inf}, "rank must be a whole number .* found -inf"),
        ({"node_rank": "x"}, "node_rank must be a whole number .* found 'x'"),
        ({"node_rank": []}, "node_rank must be a whole number"),
        ({"fields": [1]}, "fields must be an object"),
    ],
)
def test_a_line_that_is_no_event_is_refused(change: dict[str, object], text: str) -> None:
    record = {"timestamp": "2030-01-01T00:00:00Z", "event_type": "job_started", "job_name": "j"}
    RunEvent.from_json(json.dumps(record))
    merged = {**record, **change}
    line = json.dumps({name: value for name, value in merged.items() if value is not None})
    with pytest.raises(ValueError, match=text):
        RunEvent.from_json(line)


@pytest.mark.parametrize("line", ["", "[]", '{"timestamp": "2030-01-', "null"])
def test_a_torn_line_is_a_value_error(line: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        RunEvent.from_json(line)


WRITER = """
    import sys
    from resiliency.events import EventStream, EventType, FileSink
    from resiliency.runtime import RunInfo
    path, rank, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    with EventStream(RunInfo(rank=rank), [FileSink(path)]) as events:
        for step in range(count):
            events.emit(EventType.STEP_FINISHED, step=step, padding="x" * (step % 7000))
            if step == 100:
                print("under way", flush=True)
"""


def writer(path: Path, rank: int, count: int) -> Command:
    argv = [sys.executable, "-c", textwrap.dedent(WRITER), str(path), str(rank), str(count)]
    return Command(argv)


def test_lines_of_several_processes_do_not_interleave(tmp_path: Path) -> None:
    path = tmp_path / "new" / "directory" / "events.jsonl"
    with ExitStack() as stack:
        for command in [stack.enter_context(writer(path, rank, 1500)) for rank in range(3)]:
            assert command.wait(timeout=60) == 0
    found = [RunEvent.from_json(line) for line in path.read_text().splitlines()]
    for rank in range(3):
        assert [event.step for event in found if event.rank == rank] == list(range(1500))


def test_a_killed_writer_tears_at_most_its_last_line_and_others_write_on(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with writer(path, 0, 10_000_000) as victim:
        victim.wait_for_line("under way", timeout=30)
        victim.signal(signal.SIGKILL)
        assert victim.wait(timeout=30) == -signal.SIGKILL
    *whole, last = path.read_text().split("\n")
    steps = [RunEvent.from_json(line).step for line in whole]
    assert steps == list(range(len(whole)))
    assert len(whole) > 100
    assert last == "" or last.startswith('{"timestamp"')


def test_a_file_name_that_is_no_text_is_kept_as_json(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    strange = os.fsdecode(b"/data/\xff")
    with EventStream(RunInfo(), [FileSink(path)]) as stream:
        stream.emit(EventType.SAVE_FAILED, path=strange)
    assert RunEvent.from_json(path.read_text()).fields == {"path": strange}


def test_an_encoder_may_skip_events_and_a_closed_sink_ignores_them(tmp_path: Path) -> None:
    path = tmp_path / "steps"
    sink = FileSink(path, encode=lambda event: None if event.step is None else str(event.step))
    stream = EventStream(RunInfo(), [sink])
    stream.emit(EventType.STEP_FINISHED, step=3)
    event = stream.emit(EventType.JOB_STARTED)
    sink.close()
    sink.close()
    sink.emit(event)
    assert path.read_text() == "3\n"


class BlockedSink(MemorySink):
    """A storage that stalls until `gate` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.gate = threading.Event(), threading.Event()

    def emit(self, event: RunEvent) -> None:
        self.entered.set()
        assert self.gate.wait(30)
        super().emit(event)


def test_stalled_storage_costs_events_and_not_time(caplog: pytest.LogCaptureFixture) -> None:
    inner = BlockedSink()
    stream = EventStream(RunInfo(), [background := BackgroundSink(inner, capacity=5)])
    stream.emit(EventType.STEP_FINISHED, step=0)
    assert inner.entered.wait(10)  # the thread holds the first event; the queue is empty
    for step in range(1, 11):
        stream.emit(EventType.STEP_FINISHED, step=step)
    assert not background.flush(timedelta(seconds=0.05))
    inner.gate.set()
    assert background.flush(SOON)
    assert [event.step for event in inner.events] == [0, 1, 2, 3, 4, 5]
    with caplog.at_level(logging.WARNING):
        stream.close()
    assert "5 events were dropped" in caplog.text


def test_flush_waits_for_everything_emitted_so_far() -> None:
    inner = MemorySink()
    with EventStream(RunInfo(), [MemorySink(), BackgroundSink(inner)]) as stream:
        for step in range(1000):
            stream.emit(EventType.STEP_FINISHED, step=step)
        assert stream.flush(SOON)
        assert len(inner.events) == 1000


def test_flush_tells_when_a_sink_did_not_write_in_time() -> None:
    inner = BlockedSink()
    with EventStream(RunInfo(), [BackgroundSink(inner)]) as stream:
        stream.emit(EventType.JOB_STARTED)
        assert not stream.flush(timedelta(seconds=0.05))
        inner.gate.set()
        assert stream.flush(SOON)


def test_close_writes_what_is_queued_and_is_idempotent() -> None:
    inner = MemorySink()
    sink = BackgroundSink(inner)
    stream = EventStream(RunInfo(), [sink])
    for step in range(100):
        stream.emit(EventType.STEP_FINISHED, step=step)
    stream.close()
    assert len(inner.events) == 100
    assert inner.closed
    sink.close()
    stream.close()


def test_storage_that_fails_behind_the_thread_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    inner = FailingSink(MemorySink(), OSError(28, "No space left on device"))
    with caplog.at_level(logging.WARNING), EventStream(RunInfo(), [BackgroundSink(inner)]) as stream:
        for step in range(3):
            stream.emit(EventType.STEP_FINISHED, step=step)
    assert caplog.text.count("cannot write the event log") == 1
    assert "3 events were dropped" in caplog.text


def test_an_event_that_a_sink_cannot_carry_does_not_end_its_thread(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fussy(event: RunEvent) -> str:
        if event.step == 1:
            raise TypeError("step 1 does not fit")
        return event.to_json()

    path = tmp_path / "events.jsonl"
    sink = BackgroundSink(FileSink(path, fussy))
    with caplog.at_level(logging.WARNING), EventStream(RunInfo(), [sink]) as stream:
        stream.emit(EventType.STEP_FINISHED, step=1)
        stream.emit(EventType.STEP_FINISHED, step=2)
        assert stream.flush(SOON)
    assert "step 1 does not fit" in caplog.text
    assert RunEvent.from_json(path.read_text()).step == 2


def test_a_failing_sink_is_closed_reported_once_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    good, inner = MemorySink(), MemorySink()
    bad = FailingSink(inner, OSError(5, "Input/output error"))
    with caplog.at_level(logging.WARNING), EventStream(RunInfo(), [bad, good]) as stream:
        for _ in range(3):
            stream.emit(EventType.JOB_STARTED)
    assert (len(good.events), bad.refused, inner.closed) == (3, 1, True)
    assert caplog.text.count("Input/output error") == 1


def test_events_carry_the_identity_of_the_process_unless_told_otherwise() -> None:
    clock = ManualClock()
    info = RunInfo(job_name="j", host="h", node_rank=2, rank=3, attempt=1)
    stream = EventStream(info, clock=clock)
    own = stream.emit(EventType.STEP_FINISHED, step=4, duration_s=0.5)
    assert own == RunEvent(
        type=EventType.STEP_FINISHED,
        time=clock.now(),
        job_name="j",
        host="h",
        node_rank=2,
        rank=3,
        attempt=1,
        step=4,
        fields={"duration_s": 0.5},
    )
    other = stream.emit(EventType.FAULT_DETECTED, rank=0, attempt=0)
    assert (other.rank, other.attempt) == (0, 0)


def test_threads_may_emit_at_once() -> None:
    sink = MemorySink()
    stream = EventStream(RunInfo(), [sink])
    threads = [
        threading.Thread(target=lambda: [stream.emit(EventType.STEP_FINISHED, step=i) for i in range(200)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(sink.events) == 800


def test_all_processes_of_a_host_share_one_file() -> None:
    assert events_path(RunInfo(job_name="j", run_dir="/runs")) == Path("/runs/j-events.jsonl")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_number_that_json_lacks_is_written_as_null(value: float) -> None:
    event = EventStream(RunInfo()).emit(EventType.STEP_FINISHED, loss=value, nested=[{"x": value}])
    assert RunEvent.from_json(event.to_json()).fields == {"loss": None, "nested": [{"x": None}]}


def test_a_value_that_json_lacks_is_written_as_its_text() -> None:
    event = EventStream(RunInfo()).emit(EventType.SAVE_FAILED, path=Path("/a"))  # type: ignore[arg-type]
    assert RunEvent.from_json(event.to_json()).fields == {"path": "/a"}


def test_an_observer_sees_an_event_after_the_sinks_and_may_emit_another() -> None:
    sink = MemorySink()
    stream = EventStream(RunInfo(), [sink])

    def answer(event: RunEvent) -> None:
        assert sink.events[-1] is event
        if event.type is EventType.SAVE_STARTED:
            stream.emit(EventType.SAVE_RELEASED)

    stream.observe(answer)
    stream.emit(EventType.SAVE_STARTED)
    assert [event.type for event in sink.events] == [EventType.SAVE_STARTED, EventType.SAVE_RELEASED]


def test_what_an_observer_raises_reaches_the_emitter() -> None:
    stream = EventStream(RunInfo())

    def fail(event: RunEvent) -> None:
        raise RuntimeError(event.type.value)

    stream.observe(fail)
    with pytest.raises(RuntimeError, match="step_finished"):
        stream.emit(EventType.STEP_FINISHED)


def test_a_deep_copy_of_a_configuration_keeps_the_stream_that_it_holds() -> None:
    stream = EventStream(RunInfo(), [MemorySink()])
    assert copy.deepcopy({"events": stream})["events"] is stream
