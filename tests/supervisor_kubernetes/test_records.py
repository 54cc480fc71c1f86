# SPDX-License-Identifier: Apache-2.0
"""A JobSet that is made again, where that is refused, cut short, or taken out of our hands."""

from __future__ import annotations

import base64
import gzip
import json
from typing import Any

import pytest

from supervisor.orchestrators.gke.jobsets import generation
from supervisor.testing.kubernetes import Fault, FaultKind
from supervisor.testing.kubernetes.kinds import Refusal
from supervisor.values import Command, CommandKind, Outcome, OutcomeStatus
from tests.supervisor_kubernetes.fleet import JOBS, OWN, Adapter, cluster_of, jobset, kill_at, submit

pytestmark = pytest.mark.virtual_time

#: The old JobSet is gone, and the new one is not there yet: the first such call is the dry run.
BETWEEN = Fault(kind=FaultKind.HOLD_BEFORE, verb="create", resource="jobsets", call=2)
AGAIN = Command(epoch=1, id="c1", kind=CommandKind.WORKLOAD_RECREATION, workload="a")


async def test_a_jobset_that_would_be_refused_is_not_deleted() -> None:
    async with cluster_of("n1", "n2") as cluster, Adapter(cluster, "one") as adapter:
        await submit(cluster, jobset(hosts=2))
        before = {pod["metadata"]["uid"] for pod in cluster.pods("a")}

        def refuse(plural: str, thing: dict[str, Any]) -> None:
            if plural == "jobsets":
                raise Refusal(422, f"{thing['metadata']['name']} exceeds the quota of {plural}\n{'x' * 5000}")

        cluster.api.admission = refuse
        refused = await adapter.do("c1", CommandKind.WORKLOAD_RECREATION, workload="a")
        assert (refused.status, refused.passing) == (OutcomeStatus.FAILED, False)
        assert "a exceeds the quota of jobsets" in refused.text
        Outcome(command="c1", epoch=1, status=refused.status, text=refused.text)  # an actuator can send it
        assert {pod["metadata"]["uid"] for pod in cluster.pods("a")} == before
        assert list(cluster.store.all("configmaps")) == []


@pytest.mark.parametrize(("limit", "fits"), [(1, True), (0, False)])
async def test_a_quota_that_counts_the_old_jobset_refuses_the_new_one_only_where_it_is_exceeded_already(
    limit: int, fits: bool
) -> None:
    async with cluster_of("n1", "n2") as cluster, Adapter(cluster, "one") as adapter:
        await submit(cluster, jobset(hosts=2))
        name = "count/jobsets.jobset.x-k8s.io"
        quota = {"metadata": {"name": "few"}, "spec": {"hard": {name: str(limit)}}}
        cluster.store.create("resourcequotas", quota, JOBS)
        uid = cluster.store.get("jobsets", "a", JOBS)["metadata"]["uid"]
        done = await adapter.do("c1", CommandKind.WORKLOAD_RECREATION, workload="a")
        assert (cluster.store.get("jobsets", "a", JOBS)["metadata"]["uid"] != uid) == fits
        if fits:
            assert done.status is OutcomeStatus.DONE
        else:
            assert (done.status, done.passing) == (OutcomeStatus.FAILED, False)
            assert f"used: {name}=1, limited: {name}=0" in done.text


async def test_a_jobset_that_is_refused_after_its_deletion_is_kept_and_made_again_by_itself() -> None:
    async with cluster_of("n1", "n2") as cluster, Adapter(cluster, "one") as adapter:
        await submit(cluster, jobset(hosts=2))
        # The dry run is the first of these calls.
        cluster.api.faults.place(Fault(verb="create", resource="jobsets", call=2, times=0, status=403))
        refused = await adapter.try_once(AGAIN)
        assert refused.status is OutcomeStatus.FAILED
        assert refused.text.startswith("JobSet a is kept, and not made again yet: ")
        (kept,) = cluster.store.all("configmaps", OWN)
        record = json.loads(gzip.decompress(base64.b64decode(kept["binaryData"]["record.json.gz"])))
        assert record["original"]["spec"] == jobset(hosts=2)["spec"]
        cluster.api.faults.clear()
        # Nobody asks again.
        await cluster.until(lambda: len(cluster.running("a")) == 2, "it is lost")
        await cluster.until(lambda: not any(cluster.store.all("configmaps")), "its record is left")


