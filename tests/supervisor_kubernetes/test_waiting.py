# SPDX-License-Identifier: Apache-2.0
"""What an action waits for, and what it does not take for a reason to act."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import replace

import pytest

from supervisor.orchestrators.gke.names import seconds_of
from supervisor.orchestrators.gke.pods import node_of, starts_for
from supervisor.testing.kubernetes import Cluster, Fault
from supervisor.testing.kubernetes.kinds import Object
from supervisor.values import Change, Command, CommandKind, OutcomeStatus
from tests.supervisor_kubernetes.fleet import (
    IMPATIENT,
    JOBS,
    OWN,
    TIMES,
    Adapter,
    cluster_of,
    host,
    jobset,
    submit,
)

pytestmark = pytest.mark.virtual_time

DONE, FAILED, WITHDRAWN = OutcomeStatus.DONE, OutcomeStatus.FAILED, OutcomeStatus.WITHDRAWN


@pytest.mark.slow
async def test_a_slow_image_pull_is_waited_for_and_is_no_reason_to_act() -> None:
    async with cluster_of("n1", "n2", "n3") as cluster, Adapter(cluster, "one") as adapter:
        await submit(cluster, jobset(hosts=2))
        cluster.kubelets["n3"].pull_s = 3600.0
        cluster.lose_node("n2")
        swap = {"workload": "a", "host": host(cluster, "n2"), "spare": host(cluster, "n3")}
        waiting = asyncio.ensure_future(adapter.do("c1", CommandKind.HOT_SWAP, **swap))
        view = adapter.orchestrator._view
        await cluster.until(
            lambda: [node_of(pod) for pod in view.pods.all()].count("n3"), "its pod is put nowhere"
        )
        # By its deadline, less a margin, it counts as done.
        view.times = IMPATIENT
        done = await waiting
        assert (done.status, done.text) == (
            DONE,
            "moved to n3; still waiting: 1 pods run, 1 start on their nodes",
        )
        pods = {pod["metadata"]["uid"] for pod in cluster.pods("a")}
        changed = sum(call.changes and call.resource != "leases" for call in cluster.api.calls)
        again = await adapter.do("c1", CommandKind.HOT_SWAP, **swap)
        assert again.status is DONE
        assert {pod["metadata"]["uid"] for pod in cluster.pods("a")} == pods
        assert sum(call.changes and call.resource != "leases" for call in cluster.api.calls) == changed
        # Its launchers wait for the one that starts, which a restart would only do again.
        view.times = TIMES
        await cluster.until(lambda: starts_for(pod_on(cluster, "n3"), cluster.store.clock()) > 3.0, "young")
        reset = await adapter.do("c2", CommandKind.WORKLOAD_RESET, workload="a")
        assert reset.status is WITHDRAWN
        why = r"pods start since \d+ s, as while a large image is pulled: 1 pods run, 1 start on .*"
        assert re.fullmatch(why, reset.text)
        assert sum(call.changes and call.resource != "leases" for call in cluster.api.calls) == changed
        cluster.kubelets["n3"].pull_s = 0.0
        await cluster.until(lambda: cluster.running("a") == {"0-0": "n1", "0-1": "n3"}, "not pulled")
        reset = await adapter.do("c3", CommandKind.WORKLOAD_RESET, workload="a")
        assert (reset.status, reset.text) == (DONE, "restart 1; 2 pods run")


async def test_a_pod_that_starts_on_a_lost_node_puts_no_restart_off() -> None:
    async with cluster_of("n1", "n2", "n3") as cluster, Adapter(cluster, "one") as adapter:
        cluster.kubelets["n2"].pull_s = 3600.0
        cluster.choose_node = min
        cluster.store.create("jobsets", jobset(hosts=2), JOBS)
        await cluster.until(lambda: len(cluster.pods("a", node="n2")) == 1, "its pod is put nowhere")
        await cluster.until(lambda: starts_for(pod_on(cluster, "n2"), cluster.store.clock()) > 3.0, "young")
        assert (await adapter.do("c1", CommandKind.WORKLOAD_RESET, workload="a")).status is WITHDRAWN
        cluster.lose_node("n2")
        view = adapter.orchestrator._view
        while not await view.is_lost("n2"):
            await asyncio.sleep(0.5)
        reset = await adapter.do("c2", CommandKind.WORKLOAD_RESET, workload="a")
        assert (reset.status, reset.text) == (DONE, "restart 1; 2 pods run")
        assert cluster.running("a") == {"0-0": "n1", "0-1": "n3"}


@pytest.mark.parametrize("waits", ["ImagePullBackOff", "CrashLoopBackOff", "CreateContainerConfigError"])
@pytest.mark.parametrize("kind", ["initContainerStatuses", "containerStatuses"])
def test_a_pod_of_which_something_is_known_to_be_wrong_is_not_one_that_starts(kind: str, waits: str) -> None:
    pod: Object = {
        "metadata": {"creationTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {"nodeName": "n1"},
        "status": {"phase": "Pending", kind: [{"state": {"waiting": {"reason": "PodInitializing"}}}]},
    }
    assert starts_for(pod, seconds_of("2026-01-01T00:01:00Z")) == 60.0
    pod["status"][kind].append({"state": {"waiting": {"reason": waits}}})
    assert starts_for(pod, seconds_of("2026-01-01T00:01:00Z")) == 0.0


def pod_on(cluster: Cluster, node: str) -> Object:
    (pod,) = cluster.pods("a", node=node)
    return pod


@pytest.mark.parametrize("reason", ["ErrImagePull", "ImagePullBackOff"])
async def test_an_image_that_cannot_be_pulled_is_named_and_waited_for(reason: str) -> None:
    async with cluster_of("n1", "n2", "n3") as cluster, Adapter(cluster, "one") as adapter:
        await submit(cluster, jobset(hosts=2))
        cluster.kubelets["n3"].pull_error = reason
        cluster.lose_node("n2")
        swap = {"workload": "a", "host": host(cluster, "n2"), "spare": host(cluster, "n3")}
        waiting = asyncio.ensure_future(adapter.do("c1", CommandKind.HOT_SWAP, **swap))
        view = adapter.orchestrator._view

        def refused() -> bool:
            return any(
                one["state"].get("waiting", {}).get("reason") == reason
                for pod in view.pods.all()
                for one in pod["status"].get("containerStatuses", ())
            )

        await cluster.until(refused, "the adapter does not see why its pod waits")
        view.times = IMPATIENT
        text = "moved to n3; still waiting: 1 pods run, 1 start on their nodes, 1 without their image"
        done = await waiting
        assert (done.status, done.text) == (DONE, text)
        cluster.kubelets["n3"].pull_error = ""
        await cluster.until(lambda: cluster.running("a") == {"0-0": "n1", "0-1": "n3"}, "not pulled")


@pytest.mark.parametrize(("noticed", "stuck_s"), [(True, 600.0), (False, 0.5)])
async def test_a_swap_of_a_node_that_nobody_has_given_up_on_waits_for_that_or_for_its_own_limit(
    noticed: bool, stuck_s: float
) -> None:
    times = replace(TIMES, stuck_s=stuck_s)
    async with cluster_of("n1", "n2", "n3") as cluster, Adapter(cluster, "one", times) as adapter:
        await submit(cluster, jobset(hosts=2))
        (lost,) = cluster.pods("a", node="n2")
        cluster.lose_node("n2", noticed=False)
        swap = {"workload": "a", "host": host(cluster, "n2"), "spare": host(cluster, "n3")}
        waiting = asyncio.ensure_future(adapter.do("c1", CommandKind.HOT_SWAP, **swap))

        def terminating() -> bool:
            return any("deletionTimestamp" in pod["metadata"] for pod in cluster.pods("a", node="n2"))

        await cluster.until(terminating, "its pod is not deleted")
        # Its grace is its own: a machine that only looks lost may still save.
        (pod,) = cluster.pods("a", node="n2")
        assert pod["metadata"]["deletionGracePeriodSeconds"] == 1
        if noticed:
            assert not waiting.done()
            cluster.give_up_on("n2")
        done = await waiting
        assert (done.status, done.text) == (DONE, "moved to n3; 2 pods run")
        assert cluster.running("a") == {"0-0": "n1", "0-1": "n3"}
        deleted = [
            call.name for call in cluster.api.calls if (call.verb, call.resource) == ("delete", "pods")
        ]
        assert deleted == [lost["metadata"]["name"]] * 2


@pytest.mark.slow
async def test_pods_that_fit_on_no_node_fail_the_command_unless_nodes_are_being_added() -> None:
    async with cluster_of("n1", "n2") as cluster, Adapter(cluster, "one") as adapter:
        await submit(cluster, jobset(hosts=2))
        cluster.lose_node("n2")
        swap = {"workload": "a", "host": host(cluster, "n2"), "spare": "n3.boot"}
        done = await adapter.do("c1", CommandKind.HOT_SWAP, **swap)
        assert (done.status, done.passing) == (FAILED, False)
        assert done.text.startswith("1 pods of a fit on no node: 0/2 nodes are available")
        (waiting,) = [pod for pod in cluster.pods("a") if not pod["spec"].get("nodeName")]
        event = {
            "metadata": {"name": "e1"},
            "reason": "TriggeredScaleUp",
            "involvedObject": {"uid": waiting["metadata"]["uid"]},
        }
        cluster.store.create("events", event, JOBS)
        again = asyncio.ensure_future(adapter.do("c1", CommandKind.HOT_SWAP, **swap))
        asked = len([call for call in cluster.api.calls if call.resource == "events"])
        await cluster.until(
            lambda: len([call for call in cluster.api.calls if call.resource == "events"]) > asked + 1,
            "it does not ask whether nodes are being added",
        )
        assert not again.done()
        cluster.add_node("n3")
        assert (await again).status is DONE


@pytest.mark.slow
async def test_a_pod_that_does_not_end_on_a_node_that_lives_is_deleted_for_good_after_its_grace() -> None:
    times = replace(TIMES, stuck_s=0.5)
    async with cluster_of("n1", "n2", "n3") as cluster, Adapter(cluster, "one", times) as adapter:
        await submit(cluster, jobset(hosts=2))
        (stuck,) = cluster.pods("a", node="n2")
        # Its kubelet answers, and cannot end it: a process that waits for a device.
        cluster.kubelets["n2"].bound_at.clear()
        cluster.kubelets["n2"].ending_at[stuck["metadata"]["uid"]] = float("inf")
        done = await adapter.do("c1", CommandKind.DRAIN_HOST, host=host(cluster, "n2"))
        assert done.status is DONE
        await cluster.until(lambda: cluster.running("a") == {"0-0": "n1", "0-1": "n3"}, "not moved")
        forced = [
            call
            for call in cluster.api.calls
            if (call.verb, call.resource, call.name) == ("delete", "pods", stuck["metadata"]["name"])
        ]
        assert forced


async def test_the_end_of_a_pod_is_said_to_be_asked_for_once_and_then_what_holds_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    times = replace(TIMES, retry_s=0.05)
    async with cluster_of("n1", "n2", "n3") as cluster, Adapter(cluster, "one", times) as adapter:
        await submit(cluster, jobset(hosts=2))
        (pod,) = cluster.pods("a", node="n2")
        pod["metadata"]["finalizers"].append("example.com/audit")
        cluster.store.update("pods", pod, JOBS, checked=False)
        cluster.lose_node("n2")
        swap = {"workload": "a", "host": host(cluster, "n2"), "spare": host(cluster, "n3")}
        cluster.kubelets["n3"].pull_s = 3600.0
        waiting = asyncio.ensure_future(adapter.do("c1", CommandKind.HOT_SWAP, **swap))
        view = adapter.orchestrator._view
        await cluster.until(lambda: "is still there" in caplog.text, "not said")
        # More looks say no more.
        looks = {view._ended[pod["metadata"]["uid"]].at}

        def looked() -> bool:
            looks.add(view._ended[pod["metadata"]["uid"]].at)
            return len(looks) > 2

        await cluster.until(looked, "no look")
        said = [one.message for one in caplog.records if pod["metadata"]["name"] in one.message]
        name = f"pod {pod['metadata']['name']}"
        assert said == [
            f"{name}: its end without grace was asked for: its node is lost",
            f"{name} is still there: held by example.com/audit",
        ]
        waiting.cancel()


async def test_the_mark_of_a_cordon_that_a_person_took_back_goes_when_the_lease_is_held() -> None:
    async with cluster_of("n1") as cluster:
        node = cluster.store.get("nodes", "n1")
        node["metadata"]["annotations"] = {"supervisor/cordoned-by": "c1"}
        cluster.store.update("nodes", node)
        async with Adapter(cluster, "one") as adapter:

            def marked() -> bool:
                return bool(cluster.store.get("nodes", "n1")["metadata"]["annotations"])

            await cluster.until(lambda: not marked(), "the mark stays")
            assert adapter.changes == [(host(cluster, "n1"), Change.UNCORDONED)]


async def test_a_node_that_the_watch_has_not_seen_yet_is_not_taken_for_lost() -> None:
    times = replace(TIMES, stuck_s=60.0)
    async with cluster_of("n1") as cluster, Adapter(cluster, "one", times) as adapter:
        view = adapter.orchestrator._view
        await cluster.until(view.nodes.listed.is_set, "not listed")
        # The watch of nodes breaks, and stays away.
        cluster.api.faults.place(Fault(verb="watch", resource="nodes", status=500, times=0))

        def watches() -> int:
            return [(one.verb, one.resource) for one in cluster.api.calls].count(("watch", "nodes"))

        before = watches()
        cluster.api.down = True
        cluster.api.down = False
        await cluster.until(lambda: watches() > before, "not watched again")
        cluster.add_node("n2")
        cluster.kubelets["n2"].stop_s = 0.8  # of the one second that its pods have
        await submit(cluster, jobset(hosts=2))
        assert view.nodes.get("n2") is None
        done = await adapter.do("c1", CommandKind.DRAIN_HOST, host=host(cluster, "n2"))
        assert (done.status, done.text) == (DONE, "cordoned; 1 pods evicted")
        assert [call.verb for call in cluster.api.calls if call.resource == "pods"].count("delete") == 0


async def test_a_drain_that_waits_for_a_disruption_budget_does_not_hold_up_commands_of_its_job() -> None:
    async with cluster_of("n1", "n2") as cluster, Adapter(cluster, "one") as adapter:
        await submit(cluster, jobset(hosts=2))
        budget = {
            "metadata": {"name": "b"},
            "spec": {"maxUnavailable": 0, "selector": {"matchLabels": {}}},
        }
        cluster.store.create("poddisruptionbudgets", budget, JOBS)
        drain = asyncio.ensure_future(
            adapter.do("c1", CommandKind.DRAIN_HOST, host=host(cluster, "n2"), workload="a")
        )
        await cluster.until(
            lambda: any(call.resource == "pods/eviction" for call in cluster.api.calls), "not asked"
        )
        reset = await adapter.do("c2", CommandKind.IN_JOB_RESET, workload="a")
        assert (reset.status, reset.text, drain.done()) == (DONE, "2 of 2 pods are there", False)
        cluster.store.delete("poddisruptionbudgets", "b", JOBS)
        assert (await drain).text == "cordoned; 1 pods evicted"


async def test_a_command_that_waited_for_another_one_past_its_deadline_or_its_epoch_does_nothing() -> None:
    async with cluster_of("n1", "n2") as cluster, Adapter(cluster, "one") as adapter:
        await submit(cluster, jobset(hosts=2))
        reset = Command(epoch=1, id="c1", kind=CommandKind.WORKLOAD_RESET, workload="a", deadline_s=0.2)
        old = replace(reset, id="c2", deadline_s=60.0)
        async with adapter.orchestrator._lock_of(reset):
            begun = time.monotonic()
            late, fenced = [asyncio.ensure_future(adapter.try_once(one)) for one in (reset, old)]
            await cluster.until(lambda: time.monotonic() - begun > 0.3, "time stands still")
            cordon = {"host": host(cluster, "n1"), "epoch": 2}
            assert (await adapter.do("c3", CommandKind.CORDON_HOST, **cordon)).status is DONE
        assert (await fenced).status is OutcomeStatus.FENCED
        assert (await late).status in (FAILED, OutcomeStatus.FENCED)
        again = await adapter.try_once(replace(reset, epoch=2))
        assert (again.status, again.text) == (FAILED, "nothing was done within 0.2 s")
        assert cluster.store.get("jobsets", "a", JOBS)["status"]["restarts"] == 0


async def test_a_watch_that_is_too_old_lists_again_and_tells_what_is_gone() -> None:
    async with cluster_of("n1", "n2") as cluster, Adapter(cluster, "one") as adapter:
        view = adapter.orchestrator._view
        await cluster.until(view.nodes.listed.is_set, "not listed")
        gone = host(cluster, "n2")
        cluster.api.down = True
        cluster.remove_node("n2")
        cluster.store.forget_history()
        cluster.api.down = False
        await cluster.until(lambda: view.nodes.get("n2") is None, "it is still there")
        assert [change[0] for change in adapter.changes] == [gone]
        lists = [call for call in cluster.api.calls if (call.verb, call.resource) == ("list", "nodes")]
        assert len(lists) == 2


@pytest.mark.slow
async def test_an_adapter_that_is_gone_is_followed_when_its_lease_has_run_out_and_not_before() -> None:
    times = replace(TIMES, lease_s=5.0)
    async with cluster_of("n1") as cluster:
        first = await Adapter(cluster, "one", times).__aenter__()
        await cluster.until(lambda: cluster.store.find("leases", "resiliency-supervisor", OWN), "none")
        async with Adapter(cluster, "two", times) as second:
            command = {"host": host(cluster, "n1")}
            kind = CommandKind.CORDON_HOST
            refused = await second.do_once("c1", kind, **command)
            assert (refused.status, refused.passing) == (FAILED, True)
            assert refused.text.endswith(f"holds the lease {OWN}/resiliency-supervisor")
            assert (await first.do("c1", kind, epoch=7, **command)).status is DONE
            await first.kill()
            assert (await second.do("c2", kind, epoch=7, **command)).status is DONE
            fenced = await second.do("c3", kind, epoch=6, **command)
            assert fenced.status is OutcomeStatus.FENCED
        spec = cluster.store.get("leases", "resiliency-supervisor", OWN)["spec"]
        assert (spec["leaseTransitions"], spec["holderIdentity"]) == (1, "")


@pytest.mark.slow
async def test_an_adapter_that_cannot_renew_its_lease_changes_nothing() -> None:
    times = replace(TIMES, lease_s=1.5)
    async with cluster_of("n1") as cluster, Adapter(cluster, "one", times) as adapter:
        name = host(cluster, "n1")
        assert (await adapter.do("c1", CommandKind.CORDON_HOST, host=name)).status is DONE
        cluster.api.faults.place(Fault(resource="leases", status=500, times=0))
        lease = adapter.orchestrator._lease
        await cluster.until(lambda: lease._until < asyncio.get_running_loop().time(), "it is renewed")
        refused = await adapter.do_once("c2", CommandKind.UNCORDON_HOST, host=name)
        assert (refused.status, refused.passing) == (FAILED, True)
        assert cluster.store.get("nodes", "n1")["spec"]["unschedulable"]
        cluster.api.faults.clear()
        assert (await adapter.do("c2", CommandKind.UNCORDON_HOST, host=name)).status is DONE


@pytest.mark.slow
async def test_a_jobset_in_a_queue_is_not_restarted_and_is_made_again_as_it_was_before_admission() -> None:
    async with cluster_of("n1", "n2") as cluster, Adapter(cluster, "one", IMPATIENT) as adapter:
        thing = jobset("a", hosts=2, labels={"kueue.x-k8s.io/queue-name": "q"})
        template = thing["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
        before = {"spec": {"tolerations": [{"key": "mine", "operator": "Exists"}]}}
        template["spec"]["tolerations"] = [*before["spec"]["tolerations"], {"key": "flavor"}]
        template["spec"]["nodeSelector"] = {"kubernetes.io/hostname": "n1"}
        template["metadata"] = {"labels": {"kueue.x-k8s.io/podset": "workers", "mine": "yes"}}
        cluster.store.create("jobsets", thing, JOBS)
        uid = cluster.store.get("jobsets", "a", JOBS)["metadata"]["uid"]
        owner = {"uid": uid, "controller": True, "kind": "JobSet", "name": "a"}
        queued = {
            "metadata": {"name": "jobset-a", "ownerReferences": [owner]},
            "spec": {"podSets": [{"name": "workers", "template": before}]},
        }
        cluster.store.create("workloads", queued, JOBS)
        done = await adapter.do("c1", CommandKind.WORKLOAD_RECREATION, workload="a")
        assert done.status is DONE
        assert done.text == "still waiting: it is suspended, 0 pods run, 2 are not made yet"
        new = cluster.store.get("jobsets", "a", JOBS)
        assert new["metadata"]["uid"] != uid
        assert new["spec"]["suspend"] is True
        made = new["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
        assert made["spec"]["tolerations"] == before["spec"]["tolerations"]
        assert "nodeSelector" not in made["spec"]
        assert made["metadata"]["labels"] == {"mine": "yes"}
        reset = await adapter.do("c2", CommandKind.WORKLOAD_RESET, workload="a")
        assert reset.status is DONE
        assert cluster.store.get("jobsets", "a", JOBS)["metadata"]["uid"] == new["metadata"]["uid"]
