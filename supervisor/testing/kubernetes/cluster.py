# SPDX-License-Identifier: Apache-2.0
"""A whole cluster in one event loop: API server, controllers, scheduler and kubelets."""

from __future__ import annotations

import asyncio
import math
import random
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from resiliency.tasks import wait_for
from supervisor.testing.kubernetes import hosts, jobs, nodes
from supervisor.testing.kubernetes.hosts import Kubelet
from supervisor.testing.kubernetes.kinds import Object, labels_of
from supervisor.testing.kubernetes.nodes import NodeController
from supervisor.testing.kubernetes.server import ApiServer
from supervisor.testing.kubernetes.store import Store
from supervisor.testing.kubernetes.waits import Waits

#: Longest time between two looks of the controllers: some things change with time alone.
LOOK_S = 0.2
#: Rounds in which controllers must come to rest.
_ROUNDS = 1000


class Cluster:
    """Use as an asynchronous context manager; `api.url` is where it listens.

    Args:
        waits: of its controllers; a hundredth of the real ones where none are given.
        seed: of the scheduler's choice between nodes that fit alike.

    Attributes:
        kubelets: by the name of their node.
        choose_node: the scheduler's choice.
    """

    def __init__(self, waits: Waits | None = None, *, seed: int = 0) -> None:
        self.store = Store()
        self.waits = waits or Waits().faster(100.0)
        chance = random.Random(seed)  # noqa: S311 - repeatable
        self.choose_node: Callable[[list[str]], str] = chance.choice
        self._memory = jobs.JobMemory(self.waits)
        self._gone_at: dict[str, float] = {}
        self.api = ApiServer(self.store)
        self.kubelets: dict[str, Kubelet] = {}
        self._nodes = NodeController(self.store, self.kubelets, chance)
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Cluster:
        self.store.listeners.append(self._changed.set)
        await self.api.start()
        self._task = asyncio.ensure_future(self._run())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        await self.api.close()
        self.store.listeners.remove(self._changed.set)

    # ------------------------------------------------------------------------------------- hosts

    def add_node(self, name: str, kubelet: Kubelet | None = None, **fields: Any) -> None:
        self.store.create("nodes", hosts.node(name, **fields))
        self.kubelets[name] = kubelet or Kubelet()
        self._nodes.add_node(name, self.waits)

    def lose_node(self, name: str, *, noticed: bool = True) -> None:
        """Its machine dies: nothing changes on it any more.

        Args:
            noticed: that was a minute ago, and the node controller has given up on it already; otherwise it
                will, after `Waits.unknown_s`.
        """
        self.kubelets[name].alive = False
        if noticed:
            self.give_up_on(name)

    def give_up_on(self, name: str) -> None:
        """The node controller notices that a node is silent, 50 s after its last sign of life."""
        self._nodes.renew(name, ago_s=nodes.SILENT_S)
        self._nodes.set_ready(name, "Unknown")

    def remove_node(self, name: str) -> None:
        """Its machine is gone, and its object too; pods on it are collected a minute later."""
        self.kubelets.pop(name)
        self.store.delete("nodes", name)
        self._nodes.remove_node(name)

    def reboot_node(self, name: str, boot_id: str = "") -> None:
        """Another start of the same machine; it is there again if it was lost."""
        node = self.store.get("nodes", name)
        node["status"]["nodeInfo"]["bootID"] = boot_id or str(uuid.uuid4())
        self.store.update("nodes", node, checked=False)
        self.kubelets[name].alive = True
        self._nodes.renew(name)
        self._nodes.set_ready(name, "True")

    # ------------------------------------------------------------------------------------- looking

    def pods(self, jobset: str = "", *, node: str = "", namespace: str = "") -> list[Object]:
        """Pods that are not deleted, of one JobSet or node; those that terminate count."""
        label = f"{jobs.PREFIX}/jobset-name"
        return [
            pod
            for pod in self.store.all("pods", namespace)
            if jobset in ("", labels_of(pod).get(label)) and node in ("", pod["spec"].get("nodeName"))
        ]

    def running(self, jobset: str) -> dict[str, str]:
        """Job and index of each running pod of a JobSet, and the node that it runs on."""
        return {
            "-".join((labels_of(pod)[f"{jobs.PREFIX}/job-index"], labels_of(pod)[jobs.INDEX])): pod["spec"][
                "nodeName"
            ]
            for pod in self.pods(jobset)
            if pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"]
        }

    async def until(self, look: Callable[[], object], otherwise: str, *, timeout_s: float = 60.0) -> None:
        """Wait until something is so.

        Raises:
            AssertionError: it is not within `timeout_s`.
        """
        end = time.monotonic() + timeout_s
        while not look():
            if self._task is not None and self._task.done():
                self._task.result()
            if time.monotonic() >= end:
                raise AssertionError(f"{otherwise} after {timeout_s:g} s")
            await asyncio.sleep(0.01)

    # ------------------------------------------------------------------------------------- controllers

    def settle(self) -> float | None:
        """Let controllers act until nothing changes; returns when time alone will change something."""
        for _ in range(_ROUNDS):
            before, now = self.store.version, time.monotonic()
            wakes: list[float | None] = []
            for jobset in self.store.all("jobsets"):
                jobs.reconcile_jobset(self.store, jobset)
            for job in self.store.all("jobs"):
                fresh = self.store.find("jobs", job["metadata"]["name"], job["metadata"]["namespace"])
                if fresh is not None:
                    wakes.append(jobs.reconcile_job(self.store, fresh, self._memory, now))
            jobs.release_orphans(self.store)
            wakes.append(self._nodes.taint(self.waits))
            ended = {
                one["metadata"]["name"] for one in self.store.all("nodes") if nodes.is_out_of_service(one)
            }
            wakes.append(hosts.collect(self.store, self.waits, ended, self._gone_at, now))
            self.schedule()
            wakes.append(hosts.run_pods(self.store, self.kubelets, time.monotonic()))
            if self.store.version == before:
                return min((wake for wake in wakes if wake is not None), default=None)
        raise AssertionError("controllers do not come to rest")

    def schedule(self) -> None:
        """Bind pods that wait to nodes."""
        hosts.schedule(self.store, self.choose_node)

    async def _run(self) -> None:
        while True:
            self._changed.clear()
            wake = self.settle()
            until = min(time.monotonic() + LOOK_S, math.inf if wake is None else wake)
            while True:
                moved = self._changed.is_set()
                renewed = self._nodes.renew_due(self.waits, served=not self.api.down)
                if not moved:
                    self._changed.clear()  # leases move no controller
                self._nodes.judge(self.waits, renewed, served=not self.api.down)
                wait_s = min(until, self._nodes.wake_at()) - time.monotonic()
                with suppress(asyncio.TimeoutError):
                    await wait_for(self._changed.wait(), max(0.0, wait_s))
                if self._changed.is_set() or time.monotonic() >= until:
                    break
