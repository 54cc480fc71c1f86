# SPDX-License-Identifier: Apache-2.0
"""The network between the hosts of a cluster: every connection between two of them can be cut and healed.

Connections that the Python code of a host opens to the address of another go through a relay in the
process of the test.  While two hosts are apart, it passes no byte between them and breaks nothing,
like a switch that went dark: who waits, waits for its own deadline.  Collectives of torch do not pass here.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

_PIECE_BYTES = 64 << 10
_HEADER_BYTES = 200


@dataclass(frozen=True)
class Route:
    """How the processes of one host reach the others."""

    host: str
    address: str
    relay_port: int

    def leads_to(self, address: object) -> bool:
        """Whether this is the address of another host of a cluster."""
        return (
            isinstance(address, tuple)
            and str(address[0]).startswith("127.0.0.")
            and address[0] not in ("127.0.0.1", self.address)
        )


class Network:
    """The relay: threads of this process.

    Args:
        host_at: name of the host that has an address.
    """

    def __init__(self, host_at: Callable[[str], str]) -> None:
        self._host_at = host_at
        self._apart: set[frozenset[str]] = set()
        self._changed = threading.Condition()
        self._closed = False
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        #: Bytes passed on from one host to another.
        self.passed: dict[tuple[str, str], int] = {}
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port = int(self._listener.getsockname()[1])
        self._spawn(self._accept)

    def cut(self, one: str, other: str) -> None:
        with self._changed:
            self._apart.add(frozenset((one, other)))

    def heal(self) -> None:
        with self._changed:
            self._apart.clear()
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            for end in (self._listener, *self._open):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)  # wakes who waits in it; close alone does not
        for thread in self._threads:
            thread.join(10)
        self._listener.close()

    def _spawn(self, run: Any, *arguments: object) -> None:
        thread = threading.Thread(target=run, args=arguments, name="cluster-network", daemon=True)
        with self._changed:
            if not self._closed:
                self._threads.append(thread)
                thread.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                end, _ = self._listener.accept()
                self._spawn(self._relay, end)

    def _relay(self, near: socket.socket) -> None:
        """One connection, in a thread that carries its bytes there; another carries them back."""
        far = socket.socket()
        with near, far, suppress(OSError, ValueError, KeyError):
            if not self._admit(near, far):
                return
            source, address, port = json.loads(near.recv(_HEADER_BYTES, socket.MSG_WAITALL))
            target = self._host_at(address)
            if not self._wait_for_link(source, target):
                return
            far.connect((address, port))
            back = threading.Thread(
                target=self._pump, args=(far, near, target, source), name="cluster-network", daemon=True
            )
            back.start()
            self._pump(near, far, source, target)
            back.join()
        with self._changed:
            self._open -= {near, far}

    def _admit(self, *ends: socket.socket) -> bool:
        with self._changed:
            self._open.update(ends)
            return not self._closed

    def _pump(self, source: socket.socket, target: socket.socket, name: str, other: str) -> None:
        with suppress(OSError):
            while data := source.recv(_PIECE_BYTES):
                if not self._wait_for_link(name, other):
                    break
                target.sendall(data)
                self.passed[name, other] = self.passed.get((name, other), 0) + len(data)
        # The news of an end does not pass a cut either.
        if self._wait_for_link(name, other):
            for end, how in ((target, socket.SHUT_WR), (source, socket.SHUT_RD)):
                with suppress(OSError):
                    end.shutdown(how)

    def _wait_for_link(self, one: str, other: str) -> bool:
        """Wait until the two can talk; False when the cluster is closed."""
        pair = frozenset((one, other))
        with self._changed:
            self._changed.wait_for(lambda: self._closed or pair not in self._apart)
            return not self._closed


def install(route: Route) -> None:
    """Send this process's connections to other hosts through the relay, from now on."""
    connect = socket.socket.connect

    def routed(self: socket.socket, address: Any) -> None:
        if not route.leads_to(address):
            connect(self, address)
            return
        connect(self, ("127.0.0.1", route.relay_port))
        self.sendall(json.dumps([route.host, *address[:2]]).encode().ljust(_HEADER_BYTES))

    # The kernel's own ways to cut a network need privileges that test machines do not give.
    socket.socket.connect = routed  # type: ignore[method-assign, assignment]
