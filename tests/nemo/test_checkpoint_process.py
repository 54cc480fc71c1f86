# SPDX-License-Identifier: Apache-2.0
"""Training that saves through the checkpoint process: what is lost, and what comes back bit by bit."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from resiliency.events import EventType
from resiliency.testing import warm
from tests.checkpoint.storage_builders import file_in
from tests.nemo.conftest import (
    ATTEMPT_S,
    ONE_RANK,
    ONE_RESTART,
    PROCESS,
    ROOT,
    STEPS,
    TENSOR_PARALLEL,
    TWO_REPLICAS,
    Finished,
    Job,
    Layout,
    Losses,
)
from tests.nemo.damage import flip_a_bit
from tests.nemo.logs import complete, restored_from

pytestmark = [pytest.mark.nemo, pytest.mark.slow]


def copy_of(job: Job, directory: Path, layout: Layout, stack: ExitStack) -> Job:
    """A job that finds the checkpoints of another, and none of its memory."""
    shutil.copytree(job.directory / "storage", directory / "storage")
    return Job(directory, layout, stack)


def test_after_a_kill_between_saves_the_newest_capture_comes_back_from_memory(
    killed_between_saves: Finished, uninterrupted: Callable[[Layout], Losses]
) -> None:
    job = killed_between_saves.job
    assert restored_from(job) == [(0, None), (40, "memory")]
    assert sorted(job.losses(attempt=1)) == list(range(41, STEPS + 1))
    assert job.losses() == uninterrupted(TWO_REPLICAS)
    assert complete(job.checkpoints) == [20, 40, 60]
    saved = [event.step for event in job.events(EventType.CHECKPOINT_SAVED)]
    assert set(saved) == {20, 40, 60}


def test_a_launcher_that_starts_cold_forks_the_ranks_of_a_restart_and_says_what_it_left_out(
    killed_between_saves: Finished,
) -> None:
    found = killed_between_saves
    forked = [event.fields["forked"] for event in found.job.events(EventType.WORKERS_STARTED)]
    assert forked == [0, 2], found.output
    left_out = re.findall(r"standby: (\S+) is imported by each rank for itself.*: it (.*)", found.output)
    assert left_out == []
    assert "standby: what the script imports after" not in found.output


@pytest.mark.thorough("the kill with memory is near")
def test_without_memory_it_comes_back_from_the_newest_checkpoint_on_disk_that_is_whole(
    killed_between_saves: Finished, tmp_path: Path, uninterrupted: Callable[[Layout], Losses]
) -> None:
    with ExitStack() as stack:
        job = copy_of(killed_between_saves.job, tmp_path, TWO_REPLICAS, stack)
        flip_a_bit(file_in(job.checkpoints / "step=60", "__1_0.distcp"))
        flip_a_bit(job.checkpoints / "step=40" / "common.pt")
        output = job.run(PROCESS, "--topk-ckpt", 1, save_every=20)
    assert "step=60 is not used" in output
    assert "step=40 is not used" in output
    assert restored_from(job) == [(20, "persistent")]
    after = job.losses()
    assert sorted(after) == list(range(21, STEPS + 1))
    assert after.items() <= uninterrupted(TWO_REPLICAS).items()
    # Replaced by the saves of the same steps, and then deleted but for the newest.
    assert complete(job.checkpoints) == [60]


@pytest.mark.thorough("tests/plugins/test_megatron_state.py reshards")
def test_another_number_of_ranks_reshards_it_and_saves_in_nemos_own_way_beside_it(
    killed_between_saves: Finished, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        job = copy_of(killed_between_saves.job, tmp_path, ONE_RANK, stack)
        flip_a_bit(file_in(job.checkpoints / "step=60", "__0_0.distcp"))
        # Two samples a replica and step, as before: the mock data have the same length.
        output = job.run("--global-bs", 4, save_every=20)
        assert "step=60 is not used" in output
        assert restored_from(job) == [(40, "persistent")]
        assert (job.checkpoints / "step=60" / "weights").is_dir()
        flip_a_bit(job.checkpoints / "step=60" / "weights" / "common.pt")
        output = job.run("--global-bs", 4, PROCESS, save_every=20)
        assert "step=60 is not used" in output
        assert "resharded" in output
        assert restored_from(job)[1:] == [(40, "persistent")]
        assert complete(job.checkpoints) == [20, 40, 60]


@pytest.mark.thorough("tests/checkpoint/commit kills at each operation of a save")
def test_a_rank_killed_inside_a_save_costs_that_save_only(
    new_job: Callable[[Layout], Job], uninterrupted: Callable[[Layout], Losses]
) -> None:
    job = new_job(TENSOR_PARALLEL)
    job.run(
        *(PROCESS, "--sim-fault-desc", "rank_killed,step=40,phase=save_started"),
        launcher=ONE_RESTART,
        save_every=20,
        attempts=2,
    )
    assert restored_from(job) == [(0, None), (20, "memory")]
    assert job.losses() == uninterrupted(TENSOR_PARALLEL)
    assert complete(job.checkpoints) == [20, 40, 60]


@pytest.mark.thorough("tests/checkpoint/test_checkpointer.py kills the agent")
def test_when_the_process_is_killed_training_goes_on_and_a_later_save_is_committed(
    new_job: Callable[[Layout], Job],
) -> None:
    job = new_job(TWO_REPLICAS)
    steps = 300  # so many that the kill is in the middle, also where this process is slow to notice
    command = job.start(PROCESS, "--max-steps", steps, save_every=20)
    found = command.wait_for_line(r"checkpoint process ([1-9]\d*) writes to", timeout=ATTEMPT_S)
    command.wait_for_line(r"step 20 committed", timeout=ATTEMPT_S)
    os.kill(int(found[1]), signal.SIGKILL)
    assert command.wait(timeout=ATTEMPT_S) == 0, command.output
    command.assert_no_orphans(timeout=120)
    assert "was lost" in command.output
    assert sorted(job.losses(attempt=0)) == list(range(1, steps + 1))
    assert {20, steps} <= set(complete(job.checkpoints))


@pytest.mark.thorough("tests/checkpoint/test_fencing.py fences each optimizer")
def test_what_is_copied_as_late_as_possible_is_still_what_was_there_when_the_save_began(
    tmp_path: Path,
) -> None:
    """The fence runs before the optimizer writes: every copy is held back until it is reached."""
    argv = [sys.executable, "-W", "ignore", "-m", "tests.nemo.fenced_capture", str(tmp_path)]
    done = warm.run(argv, timeout=ATTEMPT_S, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["different"] == []
    assert result["steps"] == [2, 4, 6, 8]
    # The optimizer did write meanwhile: weights, and both moments.
    assert result["compared"] > result["moved"] > result["compared"] / 8
    # Built twice and found equal, used again once, and built anew when a parameter had moved.
    assert result["reused"] == [6]
    assert result["stale"] == []
