# SPDX-License-Identifier: Apache-2.0
"""Faults of an API server as values, and the record of its calls."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class FaultKind(Enum):
    """What happens to a call.  *Before* is without its effect, *after* is with it."""

    ANSWER = "answer"  # it is refused with `status`
    DROP_BEFORE = "drop_before"  # the connection breaks
    DROP_AFTER = "drop_after"
    HOLD_BEFORE = "hold_before"  # no answer, until the client goes away
    HOLD_AFTER = "hold_after"


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call as rights see it: `resource` holds the subresource, as in ``pods/eviction``.

    Attributes:
        user: token of the caller.
        dry_run: it had no effect, whatever was answered.
    """

    verb: str
    group: str
    resource: str
    namespace: str
    name: str
    user: str = ""
    dry_run: bool = False

    @property
    def changes(self) -> bool:
        """Whether it may have an effect."""
        return self.verb not in ("get", "list", "watch") and not self.dry_run


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault at the calls `call` to `call + times - 1` of those that match.

    Attributes:
        verb, resource, user: of matching calls; empty is any.
        changes_only: only calls with an effect match.
        call: counted from 1, from when the fault was placed.
        times: 0 is for ever.
        status: of ANSWER: 403, 409, 410, 422, 429, 500, ...
        retry_after_s: header of the answer.
        delay_s: before the call is looked at.
    """

    kind: FaultKind = FaultKind.ANSWER
    verb: str = ""
    resource: str = ""
    user: str = ""
    changes_only: bool = False
    call: int = 1
    times: int = 1
    status: int = 0
    retry_after_s: int | None = None
    delay_s: float = 0.0

    def matches(self, call: Call) -> bool:
        return (
            self.verb in ("", call.verb)
            and self.resource in ("", call.resource)
            and self.user in ("", call.user)
            and (call.changes or not self.changes_only)
        )


class PlacedFaults:
    """Faults with how many calls each has seen."""

    def __init__(self) -> None:
        self._placed: list[tuple[Fault, list[int]]] = []

    def place(self, *faults: Fault) -> None:
        self._placed += [(fault, [0]) for fault in faults]

    def clear(self) -> None:
        self._placed.clear()

    def hit(self, call: Call) -> Fault | None:
        """The fault that this call gets; it is counted for all that match."""
        found = None
        for fault, seen in self._placed:
            if fault.matches(call):
                seen[0] += 1
                due = seen[0] >= fault.call and (not fault.times or seen[0] < fault.call + fault.times)
                found = found or (fault if due else None)
        return found
