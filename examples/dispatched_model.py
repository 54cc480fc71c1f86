# SPDX-License-Identifier: Apache-2.0
"""Train a model with DDP on ranges that a data server gives out, with a checkpoint that says which it has.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # else gloo cannot reconnect when torchrun restarts ranks
    export DATA_TOKEN=$(openssl rand -hex 16)
    python examples/dispatched_model.py serve --book /tmp/book --port 29700
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/dispatched_model.py train \
        --port 29700 --checkpoint /tmp/model.pt

Kill a rank, all of them or the server while it runs, and start it again, with another --nproc-per-node if
you like: what was used above the checkpoint is given out again. The script counts how often each sample was
trained on, and ends with an error if that is not once.
"""

from __future__ import annotations

import argparse
import logging
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from resiliency.data import DataClient, DataServer, SampleRange, SampleRanges, atomic_torch_save

BATCH = 8


def serve(options: argparse.Namespace) -> None:
    source = SampleRanges(size=options.size, range_size=20, order="sequential", dataset="noise")
    address = (options.host, options.port)
    with DataServer(source, options.book, token=os.environ["DATA_TOKEN"], address=address) as server:
        print(f"serving on port {server.address[1]}", flush=True)
        server.wait()


def say(line: str) -> None:
    """Print a line in one write: all ranks share the terminal."""
    print(f"{line}\n", end="", flush=True)


def train(options: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    features = torch.randn(options.size, 16, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 16)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    trained = torch.zeros(options.size, dtype=torch.int64)  # how often on each sample; part of the model
    step, ranges = 0, None
    if options.checkpoint.exists():
        saved = torch.load(options.checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        trained, step, ranges = saved["trained"], saved["step"], saved["ranges"]
    say(f"rank {rank} of {dist.get_world_size()} starts after step {step}")
    say(f"rank {rank} is process {os.getpid()}")

    address, token = (options.host, options.port), os.environ["DATA_TOKEN"]
    with DataClient(address, f"rank{rank}", token=token) as client:
        client.rollback(ranges)  # where the model is: the checkpoint, or None for the start
        rest: SampleRange | None = None
        while True:
            if rest is None:
                found = client.try_next_range()
                rest = found if isinstance(found, SampleRange) else None
            batch = rest.first(min(BATCH, len(rest))) if rest is not None else None
            if batch is not None and rest is not None:
                left = len(rest) - len(batch)
                client.done(batch, step=step + 1)  # before the collective that ends the step
                rest = SampleRange(batch.stop, rest.stop, rest.epoch) if left else None
            counts = torch.zeros_like(trained)
            indexes = range(batch.start, batch.stop) if batch is not None else range(0)
            counts[list(indexes)] = 1
            dist.all_reduce(counts)
            if not counts.any():  # no rank has a sample: the data end, or a lost process holds the rest
                rest = client.next_range() if rank == 0 else None
                goes_on = torch.tensor(rest is not None)
                dist.broadcast(goes_on, 0)
                if not goes_on:
                    break
                continue
            # A rank without samples takes part with a loss of 0. Each sample has the same weight.
            inputs = features[list(indexes)] if indexes else features[:1]
            errors = (ddp(inputs) - inputs).square().mean(dim=1)
            weight = dist.get_world_size() / counts.sum() if indexes else 0.0
            (errors.sum() * weight).backward()
            optimizer.step()
            optimizer.zero_grad()
            trained += counts
            step += 1
            if rank == 0:
                say(f"step {step}: {int(counts.sum())} samples")
            if step % options.every == 0:
                save(options.checkpoint, client, step, model, optimizer, trained)
        save(options.checkpoint, client, step, model, optimizer, trained)
    if not bool((trained == 1).all()):
        raise SystemExit(f"samples were trained on {trained.unique().tolist()} times")
    say(f"rank {rank} done: every sample once")
    del ddp  # with gloo it must not outlive its group: the end of both may wait for each other
    dist.destroy_process_group()


def save(
    path: Path,
    client: DataClient,
    step: int,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    trained: torch.Tensor,
) -> None:
    """A checkpoint of a step that is over, with what its model was not trained on."""
    ranges = client.commit(step)  # on all ranks; it is the same on all of them
    if dist.get_rank() == 0:
        parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "trained": trained}
        atomic_torch_save({**parts, "step": step, "ranges": ranges}, path)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    server, trainer = commands.add_parser("serve"), commands.add_parser("train")
    for command in (server, trainer):
        command.add_argument("--host", default="127.0.0.1")
        command.add_argument("--port", type=int, required=True)
        command.add_argument("--size", type=int, default=2000)
    server.add_argument("--book", required=True)
    server.set_defaults(run=serve)
    trainer.add_argument("--checkpoint", type=Path, required=True)
    trainer.add_argument("--every", type=int, default=5)
    trainer.set_defaults(run=train)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
