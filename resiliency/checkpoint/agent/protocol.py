# SPDX-License-Identifier: Apache-2.0
"""What trainers and their checkpoint agent say to each other, and the socket that carries it.

Each message is one JSON object in one packet of a Unix socket (SOCK_SEQPACKET keeps packets apart
and tells at once when the other side is gone).  The address is an abstract name derived from the
arena's directory: it belongs to one listener at a time, so a host has one agent per job, and it
vanishes with its process, however that ends.  Both sides check that the other runs as the same user,
because abstract names have no permissions.  They belong to the network namespace, which containers may
share without sharing /dev/shm: so the name holds the directory itself, its device and inode, not its path.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import ClassVar, TypeAlias

from resiliency.checkpoint.branches import Branch
from resiliency.checkpoint.machine import file_id
from resiliency.checkpoint.messages import MessageCodec
from resiliency.checkpoint.names import TierTry
from resiliency.errors import ConfigError, PeerError
from resiliency.forks import call_in_child

logger = logging.getLogger(__name__)

PACKET_BYTES = 64 << 10
#: Long texts (an error message with many ranks in it) are cut to this.
TEXT_CHARS = 4000
#: `torch.distributed.checkpoint`, or ``megatron.core.dist_checkpointing`` (which torch reads as well).
FORMATS = ("dcp", "megatron")
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How the agent stores what it is given; durations in seconds, a bandwidth of 0 means no limit.

    Attributes:
        directory: of the persistent tier; empty: there is none.
        format: of its files, one of `FORMATS`; the library of that name reads them without this one.
        local_directory: of the local tier, on this host; empty: there is none.
        replicas: hosts that get a copy of what this host has in its local tier.
        replication_bytes_per_s: bandwidth of these copies.
        local_backlog: complete local checkpoints beyond `local_keep` that may wait for the hand-off to a
            replicator; 0: there is none.
    """

    directory: str
    keep: int
    replicated: bool
    bytes_per_s: int
    save_timeout_s: float
    format: str = "dcp"
    local_directory: str = ""
    local_keep: int = 2
    replicas: int = 0
    replication_bytes_per_s: int = 0
    local_backlog: int = 0

    @property
    def tiers(self) -> tuple[str, ...]:
        """The tiers that there are, by the names in `resiliency.checkpoint.trainer.tier_policy`."""
        return (("local",) if self.local_directory else ()) + (("persistent",) if self.directory else ())


@dataclass(frozen=True, kw_only=True)
class Attach:
    """A rank introduces itself, or what it said before changed.

    `attempt_id` is one start of the job, `run_id` what its checkpoints are named after: a job that goes on
    with a checkpoint of another takes over its run; `restored_step` is where it goes on, 0 if it starts
    from scratch, and `restored_save` from which save of that step (empty: another state than any that was
    saved); `branches` are those of the job (`resiliency.checkpoint.branches`).  All five are the same on all
    ranks.
    `host` is this host's name among the others, `peer_address` where they reach it (empty: anywhere).
    """

    kind: ClassVar[str] = "attach"
    rank: int
    world_size: int
    local_ranks: tuple[int, ...]
    run_id: str
    attempt_id: str
    host: str
    peer_address: str = ""
    restored_step: int = 0
    restored_save: str = ""
    branches: tuple[Branch, ...] = ()
    settings: Settings

    @property
    def is_alone(self) -> bool:
        """Whether its host is the whole job."""
        return len(self.local_ranks) == self.world_size


@dataclass(frozen=True, kw_only=True)
class Attached:
    """The answer.  `peer_port`: where the agents of other hosts reach this one; 0 if they do not."""

    kind: ClassVar[str] = "attached"
    peer_port: int = 0


@dataclass(frozen=True, kw_only=True)
class Peers:
    """All agents of this attempt are known: the file at `path` holds their `HostTable`."""

    kind: ClassVar[str] = "peers"
    path: str


@dataclass(frozen=True, kw_only=True)
class RequestRefused:
    kind: ClassVar[str] = "refused"
    reason: str


@dataclass(frozen=True, kw_only=True)
class Repair:
    """Send what this host has of a committed step to another host, which lacks it after a restore.

    `source_host` saved it, and its files are under `root` here.
    """

    kind: ClassVar[str] = "repair"
    step: int
    save_id: str
    source_host: str
    root: str
    target: str


