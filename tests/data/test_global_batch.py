# SPDX-License-Identifier: Apache-2.0
"""An optimizer step of the same samples gives the same model on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from resiliency.data import (
    EpochOrder,
    GlobalBatch,
    InterruptableDistributedSampler,
    accumulate,
    advancing_steps,
)
from resiliency.testing.rank_pool import RankPool

#: Three epochs of 7 steps, whose last one has 5 samples: fewer than some worlds have ranks.
SIZE, BATCH, STEPS = 53, 8, 20


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(SIZE, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(features, features.sum(1, keepdim=True).sin())


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1)).double()


def new_optimizer(name: str, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    if name == "SGD":
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    return torch.optim.AdamW(parameters, lr=0.01)


class Operations(TorchDispatchMode):
    """The names of all operations inside, the collectives among them."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(operation))
        return operation(*args, **(kwargs or {}))


def train_steps(
    model: nn.Module, loader: Any, optimizer: Any, sampler: InterruptableDistributedSampler, steps: int
) -> None:
    for epoch in range(sampler.epoch, 10):
        sampler.set_epoch(epoch)
        for step in advancing_steps(loader, optimizer):
            for (features, wanted), weight in accumulate(model, step):
                (nn.functional.mse_loss(model(features), wanted) * weight).backward()
            optimizer.step()
            optimizer.zero_grad()
            steps -= 1
            if not steps:
                return


def train(
    rank: int,
    world: int,
    kind: str,
    optimizer_name: str,
    micro: int,
    start: dict[str, Any] | None,
    steps: int,
) -> dict[str, Any]:
    """Train this many steps from `start`; returns what a checkpoint would hold, and the reductions of
    gradients."""
    data, model = dataset(), new_model()
    sampler = InterruptableDistributedSampler(data, global_batch=GlobalBatch(BATCH, micro))
    assert (sampler.rank, sampler.num_replicas) == (rank, world)
    if start:
        model.load_state_dict(start["model"])
        sampler.load_state_dict(start["sampler"])
    reductions = 0
    if kind == "FSDP2":
        from torch.distributed.fsdp import fully_shard

        for layer in (model[0], model[2], model):  # type: ignore[index]
            fully_shard(layer)
        trained: nn.Module = model
    else:
        trained = DistributedDataParallel(model)

        def reduce(bucket: Any) -> torch.futures.Future[Tensor]:
            nonlocal reductions
            reductions += 1
            return allreduce_hook(torch.distributed.group.WORLD, bucket)

        trained.register_comm_hook(None, lambda _, bucket: reduce(bucket))
        # DDP orders its buckets anew after its first backward, and with it the sum over three ranks and more:
        # a run that begins here and one that comes here agree to the last bit only behind that.
        trained(data.tensors[0][:1]).sum().backward()
        trained.zero_grad()
        reductions = 0
    optimizer = new_optimizer(optimizer_name, model.parameters())
    if start and start["optimizer"]:
        optimizer.load_state_dict(start["optimizer"])
    loader = DataLoader(data, batch_sampler=sampler.micro_batches())
    if kind == "FSDP2":
        with Operations() as operations:
            train_steps(trained, loader, optimizer, sampler, steps)
        scattered = sum("reduce_scatter" in name for name in operations.names)
        reductions, rest = divmod(scattered, 2)  # one for each layer; the model around them has no more
        assert rest == 0
    else:
        train_steps(trained, loader, optimizer, sampler, steps)
    weights = {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in model.state_dict().items()
    }
    return {
        "model": weights,
        "optimizer": optimizer.state_dict() if kind == "DDP" else None,
        "sampler": sampler.state_dict(),
        "reductions": reductions,
    }


