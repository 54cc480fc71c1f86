# SPDX-License-Identifier: Apache-2.0
"""Ports on which a test has something serve, chosen before that starts."""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from pathlib import Path

_GIVEN_AWAY = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_ports(count: int) -> list[int]:
    """Ports that nobody serves, and that the system gives to nobody who asks for just any port.

    One that it gives away could be taken before the test serves there; and a client that keeps trying while
    nobody serves could get it for its own end, and connect to itself.
    """
    lowest, highest = map(int, _GIVEN_AWAY.read_text().split())
    some = range(10_000, 20_000)  # above these, checkpoint agents choose theirs
    kept = [port for port in some if not lowest <= port <= highest] or some
    found: list[int] = []
    for port in random.sample(kept, len(kept)):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
        if len(found) == count:
            return found
    raise AssertionError(f"this machine has no {count} free ports")


def free_port() -> int:
    return free_ports(1)[0]
