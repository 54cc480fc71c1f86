# SPDX-License-Identifier: Apache-2.0
"""A DDP job in whose first attempt a rank stands still or is slow: ``hanging.py {loader,stopped,slow}``."""

from __future__ import annotations

import os
import signal
import sys
import threading

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

from resiliency.progress import report_step, watch_rank

KIND = sys.argv[1]
FIRST = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
RANK = int(os.environ["RANK"])
#: One of them stands still at this step, another one evaluates after it.
STEP, STEPS, BATCH = 20, 40 if KIND != "slow" else 100_000, 4
EVALUATION_S = 9.0
#: After each step: the launcher looks at them twice a second.
PAUSE_S = 0.1


class Samples(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return STEPS * BATCH

    def __getitem__(self, index: int) -> torch.Tensor:
        if KIND == "loader" and FIRST and RANK == 1 and index == STEP * BATCH:
            threading.Event().wait()
        if KIND == "slow" and RANK == 1:
            threading.Event().wait(0.01)
        return torch.ones(8)


def evaluate() -> None:
    threading.Event().wait(EVALUATION_S)  # on a device, say


def main() -> None:
    watch_rank()
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    for step, batch in enumerate(DataLoader(Samples(), batch_size=BATCH)):
        if KIND == "stopped" and step == 0 and RANK == 1:
            print(f"rank 1 pid {os.getpid()} stops", flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)
        model(batch).sum().backward()
        optimizer.step()
        report_step(step)
        if KIND == "loader" and RANK == 0:  # messages, which gloo counts with collectives
            dist.send(torch.zeros(1), 1)
        elif KIND == "loader" and RANK == 1:
            dist.recv(torch.zeros(1), 0)
        if KIND == "stopped" and step < STEP:
            threading.Event().wait(PAUSE_S)
        if KIND == "stopped" and step == STEP and RANK == 0:
            evaluate()
    dist.barrier()
    print(f"rank {RANK} finished", flush=True)
    os._exit(0)  # no teardown: on a busy machine it takes as long as a hang here


if __name__ == "__main__":
    main()
