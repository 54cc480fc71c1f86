# SPDX-License-Identifier: Apache-2.0
"""Train with FSDP2 and checkpoints in which each rank writes what it holds.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # else gloo cannot reconnect when torchrun restarts ranks
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/fsdp2_train.py --ckpt-dir /tmp/ckpt

It trains on a GPU per rank where there are GPUs, else on the CPU (CUDA_VISIBLE_DEVICES= asks for that).
Start it again and it goes on.  With another number of ranks, load the newest ``step=N`` with
`torch.distributed.checkpoint.load`, which cuts the tensors anew: docs/loading-elsewhere.md.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from resiliency.checkpoint import Checkpointer, TerminationOptions


def batch(step: int, rank: int) -> torch.Tensor:
    """Data as a function of the step, so that a resumed run sees what an uninterrupted one would."""
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(1000 * step + rank))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ckpt-dir", required=True)
    parser.add_argument("--steps", type=int, default=200)
    # A step of this toy takes milliseconds: saves in a short interval would be skipped, as storage is slower.
    parser.add_argument("--every", type=int, default=50)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
    model.to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = {"model": model, "optimizer": optimizer}

    with Checkpointer(
        options.ckpt_dir, every_steps=options.every, termination=TerminationOptions()
    ) as checkpoints:
        restored = checkpoints.restore(state)
        print(f"rank {rank} starts after step {restored.step} from {restored.tier.value}", flush=True)
        for step in range(restored.step + 1, options.steps + 1):
            data = batch(step, rank).to(device)
            loss = torch.nn.functional.mse_loss(model(data), data)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpoints.step(step, state)
            print(f"rank {rank} step {step} loss {loss.item():.6f}", flush=True)
        # The interval's saves give way to training; the last one waits for storage.  What is there stays.
        checkpoints.save(options.steps, state, wait=timedelta(minutes=10))

    whole = [p.full_tensor() for p in model.parameters() if isinstance(p, DTensor)]
    weights = b"".join(p.detach().cpu().numpy().tobytes() for p in whole)
    print(f"rank {rank} weights {hashlib.sha256(weights).hexdigest()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
