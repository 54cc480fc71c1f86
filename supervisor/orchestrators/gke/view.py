# SPDX-License-Identifier: Apache-2.0
"""The cluster as the adapter sees it: its API, what is watched, and the times that it keeps."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone

from supervisor.orchestrators.gke import nodes, pods
from supervisor.orchestrators.gke.client import JOBS, JOBSETS, NODES, PODS, Api, ApiError, Object
from supervisor.orchestrators.gke.jobsets import restarts
from supervisor.orchestrators.gke.kubelets import Kubelets
from supervisor.orchestrators.gke.names import RESTART_ATTEMPT, is_deleting, labels_of
from supervisor.orchestrators.gke.watching import Changes, Watched
from supervisor.values import cut_text

logger = logging.getLogger(__name__)


class Refused(Exception):
    """A command cannot be done; the text says why, and another try changes nothing."""


class NotYet(Exception):
    """A command would undo what is under way or not ours, and so does nothing; the text says what that is."""


class TimedOut(Exception):
    """What a command waits for did not come by its deadline."""


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds that the adapter waits.

    Attributes:
        lease_s: after which another adapter may take over.
        stuck_s: beyond its grace, a pod that does not end is deleted for good.
        pull_s: for which pods may start, with nothing known to be wrong, before their job is restarted.
        evict_s: for which a drain respects disruption budgets.
        unplaced_s: for which pods may fit on no node while none is being added.
        margin_s: before its deadline, a command that waits for a queue or an image counts as done.
        alive_s: a kubelet that renewed its lease within this time is there; it does so each 10 s.
        silent_s: one that did not within this time is silent: its next two renewals have failed, too.
        served_s: for which the API server must have answered before a kubelet is called silent.
        retry_s: between tries of what nobody waits for.
    """

    lease_s: float = 15.0
    stuck_s: float = 30.0
    pull_s: float = 600.0
    evict_s: float = 300.0
    unplaced_s: float = 60.0
    margin_s: float = 15.0
    alive_s: float = 12.0
    silent_s: float = 30.0
    served_s: float = 15.0
    retry_s: float = 5.0


#: Longest time between two looks at what time alone changes.
LOOK_S = 1.0
#: A pod whose end was asked for is forgotten so long after the last time.
FORGOTTEN_S = 3600.0
#: Condition of a pod that did not end by itself: a podFailurePolicy may ignore its failure.
DISRUPTED = "DisruptionTarget"


@dataclass(frozen=True, kw_only=True)
class _Ended:
    """When the end of a pod was asked for last, and what kept it there."""

    at: float
    held: str


class ClusterView:
    """See the module.

    Args:
        namespace: of JobSets, their Jobs and pods.
        served_for: see `Kubelets`.
    """

    def __init__(self, api: Api, namespace: str, times: Times, served_for: Callable[[], float]) -> None:
        self.api, self.namespace, self.times = api, namespace, times
        self.kubelets = Kubelets(api, silent_s=times.silent_s, served_s=times.served_s, served_for=served_for)
        self.changes = Changes()
        self.nodes = Watched(NODES, "", self.changes)
        self.jobsets = Watched(JOBSETS, namespace, self.changes)
        self.jobs = Watched(JOBS, namespace, self.changes)
        self.pods = Watched(PODS, namespace, self.changes)
        self._ended: dict[str, _Ended] = {}

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

    async def is_lost(self, name: str) -> bool:
        """Whether nothing on a node can end in order: it is gone, or its kubelet is silent."""
        # A watch may be behind, and what is killed without grace loses its last save: the server is asked.
        if self.nodes.get(name) is None and await self.api.try_get(NODES, name) is None:
            return True
        return await self.kubelets.is_silent(name)

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

    async def end_stuck(self, found: list[Object]) -> None:
        """Fail and delete for good what should have ended; its age is by the API server's clock."""
        now = time.monotonic()
        self._ended = {uid: one for uid, one in self._ended.items() if now - one.at < FORGOTTEN_S}
        for pod in found:
            uid = pod["metadata"]["uid"]
            ended = self._ended.get(uid)
            if not is_deleting(pod) or (ended and now - ended.at < self.times.retry_s):
                continue
            late_s = pods.terminating_for(pod, self.api.now())
            lost = bool(pods.node_of(pod)) and await self.is_lost(pods.node_of(pod))
            if lost or late_s >= self.times.stuck_s:
                await self.end_pod(pod, "its node is lost" if lost else f"it does not end for {late_s:.0f} s")

    async def end_pod(self, pod: Object, why: str) -> None:
        """Fail a pod that no kubelet ends, then delete it without grace, as the pod collector does.

        Without the phase its Job would neither count nor replace it, and its finalizer would keep it there:
        with `podReplacementPolicy: Failed` or a podFailurePolicy, a deletion alone changes nothing.
        """
        meta, status = pod["metadata"], pod.get("status") or {}
        others = [one for one in status.get("conditions") or () if one.get("type") != DISRUPTED]
        stamp = datetime.fromtimestamp(self.api.now(), timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        condition = {
            "type": DISRUPTED,
            "status": "True",
            "reason": "DeletionBySupervisor",
            "message": cut_text(f"ended by the supervisor: {why}"),
            "lastTransitionTime": stamp,
        }
        try:
            if not pods.has_ended(pod):
                body = {"status": {"phase": "Failed", "conditions": [*others, condition]}}
                await self.api.patch(PODS, pod, body, subresource="status")
            if meta.get("deletionGracePeriodSeconds") != 0:
                await self.api.delete(PODS, pod, grace_s=0)
        except ApiError as error:
            if error.code not in (404, 409):
                raise
            return  # gone, or changed since it was read: the next look decides
        self._tell_ended(pod, why)

    def _tell_ended(self, pod: Object, why: str) -> None:
        """Say once that the end of a pod was asked for, and once what keeps it there."""
        meta = pod["metadata"]
        before = self._ended.get(meta["uid"])
        if before is None:
            logger.warning("pod %s: its end without grace was asked for: %s", meta["name"], why)
            text = ""
        else:
            text = f"held by {', '.join(meta.get('finalizers') or ()) or 'its kubelet'}"
            if text != before.held:
                logger.warning("pod %s is still there: %s", meta["name"], text)
        self._ended[meta["uid"]] = _Ended(at=time.monotonic(), held=text)
