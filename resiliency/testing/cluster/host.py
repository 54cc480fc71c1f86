# SPDX-License-Identifier: Apache-2.0
"""What runs in the processes of a cluster's host: the one that starts its agents, the agents, the ranks.

All of them are one process group, so one signal ends a host.  They are forked from the interpreter of
the test run (see `warm`), and agents from the host's first process, which has imported the engine: a
host with its agent is there in a tenth of a second.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

from resiliency import log
from resiliency.proc_stat import read_stat
from resiliency.runtime import AGENT_HOST_ENV, RunInfo
from resiliency.testing.cluster.network import Route, install
from resiliency.testing.cluster.points import Watch

_PR_SET_PDEATHSIG = 1
_LOOK_S = 0.02
_AT_ONCE = timedelta(0)
_JOIN_TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class HostSetup:
    """What a process has to know to be part of a host."""

    env: Mapping[str, str]
    disk: Path
    orders: Path
    route: Route


def serve_host(cluster: Connection, setup: HostSetup) -> None:
    """The first process of a host: starts an agent for each arena that its ranks ask for.

    As `resiliency.launch.agents.main` does for a launcher, without its care for a good end: the end of
    a host of the cluster is SIGKILL.
    """
    os.setpgid(0, 0)
    _become_part(setup, in_rank=False)
    from resiliency.checkpoint.agent import main as agent_main

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("\0" + setup.env[AGENT_HOST_ENV])
        listener.listen(128)
        cluster.send(os.getpid())
        _Starter(listener, cluster, lambda arena: agent_main.serve(arena, grace=timedelta.max)).run()


class _Starter:
    def __init__(self, listener: socket.socket, cluster: Connection, serve: Callable[[Path], int]) -> None:
        self._listener = listener
        self._cluster = cluster
        self._serve = serve
        self._agents: dict[str, int] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(cluster, selectors.EVENT_READ)

    def run(self) -> None:
        """Serve until the cluster is gone."""
        from resiliency.checkpoint.agent.protocol import Channel, Start, Started
        from resiliency.errors import PeerError

        while True:
            for key, _ in self._selector.select():
                source = key.fileobj
                if source is self._cluster:
                    os.killpg(0, signal.SIGKILL)
                if source is self._listener:
                    self._selector.register(Channel(self._listener.accept()[0]), selectors.EVENT_READ)
                    continue
                assert isinstance(source, Channel)
                try:
                    message = source.receive(_AT_ONCE)
                    if isinstance(message, Start):
                        source.send(Started(pid=self._agent_of(message.arena)))
                except PeerError:  # has its answer, or is gone
                    self._selector.unregister(source)
                    source.close()

    def _agent_of(self, arena: str) -> int:
        known = self._agents.get(arena)
        if known is not None and os.waitpid(known, os.WNOHANG) == (0, 0):
            return known
        pid = os.fork()
        if pid == 0:
            self._become_agent(arena)
        self._agents[arena] = pid
        return pid

    def _become_agent(self, arena: str) -> NoReturn:
        code = 1
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            self._selector.close()
            self._listener.close()
            self._cluster.close()
            log.configure(RunInfo.from_env())
            code = self._serve(Path(arena))
        finally:
            os._exit(code)


def serve_rank(
    cluster: Connection, setup: HostSetup, host_pid: int, rank: Mapping[str, str], call: bytes
) -> None:
    """One rank: a process of the host's group that runs the test's function."""
    cluster.close()
    os.setpgid(0, host_pid)
    _become_part(setup, in_rank=True)
    os.environ.update(rank)
    import torch

    torch.set_num_threads(1)
    log.configure(RunInfo.from_env())
    fn, arguments = pickle.loads(call)  # noqa: S301  # sent by our own parent
    fn(*arguments)


def _become_part(setup: HostSetup, *, in_rank: bool) -> None:
    # A host must not outlive the cluster, whatever happened to the parent's cleanup.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    # Lines of many processes share the pipe: each is written at once.
    for name in ("stdout", "stderr"):
        setattr(sys, name, os.fdopen(os.dup(1), "w", buffering=1))
    os.environ.update(setup.env)
    Watch(setup.disk, setup.orders, in_rank=in_rank)
    install(setup.route)


def members(group: int) -> list[int]:
    """Living processes of a process group; zombies hold nothing and do not count."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError):
                fields = read_stat(name)
                if int(fields[2]) == group and fields[0] not in "ZX":
                    found.append(int(name))
    return found


def end_group(group: int) -> None:
    """SIGKILL a whole host, and wait until the last of its processes is dead.

    Raises:
        TimeoutError: a process does not die, for instance because it waits for a broken disk.
    """
    deadline = time.monotonic() + _JOIN_TIMEOUT_S
    while True:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        left = members(group)
        if not left:
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {left} of a host survive SIGKILL")
        # They are children of others, and nobody tells us of their end: look.
        threading.Event().wait(_LOOK_S)
