# SPDX-License-Identifier: Apache-2.0
"""One watch for each kind of object, for all that is in its namespace: what the cluster looks like now.

A watch that broke goes on from its last version.  Where the server no longer has that (410), all is listed
again, and what is gone meanwhile is told as deleted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from resiliency.tasks import wait_for
from supervisor.orchestrators.gke.client import Api, ApiError, Object, Resource
from supervisor.transport.limits import Backoff

logger = logging.getLogger(__name__)

#: Longest pause between tries.
RETRY_S = 5.0

#: An object as it was and as it is; None before its creation and after its end.
Listener = Callable[[Object | None, Object | None], None]


class Changes:
    """Wakes all that wait for news of the cluster."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def tell(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, timeout_s: float) -> None:
        """Until the next change, or `timeout_s` if there is none."""
        try:
            await wait_for(self._event.wait(), timeout_s)
        except asyncio.TimeoutError:
            return


class Watched:
    """All objects of one kind.  They are read only.

    Attributes:
        listed: they were seen once; before, an object that is missing means nothing.
    """

    def __init__(self, kind: Resource, namespace: str, changes: Changes) -> None:
        self.kind = kind
        self.listed = asyncio.Event()
        self._namespace = namespace
        self._changes = changes
        self._objects: dict[str, Object] = {}
        self.listener: Listener = lambda before, after: None

    def get(self, name: str) -> Object | None:
        return self._objects.get(name)

    def all(self) -> list[Object]:
        return list(self._objects.values())

    async def run(self, api: Api) -> None:
        """Watch until cancelled."""
        backoff, version, problem = Backoff(most_s=RETRY_S), "", ""
        while True:
            try:
                if not version:
                    version = await self._list(api)
                async for event in api.watch(self.kind, self._namespace, version):
                    if problem:
                        logger.info("watch of %s: goes on", self.kind.plural)
                        problem = ""
                    backoff.reset()
                    version = event["object"]["metadata"]["resourceVersion"]
                    self._take(event)
                # A proxy may end each watch at once; a server does so after minutes, and nothing is missed.
                await asyncio.sleep(backoff.next_s())
            except ApiError as error:
                if error.code == 410:
                    version = ""
                elif not problem:
                    logger.warning("%s  Trying again.", error)
                    problem = str(error)
                await asyncio.sleep(backoff.next_s())

    async def _list(self, api: Api) -> str:
        found, version = await api.list(self.kind, self._namespace)
        fresh = {one["metadata"]["name"]: one for one in found}
        before, self._objects = self._objects, fresh
        for name in {**before, **fresh}:
            self._tell(before.get(name), fresh.get(name))
        self.listed.set()
        self._changes.tell()
        return version

    def _take(self, event: Object) -> None:
        if event["type"] == "BOOKMARK":
            return
        after: Object | None = event["object"]
        name = event["object"]["metadata"]["name"]
        before = self._objects.pop(name, None)
        if event["type"] == "DELETED":
            after = None
        else:
            self._objects[name] = event["object"]
        self._tell(before, after)
        self._changes.tell()

    def _tell(self, before: Object | None, after: Object | None) -> None:
        if before is not None and after is not None and before["metadata"]["uid"] != after["metadata"]["uid"]:
            self._hear(before, None)
            before = None
        if before != after:
            self._hear(before, after)

    def _hear(self, before: Object | None, after: Object | None) -> None:
        try:
            self.listener(before, after)
        except Exception:
            # One object that is not understood must not end the watch of all others.
            logger.exception("watch of %s: a change is not told, which is a bug", self.kind.plural)
