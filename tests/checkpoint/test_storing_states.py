# SPDX-License-Identifier: Apache-2.0
"""Real states, captured by the walker, through both formats and back; stock torch loads them."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from resiliency.checkpoint.commit import CheckpointFormat
from resiliency.checkpoint.dcp_format import DcpFormat
from resiliency.checkpoint.dcp_leaves import PlainLeaves
from resiliency.checkpoint.local_format import LocalFormat
from resiliency.checkpoint.reader import CheckpointReader
from resiliency.checkpoint.state import StateWalker, materialize, restore_into
from resiliency.checkpoint.storage import LocalStorage
from resiliency.checkpoint.table import Shard
from resiliency.checkpoint.torch_record import memory_of
from tests.checkpoint.storage_builders import save

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def shard_of(state: object) -> Shard:
    snapshot = StateWalker().snapshot(state)
    buffer = memoryview(mmap.mmap(-1, max(snapshot.layout.size_bytes, 1)))
    for entry, source in zip(snapshot.layout.entries, snapshot.sources, strict=True):
        buffer[entry.offset_bytes : entry.end_bytes] = memory_of(source.detach().contiguous())
    return Shard(layout=snapshot.layout, values=snapshot.values, step=7, rank=0, world_size=1, buffer=buffer)


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 5))
    model[2].weight = torch.nn.Parameter(model[0].weight.detach().t().clone())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    for _ in range(2):
        model(torch.randn(4, 5)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    return {
        "model": model.state_dict(),
        "optim": optimizer.state_dict(),
        "progress": {"samples": 12, "names": ["a", "b"]},
    }


@pytest.mark.parametrize(
    "format", [LocalFormat(), DcpFormat(leaves=PlainLeaves())], ids=lambda item: item.name
)
def test_a_trained_state_comes_back_bit_for_bit(tmp_path: Path, format: CheckpointFormat[Shard]) -> None:
    state = state_of(*trained())
    save(LocalStorage(tmp_path), format, [shard_of(state)])
    shard = CheckpointReader(LocalStorage(tmp_path), 7).read_shard(0)
    made = materialize(shard)
    assert made["progress"] == state["progress"]
    other_model, other_optimizer = trained()
    other = state_of(other_model, other_optimizer)
    restore_into(other, shard)
    for found in (made, other):
        assert all(torch.equal(found["model"][key], value) for key, value in state["model"].items())
        for number, entry in state["optim"]["state"].items():
            assert all(torch.equal(found["optim"]["state"][number][key], entry[key]) for key in entry)


def test_stock_torch_loads_a_trained_state_with_its_plain_values(tmp_path: Path) -> None:
    state = state_of(*trained())
    save(LocalStorage(tmp_path), DcpFormat(leaves=PlainLeaves()), [shard_of(state)])
    other = state_of(*trained())
    other["progress"] = {"samples": 0, "names": []}
    other["optim"]["param_groups"][0]["lr"] = 9.0
    dcp.load(other, checkpoint_id=tmp_path / "step=7", no_dist=True)
    assert other["progress"] == {"samples": 12, "names": ["a", "b"]}
    assert other["optim"]["param_groups"] == state["optim"]["param_groups"]
    assert all(torch.equal(other["model"][key], value) for key, value in state["model"].items())
    moments = state["optim"]["state"][0]
    assert all(torch.equal(other["optim"]["state"][0][key], moments[key]) for key in moments)
