# SPDX-License-Identifier: Apache-2.0
"""Ends what a host's actor has started, once the actor has ended: a host is its actor.

    python -m supervisor.orchestrators.ray.keeper FLEET HOST

Its standard input is a pipe that only the actor holds open.  Without it launchers would train on, on a node
whose resources Ray gives to the next actor.  A host has one keeper on a machine: the next one, and so the
next actor, begins when it has ended, or what that actor starts would be killed too.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Sequence
from hashlib import sha256

from supervisor.orchestrators.processes import kill_all, marked_processes

#: Longer than a process gives its memory back.
_END_S = 60.0
#: For the start of a keeper, whose predecessor may take its time.
KEEPER_S = _END_S + 30.0


def main(argv: Sequence[str]) -> None:
    """Wait for the end of the actor, then kill the processes of its host."""
    fleet, host = argv
    alone = _be_the_only_one(f"{fleet}|{host}")
    if os.fork():  # Ray kills the children of a worker that ends
        os._exit(0)
    sys.stdin.buffer.read()
    end = time.monotonic() + _END_S
    while time.monotonic() < end:
        left = [one for one in marked_processes(fleet) if one.mark.host == host]
        if not left:
            break
        kill_all(left)
        time.sleep(0.05)
    alone.close()


def _be_the_only_one(name: str) -> socket.socket:
    """A name of the machine's that ends with its last holder, unlike a file.

    Raises:
        OSError: another process still has it.
    """
    holder = socket.socket(socket.AF_UNIX)
    end = time.monotonic() + KEEPER_S - 10.0
    while True:
        try:
            holder.bind(b"\0resiliency-keeper-" + sha256(name.encode()).hexdigest()[:32].encode())
            return holder
        except OSError:
            if time.monotonic() >= end:
                raise
            time.sleep(0.05)


if __name__ == "__main__":
    main(sys.argv[1:])
