# SPDX-License-Identifier: Apache-2.0
"""Saves through `torch.distributed.checkpoint`, and a small state for them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from resiliency.checkpoint.storage.interface import Storage
from resiliency.checkpoint.torch_dcp import DcpStorageWriter
from tests.checkpoint.tensor_builders import random_tensor


def small_state(step: int) -> dict[str, Any]:
    return {"w": random_tensor(torch.float32, (37, 11), step), "step": step, "b": torch.full((3,), step)}


def store(storage: Storage, step: int, **options: Any) -> None:
    writer = DcpStorageWriter(f"/x/step={step}", threads=1, open_storage=lambda root: storage, **options)
    dcp.save(small_state(step), storage_writer=writer)
