# SPDX-License-Identifier: Apache-2.0
"""One real training with every option that the other tests leave off, and one without NeMo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import pytest

from resiliency.events import EventType
from resiliency.plugins.checkpoint_kinds import verify
from tests.nemo.conftest import ATTEMPT_S, JOB_NAME, ROOT, STEPS, TWO_REPLICAS, Finished, run_python

pytestmark = [pytest.mark.nemo, pytest.mark.slow]

READ_SCALARS = """
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(sys.argv[1]).Reload()
print(json.dumps({tag: [[e.step, e.value] for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}))
"""


def test_only_the_newest_checkpoints_are_left_and_they_are_whole(finished: Finished) -> None:
    assert sorted(path.name for path in finished.checkpoints.iterdir()) == ["step=40", "step=60"]
    for path in finished.checkpoints.iterdir():
        assert verify(path) is None
    assert "deleted checkpoint" in finished.output


def test_tensorboard_reads_the_step_times_and_the_losses(finished: Finished) -> None:
    scalars = json.loads(run_python("-W", "ignore", "-c", READ_SCALARS, finished.logs / "tensorboard"))
    assert [step for step, _ in scalars["step_time_s"]] == list(range(1, STEPS + 1))
    assert all(0 < value < ATTEMPT_S for _, value in scalars["step_time_s"])
    assert all(value > 0 for _, value in scalars["tokens_per_s"])
    assert len(scalars["reduced_train_loss"]) >= STEPS - 1
    assert len(scalars["val_loss"]) == STEPS // 20


@pytest.mark.parametrize("rank", range(TWO_REPLICAS.ranks))
def test_every_rank_traced_the_steps_around_every_save(finished: Finished, rank: int) -> None:
    names = [f"around-rank{rank}-step{step}.json" for step in (20, 40, 60)]
    assert sorted(path.name for path in (finished.logs / "profile").glob(f"*-rank{rank}-*")) == names
    for name in names:
        trace = json.loads((finished.logs / "profile" / name).read_text())
        assert any("optimizer" in str(event.get("name", "")).lower() for event in trace["traceEvents"])


def test_logs_were_written_near_and_nothing_of_them_is_left_there(finished: Finished) -> None:
    assert list(Path(tempfile.gettempdir()).glob(f"{JOB_NAME}-logs-*")) == []
    assert finished.logs.is_dir()


def test_the_goodput_log_has_the_published_lines_and_the_calculator_takes_it(finished: Finished) -> None:
    log = finished.job.directory / "job-goodput.log"
    kinds = [json.loads(line[line.index("{") :])["event_type"] for line in log.read_text().splitlines()]
    assert kinds.count("checkpoint_saved") == 3
    assert kinds.count("checkpoint_loaded") == 1
    assert kinds.count("job_started") == 1
    assert kinds[-1] == "job_terminated"
    export = finished.job.directory / "goodput.json"
    text = run_python(
        *("-m", "resiliency.goodput_measure.calculator", "--job-name", "job", "--log-file", log),
        *("--event-log", finished.job.directory / "job-events.jsonl", "--export", export),
    )
    assert "goodput" in text.lower()
    report = json.loads(export.read_text())
    assert report["step_diff"] == STEPS
    assert 0 < report["goodput_percentage"] <= 100


def test_every_step_of_every_rank_was_recorded_with_a_finite_loss(finished: Finished) -> None:
    steps = finished.job.events(EventType.STEP_FINISHED)
    assert sorted((e.rank, e.step) for e in steps) == [(r, s) for r in (0, 1) for s in range(1, STEPS + 1)]
    assert all(0 < loss < 100 for loss in finished.job.losses().values())


@pytest.fixture
def without_nemo(tmp_path: Path) -> Path:
    """The installed packages, all but NeMo: a directory of links, for an interpreter without its own."""
    packages = tmp_path / "packages"
    packages.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith("nemo"):
            (packages / entry.name).symlink_to(entry)
    return packages


def test_without_nemo_the_benchmark_says_what_to_install_and_saves_nothing(
    without_nemo: Path, tmp_path: Path
) -> None:
    script = ROOT / "benchmark" / "benchmark.py"
    saving = ["--persistent-ckpt-dir", str(tmp_path / "storage"), "--persistent-ckpt-interval", "5"]
    done = subprocess.run(
        [sys.executable, "-S", str(script), "--device", "cpu", "--model", "tiny", "--job-name", "j", *saving],
        env={**os.environ, "PYTHONPATH": f"{without_nemo}:{ROOT}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2, done.stderr
    assert "nemo_toolkit is not installed" in done.stderr + done.stdout
    assert "pip install" in done.stderr + done.stdout
    assert "Traceback" not in done.stderr
    assert [path for path in (tmp_path / "storage").rglob("*") if path.is_file()] == []
