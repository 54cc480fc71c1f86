# SPDX-License-Identifier: Apache-2.0
"""Tells the story of a job as the events that its processes would have written."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta, timezone
from pathlib import Path

from resiliency.events import EventType as E
from resiliency.events import JsonValue, RunEvent
from resiliency.goodput_measure.lanes import PRIORITY, Span, Spans, sweep

BEGIN = datetime(2026, 3, 1, 12, 0, 0, tzinfo=timezone.utc)


def at(seconds: float) -> datetime:
    return BEGIN + timedelta(microseconds=round(seconds * 1e6))


def event(
    seconds: float,
    type: E,
    *,
    rank: int | None = None,
    step: int | None = None,
    attempt: int | None = None,
    job: str = "demo",
    host: str = "host-0",
    **fields: JsonValue,
) -> RunEvent:
    return RunEvent(
        type=type,
        time=at(seconds),
        job_name=job,
        host=host,
        rank=rank,
        step=step,
        attempt=attempt,
        fields=fields,
    )


def write_log(path: Path, events: Iterable[RunEvent]) -> Path:
    path.write_text("".join(item.to_json() + "\n" for item in events))
    return path


def resolve(intervals: Iterable[Span], start: int, end: int) -> Spans:
    """[start, end) as a lane of one cause each; the strongest of overlapping intervals wins."""
    lane = Spans(end)
    for low, _, cause in sweep([(*span[:2], PRIORITY[span.bucket]) for span in intervals], start, end):
        lane.append(low, cause)
    return lane


class Story:
    """A job of `ranks` ranks in step; `now` is the time of the story in seconds."""

    def __init__(self, ranks: int, *, step_s: float = 1.0, per_host: int = 8) -> None:
        self.events: list[RunEvent] = []
        self.ranks = range(ranks)
        self.step_s = step_s
        self.per_host = per_host
        self.now = 0.0
        self.attempt = 0
        self.step = 0
        self.tell(E.JOB_STARTED)

    def tell(self, type: E, *, rank: int | None = None, step: int | None = None, **fields: JsonValue) -> None:
        host = f"host-{(rank or 0) // self.per_host}"
        self.events.append(
            event(self.now, type, rank=rank, step=step, attempt=self.attempt, host=host, **fields)
        )

    def everyone(self, type: E, *, step: int | None = None, **fields: JsonValue) -> None:
        for rank in self.ranks:
            self.tell(type, rank=rank, step=step, **fields)

    def start(
        self,
        *,
        restore: int | None = None,
        tier: str = "local",
        imports: float = 3,
        init: float = 2,
        load: float = 1,
    ) -> Story:
        """Rendezvous (1 s), processes, imports, initialization, restore, up to the first step."""
        self.now += 1
        self.tell(E.RENDEZVOUS_DONE)
        self.everyone(E.PROCESS_STARTED)
        self.tell(E.WORKERS_STARTED)
        self.now += imports
        self.everyone(E.IMPORTED)
        self.now += init
        if restore is not None:
            self.everyone(E.RESTORE_STARTED)
            self.now += load
            self.everyone(E.CHECKPOINT_LOADED, step=restore, tier=tier)
            self.step = restore
        self.everyone(E.INITIALIZED)
        self.everyone(E.STEP_STARTED, step=self.step)
        return self

    def steps(self, count: int, *, save_every: int = 0, hold: float = 0.0) -> Story:
        for _ in range(count):
            self.now += self.step_s
            self.step += 1
            self.everyone(E.STEP_FINISHED, step=self.step, duration_s=self.step_s)
            if save_every and self.step % save_every == 0:
                self.everyone(E.SAVE_STARTED, step=self.step)
                self.now += hold
                self.everyone(E.SAVE_RELEASED, step=self.step)
                self.tell(E.CHECKPOINT_SAVED, rank=0, step=self.step)
        return self

    def fault(
        self,
        rank: int,
        *,
        into_step: float = 0.5,
        unnoticed: float = 0.1,
        injected: bool = True,
        stop: float = 0.4,
    ) -> Story:
        """`rank` dies `into_step` seconds into the step; the launcher notices and stops all."""
        self.now += into_step
        if injected:
            self.tell(E.FAULT_INJECTED, rank=rank, fault="kill")
        self.now += unnoticed
        self.tell(E.FAULT_DETECTED, rank=rank, cause="SIGKILL")
        self.now += stop
        self.tell(E.WORKERS_STOPPED)
        self.attempt += 1
        return self

    def finish(self) -> Story:
        self.everyone(E.RANK_FINISHED)
        self.now += 0.5
        self.tell(E.JOB_TERMINATED)
        return self
