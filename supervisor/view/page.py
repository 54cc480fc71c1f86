# SPDX-License-Identifier: Apache-2.0
"""The status document as one HTML page: no other file, nothing from the network, readable with 1,000 hosts.

The page fetches itself again and replaces what it shows, so that open parts stay open; when that fails it
says how old it is.  Every text of the document is escaped: names and log lines come from hosts.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from html import escape

from supervisor.values import DeviceState
from supervisor.view.status import (
    CommandStatus,
    HostStatus,
    IncidentStatus,
    JobStatus,
    SpanStatus,
    Status,
)
from supervisor.view.words import (
    ago,
    alarms,
    count,
    diagnosis_text,
    duration,
    incident_state,
    is_well,
    job_state,
    states_of,
    steps_of,
    troubles,
    what_happened,
)

#: Hosts that need a look and are listed one by one; the map shows all.
_MOST_HOSTS = 100
#: Rows of a list that grows with time.
_MOST_ROWS = 100
_REFRESH_MS = 5000

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2730; --quiet: #66727e; --line: #dde3e8; --card: #f6f8fa;
  --bad: #b3261e; --busy: #b26a00; --well: #1a7f4b; --idle: #4f6b95; --done: #7a7f85; --page: #fff; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e9ee; --quiet: #98a4af; --line: #333c45;
  --card: #1b2229; --bad: #ff8a80; --busy: #ffb74d; --well: #5fd08f; --idle: #8fb4ee; --done: #9aa0a6;
  --page: #12171c; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page);
  max-width: 1240px; margin: 1.5rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin: 0; } h2 { font-size: 1.1rem; margin: 1.6rem 0 .5rem; }
.quiet { color: var(--quiet); } p { margin: .2rem 0; }
.alarm { border-left: 4px solid var(--bad); background: var(--card); padding: .5rem .8rem; margin: .4rem 0; }
.fresh { display: none; } .stale .fresh { display: block; }
.cards { display: flex; flex-wrap: wrap; gap: .6rem; margin: 1rem 0; }
.card { background: var(--card); border-radius: 6px; padding: .5rem .9rem; min-width: 6rem; }
.card b { display: block; font-size: 1.5rem; font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem .3rem 0; text-align: left; border-bottom: 1px solid var(--line);
  vertical-align: top; overflow-wrap: anywhere; }
th { color: var(--quiet); font-weight: 500; }
details { margin: .3rem 0; } summary { cursor: pointer; }
.incident { border: 1px solid var(--line); border-left: 4px solid var(--busy); border-radius: 4px;
  padding: .5rem .8rem; margin: .5rem 0; } .incident.closed { border-left-color: var(--done); }
.spans { display: flex; height: 1.5rem; margin: .4rem 0; border-radius: 3px; overflow: hidden; }
.spans span { background: var(--idle); color: var(--page); font-size: .75rem; padding: .15rem .3rem;
  overflow: hidden; white-space: nowrap; border-right: 1px solid var(--page); }
.spans span.lasts { background: var(--busy); }
.map { display: flex; flex-wrap: wrap; gap: 2px; margin: .3rem 0 .6rem; }
.map i { width: 1.1rem; height: 1.1rem; border-radius: 2px; font: 600 .65rem/1.1rem system-ui, sans-serif;
  text-align: center; color: var(--page); background: var(--done); font-style: normal; }
.failed { background: var(--bad) !important; } .running { background: var(--well) !important; }
.spare { background: var(--idle) !important; }
.map i.look { outline: 2px solid var(--busy); outline-offset: -2px; }
.bad { color: var(--bad); }
"""

# Keeps `open` of details by their ids.  A response that is no page of ours leaves the old one in place.
_SCRIPT = f"""
let since = Date.now();
async function again() {{
  try {{
    const answer = await fetch(location.pathname, {{cache: "no-store", signal: AbortSignal.timeout(15000)}});
    if (!answer.ok) throw new Error(answer.status);
    const next = new DOMParser().parseFromString(await answer.text(), "text/html").querySelector("main");
    const open = [...document.querySelectorAll("details[open]")].map(one => one.id);
    document.querySelector("main").replaceWith(next);
    for (const id of open) document.getElementById(id)?.setAttribute("open", "");
    since = Date.now();
    document.body.classList.remove("stale");
  }} catch (error) {{
    document.body.classList.add("stale");
    document.getElementById("age").textContent = Math.round((Date.now() - since) / 1000);
  }}
  setTimeout(again, {_REFRESH_MS});
}}
setTimeout(again, {_REFRESH_MS});
"""


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


