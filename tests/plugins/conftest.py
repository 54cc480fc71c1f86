# SPDX-License-Identifier: Apache-2.0
"""Ranks that keep Megatron and NeMo in memory, for all tests of this directory that need them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from resiliency.runtime import AGENT_HOST_ENV
from resiliency.testing.rank_pool import RankPool
from tests.plugins.megatron_ranks import Layout

#: Longest wait for one job of the ranks, or one stock process, on a busy two-core machine, in seconds.
JOB_S = 150.0


@pytest.fixture(scope="package")
def pool(nemo_is_warm: None) -> Iterator[RankPool]:
    with RankPool() as pool:
        pool.warm_up(4)
        yield pool


def run(pool: RankPool, fn: Any, layout: Layout, *args: object) -> list[Any]:
    """What `fn` returns on each rank of `layout`, which it is given; agents are where the test's are."""
    env = {name: value for name, value in os.environ.items() if name == AGENT_HOST_ENV}
    report = pool.run(fn, layout.ranks, layout, *args, timeout=JOB_S, operation_timeout=60.0, env=env)
    return list(report.values)
