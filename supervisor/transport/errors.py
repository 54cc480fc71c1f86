# SPDX-License-Identifier: Apache-2.0
"""The two ways in which a call can fail, the same on both ends of it.

A server raises `Refused`; the transport sends its sentence and its reason, and the client raises it again.
"""

from __future__ import annotations

from enum import Enum

import grpc

from resiliency.errors import ControlPlaneError

#: Trailing metadata that carries a `Reason`, and metadata of a call that carries its protocol.
REASON_KEY, PROTOCOL_KEY = "resiliency-reason", "resiliency-protocol"
#: How gRPC's details of a failed connection end when the server took it and closed it.
_HUNG_UP = ("Socket closed", "Connection reset by peer")
#: Details travel in an HTTP/2 header, which has a limit.
MAX_DETAILS_CHARS = 2000


class Reason(Enum):
    """Why a call was refused."""

    VERSION = "version"
    DUPLICATE_HOST = "duplicate-host"
    IDENTITY = "identity"
    ROLE = "role"
    INVALID = "invalid"
    RATE = "rate"
    #: The same host has made another stream.
    REPLACED = "replaced"
    INTERNAL = "internal"


_CODES = {
    Reason.VERSION: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.DUPLICATE_HOST: grpc.StatusCode.ALREADY_EXISTS,
    Reason.IDENTITY: grpc.StatusCode.UNAUTHENTICATED,
    Reason.ROLE: grpc.StatusCode.PERMISSION_DENIED,
    Reason.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.RATE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.REPLACED: grpc.StatusCode.ABORTED,
    Reason.INTERNAL: grpc.StatusCode.INTERNAL,
}
_REASONS = {code: reason for reason, code in _CODES.items()}


class Refused(ControlPlaneError):
    """The other side understood and said no; the same call again changes nothing.  Has a `reason`."""

    def __init__(self, message: str, *, reason: Reason, hint: str = "", **fields: object) -> None:
        super().__init__(message, hint=hint, reason=reason, **fields)
        self.reason = reason

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_refused, (self.message, self.hint, self.fields)


def _rebuild_refused(message: str, hint: str, fields: dict[str, object]) -> Refused:
    return Refused(message, hint=hint, **fields)  # type: ignore[arg-type]


class Unreachable(ControlPlaneError):
    """No answer in time: the other side may or may not have heard.  `fields`: address, method."""


async def abort(context: grpc.aio.ServicerContext, error: Refused) -> None:
    """End the call of `context` with `error`; always raises."""
    await context.abort(
        _CODES[error.reason], str(error)[:MAX_DETAILS_CHARS], ((REASON_KEY, error.reason.value),)
    )


def is_cores_own(code: grpc.StatusCode, details: str | None) -> bool:
    """Whether gRPC's core gave this status, and not the server."""
    return code is grpc.StatusCode.INTERNAL and details == "Internal error from Core"


def from_rpc(
    error: grpc.aio.AioRpcError, address: str, method: str, *, plaintext: bool = False
) -> ControlPlaneError:
    """What a failed call means.  `plaintext`: this process did not use TLS."""
    given = next((value for key, value in error.trailing_metadata() or () if key == REASON_KEY), None)
    reason = next((reason for reason in Reason if reason.value == given), _REASONS.get(error.code()))
    if reason is not None and not is_cores_own(error.code(), error.details()):
        return Refused(error.details() or error.code().name, reason=reason, address=address, method=method)
    return Unreachable(
        f"{method} at {address} failed: {error.code().name}, {error.details() or 'no details'}.",
        hint=_hint(error.details() or "", plaintext),
        address=address,
        method=method,
    )


def _hint(details: str, plaintext: bool) -> str:
    """What to do where nothing listens, or one side alone speaks TLS; the details do not say so."""
    if details.startswith("failed to connect") and "Connection refused" in details:
        return "Nothing listens there: is it started, and is that its address?"
    if not plaintext and "WRONG_VERSION_NUMBER" in details:
        return (
            "The server speaks plaintext, this process speaks TLS: give this process --plaintext or "
            "SUPERVISOR_PLAINTEXT=1, or start the server with TLS."
        )
    if plaintext and details.startswith("failed to connect") and details.rstrip(".").endswith(_HUNG_UP):
        return (
            "The server ended the connection before a word, as one does that speaks TLS; this process speaks "
            "plaintext: set SUPERVISOR_TLS_CA, _CERT and _KEY and leave out --plaintext and "
            "SUPERVISOR_PLAINTEXT, or start the server with --plaintext."
        )
    return ""
