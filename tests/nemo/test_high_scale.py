# SPDX-License-Identifier: Apache-2.0
"""Real training whose local checkpoints GKE's replicators take over and bring back, one to a new host."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from resiliency.testing.processes import Command
from resiliency.testing.replicator import start_replicator
from tests.nemo.conftest import STEPS, TWO_REPLICAS, Layout, Losses
from tests.nemo.hosts import Hosts
from tests.nemo.logs import restored_from

pytestmark = [pytest.mark.nemo, pytest.mark.slow]

FLAGS = ("--enable-high-scale-ckpt", "--local-ckpt-interval", 5)


def kept_by(replicator: Command) -> set[int]:
    return {int(found[1]) for found in re.finditer(r"^kept (\d+)$", replicator.output, re.MULTILINE)}


@pytest.mark.thorough("tests/plugins/test_hand_off.py hands over, tests/checkpoint/gke takes back")
def test_after_a_kill_the_replicators_bring_back_the_newest_step_that_all_hosts_handed_over(
    tmp_path: Path, uninterrupted: Callable[[Layout], Losses]
) -> None:
    store = tmp_path / "store"
    store.mkdir()
    with ExitStack() as stack:
        hosts = Hosts(tmp_path, TWO_REPLICAS, stack)

        def replicators(*names: str) -> list[Command]:
            """As the driver of the volume does: they wait for the job."""
            for name in names:
                (tmp_path / name / "disk").mkdir(parents=True, exist_ok=True)
            return [
                stack.enter_context(start_replicator(tmp_path / name / "disk", store=store)) for name in names
            ]

        before = replicators("a", "b")
        hosts.die_at_once(["a", "b"], *FLAGS)
        for replicator in before:
            replicator.kill()
        common = max(kept_by(before[0]) & kept_by(before[1]), default=0)
        assert common, "nothing was handed over in time"
        hosts.lose("a")

        after = replicators("c", "b")
        hosts.finish(["c", "b"], *FLAGS)
        back = [int(replicator.wait_for_line(r"^restored (\d+)$", timeout=120)[1]) for replicator in after]
        assert back[0] == back[1] >= common  # one may have been killed before it said what it had kept
        for replicator in after:
            replicator.wait_for_line(f"^complete {STEPS}$", timeout=120)
    assert restored_from(hosts.job) == [(0, None), (back[0], "local")]
    assert hosts.job.losses() == uninterrupted(TWO_REPLICAS)
