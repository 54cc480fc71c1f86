# SPDX-License-Identifier: Apache-2.0
"""One host of a cluster, from the cluster's side: where it keeps what, who it is, its start and its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path

from resiliency.errors import ConfigError
from resiliency.runtime import JOB_ENV
from resiliency.testing import warm
from resiliency.testing.cluster.commands import WAIT_S
from resiliency.testing.cluster.host import HostSetup, end_group, serve_host
from resiliency.testing.cluster.points import Orders
from resiliency.testing.processes import Command

#: `warm.start_function`, with what is the same for all processes of a cluster.
StartFunction = Callable[..., tuple[warm.Process, Connection]]


class Host:
    """One host of a cluster: where it keeps what, and who it is."""

    def __init__(self, name: str, index: int, root: Path, domains: Mapping[str, str]) -> None:
        self.name = name
        self.address = f"127.0.0.{10 + index}"
        self.root = root / name
        #: Where captures live: one directory for all hosts, as they are on one machine.
        self._memory = root / "memory"
        #: Where checkpoints and copies of others' live.
        self.disk = self.root / "disk"
        self.domains = dict(domains)
        self.orders = Orders(self._make())
        self.process: warm.Process | None = None
        #: Programs with its identity, see `TestCluster.command`.
        self.commands: list[Command] = []
        self._lifeline: Connection | None = None

    @property
    def memory(self) -> list[Path]:
        """The directories of this host's captures, one per job."""
        return sorted(self._memory.glob(f"resiliency-*_{self.name}_*"))

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def pid(self) -> int:
        """Of its first process, which leads the group of all others.

        Raises:
            ConfigError: the host is dead.
        """
        if self.process is None:
            raise ConfigError(f"host {self.name} is dead.", hint="HostBed.revive brings it back.")
        return self.process.pid

    def environment(self, job: str) -> dict[str, str]:
        """What makes any program that is started with it a program of this host."""
        return {
            JOB_ENV: job,
            "NODE_NAME": self.name,
            "RESILIENCY_FAILURE_DOMAINS": ",".join(f"{k}={v}" for k, v in self.domains.items()),
            "RESILIENCY_PEER_ADDRESS": self.address,
            "BED_ROOT": str(self.root.parent),
            "BED_DISK": str(self.disk),
            "BED_MEMORY": str(self._memory),
            "OMP_NUM_THREADS": "1",
        }

    def start(self, start_function: StartFunction, setup: HostSetup) -> None:
        self.process, self._lifeline = start_function(serve_host, setup)
        if not self._lifeline.poll(WAIT_S):
            raise TimeoutError(f"host {self.name} did not start within {WAIT_S:g} s")
        self._lifeline.recv()

    def end(self) -> None:
        """SIGKILL all of its processes and wait for their end; idempotent."""
        for command in self.commands:
            command.close()
        self.commands.clear()
        if self.process is None:
            return
        end_group(self.pid)
        self.process.wait(WAIT_S)
        self.process = None
        if self._lifeline is not None:
            self._lifeline.close()

    def _make(self) -> Path:
        self._memory.mkdir(exist_ok=True)
        self.disk.mkdir(parents=True)
        return self.root / "orders"
