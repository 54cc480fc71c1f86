# SPDX-License-Identifier: Apache-2.0
"""What a line of a live job and its metrics show: the same of a job that is read and of a whole ledger."""

from __future__ import annotations

from dataclasses import dataclass, fields

from resiliency.goodput_measure.jobs import JobEvents, JobResult, Options
from resiliency.goodput_measure.ledger import Figures
from resiliency.goodput_measure.lives import from_us
from resiliency.goodput_measure.report import duration, or_none, share


@dataclass(frozen=True, kw_only=True)
class LiveFigures(Figures):
    """One job.  `window_goodput`: goodput of the last `window_us`; None without rank time."""

    window_us: int
    window_goodput: float | None

    def __str__(self) -> str:
        """One line."""
        saved = max((step for _, step in self.saves if step is not None), default=None)
        return (
            f"{from_us(self.end):%H:%M:%S} {self.job_name}: goodput {share(self.goodput)}, "
            f"newest {duration(self.window_us / 1e6)} {share(self.window_goodput)}, "
            f"{len(self.incidents)} incidents, saved step {or_none(saved)}"
        )


def figures_of_result(result: JobResult) -> LiveFigures | None:
    """Those of a job that was read as a whole; None without a ledger."""
    job = result.measured
    if job is None:
        return None
    figures = {one.name: getattr(job.ledger, one.name) for one in fields(Figures)}
    return LiveFigures(**figures, window_us=job.window_us, window_goodput=job.newest.goodput)


def figures_so_far(job: JobEvents, options: Options, *, until: int | None = None) -> LiveFigures:
    """Those of a job that is still read.

    Args:
        until: as `LedgerBuilder.build`.
    Raises:
        ConfigError: there is no event of the job.
    """
    figures = job.builder.figures(until=until)
    start = max(figures.end - options.window_us, figures.start)
    available = (figures.end - start) * figures.ranks
    kept = job.builder.kept_between(start, figures.end)
    return LiveFigures(
        **vars(figures), window_us=options.window_us, window_goodput=kept / available if available else None
    )
