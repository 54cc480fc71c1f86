# SPDX-License-Identifier: Apache-2.0
"""One gloo rank of a test: RANK WORLD_SIZE MODE:ROOT ..."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, zeros

from resiliency.checkpoint.format.dcp import DcpFormat
from resiliency.checkpoint.storage.posix import LocalStorage
from tests.checkpoint.storage_builders import save
from tests.checkpoint.tensor_builders import same_bits, sharded


def main(rank: int, world_size: int, jobs: list[str]) -> None:
    roots = [(mode, Path(root)) for mode, _, root in (job.partition(":") for job in jobs)]
    store = dist.FileStore(str(roots[0][1] / f"store-{world_size}"), world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
    )
    mesh = init_device_mesh("cpu", (world_size,))
    for mode, root in roots:
        work(mode, root, rank, mesh)
        dist.barrier()
    dist.destroy_process_group()


def work(mode: str, root: Path, rank: int, mesh: DeviceMesh) -> None:
    _, whole = sharded(1)
    if mode == "save-ours":
        shards, _ = sharded(mesh.size())
        save(LocalStorage(root), DcpFormat(), [shards[rank]], leads=rank == 0)
    elif mode == "save-stock":
        state = {
            "rows": distribute_tensor(whole["rows"], mesh, [Shard(0)]),
            "shared": distribute_tensor(whole["shared"], mesh, [Replicate()]),
        }
        dcp.save(state, checkpoint_id=root / "step=1")
    else:
        target = {
            "rows": zeros(13, 6, dtype=torch.bfloat16, device_mesh=mesh, placements=[Shard(0)]),
            "shared": torch.zeros(300, 1000),
        }
        dcp.load(target, checkpoint_id=root / "step=1")
        rows = target["rows"]
        assert isinstance(rows, DTensor)
        assert same_bits(rows.full_tensor(), whole["rows"])
        assert same_bits(target["shared"], whole["shared"])


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
