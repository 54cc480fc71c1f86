# SPDX-License-Identifier: Apache-2.0
"""What Jobs, JobSets and the scheduler of a control plane owe the adapter, in memory and at a real one.

The real one is that of KUBECONFIG, with the JobSet controller; CONTRACT_NAMESPACE (``default``) holds the
job.  Nodes and kubelets are stand-ins, so that one can fall silent: no node of the cluster's own is touched.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from kubernetes_asyncio.client import Configuration

from supervisor.orchestrator import Answer
from supervisor.orchestrators.gke.client import JOBSETS, NODES, PODS, Api, Object, find_cluster
from supervisor.orchestrators.gke.names import INDEX, JOBSET_NAME, annotations_of
from supervisor.orchestrators.gke.nodes import host_id
from supervisor.orchestrators.gke.orchestrator import GkeOrchestrator
from supervisor.orchestrators.gke.pods import is_active, node_of
from supervisor.orchestrators.gke.view import Times
from supervisor.testing.kubernetes import Cluster
from supervisor.values import Command, CommandKind, OutcomeStatus
from tests.supervisor.orchestrators import carry_out
from tests.supervisor_kubernetes.fleet import JOBS, NEEDS_CLUSTER, TIMES, jobset, new_epoch
from tests.supervisor_kubernetes.stand_ins import StandIns
from tests.waiting import WAIT_S

DONE, FAILED = OutcomeStatus.DONE, OutcomeStatus.FAILED
#: Two of a job, and two spares, and what a test takes away.
NODE_COUNT = 5
POLICIES: dict[str, dict[str, Any]] = {
    "policy Failed": {},
    "podFailurePolicy": {
        "backoffLimitPerIndex": None,
        "podReplacementPolicy": None,
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
            ]
        },
    },
}


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a contract is tested: a configuration for each client, and the adapter's times."""

    connect: Callable[[], Any]
    namespace: str
    times: Times
    look_s: float


@asynccontextmanager
async def in_memory() -> AsyncIterator[Place]:
    async with Cluster() as cluster:

        async def connect() -> Configuration:
            return Configuration(host=cluster.api.url)

        yield Place(connect=connect, namespace=JOBS, times=TIMES, look_s=0.02)


@asynccontextmanager
async def real() -> AsyncIterator[Place]:
    namespace = os.environ.get("CONTRACT_NAMESPACE", "default")
    yield Place(connect=find_cluster, namespace=namespace, times=Times(), look_s=1.0)


class Subject:
    """A job of two hosts on stand-ins, and an adapter."""

    def __init__(self, place: Place, api: Api, name: str) -> None:
        self.place, self.api, self.name = place, api, name
        self.nodes = StandIns(
            api=api,
            namespace=place.namespace,
            names=tuple(f"{name}-n{number}" for number in range(NODE_COUNT)),
            label=name,
            look_s=place.look_s,
        )
        self.adapter = GkeOrchestrator(
            place.namespace, place.namespace, times=place.times, connect=place.connect
        )

    async def pods(self) -> dict[str, Object]:
        """Those that run, by their index."""
        found, _ = await self.api.list(PODS, self.place.namespace, labels=f"{JOBSET_NAME}={self.name}")
        return {
            annotations_of(pod)[INDEX]: pod
            for pod in found
            if is_active(pod) and pod["status"].get("phase") == "Running"
        }

    async def running(self) -> dict[str, Object]:
        """`pods`, once both run."""

        async def wait() -> dict[str, Object]:
            while len(found := await self.pods()) != 2:
                await asyncio.sleep(self.place.look_s)
            return found

        return await asyncio.wait_for(wait(), WAIT_S)

    async def host(self, node: str) -> str:
        return host_id(await self.api.get(NODES, node))

    async def swap(self, node: str) -> Answer:
        used = {node_of(pod) for pod in (await self.pods()).values()} | {node}
        host, spare = await self.host(node), await self.host(min(set(self.nodes.names) - used))
        command = Command(
            epoch=new_epoch(),
            id=uuid.uuid4().hex[:8],
            kind=CommandKind.HOT_SWAP,
            workload=self.name,
            host=host,
            spare=spare,
            deadline_s=120.0,
        )
        return await carry_out(self.adapter, command)


@asynccontextmanager
async def subject_at(place: Place, policy: str) -> AsyncIterator[Subject]:
    name = f"contract-{uuid.uuid4().hex[:6]}"
    spec = {key: value for key, value in POLICIES[policy].items() if value is not None}
    thing = jobset(name, hosts=2, **spec)
    (replicated,) = thing["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    for key, value in POLICIES[policy].items():
        if value is None:
            del job[key]
    pod = job["template"]["spec"]
    pod["nodeSelector"] = {"contract": name}
    pod["tolerations"] = [{"key": "contract", "value": name, "effect": "NoSchedule"}]
    async with Api(await place.connect()) as api:
        subject = Subject(place, api, name)
        async with subject.nodes.there():
            made = await api.create(JOBSETS, thing, place.namespace)
            try:
                await subject.running()
                async with subject.adapter.running(lambda host, change, evidence: None):
                    yield subject
            finally:
                subject.nodes.silent.clear()
                current = await api.try_get(JOBSETS, name, place.namespace)
                await api.delete(JOBSETS, current or made, foreground=True)
                while await api.try_get(JOBSETS, name, place.namespace) is not None:
                    await asyncio.sleep(place.look_s)


Maker = Callable[[], AbstractAsyncContextManager[Place]]
PLACES = [
    pytest.param(in_memory, id="in memory"),
    pytest.param(real, id="KUBECONFIG", marks=NEEDS_CLUSTER),
]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("make", PLACES)
async def test_the_pod_of_a_silent_node_is_made_again_on_one_of_two_spares_which_the_answer_names(
    make: Maker, policy: str
) -> None:
    async with make() as place, subject_at(place, policy) as subject:
        before = await subject.running()
        lost = node_of(before["1"])
        await subject.nodes.lose(lost)
        done = await subject.swap(lost)
        assert done.status is DONE, done
        after = await subject.running()
        assert after["0"]["metadata"]["uid"] == before["0"]["metadata"]["uid"]
        assert node_of(after["1"]) not in {node_of(pod) for pod in before.values()}
        assert done.spare == await subject.host(node_of(after["1"]))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("make", PLACES)
async def test_an_index_is_swapped_twice_and_a_third_time_where_its_job_waits_no_longer(
    make: Maker, policy: str
) -> None:
    async with make() as place, subject_at(place, policy) as subject:
        seen = {pod["metadata"]["uid"] for pod in (await subject.running()).values()}
        for _ in range(2):
            done = await subject.swap(node_of((await subject.running())["1"]))
            assert done.status is DONE, done
            seen |= {pod["metadata"]["uid"] for pod in (await subject.running()).values()}
        assert len(seen) == 4
        third = await subject.swap(node_of((await subject.running())["1"]))
        # The count of failures of an index is in its pods; disruptions that are ignored are none.
        assert third.status is (FAILED if policy == "policy Failed" else DONE), third
        assert ("would wait 40 s" in third.text) == (policy == "policy Failed")
