# SPDX-License-Identifier: Apache-2.0
"""Which kubelets are silent, by the leases that they renew each 10 s.

The Ready condition says less.  It turns Unknown 50 s after a kubelet's last renewal, too late for a job that
waits, and after an outage of the API server it is Unknown for living nodes until their kubelets renew.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from supervisor.orchestrators.gke.client import LEASES, Api, Object
from supervisor.orchestrators.gke.names import seconds_of
from supervisor.policy.silence import is_correlated
from supervisor.policy.thresholds import Thresholds

#: Namespace of the leases that kubelets renew.
NODE_LEASES = "kube-node-lease"
#: A list of all leases is good for so long: many pods may be asked about at once.
LISTED_S = 1.0


@dataclass(frozen=True, kw_only=True)
class _Listed:
    """Ages of all leases, in seconds by the server's clock, and when they were listed."""

    ages: dict[str, float]
    at: float


class Kubelets:
    """Signs of life of all nodes.

    Args:
        silent_s: a kubelet that has not renewed its lease for that long is silent.
        served_s: what an old lease says counts only where the API server has answered for that long; before,
            a living kubelet may not have got through either.
        served_for: seconds for which it has answered this process without a gap.
    """

    def __init__(
        self, api: Api, *, silent_s: float, served_s: float, served_for: Callable[[], float]
    ) -> None:
        self._api, self._silent_s, self._served_s = api, silent_s, served_s
        self._served_for = served_for
        self._listed: _Listed | None = None

    async def age(self, node: str) -> float | None:
        """Seconds since a node's lease was renewed; None where it has none."""
        lease = await self._api.try_get(LEASES, node, NODE_LEASES)
        return self._age(lease) if lease is not None else None

    async def is_silent(self, node: str) -> bool:
        """Whether a kubelet is silent; of many that fell silent at once none is believed to be.

        Raises:
            ApiError: their leases cannot be listed.
        """
        if self._served_for() < self._served_s:
            return False
        ages = await self._ages()
        age = ages.get(node, 0.0)
        if age < self._silent_s:
            return False
        silent = [each for each in ages.values() if each >= self._silent_s]
        with_it = sum(abs(each - age) < self._silent_s for each in silent)
        limits = Thresholds()
        # Those that are silent for longer are hosts that were lost before.
        hosts = len(ages) - len(silent) + with_it
        return not is_correlated(
            with_it, hosts, share=limits.silence_share, at_least=limits.silence_min_hosts
        )

    async def _ages(self) -> dict[str, float]:
        if self._listed is None or time.monotonic() - self._listed.at >= LISTED_S:
            found, _ = await self._api.list(LEASES, NODE_LEASES)
            known = {lease["metadata"]["name"]: self._age(lease) for lease in found}
            ages = {name: age for name, age in known.items() if age is not None}
            self._listed = _Listed(ages=ages, at=time.monotonic())
        return self._listed.ages

    def _age(self, lease: Object) -> float | None:
        renewed = (lease.get("spec") or {}).get("renewTime")
        return self._api.now() - seconds_of(renewed) if renewed else None
