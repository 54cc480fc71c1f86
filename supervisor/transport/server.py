# SPDX-License-Identifier: Apache-2.0
"""A gRPC server whose handlers see checked callers, and answer with values or `Refused`.

Methods are found by the descriptors of the protocol, so that a handler for a method that does not exist, or
a method without a handler, is noticed when the server starts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message_factory import GetMessageClass

from resiliency import __version__
from resiliency.errors import ConfigError, ResiliencyError
from supervisor.plain import InvalidValue
from supervisor.protocol import PROTOCOL_VERSION
from supervisor.transport import errors
from supervisor.transport.errors import Reason, Refused
from supervisor.transport.limits import MAX_HOST_MESSAGE_BYTES, SERVER_OPTIONS
from supervisor.transport.roles import CALLERS, Role
from supervisor.transport.security import Caller, Security

logger = logging.getLogger(__name__)

#: Calls that run when the server stops get this long.
STOP_GRACE_S = 1.0


class ServerStream:
    """One bidirectional call, as its handler sees it."""

    def __init__(self, context: grpc.aio.ServicerContext, caller: Caller) -> None:
        self._context = context
        self.caller = caller
        self.peer: str = context.peer()

    async def receive(self) -> Any | None:
        """The next message; None when the other side has ended.

        Raises:
            Refused: it is too large.
        """
        message = await self._context.read()
        if message is grpc.aio.EOF:
            return None
        if message.ByteSize() > MAX_HOST_MESSAGE_BYTES:
            raise Refused(
                f"a message of {message.ByteSize()} bytes is larger than {MAX_HOST_MESSAGE_BYTES}.",
                reason=Reason.INVALID,
            )
        return message

    async def send(self, message: Any) -> None:
        await self._context.write(message)


UnaryHandler = Callable[[Any], Awaitable[Any]]
StreamHandler = Callable[[ServerStream], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class Service:
    """One service of the protocol; `CALLERS` says who may call what.

    Args:
        descriptor: of the service, ``fleet_pb2.DESCRIPTOR.services_by_name[...]``.
        handlers: one for each method; streams get a `ServerStream`, others their request.
    """

    descriptor: Any
    handlers: Mapping[str, UnaryHandler | StreamHandler]

    def __post_init__(self) -> None:
        assert set(self.handlers) == set(self.descriptor.methods_by_name), self.descriptor.full_name


@asynccontextmanager
async def serve(
    services: list[Service], *, address: str, port: int, security: Security
) -> AsyncIterator[int]:
    """Serve within the context; yields the port, which is chosen when `port` is 0.

    Raises:
        ConfigError: the port cannot be opened, or there is no certificate.
    """
    server = grpc.aio.server(options=SERVER_OPTIONS)
    server.add_generic_rpc_handlers([_generic(service, security) for service in services])
    credentials = security.server_credentials()
    place = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    try:
        if credentials is None:
            bound = server.add_insecure_port(place)
        else:
            bound = server.add_secure_port(place, credentials)
    except RuntimeError as error:
        raise ConfigError(
            f"cannot listen at {place}.",
            hint="Another program may hold the port, or a certificate or key cannot be used.",
            address=place,
        ) from error
    await server.start()
    try:
        yield int(bound)
    finally:
        await server.stop(STOP_GRACE_S)


def _generic(service: Service, security: Security) -> grpc.GenericRpcHandler:
    handlers = {}
    for name, handler in service.handlers.items():
        method = service.descriptor.methods_by_name[name]
        role = CALLERS[f"{service.descriptor.name}.{name}"]
        make = grpc.unary_unary_rpc_method_handler
        guarded: Any = _guard_unary(handler, role, security, method.full_name)
        if method.client_streaming:
            make = grpc.stream_stream_rpc_method_handler
            guarded = _guard_stream(handler, role, security, method.full_name)
        handlers[name] = make(
            guarded,
            request_deserializer=GetMessageClass(method.input_type).FromString,
            response_serializer=GetMessageClass(method.output_type).SerializeToString,
        )
    return grpc.method_handlers_generic_handler(service.descriptor.full_name, handlers)


def _guard_unary(handler: Any, role: Role, security: Security, name: str) -> Any:
    async def call(request: Any, context: grpc.aio.ServicerContext) -> Any:
        answers: list[Any] = []

        async def answer() -> None:
            security.admit(context, role)
            _check_protocol(context)
            answers.append(await handler(request))

        await _border(answer, context, name)
        return answers[0]

    return call


def _check_protocol(context: grpc.aio.ServicerContext) -> None:
    """For calls; a stream says its protocol in its first message, with more about the host."""
    given = dict(context.invocation_metadata() or ()).get(errors.PROTOCOL_KEY)
    if given != str(PROTOCOL_VERSION):
        raise Refused(
            f"the caller speaks protocol {given!r:.20}, this process speaks protocol {PROTOCOL_VERSION} "
            f"(release {__version__!r}).",
            hint="Install the same release on both.",
            reason=Reason.VERSION,
        )


def _guard_stream(handler: Any, role: Role, security: Security, name: str) -> Any:
    async def call(_: object, context: grpc.aio.ServicerContext) -> None:
        await _border(lambda: handler(ServerStream(context, security.admit(context, role))), context, name)

    return call


async def _border(run: Callable[[], Awaitable[None]], context: grpc.aio.ServicerContext, name: str) -> None:
    """The border of the process: what a handler raises becomes the status of its call."""
    try:
        await run()
        return
    except Refused as error:
        logger.info("%s from %s refused: %s", name, context.peer(), error)
        refused = error
    except InvalidValue as error:
        logger.warning("%s from %s refused: %s", name, context.peer(), error)
        refused = Refused(str(error), reason=Reason.INVALID)
    except (asyncio.CancelledError, grpc.aio.AbortError):
        raise
    except grpc.aio.UsageError:
        return  # written to a call that has ended
    except ResiliencyError as error:
        logger.warning("%s from %s failed: %s", name, context.peer(), error)
        refused = Refused(str(error), reason=Reason.INTERNAL)
    except Exception:
        logger.exception("%s from %s failed", name, context.peer())
        refused = Refused("the server met an error of its own; its log has it.", reason=Reason.INTERNAL)
    await errors.abort(context, refused)
