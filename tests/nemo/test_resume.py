# SPDX-License-Identifier: Apache-2.0
"""A job that was killed and resumed computes the very losses of one that never was."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from resiliency.events import EventType
from tests.nemo.conftest import ONE_RESTART, STEPS, TENSOR_PARALLEL, TWO_REPLICAS, Job, Layout, Losses

pytestmark = [pytest.mark.nemo, pytest.mark.slow]


@pytest.mark.thorough("a kill with the checkpoint process is near")
def test_after_a_kill_between_synchronous_saves_every_loss_is_bit_identical(
    new_job: Callable[[Layout], Job], uninterrupted: Callable[[Layout], Losses]
) -> None:
    job = new_job(TENSOR_PARALLEL)
    output = job.run(
        "--enable-dist-ckpt",
        "--sim-fault-desc",
        "rank_killed,step=50",
        launcher=ONE_RESTART,
        save_every=20,
        attempts=2,
    )
    assert job.restored_steps() == [0, 40]
    assert "rank 1 failed: SIGKILL" in output
    assert sorted(job.losses(attempt=1)) == list(range(41, STEPS + 1))
    assert job.losses() == uninterrupted(TENSOR_PARALLEL)


@pytest.mark.thorough("the kill between synchronous saves is near")
def test_after_a_kill_just_behind_an_asynchronous_commit_every_loss_is_bit_identical(
    new_job: Callable[[Layout], Job], uninterrupted: Callable[[Layout], Losses]
) -> None:
    job = new_job(TWO_REPLICAS)
    job.run(
        "--enable-async-ckpt",
        "--sim-fault-desc",
        "rank_killed,step=20,phase=checkpoint_saved,rank=0",
        launcher=ONE_RESTART,
        save_every=20,
        attempts=2,
    )
    assert job.restored_steps() == [0, 20]
    # Training went on behind the save, so steps after the checkpoint were computed twice ...
    assert max(job.losses(attempt=0)) > 20
    # ... and both times with the same result.
    assert job.losses(attempt=0).items() <= uninterrupted(TWO_REPLICAS).items()
    assert job.losses() == uninterrupted(TWO_REPLICAS)


@pytest.mark.thorough("tests/checkpoint/commit kills at each operation of a save")
def test_a_rank_killed_inside_a_save_leaves_the_save_before_as_the_newest(
    new_job: Callable[[Layout], Job], uninterrupted: Callable[[Layout], Losses]
) -> None:
    job = new_job(TWO_REPLICAS)
    job.run(
        "--sim-fault-desc",
        "rank_killed,step=40,phase=save_started",
        launcher=ONE_RESTART,
        save_every=20,
        attempts=2,
    )
    assert job.restored_steps() == [0, 20]
    assert job.losses() == uninterrupted(TWO_REPLICAS)
    assert sorted(path.name for path in job.checkpoints.iterdir()) == ["step=20", "step=40", "step=60"]
    saved = [event.step for event in job.events(EventType.CHECKPOINT_SAVED)]
    assert saved == [20, 40, 60]
