# SPDX-License-Identifier: Apache-2.0
"""When a job saves into which tier: the policy, and what saves of this job have cost and taken so far.

Intervals in steps need no word between ranks.  Those in seconds, or by the rate of failures, are turned
into steps by rank 0 at a few steps that all ranks know beforehand
(`resiliency.checkpoint.trainer.tier_policy`).
"""

from __future__ import annotations

import logging
import statistics
import threading
from collections import deque
from collections.abc import Collection, Mapping

from resiliency.checkpoint.names import TierName
from resiliency.checkpoint.ranks import RankGroup
from resiliency.checkpoint.trainer.intervals import IntervalAdvice, advise, cost_text, short
from resiliency.checkpoint.trainer.tier_policy import Interval, TierPolicy
from resiliency.runtime import Clock

logger = logging.getLogger(__name__)

#: The first save of a tier makes room for all: it would count too much among fewer.
_REMEMBERED = 32


class Schedule:
    """One per rank, used by the training thread, but for `add_commit`.

    What a rank measured is for its own `advice`; the intervals of all follow what rank 0 measured.
    """

    def __init__(
        self, intervals: Mapping[TierName, Interval], rank_group: RankGroup, clock: Clock | None = None
    ) -> None:
        self._policy = TierPolicy(intervals, clock)
        self._mtbf_s = {tier: interval.mtbf_s for tier, interval in intervals.items() if interval.mtbf_s}
        self._rank_group = rank_group
        self._costs: dict[TierName, deque[float]] = {}
        self._lock = threading.Lock()
        #: Guarded by the lock, as commits are reported while training goes on.
        self._commits: dict[TierName, deque[float]] = {}
        self._agreed: Mapping[str, int] = {}

    def due(self, step: int) -> tuple[TierName, ...]:
        """Tiers to save `step` into, the most important first; the same on all ranks.

        Collective at the few steps where ranks agree on intervals that are not in steps.
        """
        if self._policy.agrees_at(step):
            self._agree(step)
        return self._policy.due(step)

    def saved(self, step: int, tiers: Collection[TierName]) -> None:
        """A save was asked for; on all ranks alike, whatever becomes of it."""
        self._policy.saved(step, tiers)

    def went_back(self, step: int) -> None:
        """A restore led back to `step`; on all ranks alike."""
        self._policy.went_back(step)

    def add_cost(self, tiers: Collection[TierName], cost_s: float) -> None:
        """What one save cost training: held and excess time."""
        for tier in tiers:
            self._costs.setdefault(tier, deque(maxlen=_REMEMBERED)).append(max(0.0, cost_s))

    def add_commit(self, tier: TierName, commit_s: float) -> None:
        """How long one save took from its capture until it was durable in `tier`.  Any thread may call it."""
        with self._lock:
            self._commits.setdefault(tier, deque(maxlen=_REMEMBERED)).append(commit_s)

    def advice(self, tier: TierName, *, step_s: float, mtbf_s: float) -> IntervalAdvice:
        """The interval of `tier` that loses least; see `resiliency.checkpoint.trainer.intervals.advise`."""
        return advise(
            self._costs.get(tier, ()),
            step_s=step_s,
            mtbf_s=mtbf_s,
            commit_s=self._median_commits().get(tier, 0.0),
            tier=tier.value,
        )

    def findings(self, *, step_s: float) -> list[str]:
        """What saves into each tier cost, for people, with advice where the rate of failures is known.

        Args:
            step_s: that one step takes without a save.
        """
        commits_s = self._median_commits()
        texts = []
        for tier, costs in self._costs.items():
            mtbf_s = self._mtbf_s.get(tier)
            if mtbf_s and step_s > 0:
                texts.append(self.advice(tier, step_s=step_s, mtbf_s=mtbf_s).text)
            else:
                after = f", and is durable after {short(commits_s[tier])} s" if tier in commits_s else ""
                texts.append(f"{tier.value}: {cost_text(costs)}{after}")
        return texts

    def _agree(self, step: int) -> None:
        medians = {tier: statistics.median(costs) for tier, costs in self._costs.items()}
        proposal = {}
        if self._rank_group.rank == 0:
            proposal = self._policy.propose(step, medians, self._median_commits())
        agreed = self._rank_group.gather(proposal)[0]
        self._policy.adopt(step, agreed)
        if agreed != self._agreed and self._rank_group.rank == 0:
            text = ", ".join(f"{tier} tier every {steps}" for tier, steps in agreed.items())
            logger.info("intervals in steps from step %d on: %s", step, text)
        self._agreed = agreed

    def _median_commits(self) -> dict[TierName, float]:
        with self._lock:
            return {tier: statistics.median(commits) for tier, commits in self._commits.items()}
