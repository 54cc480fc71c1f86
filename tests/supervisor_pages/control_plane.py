# SPDX-License-Identifier: Apache-2.0
"""The cluster in memory with what kubectl and helm ask of one, and what a chart needs to run.

Beside `supervisor.testing.kubernetes`, which has what the supervisor itself meets: discovery, server-side
apply, logs and exec; namespaces, rights and Pod Security; Deployments, DaemonSets, affinity and preemption.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
import secrets
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import yaml
from aiohttp import web

from supervisor.testing.kubernetes import Call, Cluster, hosts
from supervisor.testing.kubernetes.kinds import KINDS, Kind, Object, Refusal, labels_of, selects
from supervisor.testing.kubernetes.patches import merged
from supervisor.testing.kubernetes.server import ApiServer
from supervisor.testing.kubernetes.store import Store
from supervisor.testing.kubernetes.waits import Waits
from tests.supervisor_pages import protobuf

_RBAC, _APPS = "rbac.authorization.k8s.io", "apps"
MORE_KINDS = (
    Kind(plural="namespaces", kind="Namespace", namespaced=False),
    Kind(plural="secrets", kind="Secret"),
    Kind(plural="services", kind="Service"),
    Kind(plural="serviceaccounts", kind="ServiceAccount"),
    Kind(plural="persistentvolumeclaims", kind="PersistentVolumeClaim"),
    Kind(plural="deployments", kind="Deployment", group=_APPS),
    Kind(plural="daemonsets", kind="DaemonSet", group=_APPS),
    Kind(plural="roles", kind="Role", group=_RBAC),
    Kind(plural="rolebindings", kind="RoleBinding", group=_RBAC),
    Kind(plural="clusterroles", kind="ClusterRole", group=_RBAC, namespaced=False),
    Kind(plural="clusterrolebindings", kind="ClusterRoleBinding", group=_RBAC, namespaced=False),
    Kind(plural="networkpolicies", kind="NetworkPolicy", group="networking.k8s.io"),
    Kind(
        plural="ciliumclusterwidenetworkpolicies",
        kind="CiliumClusterwideNetworkPolicy",
        group="cilium.io",
        version="v2",
        namespaced=False,
    ),
    Kind(plural="priorityclasses", kind="PriorityClass", group="scheduling.k8s.io", namespaced=False),
)
SHORT_NAMES = {"pods": ["po"], "persistentvolumeclaims": ["pvc"], "namespaces": ["ns"], "nodes": ["no"]}
VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]
#: Namespaces that each cluster has.
FIRST_NAMESPACES = ("default", "kube-system", "kube-public", "kube-node-lease")
ENFORCE = "pod-security.kubernetes.io/enforce"
#: Level of a namespace that says none.  An administrator may set it, and GKE's own is `privileged`.
DEFAULT_LEVEL = "baseline"
_HASH = "pod-template-hash"


@runtime_checkable
class PodMachine(Protocol):
    """What a kubelet of these tests can do beside running pods."""

    def log_path(self, pod: Object) -> Path: ...

    async def execute(self, pod: Object, words: list[str]) -> tuple[int, bytes, bytes]: ...


class AdmittingStore(Store):
    """Has namespaces, and enforces their Pod Security level: a pod that it forbids is not made.

    Attributes:
        forbidden: the newest reason in each namespace.
    """

    def __init__(self) -> None:
        super().__init__()
        self.forbidden: dict[str, str] = {}
        for name in FIRST_NAMESPACES:
            self.create("namespaces", {"metadata": {"name": name}})

    def create(self, plural: str, body: Object, namespace: str = "", *, dry_run: bool = False) -> Object:
        if KINDS[plural].namespaced:
            place = self.find("namespaces", namespace)
            if place is None:
                raise Refusal(404, f'namespaces "{namespace}" not found')
            level = labels_of(place).get(ENFORCE, DEFAULT_LEVEL)
            if plural == "pods" and level != "privileged" and (why := _what_needs_privileges(body["spec"])):
                self.forbidden[namespace] = f'violates PodSecurity "{level}": {why}'
                return copy.deepcopy(body)  # its controller tries again at its next look
        return super().create(plural, body, namespace, dry_run=dry_run)


def _what_needs_privileges(spec: Object) -> str:
    """What the level `baseline` forbids; empty where there is nothing."""
    found = [name for name in ("hostNetwork", "hostPID") if spec.get(name)]
    found += [
        "privileged" for one in spec["containers"] if (one.get("securityContext") or {}).get("privileged")
    ]
    found += ["hostPath" for one in spec.get("volumes") or () if "hostPath" in one]
    return ", ".join(found)


class ControlPlaneServer(ApiServer):
    """The API server as kubectl and helm see it.

    Args:
        machine_of: a node's.
        asked: answers paths that are no API's, for the test.
    """

    def __init__(
        self,
        store: Store,
        machine_of: Callable[[str], PodMachine],
        asked: Callable[[str], str | None],
    ) -> None:
        super().__init__(store)
        self._machine_of, self._asked = machine_of, asked
        #: What each manager has applied.
        self._applied: dict[tuple[str, str, str, str], Object] = {}
        self.authorize = self._is_granted

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        if (answer := self._asked(request.path)) is not None:
            return web.Response(text=answer)
        if (document := _document(request.path)) is not None:
            return document
        parts = request.path.strip("/").split("/")
        try:
            if parts[-1:] == ["log"]:
                return await self._follow(request, self.store.get("pods", parts[-2], parts[-4]))
            if parts[-1:] == ["exec"]:
                return await self._execute(request, self.store.get("pods", parts[-2], parts[-4]))
            if request.headers.get("Content-Type", "").startswith("application/apply-patch"):
                return await self._apply(request, parts)
        except Refusal as refusal:
            return web.json_response(refusal.status, status=refusal.code)
        return await super()._serve(request)

    async def _do(self, request: web.Request, call: Call, target: Any) -> Object:
        if request.content_type != protobuf.FORM:
            return await super()._do(request, call, target)
        body = protobuf.decoded(await request.read())
        if call.verb == "delete":
            return self._delete(target, body)
        change = self.store.create if call.verb == "create" else self.store.update
        return change(target.kind.plural, body, target.namespace)

    async def _apply(self, request: web.Request, parts: list[str]) -> web.Response:
        """Server-side apply: what this manager said before and says no more is removed."""
        plural, name = parts[-2:]
        namespace = parts[-3] if KINDS[plural].namespaced else ""
        body = yaml.safe_load(await request.text())
        key = (plural, namespace, name, request.query.get("fieldManager", ""))
        old = self.store.find(plural, name, namespace)
        if old is None:
            made = self.store.create(plural, body, namespace, dry_run="dryRun" in request.query)
        else:
            kept = _without(old, self._applied.get(key, {}), body)
            made = self.store.update(plural, merged(kept, body), namespace)
        self._applied[key] = body
        return web.json_response(made, status=200 if old else 201)

    async def _follow(self, request: web.Request, pod: Object) -> web.StreamResponse:
        path = self._machine_of(pod["spec"]["nodeName"]).log_path(pod)
        response = web.StreamResponse()
        await response.prepare(request)
        at = 0
        while True:
            text = path.read_bytes()[at:] if path.exists() else b""
            if text:
                at += len(text)
                await response.write(text)
            if "follow" not in request.query or self.down:
                return response
            await asyncio.sleep(0.05)

    async def _execute(self, request: web.Request, pod: Object) -> web.StreamResponse:
        socket = web.WebSocketResponse(protocols=("v5.channel.k8s.io",))
        await socket.prepare(request)
        machine = self._machine_of(pod["spec"]["nodeName"])
        code, out, err = await machine.execute(pod, request.query.getall("command"))
        status: Object = {"metadata": {}, "status": "Success"}
        if code:
            causes = [{"reason": "ExitCode", "message": str(code)}]
            text = f"command terminated with non-zero exit code: {code}"
            status = {
                "metadata": {},
                "status": "Failure",
                "reason": "NonZeroExitCode",
                "message": text,
                "details": {"causes": causes},
            }
        for channel, block in ((1, out), (2, err), (3, json.dumps(status).encode())):
            if block:
                await socket.send_bytes(bytes([channel]) + block)
        await socket.close()
        return socket

    def _is_granted(self, call: Call) -> bool:
        """By the roles that are bound to a service account ``NAMESPACE:NAME``; an operator may do all."""
        namespace, colon, name = call.user.partition(":")
        if not colon:
            return True
        wanted = {"kind": "ServiceAccount", "name": name, "namespace": namespace}
        for bindings, roles, place in (
            ("rolebindings", "roles", call.namespace),
            ("clusterrolebindings", "clusterroles", ""),
        ):
            for binding in self.store.all(bindings, place) if place or bindings[0] == "c" else ():
                if wanted not in binding["subjects"]:
                    continue
                for rule in self.store.get(roles, binding["roleRef"]["name"], place)["rules"]:
                    if (
                        call.group in rule["apiGroups"]
                        and call.resource in rule["resources"]
                        and call.verb in rule["verbs"]
                    ):
                        return True
        return False


def _without(old: Any, before: Any, now: Any) -> Any:
    """`old` without the fields that were said before and are not said now."""
    if not (isinstance(old, dict) and isinstance(before, dict) and isinstance(now, dict)):
        return old
    return {
        name: _without(value, before.get(name), now.get(name))
        for name, value in old.items()
        if name in now or name not in before
    }


def _document(path: str) -> web.Response | None:
    """What a client asks to know this API server."""
    if path == "/version":
        return web.json_response({"major": "1", "minor": "33", "gitVersion": "v1.33.0"})
    if path == "/openapi/v3":
        names = {f"{'apis/' if kind.group else 'api/'}{kind.api_version}" for kind in KINDS.values()}
        return web.json_response({"paths": {n: {"serverRelativeURL": f"/openapi/v3/{n}"} for n in names}})
    if path.startswith("/openapi/v3/"):
        return web.json_response(
            {"openapi": "3.0.0", "paths": dict(_schema_paths(path[len("/openapi/v3/") :]))}
        )
    group_version = path.strip("/").partition("/")[2]
    if kinds := [kind for kind in KINDS.values() if kind.api_version == group_version]:
        resources = [
            {
                **{"name": kind.plural, "singularName": kind.kind.lower(), "kind": kind.kind},
                **{"namespaced": kind.namespaced, "verbs": VERBS},
            }
            for kind in kinds
        ]
        body = {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group_version}
        return web.json_response({**body, "resources": resources})
    if path.rstrip("/") in ("/api", "/apis"):
        form = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
        body = _discovery(core=path.rstrip("/") == "/api")
        return web.Response(text=json.dumps(body), headers={"Content-Type": form})
    return None


def _schema_paths(version: str) -> Iterator[tuple[str, Object]]:
    """Clients look here whether the server checks fields itself."""
    for kind in KINDS.values():
        if version.partition("/")[2] == kind.api_version:
            group = {"group": kind.group, "version": kind.version, "kind": kind.kind}
            parameters = [{"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}]
            yield (
                f"/{version}/{kind.plural}/{{name}}",
                {"patch": {"parameters": parameters, "x-kubernetes-group-version-kind": group}},
            )


def _discovery(*, core: bool) -> Object:
    groups: dict[str, dict[str, list[Object]]] = {}
    for kind in KINDS.values():
        if bool(kind.group) != core:
            resource = {
                "resource": kind.plural,
                "responseKind": {"group": kind.group, "version": kind.version, "kind": kind.kind},
                "scope": "Namespaced" if kind.namespaced else "Cluster",
                "singularResource": kind.kind.lower(),
                "shortNames": SHORT_NAMES.get(kind.plural, []),
                "verbs": VERBS,
            }
            groups.setdefault(kind.group, {}).setdefault(kind.version, []).append(resource)
    items = [
        {
            "metadata": {"name": name},
            "versions": [
                {"version": version, "freshness": "Current", "resources": found}
                for version, found in versions.items()
            ],
        }
        for name, versions in groups.items()
    ]
    return {"kind": "APIGroupDiscoveryList", "apiVersion": "apidiscovery.k8s.io/v2", "items": items}


class ControlPlane(Cluster):
    """The cluster with these parts.

    Args:
        asked: see `ControlPlaneServer`.
    """

    def __init__(self, asked: Callable[[str], str | None]) -> None:
        # A replacement is made soon.  That the pod collector takes a minute is the point of the page's step.
        super().__init__(replace(Waits().faster(100.0), gone_s=Waits().gone_s))
        KINDS.update({kind.plural: kind for kind in MORE_KINDS})
        self.store: AdmittingStore = AdmittingStore()
        self.api = ControlPlaneServer(self.store, self._machine_of, asked)

    def _machine_of(self, node: str) -> PodMachine:
        machine = self.kubelets[node]
        assert isinstance(machine, PodMachine)
        return machine

    def settle(self) -> float | None:
        while True:
            before = self.store.version
            for plural, make in (("deployments", self._deploy), ("daemonsets", self._cover)):
                for thing in list(self.store.all(plural)):
                    if "deletionTimestamp" not in thing["metadata"]:
                        make(thing)
            wake = super().settle()
            if self.store.version == before:
                return wake

    def _deploy(self, thing: Object) -> None:
        """One pod each, of the newest template only."""
        current = self._without_old(thing)
        for _ in range(thing["spec"].get("replicas", 1) - len(current)):
            self._make_pod(thing, {})

    def _cover(self, thing: Object) -> None:
        """A pod on each node that its template allows."""
        there = {pod["spec"]["nodeName"] for pod in self._without_old(thing)}
        template = thing["spec"]["template"]
        for node in self.store.all("nodes"):
            name = node["metadata"]["name"]
            allowed = _node_allows(template["spec"], node)
            if allowed and _tolerates(template["spec"], node) and name not in there:
                self._make_pod(thing, {"nodeName": name})

    def _without_old(self, thing: Object) -> list[Object]:
        """Its pods, those of an older template or that have ended left out and deleted."""
        wanted, current = _template_hash(thing), []
        for pod in self.store.owned("pods", thing["metadata"]["uid"]):
            meta = pod["metadata"]
            if labels_of(pod)[_HASH] == wanted and pod["status"]["phase"] in ("Pending", "Running"):
                current.append(pod)  # also one that terminates: its successor waits for it
            elif "deletionTimestamp" not in meta:
                self.store.delete("pods", meta["name"], meta["namespace"])
                current.append(pod)
        return current

    def _make_pod(self, thing: Object, spec: Object) -> None:
        meta, pod = thing["metadata"], copy.deepcopy(thing["spec"]["template"])
        own, mark = pod.setdefault("metadata", {}), _template_hash(thing)
        own["name"] = f"{meta['name']}-{mark}-{secrets.token_hex(3)[:5]}"
        own["labels"] = {**(own.get("labels") or {}), _HASH: mark}
        owner = {
            "apiVersion": thing["apiVersion"],
            "kind": thing["kind"],
            "name": meta["name"],
            "uid": meta["uid"],
        }
        own["ownerReferences"] = [{**owner, "controller": True}]
        pod["spec"].update(spec)
        pod["status"] = {"phase": "Pending", "conditions": []}
        self.store.create("pods", pod, meta["namespace"])

    def schedule(self) -> None:
        """Bind pods that wait, with affinity and processors; a pod of a lower priority makes room."""
        pods = list(self.store.all("pods"))
        for pod in pods:
            meta, spec = pod["metadata"], pod["spec"]
            if spec.get("nodeName") or "deletionTimestamp" in meta or not self._has_claims(pod):
                continue
            held = [
                one
                for one in pods
                if one["spec"].get("nodeName") and one["status"]["phase"] in ("Pending", "Running")
            ]
            nodes = list(self.store.all("nodes"))
            fitting = [one["metadata"]["name"] for one in nodes if _fits(pod, one, held)]
            if fitting:
                spec["nodeName"] = self.choose_node(fitting)
                hosts._set_condition(self.store, pod, "PodScheduled", "True", "", "")
                continue
            hosts._set_condition(self.store, pod, "PodScheduled", "False", "Unschedulable", "no node fits")
            mine = self._priority(pod)
            lower = [one for one in held if self._priority(one) < mine]
            room = [one for one in nodes if _fits(pod, one, [one for one in held if one not in lower])]
            for victim in lower:
                if room and victim["spec"]["nodeName"] == room[0]["metadata"]["name"]:
                    there = victim["metadata"]
                    if "deletionTimestamp" not in there:
                        self.store.delete("pods", there["name"], there["namespace"], grace_s=0)

    def _has_claims(self, pod: Object) -> bool:
        claims = [
            one.get("persistentVolumeClaim", {}).get("claimName") for one in pod["spec"].get("volumes") or ()
        ]
        place = pod["metadata"]["namespace"]
        return all(self.store.find("persistentvolumeclaims", name, place) for name in claims if name)

    def _priority(self, pod: Object) -> int:
        found = self.store.find("priorityclasses", pod["spec"].get("priorityClassName", ""))
        return int(found["value"]) if found else 0


def _template_hash(thing: Object) -> str:
    text = json.dumps(thing["spec"]["template"], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _fits(pod: Object, node: Object, held: list[Object]) -> bool:
    name = node["metadata"]["name"]
    there = [one for one in held if one["spec"]["nodeName"] == name]
    cpus = int(node["status"]["allocatable"]["cpu"])
    return (
        hosts._fits(pod, node, sum(map(hosts._gpus, there)))
        and sum(map(_cpus, [pod, *there])) <= cpus
        and _node_allows(pod["spec"], node)
        and _neighbors_allow(pod, there)
    )


def _cpus(pod: Object) -> int:
    limits = [(one.get("resources") or {}).get("limits") or {} for one in pod["spec"]["containers"]]
    return sum(int(one.get("cpu", 0)) for one in limits)


def _tolerates(spec: Object, node: Object) -> bool:
    tolerated = {one.get("key") for one in spec.get("tolerations") or ()}
    return {one["key"] for one in node["spec"].get("taints") or ()} <= tolerated


def _node_allows(spec: Object, node: Object) -> bool:
    """Whether selector and affinity of a pod accept a node: keys that exist, or have a value."""
    labels = labels_of(node)
    if any(labels.get(key) != value for key, value in (spec.get("nodeSelector") or {}).items()):
        return False
    wanted = ((spec.get("affinity") or {}).get("nodeAffinity") or {}).get(
        "requiredDuringSchedulingIgnoredDuringExecution"
    )
    return wanted is None or any(
        all(
            one["key"] in labels and labels[one["key"]] in one.get("values", [labels[one["key"]]])
            for one in term["matchExpressions"]
        )
        for term in wanted["nodeSelectorTerms"]
    )


def _neighbors_allow(pod: Object, there: list[Object]) -> bool:
    """Affinity to pods of the same host, and the opposite."""
    for kind, wanted in (("podAffinity", True), ("podAntiAffinity", False)):
        affinity = (pod["spec"].get("affinity") or {}).get(kind) or {}
        for term in affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or ():
            assert term["topologyKey"] == "kubernetes.io/hostname"
            selector = ",".join(
                f"{key}={value}" for key, value in term["labelSelector"]["matchLabels"].items()
            )
            if any(selects(selector, labels_of(one)) for one in there) != wanted:
                return False
    return True
