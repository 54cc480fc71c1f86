# SPDX-License-Identifier: Apache-2.0
"""Scheduler and kubelets: pods are bound to nodes, pull their image, run, and end."""

from __future__ import annotations

import copy
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

from supervisor.testing.kubernetes.kinds import Object, labels_of
from supervisor.testing.kubernetes.store import Store, stamp
from supervisor.testing.kubernetes.waits import Waits

GPU = "nvidia.com/gpu"
LEASES = "kube-node-lease"


@dataclass(kw_only=True)
class Kubelet:
    """One node's machine.

    Attributes:
        pull_s: an image needs for its pull; changed by tests while it runs.
        pull_error: reason for which no image can be pulled: ``ErrImagePull``, ``ImagePullBackOff``.
        stop_s: a pod needs to end; beyond its grace it is killed.
        alive: it answers, and pods change on it.
    """

    pull_s: float = 0.0
    pull_error: str = ""
    stop_s: float = 0.0
    alive: bool = True
    bound_at: dict[str, float] = field(default_factory=dict)
    ending_at: dict[str, float] = field(default_factory=dict)

    def start_pod(self, pod: Object) -> None:
        """Its image is there.  A kubelet of a test may start processes."""

    def exit_code(self, pod: Object) -> int | None:
        """None as long as it runs, and where it was killed."""
        return None

    def end_pod(self, pod: Object, now: float) -> float | None:
        """Have a pod end that is deleted; when to look again, None once it has ended."""
        meta = pod["metadata"]
        limit = min(self.stop_s, meta.get("deletionGracePeriodSeconds", 0) or self.stop_s)
        ends = self.ending_at.setdefault(meta["uid"], now + limit)
        return ends if now < ends else None


def node(name: str, *, gpus: int = 8, labels: dict[str, str] | None = None) -> Object:
    return {
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, **(labels or {})}},
        "spec": {},
        "status": {
            "allocatable": {GPU: str(gpus), "cpu": "64", "memory": "512Gi"},
            "nodeInfo": {"bootID": str(uuid.uuid4())},
            "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady"}],
        },
    }


def schedule(store: Store, choose_node: Callable[[list[str]], str]) -> None:
    """Bind pods that wait; of nodes that fit alike, `choose_node` takes one."""
    used: dict[str, int] = {}
    pods = list(store.all("pods"))
    for pod in pods:
        if pod["spec"].get("nodeName") and pod["status"]["phase"] not in ("Succeeded", "Failed"):
            used[pod["spec"]["nodeName"]] = used.get(pod["spec"]["nodeName"], 0) + _gpus(pod)
    nodes = list(store.all("nodes"))
    for pod in pods:
        if (
            pod["spec"].get("nodeName")
            or "deletionTimestamp" in pod["metadata"]
            or pod["spec"].get("schedulingGates")
        ):
            continue
        fitting = [
            one["metadata"]["name"] for one in nodes if _fits(pod, one, used.get(one["metadata"]["name"], 0))
        ]
        if fitting:
            name = choose_node(fitting)
            used[name] = used.get(name, 0) + _gpus(pod)
            pod["spec"]["nodeName"] = name
            _set_condition(store, pod, "PodScheduled", "True", "", "")
        else:
            text = f"0/{len(nodes)} nodes are available: insufficient {GPU}, or taints."
            _set_condition(store, pod, "PodScheduled", "False", "Unschedulable", text)


def _fits(pod: Object, host: Object, used: int) -> bool:
    spec, status = host["spec"], host["status"]
    ready = any(one["type"] == "Ready" and one["status"] == "True" for one in status["conditions"])
    if not ready or spec.get("unschedulable"):
        return False
    tolerated = {one.get("key", "") for one in pod["spec"].get("tolerations") or ()}
    taints = {one["key"] for one in spec.get("taints") or () if one["effect"] != "PreferNoSchedule"}
    if taints - tolerated:
        return False
    labels = labels_of(host)
    if any(labels.get(key) != value for key, value in (pod["spec"].get("nodeSelector") or {}).items()):
        return False
    return used + _gpus(pod) <= int(status["allocatable"].get(GPU, 0))


def _gpus(pod: Object) -> int:
    limits = [(one.get("resources") or {}).get("limits") or {} for one in pod["spec"].get("containers") or ()]
    return sum(int(one.get(GPU, 0)) for one in limits)


