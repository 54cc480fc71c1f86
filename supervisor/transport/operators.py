# SPDX-License-Identifier: Apache-2.0
"""The service for operators: documents of `supervisor.view.status`, asked of the controller.

They travel as compressed JSON, because the status of 20,000 hosts is larger than a message may be.
"""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeVar

from supervisor.plain import InvalidValue
from supervisor.protocol import fleet_pb2
from supervisor.settings import check_address
from supervisor.transport.client import Remote
from supervisor.transport.security import Security
from supervisor.transport.server import Service
from supervisor.view.operators import OperatorClient
from supervisor.view.status import ActReply, ActRequest, Document, History, HistoryRequest, Status

D = TypeVar("D", bound=Document)

OPERATOR = fleet_pb2.DESCRIPTOR.services_by_name["Operator"]
#: Of one document before compression; more is no document of ours.
MAX_DOCUMENT_BYTES = 64 << 20


def operator_service(
    status: Callable[[], Awaitable[Status]],
    act: Callable[[ActRequest], Awaitable[ActReply]],
    history: Callable[[HistoryRequest], Awaitable[History]],
) -> Service:
    async def answer_status(_: Any) -> Any:
        return await asyncio.to_thread(_pack, await status())  # a large fleet takes a while

    async def answer_act(message: Any) -> Any:
        return _pack(await act(_unpack(ActRequest, message)))

    async def answer_history(message: Any) -> Any:
        return _pack(await history(_unpack(HistoryRequest, message)))

    return Service(
        descriptor=OPERATOR,
        handlers={"Status": answer_status, "Act": answer_act, "History": answer_history},
    )


class RemoteController:
    """A controller of another process.

    Each call raises Refused or Unreachable as `Remote.call` does, and InvalidValue where the controller's
    release has another format.
    """

    def __init__(self, remote: Remote) -> None:
        self._remote = remote

    async def status(self, *, timeout_s: float) -> Status:
        """The fleet as the controller knows it."""
        return await self._ask(Status, "Status", fleet_pb2.Document(), timeout_s)

    async def act(self, request: ActRequest, *, timeout_s: float) -> ActReply:
        """Have the controller act for a person."""
        return await self._ask(ActReply, "Act", _pack(request), timeout_s)

    async def history(self, request: HistoryRequest, *, timeout_s: float) -> History:
        """Records of the event log."""
        return await self._ask(History, "History", _pack(request), timeout_s)

    async def _ask(self, kind: type[D], name: str, message: Any, timeout_s: float) -> D:
        method = OPERATOR.methods_by_name[name]
        return _unpack(kind, await self._remote.call(method, message, timeout_s=timeout_s))


def connect_from(
    env: Mapping[str, str],
) -> Callable[[str, bool], AbstractAsyncContextManager[OperatorClient]]:
    """Connects to a controller with the certificates or tokens that `env` names."""

    @asynccontextmanager
    async def connect(address: str, plaintext: bool) -> AsyncIterator[OperatorClient]:
        check_address(address, "--controller")
        async with Remote(address, Security.from_env(env, plaintext=plaintext)) as remote:
            yield RemoteController(remote)

    return connect


def _pack(document: Document) -> Any:
    body = json.dumps(document.to_dict(), separators=(",", ":"))
    return fleet_pb2.Document(json=zlib.compress(body.encode(), 1))


def _unpack(kind: type[D], message: Any) -> D:
    unpacker = zlib.decompressobj()
    try:
        body = unpacker.decompress(message.json, MAX_DOCUMENT_BYTES)
        if unpacker.unconsumed_tail:
            raise InvalidValue(f"{kind.__name__} is longer than {MAX_DOCUMENT_BYTES} bytes.")
        return kind.from_dict(json.loads(body))
    except (zlib.error, ValueError) as error:
        raise InvalidValue(f"{kind.__name__} cannot be read: {error}.") from error
