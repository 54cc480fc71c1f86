# SPDX-License-Identifier: Apache-2.0
"""Orders: torch's, bit for bit, or computed in constant memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from resiliency.data import EpochOrder, sample_seed
from resiliency.data.order import indexes_of_epochs
from resiliency.errors import ConfigError


def whole(size: int, **options: object) -> list[int]:
    return EpochOrder(size, **options).at(torch.arange(size)).tolist()  # type: ignore[arg-type]


@given(size=st.integers(1, 300), epoch=st.integers(0, 50), seed=st.integers(0, 2**40))
def test_the_shuffle_of_kind_torch_is_the_permutation_that_torchs_sampler_makes(
    size: int, epoch: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed + epoch)
    assert whole(size, epoch=epoch, seed=seed) == torch.randperm(size, generator=generator).tolist()


@pytest.mark.parametrize("start", range(0, 4096, 512))
def test_a_computed_order_is_a_permutation_for_every_size_up_to_4096(start: int) -> None:
    for size in range(start + 1, start + 513):
        found = EpochOrder(size, seed=size, kind="computed").at(torch.arange(size))
        assert torch.equal(found.sort().values, torch.arange(size)), size


@settings(max_examples=30)
@given(size=st.integers(10**5, 10**12), seed=st.integers(0, 2**40), start=st.integers(0, 10**12))
def test_a_computed_order_of_a_huge_size_repeats_no_index_and_stays_inside(
    size: int, seed: int, start: int
) -> None:
    start %= size
    positions = torch.arange(start, min(start + 2000, size))
    found = EpochOrder(size, seed=seed, kind="computed").at(positions)
    assert len(found.unique()) == len(positions)
    assert int(found.min()) >= 0
    assert int(found.max()) < size


@pytest.mark.parametrize("kind", ["torch", "computed"])
def test_each_epoch_and_seed_has_an_order_of_its_own_and_always_the_same(kind: str) -> None:
    orders = [tuple(whole(50, epoch=epoch, seed=seed, kind=kind)) for epoch, seed in ((0, 0), (1, 0), (0, 7))]
    assert len(set(orders)) == 3
    assert tuple(whole(50, kind=kind)) == orders[0]


def test_a_computed_order_moves_samples_evenly_over_the_epoch() -> None:
    """Where the first tenth of the dataset goes: about a tenth of it into each tenth of the epoch."""
    order = EpochOrder(100_000, seed=3, kind="computed").at(torch.arange(100_000))
    places = (order < 10_000).nonzero().flatten() // 10_000
    counts = torch.bincount(places, minlength=10)
    assert int(counts.min()) > 850
    assert int(counts.max()) < 1150


def test_a_computed_order_holds_no_tensor() -> None:
    order = EpochOrder(10**12, kind="computed")
    order.at(torch.arange(1000))
    assert not [name for name, value in vars(order).items() if isinstance(value, torch.Tensor)]


def test_without_shuffle_the_order_is_that_of_the_dataset_and_wraps_beyond_its_end() -> None:
    order = EpochOrder(5, shuffle=False)
    assert [order[position] for position in range(12)] == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]


def test_a_seed_of_a_sample_depends_on_epoch_and_sample_alone() -> None:
    seeds = {
        sample_seed(seed, epoch, index) for seed in range(3) for epoch in range(3) for index in range(50)
    }
    assert len(seeds) == 450
    assert sample_seed(1, 2, 3) == sample_seed(1, 2, 3)
    torch.Generator().manual_seed(max(seeds))


@pytest.mark.parametrize("kind", ["torch", "computed"])
def test_a_seed_is_any_that_torch_takes_and_another_one_is_refused(kind: str) -> None:
    seeds = [-(2**63), -1, 2**63 - 1, 2**63, 2**64 - 1]
    orders = [whole(50, seed=seed, kind=kind) for seed in seeds]
    assert all(sorted(order) == list(range(50)) for order in orders)
    for seed in (2**64, -(2**63) - 1):
        with pytest.raises(ConfigError, match=rf"the seed is {seed}; it must be from -2\^63 to 2\^64 - 1"):
            EpochOrder(50, seed=seed, kind=kind)


def test_a_computed_order_is_that_of_former_releases() -> None:
    assert whole(8, seed=-7, epoch=1, kind="computed") == [0, 2, 7, 6, 5, 1, 4, 3]


def test_an_unknown_kind_and_a_negative_size_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="no order of kind 'random'; choose one of torch, computed"):
        EpochOrder(3, kind="random")
    with pytest.raises(ConfigError, match="size is -1"):
        EpochOrder(-1)


def test_positions_of_many_epochs_at_once_are_those_of_each_order() -> None:
    epochs, positions = torch.arange(40) % 7, torch.arange(40) * 5 % 11
    for size in (11, 12, 1000):
        found = indexes_of_epochs(size, 3, epochs, positions).tolist()
        assert found == [
            EpochOrder(size, epoch=epoch, seed=3, kind="computed")[position]
            for epoch, position in zip(epochs.tolist(), positions.tolist(), strict=True)
        ]
