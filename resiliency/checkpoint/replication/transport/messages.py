# SPDX-License-Identifier: Apache-2.0
"""What agents of different hosts say to each other.

    handshake    Hello -> Challenge -> Proof -> Welcome
    a copy       Offer -> Wanted -> Chunk, Chunk, ... End -> Verified       or, at once: Held
    completion   Join, then Acknowledged and Lost (to the leader), Complete and GivenUp (from it; to
                 one that may not know)
    always       Refused instead of any answer, and PeerHeartbeat: "I am alive and at work"

Each is a small record with fields of plain types, checked when it arrives.  Bytes (manifests,
indexes, chunks) are not part of it: they follow it in the frame.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, TypeAlias

from resiliency.checkpoint.messages import MessageCodec

#: Raised with every change that an older release would not understand.
PROTOCOL_VERSION = 2
#: Long texts (an error message) are cut to this.
TEXT_CHARS = 2000
#: More gaps than that in what was received are asked for in the next attempt.
RANGES = 2000


class Refusal(str, Enum):
    """Why a host does not do what it is asked for."""

    STRANGER = "stranger"  # wrong proof, attempt, or protocol
    BUSY = "busy"  # too much at once: another host, or later
    STORAGE = "storage"  # it could not be written: full, read-only, failing
    CORRUPT = "corrupt"  # a chunk differs from its digest
    INCOMPLETE = "incomplete"  # chunks are missing: once more
    INVALID = "invalid"  # it makes no sense
    KEPT = "kept"  # a newer save stands at that step
    NOT_LEADER = "not leader"  # acknowledged saves are counted elsewhere


@dataclass(frozen=True, kw_only=True)
class Hello:
    kind: ClassVar[str] = "hello"
    version: int
    attempt_id: str
    host: str
    nonce: str


@dataclass(frozen=True, kw_only=True)
class Challenge:
    kind: ClassVar[str] = "challenge"
    host: str
    nonce: str
    proof: str


@dataclass(frozen=True, kw_only=True)
class Proof:
    kind: ClassVar[str] = "proof"
    proof: str


@dataclass(frozen=True, kw_only=True)
class Welcome:
    kind: ClassVar[str] = "welcome"


@dataclass(frozen=True, kw_only=True)
class ConnectionRefused:
    """`file` and `chunk` say which chunk was corrupt; -1 for all else."""

    kind: ClassVar[str] = "refused"
    why: str  # a `Refusal`
    text: str
    file: int = -1
    chunk: int = -1


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A committed step.  Its manifest and its indexes follow, one after the other.

    Args:
        source_host: directory name of the host whose checkpoint it is.
        ranks: of the indexes, in the order in which they follow.
        sizes: in bytes: the manifest, then each index.
    """

    kind: ClassVar[str] = "offer"
    source_host: str
    step: int
    save_id: str
    ranks: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Held:
    """The copy is there already, whole and committed."""

    kind: ClassVar[str] = "held"


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is missing: (number of the file, its first chunk, the chunk after its last)."""

    kind: ClassVar[str] = "wanted"
    ranges: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """One chunk of a file; its bytes follow."""

    kind: ClassVar[str] = "chunk"
    file: int
    number: int


@dataclass(frozen=True, kw_only=True)
class End:
    """All that was wanted is on its way."""

    kind: ClassVar[str] = "end"


@dataclass(frozen=True, kw_only=True)
class Verified:
    """The copy is whole, compared byte by byte with its digests, durable and visible."""

    kind: ClassVar[str] = "verified"


@dataclass(frozen=True, kw_only=True)
class Join:
    """This connection is for acknowledgements and completions."""

    kind: ClassVar[str] = "join"


@dataclass(frozen=True, kw_only=True)
class Acknowledged:
    """This host has committed a save, and its copies are verified."""

    kind: ClassVar[str] = "sealed"
    step: int
    save_id: str


@dataclass(frozen=True, kw_only=True)
class CompleteMessage:
    """Every host has acknowledged that save."""

    kind: ClassVar[str] = "complete"
    step: int
    save_id: str


@dataclass(frozen=True, kw_only=True)
class Lost:
    """This host has no part of a save, or no copies of it, and is not about to."""

    kind: ClassVar[str] = "lost"
    step: int
    save_id: str


@dataclass(frozen=True, kw_only=True)
class GivenUpMessage:
    """That save never becomes complete: delete it.  `behind`: hosts that kept it waiting, for people."""

    kind: ClassVar[str] = "given up"
    step: int
    save_id: str
    behind: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PeerHeartbeat:
    kind: ClassVar[str] = "beat"


Message: TypeAlias = (
    "Hello | Challenge | Proof | Welcome | ConnectionRefused | Offer | Held | Wanted | Chunk | End | Verified"
    " | Join | Acknowledged | Lost | CompleteMessage | GivenUpMessage | PeerHeartbeat"
)
_CODEC: MessageCodec[Message] = MessageCodec(
    "a peer",
    (
        Hello, Challenge, Proof, Welcome, ConnectionRefused, Offer, Held, Wanted, Chunk, End, Verified,
        Join, Acknowledged, Lost, CompleteMessage, GivenUpMessage, PeerHeartbeat,
    ),
)  # fmt: skip


def refused(why: Refusal, text: object, *, file: int = -1, chunk: int = -1) -> ConnectionRefused:
    return ConnectionRefused(why=why.value, text=str(text)[:TEXT_CHARS], file=file, chunk=chunk)


def encode(message: Message) -> bytes:
    return _CODEC.encode(message)


def decode(data: bytes) -> Message:
    """The inverse of `encode`.

    Raises:
        PeerError: not a message, or its fields are not exactly those that it must have.
    """
    return _CODEC.decode(data)
