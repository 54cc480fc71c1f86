# SPDX-License-Identifier: Apache-2.0
"""One start of a job on hosts of a cluster."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Sequence

from resiliency.testing import warm
from resiliency.testing.cluster.commands import WAIT_S, Words


class ClusterJob:
    """One start of a job: a process for each rank."""

    def __init__(self, words: Words, ranks: Sequence[warm.Process], since: int) -> None:
        self._words = words
        self._ranks = list(ranks)
        self._since = since

    @property
    def lines(self) -> list[str]:
        """What ranks and agents of the cluster wrote since this start."""
        return self._words.lines[self._since :]

    def wait_for_line(self, pattern: str, *, count: int = 1, timeout: float = WAIT_S) -> re.Match[str]:
        """Wait until `count` lines contain `pattern`; return the match in the last of them.

        Raises:
            TimeoutError: they did not come in time.
            EOFError: all ranks ended without them.
        """
        return self._words.wait_for_line(
            pattern, count=count, timeout=timeout, since=self._since, ended=lambda: not self.is_alive
        )

    @property
    def is_alive(self) -> bool:
        """Whether any rank runs."""
        return any(rank.poll() is None for rank in self._ranks)

    def pid(self, rank: int) -> int:
        return self._ranks[rank].pid

    def wait(self, timeout: float = WAIT_S) -> list[int]:
        """Exit codes of all ranks, minus the signal for those that were killed.

        Raises:
            TimeoutError: a rank still runs.
        """
        deadline = time.monotonic() + timeout
        codes = []
        for number, rank in enumerate(self._ranks):
            try:
                codes.append(rank.wait(max(0.0, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                text = f"rank {number} still runs after {timeout:g} s.\n{self._words.tail()}"
                raise TimeoutError(text) from None
        self._words.drain()
        return codes

    def end(self) -> None:
        """SIGKILL the ranks that still run, as a launcher does when one of them failed; idempotent."""
        for rank in self._ranks:
            rank.kill()
        for rank in self._ranks:
            rank.wait(WAIT_S)

    @property
    def losses(self) -> dict[int, str]:
        """Loss of each step that rank 0 of `resiliency.testing.cluster.training` has done in this start."""
        self._words.drain()
        found = (re.fullmatch(r"rank 0 step (\d+) loss (\S+)", line) for line in self.lines)
        return {int(match[1]): match[2] for match in found if match}

    def restored(self) -> tuple[int, list[str]]:
        """The step that all ranks of `resiliency.testing.cluster.training` began with, and the tier of each.

        Raises:
            AssertionError: they do not say the same step.
        """
        pattern = r"rank (\d+) restored (\d+) (\S+)"
        self.wait_for_line(pattern, count=len(self._ranks))
        said = sorted({match.groups() for line in self.lines if (match := re.fullmatch(pattern, line))})
        assert len({step for _, step, _ in said}) == 1, f"ranks restored different steps: {said}"
        tiers = {int(rank): tier for rank, _, tier in said}
        return int(said[0][1]), [tiers[rank] for rank in range(len(self._ranks))]


def identity_of(node: int, local: int, hosts: int, per_host: int) -> dict[str, str]:
    """What torchrun would tell a rank of itself."""
    numbers = {
        "RANK": node * per_host + local,
        "LOCAL_RANK": local,
        "GROUP_RANK": node,
        "WORLD_SIZE": hosts * per_host,
        "LOCAL_WORLD_SIZE": per_host,
        "TORCHELASTIC_RESTART_COUNT": 0,
    }
    return {name: str(number) for name, number in numbers.items()}
