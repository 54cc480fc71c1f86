# SPDX-License-Identifier: Apache-2.0
"""Copy a training step's state into a slot while training goes on.

    capture = capturer.begin(state, step)   # picks up what to copy, starts copying
    ...forward, backward...                 # reads the state, does not write it
    capturer.fence()                        # all of it is copied: the optimizer may write
    optimizer.step()

Between `begin` and `fence` the state must not be written.  What a forward writes all the same
(running statistics, random generators, counters) is copied before `begin` returns: all small
tensors, those that `eager` selects, and where `begin` is told which optimizers write the state, all
that they do not own.  A capture that was not fenced in time is dropped, never published with bytes of
two steps.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Any, Protocol

import torch

from resiliency.checkpoint.arena import RankArena
from resiliency.checkpoint.copying import Copier, CopyRun, MemoryPiece, Piece, pieces
from resiliency.checkpoint.cuda import DeviceCopier, Pair, PinnedMemory
from resiliency.checkpoint.owned_memory import OwnedMemory, Owners
from resiliency.checkpoint.slots import SlotFile
from resiliency.checkpoint.state import Snapshot, StateWalker, stored_as
from resiliency.checkpoint.table import StateLayout, TensorEntry
from resiliency.errors import CheckpointError, ConfigError, ResiliencyError

logger = logging.getLogger(__name__)

EAGER_BELOW_BYTES = 64 << 10
FENCE_TIMEOUT = timedelta(minutes=2)


class WhenFull(Enum):
    """What to do when every slot is lent or being filled."""

    SKIP = "skip"
    WAIT = "wait"


class Outcome(Enum):
    RUNNING = "running"
    CAPTURED = "captured"
    DROPPED = "dropped"


@dataclass(frozen=True, kw_only=True)
class CaptureOptions:
    """How captures are made.

    Attributes:
        threads: copy host memory with that many.
        when_full: SKIP counts and reports the save; WAIT holds training for up to `wait_timeout`, then
            skips.
        eager: entries to copy before `begin` returns, besides those below `eager_below_bytes`.
        before_piece: called in a copy thread before each piece that `begin` does not wait for, see `Copier`.
    """

    threads: int = 2
    when_full: WhenFull = WhenFull.SKIP
    wait_timeout: timedelta = timedelta(seconds=30)
    eager: Callable[[TensorEntry], bool] | None = None
    eager_below_bytes: int = EAGER_BELOW_BYTES
    before_piece: Callable[[int], None] | None = None

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise ConfigError(f"a capture needs at least 1 thread, found {self.threads}.")

    def is_small(self, entry: TensorEntry) -> bool:
        return entry.size_bytes < self.eager_below_bytes

    def is_eager(self, entry: TensorEntry) -> bool:
        return self.is_small(entry) or bool(self.eager and self.eager(entry))


@dataclass
class CaptureStats:
    """Counts since the capturer was made.  Durations in seconds, as training felt them."""

    captured: int = 0
    skipped: int = 0
    dropped: int = 0
    #: Saves that found no free slot at once and waited.
    delayed: int = 0
    #: How long the last one did.
    last_delayed_s: float = 0.0
    #: Saves for which a new layout was made.
    layouts: int = 0
    held_s: float = 0.0
    last_held_s: float = 0.0


class _Run(Protocol):
    def fence(self, timeout: timedelta | None) -> bool: ...

    def wait(self, timeout: timedelta | None = None) -> bool: ...

    def stop(self) -> None: ...


class _HostRun:
    """Threads that copy; they are done with the sources when the slot is filled."""

    def __init__(self, run: CopyRun) -> None:
        self._run = run
        self.wait = self.fence = run.wait
        self.stop = run.stop


class Capture:
    """One capture under way or done."""

    def __init__(self, owner: Capturer, slot: SlotFile, snapshot: Snapshot, step: int, *, keep: bool) -> None:
        self.step = step
        self.layout = snapshot.layout
        self.values = snapshot.values
        self.slot_path = slot.path
        self._owner = owner
        self._slot = slot
        self._keep = keep
        self._runs: list[_Run] = []
        self._eager: _Run | None = None
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._fenced = False
        self._late = False
        self.outcome = Outcome.RUNNING
        self.error: BaseException | None = None

    def fence(self, timeout: timedelta = FENCE_TIMEOUT) -> bool:
        """Hold the caller until the state may be written again; cheap if it may already.

        False if the copy did not end in time or failed: the capture is dropped, and the state may
        be written all the same.
        """
        if self._fenced:
            return not self._late
        began = time.monotonic()
        self._hold(self._runs, timeout)
        self._fenced = True
        self._owner._held(time.monotonic() - began)
        return not self._late

    def hold_for_eager(self) -> None:
        """Hold the caller until what a forward may write is copied."""
        if self._eager is not None:
            self._hold([self._eager], FENCE_TIMEOUT)

    def _hold(self, runs: Sequence[_Run], timeout: timedelta) -> None:
        deadline = time.monotonic() + timeout.total_seconds()
        for run in runs:
            left = timedelta(seconds=max(0.0, deadline - time.monotonic()))
            try:
                self._late |= not run.fence(left)
            except CheckpointError:  # the publisher reports it
                self._late = True
        if self._late:
            for run in self._runs:
                run.stop()

    def wait(self, timeout: timedelta) -> bool:
        """Block until the capture is published or dropped (see `outcome`); False at the timeout."""
        return self._done.wait(timeout.total_seconds())

    def release(self) -> None:
        """For a capture made with `keep`: the slot may be captured into again.  Idempotent."""
        with self._lock:
            lent, self._keep = self._keep and self.outcome is Outcome.CAPTURED, False
        if lent:
            self._owner.arena.end_lend(self._slot)

    def _settle(self) -> None:
        """In the publisher's thread: wait for the bytes, then publish or drop."""
        try:
            for run in self._runs:
                run.wait()
            if self._late:
                raise CheckpointError(
                    f"the capture of step {self.step} was not done at its fence.", step=self.step
                )
            with self._lock:
                self._owner.arena.publish(self._slot, self.values, lend=self._keep)
                self.outcome = Outcome.CAPTURED
        except Exception as error:  # the border of this thread: reported, and the slot given back
            self.error = error
            self.outcome = Outcome.DROPPED
            self._owner.arena.abandon(self._slot)
            logger.error("capture of step %d dropped: %s", self.step, error)
        finally:
            self._runs = []
            self._owner._settled(self)
            self._done.set()


