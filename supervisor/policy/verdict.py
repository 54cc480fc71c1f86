# SPDX-License-Identifier: Apache-2.0
"""A conclusion that outlives the event: what it says, what it was drawn from, and when it is forgotten."""

from __future__ import annotations

from dataclasses import dataclass

#: Cause of a verdict on a job that its own launcher has ended as one that would fail again as it is.
STOPPED = "stopped"


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """`subject` (a host or a job) is `cause`, by `evidence`, until `expires_at`.

    A verdict without evidence cannot be looked at again, and one without an end would keep a repaired host
    out of use for ever: neither can be made.  A job that its launcher has stopped is not started again by the
    passing of time: there `expires_at` only ends the memory of a job that no host works for.
    """

    subject: str
    cause: str
    evidence: tuple[str, ...]
    at: float
    expires_at: float
    text: str = ""

    def __post_init__(self) -> None:
        if not self.evidence:
            raise ValueError(f"a verdict on {self.subject} needs evidence")
        if not self.at < self.expires_at < float("inf"):
            raise ValueError(f"a verdict on {self.subject} must expire, found {self.at} to {self.expires_at}")

    def holds(self, now: float) -> bool:
        return now < self.expires_at or self.cause == STOPPED
