# SPDX-License-Identifier: Apache-2.0
"""Listens for the agents of other hosts of the session; all others are turned away.

One thread accepts, and each connection gets one of its own for as long as it has work: there are
never more than `CONNECTIONS`, and never more than `RECEPTIONS` copies are received at once.  Who
wants to talk about completion is handed to the one thread that does that for all.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

from resiliency.checkpoint.peers.counters import Counters
from resiliency.checkpoint.peers.frames import Link, Links, Patience
from resiliency.checkpoint.peers.handshake import admit
from resiliency.checkpoint.peers.messages import Join, Offer, Refusal, refused
from resiliency.checkpoint.peers.reception import Reception
from resiliency.checkpoint.peers.replica_store import ReplicaStore
from resiliency.checkpoint.peers.table import PeerTable
from resiliency.errors import ConfigError, PeerError

logger = logging.getLogger(__name__)

CONNECTIONS = 64
RECEPTIONS = 16
_BACKLOG = 1024
#: Out of descriptors, for example: the next try comes after some have been closed.
_AFTER_ERROR_S = 0.1


class Server:
    """Serves until it is closed.

    Args:
        port: to listen at if it is free; else, or with 0, any that is.
        table: the current table; before there is one, everybody is turned away.
        join: takes over a link for seals and completions; False if this host does not lead.
    Raises:
        ConfigError: cannot listen at `address`.
    """

    def __init__(
        self,
        host: str,
        address: str,
        store: ReplicaStore,
        *,
        table: Callable[[], PeerTable | None],
        join: Callable[[Link], bool],
        counters: Counters,
        patience: Patience,
        port: int = 0,
    ) -> None:
        self._host = host
        self._store = store
        self._table = table
        self._join = join
        self._counters = counters
        self._patience = patience
        self._links = Links()
        self._room = threading.BoundedSemaphore(CONNECTIONS)
        self._receptions = threading.BoundedSemaphore(RECEPTIONS)
        self._threads: set[threading.Thread] = set()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._listener = _listen(address, port)
        self.port: int = self._listener.getsockname()[1]
        self._acceptor = threading.Thread(target=self._accept, name="resiliency-peer-accept", daemon=True)
        self._acceptor.start()

    def close(self, timeout: timedelta = timedelta(seconds=10)) -> None:
        """End all connections and wait for their threads, `timeout` in all."""
        deadline = time.monotonic() + timeout.total_seconds()
        self._closing.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the acceptor
        self._links.cut_all()
        self._acceptor.join(timeout.total_seconds())
        self._listener.close()
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0.0))

    def _accept(self) -> None:
        while True:
            # Who comes while all threads are busy waits in the backlog, or gives up.
            self._room.acquire()
            try:
                connection, _ = self._listener.accept()
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
                thread.start()
            except RuntimeError as error:  # a limit of threads: the other side tries again
                logger.warning("a connection was turned away: %s", error)
                with self._lock:
                    self._threads.discard(thread)
                connection.close()
                self._room.release()
                self._closing.wait(_AFTER_ERROR_S)

    def _serve(self, connection: socket.socket) -> None:
        link = self._links.add(Link(connection, self._patience))
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
        try:
            table = admit(link, self._table, self._host)
        except PeerError:
            self._counters.add("strangers")
            raise
        message, size = link.receive()
        if isinstance(message, Offer):
            self._receive(link, table, message, size)
        elif isinstance(message, Join) and not size:
            self._links.release(link)
            if self._join(link):
                return True
            link.send(refused(Refusal.NOT_LEADER, f"{self._host} does not lead this session"))
            link.finish()
        else:
            raise PeerError(f"{link.host} began with {message.kind}.", host=link.host)
        return False

    def _receive(self, link: Link, table: PeerTable, offer: Offer, size: int) -> None:
        if not self._receptions.acquire(blocking=False):
            link.send(refused(Refusal.BUSY, f"{self._host} receives {RECEPTIONS} copies already"))
            link.finish()
            return
        try:
            reception = Reception(
                link, self._store, self._counters, session=table.session, release=self._receptions.release
            )
        except RuntimeError as error:
            self._receptions.release()
            link.send(refused(Refusal.BUSY, f"{self._host} cannot receive a copy now: {error}"))
            link.finish()
            return
        reception.run(offer, size)


def _listen(address: str, port: int) -> socket.socket:
    if port:
        try:
            return _listen_at(address, port)
        except OSError as error:
            logger.warning("port %d is not free any more, others will not find this host: %s", port, error)
    try:
        return _listen_at(address, 0)
    except OSError as error:
        raise ConfigError(
            f"cannot listen for the agents of other hosts at {address or 'any address'}: {error}.",
            hint="RESILIENCY_PEER_ADDRESS must be an address of this host.",
        ) from error


def _listen_at(address: str, port: int) -> socket.socket:
    if not address:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        return socket.create_server(("", port), family=family, backlog=_BACKLOG, dualstack_ipv6=both)
    family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server((str(where[0]), port), family=family, backlog=_BACKLOG)
