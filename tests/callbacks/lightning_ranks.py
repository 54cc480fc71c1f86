# SPDX-License-Identifier: Apache-2.0
"""lightning_ranks.py DIRECTORY ACCUMULATE DIE_AT: one rank of the example, which notes what each step was
made of.

It trains for two epochs of 96 samples, 16 in a step, and is killed in step DIE_AT (0: never).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from lightning_data import Regression, train


class Noting(Regression):
    def __init__(self, directory: str, die_at: int) -> None:
        super().__init__()
        self.directory, self.die_at = directory, die_at

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        step = self.trainer.global_step + 1
        if step == self.die_at:
            self.trainer.strategy.barrier()  # else the first to die fails the others
            os.kill(os.getpid(), signal.SIGKILL)
        loss = super().training_step(batch)
        note = {"step": step, "numbers": batch[0].tolist(), "loss": float(loss.detach())}
        with open(Path(self.directory) / f"rank{self.global_rank}.jsonl", "a") as file:
            file.write(json.dumps(note) + "\n")
        return loss


def main() -> None:
    warnings.simplefilter("ignore")
    directory, accumulate, die_at = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    model = Noting(directory, die_at)
    trainer = train(model, directory, accumulate=accumulate, size=96, epochs=2, every=2)
    print(f"ended at step {trainer.global_step}", flush=True)


if __name__ == "__main__":
    main()
