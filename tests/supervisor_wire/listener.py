# SPDX-License-Identifier: Apache-2.0
"""A listener of hosts that notes what it is told."""

from __future__ import annotations

import asyncio
from typing import Any

from supervisor.values import HostInfo, Value


class Listener:
    """Keeps what a `HostStreams` tells, and wakes all that wait for it."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str, Any]] = []
        self._told_more = asyncio.Event()

    def _add(self, kind: str, host: str, what: Any) -> None:
        self.told.append((kind, host, what))
        self._told_more.set()
        self._told_more = asyncio.Event()

    def host_connected(self, host: HostInfo, incarnation: str) -> None:
        self._add("connected", host.name, incarnation)

    def host_message(self, host: str, value: Value) -> None:
        self._add("message", host, value)

    def host_lost(self, host: str, incarnation: str) -> None:
        self._add("lost", host, incarnation)

    async def wait_for_more(self) -> None:
        await self._told_more.wait()

    async def wait_for(self, kind: str, host: str, *, count: int = 1) -> Any:
        while len(found := [what for k, h, what in self.told if (k, h) == (kind, host)]) < count:
            await self.wait_for_more()
        return found[count - 1]
