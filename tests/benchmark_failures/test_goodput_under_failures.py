# SPDX-License-Identifier: Apache-2.0
"""What counts as kept and as recovered, and the program as its users start it."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from resiliency.testing.processes import Command
from tests.simulator.conftest import StartWorker, start_worker, state_of  # noqa: F401
from tests.waiting import wait_until

BENCHMARK = Path(__file__).parents[2] / "benchmark"
sys.path.append(str(BENCHMARK))

import failures_jobs  # noqa: E402
import failures_report  # noqa: E402
import failures_runs  # noqa: E402
import goodput_under_failures  # noqa: E402
from failures_jobs import TRAININGS, Note  # noqa: E402
from failures_report import Report  # noqa: E402
from failures_runs import Plan, Run  # noqa: E402

#: Steps 1 to 4; the ranks die after 4, come back to 2, and go on.
NOTES = [Note(at, step) for at, step in zip((1, 2, 3, 4, 7, 8, 9, 10), (1, 2, 3, 4, 3, 4, 5, 6), strict=True)]
#: A round takes half a minute on two idle cores.
WAIT = 600.0


def test_a_step_that_is_made_again_counts_once_and_what_the_window_lost_does_not() -> None:
    # Each attempt first notes where it begins: at step 0, and at 2.
    notes = [Note(0.5, 0), *NOTES[:4], Note(6.5, 2), *NOTES[4:]]
    assert failures_runs.kept(notes, 0.0, 11.0) == (6, pytest.approx(1.5 + 3.5))
    assert failures_runs.kept(notes, 1.5, 7.25) == (2, pytest.approx(0.5 + 0.75))
    # Steps 3 and 4 were made in this window, and had to be made again after it.
    assert failures_runs.kept(notes, 0.0, 5.0)[0] == 2
    assert failures_runs.kept([], 0.0, 1.0) == (0, 0)
    # What lies between two steps is part of none.
    assert failures_runs.kept([Note(1, 0), Note(3, 1, 2.5)], 0.0, 9.0) == (1, 0.5)


def test_a_fault_is_over_with_the_first_step_beyond_all_before_it() -> None:
    assert failures_runs.recoveries(NOTES, [4.5], 11.0) == [4.5]
    # Struck again while steps are made again: both end with step 5.
    assert failures_runs.recoveries(NOTES, [4.5, 7.5], 11.0) == [4.5, 1.5]
    assert failures_runs.recoveries(NOTES, [4.5, 10.5], 8.5) == [None, None]
    assert failures_runs.recoveries([], [1.0], 2.0) == [None]


def test_a_last_line_that_a_kill_has_torn_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "steps"
    path.write_text("1.5 1\n2.5 2\n3.")
    assert failures_jobs.read_notes(path) == [Note(1.5, 1), Note(2.5, 2)]


def test_kept_and_lost_add_up_to_the_window() -> None:
    run = Run(contestant="ours", round=1, wall_s=100, steps=900, faults=[10, 20], recoveries_s=[2.0, None])
    assert run.kept_share(10.0) == pytest.approx(0.9)
    assert run.lost_s(10.0) == pytest.approx(10.0)
    record = run.to_json(10.0)
    assert (record["incidents"], record["possible_steps"], record["recovery_worst_s"]) == (2, 1000, 2.0)


def report(*runs: tuple[Run, float]) -> Report:
    machine = {"cores": 2, "cpu": "c", "memory_gib": 1, "load_1min": 0, "kernel": "k", "python": "3"}
    left_out = {"ft_launcher + NVRx async": "ft_launcher is not installed"}
    return Report(
        training=TRAININGS["light"], command="python3 x", machine=machine, runs=runs, left_out=left_out
    )


def test_a_report_compares_with_the_best_rival_and_names_what_ended_failed_or_is_left_out() -> None:
    hurt = {"faults": [1.0, 2.0], "recoveries_s": [3.0, None], "planned": 3}
    found = report(
        (Run(contestant="ours", round=1, wall_s=100, steps=950, causes_s={"restore": 1.5}), 10.0),
        (Run(contestant="torchrun + DCP async", round=1, wall_s=100, steps=800, **hurt), 10.0),
        (Run(contestant="launcher.py + DCP async", round=1, wall_s=100, steps=900), 10.0),
        (Run(contestant="ft_launcher + DCP async", round=1, wall_s=100, steps=500, ended_s=60.2), 10.0),
        (Run(contestant="ours + local tier", round=1, wall_s=100, error="it hung.\nat last"), 10.0),
    )
    text = failures_report.as_text(found)
    assert "ours keeps 95.0% of the possible steps (bar 92%): met" in text
    assert "torchrun + DCP async, the best rival, loses 4.00 x as much time as ours (bar 1.25): met" in text
    assert "round 1, ft_launcher + DCP async: the job ended by itself after 60 s" in text
    assert "ft_launcher + NVRx async is left out: ft_launcher is not installed" in text
    assert "FAILED round 1, ours + local tier: it hung." in text
    note = failures_report.as_markdown(found)
    assert "| torchrun + DCP async | 80.0% | 80.0% | 20.0 | 20.0 | 2 of 3 | 1 | 3.00 | 3.00 | 3.00 |" in note
    assert "- ours, s by cause: restore 1.5" in note


def test_a_missed_bar_is_said() -> None:
    found = report(
        (Run(contestant="ours", round=1, wall_s=100, steps=900), 10.0),
        (Run(contestant="torchrun + DCP async", round=1, wall_s=100, steps=890), 10.0),
    )
    assert [line.rpartition(" ")[2] for line in failures_report.bars(found)] == ["missed", "missed"]


@pytest.mark.parametrize("seed", range(3))
def test_each_run_has_as_many_faults_as_were_asked_for_all_over_its_window(seed: int) -> None:
    plan = Plan(
        training=TRAININGS["light"], faults=8, fault_interval_s=60, kinds="kill", seed=seed, save_every=1
    )
    times = [fault.at_us / 1e6 for fault in plan.schedule()]
    assert len(times) == 8
    assert times == sorted(times)
    assert 0 < times[0] < times[-1] < plan.wall_s == 480
    assert {fault.gpu for fault in plan.schedule()} == {0, 1}
    assert plan.schedule() == plan.schedule()


def test_a_ledger_that_tells_another_time_than_rank_0_fails_its_run() -> None:
    run = Run(contestant="ours", round=1, wall_s=100, steps=900, kept_time_s=90.0)
    both = ("kept_steps", "save_held")
    assert failures_runs._difference(run, both) == ""  # no ledger
    close = replace(run, causes_s={"kept_steps": 89.0, "save_held": 0.95, "restore": 3.0})
    assert failures_runs._difference(close, both) == ""
    told = "the ledger tells 89.00 s of kept steps, and rank 0 noted 90.00 s of 100 s."
    assert failures_runs._difference(close, ["kept_steps"]) == told


@pytest.fixture
def plan() -> Plan:
    # A stop within the first seconds, for half a minute.
    return Plan(
        training=TRAININGS["light"], faults=120, fault_interval_s=0.5, kinds="stop", seed=42, save_every=1
    )


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

    def measure_all(args: object, report: Report, root: Path) -> Iterator[Report]:
        (root / "work").touch()
        assert signal.getsignal(number) != before
        os.kill(os.getpid(), number)
        yield report

    monkeypatch.setattr(goodput_under_failures, "measure_all", measure_all)
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
    def measure_all(args: object, report: Report, root: Path) -> Iterator[Report]:
        state = root / "1-ours" / "simulator"
        state.mkdir(parents=True)
        (state / "0.journal").touch()
        yield report

    monkeypatch.setattr(goodput_under_failures, "measure_all", measure_all)
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


@pytest.mark.thorough("a benchmark; its parts have tests of their own")
@pytest.mark.slow
def test_a_round_injures_the_training_and_counts_what_it_kept(tmp_path: Path) -> None:
    files = {kind: tmp_path / f"report.{kind}" for kind in ("json", "md", "png")}
    flags = ["--rounds", "1", "--faults", "2", "--undisturbed-s", "2", "--fault-interval-s", "8"]
    flags += [
        "--contestants",
        "ours",
        "ours + local tier",
        "--directory",
        str(tmp_path),
        "--save-every",
        "5",
    ]
    outputs = ["--export", files["json"], "--markdown", files["md"], "--plot", files["png"]]
    script = BENCHMARK / "goodput_under_failures.py"
    with Command([sys.executable, script, *flags, *outputs], cwd=tmp_path) as command:
        assert command.wait(timeout=WAIT) == 0, command.output
        command.assert_no_orphans(timeout=60)
    found = json.loads(files["json"].read_text())
    for run in found["runs"]:
        _check(run)
    assert "of the possible steps (bar 92%)" in files["md"].read_text()
    assert [run["contestant"] for run in found["runs"]] == ["ours", "ours + local tier"]
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.json", "report.md", "report.png"]


def _check(run: dict[str, Any]) -> None:
    """A run of 16 seconds."""
    # One that meets a restart is missed.
    assert run["planned"] == 2
    assert 1 <= run["incidents"] <= 2
    assert run["steps"] > 0
    assert run["kept_share"] * run["possible_steps"] == pytest.approx(run["steps"])
    assert sum(run["causes_s"].values()) == pytest.approx(16, rel=1e-6)
