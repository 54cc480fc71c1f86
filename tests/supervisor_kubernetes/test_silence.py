# SPDX-License-Identifier: Apache-2.0
"""Nodes that are silent, and nodes that only look it: with all waits as they are, over a virtual clock."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from supervisor.orchestrator import Answer
from supervisor.orchestrators.gke import lease
from supervisor.orchestrators.gke.lease import NotHolder
from supervisor.orchestrators.gke.view import Times
from supervisor.testing.kubernetes import Cluster, Fault
from supervisor.testing.kubernetes.nodes import OUT_OF_SERVICE, UNREACHABLE, UNSCHEDULABLE
from supervisor.testing.kubernetes.waits import Waits
from supervisor.values import CommandKind, OutcomeStatus
from tests.supervisor_kubernetes.fleet import JOBS, Adapter, cluster_of, host, jobset, submit

pytestmark = pytest.mark.virtual_time

DONE = OutcomeStatus.DONE
EXAMPLES = Path(__file__).parents[2] / "examples" / "gke"
#: A silent host is decided upon after this time.
HEARTBEAT_TIMEOUT_S = 30.0
OUTAGE_S = 60.0


def unknown(cluster: Cluster) -> set[str]:
    """Nodes that the node controller has given up on."""
    return {
        node["metadata"]["name"]
        for node in cluster.store.all("nodes")
        for one in node["status"]["conditions"]
        if (one["type"], one["status"]) == ("Ready", "Unknown")
    }


def taints(cluster: Cluster, node: str) -> list[str]:
    return [one["key"] for one in cluster.store.get("nodes", node)["spec"].get("taints") or ()]


def ended_by_force(cluster: Cluster) -> list[str]:
    """Pods that the adapter failed itself."""
    return [call.name for call in cluster.api.calls if call.resource == "pods/status"]


async def until(look: Callable[[], object], otherwise: str) -> None:
    """Look ten times a second of the virtual clock."""
    end = time.monotonic() + 120.0
    while not look():
        assert time.monotonic() < end, otherwise
        await asyncio.sleep(0.1)


async def have_an_outage(cluster: Cluster) -> None:
    """The API server is away for a minute, and some nodes are given up on for it."""
    await asyncio.sleep(30.0)  # the adapter holds its lease
    cluster.api.down = True
    await asyncio.sleep(OUTAGE_S)
    cluster.api.down = False
    await until(lambda: unknown(cluster), "no node is given up on")


# ---------------------------------------------------------------- the twin


async def test_nodes_that_live_are_given_up_on_for_seconds_after_an_api_server_was_away_for_a_minute() -> (
    None
):
    async with cluster_of(*(f"n{number}" for number in range(8)), waits=Waits()) as cluster:
        await have_an_outage(cluster)
        assert 1 < len(unknown(cluster)) < 8
        begun = time.monotonic()
        await until(lambda: not unknown(cluster), "given up on for ever")
        assert time.monotonic() - begun <= 10.0


async def test_a_silent_node_is_given_up_on_after_fifty_seconds_and_tainted() -> None:
    async with cluster_of("n1", "n2", waits=Waits()) as cluster:
        await asyncio.sleep(30.0)
        begun = time.monotonic()
        cluster.lose_node("n1", noticed=False)
        await until(lambda: unknown(cluster), "not given up on")
        assert 40.0 <= time.monotonic() - begun <= 55.0
        await until(lambda: taints(cluster, "n1"), "no taint")
        assert (unknown(cluster), taints(cluster, "n1")) == ({"n1"}, [UNREACHABLE])


async def test_a_taint_follows_a_cordon_and_its_end_within_a_second() -> None:
    async with cluster_of("n1", waits=Waits()) as cluster:
        for cordoned, wanted in ((True, [UNSCHEDULABLE]), (None, [])):
            node = cluster.store.get("nodes", "n1")
            node["spec"]["unschedulable"] = cordoned
            cluster.store.update("nodes", node)
            begun = time.monotonic()
            await until(lambda wanted=wanted: taints(cluster, "n1") == wanted, "no such taint")
            assert 0.5 < time.monotonic() - begun < 1.5


async def test_pods_that_terminate_on_a_silent_node_end_once_a_person_says_that_it_is_out_of_service() -> (
    None
):
    async with cluster_of("n1", "n2", waits=Waits()) as cluster:
        await submit(cluster, jobset(hosts=1))
        cluster.lose_node("n1")
        (pod,) = cluster.pods("a")
        cluster.store.delete("pods", pod["metadata"]["name"], JOBS, grace_s=0)
        await asyncio.sleep(15.0)
        assert cluster.running("a") == {}
        node = cluster.store.get("nodes", "n1")
        node["spec"]["taints"].append({"key": OUT_OF_SERVICE, "effect": "NoExecute"})
        cluster.store.update("nodes", node)
        begun = time.monotonic()
        await until(lambda: cluster.running("a") == {"0-0": "n2"}, "not replaced")
        assert 18.0 < time.monotonic() - begun < 20.0  # 8.5 s, and the backoff


# ---------------------------------------------------------------- the adapter


def shipped() -> dict[str, Any]:
    """The JobSet of the walkthrough, of four hosts."""
    things = yaml.safe_load_all((EXAMPLES / "nemo-jobset.yaml").read_text())
    (thing,) = [one for one in things if one["kind"] == "JobSet"]
    thing["metadata"]["namespace"] = JOBS
    return dict(thing)


@pytest.mark.parametrize("silent_for_s", [HEARTBEAT_TIMEOUT_S, 70.0], ids=["Ready", "Unknown"])
async def test_a_silent_node_is_replaced_within_fifteen_seconds_of_the_decision_with_the_shipped_jobset(
    silent_for_s: float,
) -> None:
    async with (
        cluster_of(waits=Waits()) as cluster,
        Adapter(cluster, "one", Times()) as adapter,
    ):
        for number in range(5):
            cluster.add_node(f"n{number}", labels={"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"})
        await submit(cluster, shipped())
        before = cluster.running("nemo")
        await asyncio.sleep(30.0)
        lost = before["0-1"]
        cluster.lose_node(lost, noticed=False)
        await asyncio.sleep(silent_for_s)
        assert unknown(cluster) == ({lost} if silent_for_s > 55.0 else set())
        decided = time.monotonic()
        swap = {"workload": "nemo", "host": host(cluster, lost), "spare": host(cluster, "n4")}
        done = await adapter.do("c1", CommandKind.HOT_SWAP, deadline_s=120.0, **swap)
        took_s = time.monotonic() - decided
        assert done.status is DONE, done
        after = cluster.running("nemo")
        assert {index: node for index, node in after.items() if index != "0-1"} == {
            index: node for index, node in before.items() if index != "0-1"
        }
        assert after["0-1"] not in before.values()
        assert took_s <= 15.0


async def test_after_an_outage_of_the_api_server_no_living_node_is_lost_and_no_pod_of_it_is_killed() -> None:
    names = [f"n{number}" for number in range(5)]
    async with (
        cluster_of(*names, waits=Waits()) as cluster,
        Adapter(cluster, "one", Times()) as adapter,
    ):
        thing = jobset(hosts=5)
        template = thing["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
        template["spec"]["terminationGracePeriodSeconds"] = 30
        await submit(cluster, thing)
        for kubelet in cluster.kubelets.values():
            kubelet.stop_s = 20.0  # a last save
        await have_an_outage(cluster)
        reset = asyncio.ensure_future(adapter.do("c1", CommandKind.WORKLOAD_RESET, workload="a"))
        while not reset.done():
            looks = [await adapter.look(host(cluster, name)) for name in names]
            assert False not in looks
            await asyncio.sleep(3.0)
        assert (await reset).status is DONE
        assert ended_by_force(cluster) == []


async def test_many_nodes_that_fall_silent_at_once_are_not_believed_and_one_more_that_does_later_is() -> None:
    names = [f"n{number}" for number in range(6)]
    async with (
        cluster_of(*names, waits=Waits()) as cluster,
        Adapter(cluster, "one", Times()) as adapter,
    ):
        await asyncio.sleep(30.0)
        # Their network is gone, as that of a zone.
        for name in names[:3]:
            cluster.lose_node(name, noticed=False)
        await asyncio.sleep(90.0)
        assert unknown(cluster) == set(names[:3])
        assert await adapter.look(host(cluster, names[0])) is None
        cluster.lose_node(names[3], noticed=False)
        await asyncio.sleep(45.0)
        assert await adapter.look(host(cluster, names[3])) is False
        cluster.remove_node(names[0])
        await asyncio.sleep(1.0)
        assert await adapter.look(f"{names[0]}.boot") is False


async def test_a_host_that_was_uncordoned_is_room_to_grow_before_its_taint_has_gone() -> None:
    async with (
        cluster_of("n1", "n2", waits=Waits()) as cluster,
        Adapter(cluster, "one", Times()) as adapter,
    ):
        await submit(cluster, jobset(hosts=1))
        await adapter.do("c1", CommandKind.CORDON_HOST, host=host(cluster, "n2"))
        await until(lambda: taints(cluster, "n2"), "no taint")
        await adapter.do("c2", CommandKind.UNCORDON_HOST, host=host(cluster, "n2"))
        view = adapter.orchestrator._view
        await until(lambda: not (view.nodes.get("n2") or {})["spec"].get("unschedulable"), "not seen")
        assert taints(cluster, "n2") == [UNSCHEDULABLE]
        done = await adapter.do("c3", CommandKind.SCALE_UP, workload="a", replicas=2)
        assert (done.status, done.text) == (DONE, "2 pods run")


async def test_an_adapter_that_could_not_renew_its_lease_says_so_and_names_no_other_holder() -> None:
    async with cluster_of("n1", waits=Waits()) as cluster, Adapter(cluster, "one", Times()) as adapter:
        cordon = {"host": host(cluster, "n1")}
        assert (await adapter.do("c1", CommandKind.CORDON_HOST, **cordon)).status is DONE
        cluster.api.faults.place(Fault(verb="update", resource="leases", status=500, times=0))
        await asyncio.sleep(30.0)
        with pytest.raises(NotHolder, match=r"^the lease fleet/resiliency-supervisor could not be renewed"):
            adapter.orchestrator._lease.check()
        cluster.api.faults.clear()
        assert (await adapter.do("c2", CommandKind.UNCORDON_HOST, **cordon)).status is DONE


async def test_an_adapter_has_no_lease_after_its_machine_was_suspended_for_as_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`time.monotonic` says nothing of that."""

    async with cluster_of("n1", waits=Waits()) as cluster, Adapter(cluster, "one", Times()) as adapter:
        await adapter.do("c1", CommandKind.CORDON_HOST, host=host(cluster, "n1"))
        kept = adapter.orchestrator._lease
        kept.check()
        slept_s = Times().lease_s
        monkeypatch.setattr(lease, "elapsed_s", lambda: time.monotonic() + slept_s)
        with pytest.raises(NotHolder):
            kept.check()
        await kept.admit(1)
        kept.check()


