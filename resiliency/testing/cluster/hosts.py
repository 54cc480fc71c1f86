# SPDX-License-Identifier: Apache-2.0
"""Several hosts on one machine, that can be lost, stopped, exchanged and cut off from each other.

    with HostBed(3) as cluster:
        job = cluster.start(train, Training(steps=20, park=8))
        job.wait_for_line("parked 8", count=3)
        cluster.kill("h1", disk=True)                       # its processes, its memory and its disk
        job.end()
        cluster.add("h3")
        job = cluster.start(train, Training(steps=20), order=["h0", "h3", "h2"])
        assert job.wait() == [0, 0, 0]

A host is a group of processes with a checkpoint agent of its own, a directory that stands for its disk, a
name, failure domains and a loopback address.  Captures of all hosts are in one memory file system.
Processes are real and die of real signals.  Whatever a test does to the cluster, leaving its context ends
all processes and removes all files; every wait has a deadline.
"""

from __future__ import annotations

import os
import pickle
import re
import shutil
import signal
import tempfile
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType

from resiliency.errors import ConfigError
from resiliency.runtime import AGENT_HOST_ENV
from resiliency.testing import warm
from resiliency.testing.cluster.commands import WAIT_S, Words
from resiliency.testing.cluster.disks import copies_on, own_on
from resiliency.testing.cluster.host import HostSetup, members, serve_rank
from resiliency.testing.cluster.job import ClusterJob, identity_of
from resiliency.testing.cluster.network import Network, Route
from resiliency.testing.cluster.place import Host
from resiliency.testing.cluster.points import FaultHit, HostFault, HostPhase, Operation
from resiliency.testing.processes import Command, wait_until_stopped

__all__ = [
    "WAIT_S",
    "ClusterJob",
    "FaultHit",
    "Host",
    "HostFault",
    "HostPhase",
    "Operation",
    "TestCluster",
    "flip_bit",
]

#: What every host and rank needs, imported once.
PRELOAD = (
    "torch.distributed",
    "torch._dynamo",  # every first optimizer imports it, which takes half a second
    "resiliency.testing.cluster.training",
    "resiliency.checkpoint.agent.main",
    "resiliency.checkpoint.replication.service",
)


