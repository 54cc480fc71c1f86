# SPDX-License-Identifier: Apache-2.0
"""Nodes whose kubelets are this process, at any API server: pods run and end there, and no container does.

With them a test can have a node fall silent on a real control plane, too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone

from supervisor.orchestrators.gke.client import LEASES, NODES, PODS, Api, ApiError, Object
from supervisor.orchestrators.gke.kubelets import NODE_LEASES
from supervisor.orchestrators.gke.names import is_deleting
from supervisor.orchestrators.gke.pods import has_ended
from supervisor.testing.kubernetes import hosts
from supervisor.testing.kubernetes.nodes import SILENT_S

#: As of real kubelets.
_RENEW_S = 10.0


@dataclass(kw_only=True)
class StandIns:
    """Some nodes.

    Attributes:
        label: of these nodes alone, and the key of their taint.
        look_s: between two looks at their pods.
        silent: names of those whose machine is gone.
    """

    api: Api
    namespace: str
    names: tuple[str, ...]
    label: str
    look_s: float
    silent: set[str] = field(default_factory=set)

    @asynccontextmanager
    async def there(self) -> AsyncIterator[None]:
        for name in self.names:
            await self.api.create(NODES, self._node(name))
        task = asyncio.ensure_future(self._run())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            for kind, place in ((NODES, ""), (LEASES, NODE_LEASES)):
                for name in self.names:
                    known = await self.api.try_get(kind, name, place)
                    if known is not None:
                        await self.api.delete(kind, known)

    async def lose(self, name: str) -> None:
        """Its machine was lost a minute ago."""
        self.silent.add(name)
        await self._renew(name, ago_s=SILENT_S)

    def _node(self, name: str) -> Object:
        node = hosts.node(name, labels={"contract": self.label})
        node |= {"apiVersion": "v1", "kind": "Node"}
        node["spec"] = {"taints": [{"key": "contract", "value": self.label, "effect": "NoSchedule"}]}
        node["status"]["allocatable"]["pods"] = "8"
        node["status"]["capacity"] = node["status"]["allocatable"]
        return node

    async def _run(self) -> None:
        renewed_at = -_RENEW_S
        while True:
            # What changes meanwhile is seen at the next look.
            with suppress(ApiError):
                if time.monotonic() - renewed_at >= _RENEW_S:
                    for name in self.names:
                        if name not in self.silent:
                            await self._renew(name)
                    renewed_at = time.monotonic()
                found, _ = await self.api.list(PODS, self.namespace)
                for pod in found:
                    node = pod["spec"].get("nodeName")
                    if node in self.names and node not in self.silent:
                        await self._look_at(pod)
            await asyncio.sleep(self.look_s)

    async def _look_at(self, pod: Object) -> None:
        if is_deleting(pod):
            if not has_ended(pod):
                pod = await self.api.patch(PODS, pod, {"status": {"phase": "Failed"}}, subresource="status")
            await self.api.delete(PODS, pod, grace_s=0)
        elif pod["status"].get("phase") == "Pending":
            others = [one for one in pod["status"].get("conditions") or () if one["type"] != "Ready"]
            status = {"phase": "Running", "conditions": [*others, {"type": "Ready", "status": "True"}]}
            await self.api.patch(PODS, pod, {"status": status}, subresource="status")

    async def _renew(self, name: str, *, ago_s: float = 0.0) -> None:
        at = datetime.fromtimestamp(self.api.now() - ago_s, timezone.utc)
        spec = {"holderIdentity": name, "renewTime": at.strftime("%Y-%m-%dT%H:%M:%S.%fZ")}
        known = await self.api.try_get(LEASES, name, NODE_LEASES)
        body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": name}}
        if known is None:
            await self.api.create(LEASES, {**body, "spec": spec}, NODE_LEASES)
        else:
            await self.api.replace(LEASES, {**known, "spec": {**known["spec"], **spec}}, NODE_LEASES)
