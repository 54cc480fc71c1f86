# SPDX-License-Identifier: Apache-2.0
"""The API server in memory, by the adapter's own client: what real ones do to a client."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from kubernetes_asyncio.client import Configuration

from resiliency.launch.job import NO_REQUEUE
from supervisor.orchestrators.gke import jobsets
from supervisor.orchestrators.gke.client import CONFIG_MAPS, JOBS, JOBSETS, NODES, PODS, Api, ApiError
from supervisor.testing.kubernetes import Cluster, Fault, FaultKind
from supervisor.testing.kubernetes.hosts import Kubelet
from supervisor.testing.kubernetes.kinds import Refusal
from tests.supervisor_kubernetes.fleet import JOBS as NAMESPACE
from tests.supervisor_kubernetes.fleet import jobset, submit
from tests.supervisor_kubernetes.virtual_time import run_in_virtual_time as run
from tests.waiting import WAIT_S

pytestmark = pytest.mark.virtual_time

EXAMPLES = Path(__file__).parents[2] / "examples" / "gke"


@asynccontextmanager
async def served(*nodes: str) -> AsyncIterator[tuple[Cluster, Api]]:
    async with Cluster() as cluster:
        for node in nodes:
            cluster.add_node(node)
        async with Api(Configuration(host=cluster.api.url), call_s=WAIT_S) as api:
            yield cluster, api


def config_map(name: str, **data: str) -> dict[str, Any]:
    return {"metadata": {"name": name}, "data": data}


async def code_of(work: Any) -> int:
    with pytest.raises(ApiError) as error:
        await work
    return error.value.code


async def test_objects_are_made_changed_where_they_were_read_and_deleted_by_their_uid() -> None:
    async with served() as (_, api):
        first = await api.create(CONFIG_MAPS, config_map("c", a="1"), NAMESPACE)
        assert await code_of(api.create(CONFIG_MAPS, config_map("c"), NAMESPACE)) == 409
        second = await api.patch(CONFIG_MAPS, first, {"data": {"a": None, "b": "2"}})
        assert second["data"] == {"b": "2"}
        # It was read before that change.
        assert await code_of(api.patch(CONFIG_MAPS, first, {"data": {"b": "3"}})) == 409
        assert await code_of(api.replace(CONFIG_MAPS, first, NAMESPACE)) == 409
        assert await api.delete(CONFIG_MAPS, second)
        assert not await api.delete(CONFIG_MAPS, second)
        other = await api.create(CONFIG_MAPS, config_map("c"), NAMESPACE)
        assert await code_of(api.delete(CONFIG_MAPS, second)) == 409
        assert await api.try_get(CONFIG_MAPS, "c", NAMESPACE) == other
        assert await code_of(api.get(CONFIG_MAPS, "d", NAMESPACE)) == 404


async def test_a_dry_run_is_validated_and_leaves_nothing() -> None:
    async with served() as (cluster, api):
        await api.create(JOBSETS, jobset("b"), NAMESPACE, dry_run=True)
        assert list(cluster.store.all("jobsets")) == []

        def refuse(plural: str, thing: dict[str, Any]) -> None:
            raise Refusal(403, f"admission webhook denied {plural} {thing['metadata']['name']}")

        cluster.api.admission = refuse
        assert await code_of(api.create(JOBSETS, jobset("b"), NAMESPACE, dry_run=True)) == 403


async def test_a_watch_goes_on_from_a_version_gets_bookmarks_and_410_when_it_is_too_old() -> None:
    async with served() as (cluster, api):
        cluster.api.bookmark_s = 0.05
        _, version = await api.list(CONFIG_MAPS, NAMESPACE)
        await api.create(CONFIG_MAPS, config_map("c"), NAMESPACE)
        await api.create(CONFIG_MAPS, config_map("c"), "other")
        seen = []
        async for event in api.watch(CONFIG_MAPS, NAMESPACE, version):
            seen.append(event["type"])
            if event["type"] == "ADDED":
                await api.delete(CONFIG_MAPS, event["object"])
            if event["type"] == "BOOKMARK" and "DELETED" in seen:
                break
        assert [one for one in seen if one != "BOOKMARK"] == ["ADDED", "DELETED"]
        cluster.store.forget_history()
        with pytest.raises(ApiError) as error:
            async for _event in api.watch(CONFIG_MAPS, NAMESPACE, version):
                pass
        assert error.value.code == 410


async def test_lists_come_in_pages() -> None:
    async with served() as (cluster, api):
        for number in range(1200):
            cluster.store.create("configmaps", config_map(f"c{number}"), NAMESPACE)
        found, _ = await api.list(CONFIG_MAPS, NAMESPACE)
        assert len({one["metadata"]["name"] for one in found}) == 1200
        assert sum(call.verb == "list" for call in cluster.api.calls) == 3


async def test_a_watch_from_a_version_that_is_forgotten_is_answered_and_its_first_event_is_the_error() -> (
    None
):
    async with served() as (cluster, _), aiohttp.ClientSession(cluster.api.url) as session:
        cluster.store.create("configmaps", config_map("c"), NAMESPACE)
        cluster.store.forget_history()
        path = f"/api/v1/namespaces/{NAMESPACE}/configmaps?watch=1&resourceVersion=1"
        async with session.get(path) as response:
            event = json.loads(await response.content.readline())
        assert (response.status, event["type"], event["object"]["code"]) == (200, "ERROR", 410)


async def test_the_pages_of_a_list_are_of_one_version_whatever_changes_meanwhile() -> None:
    async with served() as (cluster, _), aiohttp.ClientSession(cluster.api.url) as session:
        for name in ("b", "c", "d"):
            cluster.store.create("configmaps", config_map(name), NAMESPACE)
        path = f"/api/v1/namespaces/{NAMESPACE}/configmaps?limit=2"
        first = await (await session.get(path)).json()
        cluster.store.delete("configmaps", "d", NAMESPACE)
        cluster.store.create("configmaps", config_map("a"), NAMESPACE)
        more = f"{path}&continue={first['metadata']['continue']}"
        second = await (await session.get(more)).json()
        found = [one["metadata"]["name"] for page in (first, second) for one in page["items"]]
        assert found == ["b", "c", "d"]
        assert first["metadata"]["resourceVersion"] == second["metadata"]["resourceVersion"]
        old = await session.get(f"{path}&continue=none")
        assert old.status == 410


async def test_items_of_lists_say_what_they_are_for_custom_kinds_alone() -> None:
    async with served("n1") as (cluster, api):
        await submit(cluster, jobset("a", hosts=1))
        built_in = [one for kind in (NODES, PODS, JOBS) for one in (await api.list(kind))[0]]
        assert len(built_in) == 3
        assert not any(one.keys() & {"kind", "apiVersion"} for one in built_in)
        (known,), _ = await api.list(JOBSETS, NAMESPACE)
        assert (known["kind"], known["apiVersion"]) == ("JobSet", "jobset.x-k8s.io/v1alpha2")
        assert (await api.get(NODES, "n1"))["kind"] == "Node"


async def test_an_object_is_neither_made_at_a_version_nor_given_another_uid() -> None:
    async with served() as (_, api):
        made = await api.create(CONFIG_MAPS, config_map("c"), NAMESPACE)
        again = config_map("d")
        again["metadata"]["resourceVersion"] = "1"
        assert await code_of(api.create(CONFIG_MAPS, again, NAMESPACE)) == 500
        other = {**made, "metadata": {**made["metadata"], "uid": "another"}}
        assert await code_of(api.patch(CONFIG_MAPS, other, {"data": {}})) == 422
        # Where it is at another version as well, that is seen first.
        other["metadata"]["resourceVersion"] = "1"
        assert await code_of(api.patch(CONFIG_MAPS, other, {"data": {}})) == 409


async def test_a_quota_counts_what_a_dry_run_would_replace_and_is_asked_before_its_name() -> None:
    async with served() as (cluster, api):
        quota = {"metadata": {"name": "one"}, "spec": {"hard": {"count/jobsets.jobset.x-k8s.io": "1"}}}
        await api.create(JOBSETS, jobset("a"), NAMESPACE)
        assert await code_of(api.create(JOBSETS, jobset("a"), NAMESPACE, dry_run=True)) == 409
        cluster.store.create("resourcequotas", quota, NAMESPACE)
        with pytest.raises(ApiError) as error:
            await api.create(JOBSETS, jobset("a"), NAMESPACE, dry_run=True)
        assert error.value.code == 403
        count = "count/jobsets.jobset.x-k8s.io=1"
        text = f"exceeded quota: one, requested: {count}, used: {count}, limited: {count}"
        assert str(error.value).endswith(text)


async def test_faults_hit_the_call_that_they_name() -> None:
    async with served() as (cluster, api):
        place = cluster.api.faults.place
        place(Fault(verb="create", resource="configmaps", call=2, status=500))
        await api.create(CONFIG_MAPS, config_map("a"), NAMESPACE)
        assert await code_of(api.create(CONFIG_MAPS, config_map("b"), NAMESPACE)) == 500
        await api.create(CONFIG_MAPS, config_map("b"), NAMESPACE)
        place(Fault(verb="create", kind=FaultKind.DROP_AFTER))
        assert await code_of(api.create(CONFIG_MAPS, config_map("c"), NAMESPACE)) == 0
        assert cluster.store.find("configmaps", "c", NAMESPACE) is not None
        place(Fault(verb="create", kind=FaultKind.HOLD_BEFORE))
        async with Api(Configuration(host=cluster.api.url), call_s=1.0) as hasty:
            assert await code_of(hasty.create(CONFIG_MAPS, config_map("d"), NAMESPACE)) == 0
        assert cluster.store.find("configmaps", "d", NAMESPACE) is None
        # Throttling is waited for by the client itself.
        place(Fault(verb="create", status=429, retry_after_s=0, times=2))
        await api.create(CONFIG_MAPS, config_map("d"), NAMESPACE)
        cluster.api.down = True
        assert await code_of(api.get(CONFIG_MAPS, "d", NAMESPACE)) == 0
        cluster.api.down = False
        await api.get(CONFIG_MAPS, "d", NAMESPACE)


async def test_a_jobset_runs_restarts_by_its_policy_and_takes_its_pods_along_when_it_is_deleted() -> None:
    async with served("n1", "n2") as (cluster, api):
        cluster.kubelets["n2"].pull_s = 0.1
        await submit(cluster, jobset("a", hosts=2, restarts=1))
        pod = cluster.pods("a", node="n2")[0]

        def status() -> dict[str, Any]:
            found: dict[str, Any] = cluster.store.get("jobsets", "a", NAMESPACE)["status"]
            return found

        async def fail_the_job() -> None:
            (job,), _ = await api.list(JOBS, NAMESPACE)
            await api.patch(JOBS, job, {"spec": {"activeDeadlineSeconds": 1}})

        await fail_the_job()
        await cluster.until(lambda: status()["restarts"] == 1, "no restart is counted")
        await cluster.until(lambda: len(cluster.running("a")) == 2, "no restart")
        await fail_the_job()
        await cluster.until(lambda: status().get("conditions"), "no end")
        assert (status()["restarts"], status()["conditions"][0]["type"]) == (1, "Failed")
        assert pod["metadata"]["uid"] not in {one["metadata"]["uid"] for one in cluster.pods("a")}
        thing = await api.get(JOBSETS, "a", NAMESPACE)
        assert await code_of(api.patch(JOBSETS, thing, {"spec": {"replicatedJobs": []}})) == 422
        await api.delete(JOBSETS, thing, foreground=True)
        await cluster.until(lambda: cluster.store.find("jobsets", "a", NAMESPACE) is None, "still there")
        assert list(cluster.store.all("jobs")) + list(cluster.store.all("pods")) == []


async def test_a_jobset_is_filled_in_by_its_webhook_and_marks_what_it_makes_with_twelve_labels() -> None:
    async with served("n1") as (cluster, api):
        thing = jobset("a", hosts=1)
        del thing["spec"]["replicatedJobs"][0]["template"]["spec"]["completionMode"]
        made = await api.create(JOBSETS, thing, NAMESPACE)
        assert made["spec"]["network"]["enableDNSHostnames"]
        (replicated,) = made["spec"]["replicatedJobs"]
        assert replicated["template"]["spec"]["completionMode"] == "Indexed"
        await cluster.until(lambda: cluster.running("a"), "it does not run")
        marks = [label for label in cluster.pods("a")[0]["metadata"]["labels"] if "jobset.sigs" in label]
        assert len(marks) == 12
        status = cluster.store.get("jobsets", "a", NAMESPACE)["status"]
        assert status["restartsCountTowardsMax"] == status["restarts"] == 0


FAILURE_POLICY: dict[str, Any] = {
    "backoffLimitPerIndex": None,
    "backoffLimit": 0,
    "podFailurePolicy": {
        "rules": [{"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]
    },
    "podReplacementPolicy": None,
}
DISRUPTED = {"type": "DisruptionTarget", "status": "True"}


@pytest.mark.parametrize("job", [{}, FAILURE_POLICY], ids=["policy Failed", "podFailurePolicy"])
async def test_a_pod_on_a_silent_node_is_kept_by_its_job_until_its_phase_says_that_it_failed(
    job: dict[str, Any],
) -> None:
    spec = {name: value for name, value in job.items() if value is not None}
    async with served("n1", "n2") as (cluster, api):
        await submit(cluster, jobset("a", hosts=1, **spec))
        cluster.lose_node("n1")
        (pod,) = cluster.pods("a")
        await api.delete(PODS, pod)
        await api.delete(PODS, pod, grace_s=0)
        cluster.settle()
        (left,) = cluster.pods("a")
        meta = left["metadata"]
        assert (meta["uid"], meta["deletionGracePeriodSeconds"]) == (pod["metadata"]["uid"], 0)
        assert meta["finalizers"] == ["batch.kubernetes.io/job-tracking"]
        patch = {"status": {"phase": "Failed", "conditions": [DISRUPTED]}, "spec": {"nodeName": "n2"}}
        failed = await api.patch(PODS, left, patch, subresource="status")
        # A status alone is patched there.
        assert (failed["status"]["phase"], failed["spec"]["nodeName"]) == ("Failed", "n1")
        await cluster.until(lambda: cluster.running("a") == {"0-0": "n2"}, "no replacement is made")
        assert len(cluster.pods("a")) == 1
        (counted,), _ = await api.list(JOBS, NAMESPACE)
        assert counted["status"]["failed"] == (0 if job else 1)


async def test_a_job_that_replaces_what_terminates_lets_a_pod_go_once_its_replacement_is_there() -> None:
    async with served("n1", "n2") as (cluster, api):
        await submit(cluster, jobset("a", hosts=1, podReplacementPolicy="TerminatingOrFailed"))
        cluster.lose_node("n1")
        (pod,) = cluster.pods("a")
        await api.delete(PODS, pod, grace_s=0)
        cluster.settle()
        assert [one["metadata"]["uid"] for one in cluster.pods("a")] == [pod["metadata"]["uid"]]
        await cluster.until(lambda: cluster.running("a") == {"0-0": "n2"}, "no replacement is made")
        await cluster.until(lambda: len(cluster.pods("a")) == 1, "it stays")
        node = await api.get(NODES, "n1")
        assert node["status"]["conditions"][0]["status"] == "Unknown"


async def test_a_job_waits_twice_as_long_before_each_replacement_of_an_index() -> None:
    async with served("n1") as (cluster, api):
        await submit(cluster, jobset("a", hosts=1))
        for seconds in (0.1, 0.2, 0.4):
            (pod,) = cluster.pods("a")
            await api.delete(PODS, pod)
            begun = time.monotonic()
            await cluster.until(lambda: not cluster.running("a"), "it runs on")
            await cluster.until(lambda: cluster.running("a"), "no replacement is made")
            assert time.monotonic() - begun >= seconds


async def test_pods_of_a_node_that_is_gone_are_failed_after_a_minute_and_not_at_once() -> None:
    async with served("n1", "n2") as (cluster, api):
        await submit(cluster, jobset("a", hosts=1))
        _, version = await api.list(PODS, NAMESPACE)
        begun = time.monotonic()
        cluster.remove_node("n1")
        cluster.settle()
        assert len(cluster.running("a")) == 1
        async for event in api.watch(PODS, NAMESPACE, version):
            if event["object"]["status"]["phase"] == "Failed":
                break
        assert time.monotonic() - begun >= cluster.waits.gone_s
        assert event["object"]["status"]["conditions"][-1]["type"] == "DisruptionTarget"
        await cluster.until(lambda: cluster.running("a") == {"0-0": "n2"}, "no replacement is made")


async def test_a_job_has_failed_when_none_of_its_pods_terminates_any_more() -> None:
    async with served("n1", "n2") as (cluster, api):
        await submit(cluster, jobset("a", hosts=1))
        cluster.lose_node("n1")
        (job,), _ = await api.list(JOBS, NAMESPACE)
        await api.patch(JOBS, job, {"spec": {"activeDeadlineSeconds": 1}})

        def conditions() -> list[str]:
            (job,) = cluster.store.all("jobs")
            return [one["type"] for one in job["status"].get("conditions", ())]

        await cluster.until(lambda: conditions() == ["FailureTarget"], "it does not begin to fail")
        cluster.settle()
        assert cluster.store.get("jobsets", "a", NAMESPACE)["status"]["restarts"] == 0
        (pod,) = cluster.pods("a")
        await api.delete(PODS, pod, grace_s=0)
        await cluster.until(lambda: cluster.running("a") == {"0-0": "n2"}, "no restart")
        assert cluster.store.get("jobsets", "a", NAMESPACE)["status"]["restarts"] == 1


def test_the_scheduler_takes_any_of_the_nodes_that_fit() -> None:
    def node_of(seed: int) -> str:
        cluster = Cluster(seed=seed)
        for name in ("n1", "n2", "n3"):
            cluster.add_node(name)
        pod = {"spec": {"containers": []}, "status": {"phase": "Pending"}, "metadata": {"name": "p"}}
        cluster.store.create("pods", pod, NAMESPACE)
        cluster.settle()
        (pod,) = cluster.pods()
        return str(pod["spec"]["nodeName"])

    assert {node_of(seed) for seed in range(20)} == {"n1", "n2", "n3"}
    assert node_of(7) == node_of(7)


class Ending(Kubelet):
    """A kubelet whose pods end with the exit codes that a test gives, one after the other."""

    def __init__(self, codes: list[int]) -> None:
        super().__init__()
        self.codes = codes

    def exit_code(self, pod: dict[str, Any]) -> int | None:
        return self.codes.pop(0) if self.codes else None


@pytest.mark.parametrize(("code", "left"), [(NO_REQUEUE, ("Failed", 0)), (1, ("", 1))])
def test_the_exit_code_that_says_do_not_requeue_ends_a_jobset_of_the_examples_and_no_other_does(
    code: int, left: tuple[str, int]
) -> None:
    (shipped,) = yaml.safe_load_all((EXAMPLES / "ddp-jobset.yaml").read_text())
    (replicated,) = shipped["spec"]["replicatedJobs"]
    policies = {
        name: replicated["template"]["spec"][name]
        for name in ("podFailurePolicy", "podReplacementPolicy", "backoffLimitPerIndex")
    }

    async def work() -> None:
        async with Cluster() as cluster:
            codes: list[int] = []
            cluster.add_node("n1", Ending(codes))
            thing = jobset("a", hosts=1, **policies)
            thing["spec"]["failurePolicy"] = shipped["spec"]["failurePolicy"]
            await submit(cluster, thing)
            codes.append(code)

            def state() -> tuple[str, int]:
                """End of the JobSet, and the number of pods that run."""
                return jobsets.end_of(cluster.store.get("jobsets", "a", NAMESPACE)), len(cluster.running("a"))

            await cluster.until(lambda: not cluster.running("a"), "its pod does not end")
            await cluster.until(lambda: state() == left, f"exit code {code} leads to {state()}")
            assert cluster.store.get("jobsets", "a", NAMESPACE)["status"]["restarts"] == 0

    run(work())