class Capturer:
    """Captures one rank's state into its arena.  One thread of training uses it.

    Args:
        walker: knows the structure of the state; default: plain tensors belong to this rank.
    """

    def __init__(
        self, arena: RankArena, options: CaptureOptions | None = None, *, walker: StateWalker | None = None
    ) -> None:
        self.arena = arena
        self.stats = CaptureStats()
        self._options = options or CaptureOptions()
        self._walker = walker or StateWalker()
        self._owners = Owners()
        self._copier = Copier(self._options.threads, before_piece=self._options.before_piece)
        self._devices: dict[torch.device, DeviceCopier] = {}
        self._areas: dict[SlotFile, _Area] = {}
        self._layout: StateLayout | None = None
        self._current: Capture | None = None  # not fenced yet
        self._last: Capture | None = None
        self._queue: queue.SimpleQueue[Capture | None] = queue.SimpleQueue()
        self._publisher = threading.Thread(target=self._publish, name="resiliency-publish", daemon=True)
        self._publisher.start()

    def begin(
        self,
        state: object,
        step: int,
        *,
        writers: Sequence[object] = (),
        keep: bool = False,
        wait: timedelta | None = None,
    ) -> Capture | None:
        """Start to capture `state`; None if no slot was free (counted in `stats.skipped`).

        Args:
            writers: fence before they write the state.  If all are torch optimizers, only what they own
                may still be under way when this returns; none, or others as well: all that is large.
            wait: for a slot, at most so long; None: as `CaptureOptions.when_full` says.
            keep: the slot is not captured into again until `Capture.release`: for a capture that a
                writer is to persist.  Without it the next captures may overwrite it, the newest first
                excepted.
        Raises:
            ConfigError: the state cannot be saved, or there is no room for a slot.
        """
        began = time.monotonic()
        self.stats.last_held_s = self.stats.last_delayed_s = 0.0
        self.fence()
        if self._last is not None:  # its slot counts as busy until it is published
            self._last.wait(FENCE_TIMEOUT)
        try:
            slot = self._take(step, wait)
            if slot is None:
                return None
            try:
                capture = self._start(slot, state, step, keep, writers)
            except BaseException:
                self.arena.abandon(slot)
                raise
            self._current = self._last = capture
            self._queue.put(capture)
            capture.hold_for_eager()
            return capture
        finally:
            self._held(time.monotonic() - began)

    def fence(self, timeout: timedelta = FENCE_TIMEOUT) -> bool:
        """Fence the capture under way, if any; see `Capture.fence`."""
        capture, self._current = self._current, None
        return capture.fence(timeout) if capture is not None else True

    def install_fence(self, optimizer: Any) -> Any:
        """Fence before each step of a torch optimizer.  Returns a handle with `remove()`.

        Raises:
            ConfigError: `optimizer` has no such hook.
        """
        if not hasattr(optimizer, "register_step_pre_hook"):
            raise ConfigError(
                f"{type(optimizer).__name__} is no torch optimizer: it has no register_step_pre_hook.",
                hint="Call capturer.fence() before it writes the parameters.",
            )

        def hook(*_: object) -> None:
            self.fence()

        return optimizer.register_step_pre_hook(hook)

    def prewarm(self, state: object) -> None:
        """Allocate, map and (on CUDA) pin all slots for `state`, before the first capture needs them."""
        snapshot = self._walker.snapshot(state)
        self.arena.prewarm(snapshot.layout, 2 * len(snapshot.values))
        for slot in self.arena.slots:
            if slot.memory is not None and slot.capacity_bytes >= snapshot.layout.size_bytes:
                self._area(slot, snapshot)

    def close(self, timeout: timedelta = FENCE_TIMEOUT) -> None:
        """Finish the capture under way, end the threads, unpin.  The arena stays open.  Idempotent."""
        self.fence(timeout)
        self._queue.put(None)
        self._publisher.join(timeout.total_seconds())
        self._copier.close()
        for area in self._areas.values():
            area.close()
        self._areas.clear()

    def __enter__(self) -> Capturer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _take(self, step: int, wait: timedelta | None) -> SlotFile | None:
        slot = self.arena.try_take()
        if wait is None and self._options.when_full is WhenFull.WAIT:
            wait = self._options.wait_timeout
        if slot is None and wait:
            began = time.monotonic()
            slot = self.arena.take(wait)
            self.stats.delayed += 1
            self.stats.last_delayed_s = time.monotonic() - began
        if slot is None:
            self.stats.skipped += 1
            logger.warning(
                "save of step %d skipped, %d so far: all %d slots are still being written or read.",
                step,
                self.stats.skipped,
                len(self.arena.slots),
            )
        return slot

    def _start(
        self, slot: SlotFile, state: object, step: int, keep: bool, writers: Sequence[object]
    ) -> Capture:
        snapshot = self._walker.snapshot(state)
        if self._layout is None or snapshot.layout.fingerprint != self._layout.fingerprint:
            self.stats.layouts += 1
            logger.info(
                "new state layout %s: %d tensors, %d bytes",
                snapshot.layout.fingerprint,
                len(snapshot.layout.entries),
                snapshot.layout.size_bytes,
            )
        self._layout = snapshot.layout
        self.arena.begin(slot, snapshot.layout, snapshot.values, step)
        capture = Capture(self, slot, snapshot, step, keep=keep)
        try:
            owned = self._owners.memory(writers, snapshot.addresses)
            self._copy(self._area(slot, snapshot), snapshot, owned, capture)
        except BaseException:
            for run in capture._runs:
                run.stop()
                run.wait()
            raise
        return capture

    def _copy(self, area: _Area, snapshot: Snapshot, owned: OwnedMemory | None, capture: Capture) -> None:
        plan, runs = area.plan, capture._runs
        if plan is None or plan.addresses is not snapshot.addresses or plan.owned is not owned:
            plan = _Plan(area.targets, snapshot, self._options, owned)
            # What refers to tensors would keep their memory from being freed until the next save.
            area.plan = plan if plan.reusable else None
        for piece in plan.now:  # before the threads start: they would compete for the interpreter
            piece.copy()
        for device, (eager, rest) in plan.devices.items():
            copier = self._devices.get(device)
            if copier is None:
                copier = self._devices[device] = DeviceCopier(device)
            runs.append(copier.start(eager, rest, area.address))
        if plan.first:
            capture._eager = _HostRun(self._copier.start(plan.first, keep=snapshot.sources, paced=False))
            runs.append(capture._eager)
        if plan.later:
            runs.append(_HostRun(self._copier.start(plan.later, keep=snapshot.sources)))

    def _area(self, slot: SlotFile, snapshot: Snapshot) -> _Area:
        area = self._areas.get(slot)
        if area is None or area.generation != slot.generation:
            if area is not None:
                area.close()
            cuda = next((s.device for s in snapshot.sources if s.device.type == "cuda"), None)
            area = self._areas[slot] = _Area(slot, cuda)
        area.lay_out(snapshot.layout)
        return area

    def _publish(self) -> None:
        while (capture := self._queue.get()) is not None:
            capture._settle()

    def _held(self, seconds: float) -> None:
        self.stats.held_s += seconds
        self.stats.last_held_s += seconds

    def _settled(self, capture: Capture) -> None:
        if capture.outcome is Outcome.CAPTURED:
            self.stats.captured += 1
        else:
            self.stats.dropped += 1


