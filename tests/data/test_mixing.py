# SPDX-License-Identifier: Apache-2.0
"""A mixture has each source in its part, each sample of a source once per pass, through any restart."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from resiliency.data import (
    GlobalBatch,
    InterruptableDistributedSampler,
    MixedDataset,
    MixedSampler,
    advancing,
)
from resiliency.errors import ConfigError


class Named(Dataset[tuple[str, int]]):
    def __init__(self, name: str, size: int) -> None:
        self.name, self.size = name, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[str, int]:
        assert 0 <= index < self.size
        return self.name, index


def mixture(samples: int = 60, seed: int = 0, **weights: Any) -> MixedDataset[tuple[str, int]]:
    """Of sources of 5, 12, 19 ... samples."""
    sources = {
        name: (Named(name, 5 + 7 * number), weight) for number, (name, weight) in enumerate(weights.items())
    }
    return MixedDataset(sources, samples=samples, seed=seed)


def an_optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)


@settings(deadline=None, max_examples=12)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 2**40))
def test_each_block_has_each_part_and_each_pass_over_a_source_each_sample(
    weights: list[int], seed: int
) -> None:
    mixed = mixture(seed=seed, **{f"s{number}": weight for number, weight in enumerate(weights)})
    assert mixed.block == sum(mixed.parts.values())
    assert [Fraction(part, mixed.block) for part in mixed.parts.values()] == [
        Fraction(weight, sum(weights)) for weight in weights
    ]
    taken = mixed.__getitems__(range(7 * mixed.block + 3))
    for first in range(0, 7 * mixed.block, mixed.block):
        assert Counter(name for name, _ in taken[first : first + mixed.block]) == mixed.parts
    for number, name in enumerate(mixed.parts):
        size = 5 + 7 * number
        of_source = [index for source, index in taken if source == name]
        for first in range(0, len(of_source) - size + 1, size):
            assert sorted(of_source[first : first + size]) == list(range(size))
    for count in (0, mixed.block, 7 * mixed.block - 1, len(taken)):
        assert {name: found for name, found in mixed.counts(count).items() if found} == Counter(
            name for name, _ in taken[:count]
        )
    assert taken[-9:] == [mixed[position] for position in range(len(taken) - 9, len(taken))]


@settings(deadline=None, max_examples=8)
@given(st.data())
def test_any_history_of_resizes_takes_each_position_of_three_epochs_in_its_step(data: st.DataObject) -> None:
    samples, batch = data.draw(st.integers(5, 40)), GlobalBatch(8, 2)
    wanted = mixture(samples, a=3, b=1).__getitems__(range(3 * samples))
    seen: list[tuple[str, int]] = []
    state = None
    while len(seen) < len(wanted):
        world = data.draw(st.integers(1, 5))
        mixed = mixture(samples, a=3, b=1)
        ranks = [MixedSampler(mixed, world, rank, global_batch=batch) for rank in range(world)]
        for sampler in ranks:
            if state is not None:
                sampler.load_state_dict(state)
            if sampler.progress.finished:
                sampler.set_epoch(sampler.epoch)  # the next one, after a finished state
        assert ranks[0].counts() == {"a": 0, "b": 0} | Counter(name for name, _ in seen)
        loaded = [iter(DataLoader(mixed, batch_sampler=s.micro_batches(), collate_fn=list)) for s in ranks]
        for _ in range(data.draw(st.integers(1, 9))):
            row = min(batch.samples, ranks[0].progress.left)
            step = []
            for sampler, loader in zip(ranks, loaded, strict=True):
                plan = batch.micro_batches(sampler.rank, world, row)
                step += [sample for part in plan for sample in next(loader) if part.weight]
                sampler.advance(sum(part.samples for part in plan))
            assert Counter(step) == Counter(wanted[len(seen) : len(seen) + row])
            seen += step
            if ranks[0].progress.finished:
                break
        state = ranks[-1].state_dict()


def test_a_loop_with_workers_that_is_left_at_each_batch_goes_on_with_the_next_one() -> None:
    wanted = [mixture(12, a=3, b=1)[position] for position in range(24)]
    state, seen, lives = None, [], 0
    while len(seen) < 24:
        mixed = mixture(12, a=3, b=1)
        sampler, optimizer = MixedSampler(mixed, 1, 0), an_optimizer()
        if state is not None:
            sampler.load_state_dict(state)
        if sampler.progress.finished:
            sampler.set_epoch(1)
        loader = DataLoader(mixed, batch_size=5, sampler=sampler, num_workers=1, collate_fn=list)
        for batch in advancing(loader, optimizer):
            optimizer.step()
            seen += batch
            break
        state, lives = sampler.state_dict(), lives + 1
    assert seen == wanted
    assert lives == 6


def test_the_state_of_another_mixture_is_refused_with_both() -> None:
    state = MixedSampler(mixture(a=7, b=3), 1, 0).state_dict()
    for other in (mixture(a=3, b=7), mixture(a=7, b=3, seed=1), mixture(a=7, c=3)):
        with pytest.raises(
            ConfigError, match=r"a 7 \(of 5 samples\), b 3 \(of 12 samples\); seed 0' in the st"
        ):
            MixedSampler(other, 1, 0).load_state_dict(state)
    with pytest.raises(ConfigError, match="size of the data set 60 in the state and 61 here"):
        MixedSampler(mixture(samples=61, a=7, b=3), 1, 0).load_state_dict(state)


def test_without_shuffle_a_source_is_taken_in_its_own_order() -> None:
    mixed = MixedDataset({"a": (range(4), 1), "b": (range(10, 20), 1)}, samples=12, shuffle=False)
    taken = list(mixed)
    assert [sample for sample in taken if sample < 10] == [0, 1, 2, 3, 0, 1]
    assert [sample for sample in taken if sample >= 10] == [10, 11, 12, 13, 14, 15]


def test_a_billion_samples_take_the_memory_of_one_block() -> None:
    mixed = MixedDataset({"a": (range(10**9), 0.7), "b": (range(10**6), 0.3)}, samples=10**12)
    assert len({mixed[position] for position in range(10**11, 10**11 + 10)}) == 10
    assert mixed.counts(10**11) == {"a": 7 * 10**10, "b": 3 * 10**10}


def test_weights_that_no_small_block_has_are_rounded_in_one_that_is_near_them() -> None:
    assert mixture(a=0.33333, b=0.66667).parts == {"a": 333, "b": 667}
    assert mixture(a=1.0, b=0.0014).parts == {"a": 9986, "b": 14}
    assert mixture(a=1, b=Fraction(1, 2)).block == 3


@pytest.mark.parametrize(
    ("weight", "text"),
    [
        (0, "the weight of 'b' is 0; it must be a number above 0"),
        (float("nan"), "the weight of 'b' is nan"),
        ("a lot", "the weight of 'b' is 'a lot'"),
        (1e-7, "'b' has 1e-07 of the weight: it has no fair part of a block of 100000 positions"),
    ],
)
def test_a_weight_that_gives_nothing_is_refused_by_the_name_of_its_source(weight: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        mixture(a=1.0, b=weight)


def test_a_mixture_of_nothing_and_an_empty_source_are_refused() -> None:
    with pytest.raises(ConfigError, match="no sources"):
        MixedDataset({}, samples=1)
    with pytest.raises(ConfigError, match="the source 'a' of a mixture is empty"):
        MixedDataset({"a": ([], 1)}, samples=1)
    with pytest.raises(IndexError, match="no position -1"):
        mixture(a=1)[-1]


def test_positions_of_many_blocks_and_passes_at_once_are_those_found_one_by_one() -> None:
    many = [*range(3, 3 + 64 * 40, 64), 4, 3, 2**40]
    mixed = mixture(a=7, b=3)
    assert mixed.__getitems__(many) == [mixture(a=7, b=3)[position] for position in many]
    large = MixedDataset({"a": (Named("a", 5), 1), "b": (Named("b", 9), 1)}, samples=9, block=60_000)
    far = [0, 59_999, 60_000, 180_000, 60_001]  # more blocks than are planned in one go
    assert large.__getitems__(far) == [large[position] for position in far]


def test_a_state_of_a_mixture_and_one_of_a_plain_sampler_are_not_mistaken() -> None:
    mixed = MixedSampler(mixture(a=7, b=3), 1, 0)
    plain = InterruptableDistributedSampler(range(60), 1, 0, shuffle=False)
    for sampler, other in ((mixed, plain), (plain, mixed)):
        with pytest.raises(ConfigError, match=r"plan .*mixture in blocks of 10"):
            sampler.load_state_dict(other.state_dict())


def test_a_subset_of_a_mixture_is_refused() -> None:
    subset: Any = torch.utils.data.Subset(mixture(a=7, b=3), [1, 2])
    with pytest.raises(ConfigError, match="a Subset is no MixedDataset"):
        MixedSampler(subset, 1, 0)
