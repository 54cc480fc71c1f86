# SPDX-License-Identifier: Apache-2.0
"""A storage whose calls can be seen while they last.

A call into a dead file server or a stuck device may never return, and nothing in this process can end
it.  So each is noted before it is made, and another thread can say which one has taken too long.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

from resiliency.checkpoint.storage.interface import Buffer, ReadableFile, Storage, WritableFile
from resiliency.errors import CheckpointWriteFailed
from resiliency.runtime import awake_s


@dataclass(frozen=True)
class Call:
    """One call that has not returned.  `since`: when it was made, by `awake_s`."""

    what: str
    path: str
    since: float

    @property
    def age_s(self) -> float:
        return awake_s() - self.since


@dataclass(frozen=True, kw_only=True)
class CallTimeouts:
    """How long one call may still take from a moment on, however old it is then.

    `since`: that moment, by `awake_s`; by default all of a call counts.
    """

    longest: timedelta
    since: float = 0.0

    def is_over(self, call: Call) -> bool:
        return awake_s() - max(call.since, self.since) >= self.longest.total_seconds()


class WatchedStorage:
    """Passes everything to `inner`."""

    def __init__(self, inner: Storage) -> None:
        self._inner = inner
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        #: What it is, the name it is for, and when it was made.
        self._calls: dict[int, tuple[str, str, float]] = {}
        #: Counts how often the files that were open were given up.
        self._given_up = 0

    def oldest_call(self) -> Call | None:
        """The call that has been under way for longest."""
        with self._lock:
            oldest = min(self._calls.values(), key=lambda call: call[2], default=None)
        if oldest is None:
            return None
        what, name, since = oldest
        return Call(what, self.describe(name), since)

    def give_up_files(self) -> None:
        """Let no more be written to the files that are open, or being opened, now."""
        with self._lock:
            self._given_up += 1

    @contextmanager
    def noted(self, what: str, name: str) -> Iterator[None]:
        """For the time of one call."""
        number, call = next(self._numbers), (what, name, awake_s())
        with self._lock:
            self._calls[number] = call
        try:
            yield
        finally:
            with self._lock:
                del self._calls[number]

    def describe(self, name: str = "") -> str:
        return self._inner.describe(name)

    def create(self, name: str, size_bytes: int = 0) -> WritableFile:
        given_up = self._given_up
        with self.noted("create", name):
            file = self._inner.create(name, size_bytes)
        return _WatchedWriter(self, file, name, lambda: self._given_up == given_up)

    def open(self, name: str) -> ReadableFile:
        with self.noted("open", name):
            return _WatchedReader(self, self._inner.open(name), name)

    def make_dir(self, name: str) -> None:
        with self.noted("create directory", name):
            self._inner.make_dir(name)

    def list(self, name: str) -> list[str]:
        with self.noted("list", name):
            return self._inner.list(name)

    def exists(self, name: str) -> bool:
        with self.noted("look at", name):
            return self._inner.exists(name)

    def replace(self, source: str, target: str) -> None:
        with self.noted("rename to", target):
            self._inner.replace(source, target)

    def link(self, source: str, target: str) -> None:
        with self.noted("link", target):
            self._inner.link(source, target)

    def remove(self, name: str) -> None:
        with self.noted("remove", name):
            self._inner.remove(name)

    def remove_tree(self, name: str) -> None:
        with self.noted("remove", name):
            self._inner.remove_tree(name)

    def remove_empty_dir(self, name: str) -> None:
        with self.noted("remove", name):
            self._inner.remove_empty_dir(name)

    def sync_dir(self, name: str) -> None:
        with self.noted("sync directory", name):
            self._inner.sync_dir(name)


class _WatchedWriter:
    def __init__(
        self, storage: WatchedStorage, inner: WritableFile, name: str, is_wanted: Callable[[], bool]
    ) -> None:
        self._storage = storage
        self._inner = inner
        self._name = name
        self._is_wanted = is_wanted

    def write_at(self, offset: int, *data: Buffer) -> None:
        if not self._is_wanted():
            path = self._storage.describe(self._name)
            raise CheckpointWriteFailed(
                f"{path} was given up: the storage did not answer in time.", path=path
            )
        with self._storage.noted("write", self._name):
            self._inner.write_at(offset, *data)

    def sync(self) -> None:
        with self._storage.noted("sync", self._name):
            self._inner.sync()

    def close(self) -> None:
        with self._storage.noted("close", self._name):
            self._inner.close()


class _WatchedReader:
    def __init__(self, storage: WatchedStorage, inner: ReadableFile, name: str) -> None:
        self._storage = storage
        self._inner = inner
        self._name = name

    @property
    def size_bytes(self) -> int:
        return self._inner.size_bytes

    def read_into(self, offset: int, *targets: memoryview) -> int:
        with self._storage.noted("read", self._name):
            return self._inner.read_into(offset, *targets)

    def close(self) -> None:
        with self._storage.noted("close", self._name):
            self._inner.close()
