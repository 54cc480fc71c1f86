# SPDX-License-Identifier: Apache-2.0
"""A job with the local tier of a checkpoint process, and persistent saves by NeMo itself beside it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from resiliency.checkpoint.format.catalog import unmarked_checkpoints
from tests.nemo.conftest import ONE_RESTART, TENSOR_PARALLEL, Job, Layout, Losses
from tests.nemo.logs import complete, restored_from

pytestmark = [pytest.mark.nemo, pytest.mark.slow]


@pytest.mark.thorough(
    "a kill with the checkpoint process is near, tests/nemo/test_options.py saves in both tiers"
)
def test_a_killed_rank_is_restarted_in_place_from_the_newest_local_save_and_nemos_saves_go_on(
    new_job: Callable[[Layout], Job], uninterrupted: Callable[[Layout], Losses]
) -> None:
    job = new_job(TENSOR_PARALLEL)
    disk = job.directory / "disk"
    job.run(
        *("--local-ckpt-dir", disk, "--local-ckpt-interval", 20, "--enable-async-ckpt"),
        *("--sim-fault-desc", "rank_killed,step=50"),
        launcher=ONE_RESTART,
        save_every=30,
        attempts=2,
    )
    assert restored_from(job) == [(0, None), (40, "memory")]
    assert job.losses() == uninterrupted(TENSOR_PARALLEL)
    assert 40 in complete(disk / "job" / "checkpoint")
    nemos = unmarked_checkpoints(job.checkpoints)
    # The save of step 30 may have ended by the kill or not: NeMo's first one starts a process.
    assert nemos[0].name == "step=60"
    assert all((path / "weights").is_dir() for path in nemos)
