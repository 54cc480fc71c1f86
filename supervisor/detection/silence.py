# SPDX-License-Identifier: Apache-2.0
"""Hosts that are silent at once: more of them than fail together freeze the fleet."""

from __future__ import annotations

from collections.abc import Mapping

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

    def weigh(self, time: float) -> list[Output]:
        """Freeze where too many are silent at once; thaw, with fresh time for all, where that has healed."""
        enough = len(self.silent) >= self._limits.silence_min_hosts
        if not (enough or self.frozen):
            return []
        expected = sum(1 for host in self._hosts.values() if host.is_expected)
        timeout = self._limits.heartbeat_timeout_s
        silent = [name for name in self.silent if time - self._hosts[name].seen_alive >= timeout]
        correlated = is_correlated(
            len(silent),
            expected,
            share=self._limits.silence_share,
            at_least=self._limits.silence_min_hosts,
        )
        if correlated == self.frozen:
            return []
        self.frozen = correlated
        if not correlated:
            for name in silent:
                host = self._hosts[name]
                host.heard = max(host.heard, time)
        return [Silence(frozen=correlated, silent=len(silent), hosts=expected)]

    def value(self) -> Silence:
        """As the controller is told it."""
        return Silence(frozen=self.frozen, silent=len(self.silent), hosts=len(self._hosts))
