# SPDX-License-Identifier: Apache-2.0
"""Connections between the launchers of one job: a launcher that has ended is known at once.

Each launcher listens at a port, and holds a connection to some launchers of other hosts.  Nothing is sent on
it but a token, by which a launcher knows that the other end is the one that it means.  When a process ends,
its kernel closes its connections, and refuses new ones to the port.  Both together are certain evidence that
the launcher has ended.  Nothing else is: a launcher that is stopped or slow closes nothing; a host that is
cut off or without power refuses nothing, and is found by its missing signs of life.

Invariant: `on_gone` is called only for a launcher that has shown its token, once, from the thread in here.
"""

from __future__ import annotations

import errno
import logging
import select
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from resiliency.forks import call_in_child
from resiliency.wake_pipe import WakePipe

logger = logging.getLogger(__name__)

#: Launchers that one launcher watches, by rank behind its own: a loss of that many neighbours at once leaves
#: the last of them to the signs of life.
WATCHED = 8
#: Connections of others that are held; beyond that, new ones are closed.
_MOST_ACCEPTED = 256
_CONNECT_S = 2.0
#: How often, and how long after the last time, the port of a launcher is asked that closed its connection.
_LOOKS, _LOOK_S = 50, 0.02
#: Pause where this process has no descriptor for one connection more.
_FULL_S = 0.2
_TOKEN_BYTES = 32


@dataclass(frozen=True, kw_only=True)
class PeerLauncher:
    """Another launcher.  `place` is what its own `LauncherLinks.place` says."""

    node: Any
    place: str


@dataclass
class _Watch:
    peer: PeerLauncher
    address: tuple[str, int]
    token: bytes
    received: bytes = b""
    #: How often its port may still be asked, since a connection on which it showed its token was closed.
    looks_left: int = 0


class LauncherLinks:
    """Listens for other launchers, and watches some of them.

    Args:
        address: of this host, where the others reach it.
        on_gone: called with the node of a launcher that has ended.
    Raises:
        OSError: nothing can listen there.
    """

    def __init__(self, address: str, on_gone: Callable[[Any], None]) -> None:
        self._on_gone = on_gone
        self._token = uuid.uuid4().hex.encode()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._server = socket.create_server((address, 0), family=family, backlog=_MOST_ACCEPTED)
        self._server.setblocking(False)
        host, port = self._server.getsockname()[:2]
        #: What the other launchers are told.
        self.place = f"{host}|{port}|{self._token.decode()}"
        self._wake = WakePipe()
        self._lock = threading.Lock()
        self._wanted: Sequence[PeerLauncher] | None = None
        self._closed = False
        self._accepted: dict[int, socket.socket] = {}
        self._watches: dict[int, tuple[socket.socket, _Watch]] = {}
        call_in_child(self._leave_in_child)
        self._thread = threading.Thread(target=self._run, name="launcher-links", daemon=True)
        self._thread.start()

    def watch(self, peers: Sequence[PeerLauncher]) -> None:
        """Watch these instead of those before; returns at once."""
        with self._lock:
            self._wanted = tuple(peers)
        self._wake.wake()

    def close(self) -> None:
        """Idempotent.  The others see it as the end of this launcher."""
        with self._lock:
            self._closed = True
        self._wake.wake()
        self._thread.join(2 * _CONNECT_S)

    # ------------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        while True:
            with self._lock:
                wanted, self._wanted, closed = self._wanted, None, self._closed
            if closed:
                break
            if wanted is not None:
                self._replace(wanted)
            poll = select.poll()
            for fd in (self._wake.fileno(), self._server.fileno(), *self._accepted, *self._watches):
                poll.register(fd, select.POLLIN)
            for fd, _ in poll.poll():
                if fd == self._wake.fileno():
                    self._wake.clear()
                elif fd == self._server.fileno():
                    self._accept()
                elif fd in self._accepted:
                    self._accepted.pop(fd).close()  # it has ended, or says what nobody asked for
                else:
                    self._look(fd)
        self._drop_all()
        self._server.close()
        self._wake.close()

    def _replace(self, wanted: Sequence[PeerLauncher]) -> None:
        for connection, _ in self._watches.values():
            connection.close()
        self._watches.clear()
        for peer in wanted:
            if self._closed:  # hosts that are cut off would hold up the end of this launcher, one by one
                return
            host, port, token = peer.place.split("|")
            self._connect(_Watch(peer=peer, address=(host, int(port)), token=token.encode()))

    def _connect(self, watch: _Watch) -> bool:
        """Whether the launcher's kernel took the connection, or cannot be asked; False: it refused."""
        watch.received = b""
        try:
            connection = socket.create_connection(watch.address, timeout=_CONNECT_S)
        except ConnectionRefusedError:
            return False
        except OSError as error:
            logger.debug("launcher at %s is not watched: %s", watch.address[0], error)
            return True
        connection.setblocking(False)
        self._watches[connection.fileno()] = connection, watch
        return True

    def _accept(self) -> None:
        try:
            connection, _ = self._server.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):  # it stays where it is, and the port readable
                time.sleep(_FULL_S)
            return
        with suppress(OSError):
            if len(self._accepted) >= _MOST_ACCEPTED:
                connection.close()
                return
            connection.setblocking(False)
            self._accepted[connection.fileno()] = connection
            connection.send(self._token)

    def _look(self, fd: int) -> None:
        connection, watch = self._watches[fd]
        try:
            data = connection.recv(_TOKEN_BYTES + 1)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        watch.received += data
        if data and watch.token.startswith(watch.received):
            return
        del self._watches[fd]
        connection.close()
        if data:
            return  # another program is where the launcher was meant to be
        if watch.received == watch.token:
            watch.looks_left = _LOOKS
        # A kernel closes the sockets of a process one by one: its port may take one connection more.
        if watch.looks_left > 0:
            watch.looks_left -= 1
            time.sleep(_LOOK_S)
            if not self._connect(watch):
                self._on_gone(watch.peer.node)

    def _drop_all(self) -> None:
        for connection in (*self._accepted.values(), *(one for one, _ in self._watches.values())):
            connection.close()
        self._accepted.clear()
        self._watches.clear()

    def _leave_in_child(self) -> None:
        """A process that was forked from the launcher would keep the connections open beyond its end."""
        self._drop_all()
        self._server.close()