def alone(optimizer_name: str, steps: int) -> dict[str, Tensor]:
    """The same training in one process, by torch alone: each step is the mean loss of a row."""
    features, wanted = dataset().tensors
    model = new_model()
    optimizer = new_optimizer(optimizer_name, model.parameters())
    rows: list[Tensor] = []
    for epoch in range(3):
        rows += EpochOrder(SIZE, epoch=epoch).at(torch.arange(SIZE)).split(BATCH)
    for row in rows[:steps]:
        nn.functional.mse_loss(model(features[row]), wanted[row]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def differences(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    assert found.keys() == wanted.keys()
    return max(float((found[name] - wanted[name]).abs().max()) for name in wanted)


def test_ranks_with_unequal_shares_run_equally_many_micro_batches_d57() -> None:
    for samples in range(1, 20):
        for world in range(1, 9):
            for micro in range(4):
                batch = GlobalBatch(samples, micro)
                counts = {len(batch.micro_batches(rank, world)) for rank in range(world)}
                assert len(counts) == 1, (samples, world, micro)


@pytest.mark.parametrize("row", [BATCH, 5])
def test_the_gradient_of_a_row_is_the_same_for_every_world_and_every_micro_batch(row: int) -> None:
    features, wanted = (tensor[:row] for tensor in dataset().tensors)
    model = new_model()

    def gradients(loss: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(loss, list(model.parameters())))

    whole = gradients(nn.functional.mse_loss(model(features), wanted))
    for world in range(1, 9):
        for micro in range(BATCH + 1):
            batch = GlobalBatch(BATCH, micro)
            total = torch.zeros((), dtype=torch.float64)
            for rank in range(world):
                for part in batch.micro_batches(rank, world, row):
                    taken = slice(part.start, part.stop)
                    total = (
                        total + nn.functional.mse_loss(model(features[taken]), wanted[taken]) * part.weight
                    )
            for mine, theirs in zip(gradients(total / world), whole, strict=True):
                assert float((mine - theirs).abs().max()) < 1e-12, (world, micro)


@pytest.mark.parametrize("world", range(1, 9))
def test_twenty_steps_equal_those_of_one_process_on_worlds_1_to_8_d41_d42(
    world: int, rank_pool: RankPool
) -> None:
    for optimizer, micro in (("SGD", world % 5), ("AdamW", 3)):
        reports = rank_pool.run(train, world, world, "DDP", optimizer, micro, None, STEPS, timeout=90).values
        wanted = alone(optimizer, STEPS)
        for report in reports:
            assert differences(report["model"], wanted) < 1e-12
            assert report["reductions"] == STEPS
            assert report["sampler"] == reports[0]["sampler"]
            assert report["sampler"]["position"] == 48


@pytest.mark.parametrize("world", [2, 5])
def test_twenty_steps_of_fsdp2_equal_those_of_one_process(world: int, rank_pool: RankPool) -> None:
    reports = rank_pool.run(train, world, world, "FSDP2", "AdamW", 1, None, STEPS, timeout=120).values
    for report in reports:
        assert differences(report["model"], alone("AdamW", STEPS)) < 1e-12
        assert report["reductions"] == STEPS


def test_a_run_that_is_interrupted_and_resized_is_the_run_of_one_process(rank_pool: RankPool) -> None:
    state: dict[str, Any] | None = None
    for world, steps in ((4, 5), (2, 6), (3, 9)):
        state = rank_pool.run(train, world, world, "DDP", "AdamW", 2, state, steps, timeout=90).values[-1]
    assert state is not None
    assert differences(state["model"], alone("AdamW", STEPS)) < 1e-12


def test_an_interrupted_run_is_bit_for_bit_the_uninterrupted_one_of_the_same_world(
    rank_pool: RankPool,
) -> None:
    def run(start: dict[str, Any] | None, steps: int) -> dict[str, Any]:
        return rank_pool.run(train, 3, 3, "DDP", "AdamW", 2, start, steps, timeout=90).values[0]

    whole = run(None, STEPS)
    resumed = run(run(None, 9), STEPS - 9)
    assert differences(resumed["model"], whole["model"]) == 0.0
    assert resumed["sampler"] == whole["sampler"]


def test_a_list_of_pairs_is_a_step_and_a_module_on_one_rank_needs_no_reduction() -> None:
    model = nn.Linear(1, 1, bias=False)
    pairs = [(torch.ones(1, 1), 0.25), (torch.ones(1, 1) * 2, 0.75)]
    for batch, weight in accumulate(model, pairs):
        (model(batch).sum() * weight).backward()
    assert model.weight.grad is not None
    assert float(model.weight.grad) == 1.75
