# SPDX-License-Identifier: Apache-2.0
"""Megatron's replicas become fewer and more, from what the hosts that are left hold in their local tiers.

There are no copies on other hosts and no persistent tier: the ranks of a replica group stand in for each
other.  With another number of replicas sums are rounded otherwise, so it is states that are compared.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from resiliency.testing.rank_pool import RankPool
from tests.plugins import elastic_ranks
from tests.plugins.conftest import run
from tests.plugins.elastic_ranks import Held, Start
from tests.plugins.megatron_ranks import BUCKET_SPACE, Layout, Part, differing

pytestmark = [pytest.mark.nemo, pytest.mark.slow, pytest.mark.usefixtures("agents_at_once")]


def replicas(count: int, copies: int) -> Layout:
    return Layout(ranks=count, copies=copies, sharding=BUCKET_SPACE)


@pytest.mark.parametrize(
    "starts",
    [
        # Every rank has all of the optimizer.
        pytest.param(
            [
                Start(replicas(3, 3), ("a", "b", "c"), 0, 1, "none"),
                Start(replicas(2, 2), ("b", "a"), 1, 2, "local"),
                Start(replicas(3, 3), ("d", "a", "b"), 2, 3, "peers"),
            ],
            id="three-two-three",
        ),
        # Every rank has a half of it.
        pytest.param(
            [
                Start(replicas(4, 2), ("a", "b", "c", "d"), 0, 1, "none"),
                Start(replicas(2, 1), ("d", "a"), 1, 2, "peers"),
                Start(replicas(4, 2), ("e", "d", "a", "f"), 2, 3, "peers"),
            ],
            id="four-two-four-halves",
        ),
    ],
)
def test_replicas_become_fewer_when_hosts_are_lost_and_more_when_empty_ones_come(
    pool: RankPool, tmp_path: Path, starts: list[Start]
) -> None:
    saved: list[Part] = []
    for start in starts:
        for host in tmp_path.iterdir():
            if host.name not in start.hosts:
                shutil.rmtree(host)
        found: list[Held] = run(pool, elastic_ranks.gone_on, start.layout, start, tmp_path)
        assert {held.tier for held in found} == {start.tier}
        assert differing([part for held in found for part in held.restored], saved) == []
        saved = [part for held in found for part in held.saved]
