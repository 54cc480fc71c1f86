# SPDX-License-Identifier: Apache-2.0
"""Who a rank is, where torchrun did not say so."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from resiliency.checkpoint import Checkpointer, CheckpointerOptions
from resiliency.checkpoint.catalog import Condition, list_checkpoints
from resiliency.checkpoint.storage import LocalStorage
from resiliency.errors import ConfigError
from resiliency.testing.rank_pool import RankPool
from tests.checkpoint.test_checkpointer import SOON


def save_with(rank: int, root: str, job: str, env: dict[str, str]) -> tuple[int, str]:
    """The rank that the checkpointer sees and how its save ended, with `env` for torchrun's variables."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    os.environ.update(env, JOB_IDENTIFIER=job, NODE_NAME=f"host-{rank}")
    arenas = Path(root) / f"host-{rank}"
    arenas.mkdir()
    options = CheckpointerOptions(arena_root=arenas)
    try:
        with Checkpointer(Path(root) / "ckpt", options=options) as checkpoints:
            handle = checkpoints.save(1, {f"rank{rank}": torch.full((4,), float(rank))})
            assert handle.wait(SOON)
            return checkpoints.rank, handle.state.value
    except ConfigError as error:
        return -1, str(error)


@pytest.mark.slow
def test_ranks_without_torchruns_variables_are_those_of_the_process_group(
    tmp_path: Path, rank_pool: RankPool
) -> None:
    args = (str(tmp_path), f"srun-{os.getpid()}", {})
    assert rank_pool.run(save_with, 2, *args, timeout=90).values == [(0, "committed"), (1, "committed")]
    (found,) = list_checkpoints(LocalStorage(tmp_path / "ckpt"))
    assert found.condition is Condition.COMPLETE
    assert found.manifest is not None
    assert found.manifest.world_size == 2


def test_an_environment_that_contradicts_the_process_group_is_refused(
    tmp_path: Path, rank_pool: RankPool
) -> None:
    # As left over from a job of one rank.
    args = (str(tmp_path), f"srun-{os.getpid()}", {"RANK": "0", "WORLD_SIZE": "1"})
    for rank, (seen, error) in enumerate(rank_pool.run(save_with, 2, *args, timeout=90).values):
        assert seen == -1
        assert f"rank 0 of 1 by its environment, and rank {rank} of 2 in the process group" in error
