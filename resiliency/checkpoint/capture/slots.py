# SPDX-License-Identifier: Apache-2.0
"""One slot: a file in shared memory with a header page, the tensors and the values.

Who may do what is decided by the kernel's locks on the file: exclusive while captured into, shared
while lent.  What is in it is said by the header: written last and with a checksum, it vouches for
the rest.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import struct
import threading
import zlib
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from resiliency.checkpoint.locks import FileLock
from resiliency.checkpoint.state.layout import align
from resiliency.checkpoint.storage.memory import populate
from resiliency.errors import ConfigError

PAGE_BYTES = mmap.PAGESIZE
#: What one call of the kernel allocates: a process that ends waits for no more than that.
_ALLOCATE_BYTES = 128 << 20
#: Take the page faults of a slot: where all cores train, that many threads get more of them than one.
_FAULT_THREADS = 8

_MAGIC = b"RSLYSLOT"
_VERSION = 2
#: Longest name of a group, in bytes.
GROUP_BYTES = 128
# magic, version, state, step, sequence, rank, world size, owner pid, owner start, tensor bytes,
# values bytes, fingerprint, run id, group; the checksum of all of it follows.
_HEADER = struct.Struct(f"<8sIIqQIIQQQQ32s128s{GROUP_BYTES}s")
_CHECKSUM = struct.Struct("<I")


class SlotState(IntEnum):
    FREE = 0
    CAPTURING = 1
    CAPTURED = 2


@dataclass(frozen=True, kw_only=True)
class SlotHeader:
    """The first page of a slot."""

    state: SlotState
    step: int
    #: Grows with every capture of the rank, also across its restarts: the newest capture has the largest.
    sequence: int
    rank: int
    world_size: int
    owner_pid: int
    owner_start: int
    tensor_bytes: int
    values_bytes: int
    fingerprint: str
    run_id: str
    #: See `resiliency.checkpoint.state.layout.Shard.group`.
    group: str = ""

    def pack(self) -> bytes:
        body = _HEADER.pack(
            _MAGIC, _VERSION, self.state, self.step, self.sequence, self.rank, self.world_size,
            self.owner_pid, self.owner_start, self.tensor_bytes, self.values_bytes,
            self.fingerprint.encode(), self.run_id.encode(), self.group.encode(),
        )  # fmt: skip
        return body + _CHECKSUM.pack(zlib.crc32(body))

    @classmethod
    def unpack(cls, page: bytes) -> SlotHeader | None:
        """The header, or None if it is torn, foreign or of another version."""
        body, rest = page[: _HEADER.size], page[_HEADER.size :]
        if len(rest) < _CHECKSUM.size or _CHECKSUM.unpack_from(rest) != (zlib.crc32(body),):
            return None
        magic, version, state, *numbers, fingerprint, run_id, group = _HEADER.unpack(body)
        if magic != _MAGIC or version != _VERSION:
            return None
        step, sequence, rank, world_size, pid, start, tensor_bytes, values_bytes = numbers
        return cls(
            state=SlotState(state), step=step, sequence=sequence, rank=rank, world_size=world_size,
            owner_pid=pid, owner_start=start, tensor_bytes=tensor_bytes, values_bytes=values_bytes,
            fingerprint=fingerprint.rstrip(b"\0").decode(), run_id=run_id.rstrip(b"\0").decode(),
            group=group.rstrip(b"\0").decode(),
        )  # fmt: skip


def values_offset(tensor_bytes: int) -> int:
    return PAGE_BYTES + align(tensor_bytes, PAGE_BYTES)


def file_bytes(tensor_bytes: int, values_bytes: int) -> int:
    """Size of a slot's file that holds so much."""
    return values_offset(tensor_bytes) + align(values_bytes, PAGE_BYTES)


