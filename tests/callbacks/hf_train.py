# SPDX-License-Identifier: Apache-2.0
"""hf_train.py DIRECTORY ACCUMULATE DIE_AT: one rank of the example, which notes what each step was made of.

It trains for two epochs of 50 samples, 8 in a step, and is killed in step DIE_AT (0: never).
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from hf_trainer_data import Numbers, Regression, RegressionTrainer

from resiliency.errors import ConfigError

# Ranks on CPUs load their optimizer to "cpu:0", which torch has no rule for.
torch.serialization.register_package(
    0, lambda storage: None, lambda storage, location: storage if location == "cpu:0" else None
)


class Fifty(Numbers):
    def __len__(self) -> int:
        return 50


class NotingTrainer(RegressionTrainer):
    die_at = 0

    def training_step(self, model: Any, inputs: dict[str, torch.Tensor], *rest: Any) -> torch.Tensor:
        step = self.state.global_step + 1
        if step == self.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = super().training_step(model, inputs, *rest)
        note = {"step": step, "numbers": inputs["number"].tolist(), "loss": float(loss)}
        with open(Path(self.args.output_dir) / f"rank{self.args.process_index}.jsonl", "a") as file:
            file.write(json.dumps(note) + "\n")
        return loss


def main() -> None:
    directory, accumulate, die_at = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.manual_seed(0)
    arguments = TrainingArguments(
        output_dir=directory,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=accumulate,
        num_train_epochs=2,
        save_steps=5,
        learning_rate=0.01,
        report_to="none",
        use_cpu=True,
        remove_unused_columns=False,
        disable_tqdm=True,
    )
    trainer = NotingTrainer(model=Regression(), args=arguments, train_dataset=Fifty())
    trainer.die_at = die_at
    try:
        trainer.train(resume_from_checkpoint=get_last_checkpoint(directory))
    except ConfigError as error:
        print(f"refused: {error}", flush=True)
        return
    print(f"ended at step {trainer.state.global_step}", flush=True)


if __name__ == "__main__":
    main()
