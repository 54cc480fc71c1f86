# SPDX-License-Identifier: Apache-2.0
"""Reading logs that are large, damaged, or hold several jobs."""

from __future__ import annotations

import json
import tracemalloc
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resiliency.errors import ConfigError
from resiliency.events import EventType, RunEvent
from resiliency.goodput_measure import splitter
from resiliency.goodput_measure.reader import ReadStats, read_events
from resiliency.goodput_measure.splitter import MAX_TEXT_BYTES
from tests.goodput.story import event, write_log

GOOD = event(1, EventType.CHECKPOINT_SAVED, step=5).to_json().encode()
# Every key of an event, and a value that looks like the start of one.
WHOLE = json.loads(event(1, EventType.CHECKPOINT_SAVED, rank=0, step=5, attempt=1, at={"host": 1}).to_json())


def read(path: Path, **options: object) -> tuple[list[int | None], ReadStats]:
    stats = ReadStats()
    return [e.step for e in read_events(path, stats=stats, **options)], stats  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "bad",
    [
        b"not json",
        b"[1, 2]",
        b'{"timestamp":"2026-03-01T12:00:00+00:00","job_name":"j"}',
        b'{"timestamp":"yesterday","job_name":"j","event_type":"job_started"}',
        b'{"timestamp":"2026-03-01T12:00:00","job_name":"j","event_type":"lunch"}',
        b'{"timestamp":"2026-03-01T12:00:00","job_name":"j","event_type":"job_started","node_rank":[1]}',
        b'{"timestamp":"2026-03-01T12:00:00","job_name":"j","event_type":"job_started","node_rank":Infinity}',
        b'{"timestamp":"2026-03-01T12:00:00","job_name":"j","event_type":"checkpoint_saved","step":"5"}',
        b'{"step":5.5,"timestamp":"2026-03-01T12:00:00","job_name":"j","event_type":"checkpoint_saved"}',
        b'{"step":-5.0,"timestamp":"2026-03-01T12:00:00","job_name":"j","event_type":"checkpoint_saved"}',
        b'{"step":1e300,"timestamp":"2026-03-01T12:00:00","job_name":"j","event_type":"checkpoint_saved"}',
        b'{"node_rank":NaN,"timestamp":"2026-03-01T12:00:00","job_name":"j","event_type":"job_started"}',
        b"\xff\xfe\x00",
        b"[" * 100_000,
        GOOD[:40],
    ],
)
def test_an_unparsable_line_is_counted_and_costs_no_other_line(bad: bytes, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(GOOD + b"\n" + bad + b"\n\n" + GOOD + b"\n")
    steps, stats = read(path)
    assert steps == [5, 5]
    assert (stats.lines, stats.events, stats.unparsable, stats.torn_at_end) == (3, 2, 1, False)
    assert stats.examples[0].startswith(f"{path}:2: ")


def test_a_torn_last_line_is_counted_as_such(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(GOOD + b"\n" + GOOD[:-9])
    steps, stats = read(path)
    assert (steps, stats.unparsable, stats.torn_at_end) == ([5], 1, True)


@pytest.mark.parametrize("key", sorted(WHOLE))
@pytest.mark.parametrize("torn", [GOOD[:1], GOOD[:-9], GOOD])
def test_an_event_glued_to_a_torn_line_is_recovered_whatever_its_first_key(
    torn: bytes, key: str, tmp_path: Path
) -> None:
    path = tmp_path / "log"
    path.write_bytes(torn + json.dumps({key: WHOLE[key], **WHOLE}).encode() + b"\n")
    steps, stats = read(path)
    assert (steps, stats.unparsable) == ([5], 1)


def test_a_line_full_of_starts_of_events_is_parsed_a_few_times_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def refuse(line: str) -> RunEvent:
        tried.append(len(line))
        raise ValueError("damaged")

    path = tmp_path / "log"
    path.write_bytes(b'{"step"' * 1000 + b"\n")
    monkeypatch.setattr(RunEvent, "from_json", refuse)
    steps, stats = read(path)
    assert (steps, stats.unparsable) == ([], 1)
    assert len(tried) < 20


def test_a_line_beyond_the_bound_is_skipped_and_the_next_one_read(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"x" * (3 * MAX_TEXT_BYTES) + b"\n" + GOOD + b"\n")
    steps, stats = read(path)
    assert (steps, stats.lines, stats.unparsable) == ([5], 2, 1)


def test_other_jobs_are_left_out_and_named(tmp_path: Path) -> None:
    mixed = [
        event(1, EventType.CHECKPOINT_SAVED, step=1),
        event(2, EventType.CHECKPOINT_SAVED, step=2, job="b"),
    ]
    steps, stats = read(write_log(tmp_path / "log", mixed), job_name="b")
    assert steps == [2]
    assert stats.jobs == {"demo": 1, "b": 1}


def test_types_choose_events(tmp_path: Path) -> None:
    log = write_log(
        tmp_path / "log", [event(1, EventType.JOB_STARTED), event(2, EventType.STEP_FINISHED, step=1)]
    )
    assert read(log, types={EventType.STEP_FINISHED})[0] == [1]


@pytest.mark.thorough("a measure of memory")
def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes((GOOD + b"\n") * 20_000)
    peaks = []
    for repeat in (1, 4):
        path.write_bytes((GOOD + b"\n") * 10_000 * repeat)
        tracemalloc.start()
        count = sum(1 for _ in read_events(path, job_name="demo"))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert count == 10_000 * repeat
    assert max(peaks) < 1 << 20
    assert peaks[1] < 1.5 * peaks[0]


def test_a_progress_bar_is_drawn_on_stderr_when_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = write_log(tmp_path / "log", [event(1, EventType.JOB_STARTED)])
    read(log)
    assert capsys.readouterr() == ("", "")
    read(log, progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "reading events" in err


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the event log '.*gone': No such file"):
        read(tmp_path / "gone")


@pytest.mark.parametrize(
    "stamp",
    [
        "0001-01-01T00:00:00+05:00",  # year 0 in UTC
        "0001-01-01T00:00:00Z",
        "1970-01-01T00:00:07Z",  # seven seconds after a machine without a clock was switched on
        "9999-12-31T23:59:59-05:00",
    ],
)
def test_a_time_at_which_no_job_can_have_run_is_refused_with_its_line(stamp: str, tmp_path: Path) -> None:
    path = write_log(tmp_path / "log", [event(1, EventType.JOB_STARTED)])
    with path.open("a") as file:
        file.write(GOOD.decode().replace("2026-03-01T12:00:01.000000+00:00", stamp) + "\n")
    steps, stats = read(path)
    assert (steps, stats.unparsable) == ([None], 1)
    assert stats.examples[0].startswith(f"{path}:2: timestamp {stamp[:4]}-")
    assert "is outside of 2000 to 2199: was the clock of the host set?" in stats.examples[0]


TEXTS = [
    GOOD,
    GOOD + b" \r",
    b"",
    b"not json",
    b"{",
    b"[",
    b"[1, 2]",
    b"[]",
    GOOD[:40],
    GOOD[:40] + GOOD,
    json.dumps([json.loads(GOOD)] * 2, indent=2).encode(),
    json.dumps([json.loads(GOOD), {"a": '\\"{[', "b": [1]}]).encode(),
    json.dumps({"jsonPayload": json.loads(GOOD)}, indent=2).encode(),
    json.dumps([json.loads(GOOD)] * 2, indent=2).encode()[:-30],
    b'[{"a": "torn\\',
    b"x" * 100,
]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from(TEXTS), max_size=8), st.lists(st.integers(0, 2000), max_size=8), st.booleans()
)
def test_texts_do_not_depend_on_how_the_bytes_are_cut(
    texts: list[bytes], cuts: list[int], ends_in_newline: bool
) -> None:
    whole = b"\n".join(texts) + b"\n" * ends_in_newline
    places = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
    found = []
    for portions in ([whole], [whole[a:b] for a, b in pairwise(places)], [bytes([one]) for one in whole]):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(splitter, "MAX_TEXT_BYTES", 2000)
            cutter = splitter.JsonSplitter()
            found.append([text for one in portions for text in cutter.feed(one)] + list(cutter.close()))
    assert found[0] == found[1] == found[2]
    assert all(text.text == text.text.strip() and b"\n" not in text.text[:1] for text in found[0])


def test_a_text_of_a_document_beyond_the_bound_costs_no_other(tmp_path: Path) -> None:
    path = tmp_path / "log"
    elements = [GOOD, b'{"x": "' + b"x" * (3 * MAX_TEXT_BYTES) + b'"}', GOOD]
    for text in (b"[" + b",".join(elements) + b"]", b"[\n" + b",\n".join(elements) + b"\n]\n"):
        path.write_bytes(text)
        steps, stats = read(path)
        assert (steps, stats.lines, stats.unparsable) == ([5, 5], 3, 1)
        assert f"more than {MAX_TEXT_BYTES} bytes" in stats.examples[0]
