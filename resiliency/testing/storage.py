# SPDX-License-Identifier: Apache-2.0
"""Storages for tests: one in memory that can crash, and one that fails on command.

`MemoryStorage` keeps two versions of everything, the one that programs see and the one that
survives a power cut, and treats POSIX at its word: bytes survive after `sync` of the file, names
after `sync_dir` of the directory, and what was not synced may survive, may not, or may be torn.
`FaultyStorage` wraps any storage and does one bad thing at the n-th operation; `TroubledStorage` has
errors that pass, placed at an operation on a step; `LateStorage` hangs at the n-th operation and wakes when a
test wants; `CachingStorage` shows for a while what is gone.
"""

from __future__ import annotations

import enum
import errno
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

from resiliency.checkpoint.storage.interface import Buffer, ReadableFile, Storage, WritableFile, read_file
from resiliency.checkpoint.storage.posix import read_failed, write_failed
from resiliency.errors import CheckpointMissing

_SECTOR_BYTES = 512


@dataclass
class _File:
    data: bytearray = field(default_factory=bytearray)
    durable: bytes = b""


@dataclass
class _Dir:
    entries: dict[str, _File | _Dir] = field(default_factory=dict)
    durable: dict[str, _File | _Dir] = field(default_factory=dict)


class Survival(enum.Enum):
    """What a crash does to the bytes and names that were not synced."""

    NOTHING = "nothing"  # only what was synced survives
    EVERYTHING = "everything"  # as after a kill of the process alone
    RANDOM = "random"  # each name by itself; files whole, gone or torn


class MemoryStorage:
    """A storage in memory that models what a power cut leaves behind."""

    def __init__(self) -> None:
        self._root = _Dir()
        self._lock = threading.RLock()

    def crash(self, survival: Survival = Survival.NOTHING, seed: int = 0) -> MemoryStorage:
        """The storage as the machine finds it after the next boot; `self` is left as it is."""
        after = MemoryStorage()
        with self._lock:
            after._root = _survivors(self._root, survival, random.Random(seed))  # noqa: S311
        return after

    def describe(self, name: str = "") -> str:
        return f"memory:/{name}"

    def create(self, name: str, size_bytes: int = 0) -> WritableFile:
        with self._lock:
            file = _File()
            self._parent(name).entries[name.rpartition("/")[2]] = file
            return _MemoryWriter(file, self._lock)

    def open(self, name: str) -> ReadableFile:
        with self._lock:
            node = self._find(name)
            if not isinstance(node, _File):
                raise CheckpointMissing(f"there is no file {self.describe(name)}.", path=name)
            return _MemoryReader(node)

    def make_dir(self, name: str) -> None:
        with self._lock:
            node = self._root
            for part in name.split("/") if name else ():
                child = node.entries.setdefault(part, _Dir())
                if not isinstance(child, _Dir):
                    raise self._failed(errno.ENOTDIR, "create directory", name)
                node = child

    def list(self, name: str) -> list[str]:
        with self._lock:
            node = self._find(name)
            return sorted(node.entries) if isinstance(node, _Dir) else []

    def exists(self, name: str) -> bool:
        with self._lock:
            return self._find(name) is not None

    def replace(self, source: str, target: str) -> None:
        with self._lock:
            node = self._find(source)
            if node is None:
                raise self._failed(errno.ENOENT, "rename", source)
            self._parent(target).entries[target.rpartition("/")[2]] = node
            self.remove(source)

    def link(self, source: str, target: str) -> None:
        with self._lock:
            node = self._find(source)
            if not isinstance(node, _File):
                raise self._failed(errno.ENOENT, "link", source)
            self._parent(target).entries[target.rpartition("/")[2]] = node

    def remove(self, name: str) -> None:
        self.remove_tree(name)

    def remove_tree(self, name: str) -> None:
        with self._lock:
            if self._find(name) is not None:
                del self._parent(name).entries[name.rpartition("/")[2]]

    def remove_empty_dir(self, name: str) -> None:
        with self._lock:
            node = self._find(name)
            if isinstance(node, _Dir) and not node.entries:
                self.remove_tree(name)

    def sync_dir(self, name: str) -> None:
        with self._lock:
            node = self._find(name)
            if not isinstance(node, _Dir):
                raise self._failed(errno.ENOENT, "sync directory", name)
            node.durable = dict(node.entries)

    def _find(self, name: str) -> _File | _Dir | None:
        node: _File | _Dir | None = self._root
        for part in name.split("/") if name else ():
            node = node.entries.get(part) if isinstance(node, _Dir) else None
        return node

    def _parent(self, name: str) -> _Dir:
        node = self._find(name.rpartition("/")[0])
        if not isinstance(node, _Dir):
            raise self._failed(errno.ENOENT, "create", name)
        return node

    def _failed(self, number: int, what: str, name: str) -> Exception:
        return write_failed(OSError(number, os.strerror(number)), what, self.describe(name))


