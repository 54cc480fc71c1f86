# SPDX-License-Identifier: Apache-2.0
"""The exposition is what Prometheus reads, and does not grow with the fleet."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from supervisor.view.metrics import METRICS, PREFIX, metrics_text
from supervisor.view.status import CounterStatus, LabelStatus

from .documents import EVIL, full, job, large

PAGE = (Path(__file__).parents[2] / "docs" / "supervisor-operators.md").read_text()
_LABEL = r'[a-z_]+="(?:[^"\\\n]|\\["\\n])*"'
_SAMPLE = re.compile(rf"({PREFIX}[a-z_]+)(?:\{{({_LABEL}(?:,{_LABEL})*)\}})? (-?\d+(?:\.\d+)?(?:e[-+]\d+)?)")


def samples(text: str) -> dict[str, float]:
    """Each sample by its name and labels; fails on a line that Prometheus would refuse."""
    found: dict[str, float] = {}
    typed: set[str] = set()
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            name, kind = line.split(" ")[2:]
            assert name not in typed
            assert kind in ("gauge", "counter")
            assert name.endswith("_total") == (kind == "counter")
            typed.add(name)
        elif not line.startswith("# HELP "):
            match = _SAMPLE.fullmatch(line)
            assert match is not None, line
            assert match[1] in typed
            key = line.rpartition(" ")[0].removeprefix(PREFIX)
            assert key not in found
            found[key] = float(match[3])
    assert text.endswith("\n")
    return found


def test_what_is_in_the_document_is_in_the_metrics() -> None:
    found = samples(metrics_text(full()))
    expected = {
        'info{release="0.1.0"}': 1,
        "epoch": 4,
        "shadow": 1,
        'frozen{cause="operator"}': 1,
        'frozen{cause="silence"}': 0,
        "log_writable": 0,
        'part_healthy{part="sensor"}': 1,
        'part_healthy{part="actuator"}': 0,
        'hosts{state="failed"}': 1,
        'hosts{state="spare"}': 1,
        "hosts_cordoned": 1,
        "hosts_disconnected": 1,
        "incidents_open": 1,
        "incident_age_seconds_max": 95,
        'commands_in_flight{kind="hot_swap"}': 1,
        'commands_in_flight{kind="cordon_host"}': 0,
        'job_step{workload="llama"}': 120,
        'job_restarts_left{workload="llama",kind="in_job"}': 2,
        'job_restarts_left{workload="llama",kind="workload"}': 5,
        'job_incident_open{workload="llama"}': 1,
        'events_total{type="host_hb"}': 12,
        "records_total": 345,
    }
    assert {key: found[key] for key in expected} == expected


def test_names_that_came_from_outside_are_escaped() -> None:
    status = replace(full(), jobs=(job('a"b\\c\nd', ()),), counters=())
    text = metrics_text(status)
    assert r'job_step{workload="a\"b\\c\nd"} 120' in text
    samples(text)


def test_a_counter_whose_name_prometheus_would_refuse_does_not_spoil_the_rest() -> None:
    bad = (
        CounterStatus(name="two words", value=1),
        CounterStatus(name="events", value=1, labels=(LabelStatus(name="no-label", value=EVIL),)),
        CounterStatus(name="later", value=7),
    )
    assert samples(metrics_text(replace(full(), counters=bad)))["later_total"] == 7


def test_the_number_of_series_does_not_grow_with_the_fleet() -> None:
    assert len(samples(metrics_text(large(1000)))) == len(samples(metrics_text(large(10))))


def test_what_is_not_known_has_no_sample() -> None:
    unknown = replace(
        full(), hosts=tuple(replace(host, connected=None, report_age_s=None) for host in full().hosts)
    )
    text = metrics_text(unknown)
    assert "hosts_disconnected" not in text
    assert "report_age_seconds_max" not in text


def test_the_page_lists_every_metric_with_its_kind_and_meaning() -> None:
    rows = re.findall(rf"^\| `{PREFIX}(\w+)` \| (\w+) \| (.*) \|$", PAGE, re.MULTILINE)
    assert rows == [(metric.name, metric.kind, metric.help) for metric in METRICS]
