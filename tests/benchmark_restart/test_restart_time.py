# SPDX-License-Identifier: Apache-2.0
"""The restart benchmark as its users start it: real launchers, a real kill, real figures."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from resiliency.testing import warm
from resiliency.testing.processes import Command

SCRIPT = Path(__file__).parents[2] / "benchmark" / "restart_time.py"
LAUNCHERS = ["launcher.py", "standby off", "torchrun", "ft_launcher"]
SPANS = ["stopped", "started", "imported", "initialized", "restored", "first_new_step"]
#: One round takes a minute on two idle cores.
WAIT = 600.0


@pytest.mark.slow
@pytest.mark.parametrize(
    "launchers",
    [LAUNCHERS[:1], pytest.param(LAUNCHERS, marks=pytest.mark.thorough("a round of our launcher is near"))],
    ids=len,
)
def test_a_quick_round_measures_every_span_under_each_launcher(tmp_path: Path, launchers: list[str]) -> None:
    flags = ["--workload", "light", "--quick", "--directory", str(tmp_path), "--launchers", *launchers]
    files = {kind: tmp_path / f"report.{kind}" for kind in ("json", "md", "png")}
    outputs = ["--export", files["json"], "--markdown", files["md"], "--plot", files["png"]]
    with Command([sys.executable, SCRIPT, *flags, *outputs], cwd=tmp_path) as command:
        assert command.wait(timeout=WAIT) == 0, command.output
        command.assert_no_orphans(timeout=60)
    report = json.loads(files["json"].read_text())
    assert [run["launcher"] for run in report["runs"]] == launchers
    for run in report["runs"]:
        restart = run["restart"]
        assert list(restart["spans_s"]) == SPANS, run
        assert all(span >= 0 for span in restart["spans_s"].values()), run
        assert sum(restart["spans_s"].values()) == pytest.approx(restart["total_s"])
        # torch cannot be imported in less, unless it need not be
        assert restart["spans_s"]["imported"] > 0.1 or run["launcher"] == LAUNCHERS[0], run
        assert (restart["restored_step"], restart["lost_steps"]) == (50, 2)
        assert restart["first_step_s"] > 0.1
        assert restart["memory_bytes"] > 100 << 20
        assert restart["step_s"] > 0
        assert restart["held_s"] > 0
    assert set(report["runs"][0]["restart"]["own_spans_s"]) >= {"detected", "stopped", "started"}
    assert report["machine"]["torch"]
    measured = ", ".join(f"{name} 1 of 1" for name in launchers)
    assert f"Runs measured: {measured}" in files["md"].read_text()
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(f"report.{kind}" for kind in files)


@pytest.mark.slow
@pytest.mark.thorough("tests/supervisor_plane and tests/launch lose hosts")
def test_a_lost_host_is_measured_with_a_supervisor_and_without_one(tmp_path: Path) -> None:
    exported = tmp_path / "report.json"
    flags = ["--fault", "host", "--quick", "--launchers", "supervisor", "--directory", str(tmp_path)]
    with Command([sys.executable, SCRIPT, *flags, "--export", exported], cwd=tmp_path) as command:
        assert command.wait(timeout=WAIT) == 0, command.output
        command.assert_no_orphans(timeout=60)
    runs = json.loads(exported.read_text())["runs"]
    assert [run["launcher"] for run in runs] == ["supervisor", "launcher.py"]
    for run in runs:
        assert (run["restart"]["restored_step"], run["restart"]["lost_steps"]) == (50, 2)
        assert {"old ranks ended", "met", "ranks created"} <= set(run["restart"]["own_spans_s"])
    assert "incident opened" in runs[0]["restart"]["own_spans_s"]


@pytest.mark.thorough("the run that is measured is near")
@pytest.mark.slow
def test_a_run_that_fails_is_reported_and_makes_the_exit_code_1(tmp_path: Path) -> None:
    env = {"GLOO_SOCKET_IFNAME": "no-such-interface"}  # no rank can join its process group
    flags = ["--quick", "--launchers", "launcher.py", "--directory", str(tmp_path)]
    with Command(
        [sys.executable, SCRIPT, *flags, "--export", str(tmp_path / "r.json")], env=env, cwd=tmp_path
    ) as command:
        assert command.wait(timeout=WAIT) == 1, command.output
        assert "FAILED round 1, launcher.py" in command.output
        assert "launcher.py 0 of 1" in command.output
        command.assert_no_orphans(timeout=60)
    (run,) = json.loads((tmp_path / "r.json").read_text())["runs"]
    assert run["restart"] is None
    assert run["error"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--fault=hung",), "sends no heartbeats"),
        (("--fault=hung", "--workload=nemo", "--launchers", "torchrun"), "torchrun never notices"),
    ],
)
def test_a_hang_that_nobody_notices_is_refused(words: tuple[str, ...], said: str) -> None:
    done = warm.run([sys.executable, str(SCRIPT), *words], timeout=60)
    assert done.returncode == 2
    assert said in done.stderr


@pytest.mark.parametrize("value", ["0", "-1", "three"])
def test_a_number_of_runs_that_measures_nothing_is_refused(value: str) -> None:
    done = warm.run([sys.executable, str(SCRIPT), f"--runs={value}"], timeout=60)
    assert done.returncode == 2
    assert "must be a whole number above 0" in done.stderr
