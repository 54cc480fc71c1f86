# SPDX-License-Identifier: Apache-2.0
"""Draws a timeline as one HTML file: inline SVG with a tooltip on every span, no script, no network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from resiliency.goodput_measure.incidents import STAGES, Incident
from resiliency.goodput_measure.report import MEANINGS, duration
from resiliency.goodput_measure.timeline import COLORS, LABELS, Timeline, ticks

_WIDTH, _LEFT, _TOP, _LANE, _BAR = 1200, 130, 26, 26, 19

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1d2730; max-width: 1240px;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 2.1rem; margin: 0; } .quiet { color: #66727e; margin: .2rem 0 1.2rem; }
svg { width: 100%; height: auto; display: block; }
svg text { font: 12px system-ui, sans-serif; fill: #1d2730; }
svg .tick { fill: #66727e; } svg rect:hover { opacity: .75; }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1.6rem; margin: 1rem 0 1.6rem; padding: 0;
  list-style: none; }
.legend i { display: inline-block; width: .9em; height: .9em; border-radius: 2px; margin-right: .45em; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; } h2 { font-size: 1.1rem; }
th, td { padding: .3rem .8rem; text-align: right; border-bottom: 1px solid #e3e8ec; }
th { color: #66727e; font-weight: 500; } td.word, th.word { text-align: left; }
"""


def render_html(timeline: Timeline, incidents: Sequence[Incident]) -> str:
    """A whole HTML document."""
    name = escape(timeline.job_name)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{name}: '
        f"{timeline.headline}</title><style>{_STYLE}</style></head><body>\n"
        f"<h1>{timeline.headline}</h1>\n"
        f'<p class="quiet">{name} &nbsp;·&nbsp; {escape(timeline.summary)}</p>\n'
        f"{_svg(timeline)}\n{_legend(timeline)}\n{_incidents(incidents)}</body></html>\n"
    )


def _svg(timeline: Timeline) -> str:
    height = _TOP + _LANE * len(timeline.lanes) + 62
    parts = [f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="what every rank did over time">']
    for index, lane in enumerate(timeline.lanes):
        y = _TOP + index * _LANE
        parts.append(f'<text x="{_LEFT - 10}" y="{y + 14}" text-anchor="end">{escape(lane.label)}</text>')
        for span in lane.spans:
            left, right = _x(timeline, span.start), _x(timeline, span.end)
            since = duration((span.start - timeline.start) / 1e6)
            lasted = duration((span.end - span.start) / 1e6)
            tip = f"{lane.label}: {LABELS[span.bucket]} for {lasted}, from {since}"
            parts.append(
                f'<rect x="{left:.2f}" y="{y}" width="{right - left:.2f}" height="{_BAR}" '
                f'fill="{COLORS[span.bucket]}"><title>{escape(tip)}</title></rect>'
            )
    parts += [*_markers(timeline), *_axis(timeline), "</svg>"]
    return "\n".join(parts)


def _markers(timeline: Timeline) -> list[str]:
    below = _TOP + _LANE * len(timeline.lanes)
    parts = [f'<text x="{_LEFT - 10}" y="{below + 13}" text-anchor="end">saved</text>']
    for time, step in timeline.saves:
        x = _x(timeline, time)
        tip = "checkpoint saved" if step is None else f"checkpoint of step {step} saved"
        parts.append(
            f'<path d="M{x:.2f} {below + 2} l4.5 9 h-9 z" fill="#1f4fa8"><title>{tip}</title></path>'
        )
    for fault in timeline.faults:
        x = _x(timeline, fault.time)
        tip = f"<title>{escape(fault.text)} at {duration((fault.time - timeline.start) / 1e6)}</title>"
        parts.append(
            f'<g stroke="#a3142f"><path d="M{x:.2f} {_TOP - 6} V{below - 4}" stroke-dasharray="3 2"/>'
            f'<path d="M{x:.2f} {_TOP - 6} l-5 -9 h10 z" fill="#a3142f" stroke="none"/>{tip}</g>'
        )
        if fault.lane is not None:
            y = _TOP + fault.lane * _LANE + _BAR / 2
            cross = f"M{x - 4:.2f} {y - 4} l8 8 m0 -8 l-8 8"
            parts.append(
                f'<g fill="none" stroke-linecap="round"><path d="{cross}" stroke="white" stroke-width="5"/>'
                f'<path d="{cross}" stroke="#a3142f" stroke-width="2.6"/>{tip}</g>'
            )
    return parts


def _axis(timeline: Timeline) -> list[str]:
    unit, name = ticks(timeline.end - timeline.start)
    total = (timeline.end - timeline.start) / unit
    distance = _nice(total / 8)
    y = _TOP + _LANE * len(timeline.lanes) + 22
    parts = [f'<path d="M{_LEFT} {y} H{_WIDTH - 10}" stroke="#c3cad1"/>']
    for index in range(int(total / distance) + 1):
        x = _x(timeline, timeline.start + round(index * distance * unit))
        parts.append(
            f'<text class="tick" x="{x:.2f}" y="{y + 16}" text-anchor="middle">{index * distance:g}</text>'
        )
    middle = (_LEFT + _WIDTH) / 2
    parts.append(
        f'<text class="tick" x="{middle}" y="{y + 34}" text-anchor="middle">'
        f"{name} since the first event</text>"
    )
    return parts


def _legend(timeline: Timeline) -> str:
    items = [
        f'<li title="{escape(MEANINGS[bucket])}"><i style="background:{COLORS[bucket]}"></i>'
        f"{LABELS[bucket]} <b>{100 * share:.1f} %</b></li>"
        for bucket, share in timeline.shares
    ]
    return f'<ul class="legend">{"".join(items)}</ul>'


def _incidents(incidents: Sequence[Incident]) -> str:
    if not incidents:
        return ""
    heads = "".join(f"<th>{stage.replace('_', ' ')}</th>" for stage in STAGES)
    rows = []
    for incident in incidents:
        spans = "".join(f"<td>{_seconds(incident.spans[stage])}</td>" for stage in STAGES)
        ranks = ", ".join(map(str, incident.ranks)) or "?"
        lost = "-" if incident.lost_steps is None else str(incident.lost_steps)
        rows.append(
            f"<tr><td>{incident.index}</td><td>{ranks}</td>"
            f'<td class="word">{escape(incident.cause or "?")}</td>'
            f"{spans}<td><b>{_seconds(incident.total_s)}</b></td><td>{lost}</td></tr>"
        )
    return (
        "<h2>Incidents: seconds that each stage took</h2>\n<table><thead><tr><th>#</th><th>rank</th>"
        f'<th class="word">cause</th>{heads}<th>total</th><th>lost steps</th></tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>\n"
    )


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _x(timeline: Timeline, time: int) -> float:
    return _LEFT + (_WIDTH - 10 - _LEFT) * (time - timeline.start) / (timeline.end - timeline.start)


def _nice(value: float) -> float:
    """The 1, 2 or 5 times a power of ten that is not below `value`."""
    power = 1.0
    while power > value:
        power /= 10
    while power * 10 < value:
        power *= 10
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= value)
