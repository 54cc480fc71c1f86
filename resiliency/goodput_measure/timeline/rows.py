# SPDX-License-Identifier: Apache-2.0
"""The ledger as a picture: one lane per rank over wall time, with faults and saved checkpoints.

This file decides what is drawn (lanes, cells, markers, words) as plain values; `png` and
`html` draw it.  Time is cut into cells of about a pixel, each with the color of the
cause that took most of it, so a run of weeks on thousands of ranks draws as fast as one of minutes.
Above `MAX_LANES` ranks a lane shows a host, or a block of neighbouring ranks.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from resiliency.errors import ConfigError
from resiliency.goodput_measure.lanes import Bucket, Span, Spans
from resiliency.goodput_measure.ledger import Ledger
from resiliency.goodput_measure.report import MEANINGS, duration

MAX_LANES = 32
CELLS = 1800

#: Warm is loss, cool is work with a checkpoint, green is what counts; pale is waiting.
COLORS = {
    Bucket.KEPT_STEPS: "#2f9e77",
    Bucket.LOST_STEPS: "#e8664a",
    Bucket.SAVE_HELD: "#3b6fd4",
    Bucket.RESTORE: "#8b6fd0",
    Bucket.STARTUP: "#f0b93a",
    Bucket.INITIALIZATION: "#f8df9c",
    Bucket.DETECTION: "#a3142f",
    Bucket.RESTART: "#8a94a0",
    Bucket.DECISION: "#c4568f",
    Bucket.SWAP: "#4f9fbf",
    Bucket.CAPACITY: "#b59a7c",
    Bucket.OTHER: "#e9edf0",
}
LABELS = {bucket: bucket.value.replace("_", " ") for bucket in MEANINGS}


@dataclass(frozen=True, kw_only=True)
class Lane:
    """One row: a rank, or several shown as one."""

    label: str
    ranks: tuple[int, ...]
    spans: tuple[Span, ...]


@dataclass(frozen=True, kw_only=True)
class FaultMarker:
    """A fault at `time` on lane number `lane`; None when it is not known which rank it hit."""

    time: int
    lane: int | None
    text: str


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Everything that is drawn.  Times are microseconds since the epoch."""

    job_name: str
    start: int
    end: int
    headline: str
    summary: str
    lanes: tuple[Lane, ...]
    faults: tuple[FaultMarker, ...]
    saves: tuple[tuple[int, int | None], ...]
    shares: tuple[tuple[Bucket, float], ...]  # causes that occur, in the order of the legend


def arrange(ledger: Ledger) -> Timeline:
    """Choose lanes, cells, markers and words.

    Raises:
        ConfigError: the ledger has no rank or no wall time, so there is nothing to draw.
    """
    if not ledger.lanes or not ledger.wall_us:
        raise ConfigError(
            "there is no rank time to draw: the event log has no event of any rank.",
            hint="Give the event logs of all hosts to --event-log.",
        )
    groups = _groups(ledger)
    lanes = tuple(
        Lane(label=label, ranks=ranks, spans=_lane_spans([ledger.lanes[rank] for rank in ranks], ledger))
        for label, ranks in groups
    )
    shares = tuple((bucket, share) for bucket in MEANINGS if (share := ledger.share(bucket)))
    return Timeline(
        job_name=ledger.job_name,
        start=ledger.start,
        end=ledger.end,
        headline=f"{100 * (ledger.goodput or 0):.1f} % goodput",
        summary=_summary(ledger),
        lanes=lanes,
        faults=_fault_markers(ledger, lanes),
        saves=ledger.saves,
        shares=shares,
    )


def ticks(wall_us: int) -> tuple[float, str]:
    """(microseconds per unit, name of the unit) in which a time axis of this length reads best."""
    for unit_s, name in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if wall_us >= 3 * unit_s * 1_000_000:
            return unit_s * 1e6, name
    return 1e6, "seconds"


