# SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of `DcpStorageWriter` and `DcpStorageReader`."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from resiliency.checkpoint.storage.interface import Storage
from resiliency.checkpoint.storage.posix import LocalStorage
from resiliency.checkpoint.torch_dcp import DcpStorageReader, DcpStorageWriter
from resiliency.checkpoint.torch_dcp import commit as dcp_commit
from resiliency.testing.storage import FaultyStorage, StorageFault, StorageFaultKind


def trained(steps: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model cut over all ranks; its whole parameters depend on `steps` and not on how it is cut."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for number in range(steps):
        generator = torch.Generator().manual_seed(number)
        model(torch.randn(4, 5, generator=generator)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def whole(state: Any) -> Any:
    """The state with every sharded tensor put together."""
    if isinstance(state, DTensor):
        return state.full_tensor()
    if isinstance(state, dict):
        return {key: whole(value) for key, value in state.items()}
    return state


def save_trained(rank: int, path: str, stock: bool) -> Any:
    model, optimizer = trained(2)
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optim": moments, "samples": 12}
    if stock:
        dcp.save(state, checkpoint_id=path)
    else:
        dcp.save(state, storage_writer=DcpStorageWriter(path))
    return whole(state)


def load_trained(rank: int, path: str, stock: bool) -> Any:
    model, optimizer = trained(1)
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optim": moments, "samples": 0}
    if stock:
        dcp.load(state, checkpoint_id=path)
    else:
        dcp.load(state, storage_reader=DcpStorageReader(path))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    weights, moments = get_state_dict(model, optimizer)
    return whole({"model": weights, "optim": moments, "samples": state["samples"]})


def rows(rank: int, fill: float) -> dict[str, Any]:
    """Uneven rows, a tensor of which all ranks but the first hold nothing, and one that all hold."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        "rows": distribute_tensor(torch.arange(39.0).view(13, 3) * fill, mesh, [Shard(0)]),
        "few": distribute_tensor(torch.full((1, 3), fill), mesh, [Shard(0)]),
        "same": distribute_tensor(torch.full((5,), fill), mesh, [Replicate()]),
    }


def failures_of(action: Callable[[], object]) -> dict[int, str]:
    """How torch reports a failure here: rank to class and text."""
    try:
        action()
    except CheckpointException as error:
        return {rank: f"{type(why).__name__}: {why}" for rank, (why, _) in error.failures.items()}
    return {}


def save_with_a_full_disk_at(
    rank: int, root: str, broken: int, operation: int
) -> tuple[dict[int, str], dict[int, str]]:
    fault = StorageFault(operation=operation, kind=StorageFaultKind.ERROR, errno=errno.ENOSPC)

    def open_storage(path: Path) -> Storage:
        return FaultyStorage(LocalStorage(path), fault) if rank == broken else LocalStorage(path)

    def save(writer: DcpStorageWriter) -> None:
        dcp.save(rows(rank, 2), checkpoint_id=f"{root}/step=2", storage_writer=writer)

    first = failures_of(lambda: save(DcpStorageWriter(open_storage=open_storage)))
    listed = sorted(os.listdir(root))
    dist.barrier()
    second = failures_of(lambda: save(DcpStorageWriter()))
    return first, second or dict(enumerate(listed))


def load_with_a_flipped_bit_at(rank: int, path: str, broken: int) -> dict[int, str]:
    fault = StorageFault(operation=3, kind=StorageFaultKind.BIT_FLIP)

    def open_storage(root: Path) -> Storage:
        storage = LocalStorage(root)
        return FaultyStorage(storage, fault, count_reads=True) if rank == broken else storage

    state = rows(rank, 0)
    return failures_of(
        lambda: dcp.load(state, storage_reader=DcpStorageReader(path, open_storage=open_storage))
    )


def load_rows(rank: int, path: str) -> dict[int, str] | dict[str, Any]:
    """What torch said, or else what was loaded."""
    state = rows(rank, 0)
    failures = failures_of(lambda: dcp.load(state, storage_reader=DcpStorageReader(path)))
    return failures or whole(state)


def rows_of(rank: int, fill: float) -> Any:
    return whole(rows(rank, fill))


def save_rows(rank: int, path: str) -> dict[int, str]:
    return failures_of(lambda: dcp.save(rows(rank, 2), storage_writer=DcpStorageWriter(path)))


def save_to_directories_of_their_own(rank: int, root: str) -> dict[int, str]:
    timeouts, dcp_commit.SEEN_WITHIN = dcp_commit.SEEN_WITHIN, timedelta(milliseconds=200)
    try:
        return save_rows(rank, f"{root}/host{rank}/step=2")
    finally:
        dcp_commit.SEEN_WITHIN = timeouts
