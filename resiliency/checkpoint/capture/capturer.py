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
two steps; so is one whose sources were written without a fence, as far as torch counts that (not what
goes through `Tensor.data`, or is replayed by a CUDA graph).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from typing import Any, Protocol

import torch

from resiliency.checkpoint.capture.arena import RankArena
from resiliency.checkpoint.capture.cuda import CudaHostRegistry, DeviceCopier, DeviceTransfer, HostRegistry
from resiliency.checkpoint.capture.owned_memory import OwnedMemory, Owners, takes_hooks, unwrapped
from resiliency.checkpoint.capture.slot_memory import PreparedSlot, SlotMemory, SlotRoom
from resiliency.checkpoint.capture.slots import SlotFile
from resiliency.checkpoint.state.copying import Copier, CopyRun, MemoryPiece, Piece, pieces
from resiliency.checkpoint.state.fill import stored_as
from resiliency.checkpoint.state.layout import StateLayout, TensorEntry
from resiliency.checkpoint.state.snapshot import Snapshot, StateWalker
from resiliency.checkpoint.threads import start_thread
from resiliency.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)

EAGER_BELOW_BYTES = 64 << 10
FENCE_TIMEOUT = timedelta(minutes=2)
PREWARM_TIMEOUT = timedelta(minutes=30)
#: A save that waits for memory for longer than that says so.
_SHORT_WAIT = timedelta(seconds=0.1)


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
        threads: copy host memory with that many where training waits for it, and with one behind training.
        when_full: SKIP counts and reports the save; WAIT holds training for up to `wait_timeout`, then
            skips.
        eager: entries to copy before `begin` returns, besides those below `eager_below_bytes`.
        before_piece: called in a copy thread before each piece that `begin` does not wait for, see `Copier`.
        before_slot: called in the thread that prepares memory before each slot, see `SlotMemory`.
        registry: pins the slots for copies from a device.
    """

    threads: int = 2
    when_full: WhenFull = WhenFull.SKIP
    wait_timeout: timedelta = timedelta(seconds=30)
    eager: Callable[[TensorEntry], bool] | None = None
    eager_below_bytes: int = EAGER_BELOW_BYTES
    before_piece: Callable[[int], None] | None = None
    before_slot: Callable[[], None] | None = None
    registry: HostRegistry = field(default_factory=CudaHostRegistry)

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
        self.wait = run.wait
        self.stop = run.stop

    def fence(self, timeout: timedelta | None) -> bool:
        self._run.use_all_threads()
        return self._run.wait(timeout)


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
        #: What may be written only after a fence, and what torch counted of it when this began.
        self._watched: list[torch.Tensor] = []
        self._versions: list[int] = []
        self._watch_lock = threading.Lock()
        self._is_written = False
        self._late = False
        #: Told how long a fence held its caller.
        self.on_held: Callable[[float], None] = lambda seconds: None
        self.outcome = Outcome.RUNNING
        self.error: BaseException | None = None

    def fence(self, timeout: timedelta = FENCE_TIMEOUT) -> bool:
        """Hold the caller until the state may be written again; cheap if it may already.

        Each caller is held, whatever its thread: of a device, its current stream.

        False if the copy did not end in time or failed: the capture is dropped, and the state may
        be written all the same.
        """
        if self._done.is_set() or self._late:
            return not self._late
        began = time.monotonic()
        self._hold(self._runs, timeout)
        self._end_watch()
        held_s = time.monotonic() - began
        self._owner._held(held_s)
        self.on_held(held_s)
        return not self._late

    @property
    def was_written(self) -> bool:
        """Whether the state was written without a fence, as far as is known by now."""
        return self._is_written

    def _watch(self, tensors: list[torch.Tensor]) -> None:
        """Notice from here on what writes to `tensors` without a fence."""
        self._watched, self._versions = tensors, _versions(tensors)

    def _end_watch(self) -> None:
        """All is copied, or the fence has come: see whether anything was written before.  Once."""
        with self._watch_lock:
            watched, self._watched = self._watched, []
            self._is_written |= bool(watched) and _versions(watched) != self._versions

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
            self._end_watch()
            if self._late:
                raise CheckpointError(
                    f"the capture of step {self.step} was not done at its fence.", step=self.step
                )
            if self._is_written:
                raise CheckpointError(
                    f"the state was written while step {self.step} was copied, and nothing fenced it.",
                    hint="Call fence() before what writes parameters or optimizer state outside of"
                    " optimizer.step(), or make the Checkpointer with CheckpointerOptions(overlap=False).",
                    step=self.step,
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
            self._runs, self._watched = [], []
            self._owner._settled(self)
            if self._slot in _left:  # after all
                self._slot.come_back()
                _forget_left(self._slot)
            self._done.set()


class FoundCapture:
    """A whole capture of a start before this one, lent until `release`: to be saved like one just made."""

    outcome = Outcome.CAPTURED
    error: BaseException | None = None

    def __init__(self, arena: RankArena, slot: SlotFile, step: int) -> None:
        self.step = step
        self.slot_path = slot.path
        self._arena = arena
        self._slot: SlotFile | None = slot

    def release(self) -> None:
        """See `Capture.release`."""
        slot, self._slot = self._slot, None
        if slot is not None:
            self._arena.end_lend(slot)


class Capturer:
    """Captures one rank's state into its arena.

    One thread of training uses it; any may `fence` or `prepare`.

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
        #: An optimizer may step for the first time, which prepares, in another thread than that which saves.
        self._walking = threading.Lock()
        self._owners = Owners()
        self._memory = SlotMemory(
            arena, registry=self._options.registry, before_slot=self._options.before_slot
        )
        #: That the newest layout needs.
        self._room = SlotRoom()
        #: Why the last `begin` returned None, where it was not for want of a free slot.
        self.why_skipped = ""
        self._copier = Copier(self._options.threads, before_piece=self._options.before_piece)
        self._devices: dict[torch.device, DeviceCopier] = {}
        self._areas: dict[SlotFile, _Area] = {}
        self._layout: StateLayout | None = None
        self._last: Capture | None = None
        self._running: set[SlotFile] = set()
        self._closed = False
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._publisher = threading.Thread(target=self._publish, name="resiliency-publish", daemon=True)
        try:
            start_thread(self._publisher)
        except BaseException:
            self._copier.close()
            raise

    def begin(
        self,
        state: object,
        step: int,
        *,
        writers: Sequence[object] = (),
        keep: bool = False,
        wait: timedelta | None = None,
    ) -> Capture | None:
        """Start to capture `state`; None if no slot was free or ready (counted in `stats.skipped`).

        Memory is allocated in the background, see `prepare`, and never by the caller.  Where it is not there
        yet this waits for it: a job whose first saves are skipped is left with nothing.

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
        for replaced in self._memory.take_replaced():
            self._queue.put(replaced.close)
        try:
            self.arena.replace_removed()
            if wait is None and self._options.when_full is WhenFull.WAIT:
                wait = self._options.wait_timeout
            slot = self._take(step, wait)
            if slot is None:
                return None
            try:
                snapshot = self._snapshot(state)
                if not self._await_memory(slot, snapshot, step, began, wait):
                    self.arena.abandon(slot)
                    return None
                capture = self._start(slot, snapshot, step, keep, writers)
            except BaseException:
                self.arena.abandon(slot)
                raise
            self._last = capture
            self._running.add(slot)
            self._queue.put(capture._settle)
            capture.hold_for_eager()
            return capture
        finally:
            self._held(time.monotonic() - began)

    def call_after_captures(self, task: Callable[[], None]) -> None:
        """The publisher calls `task` once all captures begun before are published or dropped.  Never blocks.

        In the order of these calls; after `close` none is made.  `task` must not wait: later captures do.
        """
        self._queue.put(task)

    def fence(self, timeout: timedelta = FENCE_TIMEOUT) -> bool:
        """Fence the capture under way, if any; see `Capture.fence`."""
        capture = self._last
        return capture.fence(timeout) if capture is not None else True

    def install_fence(self, optimizer: Any) -> Any:
        """Fence before each step of a torch optimizer.  Returns a handle with `remove()`.

        Raises:
            ConfigError: `optimizer` has no such hook.
        """
        optimizer = unwrapped(optimizer)
        if not takes_hooks(optimizer) or not hasattr(optimizer, "register_step_pre_hook"):
            raise ConfigError(
                f"{type(optimizer).__name__} is no torch optimizer: it has no register_step_pre_hook.",
                hint="Call capturer.fence() before it writes the parameters.",
            )

        def hook(*_: object) -> None:
            self.fence()

        return optimizer.register_step_pre_hook(hook)

    def prepare(self, state: object) -> None:
        """Have the slots for `state` allocated, mapped and (on CUDA) pinned in the background.

        Returns at once.

        Raises:
            ConfigError: something in the state cannot be saved.
        """
        self._prepare(self._room_for(self._snapshot(state)))

    def prepare_room(self, tensor_bytes: int, values_bytes: int) -> None:
        """Like `prepare`, for a state of that size on the device that the calling thread uses, if any."""
        self._prepare(SlotRoom(tensor_bytes, values_bytes, self._options.registry.current_device()))

    def _prepare(self, room: SlotRoom) -> None:
        self._room = room
        self._memory.request(room)

    def prewarm(self, state: object, timeout: timedelta = PREWARM_TIMEOUT) -> None:
        """Allocate, map and (on CUDA) pin all slots for `state`, before the first capture needs them.

        Raises:
            ConfigError: something in the state cannot be saved, there is no room, or it took too long.
        """
        snapshot = self._snapshot(state)
        self._prepare(self._room_for(snapshot))
        if not self._memory.wait(timeout, self._room):
            raise ConfigError(
                f"memory for the captures of rank {self.arena.rank} was not prepared within {timeout}.",
                rank=self.arena.rank,
            )
        for slot in self.arena.slots:
            self._area(slot, snapshot)

    def close(self, timeout: timedelta = FENCE_TIMEOUT) -> None:
        """Finish the capture under way, end the threads, unpin.  The arena stays open.  Idempotent.

        A copy that hangs is left behind at the timeout: its slot stays mapped and locked until it ends, or
        this process does.
        """
        if self._closed:
            return
        self._closed = True
        deadline = time.monotonic() + timeout.total_seconds()

        def left() -> timedelta:
            return timedelta(seconds=max(0.0, deadline - time.monotonic()))

        self.fence(left())
        self._queue.put(None)
        is_prepared = self._memory.close(left())
        self._publisher.join(left().total_seconds())
        self._copier.close(left())
        hung = set(self._running) if is_prepared else set(self.arena.slots)
        for slot in hung:
            logger.error("capture into %s hangs: the slot is left behind", slot.path)
            slot.leave()
            _left[slot] = self._memory.leave(slot)
        self._memory.unpin()
        self._areas.clear()

    def __enter__(self) -> Capturer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _take(self, step: int, wait: timedelta | None) -> SlotFile | None:
        self.why_skipped = ""

        def is_ready(slot: SlotFile) -> bool:
            return self._memory.is_ready(slot, self._room)

        slot = self.arena.try_take(is_ready)
        if slot is None and wait:
            began = time.monotonic()
            slot = self.arena.take(wait, is_ready)
            self.stats.delayed += 1
            self.stats.last_delayed_s = time.monotonic() - began
        if slot is None:
            self._skip(step, f"all {len(self.arena.slots)} slots are still being written or read")
        return slot

    def _skip(self, step: int, why: str) -> None:
        self.stats.skipped += 1
        # Its caller reports the save with the reason.
        logger.debug("save of step %d skipped, %d so far: %s.", step, self.stats.skipped, why)

    def _await_memory(
        self, slot: SlotFile, snapshot: Snapshot, step: int, began: float, wait: timedelta | None
    ) -> bool:
        """Whether the slot has room for the state, which the caller waits for; else the save is skipped."""
        self._room = room = self._room_for(snapshot)
        if self._memory.is_ready(slot, room):
            return True
        unready = self._memory.unready_bytes(slot, room)
        self._memory.request(room)
        if self._memory.wait(_SHORT_WAIT, room, slot=slot):
            return True
        logger.info(
            "save of step %d holds training: %d MiB of its slot are still being prepared", step, unready >> 20
        )
        left = timedelta(seconds=began - time.monotonic()) + (wait or timedelta())
        is_there = self._memory.wait(max(left, FENCE_TIMEOUT), room, slot=slot)
        waited_s = time.monotonic() - began
        if is_there:
            logger.info("save of step %d held training for %.1f s: memory prepared", step, waited_s)
            return True
        self.why_skipped = f"no memory for a capture after {waited_s:.0f} s ({unready >> 20} MiB to prepare)"
        self._skip(step, self.why_skipped)
        return False

    def _start(
        self, slot: SlotFile, snapshot: Snapshot, step: int, keep: bool, writers: Sequence[object]
    ) -> Capture:
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
            plan = _Plan(area, snapshot, self._options, owned)
            # What refers to tensors would keep their memory from being freed until the next save.
            area.plan = plan if plan.reusable else None
        capture._watch([tensor for i in plan.behind for tensor in snapshot.written[i]])
        for piece in plan.now:  # before the threads start: they would compete for the interpreter
            piece.copy()
        for device, (eager, rest) in plan.devices.items():
            copier = self._devices.get(device)
            if copier is None:
                copier = self._devices[device] = DeviceCopier(device)
            runs.append(copier.start(eager, rest, snapshot.sources))
        if plan.first:
            capture._eager = _HostRun(self._copier.start(plan.first, keep=snapshot.sources, paced=False))
            runs.append(capture._eager)
        if plan.later:
            runs.append(_HostRun(self._copier.start(plan.later, keep=snapshot.sources, behind=True)))

    def _snapshot(self, state: object) -> Snapshot:
        with self._walking:
            return self._walker.snapshot(state)

    def _room_for(self, snapshot: Snapshot) -> SlotRoom:
        is_pinned = self._options.registry.is_for
        device = next((s.device for s in snapshot.sources if is_pinned(s.device)), None)
        return SlotRoom(snapshot.layout.size_bytes, len(snapshot.values), device)

    def _area(self, slot: SlotFile, snapshot: Snapshot) -> _Area:
        prepared = self._memory.prepared(slot)
        area = self._areas.get(slot)
        if area is None or area.prepared is not prepared:
            area = self._areas[slot] = _Area(prepared)
        area.lay_out(snapshot.layout)
        return area

    def _publish(self) -> None:
        while (task := self._queue.get()) is not None:
            try:
                task()
            except Exception:  # the border of this thread: a save failed, the next may not
                logger.exception("publishing a capture failed")
            del task  # while this waits for the next one, it holds nothing of the last

    def _held(self, seconds: float) -> None:
        self.stats.held_s += seconds
        self.stats.last_held_s += seconds

    def _settled(self, capture: Capture) -> None:
        self._running.discard(capture._slot)
        if capture.outcome is Outcome.CAPTURED:
            self.stats.captured += 1
        else:
            self.stats.dropped += 1


#: What copies that hang may still write to.
_left: dict[SlotFile, list[PreparedSlot]] = {}


def _forget_left(slot: SlotFile) -> None:
    # A function, as the traceback of a dropped capture keeps the variables of `Capture._settle`.
    for prepared in _left.pop(slot):
        prepared.close()


class _Plan:
    """All copies of one capture into one slot; holds while the sources stay where they are."""

    @torch.no_grad()
    def __init__(
        self,
        area: _Area,
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
        self.devices: dict[torch.device, tuple[list[DeviceTransfer], list[DeviceTransfer]]] = {}
        #: Positions of the entries that are copied behind training.
        self.behind: list[int] = []
        entries = zip(snapshot.layout.entries, area.targets, snapshot.sources, strict=True)
        for position, (entry, target, source) in enumerate(entries):
            eager = options.is_eager(entry) or not (owned is None or owned.holds(source))
            if not eager:
                self.behind.append(position)
            if source.device.type == "cuda":
                transfers = self.devices.setdefault(source.device, ([], []))
                if source.numel():
                    transfers[0 if eager else 1].append(
                        DeviceTransfer(position, target, source, area.address)
                    )
            else:
                held = self.now if options.is_small(entry) else self.first
                (held if eager else self.later).extend(pieces(target, source))
        self.reusable = all(isinstance(piece, MemoryPiece) for piece in (*self.now, *self.first, *self.later))


def _versions(tensors: list[torch.Tensor]) -> list[int]:
    # Tensors of inference mode have none.
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


class _Area:
    """The mapped memory of a slot as tensors: one per entry, made once per layout."""

    def __init__(self, prepared: PreparedSlot) -> None:
        self.prepared = prepared
        self._flat = prepared.flat
        self.address = self._flat.data_ptr()
        self._fingerprint = ""
        self.targets: list[torch.Tensor] = []
        self.plan: _Plan | None = None

    def lay_out(self, layout: StateLayout) -> None:
        if layout.fingerprint != self._fingerprint:
            self.targets = [stored_as(e, self._flat[e.offset_bytes : e.end_bytes]) for e in layout.entries]
            self._fingerprint = layout.fingerprint
            self.plan = None
