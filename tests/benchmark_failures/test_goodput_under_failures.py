# SPDX-License-Identifier: Apache-2.0
"""What counts as kept and as recovered, and the program as its users start it."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from resiliency.testing.processes import Command
from tests.simulator.conftest import StartWorker, start_worker, state_of  # noqa: F401
from tests.waiting import wait_until

BENCHMARK = Path(__file__).parents[2] / "benchmark"
sys.path.append(str(BENCHMARK))

import failures_runs  # noqa: E402
import goodput_under_failures  # noqa: E402
from failures_runs import Plan, Run  # noqa: E402

#: Steps 1 to 4; the ranks die after 4, come back to 2, and go on.
NOTES = [(1.0, 1), (2.0, 2), (3.0, 3), (4.0, 4), (7.0, 3), (8.0, 4), (9.0, 5), (10.0, 6)]
#: A round takes half a minute on two idle cores.
WAIT = 600.0


def test_a_step_that_is_made_again_counts_once() -> None:
    assert failures_runs.steps_between(NOTES, 0.0, 11.0) == 6
    assert failures_runs.steps_between(NOTES, 2.5, 9.0) == 3
    assert failures_runs.steps_between(NOTES, 4.0, 8.5) == 0
    assert failures_runs.steps_between([], 0.0, 1.0) == 0


def test_a_fault_is_over_with_the_first_step_beyond_all_before_it() -> None:
    assert failures_runs.recoveries(NOTES, [4.5], 11.0) == [4.5]
    # Struck again while steps are made again: both end with step 5.
    assert failures_runs.recoveries(NOTES, [4.5, 7.5], 11.0) == [4.5, 1.5]
    assert failures_runs.recoveries(NOTES, [4.5, 10.5], 8.5) == [None, None]
    assert failures_runs.recoveries([], [1.0], 2.0) == [None]


def test_the_time_of_a_step_that_is_made_again_is_kept_once() -> None:
    # Each attempt first notes where it begins: at step 0, and at 2.
    notes = [(0.5, 0), *NOTES[:4], (6.5, 2), *NOTES[4:]]
    assert failures_runs.kept_time(notes, 0.0, 11.0) == pytest.approx(1.5 + 3.5)
    assert failures_runs.kept_time(notes, 1.5, 7.25) == pytest.approx(0.5 + 0.75)
    assert failures_runs.kept_time([], 0.0, 1.0) == 0


def test_a_last_line_that_a_kill_has_torn_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "steps"
    path.write_text("1.5 1\n2.5 2\n3.")
    assert failures_runs.read_notes(path) == [(1.5, 1), (2.5, 2)]


def test_kept_and_lost_add_up_to_the_window() -> None:
    run = Run(contestant="ours", round=1, wall_s=100, steps=900, faults=[10, 20], recoveries_s=[2.0, None])
    assert run.kept_share(10.0) == pytest.approx(0.9)
    assert run.lost_s(10.0) == pytest.approx(10.0)
    record = run.to_json(10.0)
    assert (record["incidents"], record["possible_steps"], record["recovery_worst_s"]) == (2, 1000, 2.0)


def test_the_table_compares_with_ours_and_names_what_failed() -> None:
    measured = [
        (Run(contestant="ours", round=1, wall_s=100, steps=950), 10.0),
        (Run(contestant="torchrun + DCP async", round=1, wall_s=100, steps=800), 10.0),
        (Run(contestant="ft_launcher + DCP async", round=1, wall_s=100, error="it ended."), 10.0),
    ]
    text = goodput_under_failures.as_text(measured)
    assert "torchrun + DCP async loses 4.00 x as much time as ours" in text
    assert "FAILED round 1, ft_launcher + DCP async: it ended." in text


@pytest.fixture
def plan() -> Plan:
    # A stop within the first seconds, for half a minute.
    return Plan(wall_s=60, fault_interval_s=0.5, kinds="stop", seed=42, save_every=1)


def test_the_end_of_a_window_undoes_what_the_simulator_did(
    plan: Plan,
    start_worker: StartWorker,  # noqa: F811
    tmp_path: Path,
) -> None:
    workers = [start_worker(failures_runs.JOB, rank) for rank in (0, 1)]
    with failures_runs.simulating(plan, tmp_path) as simulator:
        simulator.wait_for_line("fault injected: stop", timeout=WAIT)
        wait_until(lambda: "T" in map(state_of, workers), "nothing is stopped")
    wait_until(lambda: "T" not in map(state_of, workers), "a worker is left stopped")
    assert failures_runs.journals(tmp_path.parent) == []


def test_a_run_whose_simulator_died_has_failed(
    plan: Plan,
    start_worker: StartWorker,  # noqa: F811
    tmp_path: Path,
) -> None:
    start_worker(failures_runs.JOB)

    def die() -> None:
        with failures_runs.simulating(plan, tmp_path) as simulator:
            simulator.wait_for_line("job is there", timeout=WAIT)
            simulator.signal(signal.SIGKILL)
            simulator.wait(timeout=WAIT)

    with pytest.raises(failures_runs.RunFailed, match="the simulator ended with -9"):
        die()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_measurement_in_order(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = signal.signal(number, signal.SIG_DFL)  # ignored, where the tests run behind nohup
    before = signal.getsignal(number)

    def run_all(args: object, root: Path) -> None:
        (root / "work").touch()
        assert signal.getsignal(number) != before
        os.kill(os.getpid(), number)

    monkeypatch.setattr(goodput_under_failures, "run_all", run_all)
    monkeypatch.setattr(sys, "argv", ["goodput_under_failures.py", "--directory", str(tmp_path)])
    try:
        with pytest.raises(SystemExit) as caught:
            goodput_under_failures.main()
        assert signal.getsignal(number) == before
    finally:
        signal.signal(number, found)
    assert caught.value.code == 128 + number
    assert list(tmp_path.iterdir()) == []


def test_a_journal_that_a_simulator_left_is_kept_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_all(args: object, root: Path) -> list[object]:
        state = root / "1-ours" / "simulator"
        state.mkdir(parents=True)
        (state / "0.journal").touch()
        return []

    monkeypatch.setattr(goodput_under_failures, "run_all", run_all)
    monkeypatch.setattr(sys, "argv", ["goodput_under_failures.py", "--directory", str(tmp_path)])
    assert goodput_under_failures.main() == 0
    (root,) = tmp_path.iterdir()
    assert f"--undo_only --state_dir {root}/1-ours/simulator" in capsys.readouterr().err


def test_the_training_ends_by_itself(tmp_path: Path) -> None:
    env = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    flags = ["--directory", str(tmp_path), "--memory", str(tmp_path), "--save", "none", "--save-every", "1"]
    argv = [sys.executable, str(BENCHMARK / "failures_workload.py"), *flags, "--ends-at", "0"]
    with Command(argv, cwd=tmp_path, env=env) as command:
        assert command.wait(timeout=WAIT) == 0, command.output


@pytest.mark.slow
def test_a_rival_comes_back_to_what_it_saved(tmp_path: Path) -> None:
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    env |= {"OMP_NUM_THREADS": "1"}
    flags = ["--directory", str(tmp_path), "--memory", str(tmp_path), "--save", "dcp", "--save-every", "5"]
    ends_at = str(time.monotonic() + 2 * WAIT)
    argv = [sys.executable, str(BENCHMARK / "failures_workload.py"), *flags, "--ends-at", ends_at]
    with Command(argv, cwd=tmp_path, env=env) as command:
        command.wait_for_line("^first step 1$", timeout=WAIT)
        wait_until(
            lambda: list(tmp_path.glob("checkpoints/step=*/.metadata")) or command.returncode is not None,
            "no checkpoint is complete",
            timeout=WAIT,
        )
        assert command.returncode is None, command.output
        _kill(command)
    with Command(argv, cwd=tmp_path, env=env) as command:
        found = command.wait_for_line(r"^first step (\d+)$", timeout=WAIT)
        assert int(found[1]) % 5 == 1
        assert int(found[1]) > 1
        _kill(command)


def _kill(command: Command) -> None:
    command.signal(signal.SIGKILL)
    command.wait(timeout=WAIT)
    command.assert_no_orphans(timeout=60)


@pytest.mark.slow
def test_a_round_injures_the_training_and_counts_what_it_kept(tmp_path: Path) -> None:
    files = {kind: tmp_path / f"report.{kind}" for kind in ("json", "png")}
    flags = ["--rounds", "1", "--wall-s", "10", "--undisturbed-s", "2", "--fault-interval-s", "3"]
    flags += [
        "--contestants",
        "ours",
        "ours + local tier",
        "--directory",
        str(tmp_path),
        "--save-every",
        "20",
    ]
    outputs = ["--export", files["json"], "--plot", files["png"]]
    script = BENCHMARK / "goodput_under_failures.py"
    with Command([sys.executable, script, *flags, *outputs], cwd=tmp_path) as command:
        assert command.wait(timeout=WAIT) == 0, command.output
        command.assert_no_orphans(timeout=60)
    report = json.loads(files["json"].read_text())
    for run in report["runs"]:
        _check(run)
    assert [run["contestant"] for run in report["runs"]] == ["ours", "ours + local tier"]
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.json", "report.png"]


def _check(run: dict[str, Any]) -> None:
    """A run of ten seconds."""
    # Seed 42 has two faults in ten seconds; one that meets a restart is missed.
    assert 1 <= run["incidents"] <= 2
    assert run["steps"] > 0
    assert run["kept_share"] * run["possible_steps"] == pytest.approx(run["steps"])
    # Two counts of the same time, from the notes of one rank and from the events of all: to 0.1 %, or to the
    # step whose event a killed rank took along.
    causes = run["causes_s"]
    assert sum(causes.values()) == pytest.approx(10, rel=1e-6)
    told = causes["kept_steps"] + causes.get("save_held", 0.0)
    step_s = 10 / run["possible_steps"]
    assert abs(told - run["kept_time_s"]) <= max(10 * 0.001, 3 * step_s * (1 + run["incidents"]))
