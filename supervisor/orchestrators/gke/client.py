# SPDX-License-Identifier: Apache-2.0
"""Calls of the API server as JSON, over kubernetes_asyncio: it finds the cluster, and proves who we are.

Foreign errors become `ApiError` here.  Objects stay dictionaries: what a release of the client does not know
of a newer API must come through unchanged, because JobSets are written back.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import aiohttp
from kubernetes_asyncio.client import ApiClient, Configuration
from kubernetes_asyncio.client.exceptions import ApiException
from kubernetes_asyncio.config import ConfigException, load_incluster_config, load_kube_config
from kubernetes_asyncio.config.kube_config import KUBE_CONFIG_DEFAULT_LOCATION

from resiliency.errors import ConfigError, ControlPlaneError

Object = dict[str, Any]

#: For one call; a server that is slower counts as gone.
CALL_S = 15.0
#: A server that throttles is waited for so often, and so long each time at most.
THROTTLES, THROTTLE_S = 5, 10
#: Objects of one page of a list.
PAGE = 500
#: The server ends a watch after this time, and it goes on from where it was.
WATCH_S = 120
#: A watch without a line for this long is taken for dead.  The server ends it sooner: a kind that nobody else
#: lists has no bookmarks, and its watch may be without a line for all its time.
SILENCE_S = 150.0


class ApiError(ControlPlaneError):
    """A call failed.  `code` is the answer's, 0 without one.

    Attributes:
        passing: the same call may succeed later.
    """

    def __init__(self, message: str, *, code: int = 0) -> None:
        super().__init__(message, code=code)
        self.code = code

    @property
    def passing(self) -> bool:
        return self.code in (0, 408, 409, 410, 429) or self.code >= 500


@dataclass(frozen=True, kw_only=True)
class Resource:
    """One kind of object in the API."""

    plural: str
    group: str = ""
    version: str = "v1"

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        place = f"/namespaces/{namespace}" if namespace else ""
        return "/".join(filter(None, (f"{root}{place}/{self.plural}", name, subresource)))


NODES, PODS = Resource(plural="nodes"), Resource(plural="pods")
EVENTS, CONFIG_MAPS = Resource(plural="events"), Resource(plural="configmaps")
JOBS = Resource(plural="jobs", group="batch")
LEASES = Resource(plural="leases", group="coordination.k8s.io")
JOBSETS = Resource(plural="jobsets", group="jobset.x-k8s.io", version="v1alpha2")
WORKLOADS = Resource(plural="workloads", group="kueue.x-k8s.io", version="v1beta1")


async def find_cluster() -> Configuration:
    """The cluster that KUBECONFIG names, else that of this pod, else that of the user's own file.

    Raises:
        ConfigError: there is none.
    """
    configuration = Configuration()
    try:
        if not os.environ.get("KUBECONFIG") and os.environ.get("KUBERNETES_SERVICE_HOST"):
            load_incluster_config(client_configuration=configuration)
        else:
            place = os.environ.get("KUBECONFIG") or KUBE_CONFIG_DEFAULT_LOCATION
            if not any(Path(one).expanduser().exists() for one in place.split(os.pathsep)):
                raise ConfigException(f"{place} is not there")
            await load_kube_config(config_file=place, client_configuration=configuration)
    except (ConfigException, OSError) as error:
        raise ConfigError(
            f"--orchestrator gke: no cluster is found: {error}.",
            hint="Run it in a pod with a service account, or let KUBECONFIG name a file.",
            flag="--orchestrator",
        ) from error
    return configuration


class Api:
    """Calls of one cluster.  Use as an asynchronous context manager, inside the event loop.

    Args:
        call_s: for one call.
    """

    def __init__(self, configuration: Configuration, *, call_s: float = CALL_S) -> None:
        self._client = ApiClient(configuration)
        self._call_s = call_s
        self._server_now = time.time() - time.monotonic()
        #: Called before each change of anything but a Lease; what it raises, the caller gets.
        self.before_change: Callable[[], None] = lambda: None

    async def __aenter__(self) -> Api:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._client.close()

    def now(self) -> float:
        """Seconds since the epoch by the server's clock, a second exact, as of its newest answer."""
        return time.monotonic() + self._server_now

    # ------------------------------------------------------------------------------------- verbs

    async def get(self, kind: Resource, name: str, namespace: str = "") -> Object:
        return await self._call("GET", kind.path(namespace, name))

    async def try_get(self, kind: Resource, name: str, namespace: str = "") -> Object | None:
        """None where it is not there."""
        try:
            return await self.get(kind, name, namespace)
        except ApiError as error:
            if error.code != 404:
                raise
            return None

    async def list(
        self, kind: Resource, namespace: str = "", *, labels: str = "", fields: str = ""
    ) -> tuple[list[Object], str]:
        """All objects, page by page, and the version that a watch goes on from."""
        found: list[Object] = []
        query = {"limit": str(PAGE), "labelSelector": labels, "fieldSelector": fields}
        while True:
            page = await self._call("GET", kind.path(namespace), query=query)
            found += page.get("items") or []
            query["continue"] = page["metadata"].get("continue", "")
            if not query["continue"]:
                return found, page["metadata"]["resourceVersion"]

    async def create(
        self, kind: Resource, body: Object, namespace: str = "", *, dry_run: bool = False
    ) -> Object:
        query = {"dryRun": "All"} if dry_run else {}
        return await self._call("POST", kind.path(namespace), body=body, query=query)

    async def replace(self, kind: Resource, body: Object, namespace: str = "") -> Object:
        """Refused (409) where the object is not at the version in `body` any more."""
        return await self._call("PUT", kind.path(namespace, body["metadata"]["name"]), body=body)

    async def patch(self, kind: Resource, thing: Object, body: Object, *, subresource: str = "") -> Object:
        """Merge `body` into `thing`; refused (409) where it has been changed since it was read."""
        meta = thing["metadata"]
        fixed = {"uid": meta["uid"], "resourceVersion": meta["resourceVersion"]}
        body = {**body, "metadata": {**(body.get("metadata") or {}), **fixed}}
        path = kind.path(meta.get("namespace", ""), meta["name"], subresource)
        return await self._call("PATCH", path, body=body, form="application/merge-patch+json")

    async def delete(
        self,
        kind: Resource,
        thing: Object,
        *,
        grace_s: int | None = None,
        foreground: bool = False,
        unchanged: bool = False,
    ) -> bool:
        """Delete this very object; False where it is gone.  Another one of its name is refused (409).

        Args:
            unchanged: refused as well where it is not at the version of `thing` any more.
        """
        meta = thing["metadata"]
        fixed = ("uid", "resourceVersion") if unchanged else ("uid",)
        body: Object = {
            "preconditions": {name: meta[name] for name in fixed},
            "propagationPolicy": "Foreground" if foreground else "Background",
        }
        if grace_s is not None:
            body["gracePeriodSeconds"] = grace_s
        try:
            await self._call("DELETE", kind.path(meta.get("namespace", ""), meta["name"]), body=body)
        except ApiError as error:
            if error.code != 404:
                raise
            return False
        return True

    async def evict(self, pod: Object) -> bool:
        """Ask for a pod to go; False where disruption budgets are in the way.

        One forbids it (429) or changes (409), or two have the pod, which no eviction can satisfy (500).
        """
        meta = pod["metadata"]
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": meta["name"], "namespace": meta["namespace"]},
            "deleteOptions": {"preconditions": {"uid": meta["uid"]}},
        }
        path = PODS.path(meta["namespace"], meta["name"], "eviction")
        try:
            await self._call("POST", path, body=body, throttles=0)
        except ApiError as error:
            if error.code in (409, 429, 500):
                return False
            if error.code != 404:
                raise
        return True

    async def watch(self, kind: Resource, namespace: str, version: str) -> AsyncIterator[Object]:
        """Events after `version`; ends when the server ends it.

        Raises:
            ApiError: with code 410 where `version` is too old.
        """
        query = {
            "watch": "1",
            "resourceVersion": version,
            "allowWatchBookmarks": "1",
            "timeoutSeconds": str(WATCH_S),
        }
        timeout = aiohttp.ClientTimeout(sock_connect=self._call_s, sock_read=SILENCE_S)
        response = await self._request("GET", kind.path(namespace), query=query, timeout=timeout)
        try:
            if response.status != 200:
                raise _error(response.status, await response.read(), f"watch of {kind.plural}")
            async for line in response.content:
                event: Object = json.loads(line)
                if not isinstance(event, dict) or not isinstance(event.get("object"), dict):
                    raise ValueError("a line is no event")
                if event.get("type") == "ERROR":
                    status = event["object"]
                    raise ApiError(
                        f"watch of {kind.plural}: {status.get('message')}", code=status.get("code", 0)
                    )
                yield event
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError) as error:
            raise ApiError(f"watch of {kind.plural} broke: {error or type(error).__name__}") from error
        finally:
            response.close()

    # ------------------------------------------------------------------------------------- inside

    async def _call(
        self,
        method: str,
        path: str,
        *,
        query: dict[str, str] | None = None,
        body: Object | None = None,
        form: str = "application/json",
        throttles: int = THROTTLES,
    ) -> Object:
        timeout = aiohttp.ClientTimeout(total=self._call_s)
        while True:
            if method != "GET" and f"/{LEASES.plural}" not in path:
                self.before_change()
            response = await self._request(method, path, query=query, body=body, form=form, timeout=timeout)
            try:
                text = await response.read()
            except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
                raise ApiError(f"{method} {path}: {error or type(error).__name__}") from error
            self._take_time(response)
            pause = response.headers.get("Retry-After", "")
            if response.status != 429 or not throttles or not pause.isdecimal():
                break
            throttles -= 1
            await asyncio.sleep(min(int(pause), THROTTLE_S))
        if not 200 <= response.status <= 299:
            raise _error(response.status, text, f"{method} {path}")
        try:
            answer: Object = json.loads(text)
        except ValueError as error:
            raise ApiError(f"{method} {path}: the answer is no JSON: {error}") from error
        return answer

    async def _request(
        self,
        method: str,
        path: str,
        *,
        query: dict[str, str] | None,
        timeout: aiohttp.ClientTimeout,
        body: Object | None = None,
        form: str = "application/json",
    ) -> aiohttp.ClientResponse:
        try:
            response: aiohttp.ClientResponse = await self._client.call_api(
                path,
                method,
                query_params=[(name, text) for name, text in (query or {}).items() if text],
                header_params={"Accept": "application/json", "Content-Type": form},
                body=body,
                auth_settings=["BearerToken"],
                _preload_content=False,
                _request_timeout=timeout,
            )
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ApiException, ConfigException) as error:
            raise ApiError(f"{method} {path}: {error or type(error).__name__}") from error
        return response

    def _take_time(self, response: aiohttp.ClientResponse) -> None:
        try:
            at = parsedate_to_datetime(response.headers["Date"]).timestamp()
        except (KeyError, TypeError, ValueError):
            return
        self._server_now = at - time.monotonic()


def _error(code: int, text: bytes, what: str) -> ApiError:
    try:
        message = str(json.loads(text).get("message", ""))
    except (ValueError, AttributeError):
        message = text[:200].decode(errors="replace")
    return ApiError(f"{what}: {code}, {message}", code=code)
