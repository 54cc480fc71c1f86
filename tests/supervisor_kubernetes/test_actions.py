# SPDX-License-Identifier: Apache-2.0
"""Each action of the Kubernetes orchestrator over HTTP: its effect, once, and what it costs."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from supervisor.orchestrators.gke.nodes import holds_place
from supervisor.testing.kubernetes import Fault
from supervisor.testing.kubernetes.hosts import GPU
from supervisor.values import Change, CommandKind, OutcomeStatus
from tests.supervisor_kubernetes.fleet import (
    JOBS,
    TIMES,
    Adapter,
    cluster_of,
    host,
    jobset,
    submit,
    words,
)
from tests.supervisor_kubernetes.virtual_time import run_in_virtual_time as run

pytestmark = pytest.mark.virtual_time

DONE = OutcomeStatus.DONE


async def test_a_hot_swap_replaces_the_pod_of_a_lost_host_and_keeps_the_others() -> None:
    async with cluster_of("n1", "n2", "n3") as cluster, Adapter(cluster, "one") as adapter:
        await submit(cluster, jobset(hosts=2))
        survivor = {pod["metadata"]["uid"] for pod in cluster.pods("a", node="n1")}
        lost, spare = host(cluster, "n2"), host(cluster, "n3")
        cluster.lose_node("n2")
        swap = {"workload": "a", "host": lost, "spare": spare}
        done = await adapter.do("c1", CommandKind.HOT_SWAP, **swap)
        assert (done.status, done.text) == (DONE, "moved to n3; 2 pods run")
        assert cluster.running("a") == {"0-0": "n1", "0-1": "n3"}
        assert {pod["metadata"]["uid"] for pod in cluster.pods("a", node="n1")} == survivor
        assert cluster.store.get("jobsets", "a", JOBS)["status"]["restarts"] == 0
        assert cluster.store.get("nodes", "n2")["spec"]["unschedulable"]
        before = cluster.store.get("jobsets", "a", JOBS)["metadata"]["resourceVersion"]
        again = await adapter.do("c1", CommandKind.HOT_SWAP, **swap)
        assert (again.status, again.text, again.spare) == (DONE, "moved to n3; 2 pods run", spare)
        assert cluster.store.get("jobsets", "a", JOBS)["metadata"]["resourceVersion"] == before


async def test_a_swap_says_where_the_scheduler_put_the_pod_and_not_where_the_controller_expected_it() -> None:
    async with cluster_of("n1", "n2", "n3", "n4") as cluster, Adapter(cluster, "one") as adapter:
        await submit(cluster, jobset(hosts=2))
        cluster.lose_node("n2")
        cluster.choose_node = max
        swap = {"workload": "a", "host": host(cluster, "n2"), "spare": host(cluster, "n3")}
        done = await adapter.do("c1", CommandKind.HOT_SWAP, **swap)
        assert (done.text, done.spare) == ("moved to n4; 2 pods run", host(cluster, "n4"))


async def test_a_pod_of_a_lost_host_is_no_failure_where_the_job_ignores_disruptions() -> None:
    async with cluster_of("n1", "n2", "n3") as cluster, Adapter(cluster, "one") as adapter:
        ignores = [{"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}]
        policy = {"backoffLimitPerIndex": None, "backoffLimit": 0, "podFailurePolicy": {"rules": ignores}}
        await submit(cluster, jobset(hosts=2, **policy))
        cluster.lose_node("n2")
        swap = {"workload": "a", "host": host(cluster, "n2"), "spare": host(cluster, "n3")}
        done = await adapter.do("c1", CommandKind.HOT_SWAP, **swap)
        assert (done.text, done.spare) == ("moved to n3; 2 pods run", host(cluster, "n3"))
        (job,) = cluster.store.all("jobs")
        assert job["status"]["failed"] == 0


async def test_a_swap_whose_last_mark_met_a_conflict_says_at_its_next_try_where_the_pod_is() -> None:
    async with cluster_of("n1", "n2", "n3") as cluster, Adapter(cluster, "one") as adapter:
        await submit(cluster, jobset(hosts=2))
        cluster.lose_node("n2")
        spare = host(cluster, "n3")
        swap = {"workload": "a", "host": host(cluster, "n2"), "spare": spare}
        cluster.api.faults.place(Fault(verb="patch", resource="jobsets", call=2, status=409))
        assert (await adapter.do_once("c1", CommandKind.HOT_SWAP, **swap)).passing
        await cluster.until(lambda: cluster.running("a") == {"0-0": "n1", "0-1": "n3"}, "not moved")
        done = await adapter.do("c1", CommandKind.HOT_SWAP, **swap)
        assert (done.text, done.spare) == ("moved to n3; 2 pods run", spare)


async def test_where_a_job_cannot_replace_one_pod_a_hot_swap_restarts_the_jobset() -> None:
    async with cluster_of("n1", "n2", "n3") as cluster, Adapter(cluster, "one") as adapter:
        await submit(cluster, jobset(hosts=2, backoffLimitPerIndex=None, backoffLimit=0))
        cluster.lose_node("n2")
        swap = {"workload": "a", "host": host(cluster, "n2"), "spare": host(cluster, "n3")}
        done = await adapter.do("c1", CommandKind.HOT_SWAP, **swap)
        assert done.text == "the whole job, because its Jobs replace no single pod: restart 1; 2 pods run"
        assert sorted(cluster.running("a").values()) == ["n1", "n3"]


async def test_a_workload_reset_restarts_the_jobset_once_by_its_own_policy() -> None:
    async with cluster_of("n1", "n2") as cluster, Adapter(cluster, "one") as adapter:
        await submit(cluster, jobset(hosts=2, jobs=2))
        uid = cluster.store.get("jobsets", "a", JOBS)["metadata"]["uid"]
        before = {pod["metadata"]["uid"] for pod in cluster.pods("a")}
        for _ in range(2):
            done = await adapter.do("c1", CommandKind.WORKLOAD_RESET, workload="a")
            assert done.status is DONE
        after = cluster.store.get("jobsets", "a", JOBS)
        assert (after["metadata"]["uid"], after["status"]["restarts"]) == (uid, 1)
        assert not before & {pod["metadata"]["uid"] for pod in cluster.pods("a")}
        assert len(cluster.running("a")) == 2


async def test_a_jobset_without_a_restart_left_is_made_again_with_a_higher_generation() -> None:
    async with cluster_of("n1", "n2") as cluster, Adapter(cluster, "one") as adapter:
        await submit(cluster, jobset(hosts=2, restarts=0))
        old = cluster.store.get("jobsets", "a", JOBS)
        done = await adapter.do("c1", CommandKind.WORKLOAD_RESET, workload="a")
        assert done.status is DONE
        assert "maxRestarts (0) are used up" in done.text
        new = cluster.store.get("jobsets", "a", JOBS)
        assert new["metadata"]["uid"] != old["metadata"]["uid"]
        assert new["metadata"]["annotations"]["team"] == "llm"
        (replicated,) = new["spec"]["replicatedJobs"]
        template = replicated["template"]["spec"]["template"]
        assert template["metadata"]["annotations"] == {"supervisor/generation-base": "1"}
        assert list(cluster.store.all("configmaps")) == []


async def test_a_job_shrinks_without_a_host_and_grows_again_with_all_that_names_its_size() -> None:
    async with cluster_of("n1", "n2", "n3") as cluster, Adapter(cluster, "one") as adapter:
        sizes = {"NNODES": "2", "WORLD_SIZE": "16", "NUM_DP_REPLICAS": "2"}
        await submit(cluster, jobset(hosts=2, env=sizes, args=["--num-dp-replicas", "2", "train.py"]))
        cluster.lose_node("n2")
        down = {"workload": "a", "host": host(cluster, "n2"), "replicas": 1}
        done = await adapter.do("c1", CommandKind.SCALE_DOWN, **down)
        assert (done.status, done.text) == (DONE, "1 pods run")
        assert words(cluster)[-4:] == ["--nnodes=1", "--num-dp-replicas", "1", "train.py"]
        up = await adapter.do("c2", CommandKind.SCALE_UP, workload="a", replicas=2)
        assert up.status is DONE
        assert sorted(cluster.running("a").values()) == ["n1", "n3"]
        (replicated,) = cluster.store.get("jobsets", "a", JOBS)["spec"]["replicatedJobs"]
        spec = replicated["template"]["spec"]
        assert (replicated["replicas"], spec["parallelism"], spec["completions"]) == (1, 2, 2)
        (container,) = spec["template"]["spec"]["containers"]
        named = {one["name"]: one.get("value") for one in container["env"]}
        assert {name: named[name] for name in sizes} == sizes
        assert spec["template"]["metadata"]["annotations"] == {"supervisor/generation-base": "2"}
        more = await adapter.do("c3", CommandKind.SCALE_UP, workload="a", replicas=3)
        assert (more.status, more.text) == (
            OutcomeStatus.FAILED,
            "3 replicas need 3 hosts, and there are 2",
        )
        assert not more.passing


def test_a_job_grows_onto_hosts_that_are_held_ready_or_shared_and_not_onto_those_of_others() -> None:
    def on(node: str, gpus: int, priority: int = 0) -> dict[str, Any]:
        container = {"name": "c", "resources": {"limits": {GPU: str(gpus)} if gpus else {}}}
        return {
            "metadata": {"name": f"beside-{node}"},
            "spec": {"nodeName": node, "priority": priority, "containers": [container]},
            "status": {"phase": "Running", "conditions": []},
        }

    trainer = on("n9", 8)["spec"]
    assert holds_place(on("n1", 8), trainer, 0)
    assert not holds_place(on("n1", 8, priority=-10), trainer, 0)
    assert not holds_place(on("n1", 0), trainer, 0)
    # A job without devices shares with nobody: its pods say nothing of what they need.
    assert holds_place(on("n1", 0), on("n9", 0)["spec"], 0)

    async def work() -> None:
        async with cluster_of("n1", "n2", "n3") as cluster, Adapter(cluster, "one") as adapter:
            await submit(cluster, jobset(hosts=2))
            # As of the simulator: beside ranks, and on a spare.
            for node in ("n1", "n3"):
                cluster.store.create("pods", on(node, 0), JOBS)
            up = await adapter.do("c1", CommandKind.SCALE_UP, workload="a", replicas=3)
            assert (up.status, up.text) == (DONE, "3 pods run")

    run(work())


async def test_a_jobset_a_is_not_ab_nor_the_a_of_another_namespace() -> None:
    names = [f"n{number}" for number in range(6)]
    async with cluster_of(*names) as cluster, Adapter(cluster, "one") as adapter:
        await submit(cluster, jobset("a", hosts=2, jobs=2))
        await submit(cluster, jobset("ab", hosts=1))
        # Its Job has the name that a Job of "a-workers" would have, and its pods their labels.
        await submit(cluster, jobset("a-workers", hosts=1))
        cluster.store.create("jobsets", jobset("a", hosts=1), "elsewhere")
        await cluster.until(lambda: len(cluster.pods("a", namespace="elsewhere")) == 1, "not there")
        others = [*cluster.pods("ab"), *cluster.pods("a-workers"), *cluster.pods(namespace="elsewhere")]
        done = await adapter.do("c1", CommandKind.WORKLOAD_RECREATION, workload="a")
        assert done.text == "2 pods run"
        there = {pod["metadata"]["uid"] for pod in cluster.pods()}
        assert {pod["metadata"]["uid"] for pod in others} <= there
        gone = await adapter.do("c2", CommandKind.WORKLOAD_RESET, workload="a-")
        assert gone.text == f"there is no JobSet a- in namespace {JOBS}"


async def test_a_drain_waits_for_the_disruption_budget_and_deletes_at_its_deadline() -> None:
    times = replace(TIMES, evict_s=0.5)
    async with cluster_of("n1", "n2", "n3") as cluster, Adapter(cluster, "one", times) as adapter:
        await submit(cluster, jobset(hosts=2))
        selector = {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": "a"}}
        budget = {"metadata": {"name": "keep"}, "spec": {"minAvailable": 2, "selector": selector}}
        cluster.store.create("poddisruptionbudgets", budget, JOBS)
        drained = host(cluster, "n2")
        done = await adapter.do("c1", CommandKind.DRAIN_HOST, host=drained)
        assert done.status is DONE
        assert done.text == "cordoned; 0 pods evicted, 1 deleted against a disruption budget"
        evictions = [call for call in cluster.api.calls if call.resource == "pods/eviction"]
        assert evictions
        assert (drained, Change.GONE) in adapter.changes
        await cluster.until(lambda: cluster.running("a") == {"0-0": "n1", "0-1": "n3"}, "not moved")
        cluster.store.delete("poddisruptionbudgets", "keep", JOBS)
        again = await adapter.do("c2", CommandKind.DRAIN_HOST, host=host(cluster, "n3"))
        assert again.text == "cordoned; 1 pods evicted"


async def test_a_drain_whose_node_is_changed_at_its_last_mark_still_says_what_it_did() -> None:
    async with cluster_of("n1", "n2", "n3") as cluster, Adapter(cluster, "one") as adapter:
        await submit(cluster, jobset(hosts=2))
        cluster.api.faults.place(Fault(verb="patch", resource="nodes", call=2, status=409))
        done = await adapter.do_once("c1", CommandKind.DRAIN_HOST, host=host(cluster, "n2"))
        assert (done.status, done.text) == (DONE, "cordoned; 1 pods evicted")


async def test_a_swap_leaves_the_pods_of_a_machine_that_was_started_again_since() -> None:
    async with cluster_of("n1", "n2", "n3") as cluster, Adapter(cluster, "one") as adapter:
        await submit(cluster, jobset(hosts=2))
        lost, before = host(cluster, "n2"), {pod["metadata"]["uid"] for pod in cluster.pods("a")}
        cluster.reboot_node("n2")
        swap = {"workload": "a", "host": lost, "spare": host(cluster, "n3")}
        done = await adapter.do("c1", CommandKind.HOT_SWAP, **swap)
        assert (done.status, done.text) == (DONE, "n2 was started again, so its pods stay; 2 pods run")
        assert {pod["metadata"]["uid"] for pod in cluster.pods("a")} == before
        assert "unschedulable" not in cluster.store.get("nodes", "n2")["spec"]


async def test_a_drain_deletes_a_pod_that_two_disruption_budgets_keep_from_any_eviction() -> None:
    times = replace(TIMES, evict_s=0.5)
    async with cluster_of("n1", "n2", "n3") as cluster, Adapter(cluster, "one", times) as adapter:
        await submit(cluster, jobset(hosts=2))
        for name in ("keep", "keep-too"):
            budget = {"metadata": {"name": name}, "spec": {"maxUnavailable": 2, "selector": {}}}
            cluster.store.create("poddisruptionbudgets", budget, JOBS)
        done = await adapter.do_once("c1", CommandKind.DRAIN_HOST, host=host(cluster, "n2"))
        assert done.text == "cordoned; 0 pods evicted, 1 deleted against a disruption budget"


async def test_a_host_is_cordoned_and_uncordoned_once_and_the_sensor_is_told() -> None:
    async with cluster_of("n1") as cluster, Adapter(cluster, "one") as adapter:
        name = host(cluster, "n1")

        def cordoned() -> bool:
            return bool(cluster.store.get("nodes", "n1")["spec"].get("unschedulable"))

        assert (await adapter.do("c1", CommandKind.CORDON_HOST, host=name)).text == "cordoned"
        assert cordoned()
        assert (await adapter.do("c2", CommandKind.UNCORDON_HOST, host="n1")).text == "uncordoned"
        assert not cordoned()
        # A command that comes again after its effect was taken back has none.
        assert (await adapter.do("c1", CommandKind.CORDON_HOST, host=name)).text == "cordoned before"
        assert not cordoned()
        await cluster.until(lambda: len(adapter.changes) == 2, "not told")
        assert adapter.changes == [(name, Change.CORDONED), (name, Change.UNCORDONED)]
        cluster.reboot_node("n1")
        await cluster.until(lambda: (name, Change.GONE) in adapter.changes, "not told")
        assert (await adapter.do("c3", CommandKind.CORDON_HOST, host=name)).text == f"{name} is gone"
        assert not cordoned()
        cluster.remove_node("n1")
        await cluster.until(lambda: len(adapter.changes) == 4, "not told")
        assert adapter.changes[-1][1] is Change.GONE


async def test_a_cordon_is_ended_by_the_supervisor_only_where_it_made_it_and_by_a_person_always() -> None:
    async with cluster_of("n1") as cluster, Adapter(cluster, "one") as adapter:
        name, told = host(cluster, "n1"), 0

        def cordon_by_hand(cordoned: bool) -> None:
            node = cluster.store.get("nodes", "n1")
            node["spec"]["unschedulable"] = cordoned
            cluster.store.update("nodes", node)

        async def opens(id: str) -> OutcomeStatus:
            nonlocal told
            told += 1
            await cluster.until(lambda: len(adapter.cordons) == told, "not told")
            done = await adapter.do(id, CommandKind.UNCORDON_HOST, host=name, evidence=("e1",))
            assert bool(cluster.store.get("nodes", "n1")["spec"].get("unschedulable")) != (
                done.status is DONE
            )
            return done.status

        ours = {"host": name, "evidence": ("e1",)}
        await adapter.do("c1", CommandKind.CORDON_HOST, **ours)
        assert await opens("c2") is DONE
        cordon_by_hand(True)
        assert await opens("c3") is OutcomeStatus.WITHDRAWN
        await adapter.do("c4", CommandKind.CORDON_HOST, **ours)  # it stays the person's
        assert (await adapter.do("c5", CommandKind.UNCORDON_HOST, **ours)).status is not DONE
        assert (await adapter.do("c6", CommandKind.UNCORDON_HOST, host=name)).status is DONE
        # A person's own cordon, and one that a person takes over from the supervisor.
        await adapter.do("c7", CommandKind.CORDON_HOST, host=name)
        assert await opens("c8") is OutcomeStatus.WITHDRAWN
        await adapter.do("c9", CommandKind.UNCORDON_HOST, host=name)
        await adapter.do("d1", CommandKind.CORDON_HOST, **ours)
        await adapter.do("d2", CommandKind.CORDON_HOST, host=name)
        assert await opens("d3") is OutcomeStatus.WITHDRAWN
        assert adapter.cordons == ["c1", "", "", "d1"]


async def test_a_host_is_there_while_its_kubelet_renews_its_lease() -> None:
    async with cluster_of("n1", "n2") as cluster, Adapter(cluster, "one") as adapter:
        first, second = host(cluster, "n1"), host(cluster, "n2")
        await cluster.until(adapter.orchestrator._view.nodes.listed.is_set, "not listed")
        assert await adapter.look(first) is True
        lease = cluster.store.get("leases", "n1", "kube-node-lease")
        del lease["spec"]["renewTime"]
        cluster.kubelets["n1"].alive = False
        cluster.store.update("leases", lease, "kube-node-lease")
        assert await adapter.look(first) is None
        cluster.lose_node("n2")
        while (seen := await adapter.look(second)) is None:
            await asyncio.sleep(0.1)
        assert seen is False
        assert await adapter.look("n1.anotherboot0") is False
        cluster.api.faults.place(Fault(verb="get", resource="leases", status=500, times=0))
        assert await adapter.look(first) is None


async def test_an_in_job_reset_needs_a_pod_that_is_left() -> None:
    async with cluster_of("n1") as cluster, Adapter(cluster, "one") as adapter:
        await submit(cluster, jobset(hosts=1))
        done = await adapter.do("c1", CommandKind.IN_JOB_RESET, workload="a")
        assert (done.status, done.text) == (DONE, "1 of 1 pods are there")
        cluster.remove_node("n1")
        await cluster.until(lambda: adapter.orchestrator._view.nodes.get("n1") is None, "still seen")
        await cluster.until(
            lambda: not any(pod["spec"].get("nodeName") for pod in adapter.orchestrator._view.pods.all()),
            "its pod is still seen",
        )
        refused = await adapter.do("c2", CommandKind.IN_JOB_RESET, workload="a")
        assert refused.text == "no pod of a is left: the whole job must be started again"
