# SPDX-License-Identifier: Apache-2.0
"""A metadata server as Google Compute Engine has one on each machine, on the loopback interface."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

ROOT = "/computeMetadata/v1/instance/"
FLAVOR = "Metadata-Flavor: Google\r\n"
#: What a machine of a reserved block has.
VALUES = {"zone": "projects/7/zones/us-east5-a", "attributes/physical_host": "/b1/s1/m1"}


@asynccontextmanager
async def metadata_server(
    values: Mapping[str, str], *, flavor: str = FLAVOR, answers: bool = True
) -> AsyncIterator[tuple[str, int]]:
    """Where it listens; without `answers` it takes connections and says nothing."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            question = (await reader.readuntil(b"\r\n\r\n")).decode()
            if not answers:
                await reader.read()  # until the other side gives up
                return
            path = question.split()[1]
            key = path.removeprefix(ROOT)
            allowed = path.startswith(ROOT) and FLAVOR in question
            status = "403 Forbidden" if not allowed else "200 OK" if key in values else "404 Not Found"
            writer.write(f"HTTP/1.0 {status}\r\n{flavor}\r\n{values.get(key, 'no page')}".encode())
            await writer.drain()
        finally:
            writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[:2]
