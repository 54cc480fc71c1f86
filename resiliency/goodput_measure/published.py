# SPDX-License-Identifier: Apache-2.0
"""The published goodput formula: steps that were kept, at a reference speed, over elapsed time.

    goodput = (max saved step - min loaded step) x reference step time / (last - first event)

It needs six event types and no instrumentation of steps, so any job can be measured with it.  What
it cannot say is where the other time went; the ledger does.

`calculate` is a pure function.  A number that the events do not support is None and comes with a
note that says why; it is never a silent zero.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from resiliency.errors import ConfigError
from resiliency.events import EventType, JsonValue, RunEvent
from resiliency.goodput_measure.tracker import GOODPUT_TYPES

_ORDER = {kind: order for order, kind in enumerate(GOODPUT_TYPES)}
_DEDUPLICATED = frozenset({EventType.JOB_STARTED, EventType.JOB_TERMINATED})
_CHECKPOINTS = frozenset({EventType.CHECKPOINT_LOADED, EventType.CHECKPOINT_SAVED})


@dataclass(frozen=True, kw_only=True)
class GoodputReport:
    """The published metrics of one job.  `total_events` counts what the rules left over."""

    job_name: str
    total_events: int
    job_started_count: int
    checkpoints_loaded: int
    checkpoints_saved: int
    total_runtime_s: float
    min_loaded_step: int
    max_saved_step: int | None
    step_difference: int
    reference_step_time_s: float | None
    effective_computation_time_s: float | None
    goodput_percentage: float | None
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, JsonValue]:
        """The metrics under the names that readers of the published export know."""
        return {
            "job_name": self.job_name,
            "total_events": self.total_events,
            "job_started_count": self.job_started_count,
            "checkpoints_loaded": self.checkpoints_loaded,
            "checkpoints_saved": self.checkpoints_saved,
            "total_runtime_seconds": self.total_runtime_s,
            "min_loaded_step": self.min_loaded_step,
            "max_saved_step": self.max_saved_step,
            "step_diff": self.step_difference,
            "reference_step_time": self.reference_step_time_s,
            "effective_computation_time": self.effective_computation_time_s,
            "goodput_percentage": self.goodput_percentage,
            "notes": list(self.notes),
        }


class _Event(NamedTuple):
    """What the formula needs of an event; small, because a log may hold millions."""

    time: datetime
    order: int
    type: EventType
    step: int


def calculate(events: Iterable[RunEvent], reference_step_time: float | None) -> GoodputReport:
    """Apply the published rules to the goodput events of one job; other types are ignored.

    Args:
        events: in any order.
        reference_step_time: seconds that one step takes when nothing disturbs it; None leaves the
            goodput unknown.
    Raises:
        ConfigError: no event of the six types.
    """
    job_name, ordered = _prepare(events)
    loads = [event.step for event in ordered if event.type is EventType.CHECKPOINT_LOADED]
    saves = [event.step for event in ordered if event.type is EventType.CHECKPOINT_SAVED]
    notes = _clock_notes(ordered) + _step_notes(ordered, loads, saves)
    min_loaded = min(loads, default=0)
    max_saved = max(saves, default=None)
    difference = 0 if max_saved is None else max(max_saved - min_loaded, 0)
    runtime_s = (ordered[-1].time - ordered[0].time).total_seconds()
    effective_s = percentage = None
    if reference_step_time is None:
        notes.append("no reference step time is known: set --reference-step-time, or give --event-log")
    else:
        effective_s = difference * reference_step_time
        if runtime_s > 0:
            percentage = 100 * effective_s / runtime_s
        else:
            notes.append("all events have one time: there is no elapsed time to compare with")
    if percentage is not None and percentage > 100:
        notes.append("goodput above 100 %: the reference step time is longer than real steps took")
    return GoodputReport(
        job_name=job_name,
        total_events=len(ordered),
        job_started_count=sum(event.type is EventType.JOB_STARTED for event in ordered),
        # Loading step 0 is how a log says "fresh start": a start for the formula, not a checkpoint.
        checkpoints_loaded=sum(step > 0 for step in loads),
        checkpoints_saved=len(saves),
        total_runtime_s=runtime_s,
        min_loaded_step=min_loaded,
        max_saved_step=max_saved,
        step_difference=difference,
        reference_step_time_s=reference_step_time,
        effective_computation_time_s=effective_s,
        goodput_percentage=percentage,
        notes=tuple(notes),
    )


def _prepare(events: Iterable[RunEvent]) -> tuple[str, list[_Event]]:
    """Sort, put a proxy `user_scheduled` in front if there is none, drop repeated starts and ends."""
    job_name = ""
    found: list[_Event] = []
    for event in events:
        if event.type in _ORDER:
            job_name = job_name or event.job_name
            found.append(_Event(event.time, _ORDER[event.type], event.type, event.step or 0))
    if not found:
        raise ConfigError("there is no goodput event to calculate from.", hint="Is this the right log?")
    found.sort(key=lambda event: event[:2])
    if found[0].type is not EventType.USER_SCHEDULED:
        found.insert(0, found[0]._replace(type=EventType.USER_SCHEDULED, order=0))
    kept: list[_Event] = []
    for current in found:
        if kept and current.type in _DEDUPLICATED and kept[-1].type is current.type:
            kept.pop()
        kept.append(current)
    return job_name, kept


def _clock_notes(ordered: list[_Event]) -> list[str]:
    started = next(
        (index for index, event in enumerate(ordered) if event.type is EventType.JOB_STARTED), None
    )
    if started is None:
        return []
    # The proxy in front carries the time of a real event and proves nothing.
    early = [event for event in ordered[1:started] if event.type in _CHECKPOINTS]
    if not early:
        return []
    ahead_s = (ordered[started].time - early[0].time).total_seconds()
    return [
        f"a {early[0].type.value} is {ahead_s:.3f} s older than the first job_started: "
        "the log begins in the middle of a job, or the clocks of its hosts disagree"
    ]


def _step_notes(ordered: list[_Event], loads: list[int], saves: list[int]) -> list[str]:
    notes = []
    if not loads:
        notes.append("no checkpoint was loaded: a fresh start, counted from step 0")
    if not saves:
        notes.append("no checkpoint was saved: no progress is certain, goodput is 0")
    if loads and saves:
        if max(saves) <= min(loads):
            notes.append(f"no step past the loaded step {min(loads)} was saved: goodput is 0")
        first = next(event for event in ordered if event.type in _CHECKPOINTS)
        if first.type is EventType.CHECKPOINT_SAVED and min(loads) > 0:
            notes.append(
                f"a checkpoint was saved before any was loaded, so the job began before step {min(loads)}, "
                "from where the formula counts: goodput is understated (log checkpoint_loaded with step 0 "
                "on a fresh start)"
            )
    return notes
