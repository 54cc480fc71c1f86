# SPDX-License-Identifier: Apache-2.0
"""Which ranks make the others wait in each step, decided from how much of a step is their own.

In a job that moves in step all ranks take the same time for a step: a fast one waits for the slow ones.  What
differs is the share in which a rank does not wait for others.  That is sampled, so a difference has to be
beyond chance, to be so in each window, and to be against each group of ranks that the rank works with: the
ranks of a pipeline's first stage have more to do than others, and none of them is slow.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from statistics import median

from resiliency.runtime import name_hosts, name_ranks

#: Numbers of windows over which shares are compared: the first ones show what is very slow.
SPANS = (3, 6, 12, 24)
#: A rank is not slow below so many times the usual own time.
LEAST = 1.15
#: Chance of naming a rank that is not slow, for each decision.
_CHANCE = 1e-7
#: Ranks whose steps take so many times as long as those of others do not move in step with them.  Steps are
#: whole, and windows have few of long ones.
_IN_STEP = 1.5


@dataclass(frozen=True, kw_only=True)
class OwnTime:
    """What one rank was seen in, in one window or several.

    `samples`: moments at which it was looked at; in `waiting` of them it waited for other ranks, in `data` it
    was in its data loader, in `stopped` the kernel did not let it run.
    `delayed_s`: for so long its main thread had work and no core.
    `groups`: of ranks that it works with; equal words are the same group.
    """

    rank: int
    host: str
    seconds: float
    steps: int
    samples: int
    waiting: int = 0
    data: int = 0
    stopped: int = 0
    delayed_s: float = 0.0
    groups: tuple[str, ...] = ()

    @property
    def own(self) -> float:
        """Share of a step in which it does not wait for others."""
        return 1.0 - self.waiting / self.samples

    @property
    def step_s(self) -> float:
        return self.seconds / self.steps

    @property
    def own_step_s(self) -> float:
        return self.own * self.step_s


class Delay(Enum):
    """Where a slow rank spends what the others do not.  The value is for people."""

    DATA = "in its data loader"
    STOPPED = "stopped by the kernel: a signal, a debugger or a frozen group"
    CORE = "waiting for a core: the host is busy, or its processor time is limited"
    HOST = "in its own work"


@dataclass(frozen=True, kw_only=True)
class StragglerFinding:
    """Ranks that the others wait for.  Times are of one step, medians; the sentence is for people."""

    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    delay: Delay = field(compare=False)
    own_s: float = field(compare=False)
    usual_s: float = field(compare=False)
    sentence: str = field(compare=False)


def find_stragglers(history: Mapping[int, Sequence[OwnTime]]) -> StragglerFinding | None:
    """The slow ranks of a job, if some are.

    Args:
        history: windows by rank, the newest last; those of different ranks need not begin together.
    """
    slow: set[int] = set()
    sums: dict[int, OwnTime] = {}
    for span in SPANS:
        windows = {rank: reported[-span:] for rank, reported in history.items() if len(reported) >= span}
        if len(windows) < 2:
            break
        sums = {rank: _sum(reported) for rank, reported in windows.items()}
        groups = _own_by_group(sums.values())
        steps_s = sorted(one.step_s for one in sums.values())
        few = min(one.samples for one in sums.values())
        slow |= {
            rank
            for rank, one in sums.items()
            if _is_in_step(one, steps_s) and _is_slow(one, groups, few, windows[rank])
        }
    slow &= set(sums)
    if not slow or 2 * len(slow) > len(sums):
        return None
    return _finding([sums[rank] for rank in sorted(slow)], [sums[rank] for rank in sums if rank not in slow])


def _own_by_group(sums: Iterable[OwnTime]) -> dict[str, list[float]]:
    """The own shares of each group's ranks, in order; all ranks are one under the empty name."""
    groups: dict[str, list[float]] = {}
    for one in sums:
        for group in ("", *one.groups):
            groups.setdefault(group, []).append(one.own)
    return {group: sorted(shares) for group, shares in groups.items()}


def _is_in_step(mine: OwnTime, steps_s: Sequence[float]) -> bool:
    """Whether the others can be waiting for it: a trainer that many actors work for has steps of its own."""
    usual = _median_of_others(steps_s, mine.step_s)
    return usual / _IN_STEP <= mine.step_s <= usual * _IN_STEP


def _is_slow(mine: OwnTime, groups: Mapping[str, list[float]], few: int, windows: Sequence[OwnTime]) -> bool:
    """
    Args:
        few: looks at the rank that was looked at least.
    """
    for group in ("", *mine.groups):
        others = len(groups[group]) - 1
        if not others:
            continue
        usual = _median_of_others(groups[group], mine.own)
        middle = (mine.own + usual) / 2
        deviation = math.sqrt(middle * (1 - middle) / few * (1 + 1.6 / others))
        # As many chances as ranks: the largest deviation of a big job is a large one.
        limit = math.sqrt(2 * math.log(len(groups[""]) / _CHANCE)) * deviation
        if mine.own < LEAST * usual or mine.own - usual < limit:
            return False
        if any(one.own <= usual for one in windows):
            return False
    return True


def _median_of_others(shares: Sequence[float], mine: float) -> float:
    """Of ordered `shares` without `mine`, which is one of them."""
    at = bisect_left(shares, mine)
    low, high = (len(shares) - 2) // 2, (len(shares) - 1) // 2
    return (shares[low + (low >= at)] + shares[high + (high >= at)]) / 2


def _finding(slow: Sequence[OwnTime], others: Sequence[OwnTime]) -> StragglerFinding:
    ranks = tuple(one.rank for one in slow)
    hosts = tuple(dict.fromkeys(one.host for one in slow))
    own_s, usual_s = median(one.own_step_s for one in slow), median(one.own_step_s for one in others)
    step_s = median(one.step_s for one in slow)
    more = {delay: _share(delay, slow) - _share(delay, others) for delay in Delay if delay is not Delay.HOST}
    most = max(more, key=lambda delay: more[delay])
    extra = median(one.own for one in slow) - median(one.own for one in others)
    delay = most if more[most] > extra / 2 else Delay.HOST
    verb, whose = ("is", "its") if len(slow) == 1 else ("are", "their")
    sentence = (
        f"{name_ranks(ranks)} ({name_hosts(hosts)}) {verb} slow: {1000 * own_s:.0f} ms of each step of "
        f"{1000 * step_s:.0f} ms are {whose} own, where others have {1000 * usual_s:.0f} ms; "
        f"the difference is {delay.value.replace('its', whose)}"
    )
    return StragglerFinding(
        ranks=ranks, hosts=hosts, delay=delay, own_s=own_s, usual_s=usual_s, sentence=sentence
    )


def _share(delay: Delay, of: Iterable[OwnTime]) -> float:
    if delay is Delay.CORE:
        return median(one.delayed_s / one.seconds for one in of)
    return median((one.data if delay is Delay.DATA else one.stopped) / one.samples for one in of)


def _sum(windows: Sequence[OwnTime]) -> OwnTime:
    return replace(
        windows[-1],
        seconds=sum(one.seconds for one in windows),
        steps=sum(one.steps for one in windows),
        samples=sum(one.samples for one in windows),
        waiting=sum(one.waiting for one in windows),
        data=sum(one.data for one in windows),
        stopped=sum(one.stopped for one in windows),
        delayed_s=sum(one.delayed_s for one in windows),
    )
