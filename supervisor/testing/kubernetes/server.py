# SPDX-License-Identifier: Apache-2.0
"""The HTTP side of the API server: paths, verbs, watches, and faults placed at calls.

What was measured against Kubernetes 1.36, and holds here:

1. Items of lists have neither kind nor apiVersion, but for kinds of a CustomResourceDefinition.
2. All pages of a list are of the version of its first page; a token that is too old gets 410.
3. A watch from a version that is forgotten gets 200, and then an event ERROR of code 410.
4. A watch has a bookmark each 60 s, and none where nobody lists its kind (`ApiServer.bookmark_s`).
5. A create with a resourceVersion gets 500; a PATCH with another uid 422, or 409 if its version is old, too.
6. A dry run of a taken name gets 409, but quotas are asked before: 403 where the old object fills one.
7. An eviction that a budget refuses gets 429 without Retry-After, and 500 where two budgets have the pod.
"""

from __future__ import annotations

import asyncio
import copy
import json
import math
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from email.utils import formatdate
from typing import Any

from aiohttp import web

from resiliency.tasks import wait_for
from supervisor.testing.kubernetes.faults import Call, Fault, FaultKind, PlacedFaults
from supervisor.testing.kubernetes.jobs import with_defaults
from supervisor.testing.kubernetes.kinds import KINDS, Kind, Object, Refusal, gone, labels_of, selects
from supervisor.testing.kubernetes.patches import applied, merged
from supervisor.testing.kubernetes.store import Store, stamp

