# SPDX-License-Identifier: Apache-2.0
"""What the checkpoint engine is to reach, and whether it did.

All ratios are taken within a round, between figures that saw the same seconds of the machine, and then
summed up as their median; against a rival, between the medians of both.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ckpt_cells import CellResult, Outcome, Series
from ckpt_contestants import BLOCKING, ONE_SLOT, OURS, OWN

#: Two runs of the same ten steps differ by that much, in percent of them.
EXCESS_NOISE = 1.0
#: Below that size the fixed cost of a process is most of the memory that a save takes.
LARGE_BYTES = 2**28
#: States of memory, by the slots that hold one each.
MEMORY_LIMITS = {OURS: 2.1, ONE_SLOT: 1.15}


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One goal in one cell.  `value` is None where it could not be measured."""

    name: str
    value: float | None
    limit: float
    unit: str = "x"
    remark: str = ""

    @property
    def is_met(self) -> bool:
        return self.value is not None and self.value <= self.limit

    @property
    def rating(self) -> str:
        if self.value is None:
            return "not measured"
        if self.unit == "x":
            share = self.value / self.limit
            if share > 2:
                return f"MISSED, {share:.1f} x the limit"
            return f"met, {1 - share:.0%} below" if self.is_met else f"MISSED by {share - 1:.0%}"
        gap = abs(self.value - self.limit)
        return f"met, {gap:.1f} below" if self.is_met else f"MISSED by {gap:.1f}"


def bars(result: CellResult) -> list[Bar]:
    """All goals for our engine in this cell; none if it did not run there.

    Two of them are judged by what the cell is: time lost by whether a core is free, memory only where the
    state is large.
    """
    ours = result.outcomes.get(OURS)
    if ours is None:
        return []
    rivals = [other for name, other in result.outcomes.items() if name not in OWN]
    found = [
        Bar(name="held without overlap / copy", value=_paired(ours, "held_alone_s", copy_limit), limit=1.15),
        Bar(name="held with overlap / copy", value=_paired(ours, "held_s", copy_limit), limit=0.15),
        _against_rivals("held without overlap / best rival", ours, rivals, "held_alone_s", 0.7),
        _against_rivals("held with overlap / best rival", ours, rivals, "held_s", 0.7),
        _excess(ours, [rival for rival in rivals if rival.contestant not in BLOCKING]),
        _lost(result, ours, rivals),
        Bar(name="durable, from the call / write", value=_paired(ours, "durable_s", "write_s"), limit=1.2),
        Bar(name="durable, after the copy / write", value=_paired(ours, "commit_s", "write_s"), limit=1.15),
        Bar(
            name="restore from memory / copy",
            value=_paired(ours, "memory_restore_s", lambda s: copy_limit(s, "memory_")),
            limit=1.25,
        ),
        _against_rivals("restore from memory / best rival", ours, rivals, "memory_restore_s", 1.0),
        Bar(
            name="restore from disk / read", value=_paired(ours, "disk_restore_s", "disk_read_s"), limit=1.15
        ),
        _against_rivals("restore from disk / best rival", ours, rivals, "disk_restore_s", 1.0),
        Bar(
            name="restore from a warm disk / copy out of the page cache",
            value=_paired(ours, "warm_restore_s", "warm_cached_read_s"),
            limit=1.25,
        ),
        _against_rivals("restore from a warm disk / best rival", ours, rivals, "warm_restore_s", 1.0),
        Bar(name="first saves / later ones, or 0.15 s", value=_first(ours), limit=1.5),
    ]
    if result.cell.size_bytes >= LARGE_BYTES:
        found += [
            Bar(name=f"extra memory of {name} / state", value=_states(result, name), limit=limit)
            for name, limit in MEMORY_LIMITS.items()
            if name in result.outcomes
        ]
    return found


def copy_limit(series: Series, prefix: str = "") -> list[float]:
    """Per round, the faster of one and two threads."""
    pairs = zip(series.get(f"{prefix}copy1_s", ()), series.get(f"{prefix}copy2_s", ()), strict=True)
    return [min(pair) for pair in pairs]


def median(outcome: Outcome | None, name: str) -> float | None:
    values = outcome.series.get(name) if outcome else None
    return statistics.median(values) if values else None


def _states(result: CellResult, contestant: str) -> float | None:
    extra = median(result.outcomes[contestant], "extra_bytes")
    return None if extra is None else extra / result.size_bytes


def excess_percent(outcome: Outcome) -> float | None:
    """How much longer ten steps take with a save in them, beyond what it held."""
    share = _paired(outcome, "excess_s", "ten_steps_s")
    return None if share is None else 100 * share


def lost(outcome: Outcome) -> float | None:
    """Seconds that a save costs training: what it held, and how much longer the next steps took."""
    held, excess = outcome.series.get("held_s"), outcome.series.get("excess_s")
    if not held:
        return None
    if not excess:  # it blocks until nothing is left to do
        return statistics.median(held)
    both = statistics.median(h + e for h, e in zip(held, excess, strict=True))
    return max(both, statistics.median(held))  # no save makes steps faster: that is noise


def _paired(ours: Outcome, name: str, limit: str | Callable[[Series], list[float]]) -> float | None:
    values = ours.series.get(name)
    limits = ours.series.get(limit, []) if isinstance(limit, str) else limit(ours.series)
    if not values or not limits:
        return None
    return statistics.median(a / b for a, b in zip(values, limits, strict=True))


def _lost(result: CellResult, ours: Outcome, rivals: Sequence[Outcome]) -> Bar:
    free = result.cell.ranks < result.cores
    name = f"time lost / best rival, {'a core is' if free else 'no core is'} free"
    return _against_rivals(name, ours, rivals, lost, 0.35 if free else 0.6)


def _against_rivals(
    name: str,
    ours: Outcome,
    rivals: Sequence[Outcome],
    figure: str | Callable[[Outcome], float | None],
    limit: float,
) -> Bar:
    def of(outcome: Outcome) -> float | None:
        return median(outcome, figure) if isinstance(figure, str) else figure(outcome)

    mine = of(ours)
    theirs = [(value, r.contestant) for r in rivals if (value := of(r)) is not None]
    if mine is None or not theirs:
        return Bar(name=name, value=None, limit=limit)
    value, best = min(theirs)
    return Bar(name=name, value=mine / value, limit=limit, remark=best)


def _excess(ours: Outcome, rivals: Sequence[Outcome]) -> Bar:
    name = "excess over ten steps, against the best asynchronous rival"
    mine = excess_percent(ours)
    theirs = [(value, r.contestant) for r in rivals if (value := excess_percent(r)) is not None]
    if mine is None or not theirs:
        return Bar(name=name, value=None, limit=EXCESS_NOISE, unit="points")
    value, best = min(theirs)
    remark = f"{mine:.1f} % against {value:.1f} % of {best}"
    return Bar(name=name, value=mine - value, limit=EXCESS_NOISE, unit="points", remark=remark)


def _first(ours: Outcome) -> float | None:
    first, second = median(ours, "first_held_s"), median(ours, "second_held_s")
    later = median(ours, "held_alone_s")
    if first is None or later is None:
        return None
    # 1.5 x 0.1 s: less than that nobody notices.
    return max(first, second or 0.0) / max(later, 0.1)
