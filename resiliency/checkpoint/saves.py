# SPDX-License-Identifier: Apache-2.0
"""What became of each save: a handle for the caller, a record for people, metrics for Prometheus."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import Enum


class SaveState(str, Enum):
    QUEUED = "queued"  # being captured
    CAPTURED = "captured"  # whole in this host's memory; the agent writes it
    COMMITTED = "committed"  # durable on storage, on all ranks
    FAILED = "failed"
    SKIPPED = "skipped"  # no slot was free: storage is slower than the interval


FINAL = frozenset({SaveState.COMMITTED, SaveState.FAILED, SaveState.SKIPPED})


@dataclass(frozen=True, kw_only=True)
class SaveRecord:
    """One save of one rank.  Durations in seconds; those of phases it did not reach are 0.

    Attributes:
        why: of a failed or skipped save.
        size_bytes: captured by this rank.
        held_s: how long training stood still when the save began; a fence may add to it later.
        queued_s: until the agent began to write.
        commit_s: from then until it was durable on all ranks.
        excess_s: how much longer the ten steps after it took than undisturbed ones; None until that is
            known, see `resiliency.checkpoint.step_times`.
    """

    step: int
    state: SaveState
    why: str = ""
    size_bytes: int = 0
    held_s: float = 0.0
    queued_s: float = 0.0
    commit_s: float = 0.0
    excess_s: float | None = None


class SaveHandle:
    """A save under way or done.  Any thread may ask."""

    def __init__(self, step: int) -> None:
        self.step = step
        self._record = SaveRecord(step=step, state=SaveState.QUEUED)
        self._changed = threading.Condition()

    @property
    def state(self) -> SaveState:
        return self._record.state

    @property
    def record(self) -> SaveRecord:
        return self._record

    def wait(self, timeout: timedelta, *, until: SaveState = SaveState.COMMITTED) -> bool:
        """Wait for the save to end, or to be captured; False at the timeout.

        Look at `state` afterwards: a save also ends by failing.
        """
        wanted = FINAL | {until}
        with self._changed:
            return self._changed.wait_for(lambda: self.state in wanted, timeout.total_seconds())

    def _update(self, record: SaveRecord) -> None:
        with self._changed:
            self._record = replace(record, excess_s=self._record.excess_s)
            self._changed.notify_all()

    def _learn_excess(self, excess_s: float) -> None:
        with self._changed:
            self._record = replace(self._record, excess_s=excess_s)


class SaveLog:
    """Counts for metrics, and the last records.  Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[SaveState] = Counter()
        self._held_s = self._commit_s = self._excess_s = 0.0
        self._bytes = 0
        self._last_step = 0

    def add(self, record: SaveRecord) -> None:
        with self._lock:
            self._counts[record.state] += 1
            self._held_s += record.held_s
            self._commit_s += record.commit_s
            if record.state is SaveState.COMMITTED:
                self._bytes += record.size_bytes
                self._last_step = max(self._last_step, record.step)

    def add_excess(self, excess_s: float) -> None:
        with self._lock:
            self._excess_s += excess_s

    def metrics_text(self, *, rank: int, agent_losses: int) -> str:
        """Prometheus' text format."""
        with self._lock:
            counts = {state: self._counts[state] for state in SaveState if state in FINAL}
            values = {
                "held_seconds_total": ("counter", round(self._held_s, 6)),
                # A gauge: steps may also have become faster.
                "excess_seconds": ("gauge", round(self._excess_s, 6)),
                "commit_seconds_total": ("counter", round(self._commit_s, 6)),
                "committed_bytes_total": ("counter", self._bytes),
                "last_committed_step": ("gauge", self._last_step),
                "agent_losses_total": ("counter", agent_losses),
            }
        lines = ["# TYPE resiliency_checkpoint_saves_total counter"]
        for state, count in counts.items():
            labels = f'rank="{rank}",outcome="{state.value}"'
            lines.append(f"resiliency_checkpoint_saves_total{{{labels}}} {count}")
        for name, (kind, value) in values.items():
            lines.append(f"# TYPE resiliency_checkpoint_{name} {kind}")
            lines.append(f'resiliency_checkpoint_{name}{{rank="{rank}"}} {value}')
        return "\n".join(lines) + "\n"