#: What a browser lets the page do: its own style and script, and a fetch of itself.
CONTENT_SECURITY_POLICY = (
    f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{_hash(_SCRIPT)}'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def status_page(status: Status) -> str:
    """A whole HTML document."""
    title = f"{'! ' if alarms(status) else ''}Supervisor, epoch {status.epoch}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>\n"
        '<p class="alarm fresh" role="alert">No answer for <span id="age">0</span> s: '
        "what follows is as old as that.</p>\n"
        f"<main>\n{''.join(_parts(status))}</main>\n<script>{_SCRIPT}</script></body></html>\n"
    )


def _parts(status: Status) -> Iterator[str]:
    release = f"release {status.release}, " if status.release else ""
    yield (
        f'<h1>Supervisor</h1><p class="quiet">{escape(release)}epoch {status.epoch}, '
        f"up {duration(status.uptime_s)}</p>\n"
    )
    for alarm in alarms(status):
        yield f'<p class="alarm" role="alert">{escape(alarm)}</p>\n'
    yield _cards(status)
    incidents = [one for one in status.incidents if one.closed_age_s is None]
    closed = [one for one in status.incidents if one.closed_age_s is not None]
    yield _section("Open incidents", "".join(map(_incident, incidents)) or '<p class="quiet">None.</p>')
    yield _section("Jobs", _jobs(status.jobs) if status.jobs else '<p class="quiet">None.</p>')
    yield _hosts(status.hosts)
    if status.commands:
        yield _section("Commands", _commands(status.commands))
    if status.verdicts:
        rows = [
            (escape(one.subject), escape(one.text or one.cause), ago(one.age_s), duration(one.expires_s))
            for one in status.verdicts[:_MOST_ROWS]
        ]
        yield _section("Verdicts", _table(("About", "Verdict", "Since", "Holds for"), rows))
    if status.decisions:
        notes = [(ago(note.age_s), escape(note.text)) for note in status.decisions[:_MOST_ROWS]]
        yield _section("What was decided, and why", _table(("When", "What"), notes))
    if closed:
        inner = "".join(map(_incident, closed[:_MOST_ROWS]))
        yield _folded("closed", f"{count(len(closed), 'closed incident')}", inner)


def _cards(status: Status) -> str:
    cards = [(str(number), state.value) for state, number in states_of(status.hosts).items()]
    cards += [
        (str(sum(host.cordoned for host in status.hosts)), "cordoned"),
        (str(sum(host.silent for host in status.hosts)), "silent"),
        (f"{status.cordons_left} of {status.max_cordons}", "cordons left"),
        (str(status.spare_floor), "spares kept back"),
    ]
    inner = "".join(f'<div class="card"><b>{value}</b>{escape(name)}</div>' for value, name in cards)
    parts = "".join(
        f"<p>{escape(part.name)} {escape(part.address)}: contact {ago(part.contact_age_s)}"
        + (f', <span class="bad">{escape(part.problem)}</span>' if part.problem else "")
        + "</p>"
        for part in status.parts
    )
    return f'<div class="cards">{inner}</div>\n{parts}'


def _incident(incident: IncidentStatus) -> str:
    closed = incident.closed_age_s is not None
    reports = "".join(
        f"<li>{escape(what_happened(report))}{' <b>acted on</b>' if report.acted_on else ''}<ul>"
        + "".join(
            f'<li>{escape(one.witness)}: {escape(one.text)} <span class="quiet">{escape(one.id)}'
            + (f", Xid {one.code}" if one.code is not None else "")
            + (f", {escape(one.device)}" if one.device else "")
            + "</span></li>"
            for one in report.evidence[:_MOST_ROWS]
        )
        + "</ul></li>"
        for report in incident.reports[:_MOST_ROWS]
    )
    return (
        f'<div class="incident{" closed" if closed else ""}"><b>{escape(incident.subject)}</b> '
        f'<span class="quiet">{escape(incident.id)}, since {duration(incident.age_s)}</span>'
        f"<p>{escape(incident_state(incident))}</p>{_spans(incident.spans)}<ul>{reports}</ul></div>\n"
    )


def _spans(spans: Sequence[SpanStatus]) -> str:
    if not spans:
        return ""
    parts = []
    for span in spans:
        lasts = span.seconds is None
        seconds = span.age_s if span.seconds is None else span.seconds
        text = f"{span.name}: {'since ' if lasts else ''}{duration(seconds)}"
        # Proportional, and still there where a part took no time.
        parts.append(
            f'<span class="{"lasts" if lasts else ""}" style="flex: {max(seconds, 0.01):.2f} 1 2rem" '
            f'title="{escape(text)}">{escape(text)}</span>'
        )
    return f'<div class="spans">{"".join(parts)}</div>'


