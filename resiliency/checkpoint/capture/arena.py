# SPDX-License-Identifier: Apache-2.0
"""Slots in shared memory that outlive the process which fills them.

    /dev/shm/resiliency-<job>-<uid>/     directory of one job on this host, mode 0700; in <job> is the host's
                                         name where it is not the machine's, see `trainer.join`
        job.lock                         shared lock: trainers, agent, launcher of a living job
        removed-rank-<r>/                a rank that ran here before, while it is being deleted
        rank-<r>/
            owner.lock                   exclusive lock: the one process that captures for rank r
            room                         number and size of its slots, those to be allocated included
            layout-<fingerprint>.json    what the bytes of a slot mean
            slot-<i>                     header page | tensors | values

Named files rather than memfds, so that a restarted process finds them without a living parent to
pass descriptors.  All locks are the kernel's (`flock`) and vanish with their holder: no count is
left wrong by a kill.

A slot is *free*, *capturing* or *captured*, as its header says; it is *lent* as long as anyone holds
a shared lock on it (the writer, a replicator, a restore).  To capture, the owner takes the exclusive
lock and marks the header before the first byte moves.  Invariant: a header that says captured,
with a good checksum, belongs to complete tensors and values of one step; and the owner never takes
the slot with the newest capture, so a crash at any time leaves one slot whole (of a rank with one slot:
at any time but during a capture).

`RankArena` is the owner's side, `open_captured` the reader's; one slot is in
`resiliency.checkpoint.capture.slots`, the life of the whole directory in
`resiliency.checkpoint.capture.job_memory`, limits are in `resiliency.checkpoint.capture.limits`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from resiliency.checkpoint.capture.job_memory import (
    DEATH_TIMEOUT_S,
    LOOK_S,
    OWNER_LOCK,
    announce_room,
    awaited_room,
    hold_job,
    owner_in,
    remove_if_dead,
    remove_rank,
    try_remove_rank,
    withdraw_room,
)
from resiliency.checkpoint.capture.limits import check_room, is_leaving, process_start_ticks
from resiliency.checkpoint.capture.slots import (
    GROUP_BYTES,
    PAGE_BYTES,
    SlotFile,
    SlotHeader,
    SlotState,
    file_bytes,
    mapped,
    values_offset,
)
from resiliency.checkpoint.locks import FileLock
from resiliency.checkpoint.state.layout import Shard, StateLayout
from resiliency.checkpoint.storage.memory import address_of
from resiliency.checkpoint.storage.posix import read_failed
from resiliency.checkpoint.threads import run_parallel
from resiliency.errors import CheckpointCorrupt, CheckpointError, CheckpointMissing, ConfigError
from resiliency.files import matching

logger = logging.getLogger(__name__)

#: Threads that copy a capture to where it is wanted.
_THREADS = 2
_PIECE_BYTES = 4 << 20


def rank_directory(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank}"


class RankArena:
    """The slots of one rank, seen by the one process that captures into them.

    A predecessor's captures are kept and its memory is reused.

    Args:
        directory: of the job, see `job_directory`.
        slots: two suffice; a third lets captures go on while one is slowly written.  With one, a capture
            takes the place of the one before, which is gone from memory as soon as this one begins.
        group: names the ranks whose captures are interchangeable, see `Shard.group`.
    Raises:
        ConfigError: another living process owns the rank.
    """

    def __init__(
        self,
        directory: Path,
        *,
        rank: int,
        world_size: int = 1,
        slots: int = 2,
        run_id: str = "",
        group: str = "",
    ) -> None:
        if slots < 1:
            raise ConfigError(f"a rank needs at least 1 slot, found {slots}.")
        if len(group.encode()) > GROUP_BYTES:
            raise ConfigError(
                f"the name of a group has at most {GROUP_BYTES} bytes, found {group!r}.", rank=rank
            )
        self.directory = directory
        self.rank = rank
        self.world_size = world_size
        self.run_id = run_id.encode()[:128].decode(errors="ignore")
        self.group = group
        self._job = hold_job(directory)
        self._where = rank_directory(directory, rank)
        try:
            self._owner = self._own()
        except BaseException:
            self._job.close()
            raise
        self._start = process_start_ticks(os.getpid()) or 0
        self.slots = [SlotFile(self._where / f"slot-{i}") for i in range(slots)]
        #: Of a predecessor that had more: each goes when this process has captured anew.
        self._surplus = [SlotFile(path) for path in self._beyond(slots)]
        found = (slot.header for slot in (*self.slots, *self._surplus))
        self._sequence = max((header.sequence for header in found if header), default=0)
        #: Notified whenever this process gives a slot back.
        self._changed = threading.Condition()

    def _beyond(self, slots: int) -> list[Path]:
        names = {path.name: path for path in matching(self._where, "slot-*")}
        return [path for name, path in sorted(names.items()) if int(name.removeprefix("slot-")) >= slots]

    def _own(self) -> FileLock:
        lock = self._open_lock()
        deadline = time.monotonic() + DEATH_TIMEOUT_S
        while not (locked := lock.try_lock(exclusive=True)) or not lock.is_current():
            if locked:  # what was there has been removed meanwhile
                lock.close()
                lock = self._open_lock()
                continue
            owner = owner_in(os.pread(lock.fd, 200, 0))
            if owner is not None and is_leaving(owner) and time.monotonic() < deadline:
                threading.Event().wait(LOOK_S)  # for the predecessor that this process replaces
                continue
            lock.close()
            raise ConfigError(
                f"rank {self.rank} of this job is owned by a living process (pid {owner or 'unknown'});"
                f" see {self._where}.",
                hint="Do two jobs on this host have one name?  Set JOB_IDENTIFIER.",
                rank=self.rank,
                path=str(self._where),
            )
        os.ftruncate(lock.fd, 0)
        os.pwrite(lock.fd, str(os.getpid()).encode(), 0)
        return lock

    def _open_lock(self) -> FileLock:
        while True:
            self._where.mkdir(mode=0o700, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # removed since
                return FileLock(self._where / OWNER_LOCK, create=True)

    def replace_removed(self) -> None:
        """Make again what was deleted under this process; for the thread that captures.

        logind does that to all of a user when the last session ends (RemoveIPC=yes), and so do cleaners of
        shared memory.  Mappings stay valid, but readers find nothing.
        """
        if not self._job.is_current():
            logger.error(
                "memory of rank %d removed: something deleted %s under this process; it is made again."
                "  If logind does it when sessions end, set RemoveIPC=no in logind.conf",
                *(self.rank, self.directory),
            )
            removed, self._job = self._job, hold_job(self.directory)
            removed.close()
        if not self._owner.is_current():
            removed, self._owner = self._owner, self._own()
            removed.close()
        for slot in [slot for slot in self._surplus if slot.is_removed]:
            self._surplus.remove(slot)
            slot.close()
        for slot in self.slots:
            slot.replace_removed()

    def try_take(self, is_ready: Callable[[SlotFile], bool] = lambda slot: True) -> SlotFile | None:
        """A slot to capture into, held exclusively; None if all are lent.

        Never the newest capture, unless there is no other slot.

        Args:
            is_ready: a slot of which this is true is preferred.
        """
        captured = [s for s in self.slots if s.header and s.header.state == SlotState.CAPTURED]
        newest = max(captured, key=_sequence, default=None)
        for slot in sorted(self.slots, key=lambda s: (not is_ready(s), _sequence(s))):
            if (slot is not newest or len(self.slots) == 1) and slot.try_take():
                return slot
        return None

    def take(
        self, timeout: timedelta, is_ready: Callable[[SlotFile], bool] = lambda slot: True
    ) -> SlotFile | None:
        """`try_take`, waiting for a reader to finish; None at the timeout."""
        deadline = time.monotonic() + timeout.total_seconds()
        with self._changed:
            while True:
                slot = self.try_take(is_ready)
                left = deadline - time.monotonic()
                if slot is not None or left <= 0:
                    return slot
                # Readers in other processes cannot notify: look at their locks now and then.
                self._changed.wait(min(left, LOOK_S))

    def begin(self, slot: SlotFile, layout: StateLayout, values: bytes, step: int) -> None:
        """Make a taken slot large enough and mark it as capturing: its old content is gone.

        Raises:
            ConfigError: there is no room; the old content is still whole.
        """
        if not slot.is_ready(layout.size_bytes, len(values)):
            self._check_room(layout.size_bytes, len(values))
            slot.reserve(layout.size_bytes, len(values))
        self._sequence += 1
        slot.mark(
            SlotHeader(
                state=SlotState.CAPTURING, step=step, sequence=self._sequence, rank=self.rank,
                world_size=self.world_size, owner_pid=os.getpid(), owner_start=self._start,
                tensor_bytes=layout.size_bytes, values_bytes=len(values),
                fingerprint=layout.fingerprint, run_id=self.run_id, group=self.group,
            )
        )  # fmt: skip
        self._write_layout(layout)

    def _check_room(self, tensor_bytes: int, values_bytes: int) -> None:
        # For all slots at once: better refused at the first save than at the second.
        missing = sum(slot.missing_bytes(tensor_bytes, values_bytes) for slot in self.slots)
        if missing:
            # Written before the others' are read: of two ranks that ask at once, one sees the other at least.
            announce_room(self._where, len(self.slots), file_bytes(tensor_bytes, values_bytes))
            check_room(self._where, missing, others_bytes=awaited_room(self._where))

    def publish(self, slot: SlotFile, values: bytes, *, lend: bool = False) -> None:
        """All tensors are in: readers may have the slot.  `values` as given to `begin`.

        With `lend` it cannot be captured into until `end_lend`, even if newer captures exist.
        """
        assert slot.header is not None
        if slot.is_removed:
            raise CheckpointError(
                f"{slot.path} was deleted under this process, so no other can read the capture in it.",
                hint="Something empties shared memory: logind when sessions end (set RemoveIPC=no in"
                " logind.conf), or a cleaner.  The next save makes it again.",
                path=str(slot.path),
            )
        slot.write_values(slot.header.tensor_bytes, values)
        slot.mark(replace(slot.header, state=SlotState.CAPTURED))
        slot.give(lend=lend)
        self._surplus = [each for each in self._surplus if not _try_remove(each)]
        self._notify()

    def abandon(self, slot: SlotFile) -> None:
        """A capture failed: the slot holds nothing, unless it was not begun and keeps what it held."""
        if slot.header is not None and slot.header.state == SlotState.CAPTURING:
            slot.mark(replace(slot.header, state=SlotState.FREE))
        slot.give()
        self._notify()

    def end_lend(self, slot: SlotFile) -> None:
        """The owner no longer needs the capture in `slot`; readers may still."""
        slot.end_lend()
        self._notify()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _write_layout(self, layout: StateLayout) -> None:
        path = self._where / f"layout-{layout.fingerprint}.json"
        if path.exists():
            return
        used = {s.header.fingerprint for s in (*self.slots, *self._surplus) if s.header}
        for old in matching(self._where, "layout-*.json"):
            if old.stem.removeprefix("layout-") not in used:
                old.unlink(missing_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(layout.to_json())
        temporary.replace(path)

    @contextlib.contextmanager
    def captured(self, step: int | None = None) -> Iterator[Shard]:
        """A capture that this process or its predecessor left here, lent until the context ends.

        Like `open_captured`, but through the mapping into which the next captures go, if there is one.
        A process that has just started reads the file instead: to map its pages first would take longer
        than to copy them once.

        Raises:
            CheckpointMissing: no whole capture (of that step) is there.
        """
        for slot in sorted((*self.slots, *self._surplus), key=_sequence, reverse=True):
            header = slot.header
            if header is None or header.state != SlotState.CAPTURED or step not in (None, header.step):
                continue
            if header.tensor_bytes > slot.capacity_bytes:
                opened = try_open_slot(slot.path)
                if opened is None:
                    continue
                with opened:
                    yield opened.shard
                return
            if not slot.try_lend():
                continue
            try:
                yield self._shard(slot, header)
            finally:
                self.end_lend(slot)
            return
        raise _missing(self.directory, self.rank, step)

    @property
    def newest(self) -> SlotHeader | None:
        """Of the newest whole capture, of this process or one before it."""
        newest = max((*self.slots, *self._surplus), key=_sequence)
        return newest.header if _sequence(newest) else None

    def try_lend(self, run_id: str, step: int) -> SlotFile | None:
        """The slot with that capture, lent until `end_lend`; None if there is none."""
        for slot in (*self.slots, *self._surplus):
            header = slot.header
            if _sequence(slot) and header and (header.run_id, header.step) == (run_id, step):
                return slot if slot.try_lend() else None
        return None

    def _shard(self, slot: SlotFile, header: SlotHeader) -> Shard:
        slot.reserve(header.tensor_bytes, header.values_bytes)
        assert slot.memory is not None
        return Shard(
            layout=_read_layout(slot.path, header),
            values=slot.read_values(header),
            step=header.step,
            rank=header.rank,
            world_size=header.world_size,
            buffer=slot.memory,
            run_id=header.run_id,
            group=header.group,
        )

    def make_room(self, tensor_bytes: int, values_bytes: int) -> Iterator[SlotFile | None]:
        """Allocate and map all slots, that of the newest capture last; any thread may do it.

        Yields None before the first, and each slot that has the room.

        Raises:
            ConfigError: there is no room.
        """
        self._check_room(tensor_bytes, values_bytes)
        yield None
        for slot in sorted(self.slots, key=_sequence):
            slot.reserve(tensor_bytes, values_bytes)
            yield slot

    def close(self, *, remove: bool = False) -> None:
        """Give up ownership; with `remove`, delete the slots too (a job that ended well)."""
        for slot in (*self.slots, *self._surplus):
            slot.close()
        self._surplus = []
        withdraw_room(self._where)
        if remove:
            remove_rank(self._where)
        self._owner.close()
        self._job.close()
        if remove:
            remove_if_dead(self.directory, only_empty=True)

    def __enter__(self) -> RankArena:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _sequence(slot: SlotFile) -> int:
    """Order of age; a slot without a whole capture is older than any."""
    whole = slot.header is not None and slot.header.state == SlotState.CAPTURED
    return slot.header.sequence if whole and slot.header else 0


def _try_remove(slot: SlotFile) -> bool:
    """Delete a slot, unless it is lent."""
    if not slot.try_take():
        return False
    slot.path.unlink(missing_ok=True)
    slot.close()
    return True


class CapturedSlot:
    """A whole capture, lent to this reader until it is closed.  Use it as a context manager."""

    def __init__(self, lock: FileLock, header: SlotHeader, layout: StateLayout) -> None:
        self._lock = lock
        self.header = header
        size = header.tensor_bytes
        # A private mapping: writable, as torch wants it, and yet no reader can change the capture.
        self._map = mapped(lock.path, values_offset(size), private=True)
        buffer = memoryview(self._map)[PAGE_BYTES : PAGE_BYTES + size]
        self.shard = Shard(
            layout=layout,
            values=os.pread(lock.fd, header.values_bytes, values_offset(size)),
            step=header.step,
            rank=header.rank,
            world_size=header.world_size,
            buffer=buffer,
            run_id=header.run_id,
            group=header.group,
            # No method: a cycle would keep the mapping, and removed memory with it, until it is collected.
            load=functools.partial(_load, lock, buffer),
        )

    def close(self) -> None:
        """Give the slot back; the shard must not be used any more."""
        self._lock.close()

    def __enter__(self) -> CapturedSlot:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _load(lock: FileLock, buffer: memoryview, ranges: Sequence[tuple[int, memoryview]]) -> None:
    """Copy from the file, for that takes half as long as to map its pages, copy them, and unmap them."""
    begin = address_of(buffer) if buffer else 0
    pieces = [
        (PAGE_BYTES + offset + at, memory[at : at + _PIECE_BYTES])
        for offset, memory in ranges
        if memory.nbytes and address_of(memory) != begin + offset  # else it is where it is wanted
        for at in range(0, memory.nbytes, _PIECE_BYTES)
    ]
    left = iter(pieces)  # one for all threads

    def run() -> None:
        for offset, view in left:
            _read(lock, offset, view)

    run_parallel([run] * min(_THREADS, len(pieces)), "resiliency-captured")


def _read(lock: FileLock, offset: int, view: memoryview) -> None:
    done = 0
    while done < view.nbytes:
        try:
            count = os.preadv(lock.fd, [view[done:]], offset + done)
        except OSError as error:  # such as of memory that the machine found bad
            raise read_failed(error, str(lock.path)) from error
        if not count:
            raise CheckpointCorrupt(
                f"{lock.path} ends at byte {offset + done}, which its header contradicts.",
                path=str(lock.path),
            )
        done += count


def try_open_slot(path: Path) -> CapturedSlot | None:
    """Borrow the capture in the slot file `path`; None if it holds none that is whole."""
    try:
        lock = FileLock(path)
    except FileNotFoundError:
        return None
    opened = None
    try:
        if lock.try_lock(exclusive=False) and lock.is_current():  # held exclusively: a capture is going on
            header = SlotHeader.unpack(os.pread(lock.fd, PAGE_BYTES, 0))
            if header is not None and _is_whole(header, os.fstat(lock.fd).st_size):
                opened = CapturedSlot(lock, header, _read_layout(path, header))
    finally:
        if opened is None:
            lock.close()
    return opened


def _is_whole(header: SlotHeader, size: int) -> bool:
    # A file that was cut short would end the reader with SIGBUS.
    enough = size >= values_offset(header.tensor_bytes) + header.values_bytes
    return header.state == SlotState.CAPTURED and enough


def peek(directory: Path, rank: int) -> list[tuple[Path, SlotHeader]]:
    """Whole captures of `rank`, newest first, without borrowing them: they may be gone a moment later."""
    found = []
    for path in matching(rank_directory(directory, rank), "slot-*"):
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            header = SlotHeader.unpack(file.read(PAGE_BYTES))
            if header is not None and _is_whole(header, path.stat().st_size):
                found.append((path, header))
    return sorted(found, key=lambda item: -item[1].sequence)


def ranks_in(directory: Path) -> list[int]:
    """Ranks that have slots in `directory`."""
    return sorted(int(path.name.removeprefix("rank-")) for path in matching(directory, "rank-*"))


def free_others(directory: Path, present: Collection[int], *, step: int) -> None:
    """Give back the memory of ranks that run on this host no more, as far as it holds no step after `step`.

    Args:
        present: ranks of this host.
        step: that nobody needs an older one than.
    """
    for rank in sorted(set(ranks_in(directory)) - set(present)):
        if all(header.step <= step for _, header in peek(directory, rank)) and try_remove_rank(
            rank_directory(directory, rank)
        ):
            logger.info("gave back the memory of rank %d, which does not run on this host any more", rank)


def open_captured(directory: Path, rank: int, *, step: int | None = None) -> CapturedSlot:
    """Borrow a capture that a dead or living process left in memory.

    The header, written last, vouches for completeness.  The bytes have no checksum of their own: a
    capture would have to read everything twice, and memory that is corrupt without the machine
    noticing would have corrupted the training state alike.

    Args:
        step: None means the newest capture.
    Raises:
        CheckpointMissing: no whole capture (of that step) is there.
    """
    for path, header in peek(directory, rank):
        if step in (None, header.step):
            try:
                slot = try_open_slot(path)
            except CheckpointCorrupt as error:
                # The text, not the error: a kept record would keep its frames, and with them this
                # function's next slot, mapped.
                logger.warning("capture of step %d of rank %d skipped: %s", header.step, rank, str(error))
                continue
            if slot is not None and slot.header.sequence == header.sequence:
                return slot
            if slot is not None:
                slot.close()
    raise _missing(directory, rank, step)


def _missing(directory: Path, rank: int, step: int | None) -> CheckpointMissing:
    steps = ", ".join(str(header.step) for _, header in peek(directory, rank)) or "none"
    return CheckpointMissing(
        f"memory holds no capture of rank {rank}{'' if step is None else f' at step {step}'};"
        f" steps found in {directory}: {steps}.",
        rank=rank,
        step=step,
    )


def _read_layout(slot: Path, header: SlotHeader) -> StateLayout:
    path = slot.parent / f"layout-{header.fingerprint}.json"
    try:
        return _parse_layout(path, path.stat().st_mtime_ns)
    except FileNotFoundError:
        raise CheckpointCorrupt(f"{slot} has no layout beside it.", path=str(slot)) from None


# It seldom changes, and parsing thousands of tensors takes longer than opening the slot.  As many as two
# tiers of a large host need.
@functools.lru_cache(maxsize=32)
def _parse_layout(path: Path, changed_ns: int) -> StateLayout:
    return StateLayout.from_json(path.read_text())
