# SPDX-License-Identifier: Apache-2.0
"""What local tiers hold that a job cannot go on from, and when that forbids to start from scratch.

A whole save of another number of ranks does, for those ranks could go on from it, and so do parts of several
saves, for somebody trained for long.  Then a person decides.  Parts of a single save do not: it may be the
first, which had not ended.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from resiliency.checkpoint.locations import ShardLocation, ShardRequest
from resiliency.checkpoint.recovery.planner import explain_missing
from resiliency.errors import CheckpointError, CheckpointIncomplete, LayoutMismatch


@dataclass(frozen=True, kw_only=True)
class RefusedSaves:
    """What `find_refused_saves` found.

    Attributes:
        why: for people; empty if hosts hold nothing.
        step, ranks: of the newest save that is whole, for so many ranks; 0 if none is.
        saves: of how many saves hosts hold parts.
        world_size: of the job that starts.
    """

    why: str = ""
    step: int = 0
    ranks: int = 0
    saves: int = 0
    world_size: int = 0

    def refusal(self) -> CheckpointError | None:
        """What a job ends with that has nothing else to go on from; None: it may start from scratch."""
        if self.ranks:
            return LayoutMismatch(
                f"the hosts hold a whole checkpoint of {self.ranks} ranks, and this job has"
                f" {self.world_size}: {self.why}",
                hint=f"Start {self.ranks} ranks to go on from step {self.step}.  Only checkpoints of a"
                " persistent tier can be resharded; to start from scratch, name other directories.",
                step=self.step,
                world_size=self.ranks,
            )
        if self.saves > 1:
            return CheckpointIncomplete(
                f"of several saves that the hosts hold none is whole: {self.why}",
                hint="Bring back the hosts with the rest; to start from scratch, name other directories.",
            )
        return None


def find_refused_saves(
    needs: Sequence[ShardRequest], locations: Iterable[ShardLocation], *, above: int = -1
) -> RefusedSaves:
    """Of a job that can go on from no step above `above`: what its hosts hold of such steps.

    Args:
        needs: one for each rank of the job that starts.
    """
    newer = [location for location in locations if location.step > above and location.place.is_disk_of_host]
    if not newer:
        return RefusedSaves()
    saved_by: dict[tuple[int, str, int], set[int]] = defaultdict(set)
    for location in newer:
        saved_by[location.step, location.save_id, location.world_size].add(location.rank)
    whole = [(step, size) for (step, _, size), ranks in saved_by.items() if len(ranks) == size != len(needs)]
    step, size = max(whole, default=(0, 0))
    return RefusedSaves(
        why=explain_missing(needs, newer), step=step, ranks=size, saves=len(saved_by), world_size=len(needs)
    )
