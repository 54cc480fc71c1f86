# SPDX-License-Identifier: Apache-2.0
"""How much one start of a NeMo job asks of storage."""

from __future__ import annotations

from pathlib import Path

import pytest

from resiliency.testing.rank_pool import RankPool
from tests.plugins import starting_ranks
from tests.plugins.conftest import run
from tests.plugins.megatron_ranks import Layout

pytestmark = [pytest.mark.nemo, pytest.mark.slow, pytest.mark.usefixtures("agents_at_once")]


def test_a_start_lists_each_place_once_and_looks_into_no_older_checkpoint(
    pool: RankPool, tmp_path: Path
) -> None:
    first, second = run(pool, starting_ranks.start, Layout(ranks=2), tmp_path)
    for found in (first, second):
        assert (found["step"], found["tier"], found["weights"]) == ("step=3", "local", [3.0] * 4)
    # Each rank also sees what room the others of its host announced in shared memory.
    first_listed, second_listed = (
        {place: times for place, times in found["listed"].items() if not place.startswith("other-memory")}
        for found in (first, second)
    )
    assert first_listed == {"persistent": 1, "local": 1, "local/replicas": 1}
    assert second_listed == {}  # the first rank of a host looks for all
