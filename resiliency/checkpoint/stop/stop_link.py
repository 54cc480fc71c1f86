# SPDX-License-Identifier: Apache-2.0
"""The connections over which ranks agree where to stop: one from each rank to rank 0.

They are silent until somebody asks for a stop.  A connection ends with its process, so a rank that
died is known at once, and nobody waits for its answer.  A key-value store was the alternative: it does
not tell who is dead, and a thread that waits in it cannot be woken.

A message is one JSON object in a line.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import selectors
import socket
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from enum import Enum

from resiliency.checkpoint.machine import make_room_for
from resiliency.checkpoint.messages import decode_record
from resiliency.checkpoint.ranks import RankGroup
from resiliency.errors import ConfigError, PeerError, ResiliencyError
from resiliency.forks import call_in_child
from resiliency.runtime import awake_s, name_ranks

#: A line longer than this is no word of ours.
LINE_BYTES = 64 << 10
#: For a connection, and for the greeting of who made it; rank 0 answers thousands within that.
_HELLO_S = 5.0
_ANSWER_S = 20.0
#: Between tries to reach rank 0, doubled each time.
_AGAIN_S, _LONGEST_AGAIN_S = 0.2, 3.0
#: Out of descriptors, for example: connections wait until some strangers are gone.
_ACCEPT_PAUSE_S = 0.1


class StopKind(str, Enum):
    HELLO = "hello"  # number: rank of the sender; text: the job's token
    STOP = "stop"  # somebody asks for a stop; number: the signal, left_s: time until its deadline
    POST = "post"  # number: the next boundary at which the sender can stop
    DECIDE = "decide"  # number: the boundary at which all stop
    GIVE_UP = "give_up"  # there will be no such step; text: why
    DETACH = "bye"  # the sender leaves in good order; number: as in POST
    FOUND = "found"  # what the sender found, as words in text; see `Termination.collect`
    ALL_FOUND = "all found"  # the words of all ranks
    NOT_ALL = "not all"  # there will be no such answer


@dataclass(frozen=True, kw_only=True)
class StopMessage:
    """What one rank says to another."""

    kind: StopKind
    number: int = 0
    left_s: float = 0.0
    text: str = ""


class StopPeer:
    """One end of a connection to another rank."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A silent connection is dropped by firewalls, and a lost host says no goodbye.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
        self._socket = connection
        self._unread = b""
        # A forked child has copies of its parent's sockets, and would hide the parent's end.
        call_in_child(self.close)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: StopMessage) -> None:
        """Say it if the other rank can still be reached; its end is noticed by `receive`."""
        with suppress(OSError):
            self._socket.settimeout(1.0)  # some bytes on a connection that never carries more
            self._socket.sendall(json.dumps(asdict(message)).encode() + b"\n")

    def receive(self, timeout: timedelta = timedelta(0)) -> list[StopMessage]:
        """What came; waits for something to come.

        Raises:
            PeerError: the other rank is gone, or speaks another language.
        """
        try:
            self._socket.settimeout(timeout.total_seconds())
            chunk = self._socket.recv(LINE_BYTES)
        except (TimeoutError, BlockingIOError):
            return []
        except OSError as error:
            raise PeerError(f"the connection broke: {error}.") from error
        if not chunk:
            raise PeerError("the connection was closed.")
        *lines, self._unread = (self._unread + chunk).split(b"\n")
        if len(self._unread) > LINE_BYTES:
            raise PeerError("another rank sends a line without end.")
        return [decode_record(StopMessage, line) for line in lines]

    def close(self) -> None:
        self._socket.close()


def connect_ranks(rank_group: RankGroup, *, address: str, timeout: timedelta) -> dict[int, StopPeer]:
    """Connect all ranks with rank 0; collective.  In rank 0: all others; elsewhere: rank 0.

    Args:
        address: of rank 0, as other hosts reach it; empty: tried are MASTER_ADDR, its host's name and
            the addresses that belong to the name.
    Raises:
        ConfigError: a rank could not reach rank 0; the same ends it on all ranks.
    """
    if rank_group.world_size == 1:
        return {}
    deadline = awake_s() + timeout.total_seconds()
    peers: dict[int, StopPeer] = {}
    error: ResiliencyError | None = None
    listener = None
    try:
        if rank_group.rank == 0:
            make_room_for(rank_group.world_size, what="connections from all ranks to rank 0")
            listener = _listener()
    except ConfigError as failure:
        error = failure
    except OSError as failure:
        error = ConfigError(f"rank 0 cannot be reached by the others: {failure}.", rank=0)
    names = rank_group.gather(socket.gethostname())
    several = len(set(names)) > 1
    offers = rank_group.gather(
        (_addresses(address, several), listener.getsockname()[1], secrets.token_hex(16)) if listener else None
    )
    if offers[0] is None:
        rank_group.check(error, "connecting the ranks for a common stop")
    assert offers[0] is not None
    addresses, port, token = offers[0]
    try:
        if listener is not None:
            peers = _accept(listener, rank_group.world_size, token, deadline)
        else:
            # Ranks of one host need no name service.
            near = ["127.0.0.1"] if names[rank_group.rank] == names[0] else []
            peers = {0: _reach([*near, *addresses], port, token, rank_group.rank, deadline)}
    except ResiliencyError as failure:
        error = failure
    finally:
        if listener is not None:
            listener.close()
    try:
        rank_group.check(error, "connecting the ranks for a common stop")
    except ResiliencyError:
        for peer in peers.values():
            peer.close()
        raise
    return peers


