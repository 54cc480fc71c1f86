# SPDX-License-Identifier: Apache-2.0
"""The agents of a Megatron job know which hosts its parallel groups are on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from resiliency.checkpoint import CheckpointerOptions, LocalTier
from resiliency.checkpoint.agent.client import LinkOptions
from resiliency.checkpoint.replication.hosts import HostTable
from resiliency.events import EventStream
from resiliency.runtime import RunInfo
from resiliency.testing import megatron_cpu
from resiliency.testing.rank_pool import RankPool
from tests.plugins.conftest import run
from tests.plugins.megatron_ranks import Layout
from tests.plugins.outlived import outlived

pytestmark = [pytest.mark.nemo, pytest.mark.slow, pytest.mark.usefixtures("agents_at_once")]


@contextlib.contextmanager
def groups_of(tensor: int, context: int, pipeline: int) -> Iterator[None]:
    with megatron_cpu.installed():
        from megatron.core import parallel_state

        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tensor,
            context_parallel_size=context,
            pipeline_model_parallel_size=pipeline,
        )
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()


def labels(rank: int, layout: Layout, *sizes: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The labels without Megatron's groups, and with groups of the given sizes."""
    from resiliency.plugins.parallel_groups import parallel_groups

    without = parallel_groups()
    with groups_of(*sizes):
        return without, parallel_groups()


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((2, 1, 2), [("tp:0", "pp:0"), ("tp:0", "pp:1"), ("tp:2", "pp:0"), ("tp:2", "pp:1")]),
        ((1, 2, 1), [("cp:0",), ("cp:0",), ("cp:2",), ("cp:2",)]),
        ((1, 1, 1), [()] * 4),
    ],
    ids=["tp2 pp2", "cp2 dp2", "dp4"],
)
def test_a_label_names_a_group_of_ranks_that_compute_each_micro_batch_together(
    pool: RankPool, sizes: tuple[int, ...], expected: list[tuple[str, ...]]
) -> None:
    assert run(pool, labels, Layout(ranks=4), *sizes) == [((), found) for found in expected]


def table_of(rank: int, layout: Layout, root: Path) -> tuple[str, dict[str, tuple[str, ...]]]:
    """This rank's replica group, and the groups of all hosts as the agent of its host was told them."""
    from resiliency.plugins.min_ckpt_overhead import MinCkptOverheadCheckpointIO
    from resiliency.plugins.persistent_ckpt_proc import PersistentCheckpointProcessIO
    from resiliency.plugins.replica_groups import replica_group

    info = RunInfo(job_name="groups", host=f"host-{rank}", rank=rank, world_size=layout.ranks)
    home = root / info.host
    (home / "memory").mkdir(parents=True, exist_ok=True)
    io = PersistentCheckpointProcessIO(
        MinCkptOverheadCheckpointIO(),
        None,
        local=LocalTier(directory=home / "disk"),
        substitutes=True,
        events=EventStream(replace(info, peer_address=f"127.0.0.{2 + rank}"), []),
        options=CheckpointerOptions(arena_root=home / "memory", link=LinkOptions(grace=timedelta(seconds=5))),
    )
    with groups_of(2, 1, 1), outlived(io):
        (path,) = (home / "memory").rglob("peers.json")
        return replica_group(), {peer.host: peer.groups for peer in HostTable.read(path).peers}


def test_the_agents_are_told_the_parallel_groups_of_each_host_beside_its_replica_groups(
    pool: RankPool, tmp_path: Path
) -> None:
    found = run(pool, table_of, Layout(ranks=2), tmp_path)
    expected = {f"host-{rank}": {"tp:0", substitutes} for rank, (substitutes, _) in enumerate(found)}
    for _, table in found:
        assert {host: set(groups) for host, groups in table.items()} == expected
