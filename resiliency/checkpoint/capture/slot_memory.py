# SPDX-License-Identifier: Apache-2.0
"""Makes room in a rank's slots in the background, so that no save allocates or pins on the training thread.

A gigabyte takes 0.6 s to allocate and fault in, and 5 s where a virtual machine has not touched it before.
The thread lives as long as there is something to allocate; the kernel works outside the interpreter's lock.
It has the priority of the process, and several threads take the page faults: where all cores train, a thread
of lower priority, or one alone, comes too late for the first save.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch

from resiliency.checkpoint.capture.arena import RankArena
from resiliency.checkpoint.capture.cuda import HostRegistry, PinnedMemory
from resiliency.checkpoint.capture.slots import SlotFile
from resiliency.checkpoint.threads import start_thread
from resiliency.errors import ConfigError, ResourceShortage

logger = logging.getLogger(__name__)

_VALUES_SLACK_BYTES = 64 << 10


@dataclass(frozen=True)
class SlotRoom:
    """What a capture needs in a slot.

    Attributes:
        device: whose copies want the slot pinned; None: it need not be.
    """

    tensor_bytes: int = 0
    values_bytes: int = 0
    device: torch.device | None = None

    def growing(self, before: SlotRoom) -> SlotRoom:
        """What to reserve for this where `before` was wanted: values may grow between captures."""
        return SlotRoom(
            max(self.tensor_bytes, before.tensor_bytes),
            max(2 * self.values_bytes + _VALUES_SLACK_BYTES, before.values_bytes),
            self.device or before.device,
        )


class PreparedSlot:
    """The memory of a slot as it was mapped once, and pinned where `pinned` is given."""

    def __init__(self, memory: memoryview, pinned: PinnedMemory | None, flat: torch.Tensor) -> None:
        self.memory = memory
        self.flat = flat
        self.is_pinned = pinned is not None or not memory.nbytes
        self._pinned = pinned

    def close(self) -> None:
        """Unpin.  No copy may be under way."""
        if self._pinned is not None:
            self._pinned.close()


class SlotMemory:
    """Prepares the slots of `arena`.  Any thread may use it.

    Args:
        registry: pins what is prepared for a device.
        before_slot: called in the preparing thread before each slot and after the last: for tests and pacing.
    """

    def __init__(
        self, arena: RankArena, *, registry: HostRegistry, before_slot: Callable[[], None] | None = None
    ) -> None:
        self._arena = arena
        self._registry = registry
        self._before = before_slot
        self._changed = threading.Condition()
        self._wanted = SlotRoom()
        self._prepared: dict[SlotFile, PreparedSlot] = {}
        self._replaced: list[tuple[SlotFile, PreparedSlot]] = []
        self._error: ConfigError | None = None
        self._thread: threading.Thread | None = None  # the last one: it ends a moment after it says so
        self._prepares = False
        self._closed = False

    def is_ready(self, slot: SlotFile, room: SlotRoom) -> bool:
        return not self.unready_bytes(slot, room)

    def unready_bytes(self, slot: SlotFile, room: SlotRoom) -> int:
        """What is still to be allocated, mapped or pinned for a capture into `slot`."""
        prepared = self._prepared.get(slot)
        missing = slot.missing_bytes(room.tensor_bytes, room.values_bytes)
        if (
            prepared is None
            or prepared.memory.nbytes < room.tensor_bytes
            or (room.device is not None and not prepared.is_pinned)
        ):
            return max(missing, room.tensor_bytes, 1)
        return missing

    def prepared(self, slot: SlotFile) -> PreparedSlot:
        """The memory of a slot that is ready."""
        return self._prepared[slot]

    def take_replaced(self) -> list[PreparedSlot]:
        """Memory that no later capture goes to, to be closed once those begun before are done."""
        with self._changed:
            replaced, self._replaced = self._replaced, []
        return [each for _, each in replaced]

    def request(self, room: SlotRoom) -> None:
        """Have that much room in all slots, later.  Does not wait."""
        with self._changed:
            self._wanted = room.growing(self._wanted)
            if self._closed or self._prepares or self._is_done():
                return
            self._error, self._prepares = None, True
            thread = threading.Thread(target=self._run, name="resiliency-memory", daemon=True)
            try:
                start_thread(thread)
            except ResourceShortage as error:  # who waits for it ends, and the next one asks again
                logger.warning("memory for captures not prepared: %s", error)
                self._prepares = False
            else:
                self._thread = thread

    def wait(self, timeout: timedelta, room: SlotRoom, *, slot: SlotFile | None = None) -> bool:
        """Wait until `slot` (None: each slot) has the room that was requested; False at the timeout.

        Raises:
            ConfigError: there is no room; the next request tries again.
        """
        slots = self._arena.slots if slot is None else [slot]
        deadline = time.monotonic() + timeout.total_seconds()
        with self._changed:
            while not all(self.is_ready(each, room) for each in slots):
                if self._error is not None:
                    error, self._error = self._error, None
                    raise error
                left = deadline - time.monotonic()
                if left <= 0 or not self._prepares:
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

    def leave(self, slot: SlotFile) -> list[PreparedSlot]:
        """A copy into `slot` hangs: all memory that it may go to is the caller's now."""
        with self._changed:
            left = [each for its, each in self._replaced if its is slot]
            self._replaced = [(its, each) for its, each in self._replaced if its is not slot]
            if (prepared := self._prepared.pop(slot, None)) is not None:
                left.append(prepared)
        return left

    def unpin(self) -> None:
        """After `close`, when all copies are done, but for those into slots that were left."""
        for prepared in (*self.take_replaced(), *self._prepared.values()):
            prepared.close()
        self._prepared.clear()

    def _is_done(self) -> bool:
        return all(self.is_ready(slot, self._wanted) for slot in self._arena.slots)

    def _run(self) -> None:
        error: ConfigError | None = None
        try:
            while (wanted := self._next()) is not None:
                for slot in self._arena.make_room(wanted.tensor_bytes, wanted.values_bytes):
                    if slot is not None:
                        error = self._prepare(slot, wanted.device) or error
                    with self._changed:
                        self._changed.notify_all()
                    if self._before is not None:
                        self._before()
                    if self._closed:
                        break
                if error is not None:
                    break
        except ConfigError as failure:
            error = failure
        except Exception as failure:  # the border of this thread: whoever waits is told
            error = ConfigError(
                f"memory for captures of rank {self._arena.rank} could not be prepared: {failure}.",
                hint="See the text of the error; later saves try again.",
                rank=self._arena.rank,
            )
            error.__cause__ = failure
        if error is not None:
            logger.warning("memory for captures not prepared: %s", str(error))
            with self._changed:
                self._error, self._prepares = error, False
                self._changed.notify_all()

    def _prepare(self, slot: SlotFile, device: torch.device | None) -> ConfigError | None:
        """Pin a slot that is mapped; where that fails it still serves captures that need no pinned memory."""
        memory, before = slot.memory, self._prepared.get(slot)
        assert memory is not None
        if before is not None and before.memory is memory and (device is None or before.is_pinned):
            return None
        flat = (
            torch.frombuffer(memory, dtype=torch.uint8)
            if memory.nbytes
            else torch.empty(0, dtype=torch.uint8)
        )
        pinned, failure = None, None
        if device is not None and memory.nbytes:
            try:
                pinned = PinnedMemory(flat.data_ptr(), memory.nbytes, device, self._registry)
            except ConfigError as error:
                failure = error
        with self._changed:
            self._prepared[slot] = PreparedSlot(memory, pinned, flat)
            if before is not None:
                self._replaced.append((slot, before))
        return failure

    def _next(self) -> SlotRoom | None:
        with self._changed:
            if not self._closed and not self._is_done():
                return self._wanted
            self._prepares = False  # a request from here on starts another thread
            self._changed.notify_all()
            return None
