# SPDX-License-Identifier: Apache-2.0
"""Exports of Google Cloud Logging are read like logs of our own, in each form that they have."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from resiliency.events import EventType as E
from resiliency.events import RunEvent
from resiliency.goodput_measure.calculator import main
from resiliency.goodput_measure.reader import ReadStats, read_events
from resiliency.goodput_measure.tracker import GoodputSink
from tests.goodput import cloud_client
from tests.goodput.story import event, write_log

WRITE = """
from resiliency.goodput_measure.tracker import GoodputTracker
with GoodputTracker() as tracker:
    tracker.job_started()
    tracker.checkpoint_loaded(40)
    tracker.checkpoint_saved(60)
    tracker.job_terminated()
"""
SAVED = event(1, E.CHECKPOINT_SAVED, rank=0, step=5, cause="{")


def entry(payload: object, **more: object) -> dict[str, Any]:
    kind = "textPayload" if isinstance(payload, str) else "jsonPayload"
    return {
        "insertId": "1a",
        kind: payload,
        "labels": {"compute.googleapis.com/resource_name": "host-0"},
        "logName": "projects/p/logs/stdout",
        "resource": {"labels": {"pod_name": "demo-0"}, "type": "k8s_container"},
        "timestamp": "2026-03-01T12:00:01.000000789Z",
        **more,
    }


def read(path: Path, text: str) -> tuple[list[RunEvent], ReadStats]:
    path.write_text(text)
    stats = ReadStats()
    return list(read_events(path, stats=stats)), stats


@pytest.fixture(scope="module")
def entries(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    """What our writer to the cloud left there, as a sink to storage has it."""
    directory = tmp_path_factory.mktemp("cloud")
    env = cloud_client.environment(directory / "site", JOB_IDENTIFIER="j")
    subprocess.run([sys.executable, "-c", WRITE], cwd=directory, env=env, check=True, timeout=60)
    return [json.loads(line) for line in (directory / "j-goodput.cloud").read_text().splitlines()]


def lines(entries: list[dict[str, object]]) -> str:
    return "".join(json.dumps(one) + "\n" for one in entries)


@pytest.mark.parametrize("flag", ["--log-file", "--event-log"])
@pytest.mark.parametrize(
    "form",
    [
        lines,
        cloud_client.gcloud_text,
        json.dumps,  # `jq -c .` of it, without a newline
        lambda entries: "".join(json.dumps(one, indent=2) + "\n" for one in entries),  # `jq '.[]'`
        lambda entries: lines(entries[:2]) + cloud_client.gcloud_text(entries[2:4]) + lines(entries[4:]),
        lambda entries: (
            cloud_client.gcloud_text(entries[:3]) + lines([e["jsonPayload"] for e in entries[3:]])
        ),
    ],
    ids=["sink", "gcloud", "one line", "objects", "mixed", "mixed with plain lines"],
)
def test_what_the_tracker_wrote_to_the_cloud_is_read_from_every_form_of_export(
    entries: list[dict[str, object]], form: Any, flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "exported").write_text(form(entries))
    command = ["--job-name", "j", flag, str(tmp_path / "exported"), "--reference-step-time", "1"]
    assert main([*command, "--export", str(tmp_path / "out.json")]) == 0
    assert capsys.readouterr().err == ""
    metrics = json.loads((tmp_path / "out.json").read_text())
    assert (metrics["min_loaded_step"], metrics["max_saved_step"], metrics["step_diff"]) == (40, 60, 20)
    assert (metrics["total_events"], metrics["unparsable_lines"]) == (5, 0)


def test_an_empty_export_is_no_damage(tmp_path: Path) -> None:
    found, stats = read(tmp_path / "log", "[]\n")
    assert (found, stats.lines, stats.unparsable) == ([], 0, 0)


def test_nothing_is_lost_of_an_event(tmp_path: Path) -> None:
    found, _ = read(tmp_path / "log", cloud_client.gcloud_text([entry(json.loads(SAVED.to_json()))]))
    assert found == [SAVED]


@pytest.mark.parametrize(
    "payload",
    [
        SAVED.to_json(),
        SAVED.to_json() + "\n",
        {"message": SAVED.to_json()},
        {"log": SAVED.to_json(), "stream": "x"},
    ],
)
def test_an_agent_that_does_not_parse_lines_leaves_them_in_the_entry(payload: object, tmp_path: Path) -> None:
    assert read(tmp_path / "log", json.dumps(entry(payload)) + "\n")[0] == [SAVED]


def test_an_agent_that_takes_the_timestamp_out_leaves_it_in_the_envelope(tmp_path: Path) -> None:
    payload = {name: value for name, value in json.loads(SAVED.to_json()).items() if name != "timestamp"}
    assert read(tmp_path / "log", json.dumps(entry(payload)) + "\n")[0] == [SAVED]
    short = entry(payload, timestamp="2026-03-01T12:00:01.5Z")
    (found,), _ = read(tmp_path / "log", json.dumps(short) + "\n")
    assert (found.time - SAVED.time).total_seconds() == 0.5


def test_entries_of_other_programs_are_no_damage_and_damaged_events_are(tmp_path: Path) -> None:
    others: list[Mapping[str, object]] = [
        entry("Traceback (most recent call last):"),
        entry('{"level": "info"}'),
        entry({"message": "started", "level": 20}),
        entry({"level": 20}),
        {"insertId": "2", "logName": "projects/p/logs/x", "protoPayload": {"event": 1}},
    ]
    bad = {**json.loads(SAVED.to_json()), "step": 0.5}
    texts = [*others, entry(bad), entry(json.dumps(bad)), entry(SAVED.to_json()[:-9])]
    for text in ("".join(json.dumps(one) + "\n" for one in texts), json.dumps(texts, indent=2)):
        found, stats = read(tmp_path / "log", text)
        assert (found, stats.lines, stats.unparsable) == ([], 8, 3)
        assert "step must be a whole number from 0 to 2**53, found 0.5" in stats.examples[0]


def test_a_damaged_element_is_named_with_its_line_and_costs_no_other(tmp_path: Path) -> None:
    text = cloud_client.gcloud_text([entry(json.loads(SAVED.to_json())) for _ in range(3)])
    head, first, second, third = text.split('"insertId"')
    second = second.replace('"step": 5', '"step": 5,,')
    found, stats = read(tmp_path / "log", '"insertId"'.join((head, first, second, third)))
    assert (len(found), stats.lines, stats.unparsable) == (2, 3, 1)
    line = (head + first).count("\n")  # the brace is on the line before
    assert stats.examples[0].startswith(f"{tmp_path / 'log'}:{line}: ")


@pytest.mark.parametrize("cut", [3, 60, 200, -5])
def test_an_array_that_was_torn_ends_where_a_line_of_our_own_begins(cut: int, tmp_path: Path) -> None:
    torn = cloud_client.gcloud_text([entry(json.loads(SAVED.to_json()))])[:cut]
    plain = write_log(tmp_path / "plain", [SAVED, SAVED]).read_text()
    found, stats = read(tmp_path / "log", f"{torn}\n{plain}")
    assert found[-2:] == [SAVED, SAVED]
    assert (stats.unparsable, stats.torn_at_end) == (cut != 3, False)


def test_the_calculator_needs_nothing_but_the_export_of_the_small_log(tmp_path: Path) -> None:
    sink = GoodputSink(tmp_path / "log")
    sink.emit(SAVED)
    sink.close()
    payload = json.loads((tmp_path / "log").read_text())
    (found,), _ = read(tmp_path / "export", cloud_client.gcloud_text([entry(payload)]))
    assert (found.type, found.step, found.time) == (SAVED.type, SAVED.step, SAVED.time)