class _MemoryWriter:
    def __init__(self, file: _File, lock: threading.RLock) -> None:
        self._file = file
        self._lock = lock

    def write_at(self, offset: int, *data: Buffer) -> None:
        view = memoryview(b"".join(data))
        with self._lock:
            content = self._file.data
            content.extend(bytes(max(0, offset - len(content))))
            content[offset : offset + view.nbytes] = view

    def sync(self) -> None:
        with self._lock:
            self._file.durable = bytes(self._file.data)

    def close(self) -> None:
        pass


class _MemoryReader:
    def __init__(self, file: _File) -> None:
        self._content = bytes(file.data)

    @property
    def size_bytes(self) -> int:
        return len(self._content)

    def read_into(self, offset: int, *targets: memoryview) -> int:
        begin = offset
        for target in targets:
            piece = self._content[offset : offset + target.nbytes]
            target.cast("B")[: len(piece)] = piece
            offset += len(piece)
        return offset - begin

    def close(self) -> None:
        pass


def _survivors(directory: _Dir, survival: Survival, rng: random.Random) -> _Dir:
    names: dict[str, _File | _Dir] = {}
    for name in sorted({*directory.entries, *directory.durable}):
        new, old = directory.entries.get(name), directory.durable.get(name)
        keep_new = survival is Survival.EVERYTHING or (survival is Survival.RANDOM and rng.random() < 0.5)
        node = new if keep_new else old
        if isinstance(node, _Dir):
            names[name] = _survivors(node, survival, rng)
        elif node is not None:
            content = _surviving_bytes(node, survival, rng)
            names[name] = _File(bytearray(content), content)
    return _Dir(names, dict(names))


def _surviving_bytes(file: _File, survival: Survival, rng: random.Random) -> bytes:
    if survival is Survival.EVERYTHING:
        return bytes(file.data)
    if survival is Survival.NOTHING or bytes(file.data) == file.durable:
        return file.durable
    # The size may be new while sectors are still the old ones, or zeros where there were none.
    size = rng.choice([len(file.durable), len(file.data)])
    old = file.durable[:size].ljust(size, b"\0")
    torn = bytearray(old)
    for start in range(0, min(size, len(file.data)), _SECTOR_BYTES):
        if rng.random() < 0.5:
            end = min(start + _SECTOR_BYTES, size, len(file.data))
            torn[start:end] = file.data[start:end]
    return bytes(torn)


class StorageFaultKind(enum.Enum):
    KILL = "kill"  # this operation does not happen and no later one does
    TORN_KILL = "torn kill"  # half of the write happens, then as KILL
    ERROR = "error"  # this operation fails with `errno`
    ERROR_FROM = "error from"  # this operation and all later ones of its kind fail with `errno`
    SHORT_WRITE = "short write"  # half of the bytes are written and nobody is told
    BIT_FLIP = "bit flip"  # one bit of the bytes written or read differs
    SLOW = "slow"  # this operation and all later ones take `delay`
    HANG = "hang"  # this operation does not begin before `FaultyStorage.answers` is set


@dataclass(frozen=True, kw_only=True)
class StorageFault:
    """One bad thing.  `operation` counts from 0 over all operations that `FaultyStorage` counts."""

    operation: int
    kind: StorageFaultKind
    errno: int = errno.EIO
    delay: timedelta = timedelta(milliseconds=50)


class StorageKilled(BaseException):
    """The writer died here.  Not an Exception, so that no error handling of the code under test
    runs as if it had survived."""


def kill_this_process() -> None:
    """What a `KILL` does on a real disk: no handler, no cleanup, no flush."""
    os.kill(os.getpid(), signal.SIGKILL)


def raise_killed() -> None:
    raise StorageKilled


