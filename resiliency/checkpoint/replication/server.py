# SPDX-License-Identifier: Apache-2.0
"""Listens for the agents of other hosts of the attempt; all others are turned away.

One thread accepts at each port, and each connection gets one of its own for as long as it has work: there are
never more than `CONNECTIONS`, and never more than `RECEIVERS` copies are received at once.  Who
wants to talk about completion is handed to the one thread that does that for all.
"""

from __future__ import annotations

import logging
import random
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from resiliency.checkpoint.replication.hosts import HostTable
from resiliency.checkpoint.replication.receiver import CopyReceiver
from resiliency.checkpoint.replication.replica_store import ReplicaStore
from resiliency.checkpoint.replication.transport.connection import CallDeadline, Link, Links
from resiliency.checkpoint.replication.transport.handshake import admit
from resiliency.checkpoint.replication.transport.messages import Join, Offer, Refusal, refused
from resiliency.checkpoint.threads import start_thread
from resiliency.errors import ConfigError, PeerError, ResourceShortage

logger = logging.getLogger(__name__)

CONNECTIONS = 64
RECEIVERS = 16
_MOST_UNACCEPTED = 1024
_OUTGOING_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
#: Above those of common services, and below those of Kubernetes' services on its nodes.
_FIRST_PORT, _LAST_PORT = 20000, 30000
#: Of such ports, before any will do.
_TRIES = 16
#: Out of descriptors, for example: the next try comes after some have been closed.
_AFTER_ERROR_S = 0.1