def mapped(path: Path, size: int, *, private: bool) -> mmap.mmap:
    """`path` in memory, through an open file of its own: a mapping keeps its file open, locks and all."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if private:
            return mmap.mmap(fd, size, access=mmap.ACCESS_COPY)
        return mmap.mmap(fd, size, flags=mmap.MAP_SHARED)
    finally:
        os.close(fd)


class SlotFile:
    """The owner's side of one slot.  `memory` is the tensor area; None before the first `reserve`."""

    def __init__(self, path: Path) -> None:
        self._lock = FileLock(path, create=True)
        self.path = path
        self.memory: memoryview | None = None
        self._reserving = threading.Lock()
        self._taken = False
        self._lent = 0
        self._is_left = False
        self.header = SlotHeader.unpack(os.pread(self._lock.fd, PAGE_BYTES, 0))

    def replace_removed(self) -> None:
        """Make the file again if it was deleted, unless it is being captured into.

        What was in it is gone, but for readers that have it open; while it is lent it is not taken.
        """
        with self._reserving:
            if self._taken or self._is_left or self._lock.is_current():
                return
            removed, self._lock = self._lock, FileLock(self.path, create=True)
            self.memory, self.header = None, None
            removed.close()

    @property
    def is_removed(self) -> bool:
        """Whether its file was deleted, so that no reader finds it."""
        return not self._lock.is_current()

    @property
    def capacity_bytes(self) -> int:
        return 0 if self.memory is None else self.memory.nbytes

    def try_take(self) -> bool:
        """Get the slot for a capture; False while it is lent or being captured into."""
        # Locking a descriptor again succeeds, so holds of this process are counted here.
        if not self._taken and not self._lent and self._lock.try_lock(exclusive=True):
            self._taken = True
            return True
        return False

    def missing_bytes(self, tensor_bytes: int, values_bytes: int) -> int:
        """What `reserve` would still have to allocate."""
        return max(0, file_bytes(tensor_bytes, values_bytes) - os.fstat(self._lock.fd).st_size)

    def is_ready(self, tensor_bytes: int, values_bytes: int) -> bool:
        """Whether `reserve` has nothing to do."""
        memory = self.memory
        is_mapped = memory is not None and memory.nbytes >= tensor_bytes
        return is_mapped and not self.missing_bytes(tensor_bytes, values_bytes)

    def reserve(self, tensor_bytes: int, values_bytes: int) -> None:
        """Have room for that much, allocated and mapped: later no access can fail.

        Any thread may call it, also while the slot is lent or captured into: what it holds stays.

        Raises:
            ConfigError: no room; the text says which limit and what to set.
        """
        with self._reserving:
            self._allocate(file_bytes(tensor_bytes, values_bytes))
            if self.memory is None or tensor_bytes > self.capacity_bytes:
                memory = memoryview(mapped(self.path, values_offset(tensor_bytes), private=False))
                populate(memory, threads=_FAULT_THREADS)
                self.memory = memory[PAGE_BYTES:]

    def _allocate(self, wanted: int) -> None:
        present = size = os.fstat(self._lock.fd).st_size
        try:
            while size < wanted:
                length = min(_ALLOCATE_BYTES, wanted - size)
                os.posix_fallocate(self._lock.fd, size, length)
                size += length
        except OSError as error:
            os.ftruncate(self._lock.fd, present)
            raise _no_room(error, self.path, wanted) from error

    def mark(self, header: SlotHeader) -> None:
        os.pwrite(self._lock.fd, header.pack(), 0)
        self.header = header

    def write_values(self, tensor_bytes: int, values: bytes) -> None:
        os.pwrite(self._lock.fd, values, values_offset(tensor_bytes))

    def read_values(self, header: SlotHeader) -> bytes:
        return os.pread(self._lock.fd, header.values_bytes, values_offset(header.tensor_bytes))

    def give(self, *, lend: bool = False) -> None:
        """End the exclusive hold; with `lend`, keep one that readers share until `end_lend`."""
        self._lent += lend
        fcntl.flock(self._lock.fd, fcntl.LOCK_SH if lend else fcntl.LOCK_UN)
        self._taken = False

    def try_lend(self) -> bool:
        """Keep the slot from being taken, without having taken it; False while it is being filled."""
        if self._taken or not self._lock.try_lock(exclusive=False):
            return False
        self._lent += 1
        return True

    def end_lend(self) -> None:
        self._lent -= 1
        if not self._lent and not self._taken and self._lock.fd >= 0:
            fcntl.flock(self._lock.fd, fcntl.LOCK_UN)

    def release_memory(self) -> None:
        """Let go of the mapping; it ends when nobody uses a view of it any more."""
        self.memory = None

    def leave(self) -> None:
        """A copy into it hangs: from here on `close` leaves it locked and mapped."""
        self._is_left = True

    def come_back(self) -> None:
        """The copy has ended after all."""
        self._is_left = False
        self.close()

    def close(self) -> None:
        if not self._is_left:
            self.release_memory()
            self._lock.close()


def _no_room(error: OSError, path: Path, wanted: int) -> ConfigError:
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG):
        raise error
    return ConfigError(
        f"shared memory is exhausted: a slot of {wanted} bytes does not fit at {path}.",
        hint="Give the container more: docker run --shm-size, or on Kubernetes an emptyDir with medium Memory"
        " mounted at /dev/shm and a memory limit that covers it.",
        path=str(path),
        wanted_bytes=wanted,
    )