class FaultyStorage:
    """Passes everything to `inner` and does what `fault` says at its operation.

    Counted are the operations that change something (create, write, sync, make_dir, replace,
    link, remove, remove_tree, remove_empty_dir, sync_dir) and, with `count_reads`, each read of a file
    instead.

    Args:
        on_kill: called at a kill; the default raises `StorageKilled`, and every later operation
            does too.
    """

    def __init__(
        self,
        inner: Storage,
        fault: StorageFault | None = None,
        *,
        count_reads: bool = False,
        on_kill: Callable[[], None] = raise_killed,
    ) -> None:
        self.inner = inner
        self.operations: list[str] = []
        #: At a `HANG`: whether it has come to that, and what ends it.
        self.hangs, self.answers = threading.Event(), threading.Event()
        self._fault = fault
        self._count_reads = count_reads
        self._on_kill = on_kill
        self._dead = False
        self._lock = threading.Lock()

    def describe(self, name: str = "") -> str:
        return self.inner.describe(name)

    def create(self, name: str, size_bytes: int = 0) -> WritableFile:
        self._change(f"create {name}")
        return _FaultyWriter(self, self.inner.create(name, size_bytes), name)

    def open(self, name: str) -> ReadableFile:
        self._alive()
        return _FaultyReader(self, self.inner.open(name), name)

    def make_dir(self, name: str) -> None:
        self._change(f"make_dir {name}")
        self.inner.make_dir(name)

    def list(self, name: str) -> list[str]:
        self._alive()
        return self.inner.list(name)

    def exists(self, name: str) -> bool:
        self._alive()
        return self.inner.exists(name)

    def replace(self, source: str, target: str) -> None:
        self._change(f"replace {source} {target}")
        self.inner.replace(source, target)

    def link(self, source: str, target: str) -> None:
        self._change(f"link {source} {target}")
        self.inner.link(source, target)

    def remove(self, name: str) -> None:
        self._change(f"remove {name}")
        self.inner.remove(name)

    def remove_tree(self, name: str) -> None:
        self._change(f"remove_tree {name}")
        self.inner.remove_tree(name)

    def remove_empty_dir(self, name: str) -> None:
        self._change(f"remove_empty_dir {name}")
        self.inner.remove_empty_dir(name)

    def sync_dir(self, name: str) -> None:
        self._change(f"sync_dir {name}")
        self.inner.sync_dir(name)

    def _alive(self) -> None:
        if self._dead:
            self._on_kill()

    def _change(self, operation: str) -> StorageFaultKind | None:
        return None if self._count_reads else self._count(operation)

    def _count(self, operation: str) -> StorageFaultKind | None:
        """Note the operation; act on faults that need no data, return those that do."""
        with self._lock:
            self._alive()
            number = len(self.operations)
            self.operations.append(operation)
        fault = self._fault
        if fault is None or number < fault.operation:
            return None
        if fault.kind is StorageFaultKind.SLOW:
            time.sleep(fault.delay.total_seconds())  # the slowness itself, ordering nothing
            return None
        if fault.kind is StorageFaultKind.HANG and number == fault.operation:
            self.hangs.set()
            self.answers.wait()  # as in the kernel: without a deadline
            return None
        if fault.kind is StorageFaultKind.ERROR_FROM or (
            fault.kind is StorageFaultKind.ERROR and number == fault.operation
        ):
            self._raise(operation, fault.errno)
        if number != fault.operation:
            return None
        if fault.kind is StorageFaultKind.KILL or (
            fault.kind is StorageFaultKind.TORN_KILL and not operation.startswith("write ")
        ):
            self._kill()
        return fault.kind

    def _kill(self) -> None:
        self._dead = True
        self._on_kill()

    def _raise(self, operation: str, number: int) -> None:
        error = OSError(number, os.strerror(number))
        what, _, name = operation.partition(" ")
        if self._count_reads:
            raise read_failed(error, self.describe(name)) from error
        raise write_failed(error, what, self.describe(name)) from error


@dataclass(frozen=True, kw_only=True)
class StorageTrouble:
    """An operation on what belongs to `step` fails with `errno`, `times` times, and then no more.

    Args:
        operation: create, write, sync, open, list, exists, make_dir, replace, link, remove, remove_tree,
            remove_empty_dir or sync_dir.  One that names no step (a listing of the root) belongs to the step
            named last.
    """

    step: int
    operation: str
    errno: int = errno.EIO
    times: int = 1


class TroubledStorage(FaultyStorage):
    """Passes everything to `inner` but what `troubles` says."""

    def __init__(self, inner: Storage, *troubles: StorageTrouble) -> None:
        super().__init__(inner)
        self._left = {trouble: trouble.times for trouble in troubles}
        self._step = -1

    @property
    def is_over(self) -> bool:
        """Whether all errors have been met."""
        return not any(self._left.values())

    def open(self, name: str) -> ReadableFile:
        self._meet(f"open {name}", read_failed)
        return super().open(name)

    def list(self, name: str) -> list[str]:
        self._meet(f"list {name}", read_failed)
        return super().list(name)

    def exists(self, name: str) -> bool:
        self._meet(f"exists {name}", read_failed)
        return super().exists(name)

    def _change(self, operation: str) -> StorageFaultKind | None:
        what, _, _ = operation.partition(" ")
        self._meet(operation, lambda error, path: write_failed(error, what, path))
        return super()._change(operation)

    def _meet(self, operation: str, failed: Callable[[OSError, str], Exception]) -> None:
        what, _, name = operation.partition(" ")
        with self._lock:
            if found := re.search(r"step=(\d+)", name):
                self._step = int(found[1])
            for trouble, left in self._left.items():
                if left and (trouble.operation, trouble.step) == (what, self._step):
                    self._left[trouble] = left - 1
                    raise failed(OSError(trouble.errno, os.strerror(trouble.errno)), self.describe(name))


