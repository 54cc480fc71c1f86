# SPDX-License-Identifier: Apache-2.0
"""Optimizer steps that grow are the same on any number of ranks, through any restart."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resiliency.data import GlobalBatch, InterruptableDistributedSampler, RampUp, accumulate, advancing_steps
from resiliency.errors import ConfigError


def grown(batch: GlobalBatch, consumed: int) -> int:
    """Samples of a step by the words of Megatron's documentation: as many increments as whole parts of the
    ramp are consumed."""
    ramp = batch.ramp_up
    assert ramp is not None
    stages = (batch.samples - ramp.start) // ramp.increment
    passed = sum(consumed * stages >= ramp.samples * stage for stage in range(1, stages + 1))
    return ramp.start + passed * ramp.increment


def naive_rows(batch: GlobalBatch, epoch: int, size: int, drop_last: bool) -> list[range]:
    rows, position = [], 0
    while position < size:
        row = grown(batch, epoch * size + position)
        if position + row > size:
            if drop_last:
                break
            row = size - position
        rows.append(range(position, position + row))
        position += row
    return rows


ramps = st.builds(
    lambda start, increment, stages, samples, micro: GlobalBatch(
        start + increment * stages, micro, RampUp(start, increment, samples)
    ),
    st.integers(1, 6),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(1, 90),
    st.integers(0, 4),
)


@settings(deadline=None, max_examples=60)
@given(ramps, st.integers(1, 70), st.integers(0, 2), st.booleans(), st.data())
def test_any_history_of_resizes_takes_the_rows_of_a_ramp_that_was_never_disturbed(
    batch: GlobalBatch, size: int, epoch: int, drop_last: bool, data: st.DataObject
) -> None:
    wanted = naive_rows(batch, epoch, size, drop_last)
    state, rows = None, []
    while len(rows) < len(wanted):
        world = data.draw(st.integers(1, 4))
        ranks = [
            InterruptableDistributedSampler(
                range(size), world, rank, shuffle=False, drop_last=drop_last, global_batch=batch
            )
            for rank in range(world)
        ]
        for sampler in ranks:
            if state is None:
                sampler.set_epoch(epoch)
            else:
                sampler.load_state_dict(state)
        taken = [list(sampler.micro_batches()) for sampler in ranks]
        assert [len(sampler.micro_batches()) for sampler in ranks] == [len(mine) for mine in taken]
        assert [len(sampler) for sampler in ranks] == [sum(map(len, mine)) for mine in taken]
        steps = data.draw(st.integers(1, len(wanted) - len(rows)))
        for row in itertools.islice(wanted, len(rows), len(rows) + steps):
            parts = [batch.micro_batches(sampler.rank, world, len(row)) for sampler in ranks]
            samples = []
            for sampler, mine, plan in zip(ranks, taken, parts, strict=True):
                for part in plan:
                    indexes = mine.pop(0)
                    assert len(indexes) == part.samples
                    samples += indexes if part.weight else []
                sampler.advance(sum(part.samples for part in plan))
            assert sorted(samples) == list(row)
            rows.append(row)
        state = ranks[-1].state_dict()
        assert [sampler.state_dict() for sampler in ranks] == [state] * world
    assert rows == wanted


def test_the_sizes_are_those_of_megatrons_three_numbers() -> None:
    batch = GlobalBatch(samples=8, ramp_up=RampUp(start=2, increment=2, samples=20))
    assert list(batch.rows(0, 40)) == [(2, 4), (4, 2), (6, 1), (8, 2), (2, 1)]
    assert list(batch.rows(16, 21, drop_last=True)) == [(6, 1), (8, 1)]


def test_a_ramp_over_a_trillion_samples_is_measured_by_its_stages() -> None:
    batch = GlobalBatch(samples=4096, micro=2, ramp_up=RampUp(start=32, increment=32, samples=10**12))
    rows = list(batch.rows(0, 2 * 10**12))
    assert len(rows) <= 129
    assert sum(row * count for row, count in rows) == 2 * 10**12


def test_each_epoch_has_a_length_of_its_own_while_the_steps_grow() -> None:
    batch = GlobalBatch(samples=8, micro=1, ramp_up=RampUp(start=1, increment=1, samples=60))
    sampler = InterruptableDistributedSampler(range(64), 4, 1, global_batch=batch)
    first = sampler.full_length
    sampler.set_epoch(3)
    assert sampler.full_length == len(sampler) == 16 < first


@pytest.mark.parametrize("micro", [0, 2])
def test_the_gradient_of_each_growing_step_is_that_of_the_mean_over_its_samples(micro: int) -> None:
    inputs = torch.randn(30, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    batch = GlobalBatch(9, micro, RampUp(start=3, increment=3, samples=12))
    data, found = TensorDataset(torch.arange(30), inputs), []
    for rank in range(2):
        model = nn.Linear(3, 1, bias=False).double()
        nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        sampler = InterruptableDistributedSampler(data, 2, rank, shuffle=False, global_batch=batch)
        gradients = []
        for step in advancing_steps(DataLoader(data, batch_sampler=sampler.micro_batches()), optimizer):
            for (_, features), weight in accumulate(model, step):
                (model(features).square().mean() * weight).backward()
            optimizer.step()
            assert model.weight.grad is not None
            gradients.append(model.weight.grad.clone())
            optimizer.zero_grad()
        found.append(gradients)
    rows = naive_rows(batch, 0, 30, False)
    assert [len(row) for row in rows] == [3, 3, 6, 9, 9]
    for row, *ranks in zip(rows, *found, strict=True):
        weight = torch.ones(1, 3, dtype=torch.float64, requires_grad=True)
        (inputs[row.start : row.stop] @ weight.T).square().mean().backward()
        assert weight.grad is not None
        assert float((sum(ranks) / 2 - weight.grad).abs().max()) < 1e-12


@pytest.mark.parametrize(
    ("start", "increment", "text"),
    [
        (2, 4, "does not reach the global batch of 8"),
        (8, 1, "does not reach"),
        (0, 2, "start of the ramp-up is 0"),
    ],
)
def test_a_ramp_that_does_not_reach_the_global_batch_is_refused(
    start: int, increment: int, text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        GlobalBatch(8, ramp_up=RampUp(start, increment, 100))


@given(ramps, st.integers(1, 9), st.integers(1, 40))
def test_what_a_rank_runs_is_counted_without_its_micro_batches(
    batch: GlobalBatch, world: int, row: int
) -> None:
    for rank in range(world):
        parts = batch.micro_batches(rank, world, row)
        assert batch.run_samples(rank, world, row) == sum(part.samples for part in parts)
        assert batch.micro_count(world, row) == len(parts)


def test_the_length_of_a_long_ramp_builds_no_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = GlobalBatch(4096, 4, RampUp(64, 64, 1_000_000))
    sampler = InterruptableDistributedSampler(range(2_000_000), 8, 0, global_batch=batch)
    monkeypatch.delattr(GlobalBatch, "micro_batches")
    assert sampler.left >= len(sampler.micro_batches()) >= 2_000_000 // 8 // 4
    sampler.advance(8)
