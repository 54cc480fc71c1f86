# SPDX-License-Identifier: Apache-2.0
"""The calculator as users start it: a process with flags, text, files and exit codes."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf.json_format import MessageToJson, Parse
from google.protobuf.struct_pb2 import Struct

from resiliency import runtime
from resiliency.events import EventType as E
from resiliency.goodput_measure.calculator import main
from resiliency.goodput_measure.tracker import GoodputSink
from tests.goodput.story import Story, event, write_log


def calculator(directory: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "resiliency.goodput_measure.calculator", *flags],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """A directory with the goodput log and the full event log of job `demo`."""
    story = Story(4).start(restore=0).steps(8, save_every=4, hold=0.5).fault(2)
    story.start(restore=8, imports=1, init=1).steps(8, save_every=4).finish()
    write_log(tmp_path / "demo-events.jsonl", story.events)
    sink = GoodputSink(tmp_path / "demo-goodput.log")
    for item in story.events:
        sink.emit(item)
    sink.close()
    return tmp_path


def test_the_published_table_and_the_export(logs: Path) -> None:
    done = calculator(
        logs,
        *("--job-name", "demo", "--log-file", "demo-goodput.log"),
        *("--reference-step-time", "1", "--export", "out.json"),
    )
    assert (done.returncode, done.stderr) == (0, "")
    exported = json.loads((logs / "out.json").read_text())
    assert exported["total_events"] == 9
    assert (exported["min_loaded_step"], exported["max_saved_step"], exported["step_diff"]) == (0, 16, 16)
    assert exported["goodput_percentage"] == pytest.approx(100 * 16 / 29.5)
    assert "ledger" not in exported
    table = {
        line.rsplit("  ", 1)[0].strip(): line.rsplit("  ", 1)[-1].strip() for line in done.stdout.splitlines()
    }
    assert table["Job Started Count"] == "1"
    assert table["Checkpoints Loaded"] == "1"
    assert table["Checkpoints Saved"] == "4"
    assert table["Total Runtime"] == "29.50 s"
    assert table["Effective Computation Time"] == "16.00 s"
    assert table["Goodput Percentage"] == "54.24 %"


def test_the_event_log_adds_ledger_incidents_and_a_reference_step_time(logs: Path) -> None:
    done = calculator(logs, "--job-name", "demo", "--event-log", "demo-events.jsonl", "--export", "out.json")
    assert done.returncode == 0, done.stderr
    for word in ("kept_steps", "sum", "100.00 %", "ETTR", "Incidents", "SIGKILL"):
        assert word in done.stdout
    exported = json.loads((logs / "out.json").read_text())
    ledger = exported["ledger"]
    assert exported["reference_step_time"] == 1.0
    assert sum(ledger["totals_us"].values()) == ledger["wall_us"] * ledger["ranks"]
    assert len(ledger["incidents"]) == 1


def test_both_sources_of_goodput_events_give_the_same_metrics(logs: Path) -> None:
    outputs = []
    for flag, file in (
        ("--log-file", "demo-goodput.log"),
        ("--log-file", "demo-events.jsonl"),
        ("--event-log", "demo-events.jsonl"),
    ):
        name = f"{len(outputs)}.json"
        done = calculator(
            logs, "--job-name", "demo", flag, file, "--reference-step-time", "2", "--export", name
        )
        assert done.returncode == 0, done.stderr
        outputs.append({k: v for k, v in json.loads((logs / name).read_text()).items() if k != "ledger"})
    assert outputs[0] == outputs[1] == outputs[2]


def test_logs_that_went_through_google_cloud_logging_give_the_same_metrics(logs: Path) -> None:
    for name in ("demo-goodput.log", "demo-events.jsonl"):
        lines = (logs / name).read_text().splitlines()
        kept = [MessageToJson(Parse(line, Struct()), indent=None) for line in lines]
        assert any('_rank": 0.0' in line for line in kept)
        (logs / f"cloud-{name}").write_text("".join(line + "\n" for line in kept))
    outputs = []
    for prefix in ("", "cloud-"):
        done = calculator(
            logs,
            *("--job-name", "demo", "--log-file", f"{prefix}demo-goodput.log"),
            *("--event-log", f"{prefix}demo-events.jsonl", "--export", "out.json"),
        )
        assert (done.returncode, done.stderr) == (0, "")
        outputs.append((logs / "out.json").read_text())
    assert outputs[0] == outputs[1]


def test_without_any_step_time_goodput_is_unknown_and_the_flags_are_named(logs: Path) -> None:
    done = calculator(logs, "--job-name", "demo", "--log-file", "demo-goodput.log")
    assert done.returncode == 0
    assert "unknown" in done.stdout
    assert "set --reference-step-time, or give --event-log" in done.stdout


def test_damaged_lines_are_reported_and_not_fatal(logs: Path) -> None:
    with open(logs / "demo-goodput.log", "a") as log:
        log.write('what?\n{"timestamp": "2026-')
    flags = ("--job-name", "demo", "--log-file", "demo-goodput.log", "--reference-step-time", "1")
    done = calculator(logs, *flags)
    assert done.returncode == 0
    assert done.stderr == "warning: 2 of 10 lines could not be parsed, the last one torn\n"
    assert "demo-goodput.log:9: " in calculator(logs, *flags, "--verbose").stderr


@pytest.mark.parametrize("flag", ["--log-file", "--event-log"])
def test_a_log_of_which_most_lines_are_bad_is_told_from_a_sound_one_with_the_first_reason(
    logs: Path, flag: str
) -> None:
    lines = (logs / "demo-events.jsonl").read_text().splitlines(keepends=True)
    bad = [line.replace('"rank":', '"rank":0.5') for line in lines]
    (logs / "odd").write_text("".join([*lines, *bad, *bad]))
    done = calculator(logs, "--job-name", "demo", flag, "odd", "--reference-step-time", "1")
    assert done.returncode == 3
    assert f"of {3 * len(lines)} lines could not be parsed\n  odd:" in done.stderr
    assert "rank must be a whole number" in done.stderr
    assert "goodput" in done.stdout.lower()


def test_epoch_timestamps_are_named_as_the_reason_why_no_event_was_found(logs: Path) -> None:
    (logs / "epoch").write_text(
        '{"timestamp": 1732312345.6, "job_name": "demo", "event_type": "job_started"}\n'
    )
    done = calculator(logs, "--job-name", "demo", "--log-file", "epoch")
    assert done.returncode == 1
    assert "1 of them could not be parsed, the first epoch:1: timestamp must be text such as" in done.stderr


@pytest.mark.parametrize("flag", ["--log-file", "--event-log"])
def test_a_job_that_is_not_in_the_file_exits_1_and_names_those_that_are(logs: Path, flag: str) -> None:
    write_log(logs / "mixed", [event(1, E.JOB_STARTED, job="a"), event(2, E.JOB_STARTED, job="b")])
    done = calculator(logs, "--job-name", "c", flag, "mixed")
    assert done.returncode == 1
    assert "of job 'c'" in done.stderr
    assert "Jobs in there: a (1), b (1)" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "--job-name"),
        (("--job-name", "demo"), "google"),
        (("--job-name", "demo", "--log-file", "gone"), "cannot read the event log 'gone'"),
        (("--job-name", "demo", "--log-file", "demo-goodput.log", "--reference-step-time", "0"), "above 0"),
        (("--job-name", "demo", "--log-file", "demo-goodput.log", "--reference-step-time", "nan"), "above 0"),
        (("--job-name", "demo", "--gcloud-logging-lookback-days", "0"), "--gcloud-logging-lookback-days"),
        (
            ("--job-name", "demo", "--log-file", "demo-goodput.log", "--timeline", "x.png"),
            "needs --event-log",
        ),
        (("--job-name", "demo", "--event-log", "demo-events.jsonl", "--timeline", "x.gif"), ".png or .html"),
        (("--job-name", "demo", "--event-log", "demo-events.jsonl", "--export", "no/x.json"), "cannot write"),
        (
            ("--job-name", "demo", "--event-log", "demo-events.jsonl", "--timeline", "no/x.html"),
            "cannot write",
        ),
    ],
)
def test_what_cannot_work_exits_2_and_says_which_flag(
    logs: Path, flags: tuple[str, ...], message: str
) -> None:
    done = calculator(logs, *flags)
    assert done.returncode == 2, done.stdout
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_reader_that_closes_the_pipe_early_is_no_error(logs: Path) -> None:
    command = [sys.executable, "-m", "resiliency.goodput_measure.calculator", "--job-name", "demo"]
    read_end, write_end = os.pipe()
    os.close(read_end)
    with open(write_end, "w") as closed_pipe:
        done = subprocess.run(
            [*command, "--event-log", "demo-events.jsonl"],
            cwd=logs,
            stdout=closed_pipe,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert (done.returncode, done.stderr) == (0, "")


def test_no_time_goes_into_looking_for_cycles_among_the_events_of_a_long_log(
    logs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = logs / "demo-events.jsonl"
    log.write_text(log.read_text() * 200)
    monkeypatch.chdir(logs)
    # A restore that another test of this process left hanging counts for nothing.
    monkeypatch.setattr(runtime, "_without_collection", 0)
    gc.enable()
    collections = 0

    def note(phase: str, _: object) -> None:
        nonlocal collections
        collections += phase == "start"

    gc.callbacks.append(note)
    try:
        assert main(["--job-name", "demo", "--event-log", log.name]) == 0
        assert main(["--job-name", "other", "--event-log", log.name]) == 1
    finally:
        gc.callbacks.remove(note)
    assert collections < 20, "one for each some hundred lines"  # a few before and after
    assert gc.isenabled()
    assert "Goodput" in capsys.readouterr().out


def test_measuring_goodput_never_loads_torch_and_draws_only_when_asked() -> None:
    code = (
        "import sys, resiliency.goodput_measure.calculator, resiliency.goodput_measure.tracker\n"
        "print({'torch', 'matplotlib', 'google.cloud.logging', 'tqdm'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "set()\n"
