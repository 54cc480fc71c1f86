# SPDX-License-Identifier: Apache-2.0
"""What the adapter may do at the API server, which tests compare with the calls that it makes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Scope(Enum):
    """Where a right holds."""

    CLUSTER = "cluster"
    #: WORKLOAD_NAMESPACE: JobSets, their Jobs and pods.
    WORKLOADS = "workloads"
    #: JOB_NAMESPACE: objects of the supervisor's own.
    OWN = "own"
    #: ``kube-node-lease``: the signs of life of kubelets.
    NODE_LEASES = "node_leases"


@dataclass(frozen=True, kw_only=True)
class Right:
    """One rule of a Role; `resource` may hold a subresource."""

    group: str
    resource: str
    verbs: tuple[str, ...]
    scope: Scope


JOBSET_GROUP, QUEUE_GROUP, LEASE_GROUP = "jobset.x-k8s.io", "kueue.x-k8s.io", "coordination.k8s.io"

RIGHTS = (
    Right(group="", resource="nodes", verbs=("get", "list", "patch", "watch"), scope=Scope.CLUSTER),
    Right(
        group=JOBSET_GROUP,
        resource="jobsets",
        verbs=("create", "delete", "get", "list", "patch", "watch"),
        scope=Scope.WORKLOADS,
    ),
    Right(group="batch", resource="jobs", verbs=("list", "patch", "watch"), scope=Scope.WORKLOADS),
    Right(group="", resource="pods", verbs=("delete", "list", "watch"), scope=Scope.WORKLOADS),
    Right(group="", resource="pods/eviction", verbs=("create",), scope=Scope.WORKLOADS),
    # Pods whose kubelet does not end them are failed before they are deleted.
    Right(group="", resource="pods/status", verbs=("patch",), scope=Scope.WORKLOADS),
    Right(group="", resource="events", verbs=("list",), scope=Scope.WORKLOADS),
    # Only read where a JobSet is in a queue.
    Right(group=QUEUE_GROUP, resource="workloads", verbs=("list",), scope=Scope.WORKLOADS),
    Right(group="", resource="configmaps", verbs=("create", "delete", "get", "list"), scope=Scope.OWN),
    Right(group=LEASE_GROUP, resource="leases", verbs=("create", "get", "update"), scope=Scope.OWN),
    Right(group=LEASE_GROUP, resource="leases", verbs=("get", "list"), scope=Scope.NODE_LEASES),
)
