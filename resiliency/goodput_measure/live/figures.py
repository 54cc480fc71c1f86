# SPDX-License-Identifier: Apache-2.0
"""What a line of a live job and its metrics show: the same from sums that grow and from a whole ledger."""

from __future__ import annotations

from dataclasses import dataclass

from resiliency.goodput_measure.jobs import JobEvents, JobResult, Options
from resiliency.goodput_measure.lanes import Bucket
from resiliency.goodput_measure.lives import from_us
from resiliency.goodput_measure.reliability import reliability
from resiliency.goodput_measure.report import duration, or_none, share
from resiliency.goodput_measure.what_if import IntervalCost, SaveModel, interval_costs, model_of, save_model


@dataclass(frozen=True, kw_only=True)
class LiveFigures:
    """One job.  Times in microseconds, `end` since the epoch; None is "not known".

    Attributes:
        window_goodput: goodput of the last `window_us`.
        ettr: as `Ledger.ettr`.
        last_saved: the highest step that was saved.
        saves: what `costs` replays.
    """

    job_name: str
    end: int
    wall_us: int
    ranks: int
    totals: dict[Bucket, int]
    goodput: float | None
    window_us: int
    window_goodput: float | None
    ettr: float | None
    incidents: int
    mttf_s: float | None
    mttr_s: float | None
    last_saved: int | None
    saves: SaveModel | None

    @property
    def costs(self) -> tuple[IntervalCost, ...]:
        """Of the job's own interval between saves and of others; each costs a look at all incidents."""
        return () if self.saves is None else interval_costs(self.saves)

    def __str__(self) -> str:
        """One line."""
        return (
            f"{from_us(self.end):%H:%M:%S} {self.job_name}: goodput {share(self.goodput)}, newest "
            f"{duration(self.window_us / 1e6)} {share(self.window_goodput)}, {self.incidents} incidents, "
            f"saved step {or_none(self.last_saved)}"
        )


def figures_of_result(result: JobResult) -> LiveFigures | None:
    """Those of a job that was read as a whole; None without a ledger."""
    job = result.measured
    if job is None:
        return None
    ledger = job.ledger
    return LiveFigures(
        job_name=result.report.job_name,
        end=ledger.end,
        wall_us=ledger.wall_us,
        ranks=len(ledger.lanes),
        totals=ledger.totals,
        goodput=ledger.goodput,
        window_us=job.window_us,
        window_goodput=job.newest.goodput,
        ettr=ledger.ettr,
        incidents=len(ledger.incidents),
        mttf_s=job.reliability.mttf_s,
        mttr_s=job.reliability.mttr_s,
        last_saved=max((step for _, step in ledger.saves if step is not None), default=None),
        saves=save_model(ledger),
    )


def figures_so_far(job: JobEvents, options: Options, *, until: int | None = None) -> LiveFigures:
    """Those of a job that is still read.

    Args:
        until: as `LedgerBuilder.build`.
    Raises:
        ConfigError: there is no event of the job.
    """
    sums = job.builder.figures(window_us=options.window_us, until=until)
    wall_us = sums.end - sums.start
    available, in_window = wall_us * sums.ranks, min(options.window_us, wall_us) * sums.ranks
    found = reliability(sums.incidents, began=sums.first_step_at, end=sums.end)
    return LiveFigures(
        job_name=sums.job_name,
        end=sums.end,
        wall_us=wall_us,
        ranks=sums.ranks,
        totals=sums.totals,
        goodput=sums.totals[Bucket.KEPT_STEPS] / available if available else None,
        window_us=options.window_us,
        window_goodput=sums.kept_in_window / in_window if in_window else None,
        ettr=sums.kept_by_any / wall_us if wall_us else None,
        incidents=len(sums.incidents),
        mttf_s=found.mttf_s,
        mttr_s=found.mttr_s,
        last_saved=sums.last_saved,
        saves=model_of(
            totals=sums.totals,
            holds=sums.holds,
            ranks=sums.ranks,
            median_step_s=sums.median_step_s,
            commit_s=sums.commit_s,
            own_interval=sums.own_interval,
            first_step=sums.first_step,
            incidents=sums.incidents,
        ),
    )
