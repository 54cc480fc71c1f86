# SPDX-License-Identifier: Apache-2.0
"""Train with Lightning's DDP, on exactly the same samples after a crash and on fewer ranks.

    torchrun --nproc-per-node 2 examples/lightning_data.py --output-dir /tmp/lightning --accumulate 1

Kill it in the middle and start it again: it goes on from its newest checkpoint, with the next sample.
Start it on one rank with ``--accumulate 2``: a step is made of the samples that two ranks would take.
"""

from __future__ import annotations

import argparse
import os

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from resiliency.callbacks.data_progress import DataProgressCallback
from resiliency.data import InterruptableDistributedSampler


class Regression(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(16, 1, dtype=torch.float64)

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        _, inputs = batch
        return (self.layer(inputs).squeeze(1) - inputs.sum(1)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def train(
    model: LightningModule, directory: str, *, accumulate: int, size: int, epochs: int, every: int
) -> Trainer:
    """From the newest checkpoint in `directory` to the end; `size` samples, 8 of each rank in a batch."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    inputs = torch.randn(size, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    data = TensorDataset(torch.arange(size), inputs)
    sampler = InterruptableDistributedSampler(data, num_replicas=world, rank=rank, seed=3)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    trainer = Trainer(
        accelerator="cpu",
        strategy="ddp" if world > 1 else "auto",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        num_nodes=world // int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        max_epochs=epochs,
        accumulate_grad_batches=accumulate,
        use_distributed_sampler=False,  # ours deals the samples
        callbacks=[
            DataProgressCallback(loader),
            ModelCheckpoint(directory, every_n_train_steps=every, save_last=True),
        ],
        logger=False,
        enable_progress_bar=False,
        default_root_dir=directory,
    )
    trainer.fit(model, loader, ckpt_path="last")
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output-dir", required=True)
    parser.add_argument("--accumulate", type=int, default=1, help="Batches in a step on each rank.")
    options = parser.parse_args()
    trainer = train(
        Regression(), options.output_dir, accumulate=options.accumulate, size=1000, epochs=4, every=10
    )
    print(f"ended at step {trainer.global_step}", flush=True)


if __name__ == "__main__":
    main()
