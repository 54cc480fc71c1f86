# SPDX-License-Identifier: Apache-2.0
"""The cluster as the adapter sees it: its API, what is watched, and the times that it keeps."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from supervisor.orchestrators.gke import nodes, pods
from supervisor.orchestrators.gke.client import JOBS, JOBSETS, NODES, PODS, Api, Object
from supervisor.orchestrators.gke.jobsets import restarts
from supervisor.orchestrators.gke.names import RESTART_ATTEMPT, is_deleting, labels_of
from supervisor.orchestrators.gke.watching import Changes, Watched

logger = logging.getLogger(__name__)


class Refused(Exception):
    """A command cannot be done; the text says why, and another try changes nothing."""


class TimedOut(Exception):
    """What a command waits for did not come by its deadline."""


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds that the adapter waits.

    Attributes:
        lease_s: after which another adapter may take over.
        stuck_s: beyond its grace, a pod that does not end is deleted for good.
        evict_s: for which a drain respects disruption budgets.
        unplaced_s: for which pods may fit on no node while none is being added.
        margin_s: before its deadline, a command that waits for a queue or an image counts as done.
        alive_s: a kubelet that renewed its lease within this time is there; it does so each 10 s.
        retry_s: between tries of what nobody waits for.
    """

    lease_s: float = 15.0
    stuck_s: float = 30.0
    evict_s: float = 300.0
    unplaced_s: float = 60.0
    margin_s: float = 15.0
    alive_s: float = 12.0
    retry_s: float = 5.0


#: Longest time between two looks at what time alone changes.
LOOK_S = 1.0


class ClusterView:
    """See the module.

    Args:
        namespace: of JobSets, their Jobs and pods.
    """

    def __init__(self, api: Api, namespace: str, times: Times) -> None:
        self.api, self.namespace, self.times = api, namespace, times
        self.changes = Changes()
        self.nodes = Watched(NODES, "", self.changes)
        self.jobsets = Watched(JOBSETS, namespace, self.changes)
        self.jobs = Watched(JOBS, namespace, self.changes)
        self.pods = Watched(PODS, namespace, self.changes)

    @property
    def watched(self) -> tuple[Watched, ...]:
        return self.nodes, self.jobsets, self.jobs, self.pods

    def find_node(self, host: str) -> Object | None:
        """The node that a host's id, or its bare name, is of; None where that boot of it is gone."""
        known = self.nodes.get(host)
        if known is not None:
            return known
        known = self.nodes.get(nodes.name_of(host))
        return known if known is not None and nodes.host_id(known) == host else None

    async def is_lost(self, node: str) -> bool:
        """Whether nothing on a node can end in order: it is gone, or silent for the node controller."""
        known = self.nodes.get(node)
        if known is not None and not nodes.is_silent(known):
            return False
        # A watch may be behind, and what is killed without grace loses its last save: the server is asked.
        known = await self.api.try_get(NODES, node)
        return known is None or nodes.is_silent(known)

    def pods_of(self, uid: str) -> list[Object]:
        return pods.pods_of_jobset(uid, self.jobs.all(), self.pods.all())

    def present_pods(self, jobset: Object) -> list[Object]:
        """Those of its present restart attempt."""
        attempt = str(restarts(jobset))
        return [
            pod
            for pod in self.pods_of(jobset["metadata"]["uid"])
            if labels_of(pod).get(RESTART_ATTEMPT) == attempt
        ]

    async def end_stuck(self, found: list[Object], forced: dict[str, float]) -> None:
        """Delete for good what should have ended; its age is by the API server's clock.

        Args:
            forced: when each was deleted last, by uid.
        """
        now = time.monotonic()
        for pod in found:
            if not is_deleting(pod) or pods.has_ended(pod):
                continue
            uid, name = pod["metadata"]["uid"], pod["metadata"]["name"]
            if now < forced.get(uid, 0.0):
                continue
            late_s = pods.terminating_for(pod, self.api.now())
            lost = bool(pods.node_of(pod)) and await self.is_lost(pods.node_of(pod))
            if lost or late_s >= self.times.stuck_s:
                forced[uid] = now + self.times.retry_s
                why = "its node is lost" if lost else f"it does not end for {late_s:.0f} s"
                logger.warning("pod %s deleted for good: %s", name, why)
                await self.api.delete(PODS, pod, grace_s=0)