class _Plan:
    """All copies of one capture into one slot; holds while the sources stay where they are."""

    @torch.no_grad()
    def __init__(
        self,
        targets: list[torch.Tensor],
        snapshot: Snapshot,
        options: CaptureOptions,
        owned: OwnedMemory | None,
    ) -> None:
        self.addresses = snapshot.addresses
        self.owned = owned
        #: By the calling thread: not worth a thread.
        self.now: list[Piece] = []
        #: By the threads, while the caller waits.
        self.first: list[Piece] = []
        self.later: list[Piece] = []
        self.devices: dict[torch.device, tuple[list[Pair], list[Pair]]] = {}
        for entry, target, source in zip(snapshot.layout.entries, targets, snapshot.sources, strict=True):
            eager = options.is_eager(entry) or not (owned is None or owned.holds(source))
            if source.device.type == "cuda":
                pairs = self.devices.setdefault(source.device, ([], []))
                pairs[0 if eager else 1].append((target, source))
            else:
                held = self.now if options.is_small(entry) else self.first
                (held if eager else self.later).extend(pieces(target, source))
        plain = all(isinstance(piece, MemoryPiece) for piece in (*self.now, *self.first, *self.later))
        self.reusable = plain and not self.devices


class _Area:
    """The mapped memory of a slot as tensors: one per entry, made once per layout."""

    def __init__(self, slot: SlotFile, cuda: torch.device | None) -> None:
        self.generation = slot.generation
        memory = slot.memory
        if memory is None:
            raise ResiliencyError(f"{slot.path} was not reserved.")
        self._flat = (
            torch.frombuffer(memory, dtype=torch.uint8)
            if memory.nbytes
            else torch.empty(0, dtype=torch.uint8)
        )
        self.address = self._flat.data_ptr() if memory.nbytes else 0
        self._pinned = PinnedMemory(self.address, memory.nbytes, cuda) if cuda and memory.nbytes else None
        self._fingerprint = ""
        self.targets: list[torch.Tensor] = []
        self.plan: _Plan | None = None

    def lay_out(self, layout: StateLayout) -> None:
        if layout.fingerprint != self._fingerprint:
            self.targets = [stored_as(e, self._flat[e.offset_bytes : e.end_bytes]) for e in layout.entries]
            self._fingerprint = layout.fingerprint
            self.plan = None

    def close(self) -> None:
        if self._pinned is not None:
            self._pinned.close()
        self.targets, self.plan = [], None
