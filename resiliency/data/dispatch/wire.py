# SPDX-License-Identifier: Apache-2.0
"""What server and clients of ranges say to each other: lines of JSON over TCP.

    server  {"version": 2, "nonce": ...}
    client  {"op": "join", "worker": ..., "life": ..., "attempt": ..., "proof": ...}
    server  {"answer": "welcome", "attempt": ..., "book": ..., "source": {...}, "lease_s": ...}
    client  {"op": "grant", "seq": 1}
    client  {"op": "heartbeat"}
    server  {"answer": "range", "range": [0, 100, 0, ""]}

A client has one connection, and one request on it that has no answer yet; a heartbeat has none. The proof is
a keyed hash of the nonce, so the token itself is never sent. Nothing is encrypted: where others
can change what is on the wire, use a tunnel.

The standard library only.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from datetime import timedelta

from resiliency.data.dispatch.ranges import Plain
from resiliency.errors import ConfigError

VERSION = 2
#: Longest line; a request has some hundred bytes, but for the state of a checkpoint, which has some tens of
#: bytes for each partition.
LINE_BYTES = 16 * 1024 * 1024
#: Whole numbers are smaller: larger ones cannot be written as texts at some length.
NUMBERS = 2**63
#: Longest line before the token is shown, and longest name of a worker in it.
DOOR_BYTES = 8 * 1024
NAME_CHARS = 256
#: Longest time in which a client joins, and in which the server holds a request for a range.
DOOR = timedelta(seconds=10)
HOLD = timedelta(seconds=10)


def encoded(message: Mapping[str, object]) -> bytes:
    return json.dumps(message, separators=(",", ":"), ensure_ascii=True).encode() + b"\n"


def decoded(line: bytes) -> Plain:
    """Raises ConfigError: the line is no JSON object, or has a number that is too large."""
    try:
        message = _DECODER.decode(line.decode())
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict):
        raise ConfigError(f"{line[:80]!r} is no message of texts and of numbers below {NUMBERS}.")
    return message


def too_long(what: str, line: bytes) -> ConfigError:
    return ConfigError(
        f"{what} has {len(line)} bytes, and a message at most {LINE_BYTES}.",
        hint="Name partitions with shorter names or in several calls, or give each group of them a server.",
    )


def _number(text: str) -> int:
    if not -NUMBERS < (number := int(text)) < NUMBERS:
        raise ValueError(text)
    return number


_DECODER = json.JSONDecoder(parse_int=_number)


def proof_of(token: str, nonce: str, worker: str, life: str) -> str:
    """What only a client that knows the token can say to this nonce."""
    text = json.dumps([nonce, worker, life]).encode()
    return hmac.new(token.encode(), text, hashlib.sha256).hexdigest()


def check_token(token: str) -> None:
    """Raises ConfigError if there is none."""
    if not isinstance(token, str) or not token:
        raise ConfigError(
            "there is no token.",
            hint="Pass the same secret text to the server and to all clients.",
        )
