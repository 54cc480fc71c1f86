# SPDX-License-Identifier: Apache-2.0
"""Ranks of one replica group can stand in for each other."""

from __future__ import annotations

import pytest

from resiliency.testing.rank_pool import RankPool
from tests.plugins import replica_ranks
from tests.plugins.conftest import run
from tests.plugins.megatron_ranks import BUCKET_SPACE, Layout

pytestmark = [pytest.mark.nemo, pytest.mark.slow]


@pytest.mark.parametrize(
    ("layout", "groups"),
    [
        (Layout(ranks=4, copies=2, sharding=BUCKET_SPACE), [[0, 2], [1, 3]]),
        (Layout(ranks=4, copies=4, sharding=BUCKET_SPACE), [[0, 1, 2, 3]]),
        (Layout(ranks=4, tensor=2, copies=2, sharding=BUCKET_SPACE), [[0, 2], [1, 3]]),
        (Layout(ranks=4, tensor=2, sharding=BUCKET_SPACE), [[0], [1], [2], [3]]),
    ],
    ids=["dp4 x2", "dp4 x4", "tp2 dp2 x2", "tp2 dp2 x1"],
)
def test_ranks_with_one_label_hold_the_same_bits_and_others_do_not(
    pool: RankPool, layout: Layout, groups: list[list[int]]
) -> None:
    found = run(pool, replica_ranks.label_and_content, layout)
    for by in (0, 1):  # by label, by content
        members: dict[str, list[int]] = {}
        for rank, labelled in enumerate(found):
            members.setdefault(labelled[by], []).append(rank)
        assert sorted(members.values()) == groups, ("label", "content")[by]


def test_labels_do_not_tell_how_many_copies_there_are_but_how_each_is_cut(pool: RankPool) -> None:
    def labels(layout: Layout) -> set[str]:
        return {label for label, _ in run(pool, replica_ranks.label_and_content, layout)}

    two_copies = labels(Layout(ranks=4, copies=2, sharding=BUCKET_SPACE))
    assert two_copies == labels(Layout(ranks=2, sharding=BUCKET_SPACE))
    assert two_copies.isdisjoint(labels(Layout(ranks=4, copies=4, sharding=BUCKET_SPACE)))


def test_a_stand_in_draws_what_it_would_have_drawn_where_its_group_draws_alike(pool: RankPool) -> None:
    first, second = run(pool, replica_ranks.numbers_after_adoption, Layout(ranks=2, copies=2))
    for found, other in ((first, second), (second, first)):
        for generator in ("numpy", "torch", "megatron"):
            assert found["stand-in"][generator] == other["own"][generator]
        # Seeded by rank: neither the owner's numbers, nor others at each try.
        assert found["stand-in"]["python"] not in (found["own"]["python"], other["own"]["python"])
        assert found["the same again"] == found["stand-in"]
        assert found["itself"] == found["own"]
