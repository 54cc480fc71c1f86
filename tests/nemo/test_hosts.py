# SPDX-License-Identifier: Apache-2.0
"""Real training on hosts that keep checkpoints themselves: they are swapped, they are lost, it goes on.

Each rank is on a host of its own; hosts share the network and nothing else, also no storage.
"""

from __future__ import annotations

import shutil
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from resiliency.checkpoint.marker import marker_name
from resiliency.testing.processes import Command
from tests.nemo import one_of_several_hosts
from tests.nemo.conftest import ATTEMPT_S, STEPS, TENSOR_PARALLEL, TWO_REPLICAS, Job, Layout, Losses
from tests.nemo.test_checkpoint_process import restored_from
from tests.waiting import wait_until

pytestmark = [pytest.mark.nemo, pytest.mark.slow]

#: Local saves; the job dies between the second and the third of them.
EVERY = 20
DIES_AT = 50
NEWEST = 40
DYING = ("--sim-fault-desc", f"rank_killed,step={DIES_AT}")
STAND_INS = ("--num-optimizer-replicas", "2", "--enable-ckpt-load-replication", "--local-ckpt-replicas", "0")


class Hosts:
    """Hosts of one job, and the job that runs on some of them."""

    def __init__(self, directory: Path, layout: Layout, stack: ExitStack) -> None:
        self.job = Job(directory, layout, stack)
        self.directory = directory
        self._stack = stack
        self._names: list[str] = []

    def disk(self, host: str) -> Path:
        return self.directory / host / "disk" / "job" / "checkpoint"

    def run(self, hosts: Sequence[str], *flags: object) -> list[Command]:
        """Run one rank on each of `hosts`, the first is rank 0, until all have ended."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        started = [self._start(host, rank, len(hosts), port, flags) for rank, host in enumerate(hosts)]
        for command in started:
            command.wait(timeout=ATTEMPT_S)
        return started

    def finish(self, hosts: Sequence[str], *flags: object) -> str:
        """Run to the end; returns what rank 0 said."""
        started = self.run(hosts, *flags)
        for command in started:
            assert command.returncode == 0, command.output
            command.assert_no_orphans(timeout=20)
        return started[0].output

    def die(self, hosts: Sequence[str], *flags: object, copies: bool = False) -> None:
        """Run until the job dies, and its agents with it; what was only in memory is lost.

        Args:
            copies: before that, the agents have copied the newest checkpoint of each host to another.
        """
        started = self.run(hosts, *DYING, *flags)
        self._check_killed(started)
        for host in hosts:
            self._wait_for(self.disk(host), f"{host} has not committed step {NEWEST}")
            if copies:
                (other,) = set(hosts) - {host}
                self._wait_for(self.disk(other) / "replicas" / host, f"{other} has no copy of {host}")
        self._forget(started, hosts)

    def die_at_once(self, hosts: Sequence[str], *flags: object) -> None:
        """As `die`, whatever was committed by then."""
        started = self.run(hosts, *DYING, *flags)
        self._check_killed(started)
        self._forget(started, hosts)

    def lose(self, host: str) -> None:
        shutil.rmtree(self.directory / host)

    def _check_killed(self, started: Sequence[Command]) -> None:
        said = "\n".join(command.output for command in started)
        assert started[-1].returncode == -signal.SIGKILL, said

    def _forget(self, started: Sequence[Command], hosts: Sequence[str]) -> None:
        for command in started:
            command.kill()
        for host in hosts:
            shutil.rmtree(self.directory / host / "memory")

    def _wait_for(self, root: Path, otherwise: str) -> None:
        manifest, marker = root / f"step={NEWEST}" / "manifest.json", root / marker_name(NEWEST)
        wait_until(lambda: manifest.exists() and not marker.exists(), otherwise, timeout=ATTEMPT_S)

    def _start(self, host: str, rank: int, ranks: int, port: int, flags: Sequence[object]) -> Command:
        if host not in self._names:
            self._names.append(host)
        own = self.directory / host
        (own / "memory").mkdir(parents=True, exist_ok=True)
        argv = [
            *(sys.executable, one_of_several_hosts.__file__, "--device", "cpu", "--model", "tiny"),
            *("--max-steps", STEPS, "--log-dir", self.directory / "logs"),
            *("--local-ckpt-dir", own / "disk", "--local-ckpt-interval", EVERY),
            *(*self.job.layout.flags, *flags),
        ]
        env = {
            **{"RANK": str(rank), "WORLD_SIZE": str(ranks), "GROUP_RANK": str(rank), "LOCAL_RANK": "0"},
            **{"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
            **{"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "0"},
            **{"JOB_IDENTIFIER": "job", "RESILIENCY_RUN_DIR": str(self.directory), "NODE_NAME": host},
            "RESILIENCY_PEER_ADDRESS": f"127.0.0.{2 + self._names.index(host)}",
            one_of_several_hosts.MEMORY_ENV: str(own / "memory"),
        }
        return self._stack.enter_context(Command(list(map(str, argv)), env=env, cwd=self.directory))


@pytest.fixture
def new_hosts(tmp_path: Path) -> Iterator[Callable[[Layout], Hosts]]:
    """``new_hosts(layout)``: hosts with nothing on them, in the test's own directory."""
    with ExitStack() as stack:
        yield lambda layout: Hosts(tmp_path, layout, stack)


def test_what_a_lost_host_had_comes_back_from_the_host_that_kept_a_copy(
    new_hosts: Callable[[Layout], Hosts], uninterrupted: Callable[[Layout], Losses]
) -> None:
    hosts = new_hosts(TENSOR_PARALLEL)
    hosts.die(["a", "b"], copies=True)
    hosts.lose("a")
    hosts.finish(["c", "b"])
    assert restored_from(hosts.job) == [(0, None), (NEWEST, "peers")]
    assert hosts.job.losses() == uninterrupted(TENSOR_PARALLEL)


def test_where_the_optimizer_is_replicated_a_rank_goes_on_from_the_shard_of_another(
    new_hosts: Callable[[Layout], Hosts], uninterrupted: Callable[[Layout], Losses]
) -> None:
    hosts = new_hosts(TWO_REPLICAS)
    hosts.die(["a", "b"], *STAND_INS)
    hosts.lose("b")
    hosts.finish(["a", "c"], *STAND_INS)
    assert restored_from(hosts.job) == [(0, None), (NEWEST, "peers")]
    assert hosts.job.losses() == uninterrupted(TWO_REPLICAS)


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