def _summary(ledger: Ledger) -> str:
    ranks = len(ledger.lanes)
    parts = [f"{ranks} rank{'s' * (ranks != 1)}", duration(ledger.wall_us / 1e6)]
    count = len(ledger.incidents)
    if count:
        totals = [total for incident in ledger.incidents if (total := incident.total_s) is not None]
        median = f", median {duration(statistics.median(totals))} to the next step" if totals else ""
        parts.append(f"{count} incident{'s' * (count != 1)}{median}")
    else:
        parts.append("no incidents")
    parts.append(f"{len(ledger.saves)} checkpoint{'s' * (len(ledger.saves) != 1)} saved")
    return "  ·  ".join(parts)


def _groups(ledger: Ledger) -> list[tuple[str, tuple[int, ...]]]:
    ranks = sorted(ledger.lanes)
    if len(ranks) <= MAX_LANES:
        return [(f"rank {rank}", (rank,)) for rank in ranks]
    by_host: dict[str, list[int]] = defaultdict(list)
    for rank in ranks:
        by_host[ledger.hosts.get(rank, "")].append(rank)
    if 1 < len(by_host) <= MAX_LANES:
        return [(host or "unknown host", tuple(members)) for host, members in by_host.items()]
    size = -(-len(ranks) // MAX_LANES)
    chunks = [ranks[index : index + size] for index in range(0, len(ranks), size)]
    return [
        (f"ranks {chunk[0]}-{chunk[-1]}" if len(chunk) > 1 else f"rank {chunk[0]}", tuple(chunk))
        for chunk in chunks
    ]


def _lane_spans(lanes: Sequence[Spans], ledger: Ledger) -> tuple[Span, ...]:
    """Cells; for a lone rank each change of color is moved to the nearest true change of cause.

    Drawing the true spans instead would turn gaps far below a pixel into a random pattern of lines.
    """
    cells = _cells(lanes, ledger.start, ledger.end)
    if len(lanes) > 1:
        return cells
    edges = [span.start for span in lanes[0]]
    moved = []
    for cell in cells:
        near = edges[max(bisect_left(edges, cell.start) - 1, 0) :][:2]
        moved.append(cell._replace(start=min(near, key=lambda edge: abs(edge - cell.start))))
    ends = [*(cell.start for cell in moved[1:]), ledger.end]
    spans = (cell._replace(end=end) for cell, end in zip(moved, ends, strict=True))
    return tuple(span for span in spans if span.start < span.end)


def _cells(lanes: Sequence[Sequence[Span]], start: int, end: int) -> tuple[Span, ...]:
    """Spans of whole cells, each with the cause that took most of the time of all `lanes`."""
    count = min(CELLS, end - start)
    bounds = [start + (end - start) * index // count for index in range(count + 1)]
    weights: list[dict[Bucket, int]] = [defaultdict(int) for _ in range(count)]
    for lane in lanes:
        index = 0
        for span in lane:
            at = span.start
            while at < span.end:
                while bounds[index + 1] <= at:
                    index += 1
                upto = min(span.end, bounds[index + 1])
                weights[index][span.bucket] += upto - at
                at = upto
    dominant = [max(weight, key=lambda bucket: weight[bucket]) for weight in weights]
    spans = []
    for bucket, run in groupby(range(count), key=lambda index: dominant[index]):
        cells = list(run)
        spans.append(Span(bounds[cells[0]], bounds[cells[-1] + 1], bucket))
    return tuple(spans)


def _fault_markers(ledger: Ledger, lanes: Sequence[Lane]) -> tuple[FaultMarker, ...]:
    """Incidents with the ranks that they hit, and injected faults that interrupted nothing."""
    lane_of = {rank: index for index, lane in enumerate(lanes) for rank in lane.ranks}
    injected = {fault.time: fault for fault in ledger.faults}
    markers: list[FaultMarker] = []
    for incident in ledger.incidents:
        fault = injected.pop(incident.fault, None)
        ranks = incident.ranks or ((fault.rank,) if fault is not None and fault.rank is not None else ())
        text = incident.cause or (fault.kind if fault is not None else "") or "fault"
        hit_lanes: set[int | None] = {lane_of.get(rank) for rank in ranks} or {None}
        markers += [FaultMarker(time=incident.fault, lane=lane, text=text) for lane in hit_lanes]
    for fault in injected.values():
        lane = None if fault.rank is None else lane_of.get(fault.rank)
        markers.append(FaultMarker(time=fault.time, lane=lane, text=fault.kind or "injected fault"))
    return tuple(markers)