def _jobs(jobs: Sequence[JobStatus]) -> str:
    header = ("Job", "Hosts", "Step", "Attempt", "Restarts left", "Actions left", "State", "Last diagnosis")
    rows = [
        (
            f"<b>{escape(job.workload)}</b>",
            f"{len(job.hosts)} of {job.hosts_needed}, {count(job.replicas, 'replica')}",
            ("-" if job.step is None else f"{job.step}, {ago(job.step_age_s)}")
            + (f"; best {job.best_step}" if job.step is None or job.best_step > job.step else ""),
            str(job.attempt),
            f"{job.in_job.left} of {job.in_job.limit} in place, "
            f"{job.restarts.left} of {job.restarts.limit} whole",
            f"{job.actions_left} of {job.actions_at_once}"
            + (f", next in {duration(job.next_action_s)}" if job.next_action_s else "")
            + (f"; {job.fruitless} without progress" if job.fruitless else ""),
            f"<span{'' if is_well(job) else ' class=bad'}>{escape(job_state(job))}</span>",
            escape(diagnosis_text(job.diagnosis)),
        )
        for job in jobs
    ]
    return _table(header, rows)


def _hosts(hosts: Sequence[HostStatus]) -> str:
    look = [host for host in hosts if troubles(host)]
    parts = []
    if look:
        rows = [
            (
                f"<b>{escape(host.name)}</b> <span class=quiet>{escape(f'{host.id} {host.address}')}</span>",
                escape(host.state.value),
                escape(host.workload or "-"),
                escape(steps_of(host)),
                ago(host.report_age_s),
                escape(host.launcher.value),
                escape("; ".join(troubles(host))),
                escape(diagnosis_text(host.diagnosis)),
            )
            for host in look[:_MOST_HOSTS]
        ]
        header = ("Host", "State", "Job", "Step", "Last report", "Launcher", "What", "Last diagnosis")
        parts.append(_section(f"{count(len(look), 'host')} to look at", _table(header, rows)))
        if len(look) > len(rows):
            parts.append(f'<p class="quiet">and {len(look) - len(rows)} more; the map shows them.</p>')
    return "".join(parts) + _section(f"{count(len(hosts), 'host')}", "".join(_maps(hosts)))


def _maps(hosts: Sequence[HostStatus]) -> Iterator[str]:
    """A square for each host, by job; the letter and the outline say what the colour says."""
    groups: dict[str, list[HostStatus]] = {}
    for host in hosts:
        groups.setdefault(host.workload, []).append(host)
    for workload in sorted(groups, key=lambda name: (not name, name)):
        group = groups[workload]
        states = ", ".join(f"{n} {state.value}" for state, n in states_of(group).items() if n)
        squares = "".join(map(_square, sorted(group, key=lambda host: (host.domains[::-1], host.name))))
        title = f"{workload or 'without a job'}: {states}"
        yield f'<p>{escape(title)}</p><div class="map">{squares}</div>\n'


def _square(host: HostStatus) -> str:
    wrong = troubles(host)
    tip = "\n".join(
        filter(
            None,
            (
                f"{host.name} ({host.id})",
                f"{host.state.value}, attempt {host.attempt}, step {steps_of(host)}",
                f"reported {ago(host.report_age_s)}, launcher {host.launcher.value}",
                " ".join(host.domains),
                "; ".join(wrong),
                "" if host.diagnosis is None else diagnosis_text(host.diagnosis),
            ),
        )
    )
    look = " look" if wrong else ""
    letter = "" if host.state is DeviceState.RUNNING else host.state.value[0].upper()
    return f'<i class="{host.state.value}{look}" title="{escape(tip)}">{letter}</i>'


def _commands(commands: Sequence[CommandStatus]) -> str:
    rows = [
        (
            f"<b>{escape(one.kind.value)}</b> <span class=quiet>{escape(one.id)}</span>",
            escape(" ".join(filter(None, (one.workload, one.host, one.spare and f"spare {one.spare}"))))
            or "-",
            escape(one.incident or "-"),
            ago(one.age_s),
            "under way"
            if one.outcome is None
            else f"{escape(one.outcome.value)} after {duration(one.seconds)} {escape(one.text)}",
        )
        for one in commands[:_MOST_ROWS]
    ]
    return _table(("Command", "For", "Incident", "Decided", "Outcome"), rows)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """`rows` are HTML already."""
    head = "".join(f"<th>{name}</th>" for name in header)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>\n" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _section(title: str, inner: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{inner}</section>\n"


def _folded(name: str, title: str, inner: str) -> str:
    return f'<details id="{escape(name)}"><summary>{escape(title)}</summary>{inner}</details>\n'
