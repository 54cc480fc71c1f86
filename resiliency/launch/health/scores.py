# SPDX-License-Identifier: Apache-2.0
"""Scores of hosts in one probe: each host against the other hosts, else against its own past.

A probe has one unit, and its own score.  Scores are never added up: in a sum a slow link disappears behind a
large matrix product.

How far may a host fall below the median of the others?  By three times their own spread (median absolute
deviation), but that limit stays between 20 % and 25 % of the median.  The lower end keeps noise out: with
noise of +-10 % a healthy host is at most 1 - 0.9 / 1.1 = 18 % below.  The upper end finds a host at 60 %
speed: with the same noise it is at least 1 - 0.66 / 0.9 = 27 % below.  No host is slow where the others
differ by more than the upper end among themselves, or where half of the hosts would be.

A probe that measured nothing leaves its host undecided.  So does a result that other hosts do not have: a
host that has it each time, and on each of its cores, may compute by other instructions.  A broken core has
another result each time, or not that of the host's other cores: the probe itself sees that.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from statistics import median

#: A median absolute deviation times this estimates the standard deviation of normal noise.
_NORMAL = 1.4826
#: Standard deviations below the median at which a host is slow.
_DEVIATIONS = 3.0
#: Fewer other hosts, or fewer earlier values, are no measure.
LEAST_OTHERS, LEAST_HISTORY = 2, 3


class HostHealth(str, Enum):
    """What is known of a host; the value is the word on the wire."""

    OK = "ok"
    UNDECIDED = "undecided"
    SLOW = "slow"
    FAULTY = "faulty"

    @property
    def severity(self) -> int:
        """A host is as healthy as its worst score."""
        return list(HostHealth).index(self)


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One probe on one host.

    Attributes:
        value: a rate, so more is better; 0 where nothing was measured.
        unit: of `value`, such as GFLOP/s; the same on all hosts.
        error: the fault that was measured; empty: none.
        missing: why nothing was measured; empty: it was.
        note: more to know of what was measured, such as a limit that the host is under.
        digest: of a result that should be the same, bit by bit, on all hosts with an equal `platform`.
        platform: names all that the bits of the result depend on.
        tolerance: share of the others' median by which a slow host is below; larger for noisy probes.
    """

    host: str
    probe: str
    value: float
    unit: str
    error: str = ""
    missing: str = ""
    note: str = ""
    digest: str = ""
    platform: str = ""
    tolerance: float = 0.25

    @property
    def has_rate(self) -> bool:
        """Whether `value` says anything."""
        return not (self.error or self.missing)


@dataclass(frozen=True, kw_only=True)
class Score:
    """A measurement and what it says of its host; `reference` is the median that it was compared with."""

    measurement: Measurement
    health: HostHealth
    why: str
    reference: float | None = None

    def __str__(self) -> str:
        measured = self.measurement
        rate = f" {measured.value:.4g} {measured.unit}" if measured.has_rate else ""
        return f"{measured.probe}{rate}: {self.health.value}, {self.why}"


def judge(
    measurements: Sequence[Measurement], history: Mapping[str, Sequence[float]] | None = None
) -> list[Score]:
    """Score all hosts' measurements of one probe, in their order.

    Args:
        history: earlier values of a host in this probe and unit; asked where the other hosts are no measure.
    Raises:
        ValueError: more than one probe or unit, or two measurements of one host.
    """
    kinds = {(one.probe, one.unit) for one in measurements}
    if len(kinds) > 1:
        raise ValueError(f"one probe and one unit can be compared, found {sorted(kinds)}")
    if len({one.host for one in measurements}) < len(measurements):
        raise ValueError("a host has one measurement in a probe")
    odd = _odd_results(measurements)
    rates = {one.host: one.value for one in measurements if one.has_rate and one.host not in odd}
    scores = []
    for one in measurements:
        if one.error:
            scores.append(Score(measurement=one, health=HostHealth.FAULTY, why=one.error))
        elif why := one.missing or odd.get(one.host, ""):
            scores.append(Score(measurement=one, health=HostHealth.UNDECIDED, why=why))
        else:
            others = [rate for host, rate in rates.items() if host != one.host]
            scores.append(_score_rate(one, others))
    scores = _unless_half(scores, len(rates))
    scores = [
        _by_past(score, (history or {}).get(score.measurement.host, ()), len(rates)) for score in scores
    ]
    return [
        replace(score, why=f"{score.why}; {score.measurement.note}") if score.measurement.note else score
        for score in scores
    ]


