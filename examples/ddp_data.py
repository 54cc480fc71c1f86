# SPDX-License-Identifier: Apache-2.0
"""Train with DDP on data that survives: each sample once per epoch, and the same loss on any number of ranks.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # else gloo cannot reconnect when torchrun restarts ranks
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/ddp_data.py --ckpt-dir /tmp/ckpt

Kill a rank while it runs, or all of them, and start it again with another --nproc-per-node: the losses are
those of a run that was never touched, because each step is made of the same 32 samples. The script counts how
often each sample was trained on, and ends with an error if that is ever not once per epoch.
"""

from __future__ import annotations

import argparse
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from resiliency.checkpoint import Checkpointer
from resiliency.data import GlobalBatch, InterruptableDistributedSampler, accumulate, advancing_steps

SIZE = 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ckpt-dir", required=True)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--every", type=int, default=5)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    features = torch.randn(SIZE, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    data = TensorDataset(torch.arange(SIZE), features)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 16)).double()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)

    sampler = InterruptableDistributedSampler(data, global_batch=GlobalBatch(32, micro=8))
    loader = DataLoader(data, batch_sampler=sampler.micro_batches(), num_workers=1)
    trained = torch.zeros(SIZE, dtype=torch.int64)  # how often on each sample; part of the model, so to say
    state = {"model": model, "optimizer": optimizer, "sampler": sampler, "trained": trained}

    # All ranks hold the same state: any number of them may restore it.
    with Checkpointer(options.ckpt_dir, every_steps=options.every, replicated=True) as checkpoints:
        step = checkpoints.restore(state).step
        print(f"rank {rank} of {world} starts after step {step}, epoch {sampler.epoch}", flush=True)
        for epoch in range(sampler.epoch, options.epochs):
            sampler.set_epoch(epoch)
            for optimizer_step in advancing_steps(loader, optimizer):
                total, counts = torch.zeros((), dtype=torch.float64), torch.zeros_like(trained)
                for (indexes, batch), weight in accumulate(ddp, optimizer_step):
                    loss = torch.nn.functional.mse_loss(ddp(batch), batch) * weight
                    loss.backward()
                    total += loss.detach()
                    counts[indexes] += int(weight > 0)
                optimizer.step()
                optimizer.zero_grad()
                dist.all_reduce(total)
                dist.all_reduce(counts)
                trained += counts
                step += 1
                if rank == 0:
                    print(f"step {step} epoch {epoch} loss {total.item() / world:.12f}", flush=True)
                checkpoints.step(step, state)
            if not bool((trained == epoch + 1).all()):
                raise SystemExit(f"epoch {epoch}: samples were trained on {trained.unique().tolist()} times")
        checkpoints.save(step, state, wait=timedelta(minutes=10))
    print(f"rank {rank} done: every sample once in each of {options.epochs} epochs", flush=True)
    del ddp  # with gloo it must not outlive its group: the end of both may wait for each other
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
