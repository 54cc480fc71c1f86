# SPDX-License-Identifier: Apache-2.0
"""Which spare can work for a job, and which of these takes a lost host's place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

#: A host that was lost is a worse spare for so long: a day shows whether it is lost again.
REMEMBERED_S = 86_400.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A host as a job sees it.

    Attributes:
        workers: ranks that it runs.
        blocks: failure domains below its zone, from small (rack) to large; none where it has no labels.
        zone: empty where it has no label.
        losses: how often it was lost within `REMEMBERED_S`.
    """

    id: str
    workers: int
    blocks: tuple[str, ...] = ()
    zone: str = ""
    losses: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class JobShape:
    """What a spare must be like to work for a job.

    A job has the same number of ranks on each host: a spare with fewer has no room for them, and one with
    more is not whole without the others.  A job whose hosts are all in one zone stays there: its volumes may
    be bound to the zone, and each of its collectives would cross to the other one.  A spare without a label
    may be in any zone: labels may come a moment after the host.

    Attributes:
        workers: ranks on each host; 0 where the job has no host.
        zone: that it must be in; empty: any.
    """

    workers: int
    zone: str

    @classmethod
    def of(cls, hosts: Sequence[Place]) -> JobShape:
        """The shape of a job with `hosts`, of which one like the first is wanted."""
        zones = {host.zone for host in hosts if host.zone}
        return cls(workers=hosts[0].workers if hosts else 0, zone=zones.pop() if len(zones) == 1 else "")

    def refuse(self, *, workers: int, zone: str) -> str:
        """Why a spare cannot work for the job; empty if it can."""
        if self.workers and workers != self.workers:
            return f"{workers} workers per host instead of {self.workers}"
        if self.zone and zone and zone != self.zone:
            return f"zone {zone} instead of {self.zone}"
        return ""

    def refuse_all(self, spares: Iterable[Place]) -> str:
        """The reasons of those of `spares` that cannot, each with how many it holds for."""
        found = Counter(self.refuse(workers=spare.workers, zone=spare.zone) for spare in spares)
        return ", ".join(f"{why} ({count})" for why, count in sorted(found.items()) if why)


def choose_spare(lost: Place, others: Iterable[Place], spares: Iterable[Place]) -> Place | None:
    """The spare to use instead of `lost` beside `others`; None if none can be.

    One that was lost lately comes last: it costs the job another swap.  Collectives run at the speed of the
    largest domain that they cross, so the job's zones come next.  Then the lost host's rack is left where it
    can be: what took that host (a switch, a power supply) may take its neighbours.  Then the job's blocks
    count, large ones first.  Equal spares are told apart by id, so that a decision can be repeated.
    """
    hosts = [lost, *others]
    shape = JobShape.of(hosts)
    zones = Counter(host.zone for host in hosts if host.zone)
    blocks = Counter(block for host in hosts[1:] for block in host.blocks)

    def rank(spare: Place) -> tuple[int, int, bool, list[int], str]:
        near = bool(lost.blocks) and lost.blocks[:1] == spare.blocks[:1]
        # A spare without labels is known to share nothing.
        nearness = [-blocks[block] for block in reversed(spare.blocks)] or [0]
        return spare.losses, -zones[spare.zone], near, nearness, spare.id

    fitting = [
        spare
        for spare in spares
        if spare.id != lost.id and not shape.refuse(workers=spare.workers, zone=spare.zone)
    ]
    return min(fitting, key=rank, default=None)
