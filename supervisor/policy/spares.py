# SPDX-License-Identifier: Apache-2.0
"""Which spare takes a lost host's place: near the job's other hosts, not in the lost host's rack."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A host and the failure domains that it is in, from small (rack) to large (zone)."""

    id: str
    domains: tuple[str, ...] = ()


def choose_spare(
    lost: Place, others: Iterable[Place], spares: Iterable[Place], *, same: str = ""
) -> Place | None:
    """The spare to use instead of `lost` beside `others`; None if there is none.

    Collectives run at the speed of the largest domain that they cross, so the job's own large domains come
    first.  The smallest domain of the lost host comes last: what took that host (a switch, a power supply)
    may take its neighbours.  Equal spares are told apart by id, so that a decision can be repeated.

    Args:
        same: prefix of domains that a spare must share with `lost`, such as ``zone=``; empty is none.
    """
    shared: dict[str, int] = {}
    for other in others:
        for domain in other.domains:
            shared[domain] = shared.get(domain, 0) + 1
    must = {domain for domain in lost.domains if same and domain.startswith(same)}

    def rank(spare: Place) -> tuple[bool, list[int], str]:
        near = bool(lost.domains) and lost.domains[:1] == spare.domains[:1]
        # Large domains first; a spare without labels is known to share nothing.
        nearness = [-shared.get(domain, 0) for domain in reversed(spare.domains)] or [0]
        return near, nearness, spare.id

    fitting = [spare for spare in spares if spare.id != lost.id and must <= set(spare.domains)]
    return min(fitting, key=rank, default=None)
