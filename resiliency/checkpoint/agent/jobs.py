# SPDX-License-Identifier: Apache-2.0
"""What the agent gives its workers to do."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from resiliency.checkpoint.agent.protocol import Done, Settings
from resiliency.checkpoint.branches import Branch
from resiliency.checkpoint.capture.arena import CapturedSlot
from resiliency.checkpoint.names import TierName, TierTry, save_id_of

#: The attempt that tries, and what.
JobKey: TypeAlias = "tuple[str, TierTry]"


@dataclass(frozen=True, kw_only=True)
class SaveJob:
    """This host's part of one save in one tier.

    `slots`: lent to the worker of this tier, by rank; that of another tier has borrowed them for itself.
    `restored_step`, `restored_save`: where this start of the job went on; 0: nowhere.
    `branches`: of the job.
    `missing`: why there is nothing to write; then nobody's part can become a checkpoint in this tier.
    """

    tier: TierName
    step: int
    attempt_id: str
    run_id: str
    world_size: int
    ranks: tuple[int, ...]
    settings: Settings
    slots: Mapping[int, CapturedSlot] = field(default_factory=dict)
    try_number: int = 1
    restored_step: int = 0
    restored_save: str = ""
    branches: tuple[Branch, ...] = ()
    missing: str = ""
    queued: float = field(default_factory=time.monotonic)

    @property
    def save_id(self) -> str:
        """The name of the save, the same on all hosts, in all tiers and for all tries."""
        return save_id_of(self.attempt_id, self.step)

    @property
    def key(self) -> JobKey:
        return self.attempt_id, TierTry(self.step, self.try_number, self.tier.value)

    @property
    def leads(self) -> bool:
        """Whether this host's agent leads the commit: on its own disk each does."""
        return self.tier is TierName.LOCAL or 0 in self.ranks

    @property
    def voters(self) -> tuple[int, ...] | range:
        """The ranks whose parts make the checkpoint whole."""
        return self.ranks if self.tier is TierName.LOCAL else range(self.world_size)

    @property
    def concerns_others(self) -> bool:
        """Whether agents of other hosts wait for this host's part."""
        return len(self.voters) > len(self.ranks)

    def give_back(self) -> None:
        """End the loan of its slots."""
        for slot in self.slots.values():
            slot.close()

    def ended(self, error: str = "", *, left_out: bool = False, hangs: bool = False) -> Done:
        """The report that there is nothing (more) to do for it; with an `error`, that it came to nothing."""
        return Done(
            step=self.step,
            attempt_id=self.attempt_id,
            tier=self.tier.value,
            error=error,
            try_number=self.try_number,
            left_out=left_out,
            hangs=hangs,
            size_bytes=0,
            queued_s=0.0,
            commit_s=0.0,
        )


@dataclass(frozen=True, kw_only=True)
class RefuseJob:
    """Tell the agents of other hosts that this host has no part of a save to give."""

    save: SaveJob
    why: str


@dataclass(frozen=True, kw_only=True)
class ShowJob:
    """Show what was hidden in the local tier to be taken away, and was not."""

    settings: Settings


@dataclass(frozen=True, kw_only=True)
class FreeJob:
    """A step is safe: give back what older captures take of ranks that run on this host no more."""

    settings: Settings
    arena: Path
    local_ranks: tuple[int, ...]
    step: int


@dataclass(frozen=True, kw_only=True)
class RetireJob:
    """A step is complete on all hosts: delete what that makes needless of `run_id` in the local tier.

    `complete`: step to save id of those that are known to be complete; the highest is the news.
    `alone`: this host is the whole job.
    `restored_step`: see `SaveJob`.
    """

    settings: Settings
    run_id: str
    complete: Mapping[int, str]
    alone: bool = False
    restored_step: int = 0


@dataclass(frozen=True, kw_only=True)
class GiveUpJob:
    """Delete generations of the local tier that never become complete.

    `saves`: step to save id.
    """

    settings: Settings
    saves: Mapping[int, str]
