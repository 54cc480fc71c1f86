# SPDX-License-Identifier: Apache-2.0
"""A DDP training that waits at two steps for the job to become another number of ranks.

    launcher.py ... elastic_training.py CHECKPOINTS WORLD:STEP...

A job of WORLD ranks waits after STEP steps, of which the last two are not saved. The model counts how often
it saw each sample.
"""

from __future__ import annotations

import sys
import threading
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from resiliency.checkpoint import Checkpointer
from resiliency.data import GlobalBatch, InterruptableDistributedSampler, accumulate, advancing_steps

SIZE, EPOCHS = 100, 3
WAIT = timedelta(minutes=3)


def main() -> None:
    directory, holds = sys.argv[1], [tuple(map(int, word.split(":"))) for word in sys.argv[2:]]
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    features = torch.randn(SIZE, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    data = TensorDataset(torch.arange(SIZE), features)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8)).double()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    sampler = InterruptableDistributedSampler(data, global_batch=GlobalBatch(11, micro=2))
    loader = DataLoader(data, batch_sampler=sampler.micro_batches())
    seen = torch.zeros(SIZE, dtype=torch.int64)
    state = {"model": model, "optimizer": optimizer, "sampler": sampler, "seen": seen}
    with Checkpointer(directory, replicated=True) as checkpoints:
        step = checkpoints.restore(state).step
        if not step and holds and world != holds[0][0]:
            # The other host is slow to come: a job without it must not train past what it is to do with it.
            threading.Event().wait(WAIT.total_seconds())
        print(f"rank {rank} of {world} starts after step {step}", flush=True)
        for epoch in range(sampler.epoch, EPOCHS):
            sampler.set_epoch(epoch)
            for optimizer_step in advancing_steps(loader, optimizer):
                total, counts = torch.zeros((), dtype=torch.float64), torch.zeros_like(seen)
                for (indexes, batch), weight in accumulate(ddp, optimizer_step):
                    loss = torch.nn.functional.mse_loss(ddp(batch), batch) * weight
                    loss.backward()
                    total += loss.detach()
                    counts[indexes] += int(weight > 0)
                optimizer.step()
                optimizer.zero_grad()
                dist.all_reduce(total)
                dist.all_reduce(counts)
                seen += counts
                step += 1
                if rank == 0:
                    print(f"step {step} world {world} loss {(total / world).item():.16f}", flush=True)
                if (world, step + 2) in holds:
                    checkpoints.save(step, state, wait=WAIT)
                if (world, step) in holds:
                    checkpoints.wait(WAIT)  # whoever starts again must find what was saved
                    print(f"rank {rank} of {world} waits", flush=True)
                    threading.Event().wait(WAIT.total_seconds())
                    raise SystemExit("the job stayed as it was")
    if rank == 0:
        print(f"seen {sorted(set(seen.tolist()))}", flush=True)
    del ddp  # with gloo it must not outlive its group: the end of both may wait for each other
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