@dataclass(frozen=True, kw_only=True)
class RepairDone:
    """How a repair ended; `error` is empty if the copy is there.  It is not tried again by the same agent."""

    kind: ClassVar[str] = "repair-done"
    attempt_id: str
    repair: Repair
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class SaveRequest:
    """The capture of `step` in the slot file `slot` of this rank is whole and lent: persist it in `tiers`.

    `patient`: the slot may stay lent while a tier still writes an earlier save; else such a tier is left
    out, for the sake of the others.  `again`: an earlier agent had the same request, and may have done it.
    `try_number`: of this step, from 1, the same on all ranks.
    """

    kind: ClassVar[str] = "save"
    step: int
    slot: str
    tiers: tuple[str, ...]
    try_number: int = 1
    patient: bool = False
    again: bool = False

    @property
    def tries(self) -> list[TierTry]:
        return [TierTry(self.step, self.try_number, tier) for tier in self.tiers]


@dataclass(frozen=True, kw_only=True)
class Skip:
    """This rank has no capture of `step` for this try, so no rank's becomes a checkpoint in `tiers`."""

    kind: ClassVar[str] = "skip"
    step: int
    reason: str
    tiers: tuple[str, ...]
    try_number: int = 1

    @property
    def tries(self) -> list[TierTry]:
        return [TierTry(self.step, self.try_number, tier) for tier in self.tiers]


@dataclass(frozen=True, kw_only=True)
class Done:
    """How one try to save `step` ended in `tier`; `error` is empty if it is committed.

    `left_out`: the tier was still writing an earlier save and did not even begin.

    `hangs`: its storage does not answer, see `resiliency.checkpoint.agent.tier_writers`.

    `kept`: it was committed there by an earlier start of the job, which went on from it.
    """

    kind: ClassVar[str] = "done"
    step: int
    attempt_id: str
    tier: str
    error: str
    try_number: int = 1
    left_out: bool = False
    hangs: bool = False
    kept: bool = False
    size_bytes: int
    queued_s: float
    commit_s: float

    @property
    def tried(self) -> TierTry:
        return TierTry(self.step, self.try_number, self.tier)


@dataclass(frozen=True, kw_only=True)
class Copies:
    """What became of a step after its commit in the local tier.

    `hosts` have verified copies of this host's shards.  `complete`: every host has committed its own
    and has as many copies of it as were asked for, so the step outlives the loss of as many hosts.
    `error`: copies are missing, and why.
    """

    kind: ClassVar[str] = "copies"
    step: int
    attempt_id: str
    hosts: tuple[str, ...] = ()
    complete: bool = False
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    kind: ClassVar[str] = "beat"


@dataclass(frozen=True, kw_only=True)
class Detach:
    """This rank ends well and will not come back: its captures need no emergency commit."""

    kind: ClassVar[str] = "bye"


@dataclass(frozen=True, kw_only=True)
class LiftBandwidthCap:
    """The job is about to be ended from outside: from here on storage may have all the bandwidth."""

    kind: ClassVar[str] = "hurry"


@dataclass(frozen=True, kw_only=True)
class Start:
    """To the launcher's agent host: there shall be an agent for the arena at this absolute path."""

    kind: ClassVar[str] = "start"
    arena: str


@dataclass(frozen=True, kw_only=True)
class Started:
    """The answer: this process is, or is about to become, that agent."""

    kind: ClassVar[str] = "started"
    pid: int


Message: TypeAlias = (
    "Attach | Attached | RequestRefused | Peers | Repair | RepairDone | SaveRequest | Skip | Done | Copies"
    " | Heartbeat | Detach | LiftBandwidthCap | Start | Started"
)
_CODEC: MessageCodec[Message] = MessageCodec(
    "the checkpoint agent",
    (
        *(Attach, Attached, RequestRefused, Peers, Repair, RepairDone, SaveRequest, Skip, Done, Copies),
        *(Heartbeat, Detach, LiftBandwidthCap, Start, Started),
    ),
    text_chars=TEXT_CHARS,
)


def encode(message: Message) -> bytes:
    """One packet."""
    return _CODEC.encode(message)


def decode(packet: bytes) -> Message:
    """The inverse of `encode`.

    Raises:
        PeerError: not a message, or its fields are not exactly those that it must have.
    """
    return _CODEC.decode(packet)


