# SPDX-License-Identifier: Apache-2.0
"""Hosts that are silent at once: more of them than fail together freeze the fleet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from supervisor.detection.sightings import Output, SeenHost
from supervisor.policy.silence import is_correlated
from supervisor.policy.thresholds import Thresholds
from supervisor.values import Silence


class FleetSilence:
    """Which hosts are silent, and whether they are too many to be believed.

    Args:
        hosts: of the detector, which changes them.
    """

    def __init__(self, limits: Thresholds, hosts: Mapping[str, SeenHost]) -> None:
        self._limits, self._hosts = limits, hosts
        self.silent: set[str] = set()
        self.frozen = False
        self._expected = 0  # hosts that should report, when last weighed

    def weigh(self, time: float) -> list[Output]:
        """Freeze where too many are silent at once; thaw, with fresh time for all, where that has healed."""
        enough = len(self.silent) >= self._limits.silence_min_hosts
        if not (enough or self.frozen):
            return []
        silent = self._unseen_since(time - self._limits.heartbeat_timeout_s)
        self._expected = sum(1 for host in self._hosts.values() if host.is_expected)
        correlated = self._are_many(silent)
        if correlated == self.frozen:
            return []
        self.frozen = correlated
        if not correlated:
            for name in silent:
                host = self._hosts[name]
                host.heard = max(host.heard, time)
        return [Silence(frozen=correlated, silent=len(silent), hosts=self._expected)]

    def doubts(self, asked_at: float) -> list[str]:
        """Silent hosts that no witness has seen since `asked_at`, if they are too many; after `weigh`.

        A witness that finds one host gone may have lost sight of all: what it saw before does not tell.
        """
        if len(self.silent) < self._limits.silence_min_hosts:
            return []
        unseen = self._unseen_since(asked_at)
        return sorted(unseen) if self._are_many(unseen) else []

    def _unseen_since(self, time: float) -> list[str]:
        return [name for name in self.silent if self._hosts[name].seen_alive <= time]

    def _are_many(self, silent: Sequence[str]) -> bool:
        limits = self._limits
        return is_correlated(
            len(silent), self._expected, share=limits.silence_share, at_least=limits.silence_min_hosts
        )

    def value(self) -> Silence:
        """As the controller is told it."""
        return Silence(frozen=self.frozen, silent=len(self.silent), hosts=len(self._hosts))
