# SPDX-License-Identifier: Apache-2.0
"""Requests that have no answer yet: those that arrived, and those that wait for what other workers say.

What is applied is written into the journal, and only then answered: `apply` returns both, and the caller
writes in between. The standard library only; no clock, no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from resiliency.data.dispatch.book import Answer
from resiliency.data.dispatch.bookkeeper import Bookkeeper
from resiliency.data.dispatch.ranges import Plain


class AnswerFuture(Protocol):
    """As those of `asyncio` and `concurrent.futures`."""

    def done(self) -> bool: ...

    def cancel(self) -> bool: ...

    def set_result(self, result: Plain, /) -> None: ...


@dataclass
class Pending:
    """A request that has no answer yet; it may be held until a time."""

    request: Mapping[str, object]
    answer: AnswerFuture
    hold_until: float


class PendingRequests:
    """See the module."""

    def __init__(self, keeper: Bookkeeper) -> None:
        self.keeper = keeper
        #: Requests that wait for what others say.
        self.held: list[Pending] = []
        self._arrived: list[Pending] = []

    def add_request(self, pending: Pending) -> None:
        self._arrived.append(pending)

    def release_held(self, now: float) -> bool:
        """Whether requests were held for long enough, and are to be applied a last time."""
        if not any(pending.hold_until <= now for pending in self.held):
            return False
        self._arrived, self.held = self.held + self._arrived, []
        return True

    def apply(self, now: float) -> tuple[list[Plain], list[tuple[Pending, Plain]]]:
        """Entries for the journal, and the answers to be given once they are durable."""
        batch, self._arrived = self._arrived, []
        answered: list[tuple[Pending, Plain]] = []
        entries: list[Plain] = []
        while batch:
            before = len(entries)
            for pending in batch:
                if pending.answer.done():  # its connection was lost
                    continue
                self._give_up_older(pending)
                answer, entry = self.keeper.apply(pending.request)
                if entry is not None:
                    entries.append(entry)
                if answer.get("answer") == Answer.WAIT.value and now < pending.hold_until:
                    self.held.append(pending)
                else:
                    answered.append((pending, answer))
            batch = []
            if len(entries) > before:  # which may be what others wait for
                batch, self.held = self.held, []
        return entries, answered

    def _give_up_older(self, pending: Pending) -> None:
        """A worker has one request on its way: one that is still held is of a connection that it left, and
        would take a range that no one gets."""
        if "seq" in pending.request:
            for older in self.held:
                if older is not pending and older.request.get("worker") == pending.request["worker"]:
                    older.answer.cancel()
