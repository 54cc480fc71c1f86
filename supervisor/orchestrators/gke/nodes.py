# SPDX-License-Identifier: Apache-2.0
"""What a Node object says about a host.  Pure."""

from __future__ import annotations

from supervisor.orchestrators.gke.names import Object, condition, labels_of
from supervisor.values import Change, HostFacts

#: Taints of a machine that will go at a time that was announced.
_LEAVING = {
    "cloud.google.com/impending-node-termination",
    "node.cloudprovider.kubernetes.io/shutdown",
    "ToBeDeletedByClusterAutoscaler",
}

#: Taints that follow, up to a second late, what a node itself says.
_FOLLOWING = {
    "node.kubernetes.io/unschedulable",
    "node.kubernetes.io/unreachable",
    "node.kubernetes.io/not-ready",
}


def host_id(node: Object) -> str:
    """The id under which the daemon of this boot of the machine registers."""
    boot = str(((node.get("status") or {}).get("nodeInfo") or {}).get("bootID", "")).replace("-", "")[:12]
    return f"{node['metadata']['name']}.{boot or 'unknown'}"


def name_of(host: str) -> str:
    """Name of the node that a host's id is of."""
    return host.rpartition(".")[0] or host


def is_cordoned(node: Object) -> bool:
    return bool((node.get("spec") or {}).get("unschedulable"))


def is_ready(node: Object) -> bool:
    return condition(node, "Ready") is not None


def is_leaving(node: Object) -> bool:
    return any(taint.get("key") in _LEAVING for taint in _taints(node))


def facts(node: Object) -> HostFacts:
    """Where its labels say that it is: GKE's for blocks, Kubernetes' own for the zone."""
    labels = labels_of(node)
    return HostFacts(
        subblock=labels.get("cloud.google.com/gce-topology-subblock", ""),
        superblock=labels.get("cloud.google.com/gce-topology-block", ""),
        zone=labels.get("topology.kubernetes.io/zone", ""),
    )


def changes(before: Object | None, after: Object | None) -> list[tuple[str, Change, str]]:
    """What happened to a host: its id, the change, and a sentence.

    Args:
        before: None for a node that is seen for the first time.
    """
    if after is None:
        return [(host_id(before), Change.GONE, "its node was deleted")] if before is not None else []
    name = after["metadata"]["name"]
    said: list[tuple[str, Change, str]] = []
    if before is not None and host_id(before) != host_id(after):
        said.append((host_id(before), Change.GONE, f"node {name} was started again"))
        before = None
    host = host_id(after)
    if before is None or is_cordoned(before) != is_cordoned(after):
        if is_cordoned(after):
            said.append((host, Change.CORDONED, f"node {name} is cordoned"))
        elif before is not None:
            said.append((host, Change.UNCORDONED, f"node {name} is uncordoned"))
    if is_leaving(after) and (before is None or not is_leaving(before)):
        said.append((host, Change.LEAVING, f"node {name} will be stopped"))
    if is_ready(after) and before is not None and not is_ready(before):
        said.append((host, Change.READY, f"node {name} is ready again"))
    return said


def can_take(node: Object, pod_spec: Object) -> bool:
    """Whether pods of a template may be put on it, as far as the node alone says."""
    if is_cordoned(node) or not is_ready(node) or is_leaving(node):
        return False
    selector = pod_spec.get("nodeSelector") or {}
    if any(labels_of(node).get(key) != value for key, value in selector.items()):
        return False
    if any(
        taint.get("effect") != "PreferNoSchedule"
        and taint.get("key") not in _FOLLOWING
        and not _tolerates(pod_spec, taint)
        for taint in _taints(node)
    ):
        return False
    allocatable = (node.get("status") or {}).get("allocatable") or {}
    # A training pod takes all that it needs of a device.
    return all(count <= int(allocatable.get(name, 0)) for name, count in _devices(pod_spec).items())


def holds_place(pod: Object, pod_spec: Object, priority: int) -> bool:
    """Whether a pod on a node keeps off pods of a template with a priority.

    The scheduler takes the place of one with a lower priority, as of those that hold spares ready.  One that
    has none of the devices shares the node.
    """
    if int(pod["spec"].get("priority") or 0) < priority:
        return False
    needed = _devices(pod_spec)
    return not needed or not needed.keys().isdisjoint(_devices(pod["spec"]))


def _devices(pod_spec: Object) -> dict[str, int]:
    """Devices of all containers, by their names, which have a domain; they are whole numbers."""
    found: dict[str, int] = {}
    for container in pod_spec.get("containers") or ():
        for name, count in ((container.get("resources") or {}).get("limits") or {}).items():
            if "/" in name:
                found[name] = found.get(name, 0) + int(count)
    return found


def _taints(node: Object) -> list[Object]:
    return (node.get("spec") or {}).get("taints") or []


def _tolerates(pod_spec: Object, taint: Object) -> bool:
    for one in pod_spec.get("tolerations") or ():
        if one.get("effect") not in (None, "", taint.get("effect")):
            continue
        if one.get("operator") == "Exists" and one.get("key") in (None, "", taint.get("key")):
            return True
        if one.get("key") == taint.get("key") and one.get("value", "") == taint.get("value", ""):
            return True
    return False
