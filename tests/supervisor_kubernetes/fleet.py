# SPDX-License-Identifier: Apache-2.0
"""A cluster in memory, adapters that drive it over HTTP, and the JobSets of the tests."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kubernetes_asyncio.client import Configuration

from supervisor.orchestrator import Answer
from supervisor.orchestrators.gke import RIGHTS, Right, Scope
from supervisor.orchestrators.gke.lease import NAME
from supervisor.orchestrators.gke.orchestrator import GkeOrchestrator
from supervisor.orchestrators.gke.view import Times
from supervisor.testing.kubernetes import Call, Cluster, Fault
from supervisor.testing.kubernetes.hosts import GPU
from supervisor.testing.kubernetes.waits import Waits
from supervisor.values import Change, Command, CommandKind, Evidence, HostFacts
from tests.supervisor.orchestrators import carry_out, look_at, try_once
from tests.waiting import WAIT_S

#: As in a cluster, but a hundred times as fast; none of them is waited for where nothing is wrong.
TIMES = Times(
    lease_s=6.0,
    stuck_s=3.0,
    evict_s=30.0,
    unplaced_s=0.6,
    margin_s=0.5,
    alive_s=30.0,
    silent_s=40.0,
    served_s=0.05,
    retry_s=0.1,
)
#: A command that waits for a queue or an image counts as done at its first look.
IMPATIENT = replace(TIMES, margin_s=1e6)
#: Nodes that are not given up on while the API server is away, for tests that name the nodes of pods.
STEADY = replace(Waits().faster(100.0), unknown_s=3600.0)
#: Of the JobSets, and of the supervisor.
JOBS, OWN = "jobs", "fleet"
NEEDS_CLUSTER = pytest.mark.skipif(
    not os.environ.get("KUBECONFIG"), reason="KUBECONFIG: names no API server to run the contract against"
)


def jobset(
    name: str = "a",
    *,
    hosts: int = 2,
    jobs: int = 1,
    restarts: int = 4,
    labels: dict[str, str] | None = None,
    args: list[str] | None = None,
    env: dict[str, str] | None = None,
    **job_spec: Any,
) -> dict[str, Any]:
    """A JobSet of `jobs` Indexed Jobs that have `hosts` pods together, each with all GPUs of its node."""
    per_job = hosts // jobs
    variables: list[dict[str, Any]] = [
        {"name": "BASE", "valueFrom": field("metadata.annotations['supervisor/generation-base']")},
        {"name": "RESTARTS", "valueFrom": field("metadata.labels['jobset.sigs.k8s.io/restart-attempt']")},
        {"name": "RESILIENCY_JOB_GENERATION", "value": "$(BASE)$(RESTARTS)"},
        *({"name": key, "value": text} for key, text in (env or {}).items()),
    ]
    container = {
        "name": "trainer",
        "image": "trainer:1",
        "command": ["python3", "launcher.py", "--use-supervisor", f"--nnodes={hosts}"],
        "args": args or [],
        "env": variables,
        "resources": {"limits": {GPU: "8"}},
    }
    pod = {"spec": {"restartPolicy": "Never", "terminationGracePeriodSeconds": 1, "containers": [container]}}
    spec = {
        "completionMode": "Indexed",
        "parallelism": per_job,
        "completions": per_job,
        "backoffLimitPerIndex": 3,
        "podReplacementPolicy": "Failed",
        "template": pod,
        **job_spec,
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name, "labels": labels or {}, "annotations": {"team": "llm"}},
        "spec": {
            "replicatedJobs": [{"name": "workers", "replicas": jobs, "template": {"spec": spec}}],
            "failurePolicy": {"maxRestarts": restarts},
        },
    }


def field(path: str) -> dict[str, Any]:
    return {"fieldRef": {"fieldPath": path}}


class Adapter:
    """One adapter with a token of its own, and what it told the sensor."""

    def __init__(self, cluster: Cluster, token: str, times: Times = TIMES) -> None:
        self.cluster, self.token = cluster, token
        self.changes: list[tuple[str, Change]] = []
        self.cordons: list[str] = []  # commands that made them, as it told; empty: somebody else's
        self.facts: dict[str, HostFacts] = {}
        self.orchestrator = GkeOrchestrator(JOBS, OWN, times=times, connect=self._connect)
        self._stack = AsyncExitStack()

    async def _connect(self) -> Configuration:
        configuration = Configuration(host=self.cluster.api.url)
        configuration.api_key["BearerToken"] = f"Bearer {self.token}"
        return configuration

    async def __aenter__(self) -> Adapter:
        def tell(host: str, change: Change, evidence: Evidence) -> None:
            assert evidence.witness == "orchestrator"
            self.changes.append((host, change))
            self.cordons += [evidence.cause] if change is Change.CORDONED else []

        await self._stack.enter_async_context(self.orchestrator.running(tell, self.facts.__setitem__))
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._stack.aclose()

    async def kill(self) -> None:
        """As SIGKILL: none of its calls has an effect from now on, and it gives nothing back."""
        self.cluster.api.cut.add(self.token)
        await self._stack.aclose()

    def let_lease_run_out(self) -> None:
        """What the time does to the Lease of an adapter that was killed."""
        lease = self.cluster.store.get("leases", NAME, OWN)
        lease["spec"]["holderIdentity"] = ""
        self.cluster.store.update("leases", lease, OWN)

    async def try_once(self, command: Command) -> Answer:
        return await try_once(self.orchestrator, command)

    async def do_once(self, id: str, kind: CommandKind, *, epoch: int = 1, **fields: Any) -> Answer:
        """One try of a command."""
        return await self.try_once(Command(epoch=epoch, id=id, kind=kind, **fields))

    async def do(self, id: str, kind: CommandKind, *, epoch: int = 1, **fields: Any) -> Answer:
        return await carry_out(self.orchestrator, Command(epoch=epoch, id=id, kind=kind, **fields))

    async def look(self, host: str) -> bool | None:
        return await look_at(self.orchestrator, host)


async def held_or_done(cluster: Cluster, work: asyncio.Future[Answer]) -> None:
    """Until a fault holds a call; one that time alone makes may not come a second time."""
    held = asyncio.ensure_future(cluster.api.held.wait())
    done, _ = await asyncio.wait({held, work}, timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED)
    held.cancel()
    assert done, "the command neither gets to the call nor ends"


async def kill_at(cluster: Cluster, fault: Fault, command: Command) -> None:
    """An adapter is killed at the call that `fault` holds, and its lease runs out."""
    adapter = await Adapter(cluster, "one").__aenter__()
    cluster.api.faults.place(fault)
    cut_short = asyncio.ensure_future(adapter.try_once(command))
    await held_or_done(cluster, cut_short)
    await adapter.kill()
    adapter.let_lease_run_out()
    cut_short.cancel()
    await asyncio.gather(cut_short, return_exceptions=True)


#: Namespaces in which a right holds; None is all of them.
_PLACES = {Scope.CLUSTER: None, Scope.WORKLOADS: JOBS, Scope.OWN: OWN, Scope.NODE_LEASES: "kube-node-lease"}


def right_of(call: Call) -> Right | None:
    """The right that allows a call."""
    for right in RIGHTS:
        place = _PLACES[right.scope]
        same = (call.group, call.resource) == (right.group, right.resource)
        if same and call.verb in right.verbs and place in (None, call.namespace):
            return right
    return None


@asynccontextmanager
async def cluster_of(*nodes: str, waits: Waits | None = None) -> AsyncIterator[Cluster]:
    """A cluster in which adapters have their rights, and no others."""
    async with Cluster(waits) as cluster:
        cluster.api.authorize = lambda call: right_of(call) is not None
        for node in nodes:
            cluster.add_node(node)
        yield cluster


async def submit(cluster: Cluster, thing: dict[str, Any]) -> None:
    """Create a JobSet as a person does, and wait until all its pods run.

    Its first pods go to nodes by their names, so that a test can say which hosts are spares.
    """
    choose_node, cluster.choose_node = cluster.choose_node, min
    cluster.store.create("jobsets", thing, JOBS)
    name = thing["metadata"]["name"]
    wanted = sum(
        one.get("replicas", 1) * one["template"]["spec"]["parallelism"]
        for one in thing["spec"]["replicatedJobs"]
    )
    await cluster.until(lambda: len(cluster.running(name)) == wanted, f"{name} does not run")
    cluster.choose_node = choose_node


def host(cluster: Cluster, node: str) -> str:
    """Id under which the daemon of a node registers."""
    boot = cluster.store.get("nodes", node)["status"]["nodeInfo"]["bootID"]
    return f"{node}.{boot.replace('-', '')[:12]}"


def words(cluster: Cluster, name: str = "a") -> list[str]:
    """Command line of a JobSet's trainer."""
    (replicated,) = cluster.store.get("jobsets", name, JOBS)["spec"]["replicatedJobs"]
    (container,) = replicated["template"]["spec"]["template"]["spec"]["containers"]
    return [*container["command"], *container["args"]]


def new_epoch() -> int:
    """Above that of any run before; a real API server remembers them."""
    return time.time_ns() // 10**6


def kubeconfig(path: Path, url: str, user: str = "actuator") -> Path:
    """Write the file by which a program finds the API server at `url`, as `user`."""
    path.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "c",
                "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
                "clusters": [{"name": "c", "cluster": {"server": url}}],
                "users": [{"name": "u", "user": {"token": user}}],
            }
        )
    )
    return path