@pytest.mark.parametrize("refused", ["a", "b"])
async def test_a_jobset_that_is_refused_for_ever_keeps_no_other_one_waiting(refused: str) -> None:
    async with cluster_of("n1", "n2") as cluster, Adapter(cluster, "one") as adapter:
        for name in ("a", "b"):
            await submit(cluster, jobset(name, hosts=1))
        # The dry run of each is let through.
        known: set[str] = set()
        shut = {"a", "b"}

        def refuse(plural: str, thing: dict[str, Any]) -> None:
            name = thing["metadata"]["name"]
            if plural == "jobsets" and name in known & shut:
                raise Refusal(403, f"{name} is over its quota")
            known.add(name)

        cluster.api.admission = refuse
        for name in ("a", "b"):
            kept = await adapter.do_once(f"c-{name}", CommandKind.WORKLOAD_RECREATION, workload=name)
            assert f"JobSet {name} is kept" in kept.text
        shut.remove("b" if refused == "a" else "a")
        (other,) = {"a", "b"} - shut
        await cluster.until(lambda: len(cluster.running(other)) == 1, f"{other} is lost")
        shut.clear()
        await cluster.until(lambda: not any(cluster.store.all("configmaps")), "a record is left")
        assert len(cluster.running(refused)) + len(cluster.pods(refused)) > 0


async def test_the_next_adapter_makes_a_jobset_again_that_the_last_one_deleted() -> None:
    async with cluster_of("n1", "n2") as cluster:
        await submit(cluster, jobset(hosts=2))
        await kill_at(cluster, BETWEEN, AGAIN)
        assert cluster.store.find("jobsets", "a", JOBS) is None
        async with Adapter(cluster, "two"):
            await cluster.until(lambda: len(cluster.running("a")) == 2, "it is lost")
            await cluster.until(lambda: not any(cluster.store.all("configmaps")), "its record is left")


async def test_a_jobset_that_somebody_else_made_meanwhile_stays_as_it_is() -> None:
    async with cluster_of("n1", "n2") as cluster, Adapter(cluster, "one") as adapter:
        await submit(cluster, jobset(hosts=2))
        theirs: list[dict[str, Any]] = []

        def make_first(plural: str, thing: dict[str, Any]) -> None:
            if cluster.store.find("jobsets", "a", JOBS) is None and plural == "jobsets":
                theirs.append(cluster.store.create("jobsets", jobset(hosts=1), JOBS))

        cluster.api.admission = make_first
        refused = await adapter.do("c1", CommandKind.WORKLOAD_RECREATION, workload="a")
        assert (refused.status, refused.text) == (
            OutcomeStatus.FAILED,
            "another JobSet a was made meanwhile; it stays as it is",
        )
        uid = cluster.store.get("jobsets", "a", JOBS)["metadata"]["uid"]
        assert [one["metadata"]["uid"] for one in theirs] == [uid]
        assert list(cluster.store.all("configmaps")) == []


async def test_a_jobset_that_is_changed_before_its_deletion_is_made_again_with_the_change() -> None:
    async with cluster_of("n1", "n2") as cluster, Adapter(cluster, "one") as adapter:
        thing = {**jobset(hosts=2, restarts=20), "status": {"restarts": 9}}
        await submit(cluster, thing)

        def change_first(plural: str, thing: dict[str, Any]) -> None:
            known = cluster.store.find("jobsets", "a", JOBS)
            if plural == "jobsets" and known is not None and known["status"]["restarts"] == 9:
                known["metadata"]["annotations"]["team"] = "another"
                known["status"]["restarts"] = 10
                cluster.store.update("jobsets", known, JOBS, checked=False)

        cluster.api.admission = change_first
        done = await adapter.do("c1", CommandKind.WORKLOAD_RECREATION, workload="a")
        assert done.status is OutcomeStatus.DONE
        new = cluster.store.get("jobsets", "a", JOBS)
        assert new["metadata"]["annotations"]["team"] == "another"
        # Above that of every restart of the old one.
        assert generation(new) > 10
        assert list(cluster.store.all("configmaps")) == []


async def test_a_command_finishes_first_what_another_one_began() -> None:
    async with cluster_of("n1", "n2") as cluster:
        await submit(cluster, jobset(hosts=2))
        await kill_at(cluster, BETWEEN, AGAIN)
        assert cluster.store.find("jobsets", "a", JOBS) is None
        async with Adapter(cluster, "two") as second:
            done = await second.do("c2", CommandKind.WORKLOAD_RESET, epoch=2, workload="a")
            assert done.status is OutcomeStatus.DONE
        known = cluster.store.get("jobsets", "a", JOBS)
        assert known["metadata"]["annotations"]["supervisor/commands"] == "c1,c2"
        assert known["status"]["restarts"] == 1
        assert list(cluster.store.all("configmaps")) == []
