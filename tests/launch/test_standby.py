# SPDX-License-Identifier: Apache-2.0
"""Ranks that are forked from what an earlier attempt imported: when, when not, and what stays the same."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from resiliency.events import EventType
from resiliency.testing.processes import Command, stop_process
from tests.waiting import wait_until

from .conftest import ROOT, SCRIPTS, WAIT, WORKER, Launch, children, events, ready

STANDBY_WORKER = SCRIPTS / "standby_worker.py"
LeavesNothing = Callable[[Command], None]
READY = r"standby ready: .* forked from process (\d+)"


@pytest.fixture
def launch(launch: Launch) -> Launch:
    """With an interpreter of its own, a launcher prepares the template that these tests are about.

    Also where the other tests run without one, under PET_STANDBY=off.
    """
    return partial(launch, cold=True, PET_STANDBY="auto")


def says(command: Command, rank: int, attempt: int, timeout: float = WAIT) -> dict[str, Any]:
    found = command.wait_for_line(rf"rank {rank} attempt {attempt} says (.*)", timeout=timeout)
    said: dict[str, Any] = json.loads(found[1])
    return said


def forked(run_dir: Path) -> list[object]:
    """How many workers of each attempt were forked."""
    return [event.fields.get("forked") for event in events(run_dir, EventType.WORKERS_STARTED)]


def template(command: Command) -> int:
    """Wait until ranks can be forked; returns the process that they are forked from."""
    return int(command.wait_for_line(READY, timeout=WAIT)[1])


@pytest.mark.slow
def test_after_a_kill_ranks_are_forked_and_are_children_of_the_launcher_as_before(
    launch: Launch, tmp_path: Path, leaves_nothing: LeavesNothing
) -> None:
    job = launch("--nproc-per-node=2", "--max-restarts=1", STANDBY_WORKER, "--wait")
    first = [says(job, rank, 0) for rank in range(2)]
    process = template(job)
    os.kill(first[1]["pid"], signal.SIGKILL)
    second = [says(job, rank, 1) for rank in range(2)]
    assert job.wait(timeout=WAIT) == 0
    assert forked(tmp_path / "run") == [0, 2], job.output
    for before, after in zip(first, second, strict=True):
        assert after["pid"] not in (before["pid"], process)
        assert {name: after[name] for name in ("argv", "name", "parent")} == {
            "argv": ["--wait"],
            "name": str(STANDBY_WORKER),
            "parent": job.pid,
        }
    leaves_nothing(job)


@pytest.mark.slow
def test_with_standby_off_every_rank_imports_for_itself(launch: Launch, tmp_path: Path) -> None:
    job = launch(*("--nproc-per-node=2", "--max-restarts=1", "--standby=off"), STANDBY_WORKER, "--wait")
    first = [says(job, rank, 0) for rank in range(2)]
    assert children(job, "resiliency/template") == []
    os.kill(first[0]["pid"], signal.SIGKILL)
    assert job.wait(timeout=WAIT) == 0
    assert forked(tmp_path / "run") == [0, 0], job.output


@pytest.mark.slow
def test_a_job_that_cannot_restart_prepares_nothing(launch: Launch) -> None:
    job = launch("--nproc-per-node=1", STANDBY_WORKER, "--wait")
    worker = says(job, 0, 0)
    assert children(job, "resiliency/template") == []
    os.kill(worker["pid"], signal.SIGKILL)
    assert job.wait(timeout=WAIT) == 1


@pytest.mark.thorough("the restart from forked ranks is near")
@pytest.mark.slow
def test_what_a_job_imported_is_there_for_the_first_start_of_the_next_one(
    launch: Launch, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text("VALUE = 'mine'\n")
    place = {"RESILIENCY_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(tmp_path)}
    words = ("--nproc-per-node=2", "--max-restarts=1", STANDBY_WORKER, "--module=mine", "--wait")
    job = launch(*words, run_dir=tmp_path / "one", **place)
    says(job, 1, 0)
    template(job)
    job.signal(signal.SIGTERM)
    job.wait(timeout=WAIT)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell does for what a script runs behind it
    try:
        job = launch(*words, run_dir=tmp_path / "two", **place)
    finally:
        signal.signal(signal.SIGINT, before)
    second = [says(job, rank, 0) for rank in range(2)]
    for worker in second:
        os.kill(worker["pid"], signal.SIGUSR1)
    assert job.wait(timeout=WAIT) == 0
    assert forked(tmp_path / "two") == [2], job.output
    assert {worker["value"] for worker in second} == {"mine"}


@pytest.mark.slow
def test_named_modules_are_imported_instead_of_what_a_rank_imports(launch: Launch, tmp_path: Path) -> None:
    of_workers = ("JOB_IDENTIFIER", "RESILIENCY_RUN_DIR", "ROLE_NAME", "TORCHELASTIC_MAX_RESTARTS")
    of_torch = ("TORCHELASTIC_USE_AGENT_STORE", "TORCH_NCCL_ASYNC_ERROR_HANDLING")
    (tmp_path / "mine.py").write_text(
        # A module that calls `getpid` would be imported by each rank.
        "import os\nVALUE = [int(os.readlink('/proc/self')), "
        f"*map(os.environ.get, {(*of_workers, *of_torch)})]\n"
    )
    job = launch(
        *(
            "--nproc-per-node=2",
            "--max-restarts=1",
            "--standby-preload=mine,json.tool",
            "--log-dir",
            tmp_path,
        ),
        *("--tee=3", STANDBY_WORKER, "--module=mine"),
        PYTHONPATH=str(tmp_path),
        # Of srun, which has started the launcher.
        **{"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"},
    )
    assert job.wait(timeout=WAIT) == 0
    assert forked(tmp_path / "run") == [2], job.output
    values = [says(job, rank, 0)["value"] for rank in range(2)]
    assert values[0] == values[1]  # imported once, elsewhere
    assert values[0].pop(0) not in [says(job, rank, 0)["pid"] for rank in range(2)]
    # What all workers have, and the launcher has not, is there for imports, too.
    assert values[0] == ["local", str(tmp_path / "run"), "default", "1", "False", "1"]


@pytest.mark.thorough("the restart from forked ranks is near")
def test_behind_nohup_ranks_are_forked_and_a_hang_up_ends_nothing(launch: Launch, tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        job = launch(
            *("--nproc-per-node=1", "--max-restarts=1", "--standby-preload=json", STANDBY_WORKER, "--wait")
        )
    finally:
        signal.signal(signal.SIGHUP, before)
    first = says(job, 0, 0)
    job.signal(signal.SIGHUP)
    os.kill(first["pid"], signal.SIGHUP)  # a rank ignores it, too
    os.kill(first["pid"], signal.SIGKILL)
    says(job, 0, 1)
    assert job.wait(timeout=WAIT) == 0
    assert "SIGHUP" not in job.output
    assert forked(tmp_path / "run") == [1, 1], job.output


@pytest.mark.parametrize(
    ("words", "count"),
    [
        pytest.param(["-m", "standby_worker"], 2, id="module"),
        pytest.param(["--no-python", SCRIPTS / "hello.sh"], 0, id="program"),
    ],
)
def test_each_kind_of_command_restarts_and_only_python_is_forked(
    launch: Launch, tmp_path: Path, words: list[object], count: int
) -> None:
    job = launch(
        *("--nproc-per-node=2", "--max-restarts=1", "--standby-preload=json", *words, "--fail-until=1"),
        PYTHONPATH=str(SCRIPTS),
    )
    job.wait(timeout=WAIT)
    assert set(forked(tmp_path / "run")) == {count}, job.output


@pytest.mark.slow
def test_a_template_that_was_killed_costs_no_restart_and_is_replaced(
    launch: Launch, tmp_path: Path, leaves_nothing: LeavesNothing
) -> None:
    job = launch("--nproc-per-node=1", "--max-restarts=2", WORKER, "wait")
    worker = ready(job, 0, 0)
    os.kill(template(job), signal.SIGKILL)
    job.wait_for_line("standby: the template process", timeout=WAIT)
    os.kill(worker, signal.SIGKILL)
    worker = ready(job, 0, 1)
    job.wait_for_line(READY, timeout=WAIT, count=2)
    os.kill(worker, signal.SIGKILL)
    os.kill(ready(job, 0, 2), signal.SIGKILL)
    assert job.wait(timeout=WAIT) == 1
    assert forked(tmp_path / "run") == [0, 0, 1], job.output
    leaves_nothing(job)


@pytest.mark.slow
def test_a_template_that_hangs_is_killed_after_a_few_seconds_and_the_rank_starts_without_it(
    launch: Launch, tmp_path: Path, leaves_nothing: LeavesNothing
) -> None:
    job = launch("--nproc-per-node=2", "--max-restarts=1", STANDBY_WORKER, "--wait")
    worker = says(job, 0, 0)["pid"]
    process = template(job)
    stop_process(process)
    os.kill(worker, signal.SIGKILL)
    assert job.wait(timeout=WAIT) == 0
    assert "did not answer within" in job.output
    assert forked(tmp_path / "run") == [0, 0], job.output
    assert not psutil.pid_exists(process)
    leaves_nothing(job)


@pytest.mark.thorough("the restart from forked ranks is near")
@pytest.mark.slow
def test_a_module_that_reads_its_rank_at_import_is_named_and_right_in_each_rank(
    launch: Launch, tmp_path: Path
) -> None:
    (tmp_path / "whoami.py").write_text("import os\nVALUE = os.environ.get('LOCAL_RANK')\n")
    (tmp_path / "above.py").write_text("from whoami import VALUE\n")
    job = launch(
        *("--nproc-per-node=2", "--max-restarts=1", STANDBY_WORKER, "--module=above", "--wait"),
        PYTHONPATH=str(tmp_path),
    )
    worker = says(job, 1, 0)["pid"]
    job.wait_for_line("standby: whoami is imported by each rank for itself.*reads LOCAL_RANK", timeout=WAIT)
    template(job)
    os.kill(worker, signal.SIGKILL)
    assert [says(job, rank, 1)["value"] for rank in range(2)] == ["0", "1"]
    assert job.wait(timeout=WAIT) == 0
    assert forked(tmp_path / "run") == [0, 2], job.output


@pytest.mark.thorough("the restart from forked ranks is near")
def test_a_script_that_sets_what_libraries_read_is_told_what_that_costs(
    launch: Launch, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal\nos.environ['OMP_NUM_THREADS'] = '3'\nimport colorsys\nsignal.pause()\n"
    )
    job = launch("--nproc-per-node=1", "--max-restarts=1", script)
    job.wait_for_line("what the script imports after it has set OMP_NUM_THREADS", timeout=WAIT)
    job.signal(signal.SIGTERM)
    job.wait(timeout=WAIT)


@pytest.mark.thorough("the restart from forked ranks is near")
@pytest.mark.slow
def test_code_that_changed_since_it_was_imported_is_not_used_from_memory(
    launch: Launch, tmp_path: Path
) -> None:
    source = tmp_path / "mine.py"
    source.write_text("VALUE = 'old'\n")
    job = launch(
        *("--nproc-per-node=2", "--max-restarts=1", STANDBY_WORKER, "--module=mine", "--wait"),
        PYTHONPATH=str(tmp_path),
    )
    worker = says(job, 1, 0)["pid"]
    template(job)
    source.write_text("VALUE = 'changed'\n")
    os.kill(worker, signal.SIGKILL)
    assert [says(job, rank, 1)["value"] for rank in range(2)] == ["changed", "changed"]
    assert job.wait(timeout=WAIT) == 0
    assert re.search(r"ranks start the ordinary way: .*mine\.py has changed", job.output)


@pytest.mark.thorough("the restart from forked ranks is near")
def test_the_template_ends_with_a_launcher_that_was_killed(
    launch: Launch, leaves_nothing: LeavesNothing
) -> None:
    job = launch("--nproc-per-node=1", "--max-restarts=1", STANDBY_WORKER, "--wait")
    says(job, 0, 0)
    template(job)
    job.signal(signal.SIGKILL)
    leaves_nothing(job)


@pytest.mark.slow
@pytest.mark.parametrize("times", [30, pytest.param(200, marks=pytest.mark.thorough("30 are near"))])
def test_restarts_in_a_row_leave_nothing_behind_and_cost_no_memory(
    launch: Launch, tmp_path: Path, leaves_nothing: LeavesNothing, times: int
) -> None:
    job = launch(
        *("--nproc-per-node=1", f"--max-restarts={times}", "--standby-preload=json"),
        STANDBY_WORKER,
        *("--advance", f"--fail-until={times}", f"--wait={times}"),
    )
    job.wait_for_line("rank 0 attempt 20 says", timeout=WAIT)
    launcher, forked_from = psutil.Process(job.pid), psutil.Process(template(job))
    early = (launcher.memory_info().rss, launcher.num_fds())
    early_of_template = (forked_from.memory_info().rss, forked_from.num_fds())
    last = says(job, 0, times, timeout=4 * WAIT)
    # It has told of the start when the workers may run already.
    wait_until(lambda: len(forked(tmp_path / "run")) == times + 1, "the last start is not told")
    late = (launcher.memory_info().rss, launcher.num_fds())
    late_of_template = (forked_from.memory_info().rss, forked_from.num_fds())
    zombies = [child for child in launcher.children() if child.status() == psutil.STATUS_ZOMBIE]
    os.kill(last["pid"], signal.SIGUSR1)
    assert job.wait(timeout=WAIT) == 0
    assert forked(tmp_path / "run") == [1] * (times + 1), job.output
    assert late[1] - early[1] <= 4
    assert late[0] - early[0] < 8 << 20
    assert late_of_template[1] - early_of_template[1] <= 4
    assert late_of_template[0] - early_of_template[0] < 2 << 20
    assert zombies == []
    leaves_nothing(job)


@pytest.mark.thorough("the restart from forked ranks is near")
@pytest.mark.slow
def test_ranks_that_wait_in_native_code_are_killed_within_seconds(launch: Launch, tmp_path: Path) -> None:
    script = tmp_path / "waits.py"
    script.write_text(f"""
import os, signal, sys
from torch import distributed as dist
if int(os.environ["TORCHELASTIC_RESTART_COUNT"]):
    sys.exit()
signal.signal(signal.SIGTERM, lambda *_: None)  # as Lightning's: it runs when the collective has returned
store = dist.FileStore({str(tmp_path / "store")!r}, -1)
if os.environ["RANK"] == "1":
    store.get("first waits")
    sys.exit(3)
store.set("first waits", "")
store.get("never set")
""")
    job = launch("--nproc-per-node=2", "--max-restarts=1", script)
    assert job.wait(timeout=WAIT) == 0, ROOT
    assert "they wait in native code, where SIGTERM does not reach them" in job.output
    failed, stopped = (
        events(tmp_path / "run", kind)[0].time
        for kind in (EventType.FAULT_DETECTED, EventType.WORKERS_STOPPED)
    )
    assert (stopped - failed).total_seconds() < 5  # of 30
