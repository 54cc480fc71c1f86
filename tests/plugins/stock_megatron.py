# SPDX-License-Identifier: Apache-2.0
"""Saves and loads checkpoints with stock Megatron, in processes that know nothing of this project.

    python stock_megatron.py DIRECTORY

``DIRECTORY/jobs`` is a JSON list of (number of ranks, cases), done one after the other; the ranks are forked
from this process, which imports Megatron once.  Cases are a list of (checkpoint directory, state file, result
file), handled in order by all ranks.  The state is a sharded state dict: one with data and no result file is
saved, one without data is loaded.  The result has the loaded tensors, each with the state's words about it,
and what is no tensor.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor


def leaves(state: Any, path: tuple[Any, ...] = ()) -> list[tuple[tuple[Any, ...], Any]]:
    items = (
        state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else None
    )
    if items is None:
        return [(path, state)]
    return [leaf for key, item in list(items) for leaf in leaves(item, (*path, key))]


def main(directory: str) -> int:
    with open(f"{directory}/jobs") as file:
        jobs = json.load(file)
    for number, (world_size, cases) in enumerate(jobs):
        work = (world_size, f"{directory}/store-{number}", cases)
        ranks = [
            multiprocessing.get_context("fork").Process(target=run, args=(rank, *work))
            for rank in range(world_size)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        if any(rank.exitcode for rank in ranks):
            return 1
    return 0


def run(rank: int, world_size: int, store_file: str, cases: list[tuple[str, str, str]]) -> None:
    store = dist.FileStore(store_file, world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    for checkpoint, template, result in cases:
        wanted = torch.load(template.format(rank=rank), weights_only=False)
        if not result:
            if not torch.cuda.is_available():  # Megatron asks for a device also without one
                torch.cuda.synchronize = lambda: None
                torch.cuda.current_device = lambda: torch.device("cpu")
            dist_checkpointing.save(wanted, checkpoint)
            continue
        described = leaves(wanted)
        loaded = dict(leaves(dist_checkpointing.load(wanted, checkpoint)))
        tensors = [
            {
                "key": item.key,
                "data": loaded.pop(path),
                "global_shape": item.global_shape,
                "global_offset": item.global_offset,
                "local_shape": (1,) * item.prepend_axis_num + tuple(item.local_shape),
                "flattened": item.flattened_range and (item.flattened_range.start, item.flattened_range.stop),
            }
            for path, item in described
            if isinstance(item, ShardedTensor)
        ]
        ours = [name for name in sys.modules if name.partition(".")[0] in ("resiliency", "nemo")]
        torch.save({"tensors": tensors, "values": loaded, "ours": ours}, result.format(rank=rank))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
