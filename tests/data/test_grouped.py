# SPDX-License-Identifier: Apache-2.0
"""The grouped batch sampler: one group in each batch, every sample, resumable at any batch."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from resiliency.data import EpochOrder, InterruptableDistributedGroupedBatchSampler
from resiliency.errors import ConfigError

GROUPS = st.lists(st.integers(-2, 4), min_size=1, max_size=50)


def ranks_of(
    groups: list[int], size: int, world: int, **options: bool
) -> list[InterruptableDistributedGroupedBatchSampler]:
    return [
        InterruptableDistributedGroupedBatchSampler(range(len(groups)), groups, size, world, rank, **options)
        for rank in range(world)
    ]


@given(groups=GROUPS, size=st.integers(1, 7), epoch=st.integers(0, 3))
def test_each_batch_has_one_group_and_only_a_groups_last_batch_repeats_c5(
    groups: list[int], size: int, epoch: int
) -> None:
    (sampler,) = ranks_of(groups, size, 1)
    sampler.set_epoch(epoch)
    batches = list(sampler)
    assert len(batches) == len(sampler)
    seen: Counter[int] = Counter()
    repeating: Counter[int] = Counter()
    for batch in batches:
        assert len(batch) == size
        (group,) = {groups[index] for index in batch}
        assert not repeating[group], "a batch follows the one that was filled up"
        fresh = [index for index in dict.fromkeys(batch) if not seen[index]]
        repeating[group] += len(fresh) < size
        seen.update(fresh)
    assert seen == Counter(range(len(groups)))


@given(groups=GROUPS, size=st.integers(1, 7))
def test_batches_come_as_they_fill_up_and_the_fullest_rest_first(groups: list[int], size: int) -> None:
    (sampler,) = ranks_of(groups, size, 1)
    order = EpochOrder(len(groups))
    place = {order[position]: position for position in range(len(groups))}
    batches, sizes = list(sampler), Counter(groups)
    whole = sum(count // size for count in sizes.values())
    full = [place[batch[-1]] for batch in batches[:whole]]
    rests = [sizes[groups[batch[0]]] % size for batch in batches[whole:]]
    assert full == sorted(full)
    assert rests == sorted(rests, reverse=True)


@given(groups=GROUPS, size=st.integers(1, 7))
def test_with_drop_last_no_sample_repeats_and_every_batch_is_full_c5(groups: list[int], size: int) -> None:
    (sampler,) = ranks_of(groups, size, 1, drop_last=True)
    batches = list(sampler)
    assert len(batches) == sum(count // size for count in Counter(groups).values())
    taken = [index for batch in batches for index in batch]
    assert len(set(taken)) == len(taken) == size * len(batches)


@given(
    groups=GROUPS,
    size=st.integers(1, 7),
    lives=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4)), max_size=5),
    epoch=st.integers(0, 2),
)
def test_a_fresh_object_goes_on_at_any_batch_on_any_number_of_ranks_c2(
    groups: list[int], size: int, lives: list[tuple[int, int]], epoch: int
) -> None:
    (alone,) = ranks_of(groups, size, 1)
    alone.set_epoch(epoch)
    plan = list(alone)
    state, done = alone.state_dict(), 0
    for world, steps in [*lives, (2, len(plan))]:
        ranks = ranks_of(groups, size, world)
        for sampler in ranks:
            sampler.load_state_dict(state)  # before any epoch was entered, as a restart does
        iterators = [iter(sampler) for sampler in ranks]
        for _ in range(min(steps, len(ranks[0]))):
            for iterator in iterators:
                assert next(iterator) == plan[done % len(plan)]
                done += 1
            for sampler in ranks:
                sampler.advance()
        state, done = ranks[0].state_dict(), min(done, len(plan))
        assert state["position"] == done
    assert done == len(plan)


def test_epochs_differ_and_set_epoch_works_as_loaders_of_frameworks_call_it_c3() -> None:
    (sampler,) = ranks_of([index % 3 for index in range(60)], 4, 1)
    first = list(sampler)
    sampler.set_epoch(1)
    assert list(sampler) != first
    sampler.set_epoch(0)
    assert list(sampler) == first


def test_an_epoch_that_was_begun_is_not_left_in_silence_c4() -> None:
    (sampler,) = ranks_of([0] * 20, 4, 1)
    sampler.advance(2)
    with pytest.raises(ConfigError, match="epoch 0 is at position 2 of 5, and epoch 1 was asked for"):
        sampler.set_epoch(1)


def test_a_state_of_another_plan_is_refused_with_both_plans_c6() -> None:
    (sampler,) = ranks_of([0] * 20, 4, 1)
    sampler.advance()
    (other,) = ranks_of([0] * 10 + [1] * 10, 4, 1)
    with pytest.raises(ConfigError, match=r"plan of batches '20 samples in batches of 4, groups .* here"):
        other.load_state_dict(sampler.state_dict())
    with pytest.raises(ConfigError, match="counts batches of another plan"):
        sampler.load_state_dict({"progress": 3, "epoch": 1}, world_size=2)
    sampler.load_state_dict({"progress": 0, "epoch": 1})
    assert sampler.epoch == 1


def test_the_plan_is_a_tensor_of_one_index_for_each_sample_c12() -> None:
    (sampler,) = ranks_of([0, 1] * 500, 10, 1)
    list(sampler)
    assert sampler._planned(sampler.start).dtype is torch.int64
    assert sampler._planned(sampler.start).numel() == 1000
    assert not [value for value in vars(sampler).values() if isinstance(value, list) and len(value) > 2]


@pytest.mark.parametrize(("groups", "drop_last"), [([], False), ([], True), ([0, 1], True)])
def test_of_no_batches_nothing_is_given(groups: list[int], drop_last: bool) -> None:
    (sampler,) = ranks_of(groups, 4, 1, drop_last=drop_last)
    assert len(sampler) == 0
    assert list(sampler) == []


def test_a_loader_takes_it_as_batch_sampler() -> None:
    (sampler,) = ranks_of([0, 1, 0, 1, 1], 2, 1)
    loader = DataLoader(torch.arange(5), batch_sampler=sampler)  # type: ignore[arg-type]
    assert len(list(loader)) == len(loader) == 3


def test_group_ids_that_do_not_fit_the_dataset_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 group ids for 4 samples"):
        InterruptableDistributedGroupedBatchSampler(range(4), [0, 1, 0], 2, 1, 0)
    with pytest.raises(ConfigError, match="batch_size is 0"):
        InterruptableDistributedGroupedBatchSampler(range(1), [0], 0, 1, 0)


def test_group_ids_that_are_no_whole_numbers_are_refused_and_not_cut() -> None:
    ratios = [1.33, 1.78] * 3
    for wrong in (ratios, torch.tensor(ratios)):
        with pytest.raises(ConfigError, match=r"1\.3\d* is a group id; a group is a whole number"):
            InterruptableDistributedGroupedBatchSampler(range(6), wrong, 3, 1, 0)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="the group ids are no whole numbers"):
        InterruptableDistributedGroupedBatchSampler(range(2), ["wide", "tall"], 3, 1, 0)  # type: ignore[list-item]
    whole = InterruptableDistributedGroupedBatchSampler(range(6), [1.0, 2.0] * 3, 3, 1, 0)  # type: ignore[list-item]
    assert sorted(map(sorted, whole)) == [[0, 2, 4], [1, 3, 5]]
