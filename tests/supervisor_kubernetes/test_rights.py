# SPDX-License-Identifier: Apache-2.0
"""The adapter has all the rights that its actions need (each test runs with them alone), and no others."""

from __future__ import annotations

import asyncio

import pytest

from supervisor.orchestrators.gke import RIGHTS
from supervisor.testing.kubernetes import Call
from supervisor.values import CommandKind, OutcomeStatus
from tests.supervisor_kubernetes.fleet import (
    IMPATIENT,
    JOBS,
    Adapter,
    cluster_of,
    host,
    jobset,
    right_of,
    submit,
)
from tests.supervisor_kubernetes.scenarios import EACH_ACTION, SCENARIOS, Scenario

pytestmark = pytest.mark.virtual_time


async def play(scenario: Scenario, calls: list[Call]) -> None:
    async with scenario.played() as (cluster, _), Adapter(cluster, "one") as adapter:
        done = await adapter.do("c1", scenario.kind, **scenario.fields(cluster))
        assert done.status is OutcomeStatus.DONE
        calls += cluster.api.calls


async def play_the_rest(calls: list[Call]) -> None:
    """What no action of the scenarios does: look, ask about new nodes, read a queue."""
    async with cluster_of("n1") as cluster, Adapter(cluster, "one") as adapter:
        await cluster.until(adapter.orchestrator._view.nodes.listed.is_set, "not listed")
        assert await adapter.look(host(cluster, "n1")) is True
        cluster.store.create("jobsets", jobset("a", hosts=2), JOBS)
        full = await adapter.do("c1", CommandKind.WORKLOAD_RECREATION, workload="a")
        assert full.status is OutcomeStatus.FAILED
        queued = jobset("b", hosts=1, labels={"kueue.x-k8s.io/queue-name": "q"})
        cluster.store.delete("jobsets", "a", JOBS)
        await cluster.until(lambda: not cluster.pods("a"), "no end")
        await submit(cluster, queued)
        adapter.orchestrator._view.times = IMPATIENT
        again = await adapter.do("c2", CommandKind.WORKLOAD_RECREATION, workload="b")
        assert again.status is OutcomeStatus.DONE
        calls += cluster.api.calls


@pytest.mark.slow
async def test_each_right_is_used_and_no_call_is_without_one() -> None:
    calls: list[Call] = []
    await asyncio.gather(*(play(SCENARIOS[name], calls) for name in EACH_ACTION), play_the_rest(calls))
    assert [call for call in calls if right_of(call) is None] == []
    used = {(right, call.verb) for call in calls if (right := right_of(call)) is not None}
    granted = {(right, verb) for right in RIGHTS for verb in right.verbs}
    assert {(right.resource, verb) for right, verb in granted - used} == set()
