# SPDX-License-Identifier: Apache-2.0
"""What one restart cost, span by span: a pure function of run events and of process ends.

The zero is the moment at which the fault was injected, or found, or a whole host was killed.  Every span
is told by the same witness under every launcher: the training script's own events, and the ends of the
old processes as the kernel reported them to the benchmark.  What only one launcher tells about itself is
kept apart.

A stage counts as reached when the last rank has reached it, and each piece of time belongs to the
stage that ended it, so the spans add up to the total.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime

from resiliency.errors import ResiliencyError
from resiliency.events import EventType, JsonValue, RunEvent
from resiliency.goodput_measure.ledger import build_ledger
from resiliency.goodput_measure.lives import Life, mark_of, split_lives, to_us

#: Spans from the fault to the end of the first new step, in order, with what a reader is told.
SPANS = {
    "stopped": "detect the fault, stop the old ranks",
    "started": "rendezvous, create the new processes",
    "imported": "start Python, import the training stack",
    "initialized": "process groups, model, trainer",
    "restored": "load the checkpoint",
    "first_new_step": "first step",
}
#: The part that a launcher answers for; the rest is the training script's.
LAUNCHER_SPANS = ("stopped", "started")

# Some programs restore before they count as initialized, others after it; what leads up to the
# start of the restore is initialization in both.
_REACHED = {
    EventType.PROCESS_STARTED: "started",
    EventType.IMPORTED: "imported",
    EventType.RESTORE_STARTED: "initialized",
    EventType.CHECKPOINT_LOADED: "restored",
    EventType.INITIALIZED: "initialized",
    EventType.STEP_FINISHED: "first_new_step",
}


class Unmeasured(ResiliencyError):
    """A run that did not do what is to be measured; the message says what is missing."""


@dataclass(frozen=True, kw_only=True)
class Restart:
    """Seconds of one restart.  `spans_s` has every key of `SPANS` and adds up to `total_s`.

    `own_spans_s` is what the launcher says of itself; empty where it writes no run events.
    """

    spans_s: Mapping[str, float]
    total_s: float
    launcher_s: float
    own_spans_s: Mapping[str, float]
    step_s: float
    held_s: float | None
    restored_step: int
    lost_steps: int
    #: From the command to the very first step, and memory of the ranks after the restart, from outside.
    first_step_s: float | None = None
    memory_bytes: int | None = None

    def to_json(self) -> dict[str, JsonValue]:
        return asdict(self)


def measure(
    events: Sequence[RunEvent], ended: Mapping[int, datetime], *, zero: datetime | None = None
) -> Restart:
    """Measure the one restart in `events`.

    Args:
        events: all that training script and launcher wrote.
        ended: rank -> when its first process ended, as seen from outside.
        zero: when the restart begins; None: when the fault was injected.
    Raises:
        Unmeasured: the events do not hold exactly one fault and one complete restart after it.
    """
    fault = _only_fault(events)
    lives = _lives_by_attempt(events)
    if sorted(lives) != [0, 1]:
        raise Unmeasured(f"expected attempts 0 and 1, found {sorted(lives)}.")
    old, new = lives[0], lives[1]
    if not set(old) == set(new) == set(ended):
        raise Unmeasured(
            f"expected the same ranks before, after and among the ended processes, "
            f"found {sorted(old)}, {sorted(new)} and {sorted(ended)}."
        )
    spans = _spans(to_us(zero or fault.time), max(map(to_us, ended.values())), list(new.values()))
    restored = _restored_step(list(new.values()))
    return Restart(
        spans_s=spans,
        total_s=sum(spans.values()),
        launcher_s=sum(spans[name] for name in LAUNCHER_SPANS),
        own_spans_s=_own_spans(events),
        step_s=_steady_step_s([*old.values(), *new.values()]),
        held_s=_held_s([*old.values(), *new.values()]),
        restored_step=restored,
        lost_steps=(fault.step or restored) - restored,
    )


def _only_fault(events: Sequence[RunEvent]) -> RunEvent:
    faults = [event for event in events if event.type is EventType.FAULT_INJECTED]
    if len(faults) != 1:
        raise Unmeasured(f"expected one injected fault, found {len(faults)}.")
    return faults[0]


def _lives_by_attempt(events: Sequence[RunEvent]) -> dict[int, dict[int, Life]]:
    """Attempt -> rank -> life."""
    marks = defaultdict(list)
    for event in events:
        if event.rank is not None and (mark := mark_of(event)) is not None:
            marks[event.rank].append((event.attempt, mark))
    found: dict[int, dict[int, Life]] = defaultdict(dict)
    for rank, of_rank in marks.items():
        for life in split_lives(rank, of_rank):
            if life.attempt is None or rank in found[life.attempt]:
                raise Unmeasured(f"rank {rank} started more than once in attempt {life.attempt}.")
            found[life.attempt][rank] = life
    return dict(found)


def _spans(zero: int, stopped: int, new: list[Life]) -> dict[str, float]:
    reached = [(stopped, "stopped")]
    for kind, stage in _REACHED.items():
        times = [time for life in new if (time := life.first(kind)) is not None]
        if len(times) < len(new):
            raise Unmeasured(
                f"{len(new) - len(times)} of {len(new)} new ranks never reported {kind.value}.",
                event=kind.value,
            )
        # No stage counts while an old rank is left.  The kernel tells the start of a process to
        # 10 ms, so that a new one may seem to be older than the end of the last old one.
        reached.append((max(stopped, *times), stage))
    spans_us = dict.fromkeys(SPANS, 0)
    before, order = zero, list(SPANS)
    for time, stage in sorted(reached, key=lambda item: (item[0], order.index(item[1]))):
        spans_us[stage] += max(time - before, 0)
        before = max(time, before)
    return {stage: span / 1e6 for stage, span in spans_us.items()}


def _restored_step(new: list[Life]) -> int:
    loaded = {mark.step for life in new for mark in life.marks if mark.type is EventType.CHECKPOINT_LOADED}
    if len(loaded) != 1 or (step := next(iter(loaded))) is None:
        raise Unmeasured(f"expected all new ranks to load the checkpoint of one step, found {loaded}.")
    return step


def _own_spans(events: Sequence[RunEvent]) -> dict[str, float]:
    """Detected, stopped, rendezvous, started, as the launcher reports them."""
    incidents = build_ledger(events).incidents
    if not incidents:
        return {}
    stages = ("detected", "stopped", "rendezvous", "started")
    return {stage: span for stage in stages if (span := incidents[0].spans[stage]) is not None}


def _steady_step_s(lives: list[Life]) -> float:
    """Median step, without the first of each life: it warms up."""
    durations = []
    for life in lives:
        of_life = [mark.duration for mark in life.marks if mark.type is EventType.STEP_FINISHED]
        durations += [duration for duration in of_life[1:] if duration is not None]
    if not durations:
        raise Unmeasured("no step after the first of an attempt reported its duration.")
    return statistics.median(durations) / 1e6


def _held_s(lives: list[Life]) -> float | None:
    """Median time for which a save held training; None when nothing was saved.

    A median, because the first save of a process plans and is slower than the others.
    """
    held = []
    for life in lives:
        since: int | None = None
        for mark in life.marks:
            if mark.type is EventType.SAVE_STARTED:
                since = mark.time
            elif mark.type is EventType.SAVE_RELEASED and since is not None:
                held.append(mark.time - since)
                since = None
    return statistics.median(held) / 1e6 if held else None
