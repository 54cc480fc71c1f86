# SPDX-License-Identifier: Apache-2.0
"""Pods whose annotations say what their job is, for jobs without our launcher.  Pure.

Names, owners and sizes come from the objects themselves; what the annotations say, the daemon of the host
checks.
"""

from __future__ import annotations

from collections.abc import Iterable

from supervisor.orchestrators.gke.jobsets import end_of, pods_of, pods_of_job, replicated_jobs
from supervisor.orchestrators.gke.names import (
    HOSTS_PER_REPLICA,
    INDEX,
    Object,
    annotations_of,
    is_deleting,
    labels_of,
    owner_uid,
)
from supervisor.orchestrators.gke.pods import has_ended, node_of
from supervisor.orchestrators.gke.sizes import CannotResize, HostsPerReplica, size_of
from supervisor.values import DeviceState, PodFacts

PREFIX = "supervisor/"
#: Annotations of a pod that say what its job is.
NAMES = (
    *("container-name", "job-name", "max-workload-restarts", "max-in-job-restarts"),
    *("workload-downtime-threshold-s", "enable-workload-scaling", "container-termination-threshold-s"),
    *("num-nodes-per-dp", "min-num-dp-replicas", "max-num-dp-replicas"),
)
_JOB_INDEX, _REPLICATED = "jobset.sigs.k8s.io/job-index", "jobset.sigs.k8s.io/replicatedjob-name"


def annotated_pods(
    jobsets: Iterable[Object],
    jobs: Iterable[Object],
    pods: Iterable[Object],
    hosts_per_replica: HostsPerReplica,
) -> dict[str, PodFacts]:
    """By the name of their node: of each index of a Job the newest pod, as long as the JobSet has no end.

    Args:
        hosts_per_replica: for JobSets that do not say.
    """
    running = {one["metadata"]["uid"]: one for one in jobsets if not end_of(one)}
    sizes: dict[str, str] = {}
    owners = {job["metadata"]["uid"]: running.get(owner_uid(job)) for job in jobs}
    newest: dict[tuple[str, str], Object] = {}
    for pod in sorted(pods, key=_age):
        if owners.get(owner_uid(pod)) is not None:
            newest[owner_uid(pod), labels_of(pod).get(INDEX, "0")] = pod
    found = {}
    for (job, _), pod in newest.items():
        jobset = owners[job]
        said = tuple(
            f"{name}={text}" for name in NAMES if (text := annotations_of(pod).get(PREFIX + name)) is not None
        )
        if jobset is not None and said and node_of(pod) and not is_deleting(pod):
            if HOSTS_PER_REPLICA not in annotations_of(pod):
                uid = jobset["metadata"]["uid"]
                if uid not in sizes:
                    sizes[uid] = _size(jobset, hosts_per_replica)
                said += (sizes[uid],) * bool(sizes[uid])
            found[node_of(pod)] = _facts(jobset, pod, said)
    return found


def _size(jobset: Object, hosts_per_replica: HostsPerReplica) -> str:
    """The annotation that says what an action takes the size of the JobSet for."""
    try:
        size = size_of(jobset, hosts_per_replica)
    except CannotResize:
        return ""
    return f"{HOSTS_PER_REPLICA.removeprefix(PREFIX)}={size.hosts_per_replica}"


def _age(pod: Object) -> tuple[str, bool]:
    """Times are whole seconds: of two pods of one second, the one that has not ended is the newer."""
    return str(pod["metadata"].get("creationTimestamp", "")), not has_ended(pod)


def _facts(jobset: Object, pod: Object, said: tuple[str, ...]) -> PodFacts:
    labels = labels_of(pod)
    mine = [one for one in replicated_jobs(jobset) if one["name"] == labels.get(_REPLICATED)]
    per_job = pods_of_job(mine[0]) if mine else 1
    return PodFacts(
        id=pod["metadata"]["uid"],
        workload=jobset["metadata"]["name"],
        namespace=jobset["metadata"]["namespace"],
        hosts=pods_of(mine[0]) if mine else 1,
        index=int(labels.get(_JOB_INDEX, "0")) * per_job + int(labels.get(INDEX, "0")),
        state=_state(pod),
        annotations=said,
    )


def _state(pod: Object) -> DeviceState:
    status = pod.get("status") or {}
    if status.get("phase") in ("Succeeded", "Failed"):
        return DeviceState.COMPLETE if status["phase"] == "Succeeded" else DeviceState.FAILED
    if status.get("phase") != "Running":
        return DeviceState.SPARE
    name = annotations_of(pod).get(f"{PREFIX}container-name", "")
    states = [one.get("state") or {} for one in status.get("containerStatuses") or () if one["name"] == name]
    ended = any("terminated" in one for one in states)
    return DeviceState.FAILED if ended else DeviceState.RUNNING