_VERBS = {"GET": "get", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
#: How often a watch that asked for bookmarks gets one.
BOOKMARK_S = 60.0

#: Lists whose next pages are kept.
_LISTS = 64

#: Refuses an object as an admission webhook does: raises Refusal.
Admission = Callable[[str, Object], None]


@dataclass(frozen=True, kw_only=True)
class _Target:
    kind: Kind
    namespace: str
    name: str
    subresource: str


class ApiServer:
    """Serves a store at a free port of the loopback interface.

    Attributes:
        calls: in the order in which they came.
        down: each connection breaks, those of watches too.
        missed: calls that came while it was down.
        cut: tokens of clients that are dead: their calls break before they have an effect.
        held: set while a call is held by a fault.
        admission: asked for each object that is created, dry runs included.
        authorize: whether a call is within its caller's rights.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.calls: list[Call] = []
        self.faults = PlacedFaults()
        self.cut: set[str] = set()
        self.held = asyncio.Event()
        self.admission: Admission = lambda plural, thing: None
        self.authorize: Callable[[Call], bool] = lambda call: True
        self.bookmark_s = BOOKMARK_S
        self.url = ""
        self.missed = 0
        self._down = False
        #: How often it went down: what waits must not miss an outage that has ended.
        self._outages = 0
        self._changed = asyncio.Event()
        #: What is left of lists that came in pages, and the version of all of it, by their tokens.
        self._pages: dict[str, tuple[str, list[Object]]] = {}
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application(client_max_size=8 << 20)
        app.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        self.store.listeners.append(self._wake)

    async def close(self) -> None:
        self.store.listeners.remove(self._wake)
        self.down = True
        if self._runner is not None:
            await self._runner.cleanup()

    @property
    def down(self) -> bool:
        return self._down

    @down.setter
    def down(self, down: bool) -> None:
        self._outages += down and not self._down
        self._down = down
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # ------------------------------------------------------------------------------------- one call

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        if self._down:
            self.missed += 1
            return self._broken(request)
        try:
            target = _target(request.path)
        except Refusal as refusal:
            return _refused(refusal)
        call = self._record(request, target)
        fault = self.faults.hit(call)
        if call.user in self.cut:
            return self._broken(request)
        try:
            if not self.authorize(call):
                where = f" in namespace {call.namespace}" if call.namespace else " in the cluster"
                raise Refusal(403, f"{call.resource} is forbidden: {call.user} cannot {call.verb} it{where}")
            if fault is not None:
                await self._suffer(request, fault)
            if call.verb == "watch":
                response = web.StreamResponse(headers=_headers())
                with suppress(ConnectionResetError):  # the client has gone away
                    await self._watch(request, call.user, target, response)
                return response
            answer = await self._do(request, call, target)
        except Refusal as refusal:
            return _refused(refusal)
        except ConnectionAbortedError:
            return self._broken(request)
        if fault is not None and fault.kind is FaultKind.HOLD_AFTER:
            await self._hold(request)
        if self._down or (fault is not None and fault.kind in (FaultKind.DROP_AFTER, FaultKind.HOLD_AFTER)):
            return self._broken(request)
        return web.json_response(answer, status=201 if call.verb == "create" else 200, headers=_headers())

    def _record(self, request: web.Request, target: _Target) -> Call:
        verb = _VERBS[request.method]
        if verb == "get" and request.query.get("watch") in ("1", "true"):
            verb = "watch"
        elif verb == "get" and not target.name:
            verb = "list"
        call = Call(
            verb=verb,
            group=target.kind.group,
            resource="/".join(filter(None, (target.kind.plural, target.subresource))),
            namespace=target.namespace,
            name=target.name,
            user=request.headers.get("Authorization", "").removeprefix("Bearer "),
            dry_run="dryRun" in request.query,
        )
        self.calls.append(call)
        return call

    async def _suffer(self, request: web.Request, fault: Fault) -> None:
        """What a fault does before the call has its effect."""
        if fault.delay_s:
            await asyncio.sleep(fault.delay_s)
        if fault.kind is FaultKind.HOLD_BEFORE:
            await self._hold(request)
        if fault.kind in (FaultKind.DROP_BEFORE, FaultKind.HOLD_BEFORE):
            raise ConnectionAbortedError
        if fault.kind is FaultKind.ANSWER and fault.status:
            text = f"{request.method} {request.path}: refused by a placed fault"
            raise Refusal(fault.status, text, retry_after_s=fault.retry_after_s)

    async def _hold(self, request: web.Request) -> None:
        """Say nothing while the client is there."""
        self.held.set()
        transport, outages = request.transport, self._outages
        while transport is not None and not transport.is_closing() and self._outages == outages:
            changed = self._changed
            with suppress(asyncio.TimeoutError):
                await wait_for(changed.wait(), 0.05)

    def _broken(self, request: web.Request) -> web.StreamResponse:
        if request.transport is not None:
            request.transport.abort()
        return web.Response(status=503)

    # ------------------------------------------------------------------------------------- verbs

    async def _do(self, request: web.Request, call: Call, target: _Target) -> Object:
        body: Any = {}
        if request.can_read_body:
            try:
                body = json.loads(await request.text() or "{}")
            except ValueError as error:
                raise Refusal(400, f"the body is no JSON: {error}") from error
        if self._down or call.user in self.cut:
            raise ConnectionAbortedError
        plural, name, namespace = target.kind.plural, target.name, target.namespace
        if call.resource == "pods/eviction" and call.verb == "create":
            return self._evict(name, namespace, body)
        if target.subresource and (call.verb, target.subresource) != ("patch", "status"):
            raise Refusal(404, f"no subresource {target.subresource} to {call.verb}")
        if call.verb == "list":
            return self._list(request, target)
        if call.verb == "get":
            return self.store.get(plural, name, namespace)
        if call.verb == "create":
            if plural == "jobsets":
                body = with_defaults(body)
            self.admission(plural, body)
            self._ask_quotas(target)
            return self.store.create(plural, body, namespace, dry_run=call.dry_run)
        if call.verb == "update":
            return self.store.update(plural, body, namespace)
        if call.verb == "patch":
            return self._patch(request, target, body)
        return self._delete(target, body)

    def _patch(self, request: web.Request, target: _Target, body: Any) -> Object:
        old = self.store.get(target.kind.plural, target.name, target.namespace)
        form = request.headers.get("Content-Type", "")
        if form.startswith("application/merge-patch+json"):
            new = merged(old, body)
        elif form.startswith("application/json-patch+json"):
            new = applied(old, body)
        else:
            raise Refusal(415, f"no patches of the form {form}")
        fixed = old["metadata"]
        if new["metadata"]["resourceVersion"] == fixed["resourceVersion"] and (
            new["metadata"].get("uid") != fixed["uid"]
        ):
            raise Refusal(422, f"{target.kind.kind} is invalid: metadata.uid: field is immutable")
        given = body.get("metadata", {}) if isinstance(body, dict) else {}
        if "resourceVersion" not in given:
            new["metadata"].pop("resourceVersion")
        if target.subresource:
            # Of the object, its status alone is changed.
            fixed = {name: new["metadata"].get(name) for name in ("uid", "resourceVersion")}
            new = {**old, "metadata": {**old["metadata"], **fixed}, "status": new["status"]}
            return self.store.update(target.kind.plural, new, target.namespace, checked=False)
        return self.store.update(target.kind.plural, new, target.namespace)

    def _ask_quotas(self, target: _Target) -> None:
        """ResourceQuotas count objects; they are asked last, but before a name that is taken is seen."""
        name = f"count/{target.kind.plural}" + (f".{target.kind.group}" if target.kind.group else "")
        for quota in self.store.all("resourcequotas", target.namespace):
            limit = quota["spec"]["hard"].get(name)
            used = sum(1 for _ in self.store.all(target.kind.plural, target.namespace))
            if limit is not None and used + 1 > int(limit):
                text = f"requested: {name}=1, used: {name}={used}, limited: {name}={limit}"
                raise Refusal(403, f"exceeded quota: {quota['metadata']['name']}, {text}")

    def _delete(self, target: _Target, options: Object) -> Object:
        conditions = options.get("preconditions") or {}
        return self.store.delete(
            target.kind.plural,
            target.name,
            target.namespace,
            uid=conditions.get("uid"),
            resource_version=conditions.get("resourceVersion"),
            grace_s=options.get("gracePeriodSeconds"),
            foreground=options.get("propagationPolicy") == "Foreground",
        )

    def _evict(self, name: str, namespace: str, body: Object) -> Object:
        """Delete a pod, unless a PodDisruptionBudget says that no more may go."""
        pod = self.store.get("pods", name, namespace)
        options = body.get("deleteOptions") or {}
        if (
            pod["status"].get("phase") in ("Pending", "Running")
            and "deletionTimestamp" not in pod["metadata"]
        ):
            budgets = [one for one in self.store.all("poddisruptionbudgets", namespace) if _has(one, pod)]
            if len(budgets) > 1:
                raise Refusal(500, "This pod has more than one PodDisruptionBudget")
            for budget in budgets:
                self._ask_budget(budget, pod)
        condition = {
            "type": "DisruptionTarget",
            "status": "True",
            "reason": "EvictionByEvictionAPI",
            "lastTransitionTime": stamp(self.store.clock()),
        }
        pod["status"].setdefault("conditions", []).append(condition)
        pod["metadata"].pop("resourceVersion")
        self.store.update("pods", pod, namespace, checked=False)
        uid = (options.get("preconditions") or {}).get("uid")
        self.store.delete("pods", name, namespace, uid=uid, grace_s=options.get("gracePeriodSeconds"))
        return {"kind": "Status", "apiVersion": "v1", "status": "Success"}

    def _ask_budget(self, budget: Object, pod: Object) -> None:
        covered = [one for one in self.store.all("pods", pod["metadata"]["namespace"]) if _has(budget, one)]
        healthy = sum(_is_ready(one) for one in covered)
        spec = budget["spec"]
        least = spec["minAvailable"] if "minAvailable" in spec else len(covered) - spec["maxUnavailable"]
        if healthy - _is_ready(pod) < least:
            text = f"Cannot evict pod: it would violate the disruption budget {budget['metadata']['name']}."
            raise Refusal(429, text)

    # ------------------------------------------------------------------------------------- lists and watches

    def _list(self, request: web.Request, target: _Target) -> Object:
        """All objects, or a page of them; the pages of one list are of one version."""
        limit, token = int(request.query.get("limit", 0)), request.query.get("continue", "")
        if token and token not in self._pages:
            raise gone("The provided continue parameter is too old")
        version, left = self._pages.get(token) or (
            str(self.store.version),
            [one for one in self.store.all(target.kind.plural, target.namespace) if _wanted(request, one)],
        )
        meta: Object = {"resourceVersion": version}
        if limit and limit < len(left):
            meta["continue"] = secrets.token_hex(8)
            self._pages[meta["continue"]] = version, left[limit:]
            for old in list(self._pages)[:-_LISTS]:
                del self._pages[old]
            left = left[:limit]
        if target.kind.is_built_in:
            left = [
                {name: part for name, part in one.items() if name not in ("kind", "apiVersion")}
                for one in left
            ]
        kind, api_version = f"{target.kind.kind}List", target.kind.api_version
        return {"kind": kind, "apiVersion": api_version, "metadata": meta, "items": left}

    async def _watch(
        self, request: web.Request, user: str, target: _Target, response: web.StreamResponse
    ) -> None:
        """Events after a version; one that is too old is answered with 200 and an ERROR event of code 410."""
        since = int(request.query.get("resourceVersion") or self.store.version)
        bookmarks = request.query.get("allowWatchBookmarks") in ("1", "true")
        loop = asyncio.get_running_loop()
        end = loop.time() + float(request.query.get("timeoutSeconds") or math.inf)
        outages = self._outages
        await response.prepare(request)
        marked_at = loop.time()
        while self._outages == outages and user not in self.cut and loop.time() < end:
            changed = self._changed
            if since < self.store.oldest:
                # What this watch has not seen yet is forgotten.
                error = gone(f"too old resource version: {since} ({self.store.oldest})").status
                await _send(response, {"type": "ERROR", "object": error})
                return
            for version, plural, event, thing in self.store.since(since):
                mine = target.namespace in ("", thing["metadata"].get("namespace"))
                if plural == target.kind.plural and mine and _wanted(request, thing):
                    await _send(response, {"type": event, "object": thing})
                since = version
            if bookmarks and loop.time() - marked_at >= self.bookmark_s:
                marked_at = loop.time()
                meta = {"resourceVersion": str(since)}
                mark = {"kind": target.kind.kind, "apiVersion": target.kind.api_version, "metadata": meta}
                await _send(response, {"type": "BOOKMARK", "object": mark})
            with suppress(asyncio.TimeoutError):
                await wait_for(changed.wait(), min(self.bookmark_s, end - loop.time()))
        if self._outages != outages or user in self.cut:
            self._broken(request)


async def _send(response: web.StreamResponse, event: Object) -> None:
    await response.write(json.dumps(event).encode() + b"\n")


def _target(path: str) -> _Target:
    """What a path names.

    Raises:
        Refusal: 404.
    """
    parts = path.strip("/").split("/")
    group = ""
    if parts[:2] == ["api", "v1"]:
        version, parts = "v1", parts[2:]
    elif parts[0] == "apis" and len(parts) > 3:
        group, version, parts = parts[1], parts[2], parts[3:]
    else:
        raise Refusal(404, f"no path {path}")
    namespace = ""
    if parts[0] == "namespaces" and len(parts) > 2:
        namespace, parts = parts[1], parts[2:]
    kind = KINDS.get(parts[0])
    if kind is None or (kind.group, kind.version) != (group, version) or len(parts) > 3:
        raise Refusal(404, f"no path {path}")
    parts += [""] * (3 - len(parts))
    return _Target(kind=kind, namespace=namespace, name=parts[1], subresource=parts[2])


def _wanted(request: web.Request, thing: Object) -> bool:
    if not selects(request.query.get("labelSelector", ""), labels_of(thing)):
        return False
    for term in filter(None, request.query.get("fieldSelector", "").split(",")):
        path, _, value = term.partition("=")
        place: Any = thing
        for part in path.split("."):
            place = (place or {}).get(part)
        if (place or "") != value:
            return False
    return True


def _has(budget: Object, pod: Object) -> bool:
    """Whether a PodDisruptionBudget is about a pod."""
    wanted = (budget["spec"].get("selector") or {}).get("matchLabels") or {}
    return selects(",".join(f"{key}={value}" for key, value in wanted.items()), labels_of(pod))


def _is_ready(pod: Object) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or []
    ready = any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
    return ready and "deletionTimestamp" not in pod["metadata"]


def _headers() -> dict[str, str]:
    return {"Date": formatdate(usegmt=True)}


def _refused(refusal: Refusal) -> web.Response:
    headers = _headers()
    if refusal.retry_after_s is not None:
        headers["Retry-After"] = str(refusal.retry_after_s)
    return web.json_response(copy.deepcopy(refusal.status), status=refusal.code, headers=headers)