class TestCluster:
    """Hosts on this machine, named h0, h1, ...; a context manager.

    Args:
        hosts: how many there are at the start.
        domains: failure domains of a host, by its name; default: none.
        log: file that receives what the hosts write, as it comes.
    """

    __test__ = False  # no class of tests, whatever its name begins with

    def __init__(
        self,
        hosts: int,
        *,
        domains: Callable[[str], Mapping[str, str]] = lambda name: {},
        log: Path | None = None,
    ) -> None:
        self._id = uuid.uuid4().hex[:12]
        self._domains = domains
        self._interpreter = ExitStack()
        self._interpreter.enter_context(warm.interpreter(*PRELOAD))
        #: In memory, so that a disk of the cluster is as fast and as empty as a test wants it.
        self.root = Path(tempfile.mkdtemp(prefix=f"resiliency-cluster-{self._id}-", dir=_shared_memory()))
        #: A storage that all hosts see.
        self.persistent = self.root / "persistent"
        self._gates = self.root / "gates"
        self._gates.mkdir()
        self.network = Network(self._host_at)
        self._words = Words(log)
        self._start_function = partial(
            warm.start_function,
            env=dict(os.environ),
            stdout=self._words.output_fd,
            stderr=self._words.output_fd,
            # A process group is within one session.
            new_session=False,
        )
        self._hosts: dict[str, Host] = {}
        self._jobs: list[ClusterJob] = []
        try:
            for index in range(hosts):
                self.add(f"h{index}")
        except BaseException:
            self.close()
            raise

    # --- hosts -----------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> Host:
        return self._hosts[name]

    @property
    def alive(self) -> list[str]:
        return [name for name, host in self._hosts.items() if host.is_alive]

    def add(self, name: str) -> Host:
        """A new host, with an empty disk: at the start, or as a spare that takes the place of another."""
        if name in self._hosts:
            raise ConfigError(f"the cluster has a host {name!r}.")
        host = self._hosts[name] = Host(name, len(self._hosts), self.root, self._domains(name))
        host.start(self._start_function, self._setup(host))
        return host

    def kill(self, name: str, *, disk: bool = False, memory: bool = True) -> None:
        """The host is gone: SIGKILL to all of its processes at once.

        Args:
            disk: what it kept on disk is gone too.
            memory: so are its captures, as after a power cut; False: as if only its programs were killed.
        """
        host = self._hosts[name]
        host.end()
        if memory:
            for directory in host.memory:
                shutil.rmtree(directory)
        if disk:
            _empty(host.disk)

    def revive(self, name: str) -> Host:
        """A killed host comes back, with the memory and the disk that were left to it."""
        host = self._hosts[name]
        host.end()
        host.orders.withdraw()
        host.start(self._start_function, self._setup(host))
        return host

    def stop(self, name: str) -> None:
        """SIGSTOP to all of its processes: alive for the kernel, silent for everybody else."""
        os.killpg(self._hosts[name].pid, signal.SIGSTOP)
        for pid in self.pids(name):
            wait_until_stopped(pid)

    def resume(self, name: str) -> None:
        os.killpg(self._hosts[name].pid, signal.SIGCONT)

    def pids(self, name: str) -> list[int]:
        """All processes of a host."""
        host = self._hosts[name]
        return members(host.pid) if host.process is not None else []

    def partition(self, some: Iterable[str], others: Iterable[str]) -> None:
        """No byte passes between agents of `some` hosts and of `others`, until `heal`."""
        others = list(others)
        for one in some:
            for other in others:
                self.network.cut(one, other)

    def heal(self) -> None:
        self.network.heal()

    def fill_disk(self, name: str, *, below: str = "") -> None:
        """Nothing can be created on the disk of this host any more (ENOSPC), until `free_disk`.

        Args:
            below: only in a directory of this name, as a quota does: "replicas" for the copies of others.
        """
        self._hosts[name].orders.fill_disk(below)

    def free_disk(self, name: str) -> None:
        self._hosts[name].orders.free_disk()

    # --- faults ----------------------------------------------------------------------------------

    def place(self, *faults: HostFault) -> None:
        """Let faults hit when their hosts come to the points where they are placed."""
        for fault in faults:
            self._hosts[fault.host].orders.place(fault)

    def wait_for_fault(self, fault: HostFault, *, timeout: float = WAIT_S) -> None:
        """Wait until `fault` has hit, and, where it kills the host, until all of it is dead.

        Raises:
            TimeoutError: it did not.
        """
        host = self._hosts[fault.host]
        self.wait_until(lambda: host.orders.has_hit(fault), f"{fault} did not hit", timeout=timeout)
        if fault.hit is FaultHit.HOST_KILLED:
            host.end()

    def operations(self, name: str) -> list[Operation]:
        """What a host did to the checkpoints on its disk, in order: the points at which faults can hit."""
        return self._hosts[name].orders.operations()

    def copies(self, step: int) -> dict[str, list[str]]:
        """Which hosts hold a committed copy of another host's checkpoint of `step`, by its owner."""
        return copies_on(self.root, step)

    def own(self, step: int) -> list[str]:
        """Which hosts hold their own checkpoint of `step`, committed."""
        return own_on(self.root, step)

    # --- jobs ------------------------------------------------------------------------------------

    def start(
        self,
        fn: Callable[..., object],
        *arguments: object,
        order: Sequence[str] | None = None,
        ranks_per_host: int = 1,
        env: Mapping[str, str] | None = None,
    ) -> ClusterJob:
        """Start a job: ``fn(*arguments)`` in each rank, with the identity that torchrun would give it.

        Args:
            fn: function of a module; it travels by name.
            order: which hosts take part, and the order of their ranks; default: all that live.
            env: further variables.
        """
        names = list(order) if order is not None else self.alive
        call = pickle.dumps((fn, arguments))
        store = self.root / f"store-{uuid.uuid4().hex}"
        since = len(self.lines)
        ranks = []
        for node, name in enumerate(names):
            host = self._hosts[name]
            for local in range(ranks_per_host):
                identity = identity_of(node, local, len(names), ranks_per_host)
                identity |= {"BED_STORE": str(store), **(env or {})}
                process, connection = self._start_function(
                    serve_rank, self._setup(host), host.pid, identity, call
                )
                connection.close()
                ranks.append(process)
        job = ClusterJob(self._words, ranks, since)
        self._jobs.append(job)
        return job

    def command(self, name: str, argv: Sequence[str | os.PathLike[str]], **options: object) -> Command:
        """Start a program, for instance a launcher, with the identity of a host; it ends with the host.

        Faults, partitions, a full disk and `stop` do not reach what is started this way.
        """
        host = self._hosts[name]
        command = Command(argv, env=host.environment(f"cluster-{self._id}"), **options)  # type: ignore[arg-type]
        host.commands.append(command)
        return command

    def make_gate(self, step: int) -> None:
        """Before a job is started with ``Training(hold=step)``."""
        os.mkfifo(self._gates / f"step-{step}")

    def open_gate(self, step: int) -> None:
        """Let the rank go on that is held at `step`."""
        with (self._gates / f"step-{step}").open("w"):
            pass

    # --- what they say ---------------------------------------------------------------------------

    @property
    def lines(self) -> list[str]:
        """All whole lines of all hosts so far."""
        return self._words.lines

    def drain(self) -> None:
        """Take in all that was written until now."""
        self._words.drain()

    def tail(self) -> str:
        """The last lines, for messages."""
        return self._words.tail()

    def wait_for_line(
        self,
        pattern: str,
        *,
        count: int = 1,
        timeout: float = WAIT_S,
        since: int = 0,
        ended: Callable[[], bool] = lambda: False,
    ) -> re.Match[str]:
        """Like `ClusterJob.wait_for_line`, for lines of agents when no rank runs."""
        return self._words.wait_for_line(pattern, count=count, timeout=timeout, since=since, ended=ended)

    def wait_until(self, holds: Callable[[], bool], otherwise: str, *, timeout: float = WAIT_S) -> None:
        """Wait for something that shows in files.

        Raises:
            TimeoutError: with the text `otherwise`.
        """
        self._words.wait_until(holds, otherwise, timeout=timeout)

    # --- the end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """End all processes and remove all files; idempotent."""
        self.network.close()
        for host in self._hosts.values():
            host.end()
        for job in self._jobs:
            job.end()
        self._jobs.clear()
        self._words.close()
        self._interpreter.close()
        shutil.rmtree(self.root, ignore_errors=True)

    def __enter__(self) -> TestCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _host_at(self, address: str) -> str:
        return {host.address: name for name, host in self._hosts.items()}[address]

    def _setup(self, host: Host) -> HostSetup:
        env = host.environment(f"cluster-{self._id}")
        env[AGENT_HOST_ENV] = f"resiliency-cluster-{self._id}-{host.name}"
        route = Route(host.name, host.address, self.network.port)
        return HostSetup(env=env, disk=host.disk, orders=host.root / "orders", route=route)


def flip_bit(path: Path, *, offset: int | None = None) -> None:
    """Change one bit of a file, as a bad cable or cell does; default: in its middle."""
    with path.open("r+b") as file:
        at = path.stat().st_size // 2 if offset is None else offset
        file.seek(at)
        (value,) = file.read(1)
        file.seek(at)
        file.write(bytes([value ^ 0x10]))


def _empty(directory: Path) -> None:
    shutil.rmtree(directory)
    directory.mkdir()


def _shared_memory() -> str | None:
    path = "/dev/shm"  # noqa: S108  # captures must be in memory
    return path if os.path.isdir(path) else None
