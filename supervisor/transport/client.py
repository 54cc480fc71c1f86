# SPDX-License-Identifier: Apache-2.0
"""Calls and streams to another part of the supervisor, each with a deadline.

A connection is made for one stream or kept for many calls; `keep_stream` makes a stream again whenever it
ends, with a backoff, and says so once for each outage.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
from google.protobuf.message_factory import GetMessageClass

from resiliency.errors import ConfigError, ControlPlaneError
from supervisor.protocol import PROTOCOL_VERSION
from supervisor.transport import errors
from supervisor.transport.errors import Refused, Unreachable
from supervisor.transport.limits import CHANNEL_OPTIONS, Backoff
from supervisor.transport.roles import SERVERS, Role
from supervisor.transport.security import Security

logger = logging.getLogger(__name__)

#: A stream that lived this long was whole: the next pause starts from the shortest.
_WHOLE_S = 5.0
#: Looks for the status of a call that has failed, and the time between two.  Not a time: a process that
#: stands still meanwhile must not take that for the wait.
_STATUS_LOOKS, _STATUS_LOOK_S = 50, 0.02


class ClientStream:
    """One bidirectional call to a server."""

    def __init__(self, call: Any, address: str, method: str, *, plaintext: bool = False) -> None:
        self._call, self._address, self._method, self._plaintext = call, address, method, plaintext

    async def receive(self) -> Any:
        """The next message.

        Raises:
            Refused: the server ended the stream and said why.
            Unreachable: it ended in any other way.
        """
        try:
            message = await self._call.read()
        except grpc.aio.AioRpcError:
            raise await self._ended() from None
        if message is grpc.aio.EOF:
            raise await self._ended()
        return message

    async def send(self, message: Any) -> None:
        """Send one message; waits while the other side does not read.

        Raises:
            Refused, Unreachable: the stream has ended, as for `receive`.
        """
        try:
            await self._call.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            raise await self._ended() from None

    async def _ended(self) -> ControlPlaneError:
        """Why the stream has ended.

        A message that is written while the server ends the call fails in gRPC's core, which for a moment is
        the status of the call; the one that the server sent takes its place, unless it came first: then it is
        lost, and the next try gets it.
        """
        for _ in range(_STATUS_LOOKS):
            code, details = await self._call.code(), await self._call.details()
            if not errors.is_cores_own(code, details):
                break
            await asyncio.sleep(_STATUS_LOOK_S)
        if code is grpc.StatusCode.OK:
            return Unreachable(
                f"{self._method} at {self._address} ended: the server closed the stream.",
                address=self._address,
                method=self._method,
            )
        initial, trailing = await self._call.initial_metadata(), await self._call.trailing_metadata()
        error = grpc.aio.AioRpcError(code, initial, trailing, details=details)
        return errors.from_rpc(error, self._address, self._method, plaintext=self._plaintext)


class Remote:
    """Another part of the supervisor, at one address.  An asynchronous context manager.

    With TLS, each service is asked only of a server whose certificate names the part that serves it.
    """

    def __init__(self, address: str, security: Security) -> None:
        self.address = address
        self._security = security
        self._channels: dict[Role, grpc.aio.Channel] = {}
        self._version = security.version
        self._replaced: list[grpc.aio.Channel] = []  # calls that have begun end on them

    async def call(self, method: Any, request: Any, *, timeout_s: float) -> Any:
        """One call.

        Raises:
            Refused: the server said no.
            Unreachable: no answer within `timeout_s`.
        """
        server = SERVERS[method.containing_service.name]
        # A connection that breaks is made again by gRPC, with the certificate that its channel began with.
        if (version := self._security.version) != self._version:
            self._version = version
            self._replaced += self._channels.values()
            self._channels = {}
        if server not in self._channels:
            self._channels[server] = self._connect(server)
        stub = self._channels[server].unary_unary(_path(method), **_coders(method))
        try:
            metadata = (*self._security.metadata(), (errors.PROTOCOL_KEY, str(PROTOCOL_VERSION)))
            return await stub(request, timeout=timeout_s, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            plaintext = self._security.plaintext
            raise errors.from_rpc(error, self.address, method.name, plaintext=plaintext) from error

    async def call_until(
        self,
        method: Any,
        request: Any,
        *,
        timeout_s: float,
        deadline_s: float,
        backoff: Backoff | None = None,
    ) -> Any:
        """Like `call`, again while it is `Unreachable` and `deadline_s` is not over: for idempotent calls."""
        backoff = backoff or Backoff()
        end = time.monotonic() + deadline_s
        while True:
            left_s = end - time.monotonic()
            try:
                return await self.call(method, request, timeout_s=max(min(timeout_s, left_s), 0.001))
            except Unreachable:
                # Another connection: the name may mean another pod by now.
                await self.close()
                pause_s = backoff.next_s()
                if time.monotonic() + pause_s >= end:
                    raise
                await asyncio.sleep(pause_s)

    @asynccontextmanager
    async def stream(self, method: Any) -> AsyncIterator[ClientStream]:
        """One stream on a connection of its own, which ends with the context."""
        channel = self._connect(SERVERS[method.containing_service.name])
        try:
            stub = channel.stream_stream(_path(method), **_coders(method))
            call = stub(metadata=self._security.metadata())
            try:
                yield ClientStream(call, self.address, method.name, plaintext=self._security.plaintext)
            finally:
                call.cancel()
        finally:
            await channel.close()

    async def close(self) -> None:
        channels = (*self._replaced, *self._channels.values())
        self._replaced, self._channels = [], {}
        for channel in channels:
            await channel.close()

    async def __aenter__(self) -> Remote:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def _connect(self, server: Role) -> grpc.aio.Channel:
        try:
            credentials = self._security.channel_credentials()
        except OSError as error:
            raise Unreachable(
                f"{self.address}: a certificate cannot be read: {error}.", address=self.address
            ) from error
        if credentials is None:
            return grpc.aio.insecure_channel(self.address, options=CHANNEL_OPTIONS)
        named = (("grpc.ssl_target_name_override", server.value),)
        return grpc.aio.secure_channel(self.address, credentials, options=CHANNEL_OPTIONS + named)


async def keep_stream(
    remote: Remote,
    method: Any,
    use: Callable[[ClientStream], Awaitable[None]],
    *,
    what: str,
    backoff: Backoff | None = None,
) -> None:
    """Run `use` on a stream to `remote` for ever: again, after a pause, whenever the stream ends.

    Args:
        what: name of the other side in the log, which gets one line for an outage and one for its end.
    """
    backoff = backoff or Backoff()
    logged = ""
    while True:
        began = time.monotonic()
        try:
            async with remote.stream(method) as stream:
                await use(stream)
            problem: ControlPlaneError = Unreachable(f"{what} ended the stream.", address=remote.address)
        except (Refused, Unreachable) as error:
            problem = error
        except ConfigError as error:
            problem = Unreachable(str(error), address=remote.address)
        if time.monotonic() - began >= _WHOLE_S:
            backoff.reset()
            logged = ""
        kind = type(problem).__name__ + str(problem.fields.get("reason"))
        if kind != logged:
            logged = kind
            logger.warning("%s at %s: %s  Trying again with a backoff.", what, remote.address, problem)
        await asyncio.sleep(backoff.next_s())


def _path(method: Any) -> str:
    return f"/{method.containing_service.full_name}/{method.name}"


def _coders(method: Any) -> dict[str, Any]:
    return {
        "request_serializer": GetMessageClass(method.input_type).SerializeToString,
        "response_deserializer": GetMessageClass(method.output_type).FromString,
    }