def _listener() -> socket.socket:
    if socket.has_dualstack_ipv6():
        with suppress(OSError):  # the kernel has IPv6, and the host is configured without
            return socket.create_server(("", 0), family=socket.AF_INET6, backlog=4096, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=4096)


def _addresses(address: str, several_hosts: bool) -> list[str]:
    if address:
        return [address]
    name = socket.gethostname()
    found = [os.environ.get("MASTER_ADDR", ""), name]
    if several_hosts:  # a name service that does not answer may take many seconds
        with suppress(OSError):
            found += [str(info[4][0]) for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    return list(dict.fromkeys(filter(None, found)))


def _accept(listener: socket.socket, world_size: int, token: str, deadline: float) -> dict[int, StopPeer]:
    """All other ranks; strangers are turned away, and hold up nobody.

    Raises:
        ConfigError: a rank did not come in time.
    """
    with _Door(listener, world_size, token) as door:
        while len(door.peers) < world_size - 1 and awake_s() < deadline:
            door.serve(deadline)
        missing = sorted(set(range(1, world_size)) - door.peers.keys())
        if missing:
            for peer in door.peers.values():
                peer.close()
            raise ConfigError(
                f"{name_ranks(missing)} did not connect to rank 0 in time{door.last_error}.",
                hint="Give its address by TerminationOptions(address=...).",
            )
        return door.peers


class _Door:
    """Where rank 0 lets the others in: connections are greeted side by side, each within a deadline."""

    def __init__(self, listener: socket.socket, world_size: int, token: str) -> None:
        self._listener = listener
        self._world_size = world_size
        self._token = token
        self._selector = selectors.DefaultSelector()
        #: Who has not said yet who it is, oldest first, and until when it may.
        self._waiting: dict[StopPeer, float] = {}
        self.peers: dict[int, StopPeer] = {}
        self.last_error = ""
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def serve(self, deadline: float) -> None:
        """Wait for something to happen, and see to it."""
        until = min(deadline, next(iter(self._waiting.values()), deadline))
        for key, _ in self._selector.select(max(0.0, until - awake_s())):
            if isinstance(key.fileobj, StopPeer):
                self._greet(key.fileobj)
            else:
                self._let_in()
        now = awake_s()
        for peer in [peer for peer, until in self._waiting.items() if until <= now]:
            self._turn_away(peer)

    def _let_in(self) -> None:
        try:
            peer = StopPeer(self._listener.accept()[0])
        except (BlockingIOError, ConnectionError):  # gone again
            return
        except OSError as error:
            self.last_error = f": {error}"
            threading.Event().wait(_ACCEPT_PAUSE_S)
            return
        self._waiting[peer] = awake_s() + _HELLO_S
        self._selector.register(peer, selectors.EVENT_READ)

    def _greet(self, peer: StopPeer) -> None:
        try:
            messages = peer.receive()
        except PeerError:
            self._turn_away(peer)
            return
        if not messages:
            return
        hello = messages[0]
        if (hello.kind, hello.text) != (
            StopKind.HELLO,
            self._token,
        ) or not 0 < hello.number < self._world_size:
            self._turn_away(peer)
            return
        self._forget(peer)
        peer.send(StopMessage(kind=StopKind.HELLO, text=self._token))
        before = self.peers.pop(hello.number, None)
        if before is not None:  # it came again, as it had no answer
            before.close()
        self.peers[hello.number] = peer

    def _turn_away(self, peer: StopPeer) -> None:
        self._forget(peer)
        peer.close()

    def _forget(self, peer: StopPeer) -> None:
        del self._waiting[peer]
        self._selector.unregister(peer)

    def __enter__(self) -> _Door:
        return self

    def __exit__(self, *_: object) -> None:
        for peer in list(self._waiting):
            self._turn_away(peer)
        self._selector.close()


def _reach(addresses: list[str], port: int, token: str, rank: int, deadline: float) -> StopPeer:
    """Raises: ConfigError: rank 0 is at none of the addresses."""
    pause_s = _AGAIN_S
    while True:
        problems = []
        for address in addresses:
            found = _try_reach(address, port, token, rank, deadline)
            if isinstance(found, StopPeer):
                return found
            problems.append(f"{address}: {found}")
        left_s = deadline - awake_s()
        if left_s <= pause_s:
            raise ConfigError(
                f"rank {rank} cannot reach rank 0 on port {port}: {'; '.join(problems)}.",
                hint="Give its address by TerminationOptions(address=...).",
                rank=rank,
            )
        # With thousands of ranks its queue may have been full.  Not all of them again at one moment.
        threading.Event().wait(pause_s * random.uniform(0.5, 1.0))  # noqa: S311
        pause_s = min(2 * pause_s, _LONGEST_AGAIN_S)


def _try_reach(address: str, port: int, token: str, rank: int, deadline: float) -> StopPeer | str:
    """Rank 0, or why it is not there."""
    left_s = min(_HELLO_S, deadline - awake_s())
    try:
        peer = StopPeer(socket.create_connection((address, port), timeout=max(left_s, 0.001)))
    except OSError as error:
        return str(error)
    peer.send(StopMessage(kind=StopKind.HELLO, number=rank, text=token))
    hello = _hello_of(peer, max(left_s, min(_ANSWER_S, deadline - awake_s())))
    if hello is not None and hello.text == token:
        return peer
    peer.close()
    return "something else answers there"


def _hello_of(peer: StopPeer, wait_s: float) -> StopMessage | None:
    try:
        messages = peer.receive(timedelta(seconds=wait_s))
    except PeerError:
        return None
    return messages[0] if messages and messages[0].kind is StopKind.HELLO else None
