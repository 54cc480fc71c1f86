# SPDX-License-Identifier: Apache-2.0
"""One host as a process of its own: a peer service that is told what to do through a pipe."""

from __future__ import annotations

from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

from resiliency.checkpoint.replication.hosts import HostTable
from resiliency.checkpoint.replication.service import PeerService
from resiliency.checkpoint.replication.transport.connection import CallDeadline


def serve(connection: Connection, host: str, root: str) -> None:
    """Send the port, then events; obey ("update", file) and ("replicate", step, save id) until the end."""
    timeouts = CallDeadline(
        silence=timedelta(seconds=3), pause=timedelta(seconds=0.1), longest_pause=timedelta(seconds=0.3)
    )
    with PeerService(
        host, Path(root), listen_address="127.0.0.1", on_event=connection.send, timeouts=timeouts
    ) as service:
        connection.send(service.port)
        while True:
            try:
                command, *rest = connection.recv()
            except EOFError:
                return
            if command == "update":
                service.update(HostTable.read(rest[0]))
            else:
                service.replicate(*rest)
