# SPDX-License-Identifier: Apache-2.0
"""The picture: what is on it, that it can be drawn, and that it stays small."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from resiliency.errors import ConfigError
from resiliency.events import EventType as E
from resiliency.goodput_measure.ledger import Bucket, build_ledger
from resiliency.goodput_measure.timeline.file import write_timeline
from resiliency.goodput_measure.timeline.rows import (
    CELLS,
    COLORS,
    LABELS,
    MAX_LANES,
    arrange,
    ticks,
)
from tests.goodput.story import Story, event, write_log


def story(ranks: int = 4, *, per_host: int = 8, steps: int = 8) -> Story:
    told = Story(ranks, per_host=per_host).start().steps(steps, save_every=4, hold=0.5).fault(ranks - 1)
    return told.start(restore=4, imports=1, init=1).steps(steps).finish()


def pixels(path: Path) -> Counter[tuple[int, int, int]]:
    """How often each color occurs in a PNG."""
    from matplotlib.image import imread

    image = (imread(path)[:, :, :3] * 255).round().astype(int)
    return Counter(map(tuple, image.reshape(-1, 3).tolist()))


def test_a_png_shows_every_cause_in_its_color_with_the_area_of_its_share(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log", story().events)
    ledger = build_ledger(story().events)
    # A process of its own: matplotlib keeps font files open for as long as it lives.
    command = [sys.executable, "-m", "resiliency.goodput_measure.calculator", "--job-name", "demo"]
    flags = ["--event-log", str(log), "--timeline", str(tmp_path / "t.png")]
    subprocess.run([*command, *flags], check=True, capture_output=True, timeout=120)
    counts = pixels(tmp_path / "t.png")
    areas = {}
    for bucket in (Bucket.KEPT_STEPS, Bucket.STARTUP, Bucket.LOST_STEPS):
        color = COLORS[bucket]
        areas[bucket] = counts[tuple(int(color[at : at + 2], 16) for at in (1, 3, 5))]
    for bucket in (Bucket.STARTUP, Bucket.LOST_STEPS):
        expected = ledger.totals[bucket] / ledger.totals[Bucket.KEPT_STEPS]
        assert areas[bucket] / areas[Bucket.KEPT_STEPS] == pytest.approx(expected, rel=0.15)


def test_html_is_one_file_that_loads_nothing_and_that_no_name_breaks(tmp_path: Path) -> None:
    told = story()
    events = [event(0, E.JOB_STARTED, job="</script><b>&job"), *told.events]
    write_timeline(build_ledger(events), tmp_path / "t.html")
    text = (tmp_path / "t.html").read_text()
    assert "&lt;/script&gt;&lt;b&gt;&amp;job" in text
    assert "<b>&job" not in text
    assert not re.search(r"https?://|<link|src=|import\(|fetch\(", text)
    assert text.count("</script>") == 2
    assert "SIGKILL" in text
    for bucket, share in arrange(build_ledger(events)).shares:
        assert f"{LABELS[bucket]} <b>{100 * share:.1f} %</b>" in text


def test_lanes_cover_the_wall_time_and_markers_stand_on_the_rank_that_failed() -> None:
    timeline = arrange(build_ledger(story().events))
    assert [lane.label for lane in timeline.lanes] == ["rank 0", "rank 1", "rank 2", "rank 3"]
    for lane in timeline.lanes:
        assert (lane.spans[0].start, lane.spans[-1].end) == (timeline.start, timeline.end)
        assert all(a.end == b.start for a, b in zip(lane.spans, lane.spans[1:], strict=False))
    assert [(fault.lane, fault.text) for fault in timeline.faults] == [(3, "SIGKILL")]
    assert [step for _, step in timeline.saves] == [4, 8]


def test_a_lane_of_one_rank_changes_color_exactly_where_the_cause_changes() -> None:
    ledger = build_ledger(story().events)
    for rank, lane in enumerate(arrange(ledger).lanes):
        assert lane.spans == tuple(ledger.lanes[rank])


def test_many_ranks_share_lanes_by_host_and_else_by_blocks() -> None:
    by_host = arrange(build_ledger(story(40, steps=4).events))
    assert [lane.label for lane in by_host.lanes] == [f"host-{n}" for n in range(5)]
    assert by_host.faults[0].lane == 4
    blocks = arrange(build_ledger(story(70, per_host=1, steps=4).events))
    assert len(blocks.lanes) <= MAX_LANES
    assert blocks.lanes[0].label == "ranks 0-2"
    assert sum(len(lane.ranks) for lane in blocks.lanes) == 70


def test_a_long_log_draws_no_more_than_a_cell_per_pixel(tmp_path: Path) -> None:
    told = Story(2, step_s=0.01)
    told.start()
    for _ in range(3000):
        told.steps(1)
        told.now += 0.005  # a gap, so that no two steps merge
    ledger = build_ledger(told.finish().events)
    assert max(map(len, ledger.lanes.values())) > 5000
    assert all(0 < len(lane.spans) <= CELLS for lane in arrange(ledger).lanes)


def test_an_injected_fault_that_interrupted_nothing_is_marked_too() -> None:
    told = Story(2).start().steps(2)
    told.tell(E.FAULT_INJECTED, rank=1, kind="slow")
    (marker,) = arrange(build_ledger(told.steps(5).finish().events)).faults
    assert (marker.lane, marker.text) == (1, "slow")


@pytest.mark.parametrize(
    ("seconds", "unit"), [(100, "seconds"), (200, "minutes"), (20_000, "hours"), (300_000, "days")]
)
def test_the_axis_counts_in_a_unit_that_people_read(seconds: int, unit: str) -> None:
    assert ticks(seconds * 1_000_000)[1] == unit


def test_nothing_to_draw_and_unknown_formats_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no rank time to draw"):
        write_timeline(build_ledger([event(0, E.JOB_STARTED)]), tmp_path / "t.png")
    with pytest.raises(ConfigError, match=r"\.png or \.html, found 't\.gif'"):
        write_timeline(build_ledger(story().events), tmp_path / "t.gif")
