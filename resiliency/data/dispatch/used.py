# SPDX-License-Identifier: Apache-2.0
"""Ranges that were used in steps which are not committed, and on which workers these steps are over.

A worker says `done` before the collective that ends a step, and what it says next shows that the collective
was passed: `done` with a later step, or that the step is over. Until then its ranges are in no model for
sure. When the worker is lost, they come back.

What a lost worker used in steps that were over stays used while another member of the attempt is left: its
model has them, whether it used ranges itself or not. When the last member is gone, the model is gone.

A pure machine, part of the book (`resiliency.data.dispatch.book`). The standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

from resiliency.data.dispatch.ranges import Plain, SampleRange

#: The worker of a range whose worker is gone.
_GONE = ""


@dataclass(frozen=True)
class _UsedRange:
    step: int
    part: SampleRange
    worker: str


class UsedRanges:
    """See the module."""

    def __init__(self) -> None:
        self._ranges: list[_UsedRange] = []
        #: Worker -> the step of which it spoke last.
        self._said: dict[str, int] = {}
        #: Workers that used ranges in that step, which is not over for them.
        self._within: set[str] = set()
        #: The last step that is over for any worker, as far as is known, and that worker: no more ranges can
        #: be used in it.
        self.over = -1
        self.over_on = _GONE
        #: The last step in which a range was used, which may be over on workers that did not say so.
        self.begun = -1

    def add_range(self, worker: str, step: int, part: SampleRange) -> None:
        """A worker uses a range in a step; those before are over for it."""
        if worker in self._within and step > self._said[worker]:
            self._note_over(worker, self._said[worker])
        self._ranges.append(_UsedRange(step, part, worker))
        self.begun = max(self.begun, step)
        self._said[worker] = step
        self._within.add(worker)

    def finish_step(self, worker: str, step: int) -> None:
        """A step is over for a worker."""
        if step >= self._said.get(worker, -1):
            self._said[worker] = step
            self._within.discard(worker)
            self._note_over(worker, step)

    def step_of(self, worker: str) -> int:
        """The step of which a worker spoke last; -1: of none."""
        return self._said.get(worker, -1)

    def unfinished(self, step: int) -> list[str]:
        """Workers that used ranges until this step, and for which it is not over."""
        return sorted(worker for worker in self._within if self._said[worker] <= step)

    def after(self, step: int) -> list[SampleRange]:
        """What was used later than in this step."""
        return [used.part for used in self._ranges if used.step > step]

    def forget_worker(self, worker: str, *, has_others: bool) -> list[SampleRange]:
        """A worker is gone; returns what no model has for sure, and is not used any more.

        Args:
            has_others: whether other members of the attempt are left, which have what it finished.
        """
        if not has_others:
            back = [used.part for used in self._ranges]
            self.clear()
            return back
        if worker not in self._said:
            return []
        back = [used.part for used in self._ranges if used.worker == worker and self._is_open(used)]
        self._ranges = [
            replace(used, worker=_GONE) if used.worker == worker else used
            for used in self._ranges
            if used.worker != worker or not self._is_open(used)
        ]
        del self._said[worker]
        self._within.discard(worker)
        sure = [(used.step, used.worker) for used in self._ranges if not self._is_open(used)]
        over = [(step, other) for other, step in self._said.items() if other not in self._within]
        self.over, self.over_on = max([*sure, *over], default=(-1, _GONE))
        return back

    def begin_after(self, step: int) -> None:
        """The model is that of this step: later ones that are over, without a range, stand in no way."""
        for worker, said in self._said.items():
            if worker not in self._within:
                self._said[worker] = min(said, step)
        if self.over > step:
            self.over, self.over_on = step, _GONE

    def commit_step(self, step: int) -> None:
        """What was used until this step is in a checkpoint."""
        self._ranges = [used for used in self._ranges if used.step > step]

    def clear(self) -> None:
        self._ranges.clear()
        self._said.clear()
        self._within.clear()
        self.over, self.over_on, self.begun = -1, _GONE, -1

    def to_plain(self) -> Plain:
        return {
            "ranges": [[used.step, used.part.to_plain(), used.worker] for used in self._ranges],
            "said": dict(self._said),
            "within": sorted(self._within),
            "over": self.over,
            "over_on": self.over_on,
            "begun": self.begun,
        }

    @classmethod
    def of_plain(cls, plain: Plain) -> UsedRanges:
        used = cls()
        ranges = cast("list[tuple[int, object, str]]", plain["ranges"])
        used._ranges = [_UsedRange(step, SampleRange.of_plain(part), worker) for step, part, worker in ranges]
        used._said = dict(cast("dict[str, int]", plain["said"]))
        used._within = set(cast("list[str]", plain["within"]))
        used.over, used.over_on = cast(int, plain["over"]), cast(str, plain["over_on"])
        used.begun = cast(int, plain["begun"])
        return used

    def _note_over(self, worker: str, step: int) -> None:
        if step > self.over:
            self.over, self.over_on = step, worker

    def _is_open(self, used: _UsedRange) -> bool:
        return used.worker in self._within and used.step == self._said[used.worker]
