# SPDX-License-Identifier: Apache-2.0
"""Ranks that keep Megatron and NeMo in memory, for all tests of this directory that need them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from resiliency.testing.rank_pool import RankPool
from tests.plugins.megatron_ranks import Layout

#: Longest wait for one job of the ranks, or one stock process, on a busy two-core machine, in seconds.
JOB_S = 150.0


@pytest.fixture(scope="package")
def pool() -> Iterator[RankPool]:
    with RankPool() as pool:
        pool.warm_up(4)
        yield pool


def run(pool: RankPool, fn: Any, layout: Layout, *args: object) -> list[Any]:
    """What `fn` returns on each rank of `layout`, which it is given."""
    report = pool.run(fn, layout.ranks, layout, *args, timeout=JOB_S, operation_timeout=60.0)
    return list(report.values)
