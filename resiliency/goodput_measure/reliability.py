# SPDX-License-Identifier: Apache-2.0
"""How often a job failed and how long it took to come back: MTTF, MTTR, and how both are distributed.

An *outage* is what a user sees: from a fault to the first new step.  A restart that fails before its first
step belongs to the outage that it was to end, so an outage may hold several incidents.

MTTF is the time of training over the number of outages; training that still ran at the end counts as time
without a failure, or the estimate would be too short.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from resiliency.events import JsonValue
from resiliency.goodput_measure.incidents import Incident
from resiliency.goodput_measure.ledger import Figures


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """Durations in seconds."""

    count: int
    mean: float
    median: float
    p90: float
    p99: float
    worst: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Distribution | None:
        """None without any."""
        if not seconds:
            return None
        ordered = sorted(seconds)

        def percentile(share: float) -> float:
            return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]

        return cls(
            count=len(ordered),
            mean=statistics.fmean(ordered),
            median=statistics.median(ordered),
            p90=percentile(0.9),
            p99=percentile(0.99),
            worst=ordered[-1],
        )

    def to_json(self) -> dict[str, JsonValue]:
        return dict(vars(self))


@dataclass(frozen=True, kw_only=True)
class Outage:
    """[fault, end) in microseconds since the epoch; `end` is None where training never came back."""

    fault: int
    end: int | None
    cause: str = ""

    @property
    def repair_s(self) -> float | None:
        return None if self.end is None else (self.end - self.fault) / 1e6


@dataclass(frozen=True, kw_only=True)
class Reliability:
    """Failures of one job.

    Attributes:
        trained_s: all time outside of outages, since the first step began.
        uptimes: from the first step, or the end of an outage, to the next fault.
        repairs: from a fault to the first new step.
        by_cause: repairs of each cause; an outage has that of its first incident.
    """

    outages: tuple[Outage, ...]
    trained_s: float
    uptimes: Distribution | None
    repairs: Distribution | None
    by_cause: dict[str, Distribution]

    @property
    def mttf_s(self) -> float | None:
        """None where nothing failed: then `trained_s` is all that is known."""
        return self.trained_s / len(self.outages) if self.outages else None

    @property
    def mttr_s(self) -> float | None:
        return None if self.repairs is None else self.repairs.mean

    def to_json(self) -> dict[str, JsonValue]:
        return {
            "outages": len(self.outages),
            "trained_s": self.trained_s,
            "mttf_s": self.mttf_s,
            "mttr_s": self.mttr_s,
            "uptimes_s": None if self.uptimes is None else self.uptimes.to_json(),
            "repairs_s": None if self.repairs is None else self.repairs.to_json(),
            "repairs_by_cause_s": {cause: found.to_json() for cause, found in self.by_cause.items()},
        }


def reliability_of(job: Figures) -> Reliability:
    """The failures of a job."""
    outages = _outages(job.incidents)
    up_us: list[int] = []
    since = job.first_step_at
    for outage in outages:
        if since is not None:
            up_us.append(max(outage.fault - since, 0))
        since = outage.end
    trained_us = sum(up_us) + (0 if since is None else max(job.end - since, 0))
    repairs = [(outage.cause or "unknown", s) for outage in outages if (s := outage.repair_s) is not None]
    by_cause: dict[str, list[float]] = defaultdict(list)
    for cause, seconds in repairs:
        by_cause[cause].append(seconds)
    return Reliability(
        outages=outages,
        trained_s=trained_us / 1e6,
        uptimes=Distribution.of([us / 1e6 for us in up_us]),
        repairs=Distribution.of([seconds for _, seconds in repairs]),
        by_cause={cause: found for cause, of in by_cause.items() if (found := Distribution.of(of))},
    )


def _outages(incidents: Iterable[Incident]) -> tuple[Outage, ...]:
    outages: list[Outage] = []
    for incident in incidents:
        if outages and outages[-1].end is None:
            first = outages.pop()
            outages.append(Outage(fault=first.fault, end=incident.first_new_step, cause=first.cause))
        else:
            outages.append(Outage(fault=incident.fault, end=incident.first_new_step, cause=incident.cause))
    return tuple(outages)
