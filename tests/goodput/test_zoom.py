# SPDX-License-Identifier: Apache-2.0
"""The page: what its levels show is the ledger, it stays small, and a browser draws it at once."""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resiliency.goodput_measure.lanes import Bucket, Span, Spans
from resiliency.goodput_measure.ledger import Ledger, build_ledger
from resiliency.goodput_measure.timeline import zoom
from resiliency.goodput_measure.timeline.file import write_timeline
from resiliency.goodput_measure.timeline.rows import arrange
from resiliency.goodput_measure.timeline.zoom import page_data, runs_of
from resiliency.goodput_measure.windows import cells
from tests.goodput.story import Story, resolve
from tests.tools import browser

CAUSES = list(Bucket)
WEEK_S = 7 * 86_400


@settings(max_examples=150, deadline=None)
@given(
    lanes=st.lists(
        st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60), st.sampled_from(CAUSES)), max_size=8),
        min_size=1,
        max_size=4,
    ),
    cell=st.integers(1, 70),
)
def test_each_cell_has_the_cause_that_took_most_of_its_time(
    lanes: list[list[tuple[int, int, Bucket]]], cell: int
) -> None:
    of_ranks = {rank: resolve([Span(*span) for span in lane], 0, 57) for rank, lane in enumerate(lanes)}
    ledger = Ledger(job_name="demo", start=0, end=57, lanes=of_ranks)
    runs = runs_of(of_ranks.values(), 0, 57, cell)
    shown = [cause for at in range(0, len(runs), 2) for cause in [runs[at + 1]] * runs[at]]
    times = cells(ledger, cell)
    assert len(shown) == -(-57 // cell)
    for index, cause in enumerate(shown):
        assert times[CAUSES[cause]][index] == max(of[index] for of in times.values())
    assert all(runs[at] != runs[at - 2] for at in range(3, len(runs), 2))


def failing_week(ranks: int, incidents: int, *, steps: int = 1) -> Ledger:
    """A week in which all ranks fail, restart, restore and train, over and over."""
    us = 1_000_000
    lanes = {}
    for rank in range(ranks):
        lane = Spans(WEEK_S * us)
        for index in range(incidents):
            at = (WEEK_S * index // incidents) * us + rank * 1000
            at = 0 if index == 0 else at
            phases = [(Bucket.DETECTION, 5), (Bucket.RESTART, 20), (Bucket.STARTUP, 9), (Bucket.RESTORE, 4)]
            for cause, seconds in phases:
                lane.append(at, CAUSES.index(cause))
                at += seconds * us
            for _ in range(steps):
                lane.append(at, CAUSES.index(Bucket.KEPT_STEPS))
                at += 30 * us
                lane.append(at, CAUSES.index(Bucket.OTHER))
                at += 3 * us
            lane.append(at, CAUSES.index(Bucket.KEPT_STEPS))
        lanes[rank] = lane
    hosts = {rank: f"host-{rank // 8}" for rank in range(ranks)}
    return Ledger(job_name="week", start=0, end=WEEK_S * us, lanes=lanes, hosts=hosts)


def test_the_finest_level_of_a_small_job_is_the_ledger_itself() -> None:
    story = Story(2).start().steps(5, save_every=4, hold=0.25).fault(1)
    ledger = build_ledger(story.start(restore=4).steps(3).finish().events)
    data = json.loads(json.dumps(page_data(ledger, arrange(ledger))))
    level = data["levels"][-1]
    for rank, runs in enumerate(level["lanes"]):
        time: Counter[str] = Counter()
        for at in range(0, len(runs), 2):
            time[CAUSES[runs[at + 1]].value] += runs[at] * level["cell"]
        for span in ledger.lanes[rank]:
            time[span.bucket.value] -= span.end - span.start
        # Each border may lie within a cell, and the last cell may stick out.
        assert all(abs(left) <= level["cell"] * 8 for left in time.values())
    assert data["faults"][0][1:] == [1, "SIGKILL"]
    assert data["rank_levels"] == []


def test_a_level_that_would_make_the_page_large_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = failing_week(40, 20, steps=10)
    whole = page_data(ledger, arrange(ledger))
    assert len(whole["levels"]) == len(whole["rank_levels"]) == 3  # type: ignore[arg-type]
    monkeypatch.setattr(zoom, "MOST_RUNS", 3000)
    less = page_data(ledger, arrange(ledger))
    assert 1 <= len(less["rank_levels"]) < 3  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "faults"),
    [(100, 20), pytest.param(1000, 100, marks=pytest.mark.thorough("a hundred ranks are near"))],
)
def test_a_browser_draws_and_zooms_a_week(tmp_path: Path, ranks: int, faults: int) -> None:
    path = tmp_path / "week.html"
    write_timeline(failing_week(ranks, faults), path)
    assert path.stat().st_size < 12_000_000
    chromium = browser()
    text = path.read_text()
    # One more script: zoom to an incident, open a lane of ranks, draw, and say how long that took.
    probe = """<script>{ const began = performance.now(), page = window.timelinePage;
      page.toggle(3); page.show(86400e6, 86500e6); page.draw();
      document.documentElement.dataset.zoomMs = performance.now() - began; }</script></body>"""
    path.write_text(text.replace("</body>", probe))
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path}/profile",
        "--dump-dom",
    ]
    done = subprocess.run([chromium, *flags, path.as_uri()], capture_output=True, text=True, timeout=300)
    assert re.search(r'data-drawn-ms="\d+" data-zoom-ms="[\d.]+"', done.stdout[:2000]), done.stderr[-2000:]