class Channel:
    """One connection.  Closed, it stays closed; `receive` and `send` then say that the peer is gone."""

    def __init__(self, connection: socket.socket) -> None:
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        self.pid, uid, _ = _CREDENTIALS.unpack(credentials)
        if uid != os.getuid():
            connection.close()
            raise ConfigError(
                f"the other end of the checkpoint agent's socket belongs to user {uid}, not {os.getuid()}.",
                hint="Do two users of this host run jobs of one name and directory?",
            )
        self._socket = connection
        # A forked child (a data loader's worker) has copies of its parent's sockets: closing them lets the
        # other side see the end of the parent when it comes.
        call_in_child(self.close)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message, timeout: timedelta = timedelta(seconds=5)) -> None:
        """Send one message.

        Raises:
            PeerError: the other side is gone, or has not read for `timeout`.
        """
        try:
            self._socket.settimeout(timeout.total_seconds())
            self._socket.send(encode(message))
        except OSError as error:
            raise PeerError(f"process {self.pid} does not take messages: {error}.") from error

    def receive(self, timeout: timedelta) -> Message | None:
        """The next message; None if none came in time.

        Raises:
            PeerError: the other side is gone, or speaks another language.
        """
        try:
            self._socket.settimeout(timeout.total_seconds())
            packet = self._next_packet()
        except (TimeoutError, BlockingIOError):
            return None
        except OSError as error:
            raise PeerError(f"process {self.pid} is gone: {error}.") from error
        if not packet:
            raise PeerError(f"process {self.pid} is gone.")
        return decode(packet)

    def _next_packet(self) -> bytes:
        try:
            return self._socket.recv(PACKET_BYTES)
        except ConnectionResetError:
            # The other side closed before it read all messages of this one.  The kernel reports that once,
            # and first: its own messages, maybe a `Detach`, are still to be read; its end comes after them.
            return self._socket.recv(PACKET_BYTES)

    def close(self) -> None:
        self._socket.close()


def address(directory: Path) -> str:
    """Where the agent of the arena `directory` listens; of another directory at the same path, elsewhere.

    Raises:
        FileNotFoundError: there is no such directory.
    """
    return f"\0resiliency-agent-{os.getuid()}-{file_id(directory.stat())}"


def listen(directory: Path) -> socket.socket:
    """Become the one agent of `directory`, which is made if need be.

    Hold it (`job_memory.hold_job`) if a clean-up may be under way: it would put another in its place.

    Raises:
        ConfigError: there is one already.
    """
    directory.mkdir(mode=0o700, exist_ok=True)
    name = address(directory)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(name)
    except OSError as error:
        listener.close()
        raise ConfigError(f"{directory} has an agent already: {error}.", path=str(directory)) from error
    listener.listen(128)
    return listener


def connect(directory: Path) -> Channel | None:
    """A connection to the agent of `directory`; None if there is none (yet)."""
    try:
        name = address(directory)
    except FileNotFoundError:
        return None
    return connect_to(name)


def connect_to(name: str) -> Channel | None:
    """A connection to the process that listens at the abstract address `name`; None if there is none.

    None, too, where this process has no descriptor left: that may pass, and the caller tries again.
    """
    try:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError as error:
        logger.debug("no connection can be made: %s", error)
        return None
    try:
        connection.settimeout(5)
        connection.connect(name)
    except OSError:
        connection.close()
        return None
    return Channel(connection)


def check_settings(settings: Settings) -> None:
    """Refuse what cannot work before anything is started.

    Raises:
        ConfigError: a number is out of range, or there is no tier.
    """
    if not settings.tiers:
        raise ConfigError("there is nowhere to save to.", hint="Give a directory, a local tier, or both.")
    if settings.keep < 1 or settings.bytes_per_s < 0 or settings.save_timeout_s <= 0:
        raise ConfigError(
            f"keep must be at least 1, bandwidth not negative and the time for a save positive,"
            f" found {settings.keep}, {settings.bytes_per_s} and {settings.save_timeout_s}."
        )
    if settings.local_keep < 1 or settings.replicas < 0 or settings.replication_bytes_per_s < 0:
        raise ConfigError(
            f"the local tier must keep at least 1, and its replicas and bandwidth are not negative,"
            f" found {settings.local_keep}, {settings.replicas} and {settings.replication_bytes_per_s}."
        )
    if settings.local_backlog < 0:
        raise ConfigError(f"the backlog of the local tier is not negative, found {settings.local_backlog}.")
    if settings.format not in FORMATS:
        raise ConfigError(f"format must be one of {', '.join(FORMATS)}, found {settings.format!r}.")
