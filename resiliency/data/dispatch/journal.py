# SPDX-License-Identifier: Apache-2.0
"""A file of entries, each of which is durable before its effect is reported.

A line is a checksum and a list of entries in JSON, which were made durable at once. The first entry is a
snapshot, the others are what happened since. A kill or a power cut can tear the last line only, whose effects
were not reported: it is dropped. Damage in any other place is refused, because later entries would have
another meaning without it. The line of the snapshot is replaced as a whole file, so no crash tears it: a
journal without it is damaged too, and never an empty one.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import zlib
from pathlib import Path
from typing import BinaryIO

from resiliency.data.dispatch.ranges import Plain
from resiliency.errors import ConfigError, DataError
from resiliency.files import sync_dir, write_durably

_REPAIR = "Restore the file, or start with an empty directory and the state in a checkpoint."


def encoded(entries: list[Plain]) -> bytes:
    """One line."""
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=True).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def decoded(data: bytes) -> tuple[list[Plain], int]:
    """The entries of a journal, and the number of bytes that they take: what follows was torn.

    Raises:
        DataError: a line that is not the last one is damaged, or the first one is not whole.
    """
    entries: list[Plain] = []
    position = 0
    while position < len(data):
        end = data.find(b"\n", position)
        line = data[position:end] if end >= 0 else b""
        checksum, _, text = line.partition(b" ")
        if end < 0 or checksum != b"%08x" % zlib.crc32(text):
            if end >= 0 and end + 1 < len(data):
                raise DataError(
                    f"entry {len(entries) + 1} of the journal is damaged, and others follow it.",
                    hint=_REPAIR,
                )
            break
        entries += json.loads(text)
        position = end + 1
    if not position:
        raise DataError("the journal is damaged: its first line is not whole.", hint=_REPAIR)
    return entries, position


class Journal:
    """The journal in a directory, for one process at a time.

    Raises:
        ConfigError: another process has it open.
        DataError: it is damaged.
        OSError: the directory takes no files.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.path = Path(directory) / "book.journal"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.path.with_name("book.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._file: BinaryIO | None = None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            #: What it held when it was opened.
            self.entries: list[Plain] = []
            if self.path.exists():
                data = self.path.read_bytes()
                self.entries, length = decoded(data)
                if length < len(data):
                    os.truncate(self.path, length)
                # A process that was killed may have written what it had no time to sync.
                os.fsync(self._open().fileno())
                sync_dir(self.path.parent)
        except BlockingIOError:
            self.close()
            raise ConfigError(f"another process keeps the journal {self.path}.") from None
        except BaseException:
            self.close()
            raise
        #: Entries since the last snapshot.
        self.length = len(self.entries)

    def start(self, snapshot: Plain) -> None:
        """Replace all entries by a snapshot, durably."""
        write_durably(self.path, encoded([snapshot]))
        self._open()
        self.length = 1

    def append(self, entries: list[Plain]) -> None:
        """Add entries, durably: all of them or, after a crash, none; `start` comes first.

        Raises:
            OSError: they may be there or not. The caller ends: what it has in memory is ahead of the file.
        """
        assert self._file is not None
        self._file.write(encoded(entries))
        self._file.flush()
        os.fdatasync(self._file.fileno())
        self.length += len(entries)

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # of a full disk: `append` has raised it
                self._file.close()
            self._file = None
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _open(self) -> BinaryIO:
        if self._file is not None:
            self._file.close()
        self._file = self.path.open("ab")
        return self._file
