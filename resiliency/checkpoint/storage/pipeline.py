# SPDX-License-Identifier: Apache-2.0
"""Two stages over the parts of a transfer: prepared ahead in memory, then moved in order.

The device never waits for the processor: a thread that has moved a part goes on with the next one that is
ready, without another thread having to wake up first, and prepares one only when none is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from resiliency.checkpoint.storage.memory import page_memory
from resiliency.checkpoint.threads import run_parallel

PreparedT = TypeVar("PreparedT")


@dataclass(frozen=True, kw_only=True)
class Transfer(Generic[PreparedT]):
    """Parts 0 .. count-1, of which each is to be done as `move(prepare(number, buffer))`.

    `movers`: moves that run at a time; below 1 counts as 1.
    `buffer_bytes`: size of the page-aligned buffer that each part has until it is moved.
    """

    prepare: Callable[[int, memoryview], PreparedT]
    move: Callable[[PreparedT], None]
    count: int
    movers: int
    buffer_bytes: int


def prepare_and_move(transfer: Transfer[PreparedT]) -> None:
    """Do all parts.  Moves begin in order; no more than one part beyond those being moved is in memory.

    The first error ends both stages and is raised here, after the threads have ended: nobody uses the
    caller's memory once this has returned (but see `run_parallel` for a second Ctrl-C).
    """
    parts = _Parts(transfer)
    run_parallel([parts.work] * min(parts.movers + 1, transfer.count), "resiliency-shard")


class _Parts(Generic[PreparedT]):
    """What is to be done next; the threads are alike and each takes what there is."""

    def __init__(self, transfer: Transfer[PreparedT]) -> None:
        self.movers = max(transfer.movers, 1)
        self._transfer = transfer
        #: Notified when there may be something to do; whoever has taken a part notifies, also by an error.
        self._changed = threading.Condition()
        self._to_prepare = 0
        self._to_move = 0
        self._moving = 0
        self._ready: dict[int, tuple[PreparedT, memoryview]] = {}
        #: Not closed by hand: the frames of an error may still refer to them.
        self._buffers: list[memoryview] = []
        self._stopped = False

    def work(self) -> None:
        """Take parts until none is left or one has failed."""
        try:
            self._work()
        except BaseException:
            with self._changed:
                self._stopped = True
                self._changed.notify_all()
            raise

    def _work(self) -> None:
        while (taken := self._take()) is not None:
            number, ready = taken
            if ready is not None:
                part, buffer = ready
                self._transfer.move(part)
                with self._changed:
                    self._moving -= 1
                    self._buffers.append(buffer)
                    self._changed.notify_all()
            else:
                buffer = self._buffer()
                part = self._transfer.prepare(number, buffer)
                with self._changed:
                    self._ready[number] = part, buffer
                    self._changed.notify_all()

    def _take(self) -> tuple[int, tuple[PreparedT, memoryview] | None] | None:
        """The next part, with what was prepared if it is to be moved; None: there is none."""
        with self._changed:
            while not self._stopped and self._to_move < self._transfer.count:
                number = self._to_move
                if number in self._ready and self._moving < self.movers:
                    self._to_move += 1
                    self._moving += 1
                    return number, self._ready.pop(number)
                number = self._to_prepare
                if number < self._transfer.count and number - self._to_move + self._moving <= self.movers:
                    self._to_prepare += 1
                    return number, None
                self._changed.wait()
            self._changed.notify_all()
            return None

    def _buffer(self) -> memoryview:
        with self._changed:
            if self._buffers:
                return self._buffers.pop()
        return page_memory(self._transfer.buffer_bytes)
