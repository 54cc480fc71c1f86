# SPDX-License-Identifier: Apache-2.0
"""Loops of accelerate: the prepared optimizer counts, and what deals samples again is refused by name."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.data_loader import (
    BatchSamplerShard,
    DataLoaderDispatcher,
    DataLoaderShard,
    prepare_data_loader,
    skip_first_batches,
)
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch.utils.data import BatchSampler, DataLoader

from resiliency.data import InterruptableDistributedSampler, advancing
from resiliency.errors import ConfigError
from resiliency.testing.processes import Command
from tests.data.loaders import SIZE, Numbers, an_optimizer, loader_of

Loader = DataLoader[Any]
ROOT = Path(__file__).parents[2]


@pytest.fixture
def accelerator() -> Iterator[accelerate.Accelerator]:
    """Its state is that of the process."""
    yield accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def plain() -> InterruptableDistributedSampler:
    return InterruptableDistributedSampler(Numbers(), 1, 0)


def train(accelerator: Any, loader: Loader, epochs: int, *, stop: int = -1) -> list[list[int]]:
    """Samples of each step; two batches are accumulated, and fewer at the end of an epoch."""
    sampler: Any = loader.batch_sampler.sampler  # type: ignore[union-attr]
    model = torch.nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    steps, gradients, positions = list[list[int]](), list[int](), []
    for epoch in range(sampler.epoch, epochs):
        sampler.set_epoch(epoch)
        for batch in advancing(loader, optimizer):
            with accelerator.accumulate(model):
                gradients += batch.tolist()
                accelerator.backward(model(batch[:, None].float()).mean())
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                steps.append(gradients)
                gradients = []
            positions.append(sampler.state_dict()["position"] + SIZE * sampler.state_dict()["epoch"])
            if len(steps) == stop:
                return steps
    assert positions == [0, 8, 8, 16, 16, 22, 22, 30, 30, 38, 38, 44][-len(positions) :]
    return steps


PREPARED: dict[str, Callable[[Any, Loader], Loader]] = {
    "one process": lambda accelerator, loader: accelerator.prepare(loader),
    "for one process": lambda accelerator, loader: prepare_data_loader(
        loader, accelerator.device, num_processes=1, process_index=0, put_on_device=True
    ),
}


@pytest.mark.parametrize("prepared", PREPARED)
def test_a_loop_of_accelerate_is_exact_also_where_it_goes_on_in_a_later_epoch(
    prepared: str, accelerator: Any
) -> None:
    loader = PREPARED[prepared](accelerator, loader_of(plain()))
    whole = train(accelerator, loader, 2)
    for stop in (2, 3, 4):  # within an epoch, at its end, and in the second one
        first = PREPARED[prepared](accelerator, loader_of(plain()))
        steps = train(accelerator, first, 2, stop=stop)
        state = first.batch_sampler.sampler.state_dict()  # type: ignore[union-attr]
        sampler = plain()
        sampler.load_state_dict(state)
        again = PREPARED[prepared](accelerator, loader_of(sampler))
        assert steps + train(accelerator, again, 2) == whole


def test_a_step_that_the_scaler_of_accelerate_skips_does_not_count(accelerator: Any) -> None:
    sampler, weight = plain(), torch.ones(1, requires_grad=True)
    scaler = torch.amp.GradScaler("cpu")
    optimizer = AcceleratedOptimizer(torch.optim.SGD([weight], lr=0.1), scaler=scaler)
    positions = []
    for number, _ in enumerate(advancing(loader_of(sampler), optimizer)):
        optimizer.zero_grad()
        scaler.scale((weight * (float("inf") if number == 1 else 1.0)).sum()).backward()
        optimizer.step()
        assert optimizer.step_was_skipped is (number == 1)
        positions.append(sampler.state_dict()["position"])
    assert positions == [4, 4, 12, 16, 20, 22]


def test_a_loader_that_deals_or_skips_what_the_sampler_has_dealt_is_refused_by_name(accelerator: Any) -> None:
    def saved() -> InterruptableDistributedSampler:
        sampler = plain()
        sampler.load_state_dict(sampler.state_dict() | {"position": 4})
        return sampler

    batches = BatchSampler(plain(), 4, False)
    loaders: dict[str, Loader] = {
        "BatchSamplerShard": DataLoaderShard(Numbers(), batch_sampler=BatchSamplerShard(batches, 2, 0)),
        "DataLoaderDispatcher": DataLoaderDispatcher(Numbers(), batch_sampler=batches),
        "SkipBatchSampler": skip_first_batches(loader_of(saved()), 1),
    }
    for name, loader in loaders.items():
        for loop in (iter(loader), advancing(loader, an_optimizer())):
            with pytest.raises(
                ConfigError, match=rf"{name}(?s:.)* accelerator.prepare|{name}.* skips batches"
            ):
                next(loop)


def test_an_epoch_that_accelerate_counts_from_0_after_a_restart_is_refused_without_advancing(
    accelerator: Any,
) -> None:
    sampler = plain()
    sampler.load_state_dict(sampler.state_dict() | {"epoch": 2})
    loader = DataLoaderShard(Numbers(), batch_sampler=BatchSampler(sampler, 4, False))
    with pytest.raises(ConfigError, match=r"epoch 0 was asked for.*accelerate"):
        next(iter(loader))
    assert len(list(advancing(loader, an_optimizer()))) == 6
    assert PartialState().num_processes == 1


@pytest.mark.parametrize("workers", [0, 1])
def test_a_resumed_loop_of_accelerate_draws_the_random_numbers_of_an_undisturbed_one(
    workers: int, accelerator: Any
) -> None:
    def drawn(state: Any) -> tuple[list[int], Any]:
        sampler, optimizer = plain(), an_optimizer()
        loader = accelerator.prepare(loader_of(sampler, num_workers=workers))
        torch.manual_seed(7)
        if state is not None:
            sampler.load_state_dict(state[0])
            torch.set_rng_state(state[1])
        numbers, saved = list[int](), None
        for _ in advancing(loader, optimizer):
            numbers.append(int(torch.randint(1 << 30, ())))
            optimizer.step()
            saved = saved or (sampler.state_dict(), torch.get_rng_state())
        return numbers, saved

    whole, saved = drawn(None)
    assert drawn(saved)[0] == whole[1:]


def launched(ranks: int, directory: Path) -> Command:
    argv = [sys.executable, str(ROOT / "launcher.py"), "--nproc-per-node", str(ranks)]
    argv += [str(ROOT / "examples" / "accelerate_data.py"), "--output-dir", str(directory), "--epochs", "2"]
    return Command(argv, env={"JOB_IDENTIFIER": f"accelerate-{os.getpid()}-{ranks}"}, cwd=directory.parent)


@pytest.mark.slow
def test_the_example_of_accelerate_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    with launched(2, tmp_path / "out") as killed:
        killed.wait_for_line(r"step 22 epoch 1", timeout=600)
        killed.kill()
    with launched(1, tmp_path / "out") as resized:
        resized.wait_for_line(r"1 ranks start after step (20|25|30)", timeout=600)
        assert resized.wait(timeout=600) == 0
        assert "done: every sample once in each of 2 epochs" in resized.output
