# SPDX-License-Identifier: Apache-2.0
"""When to save into which tier, decided by each rank alone and by all alike.

All ranks must save the same steps, and no rank may wait for another to learn which.  An interval in
steps needs no talk: step 300 is a multiple of 100 on every rank.  Clocks, however, differ, and so an
interval in seconds, or one that follows from the rate of failures, is turned into steps by rank 0
alone.  It tells the others at a step that all of them know beforehand: 1, 2, 4, 8, 16, ... steps after
the first.  A year of training has some twenty-five such steps; all others need no word between
ranks, and the later ones correct what the first few steps, which are often slow, made rank 0 believe.

    if policy.agrees_at(step):
        policy.adopt(step, broadcast_from_rank_0(policy.propose(step, costs, commits)))
    tiers = policy.due(step)
    if tiers:
        save(step, tiers)
        policy.saved(step, tiers)
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from resiliency.checkpoint.names import PRIORITY, TierName
from resiliency.checkpoint.trainer.intervals import best_steps
from resiliency.errors import ConfigError, PeerError
from resiliency.runtime import Clock, SystemClock


@dataclass(frozen=True, kw_only=True)
class Interval:
    """How often to save into a tier: at most one is set; with none, only explicit saves go there.

    Args:
        steps: at every step that is a multiple of this, also after a restart.
        seconds: of wall time from one save to the next, rounded to whole steps.
        mtbf_s: as often as costs least, if the failures that the tier is for come this many seconds apart
            on average, and no more often than storage can (see `resiliency.checkpoint.trainer.intervals`).
    """

    steps: int = 0
    seconds: float = 0.0
    mtbf_s: float = 0.0

    def __post_init__(self) -> None:
        values: dict[str, Any] = {"steps": self.steps, "seconds": self.seconds, "mtbf_s": self.mtbf_s}
        for name, value in values.items():
            is_number = isinstance(value, Real)
            if not is_number or not 0 <= value < math.inf:
                raise ConfigError(f"{name} of an interval must be 0 (not set) or above, found {value!r}.")
        given = [name for name, value in values.items() if value]
        if len(given) > 1:
            raise ConfigError(f"an interval is given in one way, found {' and '.join(given)}.")

    @property
    def is_timed(self) -> bool:
        """Whether ranks must agree on the steps that it stands for."""
        return bool(self.seconds or self.mtbf_s)


class TierPolicy:
    """Says which tiers are due; see the module for how it is called.  One per rank, without locks.

    Until the first agreement, one step after the first, a timed interval makes nothing due.

    Args:
        intervals: of each tier; a tier that is not named has explicit saves only.
        clock: whose monotonic time rank 0 measures steps by; it is read at agreements only.
    """

    def __init__(self, intervals: Mapping[TierName, Interval], clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._fixed = {tier: interval.steps for tier, interval in intervals.items() if interval.steps}
        self._timed = {tier: interval for tier, interval in intervals.items() if interval.is_timed}
        self._agreed: dict[TierName, int] = {}
        self._saved: dict[TierName, int] = {}
        self._start = self._agree_at = -1
        self._measured_from = (0, 0.0)

    def agrees_at(self, step: int) -> bool:
        """Whether ranks agree at `step`, before `due`: the same on all, and never without timed intervals.

        To be asked at every step.  The first one asked about, or one before that, starts the count.
        """
        if not self._timed:
            return False
        if self._start < 0 or step < self._start:
            self._begin(step)
        return step >= self._agree_at

    def propose(
        self,
        step: int,
        costs_s: Mapping[TierName, float] | None = None,
        commits_s: Mapping[TierName, float] | None = None,
    ) -> dict[str, int]:
        """What rank 0 sends to all ranks: the interval in steps of each timed tier, by name.

        Args:
            costs_s: what a save into a tier costs training, as far as that is known by now.  A save whose
                cost is not known counts as dear as a step, so that there is one to learn from.
            commits_s: how long a save into a tier takes to become durable, as far as that is known.
        """
        since, then_s = self._measured_from
        step_s = max((self._clock.monotonic() - then_s) / max(1, step - since), 1e-9)
        proposal = {}
        for tier, interval in self._timed.items():
            if interval.mtbf_s:
                proposal[tier.value] = best_steps(
                    max(0.0, (costs_s or {}).get(tier, step_s)),
                    step_s=step_s,
                    mtbf_s=interval.mtbf_s,
                    commit_s=(commits_s or {}).get(tier, 0.0),
                )
            else:
                proposal[tier.value] = max(1, round(interval.seconds / step_s))
        return proposal

    def adopt(self, step: int, proposal: Mapping[str, int]) -> None:
        """Take over what rank 0 proposed at `step`; all ranks, rank 0 too.

        Raises:
            PeerError: rank 0 has other tiers with timed intervals than this rank.
        """
        mine = sorted(tier.value for tier in self._timed)
        if sorted(proposal) != mine:
            raise PeerError(
                f"rank 0 proposes intervals for {sorted(proposal)}, this rank has timed ones for {mine}.",
                hint="Give all ranks the same intervals.",
                step=step,
            )
        self._agreed = {TierName(name): steps for name, steps in proposal.items()}
        self._agree_at = self._start + max(1, 2 * (step - self._start))
        self._measured_from = step, self._clock.monotonic()

    def due(self, step: int) -> tuple[TierName, ...]:
        """Tiers to save `step` into, the most important first.  Cheap, and the same on all ranks."""
        return tuple(tier for tier in PRIORITY if self._is_due(tier, step))

    def saved(self, step: int, tiers: Collection[TierName]) -> None:
        """A save of `step` was begun, due or not; on all ranks alike, whatever became of it on this one.

        Timed intervals count from here.  A save that one rank had to skip counts as well, or that rank
        would save at other steps than the rest.
        """
        self._saved.update(dict.fromkeys(tiers, step))

    def went_back(self, step: int) -> None:
        """A restore led back to `step`, on all ranks: count from there."""
        if self._start >= 0:
            self._begin(step)

    def _is_due(self, tier: TierName, step: int) -> bool:
        if (steps := self._fixed.get(tier)) is not None:
            return step % steps == 0
        if (steps := self._agreed.get(tier)) is not None:
            return step - self._saved.get(tier, self._start) >= steps
        return False

    def _begin(self, step: int) -> None:
        """Count from `step`: the first of this attempt, or the one a rollback led back to."""
        self._start, self._agree_at = step, step + 1
        self._agreed = {}
        self._saved = {tier: min(saved, step) for tier, saved in self._saved.items()}
        self._measured_from = step, self._clock.monotonic()
