# SPDX-License-Identifier: Apache-2.0
"""Kubelets' leases, and the node controller: which nodes are silent, and what their taints say.

1. A kubelet renews its lease each 10 s, at a time of its own.  While the API server is away none does.
2. A node whose lease is not renewed for 50 s is Ready=Unknown, and tainted as unreachable.  So are living
   nodes after an outage that was longer: the controller looks before all of them have renewed their leases,
   which takes 10 s.
3. A node that is cordoned is tainted as unschedulable within a second, and free of it as soon after.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping

from supervisor.testing.kubernetes.hosts import LEASES, Kubelet
from supervisor.testing.kubernetes.kinds import Object
from supervisor.testing.kubernetes.store import Store, stamp
from supervisor.testing.kubernetes.waits import Waits

UNSCHEDULABLE = "node.kubernetes.io/unschedulable"
UNREACHABLE = "node.kubernetes.io/unreachable"
#: A person says by it that nothing runs on a silent node any more.
OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"
#: Age of the lease of a node that is given up on; clients read it by the real clock.
SILENT_S = Waits().unknown_s


class NodeController:
    """Renews leases in the place of kubelets, and draws the conclusions.

    Args:
        kubelets: by the name of their node.
    """

    def __init__(self, store: Store, kubelets: Mapping[str, Kubelet], random: random.Random) -> None:
        self._store, self._kubelets, self._random = store, kubelets, random
        self._renewed: dict[str, float] = {}
        self._due: dict[str, float] = {}
        self._look_at = 0.0
        #: When a node's taints were seen first not to say what it is.
        self._untrue_since: dict[str, float] = {}

    def add_node(self, name: str, waits: Waits) -> None:
        self.renew(name)
        self._due[name] = time.monotonic() + waits.renew_s * self._random.random()

    def remove_node(self, name: str) -> None:
        self._store.delete("leases", name, LEASES)
        for known in (self._renewed, self._due):
            known.pop(name, None)

    def renew(self, name: str, *, ago_s: float = 0.0) -> None:
        """Write a lease; `ago_s` is how old it is already."""
        self._renewed[name] = time.monotonic() - ago_s
        at = self._store.clock() - ago_s
        micro = stamp(at)[:-1] + f".{int(at % 1 * 1e6):06d}Z"
        body = {"metadata": {"name": name}, "spec": {"holderIdentity": name, "renewTime": micro}}
        known = self._store.find("leases", name, LEASES)
        if known is None:
            self._store.create("leases", body, LEASES)
        else:
            self._store.update("leases", {**known, "spec": body["spec"]}, LEASES)

    def renew_due(self, waits: Waits, *, served: bool) -> list[str]:
        """Have living kubelets renew their leases where it is time.

        Args:
            served: the API server is there.
        Returns:
            Nodes whose lease was renewed.
        """
        now, renewed = time.monotonic(), []
        for name, due in self._due.items():
            if now >= due:
                self._due[name] = _next(due, waits.renew_s, now)
                kubelet = self._kubelets.get(name)
                if served and kubelet is not None and kubelet.alive:
                    self.renew(name)
                    renewed.append(name)
        return renewed

    def judge(self, waits: Waits, renewed: list[str], *, served: bool) -> None:
        """Have Ready of nodes follow their leases.

        After `renew_due`: a machine that is late with all of it makes no node silent.
        """
        for name in renewed:
            self.set_ready(name, "True")
        now = time.monotonic()
        if not served:
            self._look_at = now + waits.monitor_s  # it has to find the server again first
        elif now >= self._look_at:
            self._look_at = _next(self._look_at, waits.monitor_s, now)
            for name, at in self._renewed.items():
                if now - at > waits.unknown_s:
                    self.set_ready(name, "Unknown")

    def wake_at(self) -> float:
        return min((self._look_at, *self._due.values()))

    def set_ready(self, name: str, status: str) -> None:
        """Of a Node object that somebody has deleted nothing is said."""
        node = self._store.find("nodes", name)
        if node is None:
            return
        others = [one for one in node["status"]["conditions"] if one["type"] != "Ready"]
        if {"type": "Ready", "status": status}.items() <= _ready(node).items():
            return
        reason = "NodeStatusUnknown" if status == "Unknown" else "KubeletReady"
        now = stamp(self._store.clock())
        made = {"type": "Ready", "status": status, "reason": reason, "lastTransitionTime": now}
        node["status"]["conditions"] = [*others, made]
        self._store.update("nodes", node, checked=False)

    def taint(self, waits: Waits) -> float | None:
        """Taints follow what nodes are; returns when time alone will change one."""
        now, wakes = time.monotonic(), []
        for node in self._store.all("nodes"):
            name, there = node["metadata"]["name"], node["spec"].get("taints") or []
            is_so = {
                UNSCHEDULABLE: node["spec"].get("unschedulable"),
                UNREACHABLE: _ready(node).get("status") == "Unknown",
            }
            taints = [one for one in there if is_so.get(one["key"], True)]
            known = {one["key"] for one in taints}
            taints += [
                {"key": key, "effect": "NoSchedule"} for key in is_so if is_so[key] and key not in known
            ]
            if taints == there:
                self._untrue_since.pop(name, None)
                continue
            due = self._untrue_since.setdefault(name, now) + waits.taint_s
            if now < due:
                wakes.append(due)
                continue
            node["spec"]["taints"] = taints
            self._store.update("nodes", node, checked=False)
        return min(wakes, default=None)


def is_out_of_service(node: Object) -> bool:
    """Whether pods that terminate there are ended by the pod collector."""
    taints = {one["key"] for one in node["spec"].get("taints") or ()}
    return OUT_OF_SERVICE in taints and _ready(node).get("status") != "True"


def _next(due: float, period_s: float, now: float) -> float:
    """The next time after `now`, whole periods after `due`."""
    return now + period_s - (now - due) % period_s


def _ready(node: Object) -> Object:
    return next((one for one in node["status"]["conditions"] if one["type"] == "Ready"), {})
