# SPDX-License-Identifier: Apache-2.0
"""What a bridge is told first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

#: Longest line between a bridge and who started it: thousands of hosts with some dozens of processes each.
LINE_BYTES = 1 << 26


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a bridge is for.

    Attributes:
        address: of the cluster, as `ray.init` takes it.
        namespace: of the actors, one for each fleet.
        fleet: marks the fleet's processes.
        resources: of a host: ``CPU``, ``GPU`` and others by name.
        nodes: where earlier bridges saw the hosts.
    """

    address: str
    namespace: str
    fleet: str
    hosts: Sequence[str]
    resources: Mapping[str, float]
    nodes: Mapping[str, str]


def namespace_of(fleet: str) -> str:
    """Of the actors of the fleet with this state directory."""
    return f"resiliency-{Path(fleet).name}-{sha256(fleet.encode()).hexdigest()[:12]}"
