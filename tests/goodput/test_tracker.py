# SPDX-License-Identifier: Apache-2.0
"""What ends up in the goodput log, and where that log is."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from resiliency.events import EventType, RunEvent, events_path
from resiliency.goodput_measure.tracker import (
    GOODPUT_TYPES,
    GoodputSink,
    GoodputTracker,
    goodput_path,
    goodput_sink,
    open_event_stream,
)
from resiliency.runtime import RunInfo
from tests.goodput import cloud_client
from tests.goodput.story import event

FILE = {"GOODPUT_USE_FILE_TRACKING": "1"}


def records(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run_python(code: str, tmp_path: Path, **env: str) -> subprocess.CompletedProcess[str]:
    base = {k: v for k, v in os.environ.items() if k != "GOODPUT_USE_FILE_TRACKING"}
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**base, **env},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("type", EventType)
def test_only_the_published_six_pass_with_exactly_the_published_keys(type: EventType, tmp_path: Path) -> None:
    sink = GoodputSink(tmp_path / "log")
    sink.emit(event(1.5, type, step=7, cause="x"))
    sink.close()
    extra = {
        EventType.JOB_STARTED: {"node_rank": 0},
        EventType.JOB_TERMINATED: {"node_rank": 0},
        EventType.CHECKPOINT_LOADED: {"step": 7},
        EventType.CHECKPOINT_SAVED: {"step": 7},
    }.get(type, {})
    expected = {
        "timestamp": "2026-03-01T12:00:01.500000+00:00",
        "job_name": "demo",
        "event_type": type.value,
        **extra,
    }
    assert records(tmp_path / "log") == ([expected] if type in GOODPUT_TYPES else [])


def test_a_checkpoint_that_every_rank_loads_is_one_line(tmp_path: Path) -> None:
    sink = GoodputSink(tmp_path / "log")
    for rank in range(4):
        sink.emit(event(1, EventType.CHECKPOINT_LOADED, rank=rank, step=7))
    sink.close()
    assert len(records(tmp_path / "log")) == 1


@pytest.mark.parametrize("value", ["1", "true", "YES"])
def test_file_tracking_writes_the_named_file_in_the_run_directory(value: str, tmp_path: Path) -> None:
    info = RunInfo(job_name="j", run_dir=str(tmp_path / "run"))
    sink = goodput_sink(info, {"GOODPUT_USE_FILE_TRACKING": value})
    sink.emit(event(1, EventType.JOB_STARTED))
    sink.close()
    assert [r["event_type"] for r in records(tmp_path / "run" / "j-goodput.log")] == ["job_started"]


def test_without_a_cloud_client_there_is_a_file_and_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    info = RunInfo(job_name="j", run_dir=str(tmp_path))
    with caplog.at_level("DEBUG"):
        goodput_sink(info, {"GOODPUT_USE_FILE_TRACKING": "0"}).close()
    assert [r.levelname for r in caplog.records] == ["DEBUG"]
    assert "client is not installed" in caplog.text
    assert goodput_path(info).exists()


def test_the_launcher_stream_writes_both_logs_before_emit_returns(tmp_path: Path) -> None:
    info = RunInfo(job_name="j", run_dir=str(tmp_path))
    with open_event_stream(info, FILE) as stream:
        stream.emit(EventType.JOB_STARTED)
        stream.emit(EventType.FAULT_DETECTED, rank=3, cause="SIGKILL")
        full = [RunEvent.from_json(line).type for line in events_path(info).read_text().splitlines()]
        assert full == [EventType.JOB_STARTED, EventType.FAULT_DETECTED]
        assert len(records(goodput_path(info))) == 1


def test_only_rank_0_of_the_workers_opens_the_goodput_log(tmp_path: Path) -> None:
    for rank in (1, 0):
        info = RunInfo(job_name="j", run_dir=str(tmp_path), rank=rank, attempt=0)
        with open_event_stream(info, FILE) as stream:
            stream.emit(EventType.CHECKPOINT_LOADED, step=5)
        assert goodput_path(info).exists() == (rank == 0)
    assert len(events_path(info).read_text().splitlines()) == 2
    assert len(records(goodput_path(info))) == 1


def test_the_tracker_facade_writes_all_six(tmp_path: Path) -> None:
    info = RunInfo(job_name="j", run_dir=str(tmp_path))
    with GoodputTracker(open_event_stream(info, FILE)) as tracker:
        tracker.user_scheduled()
        tracker.job_started()
        tracker.checkpoint_loaded(0)
        tracker.checkpoint_saved(10)
        tracker.user_terminated()
        tracker.job_terminated()
    assert [r["event_type"] for r in records(goodput_path(info))] == [t.value for t in GOODPUT_TYPES]


def test_a_shell_can_record_when_the_user_scheduled_the_job(tmp_path: Path) -> None:
    env = {**os.environ, "JOB_IDENTIFIER": "j", "RESILIENCY_RUN_DIR": str(tmp_path), **FILE}
    command = [sys.executable, "-m", "resiliency.goodput_measure.tracker", "--event-type", "user_scheduled"]
    subprocess.run(command, env=env, check=True, timeout=60)
    assert [r["event_type"] for r in records(tmp_path / "j-goodput.log")] == ["user_scheduled"]


WRITE_THREE = """
import logging
logging.basicConfig()
from resiliency.goodput_measure.tracker import open_event_stream
from resiliency.events import EventType
from resiliency.runtime import RunInfo
with open_event_stream(RunInfo(job_name="j")) as stream:
    for step in (1, 2, 3):
        stream.emit(EventType.CHECKPOINT_SAVED, step=step)
