# SPDX-License-Identifier: Apache-2.0
"""Real training on hosts that keep checkpoints themselves: they are swapped, they are lost, it goes on.

Each rank is on a host of its own; hosts share the network and nothing else, also no storage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.nemo.conftest import TENSOR_PARALLEL, TWO_REPLICAS, Layout, Losses
from tests.nemo.hosts import NEWEST, Hosts
from tests.nemo.logs import restored_from

pytestmark = [pytest.mark.nemo, pytest.mark.slow]

STAND_INS = ("--num-optimizer-replicas", "2", "--enable-ckpt-load-replication", "--local-ckpt-replicas", "0")


@pytest.fixture
def new_hosts(tmp_path: Path) -> Iterator[Callable[[Layout], Hosts]]:
    """``new_hosts(layout)``: hosts with nothing on them, in the test's own directory."""
    with ExitStack() as stack:
        yield lambda layout: Hosts(tmp_path, layout, stack)


@pytest.mark.thorough(
    "tests/checkpoint/test_launched_hosts.py loses a host, tests/plugins its Megatron states"
)
def test_what_a_lost_host_had_comes_back_from_the_host_that_kept_a_copy(
    new_hosts: Callable[[Layout], Hosts], uninterrupted: Callable[[Layout], Losses]
) -> None:
    hosts = new_hosts(TENSOR_PARALLEL)
    hosts.die(["a", "b"], copies=True)
    hosts.lose("a")
    hosts.finish(["c", "b"])
    assert restored_from(hosts.job) == [(0, None), (NEWEST, "peers")]
    assert hosts.job.losses() == uninterrupted(TENSOR_PARALLEL)


@pytest.mark.thorough(
    "tests/checkpoint/test_launched_hosts.py loses a host, tests/plugins its Megatron states"
)
def test_where_the_optimizer_is_replicated_a_rank_goes_on_from_the_shard_of_another(
    new_hosts: Callable[[Layout], Hosts], uninterrupted: Callable[[Layout], Losses]
) -> None:
    hosts = new_hosts(TWO_REPLICAS)
    hosts.die(["a", "b"], *STAND_INS)
    hosts.lose("b")
    hosts.finish(["a", "c"], *STAND_INS)
    assert restored_from(hosts.job) == [(0, None), (NEWEST, "peers")]
    assert hosts.job.losses() == uninterrupted(TWO_REPLICAS)


@pytest.mark.thorough(
    "tests/checkpoint/test_launched_hosts.py loses a host, tests/plugins its Megatron states"
)
def test_another_layout_cuts_the_persistent_checkpoint_anew_if_its_form_allows_it(
    new_hosts: Callable[[Layout], Hosts],
) -> None:
    hosts = new_hosts(TWO_REPLICAS)
    shared = ("--persistent-ckpt-dir", hosts.directory / "shared", "--persistent-ckpt-interval", 30)
    both = (*shared, "--enable-optimized-async-ckpt", "--global-bs", 4)
    hosts.die(["a", "b"], *both)
    for command in hosts.run(["a", "b"], *both, *TENSOR_PARALLEL.flags):
        assert command.returncode == 1, command.output
        assert "step=30 holds the optimizer in the form dp_reshardable" in command.output
        assert "ckpt_optim_fully_reshardable=True" in command.output
        command.kill()
    output = hosts.finish(["a"], *both, "--max-steps", NEWEST + 2)
    assert "the hosts hold newer checkpoints that cannot be used" in output
    assert f"step {NEWEST}" in output
    assert "resharded" in output
    assert restored_from(hosts.job) == [(0, None), (30, "persistent")]
