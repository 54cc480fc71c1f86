# SPDX-License-Identifier: Apache-2.0
"""Ends what a host's actor has started, once the actor has ended: a host is its actor.

    python -m supervisor.orchestrators.ray.keeper FLEET HOST

Its standard input is a pipe that only the actor holds open.  Without it launchers would train on, on a node
whose resources Ray gives to the next actor.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

from supervisor.orchestrators.processes import kill_all, marked_processes

#: Longer than a process gives its memory back.
_END_S = 60.0


def main(argv: Sequence[str]) -> None:
    """Wait for the end of the actor, then kill the processes of its host."""
    fleet, host = argv
    if os.fork():  # Ray kills the children of a worker that ends
        os._exit(0)
    sys.stdin.buffer.read()
    end = time.monotonic() + _END_S
    while time.monotonic() < end:
        left = [one for one in marked_processes(fleet) if one.mark.host == host]
        if not left:
            return
        kill_all(left)
        time.sleep(0.05)


if __name__ == "__main__":
    main(sys.argv[1:])