class LateStorage(FaultyStorage):
    """The mount of a process that is late: one operation hangs, reads included, until `answers` is set.

    Args:
        operation: counts from 0 over all operations, reads included; None: none hangs.
        dies: the process is killed right after that operation.
    """

    def __init__(self, inner: Storage, operation: int | None = None, *, dies: bool = False) -> None:
        super().__init__(inner)
        self._late = operation
        self._dies = dies

    def open(self, name: str) -> ReadableFile:
        self._change(f"open {name}")
        return super().open(name)

    def list(self, name: str) -> list[str]:
        self._change(f"list {name}")
        return super().list(name)

    def exists(self, name: str) -> bool:
        self._change(f"exists {name}")
        return super().exists(name)

    def _change(self, operation: str) -> StorageFaultKind | None:
        with self._lock:
            self._alive()
            if self._late is not None and len(self.operations) > self._late and self._dies:
                self._kill()
            is_late = len(self.operations) == self._late
            self.operations.append(operation)
        if is_late:
            self.hangs.set()
            self.answers.wait()
        return None


class CachingStorage(FaultyStorage):
    """A mount that caches metadata, as GCS FUSE does: a file that it has opened is there for as long as the
    cache holds, with its bytes of then, whatever other mounts of `inner` do.  Listings are fresh, and what
    this mount changes itself it knows.

    Args:
        now: of a monotonic clock.
    """

    def __init__(self, inner: Storage, ttl: timedelta, *, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__(inner)
        self._ttl_s = ttl.total_seconds()
        self._now = now
        self._seen: dict[str, tuple[float, bytes]] = {}

    def open(self, name: str) -> ReadableFile:
        since, content = self._seen.get(name, (0.0, b""))
        if name not in self._seen or self._now() - since >= self._ttl_s:
            content = read_file(self.inner, name)
            self._seen[name] = self._now(), content
        return _MemoryReader(_File(bytearray(content)))

    def exists(self, name: str) -> bool:
        since, _ = self._seen.get(name, (0.0, b""))
        return (name in self._seen and self._now() - since < self._ttl_s) or super().exists(name)

    def _change(self, operation: str) -> StorageFaultKind | None:
        for name in operation.split()[1:]:
            self._seen = {seen: of for seen, of in self._seen.items() if f"{seen}/".find(f"{name}/") != 0}
        return super()._change(operation)


class _FaultyWriter:
    def __init__(self, storage: FaultyStorage, inner: WritableFile, name: str) -> None:
        self._storage = storage
        self._inner = inner
        self._name = name

    def write_at(self, offset: int, *data: Buffer) -> None:
        kind = self._storage._change(f"write {self._name}")
        view = memoryview(b"".join(data))
        if kind in (StorageFaultKind.SHORT_WRITE, StorageFaultKind.TORN_KILL):
            self._inner.write_at(offset, view[: view.nbytes // 2])
            if kind is StorageFaultKind.TORN_KILL:
                self._storage._kill()
        elif kind is StorageFaultKind.BIT_FLIP:
            self._inner.write_at(offset, _flipped(view))
        else:
            self._inner.write_at(offset, view)

    def sync(self) -> None:
        self._storage._change(f"sync {self._name}")
        self._inner.sync()

    def close(self) -> None:
        self._inner.close()


class _FaultyReader:
    def __init__(self, storage: FaultyStorage, inner: ReadableFile, name: str) -> None:
        self._storage = storage
        self._inner = inner
        self._name = name

    @property
    def size_bytes(self) -> int:
        return self._inner.size_bytes

    def read_into(self, offset: int, *targets: memoryview) -> int:
        storage = self._storage
        kind = storage._count(f"read {self._name}") if storage._count_reads else None
        count = self._inner.read_into(offset, *targets)
        if kind is StorageFaultKind.BIT_FLIP and count:
            first = targets[0].cast("B")[:count]
            first[:] = _flipped(first)
        return count

    def close(self) -> None:
        self._inner.close()


def _flipped(view: memoryview) -> bytes:
    data = bytearray(view)
    if data:
        data[len(data) // 2] ^= 0x10
    return bytes(data)
