# SPDX-License-Identifier: Apache-2.0
"""Draws a timeline with matplotlib, without a display and without touching pyplot's global state."""

from __future__ import annotations

from io import BytesIO
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from resiliency.goodput_measure.timeline.rows import COLORS, LABELS, Timeline, ticks

_INK, _QUIET, _FAULT, _SAVED = "#1d2730", "#66727e", "#a3142f", "#1f4fa8"
_WIDTH_IN, _DPI = 14.0, 150
_LANE_FILL = 0.74  # of the height that a lane owns


def render_png(timeline: Timeline) -> bytes:
    """The bytes of a PNG file."""
    lanes = len(timeline.lanes)
    lane_in = 0.42 if lanes <= 12 else 0.26
    top_in, bottom_in = 1.3, 1.3
    height_in = top_in + bottom_in + lane_in * (lanes + 0.9)
    figure = Figure(figsize=(_WIDTH_IN, height_in), dpi=_DPI, facecolor="white")
    FigureCanvasAgg(figure)
    longest = max(len(lane.label) for lane in timeline.lanes)
    left = min(0.035 + 0.0062 * max(longest, 10), 0.2)
    axes = figure.add_axes((left, bottom_in / height_in, 0.975 - left, 1 - (top_in + bottom_in) / height_in))
    _title(figure, timeline, left, height_in)
    _lanes(axes, timeline)
    _markers(axes, timeline)
    _axis(axes, timeline)
    _legend(figure, timeline, left, height_in)
    buffer = BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _title(figure: Figure, timeline: Timeline, left: float, height_in: float) -> None:
    figure.text(left, 1 - 0.58 / height_in, timeline.headline, size=23, weight="bold", color=_INK)
    figure.text(
        left, 1 - 0.93 / height_in, f"{timeline.job_name}  ·  {timeline.summary}", size=11.5, color=_QUIET
    )


def _lanes(axes: Any, timeline: Timeline) -> None:
    unit, _ = ticks(timeline.end - timeline.start)
    for index, lane in enumerate(timeline.lanes):
        for bucket in COLORS:
            bars = [
                ((span.start - timeline.start) / unit, (span.end - span.start) / unit)
                for span in lane.spans
                if span.bucket is bucket
            ]
            if bars:
                low = index - _LANE_FILL / 2
                axes.broken_barh(
                    bars, (low, _LANE_FILL), facecolor=COLORS[bucket], linewidth=0, antialiased=False
                )


def _markers(axes: Any, timeline: Timeline) -> None:
    unit, _ = ticks(timeline.end - timeline.start)
    below = len(timeline.lanes) - 0.05
    saves = [(time - timeline.start) / unit for time, _ in timeline.saves]
    axes.scatter(
        saves, [below] * len(saves), marker="^", s=26, color=_SAVED, linewidth=0, zorder=4, clip_on=False
    )
    for fault in timeline.faults:
        at = (fault.time - timeline.start) / unit
        axes.plot(
            [at, at], [-0.62, below - 0.45], color=_FAULT, linewidth=0.9, linestyle=(0, (3, 2)), zorder=3
        )
        axes.scatter([at], [-0.72], marker="v", s=52, color=_FAULT, linewidth=0, zorder=5, clip_on=False)
        if fault.lane is not None:
            axes.scatter(
                [at], [fault.lane], marker="X", s=58, color=_FAULT, edgecolor="white", linewidth=0.9, zorder=6
            )


def _axis(axes: Any, timeline: Timeline) -> None:
    unit, name = ticks(timeline.end - timeline.start)
    axes.set_xlim(0, (timeline.end - timeline.start) / unit)
    axes.set_ylim(len(timeline.lanes) + 0.15, -0.75)
    axes.set_yticks([*range(len(timeline.lanes)), len(timeline.lanes) - 0.05])
    axes.set_yticklabels([*(lane.label for lane in timeline.lanes), "saved"], color=_INK, size=10)
    axes.set_xlabel(f"{name} since the first event", color=_QUIET, size=10, labelpad=6)
    axes.tick_params(axis="x", colors=_QUIET, labelsize=10, length=4)
    axes.tick_params(axis="y", length=0, pad=8)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#c3cad1")


def _legend(figure: Figure, timeline: Timeline, left: float, height_in: float) -> None:
    handles: list[Any] = [
        Patch(color=COLORS[bucket], label=f"{LABELS[bucket]}  {100 * share:.1f} %")
        for bucket, share in timeline.shares
    ]
    if timeline.faults:
        handles.append(Line2D([], [], marker="X", linestyle="", color=_FAULT, markersize=8, label="fault"))
    if timeline.saves:
        handles.append(
            Line2D([], [], marker="^", linestyle="", color=_SAVED, markersize=6, label="checkpoint saved")
        )
    figure.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(left - 0.006, 0.1 / height_in),
        ncols=6,
        frameon=False,
        fontsize=10,
        labelcolor=_INK,
        handlelength=1.1,
        handleheight=1.1,
        columnspacing=2.2,
        borderaxespad=0.3,
    )
