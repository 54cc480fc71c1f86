# SPDX-License-Identifier: Apache-2.0
"""Train with DDP on an endless text that is read as it comes; torch.save alone, one file for each rank.

    torchrun --standalone --nproc-per-node 2 examples/iterable_data.py --directory /tmp/iterable

Kill it and start it again on as many ranks: each goes on with the next line of each of its workers.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from resiliency.data import ResumableIterable, advancing, atomic_torch_save


class Lines(IterableDataset[torch.Tensor]):
    """Numbered lines, of which each worker of each rank takes its own, and forgets some at random."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.line = 0
        self.generator = torch.Generator().manual_seed(1)

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        mine, count = (info.id, info.num_workers) if info else (0, 1)
        while True:
            self.line += 1
            if torch.rand((), generator=self.generator) < 0.8:
                yield torch.tensor(float((self.line * self.world + self.rank) * count + mine))

    def state_dict(self) -> dict[str, Any]:
        return {"line": self.line, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.line = state["line"]
        self.generator.set_state(state["generator"])


def train(directory: str, *, steps: int, every: int) -> Iterator[str]:
    """A line for each step; each rank writes its checkpoint `every` so many steps."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    ddp = DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-9)
    data = ResumableIterable(Lines(rank, world))
    loader = DataLoader(data, batch_size=4, num_workers=2)

    step, parts = 0, {"model": ddp.module, "optimizer": optimizer, "data": data}
    paths = [f"{directory}/rank{rank}-{name}.pt" for name in ("even", "odd")]  # a kill may find ranks between
    saved = [torch.load(path) for path in paths if os.path.exists(path)]
    newest: list[int] = [0] * world
    dist.all_gather_object(newest, max((found["step"] for found in saved), default=0))
    for found in saved:
        if found["step"] == min(newest):
            step = found["step"]
            for name, part in parts.items():
                part.load_state_dict(found[name])
    for batch in advancing(loader, optimizer):
        ddp(batch[:, None]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        yield f"step {step} rank {rank} lines {batch.tolist()}"
        if step % every == 0:
            state = {name: part.state_dict() for name, part in parts.items()}
            atomic_torch_save({**state, "step": step}, paths[step // every % 2])
        if step == steps:
            break


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory", required=True)
    options = parser.parse_args()
    os.makedirs(options.directory, exist_ok=True)
    dist.init_process_group("gloo")
    for line in train(options.directory, steps=200, every=5):
        print(line, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
