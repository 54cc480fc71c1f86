# SPDX-License-Identifier: Apache-2.0
"""Ranges that workers could not use: whether the range is bad, or the worker.

A failure is evidence against both. So a range that failed goes first to a worker that has not failed it, and
only if there is none to one that has. It is bad when `tries` workers failed it, or when all of them did,
`tries` times in all. A worker that fails ranges in a row has at most `in_a_row` of them open: it gets no new
range until another worker tried these. When others used that many of them, the worker is broken, and refused
by name.

A failure within a row says more of its worker than of the range, so only the first one of a row counts as
that of a worker. Else the ranks of one host that lost its disk would condemn good ranges together.

A pure machine, part of the book (`resiliency.data.dispatch.book`). The standard library only.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from typing import TypeAlias, cast

from resiliency.data.dispatch.ranges import Plain, SampleRange
from resiliency.data.progress import check_whole
from resiliency.errors import ConfigError, DataError

#: Epoch, partition and first position of a range.
Start: TypeAlias = tuple[int, str, int]


class PoisonedRange(DataError):
    """A range could not be used as often as is allowed, and the policy is to stop."""


class BrokenWorker(DataError):
    """This worker failed ranges in a row that other workers could use: it gets no more."""


@dataclass(frozen=True, kw_only=True)
class PoisonPolicy:
    """What becomes of a range that workers report as failed.

    Args:
        tries: how many workers may fail a range; where fewer live, how often they may in all. The loss of a
            worker is no failure of its range.
        skip: leave it out and count it, instead of ending the job with its name.
        in_a_row: how many ranges in a row a worker may fail that others can use, before it is refused; and
            how many may be skipped with no range used in between, before the job ends all the same.
    """

    tries: int = 3
    skip: bool = False
    in_a_row: int = 5

    def __post_init__(self) -> None:
        if check_whole("tries", self.tries) < 1:
            raise ConfigError("tries is 0; a range may be used at least once.")
        if check_whole("in_a_row", self.in_a_row) < 1:
            raise ConfigError("in_a_row is 0; a worker may fail at least one range.")


@dataclass(frozen=True)
class _Failure:
    worker: str
    reason: str
    #: Whether the worker had used a range since it failed another one.
    counts: bool
    #: Whether the process is gone: another one of that name may have been repaired, and tries again.
    is_gone: bool = False


class Failures:
    """See the module."""

    def __init__(self, policy: PoisonPolicy) -> None:
        self.policy = policy
        #: Workers that take ranges, as far as is known.
        self._readers: set[str] = set()
        self._of: dict[Start, list[_Failure]] = {}
        #: Worker -> ranges that it failed since it used one -> whether another worker used that.
        self._rows: dict[str, dict[Start, bool]] = {}
        self._reasons: dict[str, str] = {}
        #: Ranges that were skipped since one was used.
        self._skips = 0

    def add_reader(self, worker: str) -> None:
        self._readers.add(worker)

    def remove_reader(self, worker: str) -> None:
        """It takes no ranges now: no range that failed waits for it."""
        self._readers.discard(worker)

    def awaited(self) -> set[str]:
        """Workers that ranges which failed wait for."""
        return set().union(*(self._readers - self._failed_by(start) for start in self._of))

    def forget_worker(self, worker: str) -> None:
        """It is gone, or another process now."""
        self._readers.discard(worker)
        self._rows.pop(worker, None)
        self._reasons.pop(worker, None)
        for start, found in self._of.items():
            self._of[start] = [replace(f, is_gone=True) if f.worker == worker else f for f in found]

    def forget_attempt(self) -> None:
        """What stopped the attempt before may have been repaired for this one."""
        self._readers.clear()
        self._rows.clear()
        self._reasons.clear()
        self._skips = 0
        self._of = {start: found for start, found in self._of.items() if not self._is_bad(start)}

    def check(self, worker: str, attempt: int) -> None:
        """Whether a worker may have a range at all.

        Raises:
            PoisonedRange: a range is bad, and the policy is to stop.
            BrokenWorker: others used what this worker failed.
        """
        if not self.policy.skip or self._skips >= self.policy.in_a_row:
            for (epoch, partition, start), found in self._of.items():
                if self._is_bad((epoch, partition, start)):
                    skipped = f"; the {self._skips} bad ranges before it were skipped" if self._skips else ""
                    workers = ", ".join(sorted({failure.worker for failure in found}))
                    raise PoisonedRange(
                        f"the range from {start}{' of ' + partition if partition else ''} in epoch {epoch} "
                        f"failed {len(found)} times: {found[-1].reason} (workers {workers}){skipped}",
                        hint="Repair the data, or what the workers read it with, and begin a new attempt: "
                        f"DataClient(..., attempt={attempt + 1}). Or choose to skip such ranges.",
                        start=start,
                        partition=partition,
                        epoch=epoch,
                    )
        row = self._rows.get(worker, {})
        if sum(row.values()) >= self.policy.in_a_row:
            raise BrokenWorker(
                f"worker {worker!r} failed {len(row)} ranges in a row, and other workers used "
                f"{sum(row.values())} of them: {self._reasons[worker]}",
                hint="Look at its host: is the data mounted, the disk full, a library missing? Then start "
                "the worker again.",
                worker=worker,
            )

    def may_take(self, worker: str, part: SampleRange | None) -> bool:
        """Whether a worker may have this free range; None: one that is new."""
        if not self._of:
            return True
        failed_by = self._failed_by(start_of(part)) if part is not None else set()
        if worker in failed_by:
            return not self._readers - failed_by - {worker}
        if failed_by or not self._readers - {worker}:
            return True
        return len(self._rows.get(worker, ())) < self.policy.in_a_row

    def add_failure(self, worker: str, part: SampleRange, reason: str) -> bool:
        """A worker failed a range; returns whether the range is left out from now on."""
        start = start_of(part)
        row = self._rows.setdefault(worker, {})
        self._of.setdefault(start, []).append(_Failure(worker, reason, not row))
        row.setdefault(start, False)
        self._reasons[worker] = reason
        if not (self.policy.skip and self._is_bad(start) and self._skips < self.policy.in_a_row):
            return False
        self._skips += 1
        self._forget_range(start)
        return True

    def add_use(self, worker: str, part: SampleRange) -> None:
        """A worker used a range, or its first part."""
        self._skips = 0
        self._rows.pop(worker, None)
        self._reasons.pop(worker, None)
        for failure in self._of.pop(start_of(part), ()):
            row = self._rows.get(failure.worker, {})
            if start_of(part) in row:
                row[start_of(part)] = True
                if sum(row.values()) >= self.policy.in_a_row:  # it is no one that may try what others failed
                    self._readers.discard(failure.worker)

    def to_plain(self) -> Plain:
        return {
            "readers": sorted(self._readers),
            "of": [[list(s), [list(astuple(f)) for f in found]] for s, found in self._of.items()],
            "rows": [[w, [[list(s), used] for s, used in row.items()]] for w, row in self._rows.items()],
            "reasons": dict(self._reasons),
            "skips": self._skips,
        }

    def restore(self, plain: Plain) -> None:
        """Be what `to_plain` said."""
        self._readers = set(cast("list[str]", plain["readers"]))
        of = cast("list[tuple[list[object], list[tuple[str, str, bool, bool]]]]", plain["of"])
        self._of = {_start(start): [_Failure(*failure) for failure in found] for start, found in of}
        rows = cast("list[tuple[str, list[tuple[list[object], bool]]]]", plain["rows"])
        self._rows = {worker: {_start(start): used for start, used in row} for worker, row in rows}
        self._reasons = dict(cast("dict[str, str]", plain["reasons"]))
        self._skips = cast(int, plain["skips"])

    def _is_bad(self, start: Start) -> bool:
        found = self._of[start]
        if len({failure.worker for failure in found if failure.counts}) >= self.policy.tries:
            return True
        return len(found) >= self.policy.tries and not self._readers - self._failed_by(start)

    def _failed_by(self, start: Start) -> set[str]:
        return {failure.worker for failure in self._of.get(start, ()) if not failure.is_gone}

    def _forget_range(self, start: Start) -> None:
        del self._of[start]
        for row in self._rows.values():
            row.pop(start, None)


def start_of(part: SampleRange) -> Start:
    return part.epoch, part.partition, part.start


def _start(plain: list[object]) -> Start:
    return cast(int, plain[0]), cast(str, plain[1]), cast(int, plain[2])
