# SPDX-License-Identifier: Apache-2.0
"""A network between two processes that can be cut: connections stay open, and nothing gets through."""

from __future__ import annotations

import select
import socket
import threading

from resiliency.wake_pipe import WakePipe

#: Read at once.
_CHUNK = 1 << 16


class Forwarder:
    """Forwards connections to `port`, unless it is cut.

    Attributes:
        address: to connect to.
    """

    def __init__(self, port: int) -> None:
        self._target = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._cut = self._closed = False
        self._changed = WakePipe()
        self._peers: dict[socket.socket, socket.socket] = {}
        self._thread = threading.Thread(target=self._run, name="forwarder", daemon=True)
        self._thread.start()

    def cut(self) -> None:
        """From here on nothing gets through, new connections neither."""
        self._cut = True
        self._changed.wake()

    def heal(self) -> None:
        self._cut = False
        self._changed.wake()

    def close(self) -> None:
        self._closed = True
        self._changed.wake()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed:
            waiting = [self._changed] if self._cut else [self._changed, self._listener, *self._peers]
            for one in select.select(waiting, [], [])[0]:
                if one is self._changed:
                    self._changed.clear()
                elif one is self._listener:
                    self._accept()
                elif one in self._peers and not self._pass_on(one):
                    for end in (one, self._peers.pop(one)):
                        self._peers.pop(end, None)
                        end.close()
        for end in (self._listener, *self._peers):
            end.close()
        self._changed.close()

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        try:
            far = socket.create_connection(self._target, timeout=5)
        except OSError:
            near.close()
            return
        far.settimeout(None)
        self._peers |= {near: far, far: near}

    def _pass_on(self, source: socket.socket) -> bool:
        """False at the end of either side."""
        try:
            data = source.recv(_CHUNK)
            self._peers[source].sendall(data)
        except OSError:
            return False
        return bool(data)
