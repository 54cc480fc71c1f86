# SPDX-License-Identifier: Apache-2.0
"""Train with plain DDP and torch.save alone on a mixture of two datasets, in steps that grow.

    torchrun --standalone --nproc-per-node 2 examples/mixed_data.py --checkpoint /tmp/mixed.pt

Kill it and start it again with another --nproc-per-node: each step has the samples, and so the loss, of a run
that was never touched.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from resiliency.data import (
    GlobalBatch,
    MixedDataset,
    MixedSampler,
    RampUp,
    accumulate,
    advancing_steps,
    atomic_torch_save,
)


def source(size: int, slope: float) -> TensorDataset:
    inputs = torch.randn(size, 8, generator=torch.Generator().manual_seed(size), dtype=torch.float64)
    return TensorDataset(inputs, slope * inputs.sum(1, keepdim=True))


def train(path: str, *, samples: int, epochs: int, every: int) -> Iterator[str]:
    """A line for each step; the checkpoint is written `every` so many steps."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(torch.nn.Linear(8, 1, dtype=torch.float64))
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    mixture = MixedDataset(
        {"rising": (source(500, 1.0), 3), "falling": (source(40, -1.0), 1)}, samples=samples
    )
    batch = GlobalBatch(32, micro=8, ramp_up=RampUp(start=8, increment=8, samples=100))
    sampler = MixedSampler(mixture, global_batch=batch)
    loader = DataLoader(mixture, batch_sampler=sampler.micro_batches(), num_workers=1)

    step, parts = 0, {"model": ddp.module, "optimizer": optimizer, "sampler": sampler}
    if os.path.exists(path):
        saved = torch.load(path)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        step = saved["step"]
    for epoch in range(sampler.epoch, epochs):
        sampler.set_epoch(epoch)
        for optimizer_step in advancing_steps(loader, optimizer):
            total = torch.zeros((), dtype=torch.float64)
            for (inputs, wanted), weight in accumulate(ddp, optimizer_step):
                loss = torch.nn.functional.mse_loss(ddp(inputs), wanted) * weight
                loss.backward()
                total += loss.detach()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            dist.all_reduce(total)
            yield f"step {step} loss {total.item() / dist.get_world_size():.12f} {sampler.counts()}"
            if step % every == 0 and dist.get_rank() == 0:
                state = {name: part.state_dict() for name, part in parts.items()}
                atomic_torch_save({**state, "step": step}, path)  # torch.save, and a kill leaves a whole file


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", required=True)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    for line in train(options.checkpoint, samples=1000, epochs=2, every=5):
        if dist.get_rank() == 0:
            print(line, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
