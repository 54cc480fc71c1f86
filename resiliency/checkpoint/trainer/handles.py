# SPDX-License-Identifier: Apache-2.0
"""What became of each save: a handle for the caller, a record for people, metrics for Prometheus."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import Enum
from typing import Any

from resiliency.prometheus import Metric, to_text
from resiliency.runtime import wait_awake


class SaveState(str, Enum):
    QUEUED = "queued"  # being captured
    CAPTURED = "captured"  # whole in this host's memory; the agent writes it
    COMMITTED = "committed"  # all tiers have reported, and it is committed in at least one
    FAILED = "failed"
    SKIPPED = "skipped"  # no slot was free, or no tier: storage is slower than the interval


FINAL = frozenset({SaveState.COMMITTED, SaveState.FAILED, SaveState.SKIPPED})

_METRICS = (
    Metric("saves_total", "counter", "Saves that ended, by outcome."),
    Metric("tier_saves_total", "counter", "Saves that ended in a tier, by outcome."),
    Metric("held_seconds_total", "counter", "Time that training stood still for saves."),
    Metric(
        "delayed_seconds_total",
        "counter",
        "Of that, waiting for a slot: storage is slower than the interval.",
    ),
    Metric(
        "excess_seconds",
        "gauge",
        "Time that the steps after saves took beyond undisturbed ones; may be negative.",
    ),
    Metric(
        "commit_seconds_total", "counter", "Time from the begin of writing until it was durable on all ranks."
    ),
    Metric("committed_bytes_total", "counter", "Bytes of this rank that were committed."),
    Metric("last_committed_step", "gauge", "Newest step that is committed in a tier."),
    Metric("agent_losses_total", "counter", "Times that the checkpoint agent was lost."),
    Metric("copies_verified_total", "counter", "Copies on other hosts that were verified."),
    Metric("copies_missing_total", "counter", "Steps whose copies could not be made."),
    Metric("last_complete_step", "gauge", "Newest step that every host has, with its copies."),
    Metric("hung_tiers", "gauge", "Tiers whose storage does not answer."),
)


@dataclass(frozen=True, kw_only=True)
class SaveRecord:
    """One save of one rank.  Durations in seconds; those of phases it did not reach are 0.

    Attributes:
        tiers: that it is for.
        committed_in: those of them that have it, while others may still write.  In the persistent tier a
            commit is one of all ranks, in the local tier one of this host's; see `complete`.
        why: of a failed or skipped save, or of the tiers that failed.
        size_bytes: captured by this rank.
        held_s: how long training stood still: when the save began, and from the next optimizer step on also
            at its fence.
        delayed_s: of that, waiting for a slot, where storage is slower than the interval; 0 if one was free.
        queued_s: until the agent began to write; of the tier that took longest, as is `commit_s`.
        commit_s: from then until it was durable on all ranks.
        excess_s: how much longer the ten steps after it took than undisturbed ones; None until that is
            known, see `resiliency.checkpoint.trainer.step_times`.
        copies_on: other hosts that have verified copies of what this host has in its local tier.
        complete: every host has committed its part to its local tier, and has its copies.
    """

    step: int
    state: SaveState
    tiers: tuple[str, ...] = ()
    committed_in: tuple[str, ...] = ()
    why: str = ""
    size_bytes: int = 0
    held_s: float = 0.0
    delayed_s: float = 0.0
    queued_s: float = 0.0
    commit_s: float = 0.0
    excess_s: float | None = None
    copies_on: tuple[str, ...] = ()
    complete: bool = False


class SaveHandle:
    """A save under way or done.  Any thread may ask.

    Attributes:
        try_number: which try to save the step it is, from 1; the same on all ranks.
    """

    def __init__(self, step: int, tiers: tuple[str, ...] = (), *, try_number: int = 1) -> None:
        self.step = step
        self.try_number = try_number
        self._record = SaveRecord(step=step, state=SaveState.QUEUED, tiers=tiers)
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
            return wait_awake(self._changed, lambda: self.state in wanted, timeout.total_seconds())

    def wait_complete(self, timeout: timedelta) -> bool:
        """Wait until the save is complete in the local tier of all hosts; False if it is not by then.

        It does not wait for what can not come any more: a save that ended outside the local tier.
        """

        def settled() -> bool:
            return self._record.complete or (self.state in FINAL and "local" not in self._record.committed_in)

        with self._changed:
            wait_awake(self._changed, settled, timeout.total_seconds())
            return self._record.complete

    def update(self, **changes: Any) -> None:
        """Change the record; for the checkpointer alone."""
        with self._changed:
            self._record = replace(self._record, **changes)
            self._changed.notify_all()


def await_tiers(handles: Sequence[SaveHandle], time_left: Callable[[], timedelta]) -> list[str]:
    """Wait for the end of all saves of one step; returns the tiers from which all ranks could restore it.

    When no time is left any tier will do; the agent goes on with the others.
    """
    for handle in handles:
        handle.wait(time_left())
    tiers = ["persistent"] if any("persistent" in h.record.committed_in for h in handles) else []
    for handle in handles:
        # Without the other hosts' parts this host's is worth nothing.
        if handle.record.complete or (not tiers and handle.wait_complete(time_left())):
            tiers.append("local")
    return tiers


class TierOutcomes:
    """The tiers of one save report one by one; this says what that makes of the save."""

    def __init__(self, tiers: Collection[str]) -> None:
        self._several = len(tiers) > 1
        self._waiting = set(tiers)
        self._errors: dict[str, str] = {}
        self._left_out: set[str] = set()
        self._committed: list[str] = []
        self._longest = (0.0, 0.0)

    def report(
        self,
        tier: str,
        error: str,
        *,
        left_out: bool = False,
        queued_s: float = 0.0,
        commit_s: float = 0.0,
    ) -> bool:
        """Take a tier's report; False if it is not its first."""
        if tier not in self._waiting:
            return False
        self._waiting.discard(tier)
        if error:
            self._errors[tier] = error
            if left_out:
                self._left_out.add(tier)
        else:
            self._committed.append(tier)
        self._longest = max(self._longest, (queued_s, commit_s), key=sum)
        return True

    @property
    def are_final(self) -> bool:
        return not self._waiting

    def changes(self) -> dict[str, Any]:
        """What is known now, for `SaveHandle`; with a final state once all have reported."""
        why = [f"{tier}: {error}" if self._several else error for tier, error in self._errors.items()]
        changes: dict[str, Any] = {
            "committed_in": tuple(self._committed),
            "why": "; ".join(why),
            "queued_s": self._longest[0],
            "commit_s": self._longest[1],
        }
        if self.are_final:
            failed = SaveState.SKIPPED if self._left_out == self._errors.keys() else SaveState.FAILED
            changes["state"] = SaveState.COMMITTED if self._committed else failed
        return changes


