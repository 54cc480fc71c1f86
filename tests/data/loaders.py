# SPDX-License-Identifier: Apache-2.0
"""A small dataset whose samples are their own numbers, and what a loop over it needs."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from resiliency.data import InterruptableDistributedSampler, optimizer_steps

SIZE = 22


class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


def loader_of(
    sampler: InterruptableDistributedSampler, batch_size: int | None = 4, **options: Any
) -> DataLoader[Any]:
    return DataLoader(Numbers(), batch_size=batch_size, sampler=sampler, **options)


def an_optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)


def end_with(rank_pid: int, worker: int) -> None:
    """In a worker of a loader: a rank that is killed at once leaves workers that do not know whose they
    were."""
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != rank_pid:
        os._exit(1)


def join_feeders() -> None:
    """A loader does not wait for the threads that feed its workers, and the pool of ranks wants none left."""
    for thread in threading.enumerate():
        if thread.name == "QueueFeederThread":
            thread.join(60)


def listener_count(optimizer: torch.optim.Optimizer) -> int:
    """Loops that a step of the optimizer counts for."""
    return len(optimizer_steps._LISTENERS.get(optimizer, ()))