def judge_all(
    measurements: Iterable[Measurement], history: Mapping[tuple[str, str], Sequence[float]] | None = None
) -> list[Score]:
    """Scores of several probes, one after the other; `history` is by host and probe."""
    by_probe: dict[str, list[Measurement]] = defaultdict(list)
    for one in measurements:
        by_probe[one.probe].append(one)
    scores = []
    for probe, found in by_probe.items():
        past = {host: values for (host, of), values in (history or {}).items() if of == probe}
        scores += judge(found, past)
    return scores


def worst(scores: Iterable[Score]) -> dict[str, HostHealth]:
    """The health of each host: that of its worst score."""
    by_host: dict[str, HostHealth] = {}
    for score in scores:
        host = score.measurement.host
        by_host[host] = max(by_host.get(host, HostHealth.OK), score.health, key=lambda one: one.severity)
    return by_host


def _odd_results(measurements: Sequence[Measurement]) -> dict[str, str]:
    """Hosts whose result is not that of most hosts of their platform, with the reason to doubt it.

    Where no result is that of most hosts, all of them.
    """
    by_platform: dict[str, list[Measurement]] = defaultdict(list)
    for one in measurements:
        if one.digest and one.has_rate:
            by_platform[one.platform].append(one)
    found = {}
    for platform, alike in by_platform.items():
        ((common, count), *others) = Counter(one.digest for one in alike).most_common()
        for one in alike if others else ():
            if 2 * count <= len(alike):
                found[one.host] = (
                    f"hosts of {platform} have {len(others) + 1} results, and none is that of most hosts"
                )
            elif one.digest != common:
                found[one.host] = (
                    f"result {one.digest[:12]} differs from {common[:12]}, which {count} of {len(alike)} "
                    f"hosts of {platform} have; it is the same each time"
                )
    return found


def _score_rate(one: Measurement, others: Sequence[float]) -> Score:
    if not others:
        return Score(measurement=one, health=HostHealth.OK, why="no other host to compare with")
    if len(others) >= LEAST_OTHERS:
        return _compare(one, others, "the median of the other hosts")
    score = _compare(one, others, "the only other host")
    return replace(score, health=HostHealth.UNDECIDED) if score.health is HostHealth.SLOW else score


def _by_past(score: Score, history: Sequence[float], rated: int) -> Score:
    """By the host's own past where the other hosts have not decided."""
    is_open = rated <= LEAST_OTHERS or score.health is HostHealth.UNDECIDED
    if score.reference is None and score.health is not HostHealth.OK:  # no rate, or an odd result
        return score
    if not is_open or len(history) < LEAST_HISTORY:
        return score
    past = _compare(score.measurement, history, "the median of its own past")
    return score if past.health is HostHealth.UNDECIDED else past


def _unless_half(scores: list[Score], rated: int) -> list[Score]:
    """Undecided instead of slow where half of the hosts are slow: these may as well be two kinds of hosts."""
    slow = sum(score.health is HostHealth.SLOW for score in scores)
    if rated < 2 or 2 * slow < rated:
        return scores
    return [
        replace(score, health=HostHealth.UNDECIDED, why=f"{score.why}; so are {slow} of {rated} hosts")
        if score.health is HostHealth.SLOW
        else score
        for score in scores
    ]


def _compare(one: Measurement, others: Sequence[float], name: str) -> Score:
    middle = median(others)
    spread = median(abs(other - middle) for other in others)
    below = 1 - one.value / middle if middle > 0 else 0.0
    allowed = max(_DEVIATIONS * _NORMAL * spread / middle if middle > 0 else 0.0, 0.8 * one.tolerance)
    allowed = min(allowed, one.tolerance)
    text = f"{below:.0%} below {name}, {middle:.4g} {one.unit}" if below > 0 else f"not below {name}"
    if below <= allowed:
        health = HostHealth.OK
    elif spread > one.tolerance * middle:
        health, text = (
            HostHealth.UNDECIDED,
            f"{text}, but these differ by {spread / middle:.0%} among themselves",
        )
    else:
        health, text = HostHealth.SLOW, f"{text}; {allowed:.0%} are allowed"
    return Score(measurement=one, health=health, why=text, reference=middle)
