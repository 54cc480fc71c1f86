# SPDX-License-Identifier: Apache-2.0
"""File systems that crash: one over the real one, and one in memory that forgets what was not synced."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

from resiliency.files import Files, LocalFiles
from resiliency.testing.storage import MemoryStorage, StorageKilled

T = TypeVar("T")


class CrashingFiles:
    """Passes everything on, until the operation number `crash_at`: that one and all later ones do not
    happen."""

    def __init__(self, inner: Files, crash_at: int | None = None) -> None:
        self.inner = inner
        self.crash_at = crash_at
        self.operations: list[str] = []

    def list(self, directory: str) -> list[str]:
        return self.inner.list(directory)

    def is_dir(self, path: str) -> bool:
        return self.inner.is_dir(path)

    def read_link(self, path: str) -> str | None:
        return self.inner.read_link(path)

    def make_dir(self, path: str) -> None:
        self.change(f"make_dir {path}", lambda: self.inner.make_dir(path))

    def create(self, path: str) -> None:
        self.change(f"create {path}", lambda: self.inner.create(path))

    def symlink(self, target: str, path: str) -> None:
        self.change(f"symlink {target} {path}", lambda: self.inner.symlink(target, path))

    def rename(self, source: str, target: str) -> None:
        self.change(f"rename {source} {target}", lambda: self.inner.rename(source, target))

    def remove(self, path: str) -> None:
        self.change(f"remove {path}", lambda: self.inner.remove(path))

    def remove_tree(self, path: str) -> None:
        # What is below goes first, so that a crash is between any two of them.
        for name in self.inner.list(path):
            self.remove(f"{path}/{name}")
        self.change(f"remove_tree {path}", lambda: self.inner.remove_tree(path))

    def sync_tree(self, path: str) -> None:
        self.change(f"sync_tree {path}", lambda: self.inner.sync_tree(path))

    def sync_dir(self, path: str) -> None:
        self.change(f"sync_dir {path}", lambda: self.inner.sync_dir(path))

    def change(self, what: str, work: Callable[[], T]) -> T:
        if self.crash_at is not None and len(self.operations) >= self.crash_at:
            raise StorageKilled(what)
        self.operations.append(what)
        return work()


class WritingFiles(LocalFiles):
    """The real one, with the two operations that the program itself needs."""

    def write(self, path: str, text: str) -> None:
        with open(path, "w") as file:
            file.write(text)

    def read(self, path: str) -> str:
        with open(path) as file:
            return file.read()


class MemoryFiles:
    """`Files` over a `MemoryStorage`, which treats POSIX at its word; a symbolic link is a file of its
    target."""

    _LINK = "link to "

    def __init__(self, storage: MemoryStorage) -> None:
        self.storage = storage

    def list(self, directory: str) -> list[str]:
        return self.storage.list(directory.strip("/"))

    def is_dir(self, path: str) -> bool:
        return self.storage.exists(path.strip("/")) and hasattr(self._node(path), "entries")

    def read_link(self, path: str) -> str | None:
        if not self.storage.exists(path.strip("/")) or self.is_dir(path):
            return None
        text = self.read(path)
        return text.removeprefix(self._LINK) if text.startswith(self._LINK) else None

    def make_dir(self, path: str) -> None:
        if self.storage.exists(path.strip("/")):
            raise FileExistsError(path)
        self.storage.make_dir(path.strip("/"))

    def create(self, path: str) -> None:
        self.storage.create(path.strip("/"))

    def symlink(self, target: str, path: str) -> None:
        if self.storage.exists(path.strip("/")):
            raise FileExistsError(path)
        self.write(path, self._LINK + target)
        node = self._node(path)
        node.durable = bytes(node.data)  # the name and the target of a link are one

    def rename(self, source: str, target: str) -> None:
        node = self._node(source)
        del self._entries(source)[os.path.basename(source)]
        self._entries(target)[os.path.basename(target)] = node

    def remove(self, path: str) -> None:
        self.storage.remove(path.strip("/"))

    def remove_tree(self, path: str) -> None:
        self.storage.remove_tree(path.strip("/"))

    def sync_tree(self, path: str) -> None:
        for name in self.list(path):
            node = self._node(f"{path}/{name}")
            node.durable = bytes(node.data)
        self.sync_dir(path)

    def sync_dir(self, path: str) -> None:
        self.storage.sync_dir(path.strip("/"))

    def write(self, path: str, text: str) -> None:
        self.storage.create(path.strip("/")).write_at(0, text.encode())

    def read(self, path: str) -> str:
        return bytes(self._node(path).data).decode()

    def _node(self, path: str):  # type: ignore[no-untyped-def]
        return self.storage._find(path.strip("/"))

    def _entries(self, path: str):  # type: ignore[no-untyped-def]
        return self._node(os.path.dirname(path)).entries
