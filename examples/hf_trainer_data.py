# SPDX-License-Identifier: Apache-2.0
"""Train with Hugging Face's Trainer, on exactly the same samples after a crash and on fewer ranks.

    torchrun --nproc-per-node 2 examples/hf_trainer_data.py --output-dir /tmp/hf --accumulate 1

Kill it in the middle and start it again: it goes on from its newest checkpoint, in the middle of the epoch.
Start it on one rank with ``--accumulate 2``: a step is made of the samples that two ranks would take.
With ``--accumulate 1`` on one rank it is refused: half the samples in a step would be another position.
"""

from __future__ import annotations

import argparse
import logging
import os

import torch
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from resiliency.callbacks.hf_data import ResumableDataMixin


class Numbers(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Inputs as a function of their number; a real one reads files."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(number)
        inputs = torch.randn(16, generator=generator)
        return {"inputs": inputs, "labels": inputs.sum()[None], "number": torch.tensor(number)}


class Regression(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(16, 1)

    def forward(
        self, inputs: torch.Tensor, labels: torch.Tensor, number: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        return {"loss": ((self.layer(inputs) - labels) ** 2).mean()}


class RegressionTrainer(ResumableDataMixin, Trainer):  # the mixin is all that changes
    pass


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output-dir", required=True)
    parser.add_argument("--accumulate", type=int, default=1, help="Batches in a step on each rank.")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    torch.manual_seed(0)
    arguments = TrainingArguments(
        output_dir=options.output_dir,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=options.accumulate,
        num_train_epochs=4,
        save_steps=10,
        save_total_limit=2,
        logging_steps=10,
        report_to="none",
        use_cpu=True,
        remove_unused_columns=False,
    )
    trainer = RegressionTrainer(model=Regression(), args=arguments, train_dataset=Numbers())
    last = get_last_checkpoint(options.output_dir) if os.path.isdir(options.output_dir) else None
    trainer.train(resume_from_checkpoint=last)


if __name__ == "__main__":
    main()
