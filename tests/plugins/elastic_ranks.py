# SPDX-License-Identifier: Apache-2.0
"""What ranks do in `test_elastic_replicas`: each is a host with a disk of its own, and with its own agent."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from resiliency.checkpoint import CheckpointerOptions, LocalTier
from resiliency.checkpoint.agent.client import LinkOptions
from resiliency.events import EventStream
from resiliency.runtime import RunInfo
from tests.plugins.megatron_ranks import SOON, Job, Layout, Part, job, parts_of
from tests.plugins.outlived import outlived
from tests.waiting import wait_until

if TYPE_CHECKING:
    from resiliency.plugins.in_cluster_local_ckpt import InClusterLocalCheckpointIO


@dataclass(frozen=True)
class Start:
    """One start of a job: it goes on from step `begin` (0: from scratch) in `tier`, and saves step `end`."""

    layout: Layout
    hosts: tuple[str, ...]
    begin: int
    end: int
    tier: str


@dataclass(frozen=True)
class Held:
    """Where a rank had its state from, what that was, and what it saved in the end."""

    tier: str
    restored: list[Part]
    saved: list[Part]


def gone_on(rank: int, layout: Layout, start: Start, root: Path) -> Held:
    """Restore from the local tiers of all hosts, train, and save to the own one."""
    with job(rank, layout) as mine, process_on(root / start.hosts[rank], rank, layout) as io:
        restored: list[Part] = []
        if start.begin:
            assert max(io.restores.captured()) == start.begin
            restore(mine, io, start.begin)
            restored = parts_of(mine.sharded_state())
        else:
            assert io.restores.captured() == {}
        mine.train(3)
        save(mine, io, start.end)
        return Held(io.restores.restored_from.value, restored, parts_of(mine.sharded_state()))


def restore(mine: Job, io: InClusterLocalCheckpointIO, step: int) -> None:
    wanted = mine.sharded_state(loading=True)
    del wanted["random"]  # an object per saved rank
    path = io.restores.path_of(step)
    assert io.load_content_metadata(path)["form"] == mine.layout.sharding
    state = io.load_checkpoint(path, wanted)
    assert state["global_step"] == step
    assert io.restored_rng is not None
    mine.model.module.load_state_dict(state["state_dict"])
    mine.optimizer.load_state_dict(state["optimizer"][0])


def save(mine: Job, io: InClusterLocalCheckpointIO, step: int) -> None:
    checkpoint = {**mine.sharded_state(), "global_step": step}
    del checkpoint["random"]
    path = io.restores.path_of(step)
    io.save_checkpoint(checkpoint, path, {"content_metadata": {"form": mine.layout.sharding}})
    handle = io._newest
    assert handle is not None
    assert handle.wait(SOON)
    assert handle.record.committed_in == ("local",), handle.record


@contextlib.contextmanager
def process_on(host: Path, rank: int, layout: Layout) -> Iterator[InClusterLocalCheckpointIO]:
    """The checkpoint process of one host, which ends with this."""
    from resiliency.plugins.in_cluster_local_ckpt import InClusterLocalCheckpointIO
    from resiliency.plugins.min_ckpt_overhead import MinCkptOverheadCheckpointIO

    memory = host / "memory"
    memory.mkdir(parents=True, exist_ok=True)
    info = RunInfo(
        job_name="elastic", host=host.name, rank=rank, world_size=layout.ranks, peer_address="127.0.0.1"
    )
    io = InClusterLocalCheckpointIO(
        MinCkptOverheadCheckpointIO(),
        LocalTier(directory=host / "disk", replicas=0),
        substitutes=True,
        events=EventStream(info, []),
        options=CheckpointerOptions(arena_root=memory, link=LinkOptions(grace=SOON)),
    )
    with outlived(io):
        yield io
    wait_until(lambda: not list(memory.iterdir()), "its agent keeps its memory")
