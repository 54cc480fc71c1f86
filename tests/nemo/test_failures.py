# SPDX-License-Identifier: Apache-2.0
"""What a training job does when a rank, the launcher or the storage fails."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from resiliency.events import EventType
from tests.nemo.conftest import ATTEMPT_S, ONE_RANK, TWO_REPLICAS, Job, Layout, Losses
from tests.nemo.damage import flip_a_bit

pytestmark = [pytest.mark.nemo, pytest.mark.slow]


@pytest.mark.thorough("tests/launch/test_restart.py finds a hung rank")
def test_a_stopped_rank_is_found_by_its_missing_heartbeat_and_the_job_resumes(
    new_job: Callable[[Layout], Job], uninterrupted: Callable[[Layout], Losses]
) -> None:
    job = new_job(TWO_REPLICAS)
    output = job.run(
        "--enable-fault-tolerance",
        "--sim-fault-desc",
        "rank_hung,step=50",
        launcher=(
            "--max-restarts",
            "1",
            "--ft-rank-heartbeat-timeout",
            "20",
            "--ft-workload-check-interval",
            "1",
        ),
        save_every=20,
        attempts=2,
    )
    assert job.restored_steps() == [0, 40]
    assert job.losses() == uninterrupted(TWO_REPLICAS)
    causes = {event.fields["cause"] for event in job.events(EventType.FAULT_DETECTED)}
    assert any("hang" in str(cause) for cause in causes), output


@pytest.mark.thorough("tests/launch/test_restart.py has the summary")
def test_a_rank_that_always_fails_ends_the_job_with_a_summary_and_keeps_the_checkpoint(
    new_job: Callable[[Layout], Job],
) -> None:
    job = new_job(TWO_REPLICAS)
    command = job.start(
        "--sim-fault-desc",
        "rank_exception,step=30,rank=1,attempt=any",
        launcher=("--max-restarts", "1", "--log-dir", job.directory / "ranks", "--tee", "3"),
        save_every=20,
    )
    assert command.wait(timeout=2 * ATTEMPT_S) == 1
    command.assert_no_orphans(timeout=120)
    summary = command.output[command.output.rindex("failed") :]
    assert "InjectedFault" in command.output
    for expected in ("rank 1", str(job.directory / "ranks")):
        assert expected in command.output, summary
    assert job.restored_steps() == [0, 20]
    assert (job.checkpoints / "step=20" / "manifest.json").is_file()
    assert len(job.events(EventType.JOB_TERMINATED)) == 1


@pytest.mark.parametrize(
    "saves",
    [
        pytest.param(
            "--enable-async-ckpt", marks=pytest.mark.thorough("the stop with the checkpoint process is near")
        ),
        "--enable-optimized-async-ckpt",
    ],
)
def test_sigterm_to_the_launcher_saves_one_last_step_and_ends_the_job_well(
    new_job: Callable[[Layout], Job], saves: str
) -> None:
    job = new_job(TWO_REPLICAS)
    long = ("--termination-deadline-s", int(ATTEMPT_S))  # a busy machine needs more than the default
    command = job.start(saves, *long, "--max-steps", "100000", save_every=100000)
    job.wait_for_step(5)
    command.signal(signal.SIGTERM)
    assert command.wait(timeout=2 * ATTEMPT_S) == 0, command.output
    command.assert_no_orphans(timeout=120)
    assert len(job.events(EventType.JOB_TERMINATED)) == 1
    assert {event.rank for event in job.events(EventType.STOP_REQUESTED)} == {0, 1}
    (last,) = {event.step for event in job.events(EventType.RANK_FINISHED)}
    assert [path.name for path in job.checkpoints.iterdir()] == [f"step={last}"]
    assert last is not None
    job.run(saves, "--max-steps", last + 2, save_every=100000)
    assert job.restored_steps() == [0, last]


@pytest.fixture(scope="module")
def saved_twice(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a job of one rank that ended at step 40, with checkpoints of steps 20 and 40."""
    with ExitStack() as stack:
        job = Job(tmp_path_factory.mktemp("saved"), ONE_RANK, stack)
        job.run("--max-steps", "40", save_every=20)
    return job.directory


@pytest.mark.thorough("tests/checkpoint/format/test_nemo.py flips each bit")
def test_a_flipped_bit_in_the_newest_checkpoint_costs_one_interval_and_is_reported(
    saved_twice: Path, new_job: Callable[[Layout], Job], uninterrupted: Callable[[Layout], Losses]
) -> None:
    job = new_job(ONE_RANK)
    shutil.copytree(saved_twice, job.directory, dirs_exist_ok=True)
    flip_a_bit(next((job.checkpoints / "step=40" / "weights").glob("__0_*.distcp")))
    output = job.run(save_every=20)
    assert "step=40 is not used" in output
    assert "xxh3_64 is" in output
    assert "falling back to step 20" in output
    assert job.restored_steps() == [0, 20]
    assert job.losses() == uninterrupted(ONE_RANK)


@pytest.mark.thorough("tests/checkpoint/recovery/test_restore.py refuses the same")
def test_when_no_checkpoint_is_usable_the_job_ends_instead_of_starting_over(
    saved_twice: Path, new_job: Callable[[Layout], Job]
) -> None:
    job = new_job(ONE_RANK)
    shutil.copytree(saved_twice, job.directory, dirs_exist_ok=True)
    damaged = [job.checkpoints / f"step={step}" / "weights" / "common.pt" for step in (20, 40)]
    for path in damaged:
        flip_a_bit(path)
    command = job.start(save_every=20)
    assert command.wait(timeout=ATTEMPT_S) == 1
    assert "none of the newest 2 is usable" in command.output
    assert job.restored_steps() == [0]  # of the first run; the second restored nothing
    assert all(path.is_file() for path in damaged)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """``small_disk(size_bytes)``: a real file system of that size."""
    mounted: list[Path] = []

    def mount(size_bytes: int) -> Path:
        path = tmp_path / "small"
        path.mkdir()
        made = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(path)],
            capture_output=True,
            text=True,
        )
        if made.returncode:
            pytest.skip(f"mounting a small tmpfs needs root: {made.stderr.strip()}")
        mounted.append(path)
        return path

    yield mount
    for path in mounted:
        subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.mark.thorough("tests/checkpoint/test_trouble.py fills a disk")
def test_a_disk_that_fills_up_ends_the_job_and_leaves_older_checkpoints_whole(
    new_job: Callable[[Layout], Job], small_disk: Callable[[int], Path]
) -> None:
    from resiliency.checkpoint.format.catalog import unmarked_checkpoints
    from resiliency.model import MODELS
    from resiliency.plugins.checkpoint_kinds import verify

    job = new_job(ONE_RANK)
    disk = small_disk(MODELS["tiny"].checkpoint_bytes() * 2)
    command = job.start(
        "--persistent-ckpt-dir",
        disk,
        "--persistent-ckpt-interval",
        10,
        "--max-steps",
        "60",
    )
    assert command.wait(timeout=ATTEMPT_S) == 1
    assert "could not be written" in command.output
    assert "bytes are free" in command.output
    command.assert_no_orphans(timeout=120)
    complete = unmarked_checkpoints(disk / "job" / "checkpoint")
    assert complete, command.output
    assert [verify(path) for path in complete] == [None] * len(complete)
    assert job.events(EventType.SAVE_FAILED)
