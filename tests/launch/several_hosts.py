# SPDX-License-Identifier: Apache-2.0
"""What the launchers of several hosts of one job say together."""

from __future__ import annotations

import re

from resiliency.testing.processes import Command
from tests.waiting import wait_until

from .conftest import WAIT


def rank_of(host: Command, attempt: int) -> int:
    match = host.wait_for_line(rf"rank (\d) attempt {attempt} pid \d+ ready", timeout=WAIT)
    return int(match[1])


def together(*hosts: Command) -> tuple[int, list[int]]:
    """The attempt that runs on all of these hosts, and their ranks in it.

    Where fewer hosts are enough, the others begin without one that comes late, and another attempt follows.
    """

    def look() -> tuple[int, list[int]] | None:
        said = [re.findall(r"rank (\d) attempt (\d+) pid \d+ ready", host.output) for host in hosts]
        newest = [found[-1] if found else None for found in said]
        if None in newest or len({attempt for _, attempt in newest}) > 1:
            return None
        ranks = [int(rank) for rank, _ in newest]
        return (int(newest[0][1]), ranks) if sorted(ranks) == list(range(len(hosts))) else None

    return wait_until(look, "the hosts do not run together", timeout=WAIT)
