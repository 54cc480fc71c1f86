# SPDX-License-Identifier: Apache-2.0
"""Later saves of a Megatron job: they use what the first ones worked out, while that is true."""

from __future__ import annotations

from typing import Any

import pytest

from resiliency.testing.rank_pool import RankPool
from tests.plugins import reuse_ranks
from tests.plugins.conftest import run
from tests.plugins.megatron_ranks import BUCKET_SPACE, MODEL_SPACE, Layout

pytestmark = [pytest.mark.nemo, pytest.mark.slow]


def test_a_tensor_that_came_after_the_first_save_is_written_by_one_rank(pool: RankPool) -> None:
    found = run(pool, reuse_ranks.writers_of_what_came_later, Layout(ranks=2))
    assert {name: sum(rank[name] for rank in found) for name in found[0]} == {
        "first": 1,
        "second": 1,
        "later": 1,
    }


def test_later_saves_need_no_other_rank_also_where_there_are_no_replicas(pool: RankPool) -> None:
    found = run(pool, reuse_ranks.prepared_by_one_alone, Layout(ranks=2, tensor=2))
    assert found[0] > 0


@pytest.mark.parametrize("sharding", [BUCKET_SPACE, MODEL_SPACE])
def test_the_room_for_saves_is_known_before_the_first_of_them_without_another_rank(
    pool: RankPool, sharding: str
) -> None:
    found = run(pool, reuse_ranks.room_by_one_alone, Layout(ranks=2, sharding=sharding))
    made, captured = found[0]
    assert made == captured > 0


@pytest.fixture(scope="module")
def reused(pool: RankPool) -> dict[str, Any]:
    (found,) = run(pool, reuse_ranks.reused_for, Layout(sharding=BUCKET_SPACE))
    return dict(found)


def test_a_tree_is_used_again_once_two_of_them_were_the_same(reused: dict[str, Any]) -> None:
    assert reused["nothing"] == [False, False, True]


def test_the_tree_of_one_model_is_not_used_for_another(reused: dict[str, Any]) -> None:
    assert not reused["another job"]
    assert not reused["the end of a training"]


def test_a_tree_with_plain_values_among_the_sharded_ones_is_built_anew(reused: dict[str, Any]) -> None:
    assert not any(reused["plain values"])


def test_parameters_are_gathered_once_per_save_also_where_one_rank_alone_builds_anew(
    reused: dict[str, Any],
) -> None:
    # Here by Megatron's own save, which gathers itself; a rank that gathers twice waits for others.
    assert not reused["a moved tensor"]
    assert reused["gathered"] == 0