class PeerServer:
    """Serves until it is closed.

    Args:
        port: to listen at if it is free; else, or with 0, any that is.  See `listen_also_at`.
        table: the current table; before there is one, everybody is turned away.
        join: takes over a link for acknowledgements and completions; False if this host does not lead.
    Raises:
        ConfigError: cannot listen at `address`.
    """

    def __init__(
        self,
        host: str,
        address: str,
        store: ReplicaStore,
        *,
        table: Callable[[], HostTable | None],
        join: Callable[[Link], bool],
        timeouts: CallDeadline,
        port: int = 0,
    ) -> None:
        self._host = host
        self._store = store
        self._table = table
        self._join = join
        self._timeouts = timeouts
        self._links = Links()
        self._room = threading.BoundedSemaphore(CONNECTIONS)
        self._receivers = threading.BoundedSemaphore(RECEIVERS)
        self._threads: set[threading.Thread] = set()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._address = address
        listener = _listen(address, port)
        self.port: int = listener.getsockname()[1]
        #: By port, with who accepts there.
        self._listeners: dict[int, socket.socket] = {}
        self._acceptors: list[threading.Thread] = []
        #: Where others look for this host, while that port is not to be had.
        self._wanted = 0
        self._accept_at(listener)

    def close(self, timeout: timedelta = timedelta(seconds=10)) -> None:
        """End all connections and wait for their threads, `timeout` in all."""
        deadline = time.monotonic() + timeout.total_seconds()
        self._closing.set()
        with self._lock:
            listeners, acceptors = list(self._listeners.values()), list(self._acceptors)
        for listener in listeners:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the acceptor
        self._links.cut_all()
        for acceptor in acceptors:
            acceptor.join(max(deadline - time.monotonic(), 0.0))
        for listener in listeners:
            listener.close()
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0.0))

    def listen_also_at(self, port: int) -> None:
        """Listen where the other hosts look for this one, as soon as that port is free.

        An agent before this one had it; meanwhile a connection of any process of this host may.
        """
        with self._lock:
            is_there, is_sought = port in self._listeners, self._wanted
            self._wanted = 0 if is_there else port
        if is_there or self._try_listen_at(port) or is_sought:
            return
        logger.error(
            "port %d of this host is taken: other hosts look for its checkpoint agent there in vain.  It is"
            " tried again every %g s; see who has it: ss -tanp 'sport = :%d'",
            *(port, self._timeouts.pause.total_seconds(), port),
        )
        thread = threading.Thread(target=self._await_port, name="resiliency-peer-port", daemon=True)
        try:
            start_thread(thread)
        except ResourceShortage as error:
            logger.error("port %d is not waited for: %s", port, error)
            return
        with self._lock:
            self._acceptors.append(thread)

    def _await_port(self) -> None:
        while not self._closing.wait(self._timeouts.pause.total_seconds()):
            port = self._wanted
            if not port:
                return
            if self._try_listen_at(port):
                logger.warning("port %d is free: other hosts find this one again", port)
                return

    def _try_listen_at(self, port: int) -> bool:
        try:
            listener = _listen_at(self._address, port)
        except OSError:
            return False
        self._accept_at(listener)
        return True

    def _accept_at(self, listener: socket.socket) -> None:
        acceptor = threading.Thread(
            target=self._accept, args=(listener,), name="resiliency-peer-accept", daemon=True
        )
        with self._lock:
            self._wanted = 0
            if self._closing.is_set():
                listener.close()
                return
            try:
                start_thread(acceptor)
            except ResourceShortage:
                listener.close()
                raise
            self._listeners[listener.getsockname()[1]] = listener
            self._acceptors.append(acceptor)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            # Who comes while all threads are busy waits to be accepted, or gives up.
            self._room.acquire()
            try:
                connection, _ = listener.accept()
            except OSError as error:
                self._room.release()
                if not self._closing.is_set():
                    logger.warning("a connection was lost before it began: %s", error)
                if self._closing.wait(_AFTER_ERROR_S):
                    return
                continue
            thread = threading.Thread(
                target=self._serve, args=(connection,), name="resiliency-peer-serve", daemon=True
            )
            with self._lock:
                self._threads.add(thread)
            try:
                start_thread(thread)
            except ResourceShortage as error:  # a limit of threads: the other side tries again
                logger.warning("a connection was turned away: %s", error)
                with self._lock:
                    self._threads.discard(thread)
                connection.close()
                self._room.release()
                self._closing.wait(_AFTER_ERROR_S)

    def _serve(self, connection: socket.socket) -> None:
        # Of a stranger nothing is known but that it holds one of few threads.
        short = min(self._timeouts.silence, self._timeouts.connect)
        link = self._links.add(Link(connection, replace(self._timeouts, silence=short)))
        try:
            if self._talk(link):
                return  # somebody else's from now on
            self._links.drop(link)
        except PeerError as error:
            logger.info("%s", error)
            self._links.drop(link)
        except Exception:  # the border of this thread: one connection failed, others go on
            logger.exception("serving %s failed", link.host)
            self._links.drop(link)
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())
            self._room.release()

    def _talk(self, link: Link) -> bool:
        table = admit(link, self._table, self._host)
        link.grant(self._timeouts)
        message, size = link.receive()
        if isinstance(message, Offer):
            self._receive(link, table, message, size)
        elif isinstance(message, Join) and not size:
            self._links.release(link)
            if self._join(link):
                return True
            link.send(refused(Refusal.NOT_LEADER, f"{self._host} does not lead this attempt"))
            link.finish()
        else:
            raise PeerError(f"{link.host} began with {message.kind}.", host=link.host)
        return False

    def _receive(self, link: Link, table: HostTable, offer: Offer, size: int) -> None:
        if not self._receivers.acquire(blocking=False):
            link.send(refused(Refusal.BUSY, f"{self._host} receives {RECEIVERS} copies already"))
            link.finish()
            return
        try:
            receiver = CopyReceiver(
                link, self._store, attempt_id=table.attempt_id, release=self._receivers.release
            )
        except ResourceShortage as error:
            self._receivers.release()
            link.send(refused(Refusal.BUSY, f"{self._host} cannot receive a copy now: {error}"))
            link.finish()
            return
        receiver.run(offer, size)


def _listen(address: str, port: int) -> socket.socket:
    if port:
        try:
            return _listen_at(address, port)
        except OSError as error:
            logger.warning("port %d is not free any more: %s", port, error)
    try:
        for _ in range(_TRIES):
            lasting = _lasting_port()
            with suppress(OSError):
                return _listen_at(address, lasting)
        return _listen_at(address, 0)
    except OSError as error:
        raise ConfigError(
            f"cannot listen for the agents of other hosts at {address or 'any address'}: {error}.",
            hint="RESILIENCY_PEER_ADDRESS must be an address of this host.",
        ) from error


def _lasting_port() -> int:
    """One that no outgoing connection gets, so that the next agent can listen there; 0 if there is none.

    Connections of training may last as long as the job.
    """
    try:
        lowest = int(_OUTGOING_PORTS.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0
    last = min(lowest, _LAST_PORT) - 1
    return random.randint(_FIRST_PORT, last) if last >= _FIRST_PORT else 0  # noqa: S311


def _listen_at(address: str, port: int) -> socket.socket:
    if not address:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        return socket.create_server(("", port), family=family, backlog=_MOST_UNACCEPTED, dualstack_ipv6=both)
    family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server((str(where[0]), port), family=family, backlog=_MOST_UNACCEPTED)
