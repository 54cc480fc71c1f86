# SPDX-License-Identifier: Apache-2.0
"""A storage that counts what is asked of it: the price of an action in operations and bytes, not seconds."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field

from resiliency.checkpoint.storage.interface import Buffer, ReadableFile, Storage, WritableFile


@dataclass
class StorageCounts:
    """What a `CountingStorage` saw.  Units: `read_bytes` and `written_bytes` are of file content."""

    operations: Counter[str] = field(default_factory=Counter)
    #: How often each file was opened for reading.
    opened: Counter[str] = field(default_factory=Counter)
    read_bytes: int = 0
    written_bytes: int = 0

    @property
    def total(self) -> int:
        """Operations that a file server answers; `close` and the look at a size are not among them."""
        return self.operations.total()


class CountingStorage:
    """Wraps any storage; every rank of a simulated job may have one of its own over the same storage."""

    def __init__(self, inner: Storage) -> None:
        self._inner = inner
        self._lock = threading.Lock()
        self.counts = StorageCounts()

    def restart_count(self) -> StorageCounts:
        """What was counted so far; counting begins at zero again."""
        with self._lock:
            counts, self.counts = self.counts, StorageCounts()
        return counts

    def describe(self, name: str = "") -> str:
        return self._inner.describe(name)

    def create(self, name: str, size_bytes: int = 0) -> WritableFile:
        self.count("create")
        return _CountingWriter(self, self._inner.create(name, size_bytes))

    def open(self, name: str) -> ReadableFile:
        self.count("open")
        file = self._inner.open(name)
        with self._lock:
            self.counts.opened[name] += 1
        return _CountingReader(self, file)

    def make_dir(self, name: str) -> None:
        self.count("make_dir")
        self._inner.make_dir(name)

    def list(self, name: str) -> list[str]:
        self.count("list")
        return self._inner.list(name)

    def exists(self, name: str) -> bool:
        self.count("exists")
        return self._inner.exists(name)

    def replace(self, source: str, target: str) -> None:
        self.count("replace")
        self._inner.replace(source, target)

    def link(self, source: str, target: str) -> None:
        self.count("link")
        self._inner.link(source, target)

    def remove(self, name: str) -> None:
        self.count("remove")
        self._inner.remove(name)

    def remove_tree(self, name: str) -> None:
        self.count("remove_tree")
        self._inner.remove_tree(name)

    def remove_empty_dir(self, name: str) -> None:
        self.count("remove_empty_dir")
        self._inner.remove_empty_dir(name)

    def sync_dir(self, name: str) -> None:
        self.count("sync_dir")
        self._inner.sync_dir(name)

    def count(self, operation: str, *, read: int = 0, written: int = 0) -> None:
        """Note one operation."""
        with self._lock:
            self.counts.operations[operation] += 1
            self.counts.read_bytes += read
            self.counts.written_bytes += written


class _CountingWriter:
    def __init__(self, storage: CountingStorage, inner: WritableFile) -> None:
        self._storage = storage
        self._inner = inner

    def write_at(self, offset: int, *data: Buffer) -> None:
        self._storage.count("write", written=sum(memoryview(part).nbytes for part in data))
        self._inner.write_at(offset, *data)

    def sync(self) -> None:
        self._storage.count("sync")
        self._inner.sync()

    def close(self) -> None:
        self._inner.close()


class _CountingReader:
    def __init__(self, storage: CountingStorage, inner: ReadableFile) -> None:
        self._storage = storage
        self._inner = inner

    @property
    def size_bytes(self) -> int:
        return self._inner.size_bytes

    def read_into(self, offset: int, *targets: memoryview) -> int:
        count = self._inner.read_into(offset, *targets)
        self._storage.count("read", read=count)
        return count

    def close(self) -> None:
        self._inner.close()
