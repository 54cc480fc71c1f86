# SPDX-License-Identifier: Apache-2.0
"""What hosts of a job that ended left behind, made by hand: captures, checkpoints, replicas.

A "host" is a directory with an arena and a local tier in it.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from resiliency.checkpoint.capture.arena import RankArena
from resiliency.checkpoint.format.dcp import DcpFormat
from resiliency.checkpoint.format.local import LocalFormat
from resiliency.checkpoint.locations import ShardLocation, ShardRequest
from resiliency.checkpoint.names import directory_name, save_id_of
from resiliency.checkpoint.recovery.inventory import list_local
from resiliency.checkpoint.recovery.planner import RestorePlan, plans
from resiliency.checkpoint.state.layout import Shard
from resiliency.checkpoint.storage.posix import LocalStorage
from tests.checkpoint.storage_builders import make_shard, save

SESSION = "session"


def make(step: int, rank: int, world_size: int, *, size: int = 5000, like: int | None = None) -> Shard:
    """A shard whose tensors depend on step and rank (or on `like`), and whose values say the rank."""
    generator = torch.Generator().manual_seed(1000 * step + (rank if like is None else like))
    parts = {"weight": torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)} if size else {}
    values = f"step {step} of rank {rank}".encode()
    shard = make_shard(parts, step=step, rank=rank, world_size=world_size, values=values)  # type: ignore[arg-type]
    return replace(shard, run_id=SESSION)


def arena_of(root: Path, host: str) -> Path:
    (root / host).mkdir(parents=True, exist_ok=True)
    return root / host / "arena"


def local_of(root: Path, host: str) -> Path:
    return root / host / "local"


def commit_locally(root: Path, host: str, shards: Sequence[Shard], attempt_id: str = SESSION) -> None:
    """What the agent of `host` does with the captures of its ranks."""
    storage = LocalStorage(local_of(root, host))
    ranks = [shard.rank for shard in shards]
    save(storage, LocalFormat(), shards, save_id=save_id_of(attempt_id, shards[0].step), ranks=ranks)


def commit_for_all(root: Path, shards: Sequence[Shard], attempt_id: str = SESSION) -> LocalStorage:
    """A checkpoint on storage that all hosts see."""
    storage = LocalStorage(root / "persistent")
    save(storage, DcpFormat(), shards, save_id=save_id_of(attempt_id, shards[0].step))
    return storage


def replicate(root: Path, owner: str, step: int, to: str) -> Path:
    """A copy of a host's step on another host; returns its directory."""
    copy = local_of(root, to) / "replicas" / directory_name(owner) / f"step={step}"
    shutil.copytree(local_of(root, owner) / f"step={step}", copy)
    return copy


def keep_in_memory(root: Path, host: str, shard: Shard, attempt_id: str = SESSION) -> None:
    """A capture that a process left, which is gone."""
    size = shard.layout.size_bytes
    directory = arena_of(root, host)
    with RankArena(
        directory, rank=shard.rank, world_size=shard.world_size, run_id=attempt_id, group=shard.group
    ) as arena:
        slot = arena.try_take()
        assert slot is not None
        arena.begin(slot, shard.layout, shard.values, shard.step)
        assert slot.memory is not None
        slot.memory[:size] = shard.buffer[:size]
        arena.publish(slot, shard.values)


def lose(root: Path, host: str) -> None:
    shutil.rmtree(root / host)


def flip(path: Path, position: int = 1000) -> None:
    """Damage one bit of a file."""
    content = bytearray(path.read_bytes())
    content[position % len(content)] ^= 1
    path.write_bytes(content)


def plan_for(root: Path, hosts: Sequence[str], groups: Sequence[str] = ()) -> RestorePlan:
    """The best plan for ranks on `hosts`, one name for each rank, from what is on their disks."""
    needs = [
        ShardRequest(rank=rank, host=host, world_size=len(hosts), group=groups[rank] if groups else "")
        for rank, host in enumerate(hosts)
    ]
    return plans(needs, on_disks(root, hosts))[0]


def on_disks(root: Path, hosts: Sequence[str]) -> list[ShardLocation]:
    return [location for host in dict.fromkeys(hosts) for location in list_local(local_of(root, host), host)]


def content(shard: Shard) -> tuple[bytes, bytes]:
    """Tensors and values, wherever they still have to be read from."""
    entries = shard.layout.entries
    read = [memoryview(bytearray(entry.size_bytes)) for entry in entries]
    if shard.load is not None:
        shard.load([(entry.offset_bytes, view) for entry, view in zip(entries, read, strict=True)])
    else:
        for entry, view in zip(entries, read, strict=True):
            view[:] = shard.read(entry)
    return b"".join(read), shard.values
