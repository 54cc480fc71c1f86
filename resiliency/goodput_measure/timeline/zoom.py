# SPDX-License-Identifier: Apache-2.0
"""The ledger in several resolutions, so that a page can zoom a week of 1,000 ranks without computing.

All of it is aggregated here.  A *level* cuts time into cells; a lane at a level is a list of runs of cells
that have the same cause, the one that took most of the time of the lane's ranks.  The page draws the
coarsest level whose cells are no wider than a pixel.  What a level costs depends on how often causes change
and not on its number of cells; a level that would make the page too large is left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from resiliency.events import JsonValue
from resiliency.goodput_measure.lanes import Bucket, Spans
from resiliency.goodput_measure.ledger import Ledger
from resiliency.goodput_measure.timeline.rows import Timeline

#: Cells of each level; the finest shows a week to the second.
CELLS = (2**11, 2**15, 2**20)
#: Runs that all lanes, and all ranks, of a level may have: some 3 MB of text each.
MOST_RUNS = 400_000
_CAUSES = len(Bucket)


@dataclass(frozen=True, kw_only=True)
class Level:
    """One resolution.  `lanes`: for each the runs as cells, cause, cells, cause, ..."""

    cell_us: int
    lanes: list[list[int]]

    @property
    def runs(self) -> int:
        return sum(map(len, self.lanes)) // 2

    def to_json(self) -> dict[str, JsonValue]:
        return {"cell": self.cell_us, "lanes": [list[JsonValue](lane) for lane in self.lanes]}


def page_data(ledger: Ledger, timeline: Timeline) -> dict[str, JsonValue]:
    """What the page draws beside `timeline`; times are microseconds since the start."""
    ranks = sorted(ledger.lanes)
    grouped = any(len(lane.ranks) > 1 for lane in timeline.lanes)
    lanes = _levels(ledger, [lane.ranks for lane in timeline.lanes])
    of_ranks = _levels(ledger, [(rank,) for rank in ranks]) if grouped else []
    place = {rank: index for index, rank in enumerate(ranks)}
    return {
        "start_us": ledger.start,
        "wall_us": ledger.wall_us,
        "lanes": [
            {"label": lane.label, "ranks": [place[rank] for rank in lane.ranks]} for lane in timeline.lanes
        ],
        "ranks": list(ranks),
        "levels": [level.to_json() for level in lanes],
        "rank_levels": [level.to_json() for level in of_ranks],
        "saves": [[time - ledger.start, step] for time, step in timeline.saves],
        "faults": [[fault.time - ledger.start, fault.lane, fault.text] for fault in timeline.faults],
    }


def _levels(ledger: Ledger, groups: Sequence[Sequence[int]]) -> list[Level]:
    """Levels from coarse to fine, until one has too many runs or shows every change exactly."""
    levels: list[Level] = []
    for count in CELLS:
        cell_us = max(-(-ledger.wall_us // count), 1)
        if levels and cell_us == levels[-1].cell_us:
            break
        left = MOST_RUNS
        lanes: list[list[int]] = []
        for ranks in groups:
            lanes.append(runs_of([ledger.lanes[rank] for rank in ranks], ledger.start, ledger.end, cell_us))
            left -= len(lanes[-1]) // 2
            if left < 0 and levels:
                return levels
        levels.append(Level(cell_us=cell_us, lanes=lanes))
    return levels


def runs_of(lanes: Iterable[Spans], start: int, end: int, cell_us: int) -> list[int]:
    """Cells and cause of each run of cells with the same main cause: cells, cause, cells, cause, ...

    The work is proportional to the number of spans, however many cells there are.
    """
    parts: dict[int, list[int]] = defaultdict(lambda: [0] * _CAUSES)  # time of causes that begin or end there
    changes: dict[int, list[int]] = defaultdict(lambda: [0] * _CAUSES)  # of the ranks that fill whole cells
    for lane in lanes:
        for low, high, cause in lane.rows():
            first, last = (low - start) // cell_us, (high - start) // cell_us
            if first == last:
                parts[first][cause] += high - low
                continue
            parts[first][cause] += (first + 1) * cell_us - (low - start)
            if over := high - start - last * cell_us:
                parts[last][cause] += over
            changes[first + 1][cause] += 1
            changes[last][cause] -= 1
    count = -(-(end - start) // cell_us)
    runs: list[int] = []

    def add(cells: int, weights: Sequence[int]) -> None:
        cause = max(range(_CAUSES), key=weights.__getitem__)
        if runs and runs[-1] == cause:
            runs[-2] += cells
        else:
            runs.extend((cells, cause))

    whole = [0] * _CAUSES
    at = 0
    for cell in sorted({*parts, *changes}):
        if cell > at:
            add(cell - at, whole)
        if (change := changes.get(cell)) is not None:
            whole = [ranks + more for ranks, more in zip(whole, change, strict=True)]
        if cell >= count:
            return runs
        part = parts.get(cell)
        if part is None:
            add(1, whole)
        else:
            add(1, [ranks * cell_us + more for ranks, more in zip(whole, part, strict=True)])
        at = cell + 1
    if at < count:
        add(count - at, whole)
    return runs
