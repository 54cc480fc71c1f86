# SPDX-License-Identifier: Apache-2.0
"""The recipes of docs/loading-elsewhere.md, as they are printed there."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from resiliency.checkpoint import Checkpointer, CheckpointerOptions
from resiliency.checkpoint.agent.client import LinkOptions
from resiliency.runtime import RunInfo
from resiliency.testing.rank_pool import RankPool

PAGE = Path(__file__).parents[2] / "docs" / "loading-elsewhere.md"


def recipes() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(block, found)  # noqa: S102 - the page is the thing to test
    return found


def built(kind: str) -> tuple[torch.nn.Module, torch.nn.Module, torch.optim.Optimizer]:
    """What trains, what is saved, and the optimizer."""
    torch.manual_seed(1)
    model: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    trains = model
    if kind == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    elif kind == "ddp":
        trains = DistributedDataParallel(model)
    return trains, model, torch.optim.AdamW(model.parameters(), lr=0.1)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()


def content(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    moments = [optimizer.state[p] for p in model.parameters()]
    everything = [*model.parameters(), *(each[key] for each in moments for key in sorted(each))]
    return [whole(tensor) for tensor in everything]


def state_of(named: bool, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return (
        {"app": recipes()["Named"](model, optimizer)} if named else {"model": model, "optimizer": optimizer}
    )


def save(rank: int, root: str, kind: str, named: bool) -> list[torch.Tensor]:
    trains, model, optimizer = built(kind)
    for _ in range(2):
        trains(torch.ones(4, 5)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with Checkpointer(
        Path(root) / "ckpt",
        replicated=kind == "ddp",
        optimizers=[optimizer],
        info=RunInfo(job_name="elsewhere", host="here", rank=rank, world_size=2, local_rank=rank),
        options=CheckpointerOptions(arena_root=Path(root), link=LinkOptions(grace=timedelta(seconds=2))),
    ) as checkpoints:
        assert checkpoints.save(5, state_of(named, model, optimizer), wait=timedelta(seconds=60)).wait(
            timedelta(seconds=60)
        )
        _, again, fresh = built(kind)
        assert checkpoints.restore(state_of(named, again, fresh)).step == 5
        dist.barrier()
    expected = content(model, optimizer)
    assert all(map(torch.equal, content(again, fresh), expected))
    return expected


def load(rank: int, root: str, kind: str, named: bool) -> list[torch.Tensor]:
    _, model, optimizer = built(kind)
    path = f"{root}/ckpt/step=5"
    if named:
        dcp.load(state_of(named, model, optimizer), checkpoint_id=path)
    else:
        recipes()["load_by_number"](path, model, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.1
    return content(model, optimizer)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "named"),
    [
        pytest.param("ddp", True, id="ddp-by name"),
        pytest.param("fsdp2", False, id="fsdp2-by number"),
        pytest.param("ddp", False, id="ddp-by number", marks=pytest.mark.thorough("FSDP2 by number is near")),
        pytest.param("fsdp2", True, id="fsdp2-by name", marks=pytest.mark.thorough("DDP by name is near")),
    ],
)
def test_model_and_optimizer_are_loaded_elsewhere_as_the_page_says(
    kind: str, named: bool, tmp_path: Path, rank_pool: RankPool
) -> None:
    root = str(tmp_path)
    saved = rank_pool.run(save, 2, root, kind, named, timeout=120, operation_timeout=60).values
    other = "fsdp2" if kind == "ddp" else "plain"
    for ranks, form in ((1, other), (3, kind)):
        for found in rank_pool.run(load, ranks, root, form, named, timeout=90).values:
            assert len(found) == len(saved[0]) == 4 + 3 * 4
            assert all(map(torch.equal, found, saved[0]))
