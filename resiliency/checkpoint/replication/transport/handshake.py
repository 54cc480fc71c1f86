# SPDX-License-Identifier: Apache-2.0
"""Two hosts convince each other that they know the secret of the attempt, without saying it.

Each proves it over a number of the other's choice, so that nothing can be replayed, and each proof
names its role, both hosts and the attempt, so that none fits anywhere else.  This keeps strangers,
older attempts and other jobs away; it neither hides nor seals what follows, for which the
network of the cluster is trusted.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
from collections.abc import Callable
from typing import TypeVar

from resiliency.checkpoint.replication.hosts import HostTable
from resiliency.checkpoint.replication.placement import Peer
from resiliency.checkpoint.replication.transport.connection import HELLO_BYTES, CallDeadline, Link, Links
from resiliency.checkpoint.replication.transport.messages import (
    PROTOCOL_VERSION,
    Challenge,
    ConnectionRefused,
    Hello,
    Message,
    Proof,
    Refusal,
    Welcome,
    refused,
)
from resiliency.errors import PeerError

_NONCE_BYTES = 16
_M = TypeVar("_M", bound=Message)


class PeerRefused(PeerError):
    """The other host answered, and will not do it; `refusal` says why."""

    def __init__(self, host: str, said: ConnectionRefused) -> None:
        super().__init__(f"{host} refused ({said.why}): {said.text}", host=host, refusal=said.why)
        self.said = said


def connect(table: HostTable, host: str, target: Peer, timeouts: CallDeadline, links: Links) -> Link:
    """A link from `host` to `target`, both known to each other; one of `links`.

    Raises:
        PeerError: nobody answers there, or it is somebody else.
        PeerRefused: it does not know us, for now or at all.
    """
    try:
        address = (target.address, target.port)
        connection = socket.create_connection(address, timeouts.connect.total_seconds())
    except OSError as error:
        raise PeerError(
            f"cannot reach {target.host} at {target.address}:{target.port}: {error}.", host=target.host
        ) from error
    link = links.add(Link(connection, timeouts, target.host))
    try:
        introduce(link, table, host)
    except BaseException:
        links.drop(link)
        raise
    return link


def introduce(link: Link, table: HostTable, host: str) -> None:
    """Our side of the handshake, as the one that connected; `link.host` is who we expect to find."""
    nonce = secrets.token_hex(_NONCE_BYTES)
    link.send(Hello(version=PROTOCOL_VERSION, attempt_id=table.attempt_id, host=host, nonce=nonce))
    challenge = _expect(link, Challenge)
    if challenge.host != link.host:
        raise PeerError(
            f"expected host {link.host}, found {challenge.host} at its address.",
            hint="The table of peers is of an earlier attempt, or an address belongs to two hosts.",
            host=link.host,
        )
    said = (host, challenge.host, nonce, challenge.nonce)
    if not _is_same(challenge.proof, _proof(table, "server", *said)):
        raise PeerError(f"{link.host} does not know the secret of this attempt.", host=link.host)
    link.send(Proof(proof=_proof(table, "client", *said)))
    _expect(link, Welcome)


def admit(link: Link, current: Callable[[], HostTable | None], host: str) -> HostTable:
    """The other side: find out who connected; `link.host` is its name from then on.

    Raises:
        PeerError: it is a stranger, and was told so.
    """
    hello = _expect(link, Hello)
    if hello.version != PROTOCOL_VERSION:
        raise _turned_away(
            link,
            f"the agent of host {hello.host!r} speaks protocol {hello.version}, that of {host!r} speaks"
            f" {PROTOCOL_VERSION}: install the same release on both",
        )
    table = current()
    if table is None or hello.attempt_id != table.attempt_id:
        found = "none yet" if table is None else repr(table.attempt_id)
        raise _turned_away(link, f"attempt {found} here, found {hello.attempt_id!r}")
    if table.peer(hello.host) is None:
        raise _turned_away(link, f"{hello.host!r} is no host of the attempt")
    nonce = secrets.token_hex(_NONCE_BYTES)
    said = (hello.host, host, hello.nonce, nonce)
    link.send(Challenge(host=host, nonce=nonce, proof=_proof(table, "server", *said)))
    if not _is_same(_expect(link, Proof).proof, _proof(table, "client", *said)):
        raise _turned_away(link, "wrong proof")
    link.send(Welcome())
    link.host = hello.host
    return table


def _turned_away(link: Link, text: str) -> PeerError:
    link.send(refused(Refusal.STRANGER, text))
    link.finish(limit_bytes=HELLO_BYTES)
    return PeerError(f"{link.host} was turned away: {text}.", host=link.host)


def _proof(table: HostTable, role: str, *said: str) -> str:
    content = json.dumps([PROTOCOL_VERSION, table.attempt_id, role, *said])
    return hmac.new(table.token.encode(), content.encode(), hashlib.sha256).hexdigest()


def _is_same(found: str, expected: str) -> bool:
    # As bytes: a text that is not ASCII would be an error of another kind.
    return hmac.compare_digest(found.encode(errors="replace"), expected.encode())


def _expect(link: Link, wanted: type[_M]) -> _M:
    message, size = link.receive(message_bytes=HELLO_BYTES)
    if isinstance(message, ConnectionRefused):
        raise PeerRefused(link.host, message)
    if size or not isinstance(message, wanted):
        raise PeerError(f"{link.host} said {message.kind}, expected {wanted.kind}.", host=link.host)
    return message