class Swaps:
    """A job of one host, which is swapped again and again."""

    def __init__(self, cluster: Cluster, adapter: Adapter) -> None:
        self.cluster, self.adapter = cluster, adapter
        self.number = 0

    async def swap(self) -> tuple[Answer, float]:
        """The answer to one more swap, and how long it took."""
        self.number += 1
        (node,) = self.cluster.running("a").values()
        swap = {"workload": "a", "host": host(self.cluster, node), "spare": "n9.boot"}
        begun = time.monotonic()
        done = await self.adapter.do(f"c{self.number}", CommandKind.HOT_SWAP, deadline_s=120.0, **swap)
        return done, time.monotonic() - begun


IGNORES: dict[str, Any] = {
    "podFailurePolicy": {
        "rules": [{"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]
    },
    "backoffLimitPerIndex": 0,
}


@pytest.mark.parametrize("job", [{}, IGNORES], ids=["counted", "ignored"])
async def test_a_swap_of_the_same_index_gives_way_to_a_new_job_once_its_job_would_wait_longer(
    job: dict[str, Any],
) -> None:
    async with (
        cluster_of(*(f"n{number}" for number in range(5)), waits=Waits()) as cluster,
        Adapter(cluster, "one", Times()) as adapter,
    ):
        await submit(cluster, jobset(hosts=1, **job))
        swaps = Swaps(cluster, adapter)
        first, first_s = await swaps.swap()
        assert (first.status, " after the" in first.text, 10.0 <= first_s < 15.0) == (DONE, False, True)
        second, second_s = await swaps.swap()
        assert second.text.endswith(" after the 20 s that its Job waits by now; 1 pods run")
        assert 20.0 <= second_s < 25.0
        before = cluster.running("a")
        third, third_s = await swaps.swap()
        assert (third.status, third.passing, third.spare) == (OutcomeStatus.FAILED, False, "")
        assert third.text == (
            f"a would wait 40 s for its pod of {before['0-0']}: its Job waits twice as long before each"
            " replacement, and a workload reset takes 30 s at most"
        )
        assert (third_s < 1.0, cluster.running("a")) == (True, before)
        begun = time.monotonic()
        assert (await adapter.do("c9", CommandKind.WORKLOAD_RESET, workload="a")).status is DONE
        assert time.monotonic() - begun < 30.0
        assert (await swaps.swap())[0].status is DONE  # the count of a new Job begins at 0


async def test_a_swap_that_has_less_time_than_its_job_waits_ends_nothing() -> None:
    async with (
        cluster_of("n1", "n2", waits=Waits()) as cluster,
        Adapter(cluster, "one", Times()) as adapter,
    ):
        await submit(cluster, jobset(hosts=1))
        swap = {"workload": "a", "host": host(cluster, "n1"), "spare": host(cluster, "n2")}
        done = await adapter.do_once("c1", CommandKind.HOT_SWAP, deadline_s=8.0, **swap)
        assert (done.status, done.passing) == (OutcomeStatus.FAILED, False)
        assert re.search("each replacement, and . s are left for the swap$", done.text)
        assert cluster.running("a") == {"0-0": "n1"}
