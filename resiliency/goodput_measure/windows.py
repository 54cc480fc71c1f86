# SPDX-License-Identifier: Apache-2.0
"""Parts of a job's time: the causes of any window, rolling goodput, and one window for each attempt.

Pure functions over a ledger.  The totals of a window are as exact as those of the ledger: they add up to
its length x ranks.
"""

from __future__ import annotations

import statistics
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from resiliency.events import JsonValue
from resiliency.goodput_measure.lanes import Bucket
from resiliency.goodput_measure.ledger import Ledger
from resiliency.goodput_measure.lives import from_us

HOUR_US = 3_600_000_000
#: Points of a rolling window in its own length; and of the whole curve at most.
_POINTS_PER_WINDOW, _MOST_POINTS = 60, 5000
_CAUSES = tuple(Bucket)


@dataclass(frozen=True, kw_only=True)
class Window:
    """[start, end) of a job, in microseconds since the epoch, with the rank time of each cause in it."""

    start: int
    end: int
    totals: dict[Bucket, int]

    @property
    def goodput(self) -> float | None:
        """Kept steps as a part of all rank time; None for a window without any."""
        available = sum(self.totals.values())
        return self.totals[Bucket.KEPT_STEPS] / available if available else None

    def to_json(self) -> dict[str, JsonValue]:
        return {
            "start": from_us(self.start).isoformat(),
            "end": from_us(self.end).isoformat(),
            "totals_us": {bucket.value: total for bucket, total in self.totals.items() if total},
            "goodput": self.goodput,
        }


@dataclass(frozen=True, kw_only=True)
class Rolling:
    """Goodput of windows of one length, each ending `every_us` after the one before."""

    length_us: int
    every_us: int
    points: Sequence[tuple[int, float]]  # (end of the window, goodput)

    @property
    def lowest(self) -> tuple[int, float]:
        return min(self.points, key=lambda point: point[1])

    @property
    def newest(self) -> tuple[int, float]:
        return self.points[-1]

    @property
    def median(self) -> float:
        return statistics.median(share for _, share in self.points)

    def to_json(self) -> dict[str, JsonValue]:
        points: list[JsonValue] = [[from_us(end).isoformat(), share] for end, share in self.points]
        return {"window_s": self.length_us / 1e6, "every_s": self.every_us / 1e6, "points": points}


def window_of(ledger: Ledger, start: int, end: int) -> Window:
    """The causes of the part of [start, end) in which the job was."""
    start, end = max(start, ledger.start), min(end, ledger.end)
    totals = [0] * len(_CAUSES)
    for lane in ledger.lanes.values():
        for low, high, cause in lane.between(start, end):
            totals[cause] += high - low
    return Window(start=start, end=end, totals=dict(zip(_CAUSES, totals, strict=True)))


def newest_window(ledger: Ledger, length_us: int = HOUR_US) -> Window:
    """The causes of the last `length_us`, or of all the job's time while that is less."""
    return window_of(ledger, ledger.end - length_us, ledger.end)


def attempts_of(ledger: Ledger) -> tuple[Window, ...]:
    """From the start, or the detection of an incident, to the next detection, or the end."""
    detected = (incident.detected for incident in ledger.incidents)
    cuts = sorted({ledger.start, ledger.end, *(at for at in detected if ledger.start < at < ledger.end)})
    return tuple(window_of(ledger, start, end) for start, end in pairwise(cuts))


def rolling(ledger: Ledger, length_us: int = HOUR_US) -> Rolling | None:
    """Goodput over windows of `length_us`; None where the job was shorter, or had no ranks."""
    if not ledger.lanes or not 0 < length_us <= ledger.wall_us:
        return None
    every_us = max(length_us // _POINTS_PER_WINDOW, ledger.wall_us // _MOST_POINTS, 1)
    kept = cells(ledger, every_us)[Bucket.KEPT_STEPS]
    # What is left after the last whole cell belongs to no window of this grid.
    sums = [0, *accumulate(kept[: ledger.wall_us // every_us])]
    width = max(length_us // every_us, 1)
    available = width * every_us * len(ledger.lanes)
    points = [
        (ledger.start + index * every_us, (sums[index] - sums[index - width]) / available)
        for index in range(width, len(sums))
    ]
    return Rolling(length_us=width * every_us, every_us=every_us, points=points) if points else None


def cells(ledger: Ledger, cell_us: int, ranks: Sequence[int] | None = None) -> dict[Bucket, array[int]]:
    """Rank time of each cause in each cell of `cell_us` since the start; the last cell may be shorter.

    A span costs the same however many cells it covers.

    Args:
        ranks: whose time; None means that of all.
    """
    count = -(-ledger.wall_us // cell_us)
    parts = [array("q", bytes(8 * (count + 1))) for _ in _CAUSES]  # what covers a part of a cell
    changes = [array("q", bytes(8 * (count + 1))) for _ in _CAUSES]  # of the number of ranks, cell by cell
    for rank in ledger.lanes if ranks is None else ranks:
        for start, end, cause in ledger.lanes[rank].rows():
            low, high = start - ledger.start, end - ledger.start
            first, last = low // cell_us, high // cell_us
            if first == last:
                parts[cause][first] += high - low
                continue
            parts[cause][first] += (first + 1) * cell_us - low
            parts[cause][last] += high - last * cell_us
            changes[cause][first + 1] += 1
            changes[cause][last] -= 1
    return {
        cause: array(
            "q", (part + whole * cell_us for part, whole in zip(of, accumulate(change), strict=True))
        )[:count]
        for cause, of, change in zip(_CAUSES, parts, changes, strict=True)
    }
