# SPDX-License-Identifier: Apache-2.0
"""What the adapter knows of hosts and tells their daemons, which have no rights at the API server."""

from __future__ import annotations

from supervisor.values import HostFacts
from tests.supervisor_kubernetes.fleet import Adapter, cluster_of, run

LABELS = {
    "cloud.google.com/gce-topology-block": "b1",
    "cloud.google.com/gce-topology-subblock": "s1",
    "topology.kubernetes.io/zone": "us-east5-a",
}


def test_labels_of_nodes_are_told_when_they_are_seen_and_when_they_change() -> None:
    async def work() -> None:
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

    run(work())
