# SPDX-License-Identifier: Apache-2.0
"""Makes room in a rank's slots in the background, so that no save allocates on the training thread.

A gigabyte takes 0.7 s to allocate, and 5 s where a virtual machine has not touched it before.  The thread
lives as long as there is something to allocate; the kernel works outside the interpreter's lock.  It has the
priority of the process: with a lower one, where all cores train, it would come too late for the first save.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from resiliency.checkpoint.capture.arena import RankArena
from resiliency.checkpoint.capture.slots import SlotFile
from resiliency.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)

_VALUES_SLACK_BYTES = 64 << 10


def values_room(values_bytes: int) -> int:
    """What to reserve for values: they may grow between captures."""
    return 2 * values_bytes + _VALUES_SLACK_BYTES


class SlotMemory:
    """Prepares the slots of `arena`.  Any thread may use it.

    Args:
        before_slot: called in the preparing thread before each slot and after the last: for tests and pacing.
    """

    def __init__(self, arena: RankArena, *, before_slot: Callable[[], None] | None = None) -> None:
        self._arena = arena
        self._before = before_slot
        self._changed = threading.Condition()
        self._wanted = (0, 0)
        self._error: ConfigError | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def request(self, tensor_bytes: int, values_bytes: int) -> None:
        """Have room for that much in all slots, later.  Does not wait."""
        with self._changed:
            self._wanted = (max(tensor_bytes, self._wanted[0]), max(values_bytes, self._wanted[1]))
            if self._closed or self._thread is not None or self._is_done():
                return
            self._error = None
            self._thread = threading.Thread(target=self._run, name="resiliency-memory", daemon=True)
            self._thread.start()

    def wait(
        self, timeout: timedelta, *, slot: SlotFile | None = None, tensor_bytes: int, values_bytes: int
    ) -> bool:
        """Wait until `slot` (None: each slot) has the room that was requested; False at the timeout.

        Raises:
            ConfigError: there is no room; the next request tries again.
        """
        slots = self._arena.slots if slot is None else [slot]
        deadline = time.monotonic() + timeout.total_seconds()
        with self._changed:
            while not all(each.is_ready(tensor_bytes, values_bytes) for each in slots):
                if self._error is not None:
                    error, self._error = self._error, None
                    raise error
                left = deadline - time.monotonic()
                if left <= 0 or self._thread is None:
                    return False
                self._changed.wait(left)
            return True

    def close(self, timeout: timedelta) -> bool:
        """Begin no further slot; False if one is still being prepared at the timeout.  Idempotent."""
        with self._changed:
            self._closed = True
            thread = self._thread
        if thread is not None:
            thread.join(timeout.total_seconds())
        return thread is None or not thread.is_alive()

    def _is_done(self) -> bool:
        return all(slot.is_ready(*self._wanted) for slot in self._arena.slots)

    def _run(self) -> None:
        error: ConfigError | None = None
        try:
            while (wanted := self._next()) is not None:
                for _ in self._arena.make_room(*wanted):
                    with self._changed:
                        self._changed.notify_all()
                    if self._before is not None:
                        self._before()
                    if self._closed:
                        break
        except ConfigError as failure:
            error = failure
        except (OSError, CheckpointError) as failure:  # the border of this thread: whoever waits is told
            error = ConfigError(
                f"memory for captures of rank {self._arena.rank} could not be prepared: {failure}.",
                hint="See the text of the error; later saves try again.",
                rank=self._arena.rank,
            )
            error.__cause__ = failure
        with self._changed:
            self._error, self._thread = error, None
            self._changed.notify_all()
        if error is not None:
            logger.warning("memory for captures not prepared: %s", str(error))

    def _next(self) -> tuple[int, int] | None:
        with self._changed:
            return None if self._closed or self._is_done() else self._wanted