def run_pods(store: Store, kubelets: dict[str, Kubelet], now: float) -> float | None:
    """Advance all pods that are bound; returns when time alone will change something.

    Args:
        now: of any clock that does not stop.
    """
    wakes = []
    for pod in store.all("pods"):
        kubelet = kubelets.get(pod["spec"].get("nodeName", ""))
        if kubelet is None or not kubelet.alive:
            continue
        wake = _run_pod(store, kubelet, pod, now)
        if wake is not None:
            wakes.append(wake)
    return min(wakes, default=None)


def _run_pod(store: Store, kubelet: Kubelet, pod: Object, now: float) -> float | None:
    meta = pod["metadata"]
    uid = meta["uid"]
    if "deletionTimestamp" in meta:
        again = kubelet.end_pod(pod, now)
        if again is not None:
            return again
        _end(store, pod, code=kubelet.exit_code(pod))  # rule 7
        return None
    if pod["status"]["phase"] == "Running":
        _look_at_end(store, kubelet, pod)
        return None
    if pod["status"]["phase"] != "Pending":
        return None
    runs = kubelet.bound_at.setdefault(uid, now) + kubelet.pull_s
    started = now >= runs and not kubelet.pull_error
    state = (
        {"running": {"startedAt": stamp(store.clock())}}
        if started
        else {"waiting": {"reason": kubelet.pull_error or "ContainerCreating"}}
    )
    new = copy.deepcopy(pod)
    new["status"]["containerStatuses"] = [
        {"name": one["name"], "ready": started, "state": state} for one in pod["spec"]["containers"]
    ]
    if started:
        new["status"]["phase"] = "Running"
        new["status"]["conditions"].append({"type": "Ready", "status": "True"})
        kubelet.start_pod(pod)
    if new != pod:
        store.update("pods", new, meta["namespace"], checked=False)
    return None if started or kubelet.pull_error else runs


def _end(store: Store, pod: Object, condition: Object | None = None, *, code: int | None = None) -> None:
    """Phase Failed, or Succeeded with exit code 0, where it has not ended; then its deletion."""
    meta = pod["metadata"]
    if pod["status"]["phase"] not in ("Succeeded", "Failed"):
        new = copy.deepcopy(pod)
        new["metadata"].pop("resourceVersion")
        new["status"]["phase"] = "Succeeded" if code == 0 else "Failed"
        if condition is not None:
            new["status"].setdefault("conditions", []).append(condition)
        store.update("pods", new, meta["namespace"], checked=False)
    if store.find("pods", meta["name"], meta["namespace"]) is not None:
        store.delete("pods", meta["name"], meta["namespace"], uid=meta["uid"], grace_s=0)


def collect(
    store: Store, waits: Waits, out_of_service: set[str], seen_at: dict[str, float], now: float
) -> float | None:
    """The pod collector (rule 6): ends pods whose Node object is gone, those that terminate on a silent node
    that is out of service, and those that are deleted before they had a node.

    Args:
        out_of_service: names of such nodes.
        seen_at: when each pod was seen first like that, by uid.
    Returns:
        When time alone will change something.
    """
    nodes = {one["metadata"]["name"] for one in store.all("nodes")}
    wakes = []
    for pod in store.all("pods"):
        meta, node_name = pod["metadata"], pod["spec"].get("nodeName")
        leaves = "deletionTimestamp" in meta
        if node_name and node_name not in nodes:
            wait_s = waits.gone_s
        elif leaves and not node_name:
            wait_s = 0.0
        elif leaves and node_name in out_of_service:
            wait_s = waits.out_of_service_s
        else:
            continue
        due = seen_at.setdefault(meta["uid"], now) + wait_s
        if now < due:
            wakes.append(due)
            continue
        _end(store, pod, {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByPodGC"})
    return min(wakes, default=None)


def _look_at_end(store: Store, kubelet: Kubelet, pod: Object) -> None:
    code = kubelet.exit_code(pod)
    if code is None:
        return
    new = copy.deepcopy(pod)
    new["status"]["phase"] = "Failed" if code else "Succeeded"
    for status in new["status"]["containerStatuses"]:
        status.update(ready=False, state={"terminated": {"exitCode": code}})
    store.update("pods", new, pod["metadata"]["namespace"], checked=False)


def _set_condition(store: Store, pod: Object, name: str, status: str, reason: str, message: str) -> None:
    new = copy.deepcopy(pod)
    others = [one for one in new["status"].get("conditions") or () if one["type"] != name]
    new["status"]["conditions"] = [
        *others,
        {"type": name, "status": status, "reason": reason, "message": message},
    ]
    if new != pod:
        new["metadata"].pop("resourceVersion")
        store.update("pods", new, new["metadata"]["namespace"], checked=False)
