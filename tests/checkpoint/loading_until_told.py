# SPDX-License-Identifier: Apache-2.0
"""A small training program whose batches come from worker processes, until it is told to end.

python -m tests.checkpoint.loading_until_told DIRECTORY fork|spawn|forkserver [persistent]

"""

from __future__ import annotations

import os
import sys
import threading

import torch
from torch.utils.data import DataLoader, Dataset

from resiliency.checkpoint import Checkpointer, TerminationOptions

BATCHES = 6


class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return BATCHES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((8,), float(index))


def main() -> None:
    directory, context, *how = sys.argv[1:]
    weights = torch.nn.Parameter(torch.zeros(8))
    optimizer = torch.optim.AdamW([weights], lr=0.1)
    state = {"weights": weights, "optimizer": optimizer}
    with Checkpointer(directory, termination=TerminationOptions()) as checkpoints:
        loader = DataLoader(
            Numbers(),
            num_workers=1 if context == "spawn" else 2,  # which import torch, one after the other
            multiprocessing_context=context,
            persistent_workers="persistent" in how,
        )
        step = checkpoints.restore(state).step
        while True:
            for batch in loader:
                (weights * batch.mean()).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                threading.Event().wait(0.01)  # some work
                step += 1
                if step == BATCHES + 2:
                    print("workers of process", os.getpid(), "are there", flush=True)
                checkpoints.step(step, state)


if __name__ == "__main__":
    main()
