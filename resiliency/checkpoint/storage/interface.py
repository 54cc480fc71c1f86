# SPDX-License-Identifier: Apache-2.0
"""The few storage operations that a checkpoint needs, as an interface.

Invariant: whatever is reported as synced survives a power cut.  `WritableFile.sync` makes the
bytes of a file durable and `Storage.sync_dir` the names in a directory; nothing else does.  The
commit protocol relies on these two, and on a rename that either happens or fails because its source or the
directory of its target is gone.  It needs no link and no locking.

Names are relative to the root of the storage, with ``/`` between parts; the root itself is "".
`resiliency.checkpoint.storage.posix` is the implementation.  The twins for tests live in
`resiliency.testing.storage`, and one contract suite runs on all.
"""

from __future__ import annotations

from typing import Protocol

Buffer = bytes | bytearray | memoryview


class WritableFile(Protocol):
    """A new file being filled.  `write_at` may be called from several threads at once."""

    def write_at(self, offset: int, *data: Buffer) -> None:
        """Write all of `data`, one after the other; a gap left before `offset` reads as zeros."""
        ...

    def sync(self) -> None:
        """Make the bytes durable.  The name becomes durable with `Storage.sync_dir`."""
        ...

    def close(self) -> None: ...


class ReadableFile(Protocol):
    """A file being read.  `read_into` may be called from several threads at once."""

    @property
    def size_bytes(self) -> int: ...

    def read_into(self, offset: int, *targets: memoryview) -> int:
        """Fill `targets`, one after the other, from `offset`; returns the bytes read, short only at the end
        of the file."""
        ...

    def close(self) -> None: ...


class Storage(Protocol):
    """What a tier offers.  A failed write raises `CheckpointWriteFailed`, a missing file
    `CheckpointMissing`, and a file that cannot be read `CheckpointCorrupt`."""

    def describe(self, name: str = "") -> str:
        """Where `name` is, for messages to people."""
        ...

    def create(self, name: str, size_bytes: int = 0) -> WritableFile:
        """New empty file; a file of that name is replaced.  Its directory must exist.

        Args:
            size_bytes: what will be written, if known; a tier may reserve the space.
        """
        ...

    def open(self, name: str) -> ReadableFile: ...

    def make_dir(self, name: str) -> None:
        """Create a directory with its parents; an existing one is fine."""
        ...

    def list(self, name: str) -> list[str]:
        """Sorted names in a directory; empty when there is none."""
        ...

    def exists(self, name: str) -> bool:
        """Whether there is a file or directory of that name.

        Raises:
            CheckpointCorrupt: the storage does not say; a False would let callers delete what is there.
        """
        ...

    def replace(self, source: str, target: str) -> None:
        """Rename a file over another, or a directory to a name that is free.

        Raises:
            CheckpointWriteFailed: with errno ENOENT, the source or the directory of the target is gone.
        """
        ...

    def link(self, source: str, target: str) -> None:
        """Second name for the same bytes, where the tier can; else a copy."""
        ...

    def remove(self, name: str) -> None:
        """Remove a file; fine when there is none."""
        ...

    def remove_tree(self, name: str) -> None:
        """Remove a directory and all below; fine when there is none."""
        ...

    def remove_empty_dir(self, name: str) -> None:
        """Remove a directory if nothing is in it; fine when something is, or when there is none."""
        ...

    def sync_dir(self, name: str) -> None:
        """Make the names in a directory durable."""
        ...


def write_file(storage: Storage, name: str, data: Buffer) -> None:
    """Create `name` with `data`, durable except for its name (see `Storage.sync_dir`)."""
    file = storage.create(name)
    try:
        file.write_at(0, data)
        file.sync()
    finally:
        file.close()


def read_file(storage: Storage, name: str) -> bytes:
    """All bytes of a file.

    Raises:
        CheckpointMissing: there is no such file.
    """
    file = storage.open(name)
    try:
        content = bytearray(file.size_bytes)
        count = file.read_into(0, memoryview(content))
        return bytes(content[:count])
    finally:
        file.close()
