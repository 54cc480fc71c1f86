# SPDX-License-Identifier: Apache-2.0
"""How often to save: as much as a failure's lost work is worth, and no more.

A short interval pays for many saves, a long one for the work since the last of them when something fails.
What a save costs is measured, not assumed: what it held training plus what it slowed the steps after it
(`resiliency.checkpoint.trainer.step_times`).  How often the job fails is for the user to say, per tier: the
local tier is there for every failure that a restart heals, the persistent one only for those that take a
host together with its copies.  Nor is it of use to save more often than a save takes to become durable:
what comes in between would be skipped.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from resiliency.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class IntervalAdvice:
    """The interval that loses least.

    Attributes:
        interval_s: of training, between the end of a save and the begin of the next.
        interval_steps: the same in steps, at least 1.
        cost_s: of one save, as measured: the median.
        expected_overhead: part of the useful time that saves and repeated work add, at `interval_steps`;
            without the restarts themselves, which no interval changes.
        text: for people.
    """

    interval_s: float
    interval_steps: int
    cost_s: float
    expected_overhead: float
    text: str


def young_daly(cost_s: float, mtbf_s: float) -> float:
    """Seconds of training between saves that lose least; 0: saves cost nothing, so save always.

    Source: J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps"
    (2006).  It refines Young's sqrt(2 * cost * mtbf), to which it comes close where saves are cheap.

    Args:
        cost_s: that training loses to one save.
        mtbf_s: mean time between the failures that the save is for, of the whole job.
    Raises:
        ConfigError: a cost below zero, or a time between failures that is not above.
    """
    if not 0 <= cost_s < math.inf:
        raise ConfigError(f"a save costs 0 s or more, found {cost_s}.", cost_s=cost_s)
    if not 0 < mtbf_s < math.inf:
        raise ConfigError(f"the mean time between failures must be above 0 s, found {mtbf_s}.", mtbf_s=mtbf_s)
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2 * mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


def best_steps(cost_s: float, *, step_s: float, mtbf_s: float, commit_s: float = 0.0) -> int:
    """Steps from one save to the next that lose least, at least 1 and no fewer than a save takes.

    Args:
        cost_s, mtbf_s: as for `young_daly`.
        step_s: that one step takes.
        commit_s: from the capture of a save until it is durable.
    """
    return max(1, round(young_daly(cost_s, mtbf_s) / step_s), math.ceil(commit_s / step_s))


def expected_overhead(interval_s: float, cost_s: float, mtbf_s: float) -> float:
    """Part of the useful time that saving every `interval_s` and repeating lost work add to it.

    For failures that come at random and independently, also during saves.
    """
    exponent = (interval_s + cost_s) / mtbf_s
    # Beyond this a float overflows, and nobody could tell the difference.
    return mtbf_s * math.expm1(exponent) / interval_s - 1 if exponent < 700 else math.inf


def advise(
    costs_s: Iterable[float], *, step_s: float, mtbf_s: float, commit_s: float = 0.0, tier: str = ""
) -> IntervalAdvice:
    """What to set as the interval of one tier.

    Args:
        costs_s: of saves so far.  Their median counts: the first save makes room for all.
        step_s: that one step takes without a save.
        mtbf_s: mean time between the failures that this tier is for, of the whole job.
        commit_s: from the capture of a save until it is durable.  Shorter intervals would only skip saves.
        tier: its name, for the text.
    Raises:
        ConfigError: there is no cost yet, or a duration that cannot be.
    """
    costs = list(costs_s)
    if not costs:
        raise ConfigError(
            "no save's cost is known yet, so no interval can be advised.",
            hint="A cost is known ten steps after a save, or at the next one, if at least five steps went by"
            " before the first.",
        )
    if not 0 < step_s < math.inf:
        raise ConfigError(f"a step takes more than 0 s, found {step_s}.", step_s=step_s)
    cost = statistics.median(costs)
    best_s = max(young_daly(cost, mtbf_s), commit_s)
    steps = best_steps(cost, step_s=step_s, mtbf_s=mtbf_s, commit_s=commit_s)
    overhead = expected_overhead(steps * step_s, cost, mtbf_s)
    text = (
        f"{tier + ': ' if tier else ''}save every {steps} steps ({short(steps * step_s)} s): "
        f"{cost_text(costs)}; with a failure every {short(mtbf_s / 3600)} h, "
        f"saves and lost work add {overhead:.2%} to the time"
    )
    if commit_s > young_daly(cost, mtbf_s):
        text += f"; more often would be better, but storage needs {short(commit_s)} s for each"
    return IntervalAdvice(
        interval_s=best_s, interval_steps=steps, cost_s=cost, expected_overhead=overhead, text=text
    )


def cost_text(costs_s: Sequence[float]) -> str:
    """What a save costs, for people."""
    return f"a save costs training {short(statistics.median(costs_s))} s (median of {len(costs_s)})"


def short(value: float) -> str:
    """A number for people: three digits that count, and no exponent where it is large."""
    return f"{value:.0f}" if 100 <= value < math.inf else f"{value:.3g}"
