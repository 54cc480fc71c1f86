# SPDX-License-Identifier: Apache-2.0
"""What is measured of one job and of several together, from the events that were read so far."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from resiliency.events import JsonValue, RunEvent
from resiliency.goodput_measure.lanes import Bucket
from resiliency.goodput_measure.ledger import Ledger, LedgerBuilder
from resiliency.goodput_measure.published import GoodputReport, calculate
from resiliency.goodput_measure.reliability import Reliability, reliability_of
from resiliency.goodput_measure.tracker import GOODPUT_TYPES, published_record
from resiliency.goodput_measure.what_if import IntervalCost, interval_costs, save_model
from resiliency.goodput_measure.windows import HOUR_US, Rolling, Window, attempts_of, newest_window, rolling

_PUBLISHED = frozenset(GOODPUT_TYPES)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure beyond the events.

    Attributes:
        step_s: time of an undisturbed step; None means the median of the ledger.
        window_us: length of the rolling window.
        intervals: save intervals to replay, in steps; empty means a choice around the job's own.
    """

    step_s: float | None = None
    window_us: int = HOUR_US
    intervals: Sequence[int] = ()


@dataclass(frozen=True, kw_only=True)
class JobLedger:
    """The ledger of a job, and what follows from it."""

    ledger: Ledger
    attempts: tuple[Window, ...]
    rolling: Rolling | None
    newest: Window  # the last `window_us`
    window_us: int
    reliability: Reliability
    costs: tuple[IntervalCost, ...]

    @classmethod
    def of(cls, ledger: Ledger, options: Options) -> JobLedger:
        model = save_model(ledger)
        return cls(
            ledger=ledger,
            attempts=attempts_of(ledger),
            rolling=rolling(ledger, options.window_us),
            newest=newest_window(ledger, options.window_us),
            window_us=options.window_us,
            reliability=reliability_of(ledger),
            costs=interval_costs(model, options.intervals) if model is not None else (),
        )

    def to_json(self) -> dict[str, JsonValue]:
        return {
            **self.ledger.to_json(),
            "attempts": [window.to_json() for window in self.attempts],
            "rolling": None if self.rolling is None else self.rolling.to_json(),
            "reliability": self.reliability.to_json(),
            "save_intervals": [cost.to_json() for cost in self.costs],
        }


@dataclass(frozen=True, kw_only=True)
class JobResult:
    """One job: the published number, and with its full event log the ledger."""

    report: GoodputReport
    measured: JobLedger | None = None

    def to_json(self) -> dict[str, JsonValue]:
        record = self.report.to_json()
        if self.measured is not None:
            record["ledger"] = self.measured.to_json()
        return record


@dataclass
class JobEvents:
    """The events of one job while they are read."""

    name: str
    builder: LedgerBuilder = field(default_factory=LedgerBuilder)
    goodput_events: list[RunEvent] = field(default_factory=list)
    #: Whether events of a full log are among them.
    is_full: bool = False

    def add_full(self, event: RunEvent) -> None:
        """An event of a full event log."""
        self.is_full = True
        self.builder.add_event(event)
        if event.type in _PUBLISHED and published_record(event) is not None:
            self.goodput_events.append(event)

    def result(self, options: Options, *, until: int | None = None) -> JobResult:
        """
        Args:
            until: as `LedgerBuilder.build`.
        Raises:
            ConfigError: no event that the published formula counts.
        """
        ledger = self.builder.build(until=until) if self.is_full else None
        step_s = options.step_s
        if step_s is None and ledger is not None:
            step_s = ledger.median_step_s
        report = calculate(self.goodput_events, step_s)
        return JobResult(report=report, measured=None if ledger is None else JobLedger.of(ledger, options))


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Several jobs together; each counts with its own wall time x ranks."""

    totals: dict[Bucket, int]
    outages: int
    trained_s: float
    repaired_s: tuple[float, ...]

    @classmethod
    def of(cls, results: Iterable[JobResult]) -> Fleet:
        """Of the jobs that have a ledger."""
        jobs = [result.measured for result in results if result.measured is not None]
        found = [job.reliability for job in jobs]
        repairs = (outage.repair_s for one in found for outage in one.outages)
        return cls(
            totals={bucket: sum(job.ledger.totals[bucket] for job in jobs) for bucket in Bucket},
            outages=sum(len(one.outages) for one in found),
            trained_s=sum(one.trained_s for one in found),
            repaired_s=tuple(seconds for seconds in repairs if seconds is not None),
        )

    @property
    def goodput(self) -> float | None:
        """Kept steps as a part of the rank time of all jobs."""
        available = sum(self.totals.values())
        return self.totals[Bucket.KEPT_STEPS] / available if available else None

    @property
    def mttf_s(self) -> float | None:
        return self.trained_s / self.outages if self.outages else None

    @property
    def mttr_s(self) -> float | None:
        return sum(self.repaired_s) / len(self.repaired_s) if self.repaired_s else None

    def to_json(self) -> dict[str, JsonValue]:
        return {
            "totals_us": {bucket.value: total for bucket, total in self.totals.items()},
            "goodput": self.goodput,
            "outages": self.outages,
            "mttf_s": self.mttf_s,
            "mttr_s": self.mttr_s,
        }
