# SPDX-License-Identifier: Apache-2.0
"""One scenario for each action: a cluster, a command, and what must hold afterwards, and all the time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from supervisor.testing.kubernetes import Cluster, Fault, FaultKind
from supervisor.values import CommandKind
from tests.supervisor_kubernetes.fleet import JOBS, OWN, STEADY, cluster_of, host, jobset, submit


@dataclass(kw_only=True)
class Seen:
    """What happened to the JobSet and its pods, change by change.

    Attributes:
        jobsets, pods: uids of those that were ever made.
        lost: there was a moment with neither the JobSet nor a record of it.
    """

    jobsets: set[str] = field(default_factory=set)
    pods: set[str] = field(default_factory=set)
    lost: bool = False

    def look(self, cluster: Cluster) -> None:
        known = cluster.store.find("jobsets", "a", JOBS)
        if known is not None:
            self.jobsets.add(known["metadata"]["uid"])
        elif self.jobsets and not any(cluster.store.all("configmaps", OWN)):
            self.lost = True
        self.pods |= {pod["metadata"]["uid"] for pod in cluster.pods("a")}


def _keep(cluster: Cluster) -> None:
    """All of it stays."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One action.

    Attributes:
        fields: of the command, from the cluster.
        prepare: done to the cluster once the job runs.
        running: where the pods are at the end.
        jobsets, pods: made in all, the first ones counted.
        restarts: of the JobSet at the end.
    """

    kind: CommandKind
    fields: Callable[[Cluster], dict[str, Any]]
    prepare: Callable[[Cluster], None] = _keep
    running: dict[str, str]
    jobsets: int = 1
    pods: int = 2
    restarts: int = 0
    job: dict[str, Any] = field(default_factory=dict)

    @asynccontextmanager
    async def played(self) -> AsyncIterator[tuple[Cluster, Seen]]:
        async with cluster_of("n1", "n2", "n3", waits=STEADY) as cluster:
            await submit(cluster, jobset(hosts=2, **self.job))
            cluster.choose_node = min  # `running` names the nodes
            self.prepare(cluster)
            seen = Seen()
            seen.look(cluster)
            cluster.store.listeners.append(lambda: seen.look(cluster))
            yield cluster, seen

    def check(self, cluster: Cluster, seen: Seen) -> None:
        """The effect is there, once, and nothing is left of it."""
        assert not seen.lost, "there was a moment without the JobSet and without a record of it"
        assert cluster.running("a") == self.running
        assert len(seen.jobsets) == self.jobsets
        assert len(seen.pods) == self.pods
        assert cluster.store.get("jobsets", "a", JOBS)["status"]["restarts"] == self.restarts
        assert list(cluster.store.all("configmaps")) == []


def _lose(cluster: Cluster) -> None:
    cluster.lose_node("n2")


def _lost(cluster: Cluster) -> dict[str, Any]:
    return {"workload": "a", "host": host(cluster, "n2")}


_RESET = Scenario(
    kind=CommandKind.WORKLOAD_RESET,
    fields=lambda cluster: {"workload": "a"},
    running={"0-0": "n1", "0-1": "n2"},
    pods=4,
    restarts=1,
)
_MADE_AGAIN = replace(_RESET, jobsets=2, restarts=0)
_SWAP = Scenario(
    kind=CommandKind.HOT_SWAP,
    fields=lambda cluster: {**_lost(cluster), "spare": host(cluster, "n3")},
    prepare=_lose,
    running={"0-0": "n1", "0-1": "n3"},
    pods=3,
)
_CORDON = Scenario(
    kind=CommandKind.CORDON_HOST,
    fields=lambda cluster: {"host": host(cluster, "n2")},
    running={"0-0": "n1", "0-1": "n2"},
)
#: Its Job replaces no pod that was deleted.
_NO_RETRY: dict[str, Any] = {"backoffLimitPerIndex": None, "backoffLimit": 0}
_IGNORES = {"rules": [{"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}]}

SCENARIOS = {
    "reset": _RESET,
    "reset of a JobSet with a lost host": replace(_RESET, prepare=_lose, running={"0-0": "n1", "0-1": "n3"}),
    "recreation": replace(_MADE_AGAIN, kind=CommandKind.WORKLOAD_RECREATION),
    "reset without a restart left": replace(_MADE_AGAIN, job={"restarts": 0}),
    "hot swap": _SWAP,
    "hot swap by eviction": replace(_SWAP, prepare=_keep, job={**_NO_RETRY, "podFailurePolicy": _IGNORES}),
    "hot swap of a job that restarts as a whole": replace(_SWAP, job=_NO_RETRY, pods=4, restarts=1),
    "scale down": replace(
        _MADE_AGAIN,
        kind=CommandKind.SCALE_DOWN,
        fields=lambda cluster: {**_lost(cluster), "replicas": 1},
        prepare=_lose,
        running={"0-0": "n1"},
        pods=3,
    ),
    "scale up": replace(
        _MADE_AGAIN,
        kind=CommandKind.SCALE_UP,
        fields=lambda cluster: {"workload": "a", "replicas": 3},
        running={"0-0": "n1", "0-1": "n2", "0-2": "n3"},
        pods=5,
    ),
    "drain": replace(_CORDON, kind=CommandKind.DRAIN_HOST, running={"0-0": "n1", "0-1": "n3"}, pods=3),
    "cordon": _CORDON,
    "uncordon": replace(_CORDON, kind=CommandKind.UNCORDON_HOST),
}


#: One scenario for each kind of command; the others take the same ways through it.
EACH_ACTION = tuple({scenario.kind: name for name, scenario in reversed(SCENARIOS.items())}.values())


def changing_calls(cluster: Cluster, token: str) -> list[Fault]:
    """Each change that an adapter made, as the fault that hits it; but not renewals of its lease."""
    counts: dict[tuple[str, str], int] = {}
    found = []
    for call in cluster.api.calls:
        if call.user == token and call.changes and call.resource != "leases":
            key = (call.verb, call.resource)
            counts[key] = counts.get(key, 0) + 1
            found.append(
                Fault(
                    verb=call.verb,
                    resource=call.resource,
                    user=token,
                    changes_only=True,
                    call=counts[key],
                    kind=FaultKind.HOLD_AFTER,
                )
            )
    return found
