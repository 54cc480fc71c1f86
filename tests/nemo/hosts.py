# SPDX-License-Identifier: Apache-2.0
"""Hosts of a NeMo job, each with a launcher of its own."""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from resiliency.checkpoint.format.marker import marker_name
from resiliency.testing.processes import Command
from tests.nemo import one_of_several_hosts
from tests.nemo.conftest import ATTEMPT_S, STEPS, Job, Layout
from tests.ports import free_port
from tests.waiting import wait_until

#: Local saves; the job dies between the second and the third of them.
EVERY = 20
NEWEST = 40
DIES_AT = 50
DYING = ("--sim-fault-desc", f"rank_killed,step={DIES_AT}")


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
        port = free_port()
        started = [self._start(host, rank, len(hosts), port, flags) for rank, host in enumerate(hosts)]
        for command in started:
            command.wait(timeout=ATTEMPT_S)
        return started

    def finish(self, hosts: Sequence[str], *flags: object) -> str:
        """Run to the end; returns what rank 0 said."""
        started = self.run(hosts, *flags)
        for command in started:
            assert command.returncode == 0, command.output
            command.assert_no_orphans(timeout=120)
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
