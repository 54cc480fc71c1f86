# SPDX-License-Identifier: Apache-2.0
"""A Lightning training whose model counts how often it saw each sample; it can kill itself.

    python -m tests.callbacks.lightning_data DIRECTORY EPOCHS DIE_AT

DIE_AT: a number of micro-batches over all epochs of this process, after which it is killed in the middle of
the next one; or "epoch", at the end of its first epoch; or "never".
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from pathlib import Path

SIZE, BATCH = 50, 4


def main(directory: Path, epochs: int, die_at: str) -> None:
    warnings.simplefilter("ignore")
    import torch
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.utils.data import DataLoader, TensorDataset

    from resiliency.callbacks.data_progress import DataProgressCallback
    from resiliency.data import InterruptableDistributedSampler

    class Counting(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = torch.nn.Linear(3, 1, dtype=torch.float64)
            self.register_buffer("seen", torch.zeros(SIZE, dtype=torch.int64))
            self.batches = 0
            self.in_gradients: list[torch.Tensor] = []

        def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
            if str(self.batches) == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            self.batches += 1
            self.in_gradients.append(batch[0])
            return self.layer(batch[1]).square().mean()

        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            self.seen[torch.cat(self.in_gradients)] += 1
            self.in_gradients.clear()

        def on_train_epoch_end(self) -> None:
            if die_at == "epoch":
                os.kill(os.getpid(), signal.SIGKILL)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    features = torch.randn(SIZE, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    data = TensorDataset(torch.arange(SIZE), features)
    loader = DataLoader(data, batch_size=BATCH, sampler=InterruptableDistributedSampler(data, 1, 0, seed=3))
    checkpoints = ModelCheckpoint(directory, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        accumulate_grad_batches=2,
        callbacks=[checkpoints, DataProgressCallback(loader)],
        use_distributed_sampler=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(directory),
    )
    model = Counting()
    saved = sorted(directory.glob("step=*.ckpt"), key=lambda path: int(path.stem.partition("=")[2]))
    trainer.fit(model, loader, ckpt_path=saved[-1] if saved else None)
    weights = [value.hex() for value in model.layer.weight.flatten().tolist()]
    print(f"seen {sorted(set(model.seen.tolist()))} step {trainer.global_step} weights {weights}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