"""


WRITE_A_JOB = """
from resiliency.goodput_measure.tracker import GoodputTracker
with GoodputTracker() as tracker:
    tracker.job_started()
    tracker.checkpoint_loaded(40)
    tracker.checkpoint_saved(60)
    tracker.job_terminated()
"""


@pytest.fixture
def cloud(tmp_path: Path) -> dict[str, str]:
    return cloud_client.environment(tmp_path / "site")


def test_with_a_cloud_client_events_go_to_the_cloud_and_come_back(
    tmp_path: Path, cloud: dict[str, str]
) -> None:
    done = run_python(WRITE_A_JOB, tmp_path, **cloud, JOB_IDENTIFIER="j")
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "j-goodput.log").exists()
    exported = tmp_path / "j-goodput.cloud"
    assert re.findall(r'"(?:step|node_rank)": [^,}]+', exported.read_text()) == [
        '"node_rank": 0.0',
        '"step": 40.0',
        '"step": 60.0',
        '"node_rank": 0.0',
    ]
    command = [sys.executable, "-m", "resiliency.goodput_measure.calculator", "--job-name", "j"]
    for source in ([], ["--log-file", str(exported)]):
        done = subprocess.run(
            [*command, *source, "--reference-step-time", "1", "--export", "out.json"],
            cwd=tmp_path,
            env={**os.environ, **cloud},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (done.returncode, done.stderr) == (0, "")
        metrics = json.loads((tmp_path / "out.json").read_text())
        assert (metrics["min_loaded_step"], metrics["max_saved_step"], metrics["step_diff"]) == (40, 60, 20)
        assert (metrics["total_events"], metrics["unparsable_lines"]) == (5, 0)


def test_a_cloud_that_fails_midway_costs_one_warning_and_no_event(
    tmp_path: Path, cloud: dict[str, str]
) -> None:
    done = run_python(WRITE_THREE, tmp_path, **cloud, REFUSE_AFTER="1")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("WARNING") == 1
    assert "quota" in done.stderr
    assert [r["step"] for r in cloud_client.payloads(tmp_path / "j-goodput.cloud")] == [1]
    assert [r["step"] for r in records(tmp_path / "j-goodput.log")] == [2, 3]


def test_a_cloud_without_credentials_costs_one_warning_and_no_event(
    tmp_path: Path, cloud: dict[str, str]
) -> None:
    done = run_python(WRITE_THREE, tmp_path, **cloud, NO_CREDENTIALS="1")
    assert done.stderr.count("WARNING") == 1
    assert "no credentials" in done.stderr
    assert [r["step"] for r in records(tmp_path / "j-goodput.log")] == [1, 2, 3]
