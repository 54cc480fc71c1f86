# SPDX-License-Identifier: Apache-2.0
"""Which memory counts as an optimizer's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from resiliency.checkpoint.capture.owned_memory import OwnedMemory, Owners

pytestmark = pytest.mark.leaks(
    "variables", "descriptors", reason="torch's optimizers set a cache, and gloo's mesh keeps its socket"
)


def owned_by(*parameters: torch.Tensor, steps: int = 0) -> OwnedMemory:
    optimizer = torch.optim.AdamW(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    for _ in range(steps):
        optimizer.step()
    return OwnedMemory.of([optimizer])


def test_parameters_that_are_trained_are_owned_with_their_views_and_others_are_not() -> None:
    weight, frozen = torch.nn.Parameter(torch.ones(8, 4)), torch.nn.Parameter(torch.ones(8), False)
    owned = OwnedMemory.of([torch.optim.SGD([weight, frozen])])
    assert owned.holds(weight)
    assert owned.holds(weight.detach()[2:5, 1:])
    assert not owned.holds(frozen)
    assert not owned.holds(weight.detach().clone())
    assert not OwnedMemory.of([]).holds(weight)


def test_what_an_optimizer_keeps_is_owned_however_deep_it_lies() -> None:
    weight = torch.nn.Parameter(torch.ones(8))
    optimizer = torch.optim.SGD([weight])
    kept = {"moment": torch.ones(8), "history": [(torch.ones(3), torch.ones(4))]}
    before = OwnedMemory.of([optimizer])
    optimizer.state[weight] = {**kept, "step": 3, "sparse": torch.eye(3).to_sparse()}
    after = OwnedMemory.of([optimizer])
    assert before != after == OwnedMemory.of([optimizer])
    for tensor in (kept["moment"], *kept["history"][0]):  # type: ignore[misc]
        assert after.holds(tensor)
        assert not before.holds(tensor)


def test_a_buffer_between_the_parameters_of_one_storage_is_not_owned() -> None:
    flat = torch.zeros(96)
    first, buffer, last = flat[:32], flat[32:64], flat[64:]
    owned = owned_by(first.requires_grad_(), last.requires_grad_())
    assert owned.holds(first)
    assert owned.holds(last)
    assert not owned.holds(buffer)
    assert not owned.holds(flat)
    assert owned_by(*(part.detach().requires_grad_() for part in (first, buffer, last))).holds(flat)


def test_a_parameter_with_gaps_owns_nothing_that_lies_in_them() -> None:
    table = torch.zeros(8, 4)
    assert not owned_by(table[:, :2].requires_grad_()).holds(table[0:1, 2:])
    transposed = torch.zeros(8, 4).t().requires_grad_()
    assert owned_by(transposed).holds(transposed.detach().t())


def test_what_is_owned_is_looked_up_again_when_something_moved_was_frozen_or_is_new() -> None:
    weight = torch.nn.Parameter(torch.ones(8))
    optimizer = torch.optim.SGD([weight])
    owners, addresses = Owners(), object()
    first = owners.memory([optimizer], addresses)
    assert first is not None
    assert owners.memory([optimizer], addresses) is first
    weight.data = torch.ones(8)
    moved = owners.memory([optimizer], object())
    assert moved is not None
    assert moved.holds(weight)
    optimizer.state[weight] = {"moment": torch.ones(8)}
    assert owners.memory([optimizer], addresses) == OwnedMemory.of([optimizer]) != moved
    weight.requires_grad = False
    frozen = owners.memory([optimizer], addresses)
    assert frozen is not None
    assert not frozen.holds(weight)
    assert owners.memory([optimizer, object()], addresses) is None
    assert owners.memory([], addresses) is None


def test_shards_of_fsdp_are_owned_by_the_rank_that_holds_them(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        model = fully_shard(torch.nn.Linear(3, 5), mesh=init_device_mesh("cpu", (1,)))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        owned = OwnedMemory.of([optimizer])
        moments = [value for state in optimizer.state_dict()["state"].values() for value in state.values()]
        for tensor in (*model.state_dict().values(), *moments):
            assert owned.holds(tensor.to_local() if hasattr(tensor, "to_local") else tensor)
    finally:
        dist.destroy_process_group()
