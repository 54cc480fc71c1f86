# SPDX-License-Identifier: Apache-2.0
"""What another interval between saves would have cost this job.

The job's own failures are replayed: a fault after step L goes back to the last multiple of the interval that
was committed by then.  A save holds training as long as this job's saves did on average.  What a restart
costs beside the steps to do again does not depend on the interval and is left out.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from resiliency.events import JsonValue
from resiliency.goodput_measure.lanes import Bucket
from resiliency.goodput_measure.ledger import Figures

_GROWTH = 1.1  # between the intervals that are tried for the best one


@dataclass(frozen=True, kw_only=True)
class IntervalCost:
    """Seconds of the job, in which all its ranks wait or work in vain."""

    interval_steps: int
    saves: int
    held_s: float
    lost_s: float
    note: str = ""

    @property
    def total_s(self) -> float:
        return self.held_s + self.lost_s

    def to_json(self) -> dict[str, JsonValue]:
        return {**vars(self), "total_s": self.total_s}


@dataclass(frozen=True, kw_only=True)
class SaveModel:
    """What the log says about saves, steps and faults of a job.  Durations in seconds."""

    steps: int
    step_s: float
    hold_s: float
    commit_s: float
    own_interval: int
    first_step: int  # that the job began with
    faults: tuple[tuple[int, float], ...]  # (last step before it, seconds from its end to the fault)

    def cost_of(self, interval_steps: int, note: str = "") -> IntervalCost:
        """Args: interval_steps: at least 1."""
        saves = self.steps // interval_steps
        lost = 0
        for last, since_s in self.faults:
            behind = (self.commit_s - since_s) / self.step_s  # steps that a commit was behind at the fault
            committed = int((last - max(behind, 0.0)) // interval_steps) * interval_steps
            lost += max(last - max(committed, self.first_step), 0)
        return IntervalCost(
            interval_steps=interval_steps,
            saves=saves,
            held_s=saves * self.hold_s,
            lost_s=lost * self.step_s,
            note=note,
        )

    def best(self) -> IntervalCost:
        """The cheapest of intervals a tenth apart; of equal ones the longest."""
        tried: list[int] = []
        interval = 1.0
        while interval <= max(self.steps, 1):
            tried.append(round(interval))
            interval = max(interval * _GROWTH, interval + 1)
        return min((self.cost_of(steps, "best") for steps in reversed(tried)), key=lambda cost: cost.total_s)


def save_model(job: Figures) -> SaveModel | None:
    """None where the log shows no steps, or fewer than two saves."""
    saved = sorted({step for _, step in job.saves if step is not None})
    if len(saved) < 2 or not job.median_step_s or not job.ranks:
        return None
    return SaveModel(
        steps=round(job.totals[Bucket.KEPT_STEPS] / 1e6 / job.ranks / job.median_step_s),
        step_s=job.median_step_s,
        hold_s=job.totals[Bucket.SAVE_HELD] / 1e6 / job.holds if job.holds else 0.0,
        commit_s=job.commit_s or 0.0,
        own_interval=round(statistics.median(after - before for before, after in pairwise(saved))),
        first_step=job.first_step,
        faults=tuple(
            (one.last_step, (one.fault - one.last_step_at) / 1e6)
            for one in job.incidents
            if one.last_step is not None and one.last_step_at is not None
        ),
    )


def interval_costs(model: SaveModel, wanted: Iterable[int] = ()) -> tuple[IntervalCost, ...]:
    """The job's own interval, a quarter to four times of it or those that are `wanted`, and the best."""
    own = model.own_interval
    others = list(wanted) or [max(own // 4, 1), max(own // 2, 1), 2 * own, 4 * own]
    costs = {steps: model.cost_of(steps) for steps in others}
    best = model.best()
    costs[best.interval_steps] = best
    costs[own] = model.cost_of(own, "as it was, and best" if own == best.interval_steps else "as it was")
    return tuple(costs[steps] for steps in sorted(costs))
