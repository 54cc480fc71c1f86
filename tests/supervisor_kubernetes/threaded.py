# SPDX-License-Identifier: Apache-2.0
"""A cluster beside a test that waits for processes and so has no event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from supervisor.testing.kubernetes import Cluster
from supervisor.testing.kubernetes.hosts import Kubelet
from supervisor.watchdogs.watchdog import boot_id
from tests.supervisor_kubernetes.fleet import JOBS, OWN, STEADY, cluster_of, kubeconfig
from tests.supervisor_plane.plane import PATIENCE_S, Plane

T = TypeVar("T")


class Threaded:
    """A cluster in an event loop of its own: the test waits without one."""

    def __init__(self, cluster: Cluster, loop: asyncio.AbstractEventLoop) -> None:
        self.cluster, self._loop = cluster, loop

    def call(self, what: Callable[[Cluster], T]) -> T:
        async def work() -> T:
            return what(self.cluster)

        return asyncio.run_coroutine_threadsafe(work(), self._loop).result(PATIENCE_S)


@contextmanager
def threaded_cluster() -> Iterator[Threaded]:
    started: list[Threaded] = []
    ready, over = threading.Event(), asyncio.Event()

    async def work() -> None:
        async with cluster_of(waits=STEADY) as cluster:
            cluster.choose_node = min  # these tests know nodes by their names
            started.append(Threaded(cluster, asyncio.get_running_loop()))
            ready.set()
            await over.wait()

    thread = threading.Thread(target=lambda: asyncio.run(work()))
    thread.start()
    assert ready.wait(PATIENCE_S)
    try:
        yield started[0]
    finally:
        started[0].call(lambda cluster: over.set())
        thread.join(PATIENCE_S)


def add_node(cluster: Cluster, node: str, kubelet: Kubelet | None = None) -> None:
    """One whose daemon runs on this machine."""
    cluster.add_node(node, kubelet)
    thing = cluster.store.get("nodes", node)
    # Daemons say of which start of the machine they are, and all of them are on this one.
    thing["status"]["nodeInfo"]["bootID"] = boot_id()
    cluster.store.update("nodes", thing, checked=False)


def drive(plane: Plane, cluster: Threaded) -> None:
    """Have the supervisor of `plane` find the cluster."""
    config = kubeconfig(plane.tmp_path / "config", cluster.call(lambda cluster: cluster.api.url))
    plane.env |= {
        "KUBECONFIG": str(config),
        "WORKLOAD_NAMESPACE": JOBS,
        "JOB_NAMESPACE": OWN,
        "POD_NAME": "actuator-0",
    }
