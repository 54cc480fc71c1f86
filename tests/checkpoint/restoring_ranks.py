# SPDX-License-Identifier: Apache-2.0
"""Checkpointers of ranks that share a directory and a job."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch

from resiliency.checkpoint import Checkpointer, CheckpointerOptions
from resiliency.checkpoint.agent.client import LinkOptions
from resiliency.runtime import RunInfo


def state(value: float, size: int = 1000) -> dict[str, object]:
    return {"weights": torch.full((size,), float(value))}


def opened(directory: Path, job: str, rank: int = 0, world_size: int = 1) -> Checkpointer:
    return Checkpointer(
        directory,
        info=RunInfo(job_name=job, host="here", rank=rank, world_size=world_size),
        options=CheckpointerOptions(link=LinkOptions(grace=timedelta(seconds=5))),
    )
