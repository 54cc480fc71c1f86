# SPDX-License-Identifier: Apache-2.0
"""The tiers that a restore may read from, and the steps that there are to choose from."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from resiliency.checkpoint.locations import Place, ShardLocation, ShardRequest
from resiliency.checkpoint.recovery.planner import Assignment, RestorePlan, each_plan, plans


class Tier(str, Enum):
    """Where a state came from; of several, the last of these."""

    NONE = "none"
    MEMORY = "memory"
    LOCAL = "local"  # this host's own disk
    PEERS = "peers"  # the disks of other hosts
    PERSISTENT = "persistent"  # storage that all hosts see


@dataclass(frozen=True, kw_only=True)
class Source:
    """A step that could be restored."""

    step: int
    tier: Tier
    save_id: str = ""  # two attempts may have come to one step differently
    run_id: str = ""


#: What one would rather read from first.
_COST = tuple(Tier)
_TIERS = {
    Place.MEMORY: Tier.MEMORY,
    Place.LOCAL: Tier.LOCAL,
    Place.REPLICA: Tier.LOCAL,
    Place.PERSISTENT: Tier.PERSISTENT,
}


def tier_of_assignment(assignment: Assignment) -> Tier:
    return _TIERS[assignment.location.place] if assignment.sender is None else Tier.PEERS


def tier_of(plan: RestorePlan) -> Tier:
    """The costliest place that any rank takes its shard from."""
    return max(map(tier_of_assignment, plan.assignments), key=_COST.index)


def sources_of(
    needs: Sequence[ShardRequest], locations: Iterable[ShardLocation], saves: Iterable[Source]
) -> list[Source]:
    """Best first: newest, and of one step the quickest.

    Args:
        saves: on storage that all hosts see, also those that another number of ranks saved.
    """
    found = dict.fromkeys(saves)
    left = list(locations)
    while made := plans(needs, left):
        used: set[tuple[str, Place]] = set()
        for plan in made:
            found[Source(step=plan.step, tier=tier_of(plan), save_id=plan.save_id, run_id=plan.run_id)] = None
            used.update((plan.save_id, assignment.location.place) for assignment in plan.assignments)
        left = [location for location in left if (location.save_id, location.place) not in used]
    return sorted(found, key=lambda source: (-source.step, _COST.index(source.tier), source.save_id))


def nearest_on_hosts(
    needs: Sequence[ShardRequest], locations: Iterable[ShardLocation], bad: Collection[ShardLocation] = ()
) -> dict[int, Tier]:
    """Steps that hosts hold between them, newest first, and the nearest place of each.

    Storage that all see is left out.
    """
    own = [location for location in locations if location.place is not Place.PERSISTENT]
    found: dict[int, Tier] = {}
    for plan in each_plan(needs, own, bad=bad):
        found.setdefault(plan.step, tier_of(plan))
    return found
