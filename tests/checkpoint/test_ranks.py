# SPDX-License-Identifier: Apache-2.0
"""What all ranks agree on, and who a rank is where torchrun did not say so."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from resiliency.checkpoint import Checkpointer, CheckpointerOptions
from resiliency.checkpoint.format.catalog import Condition, list_checkpoints
from resiliency.checkpoint.ranks import RankGroup
from resiliency.checkpoint.storage.posix import LocalStorage
from resiliency.errors import ConfigError
from resiliency.testing.rank_pool import RankPool
from tests.checkpoint.checkpointer_builders import SOON


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


def gather_all_kinds(rank: int) -> list[list[object]]:
    """Values that are short on all ranks, on some and on none, and how many collectives each took."""
    rank_group = RankGroup.of_process_group()
    kinds: list[list[object]] = [
        [None, rank, ("host", rank)],
        ["x" * (1000 * rank), b"y" * 494, b"y" * (495 - rank)],
        [bytes(range(256)) * (5000 + rank), {"step": [1.5] * 300}],
    ]
    carried = 0
    all_gather = dist.all_gather

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal carried
        carried += 1
        return all_gather(*args, **options)

    dist.all_gather = counted
    try:
        found: list[list[object]] = []
        for values in kinds:
            for value in values:
                carried = 0
                found.append([rank_group.gather(value), carried])
        return found
    finally:
        dist.all_gather = all_gather


def test_what_all_ranks_say_is_gathered_whole_and_short_values_in_one_collective(rank_pool: RankPool) -> None:
    first, second = rank_pool.run(gather_all_kinds, 2).values
    assert first == second
    gathered = [values for values, _ in first]
    assert gathered[:3] == [[None, None], [0, 1], [("host", 0), ("host", 1)]]
    assert gathered[3] == ["", "x" * 1000]
    assert gathered[5] == [b"y" * 495, b"y" * 494]
    assert gathered[6] == [bytes(range(256)) * 5000, bytes(range(256)) * 5001]
    assert [count for _, count in first] == [1, 1, 1, 2, 1, 2, 2, 2]


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
