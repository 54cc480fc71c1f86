# SPDX-License-Identifier: Apache-2.0
"""The Lease: one adapter writes at a time, and the highest epoch of a controller that any of them has seen.

A holder that cannot renew stops before another one may begin: it counts from before its last renewal, the
others from when they saw it.  No time of two machines is compared, and the time in which this one is
suspended counts: the others go on meanwhile.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import math
from contextlib import suppress
from datetime import datetime, timezone

from resiliency.runtime import elapsed_s
from resiliency.tasks import wait_for
from supervisor.orchestrators.gke.client import LEASES, Api, ApiError, Object

logger = logging.getLogger(__name__)

NAME = "resiliency-supervisor"
EPOCH = "supervisor/epoch"
#: For giving it back at the end.
RELEASE_S = 2.0


class NotHolder(Exception):
    """Another adapter writes, or the API server cannot be asked; this passes."""


class Fenced(Exception):
    """A newer controller has spoken, of epoch `highest`."""

    def __init__(self, epoch: int, highest: int) -> None:
        super().__init__(f"epoch {epoch} refused: this orchestrator has seen {highest}")
        self.highest = highest


class WriterLease:
    """The Lease of this fleet.

    Args:
        identity: of this process.
        lease_s: after which another one may take over.
    """

    def __init__(self, api: Api, namespace: str, identity: str, lease_s: float) -> None:
        self._api, self._namespace, self._identity = api, namespace, identity
        self._lease_s = lease_s
        self._until = 0.0
        #: The first and the last answer of the API server, of answers without a gap between them.
        self._served: tuple[float, float] = (-math.inf, -math.inf)
        self._lock = asyncio.Lock()
        self._seen: tuple[str, float] = ("", 0.0)
        self._holder = ""
        #: As of our last write; nobody else writes while it is ours.
        self._mine: Object | None = None
        #: Set when it was taken; cleared by those that wait for it.
        self.taken = asyncio.Event()

    async def run(self) -> None:
        """Take and renew it until cancelled, then give it back."""
        try:
            while True:
                try:
                    async with self._lock:
                        await self._renew()
                except ApiError as error:
                    logger.info("lease %s: not renewed: %s", NAME, error)
                await asyncio.sleep(self._lease_s / 5)
        finally:
            with suppress(ApiError, asyncio.TimeoutError):
                await wait_for(self._release(), RELEASE_S)

    async def admit(self, epoch: int) -> None:
        """Whether a command of `epoch` may be carried out now.

        Raises:
            NotHolder: not by this process.
            Fenced: a higher epoch was seen.
            ApiError: the Lease cannot be written.
        """
        async with self._lock:
            if elapsed_s() >= self._until:
                await self._renew()
            self.check()
            known = self._mine or await self._api.get(LEASES, NAME, self._namespace)
            highest = _epoch_of(known)
            if epoch < highest:
                raise Fenced(epoch, highest)
            if epoch > highest:
                known = copy.deepcopy(known)
                meta = known["metadata"]
                meta["annotations"] = {**(meta.get("annotations") or {}), EPOCH: str(epoch)}
                await self._write(known)

    def check(self) -> None:
        """Raise NotHolder where another one may write by now."""
        if elapsed_s() < self._until:
            return
        name = f"{self._namespace}/{NAME}"
        if self._holder == self._identity:
            raise NotHolder(
                f"the lease {name} could not be renewed in time: nothing is changed until it is;"
                " look at the API server"
            )
        raise NotHolder(f"{self._holder or 'nobody'} holds the lease {name}")

    def served_for(self) -> float:
        """Seconds for which the API server has answered renewals without a gap; 0 while it does not."""
        now, (since, last) = elapsed_s(), self._served
        return now - since if now - last < self._valid_s else 0.0

    @property
    def _valid_s(self) -> float:
        """After a renewal; it ends before the others may take the lease."""
        return self._lease_s * 2 / 3

    async def _renew(self) -> None:
        asked_at = elapsed_s()
        known = self._mine or await self._api.try_get(LEASES, NAME, self._namespace)
        await self._hold(known, asked_at)
        since, last = self._served
        self._served = (since if asked_at - last < self._valid_s else asked_at), asked_at

    async def _hold(self, known: Object | None, asked_at: float) -> None:
        """Take or renew it, unless another one holds it."""
        if known is None:
            made = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": NAME}}
            made["spec"] = self._spec({}, 0, takes=True)
            self._mine = await self._api.create(LEASES, made, self._namespace)
            self.taken.set()
        else:
            spec = known.get("spec") or {}
            holder = spec.get("holderIdentity") or ""
            version = known["metadata"]["resourceVersion"]
            if version != self._seen[0]:
                self._seen = (version, elapsed_s())
            if holder not in ("", self._identity) and asked_at - self._seen[1] < self._lease_s:
                self._until, self._holder = 0.0, holder
                return
            takes = holder != self._identity
            transitions = int(spec.get("leaseTransitions") or 0) + takes
            await self._write({**known, "spec": self._spec(spec, transitions, takes=takes)})
            if takes:
                logger.info("lease %s: taken%s", NAME, f" over from {holder}" if holder else "")
                self.taken.set()
        # Before the others may: they count from when they saw the renewal, which is later than `asked_at`.
        self._until, self._holder = asked_at + self._valid_s, self._identity

    async def _write(self, lease: Object) -> None:
        """Replace it as it was read; whatever goes wrong, it is read again before the next write."""
        self._mine = None
        self._mine = await self._api.replace(LEASES, lease, self._namespace)

    async def _release(self) -> None:
        async with self._lock:
            self._until = 0.0
            known = await self._api.try_get(LEASES, NAME, self._namespace)
            if known is not None and known["spec"].get("holderIdentity") == self._identity:
                known["spec"]["holderIdentity"] = ""
                await self._api.replace(LEASES, known, self._namespace)

    def _spec(self, before: Object, transitions: int, *, takes: bool) -> Object:
        now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        return {
            **before,
            "holderIdentity": self._identity,
            "leaseDurationSeconds": max(1, math.ceil(self._lease_s)),
            "acquireTime": now if takes else before.get("acquireTime", now),
            "renewTime": now,
            "leaseTransitions": transitions,
        }


def _epoch_of(lease: Object) -> int:
    text = (lease["metadata"].get("annotations") or {}).get(EPOCH, "0")
    return int(text) if text.isdecimal() else 0
