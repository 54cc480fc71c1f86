# SPDX-License-Identifier: Apache-2.0
"""What pods of a job say: whether they run, what they wait for, and which are stuck.  Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from supervisor.orchestrators.gke.names import (
    IGNORED_FAILURES,
    INDEX_FAILURES,
    MIRROR,
    Object,
    annotations_of,
    condition,
    is_deleting,
    owner_uid,
    seconds_of,
)

#: A Job waits so long before the first replacement of an index, then twice as long each time, up to a limit.
BACKOFF_S, BACKOFF_LIMIT_S = 10.0, 600.0


def pods_of_jobset(uid: str, jobs: Iterable[Object], pods: Iterable[Object]) -> list[Object]:
    """Pods whose controller is a Job whose controller is the JobSet: names prove nothing."""
    mine = {job["metadata"]["uid"] for job in jobs if owner_uid(job) == uid}
    return [pod for pod in pods if owner_uid(pod) in mine]


def node_of(pod: Object) -> str:
    return str(pod["spec"].get("nodeName") or "")


def has_ended(pod: Object) -> bool:
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


def is_active(pod: Object) -> bool:
    return not has_ended(pod) and not is_deleting(pod)


def is_of_the_node(pod: Object) -> bool:
    """It belongs to its node, not to a job: a drain leaves it."""
    owners = pod["metadata"].get("ownerReferences") or []
    return MIRROR in annotations_of(pod) or any(
        owner.get("kind") in ("DaemonSet", "Node") for owner in owners
    )


def terminating_for(pod: Object, now: float) -> float:
    """Seconds since its grace ended, by the API server's clock; negative while it has some left.

    Its deletionTimestamp is the end of the grace, not its beginning.
    """
    return now - seconds_of(pod["metadata"]["deletionTimestamp"])


def starts_for(pod: Object, now: float) -> float:
    """Seconds since it was made, by the API server's clock, of one that a node has and that does not run yet.

    0 for others, and where something is known to be wrong with a container of it.
    """
    status = pod.get("status") or {}
    if not is_active(pod) or status.get("phase") != "Pending" or not node_of(pod):
        return 0.0
    usual = {"ContainerCreating", "PodInitializing"}
    if not _waits_for(status, "initContainerStatuses", "containerStatuses") <= usual:
        return 0.0
    return max(0.0, now - seconds_of(pod["metadata"]["creationTimestamp"]))


@dataclass(frozen=True, kw_only=True)
class Placement:
    """How far the pods of a job have come.

    Attributes:
        starting: on a node, and not running: its image is pulled, its volumes are mounted.
        refused: of these, the image cannot be pulled.
        queued: held back by gates: their turn has not come.
        unplaced: no node fits; `why` is the scheduler's sentence.
        missing: not made yet.
    """

    running: int = 0
    ended: int = 0
    starting: int = 0
    refused: int = 0
    queued: int = 0
    unplaced: tuple[str, ...] = ()
    why: str = ""
    missing: int = 0

    @property
    def is_complete(self) -> bool:
        return not (self.starting or self.queued or self.unplaced or self.missing)

    def __str__(self) -> str:
        said = [f"{self.running} pods run"]
        if self.starting:
            image = f", {self.refused} without their image" if self.refused else ""
            said.append(f"{self.starting} start on their nodes{image}")
        if self.queued:
            said.append(f"{self.queued} wait in a queue")
        if self.unplaced:
            said.append(f"{len(self.unplaced)} fit on no node: {self.why}")
        if self.missing:
            said.append(f"{self.missing} are not made yet")
        return ", ".join(said)


def placement(pods: Iterable[Object], wanted: int) -> Placement:
    """Where the active pods of a job are."""
    counts: dict[str, int] = dict.fromkeys(("running", "ended", "starting", "refused", "queued"), 0)
    unplaced, why = [], ""
    for pod in pods:
        status = pod.get("status") or {}
        if status.get("phase") == "Succeeded":
            counts["ended"] += 1
        elif not is_active(pod):
            continue
        elif status.get("phase") == "Running":
            counts["running"] += 1
        elif node_of(pod):
            counts["starting"] += 1
            counts["refused"] += _image_is_refused(status)
        else:
            scheduled = condition(pod, "PodScheduled", "False") or {}
            if pod["spec"].get("schedulingGates") or scheduled.get("reason") == "SchedulingGated":
                counts["queued"] += 1
            elif scheduled.get("reason") == "Unschedulable":
                unplaced.append(pod["metadata"]["uid"])
                why = scheduled.get("message", "")
            else:
                counts["starting"] += 1
    there = counts["running"] + counts["ended"] + counts["starting"] + counts["queued"] + len(unplaced)
    return Placement(**counts, unplaced=tuple(unplaced), why=why, missing=max(0, wanted - there))


def _image_is_refused(status: Object) -> bool:
    refusals = {"ErrImagePull", "ImagePullBackOff", "InvalidImageName"}
    return bool(_waits_for(status, "containerStatuses") & refusals)


def _waits_for(status: Object, *kinds: str) -> set[str]:
    """Reasons for which containers of these kinds wait, where their kubelet gives one."""
    containers = [one for kind in kinds for one in status.get(kind) or ()]
    waiting = [(one.get("state") or {}).get("waiting") or {} for one in containers]
    return {one["reason"] for one in waiting if one.get("reason")}


def how_to_replace(job: Object, pod: Object) -> str:
    """How one index of an Indexed Job is made again: ``delete``, ``evict``; empty where the Job would fail.

    A deleted pod counts as a failed one.  One that was evicted does not, where the Job ignores disruptions.
    """
    spec, status = job["spec"], job.get("status") or {}
    if condition(job, "Failed") or condition(job, "Complete") or spec.get("completionMode") != "Indexed":
        return ""
    limit = spec.get("backoffLimitPerIndex")
    if limit is not None:
        if int(annotations_of(pod).get(INDEX_FAILURES, "0")) < int(limit):
            return "delete"
    elif int(status.get("failed") or 0) < int(spec.get("backoffLimit", 6)):
        return "delete"
    for rule in (spec.get("podFailurePolicy") or {}).get("rules") or ():
        types = [one.get("type") for one in rule.get("onPodConditions") or ()]
        if rule.get("action") == "Ignore" and "DisruptionTarget" in types:
            return "evict"
    return ""


def backoff_s(job: Object, pod: Object) -> float:
    """Seconds from the end of a pod until its Job makes it again."""
    if job["spec"].get("backoffLimitPerIndex") is not None:
        marks = annotations_of(pod)
        failures = sum(int(marks.get(name, "0")) for name in (INDEX_FAILURES, IGNORED_FAILURES))
    else:
        # Failures that a policy ignores are not counted there; the wait after them is 20 s at most.
        failures = int((job.get("status") or {}).get("failed") or 0)
    return float(min(BACKOFF_S * 2.0 ** min(failures, 10), BACKOFF_LIMIT_S))
