# SPDX-License-Identifier: Apache-2.0
"""Makes a timeline one HTML file to zoom in: a canvas, its script and aggregated figures, no network."""

from __future__ import annotations

import json
from html import escape
from importlib import resources

from resiliency.events import JsonValue
from resiliency.goodput_measure.incidents import stages_of
from resiliency.goodput_measure.ledger import Bucket, Ledger
from resiliency.goodput_measure.report import MEANINGS
from resiliency.goodput_measure.timeline.rows import COLORS, LABELS, Timeline
from resiliency.goodput_measure.timeline.zoom import page_data

_HEAD = """<p class="quiet">Wheel: zoom. Drag: move. Double click: all.
Click a name with &#9656; for its ranks.
<button id="in">+</button> <button id="out">-</button> <button id="all">all</button></p>
<canvas id="lanes"></canvas><div id="tip" hidden></div>
<noscript>The timeline needs JavaScript; the figures below do not.</noscript>"""
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1d2730; max-width: 1240px;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 2.1rem; margin: 0; } .quiet { color: #66727e; margin: .2rem 0 1.2rem; }
canvas { width: 100%; display: block; cursor: crosshair; }
#tip { position: absolute; background: #1d2730; color: white; padding: .2rem .6rem; border-radius: 4px;
  font-size: 13px; pointer-events: none; }
tr[data-from] { cursor: pointer; } tr[data-from]:hover { background: #f3f6f8; }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1.6rem; margin: 1rem 0 1.6rem; padding: 0;
  list-style: none; }
.legend i { display: inline-block; width: .9em; height: .9em; border-radius: 2px; margin-right: .45em; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; } h2 { font-size: 1.1rem; }
th, td { padding: .3rem .8rem; text-align: right; border-bottom: 1px solid #e3e8ec; }
th { color: #66727e; font-weight: 500; } td.word, th.word { text-align: left; }
"""


def render_html(timeline: Timeline, ledger: Ledger) -> str:
    """A whole HTML document."""
    name = escape(timeline.job_name)
    data: dict[str, JsonValue] = page_data(ledger, timeline)
    data["causes"] = [{"label": LABELS[bucket], "color": COLORS[bucket]} for bucket in Bucket]
    # A "<" in a name must not end the element that holds it.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{name}: '
        f"{timeline.headline}</title><style>{_STYLE}</style></head><body>\n"
        f"<h1>{timeline.headline}</h1>\n"
        f'<p class="quiet">{name} &nbsp;·&nbsp; {escape(timeline.summary)}</p>\n'
        f"{_HEAD}\n{_legend(timeline)}\n{_incidents(ledger)}"
        f'<script type="application/json" id="data">{text}</script>\n'
        f"<script>{_script()}</script></body></html>\n"
    )


def _script() -> str:
    return resources.files("resiliency.goodput_measure.timeline").joinpath("timeline.js").read_text()


def _legend(timeline: Timeline) -> str:
    items = [
        f'<li title="{escape(MEANINGS[bucket])}"><i style="background:{COLORS[bucket]}"></i>'
        f"{LABELS[bucket]} <b>{100 * share:.1f} %</b></li>"
        for bucket, share in timeline.shares
    ]
    return f'<ul class="legend">{"".join(items)}</ul>'


def _incidents(ledger: Ledger) -> str:
    incidents = ledger.incidents
    if not incidents:
        return ""
    stages = stages_of(incidents)
    heads = "".join(f"<th>{stage.replace('_', ' ')}</th>" for stage in stages)
    rows = []
    for incident in incidents:
        spans = "".join(f"<td>{_seconds(incident.spans.get(stage))}</td>" for stage in stages)
        ranks = ", ".join(map(str, incident.ranks)) or "?"
        end = incident.first_new_step or ledger.end
        lost = "-" if incident.lost_steps is None else str(incident.lost_steps)
        rows.append(
            f'<tr data-from="{incident.fault - ledger.start}" data-until="{end - ledger.start}">'
            f"<td>{incident.index}</td><td>{ranks}</td>"
            f'<td class="word">{escape(incident.cause or "?")}</td>'
            f"{spans}<td><b>{_seconds(incident.total_s)}</b></td><td>{lost}</td></tr>"
        )
    return (
        "<h2>Incidents: seconds that each stage took (click to zoom)</h2>\n"
        "<table><thead><tr><th>#</th><th>rank</th>"
        f'<th class="word">cause</th>{heads}<th>total</th><th>lost steps</th></tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>\n"
    )


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