class SaveLog:
    """Counts for metrics, and the last records.  Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[SaveState] = Counter()
        self._tiers: Counter[tuple[str, str]] = Counter()
        self._held_s = self._delayed_s = self._commit_s = self._excess_s = 0.0
        self._bytes = 0
        self._last_step = 0
        self._copies = self._missing_copies = self._complete_step = self._hung = 0

    def add(self, record: SaveRecord) -> None:
        """A save has ended."""
        with self._lock:
            self._counts[record.state] += 1
            for tier in record.tiers:
                outcome = record.state
                if outcome is SaveState.COMMITTED and tier not in record.committed_in:
                    outcome = SaveState.FAILED
                self._tiers[tier, outcome.value] += 1
            self._delayed_s += record.delayed_s
            self._commit_s += record.commit_s
            if record.state is SaveState.COMMITTED:
                self._bytes += record.size_bytes
                self._last_step = max(self._last_step, record.step)

    def add_held(self, held_s: float) -> None:
        """Training stood still, at a save or at its fence."""
        with self._lock:
            self._held_s += held_s

    def add_excess(self, excess_s: float) -> None:
        with self._lock:
            self._excess_s += excess_s

    def set_hung(self, tiers: int) -> None:
        """In how many tiers storage does not answer."""
        with self._lock:
            self._hung = tiers

    def add_copies(self, *, verified: int, missing: bool, complete_step: int = 0) -> None:
        """What the agent says of the copies of a step."""
        with self._lock:
            self._copies += verified
            self._missing_copies += missing
            self._complete_step = max(self._complete_step, complete_step)

    def metrics_text(self, *, rank: int, agent_losses: int) -> str:
        """Prometheus' text format."""
        with self._lock:
            samples: list[tuple[str, dict[str, str], float]] = [
                *(("saves_total", {"outcome": s.value}, self._counts[s]) for s in SaveState if s in FINAL),
                *(
                    ("tier_saves_total", {"tier": str(tier), "outcome": str(outcome)}, count)
                    for (tier, outcome), count in sorted(self._tiers.items())
                ),
                ("held_seconds_total", {}, round(self._held_s, 6)),
                ("delayed_seconds_total", {}, round(self._delayed_s, 6)),
                ("excess_seconds", {}, round(self._excess_s, 6)),
                ("commit_seconds_total", {}, round(self._commit_s, 6)),
                ("committed_bytes_total", {}, self._bytes),
                ("last_committed_step", {}, self._last_step),
                ("agent_losses_total", {}, agent_losses),
                ("copies_verified_total", {}, self._copies),
                ("copies_missing_total", {}, self._missing_copies),
                ("last_complete_step", {}, self._complete_step),
                ("hung_tiers", {}, self._hung),
            ]
        of_rank = ((name, {"rank": str(rank), **labels}, value) for name, labels, value in samples)
        return to_text("resiliency_checkpoint_", _METRICS, of_rank)
