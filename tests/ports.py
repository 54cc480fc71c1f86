# SPDX-License-Identifier: Apache-2.0
"""Ports on which a test has something serve, chosen before that starts."""

from __future__ import annotations

import os
import random
import socket
from contextlib import suppress
from pathlib import Path

_GIVEN_AWAY = Path("/proc/sys/net/ipv4/ip_local_port_range")
#: Ports that this process has chosen, which may not be served yet.
_chosen: set[int] = set()


def free_ports(count: int) -> list[int]:
    """Ports that nobody serves, and that the system gives to nobody who asks for just any port.

    One that it gives away could be taken before the test serves there; and a client that keeps trying while
    nobody serves could get it for its own end, and connect to itself.
    """
    some = _range_of_this_process()
    found: list[int] = []
    for port in random.sample(some, len(some)):
        if _is_free(port):
            found.append(port)
        if len(found) == count:
            _chosen.update(found)
            return found
    raise AssertionError(f"this machine has no {count} free ports")


def free_port() -> int:
    return free_ports(1)[0]


def free_row(count: int) -> int:
    """The first of `count` such ports in a row, as the hosts of a job file have them."""
    some = _range_of_this_process()
    for first in random.sample(some, len(some)):
        row = range(first, first + count)
        if row[-1] in some and all(map(_is_free, row)):
            _chosen.update(row)
            return first
    raise AssertionError(f"this machine has no {count} free ports in a row")


def _is_free(port: int) -> bool:
    if port in _chosen:
        return False
    with suppress(OSError), socket.create_server(("127.0.0.1", port)):
        return True
    return False


def _range_of_this_process() -> range:
    """Every process of pytest has its own: a port that is free now is served a while later."""
    first, last = 10_000, 20_000  # above these, checkpoint agents choose theirs
    lowest = int(_GIVEN_AWAY.read_text().split()[0])
    if first < lowest < last:
        last = lowest
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    index = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    size = (last - first) // processes
    if len(_chosen) > size // 2:  # those from long ago are free again, or are seen to be served
        _chosen.clear()
    return range(first + index * size, first + (index + 1) * size)
