# SPDX-License-Identifier: Apache-2.0
"""What the adapter knows of hosts and tells their daemons, which have no rights at the API server."""

from __future__ import annotations

from typing import Any

import pytest

from supervisor.daemon.standalone import read_annotations
from supervisor.orchestrators.gke.jobsets import pod_template
from supervisor.orchestrators.gke.names import HOSTS_PER_REPLICA
from supervisor.values import DeviceState, HostFacts, PodFacts
from tests.supervisor_kubernetes.fleet import JOBS, Adapter, cluster_of, jobset, submit

pytestmark = pytest.mark.virtual_time

LABELS = {
    "cloud.google.com/gce-topology-block": "b1",
    "cloud.google.com/gce-topology-subblock": "s1",
    "topology.kubernetes.io/zone": "us-east5-a",
}


async def test_labels_of_nodes_are_told_when_they_are_seen_and_when_they_change() -> None:
    async with cluster_of("plain") as cluster:
        cluster.add_node("placed", labels=LABELS)
        async with Adapter(cluster, "one") as adapter:
            await cluster.until(lambda: len(adapter.facts) == 2, "not told")
            assert adapter.facts == {
                "plain": HostFacts(),
                "placed": HostFacts(subblock="s1", superblock="b1", zone="us-east5-a"),
            }
            node = cluster.store.get("nodes", "plain")
            node["metadata"]["labels"]["topology.kubernetes.io/zone"] = "us-east5-b"
            cluster.store.update("nodes", node)
            await cluster.until(lambda: adapter.facts["plain"].zone == "us-east5-b", "no change is told")


SAID = {
    "supervisor/job-name": "workers",
    "supervisor/container-name": "trainer",
    "supervisor/max-workload-restarts": "3",
    "supervisor/num-nodes-per-dp": "1",
}


def annotated(name: str, *, hosts: int, jobs: int = 1) -> dict[str, Any]:
    thing = jobset(name, hosts=hosts, jobs=jobs)
    template = thing["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    template["metadata"] = {"annotations": {**SAID, "supervisor/generation-base": "7", "team": "llm"}}
    return thing


async def test_a_pod_with_annotations_is_told_to_its_host_and_one_without_is_not() -> None:
    async with cluster_of("n1", "n2", "n3") as cluster, Adapter(cluster, "one") as adapter:
        await submit(cluster, annotated("a", hosts=2, jobs=2))
        await submit(cluster, jobset("b", hosts=1))

        def told() -> list[PodFacts]:
            return [facts.pod for facts in adapter.facts.values() if facts.pod is not None]

        await cluster.until(
            lambda: [pod.state for pod in told()] == [DeviceState.RUNNING] * 2, "pods are not told"
        )
        assert {pod.index for pod in told()} == {0, 1}
        assert {(pod.workload, pod.namespace, pod.hosts) for pod in told()} == {("a", JOBS, 2)}
        (said,) = {pod.annotations for pod in told()}
        assert {f"supervisor/{one}" for one in said} == {f"{name}={text}" for name, text in SAID.items()}
        workload, sentences = read_annotations(told()[0])
        assert sentences == ()
        assert (workload.replicas, workload.max_workload_restarts, workload.job) == (2, 3, "workers")


async def test_a_host_is_told_the_size_that_an_action_takes_its_job_for() -> None:
    async with cluster_of("n1", "n2") as cluster, Adapter(cluster, "one") as adapter:
        thing = annotated("a", hosts=2)
        del pod_template(thing["spec"]["replicatedJobs"][0])["metadata"]["annotations"][HOSTS_PER_REPLICA]
        await submit(cluster, thing)
        await cluster.until(lambda: all(facts.pod for facts in adapter.facts.values()), "nothing is told")
        jobs = [read_annotations(facts.pod)[0] for facts in adapter.facts.values() if facts.pod]
        assert [(job.replicas, job.nodes_per_replica) for job in jobs] == [(2, 1)] * 2


async def test_the_newest_pod_of_an_index_is_told_and_nothing_once_its_job_is_gone() -> None:
    async with cluster_of("n1") as cluster, Adapter(cluster, "one") as adapter:
        await submit(cluster, annotated("a", hosts=1))

        def pod() -> PodFacts | None:
            return adapter.facts["n1"].pod if "n1" in adapter.facts else None

        def runs() -> bool:
            now = pod()
            return now is not None and now.state is DeviceState.RUNNING

        await cluster.until(runs, "not told")
        first = pod()
        (failed,) = cluster.pods(node="n1")
        failed["status"] = {"phase": "Failed"}
        cluster.store.update("pods", failed, JOBS, checked=False)
        await cluster.until(lambda: runs() and pod() != first, "the next pod is not told")
        cluster.store.delete("jobsets", "a", JOBS)
        await cluster.until(lambda: pod() is None, "a job that is gone is told")
