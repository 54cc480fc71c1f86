# SPDX-License-Identifier: Apache-2.0
"""Train with DDP and checkpoints that survive a kill.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # else gloo cannot reconnect when torchrun restarts ranks
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/ddp_train.py --ckpt-dir /tmp/ckpt

It trains on a GPU per rank where there are GPUs, else on the CPU (CUDA_VISIBLE_DEVICES= asks for that).
Kill a rank while it runs: torchrun restarts the ranks, and they go on from the step that this host
still holds in memory.  Kill everything and start it again: it goes on from the newest checkpoint.
Send a rank SIGTERM: all stop at the same step, which is saved.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

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
    parser.add_argument("--step-s", type=float, default=0.0, help="added to each step, to watch it train")
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
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    state = {"model": model, "optimizer": optimizer}

    with Checkpointer(
        options.ckpt_dir, every_steps=options.every, replicated=True, termination=TerminationOptions()
    ) as checkpoints:
        restored = checkpoints.restore(state)
        print(f"rank {rank} starts after step {restored.step} from {restored.tier.value}", flush=True)
        for step in range(restored.step + 1, options.steps + 1):
            time.sleep(options.step_s)
            data = batch(step, rank).to(device)
            loss = torch.nn.functional.mse_loss(ddp(data), data)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpoints.step(step, state)
            print(f"rank {rank} step {step} loss {loss.item():.6f}", flush=True)
        # The interval's saves give way to training; the last one waits for storage.  What is there stays.
        checkpoints.save(options.steps, state, wait=timedelta(minutes=10))

    weights = b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())
    print(f"rank {rank} weights {hashlib.sha256(weights).hexdigest()}", flush=True)
    del ddp  # with gloo it must not outlive its group: the end of both may wait for each other
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
