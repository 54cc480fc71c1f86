# SPDX-License-Identifier: Apache-2.0
"""Read a kernel log from where it was left: the ring buffer of ``/dev/kmsg``, or a file that a logger writes.

Both give each line once, across restarts of the reader.  The ring may have overwritten lines, and a file may
have been rotated or truncated: what was lost so is counted or noted, and reading goes on.
"""

from __future__ import annotations

import os
import stat
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from supervisor.watchdogs.watchdog import UnknownHealth, boot_id, elapsed_since_boot_s

#: Older records of the ring are history for a reader that has never been here.
FIRST_LOOK_S = 300.0
#: Largest record of the kernel's.
_RECORD_BYTES = 8192
#: Records and bytes of one look: in a storm, the rest is for the next one, at once.
_MOST_RECORDS, _MOST_BYTES = 20_000, 16 << 20
#: A line without an end that is longer is no line of a kernel.
_LONGEST_LINE = 64 << 10
#: Bytes before the place that was read up to, which tell this file from another with its name and inode.
_TAIL_BYTES = 64
#: Memory of a reader that waited for a file which was not there yet.
FROM_THE_BEGINNING: Mapping[str, Any] = {"inode": 0, "offset": 0, "tail": 0}


@dataclass(frozen=True)
class Line:
    """One line, without its prefix where the log has one; `id` is the same each time it is read."""

    id: str
    text: str
    age_s: float


@dataclass
class Lines:
    """What one look has read."""

    lines: list[Line] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class KernelLog(Protocol):
    def read_lines(self) -> Lines:
        """Lines that are new; raises UnknownHealth where the log cannot be read."""

    def memory(self) -> Mapping[str, Any]: ...

    def descriptor(self) -> int | None: ...

    def close(self) -> None: ...


def open_log(path: str, memory: Mapping[str, Any]) -> KernelLog:
    """The log at `path`, read on from `memory`.

    Raises:
        UnknownHealth: there is none, or this process may not read it.
    """
    try:
        device = stat.S_ISCHR(os.stat(path).st_mode)
        return RingLog(_ring_reader(path), memory) if device else FileLog(Path(path), memory)
    except OSError as error:
        raise UnknownHealth(f"kernel log {path} cannot be read: {error.strerror}") from error


# ------------------------------------------------------------------------------------------- /dev/kmsg


class Ring(Protocol):
    """An open ``/dev/kmsg``: a read gives one record."""

    def read(self) -> bytes:
        """Raises BlockingIOError at the end, BrokenPipeError where records were overwritten unread."""

    def descriptor(self) -> int | None: ...


@dataclass(frozen=True)
class _Device:
    fd: int

    def read(self) -> bytes:
        return os.read(self.fd, _RECORD_BYTES)

    def descriptor(self) -> int | None:
        return self.fd


def _ring_reader(path: str) -> Ring:
    return _Device(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))


class RingLog:
    """The kernel's ring buffer.  Its sequence numbers begin again with each start of the machine."""

    def __init__(
        self,
        ring: Ring,
        memory: Mapping[str, Any],
        *,
        boot: str = "",
        clock: Callable[[], float] = elapsed_since_boot_s,
    ) -> None:
        self._ring, self._clock = ring, clock
        self._boot = boot or boot_id()
        known = memory.get("boot") == self._boot and isinstance(memory.get("sequence"), int)
        self._seen: int = memory["sequence"] if known else -1
        self._first = not known

    def read_lines(self) -> Lines:
        found = Lines()
        for _ in range(_MOST_RECORDS):
            try:
                record = self._ring.read()
            except BlockingIOError:
                self._first = False
                break
            except BrokenPipeError:
                continue  # the next read begins at the oldest record; the gap in the numbers tells how many
            except OSError as error:
                if found.lines:
                    break  # what was read comes first; the next look says why it sees nothing
                raise UnknownHealth(f"kernel log cannot be read: {error.strerror}") from error
            self._take(record, found)
        return found

    def _take(self, record: bytes, found: Lines) -> None:
        # "6,1234,5678901,-;text", and continuation lines " KEY=value".
        prefix, semicolon, rest = record.partition(b";")
        fields = prefix.split(b",")
        if not semicolon or len(fields) < 3 or not (fields[1].isdigit() and fields[2].isdigit()):
            return
        sequence, age_s = int(fields[1]), max(0.0, self._clock() - int(fields[2]) / 1e6)
        if sequence <= self._seen:
            return
        missed = sequence - self._seen - 1
        if missed and not self._first and self._seen >= 0:
            found.notes.append(f"{missed} lines of the kernel log were overwritten before they were read")
        self._seen = sequence
        if self._first and age_s > FIRST_LOOK_S:
            return
        text = rest.partition(b"\n")[0].decode("utf-8", "replace")
        found.lines.append(Line(f"{self._boot}-{sequence}", text, age_s))

    def memory(self) -> Mapping[str, Any]:
        return {"boot": self._boot, "sequence": self._seen} if self._seen >= 0 else {}

    def descriptor(self) -> int | None:
        return self._ring.descriptor()

    def close(self) -> None:
        if (fd := self._ring.descriptor()) is not None:
            os.close(fd)


# ------------------------------------------------------------------------------------------- a file


class FileLog:
    """A log file.  A reader that has never been here begins at its end.

    A file that was renamed (``kern.log.1``) is read to its end first; one that was truncated is read from its
    beginning.  A line counts once its newline is there.
    """

    def __init__(self, path: Path, memory: Mapping[str, Any]) -> None:
        self._path = path
        self._fd, self._inode = self._open(path)
        self._offset, self._tail = 0, b""
        self._note = ""
        inode, offset, tail = (memory.get(name) for name in ("inode", "offset", "tail"))
        if not (isinstance(inode, int) and isinstance(offset, int) and isinstance(tail, int)):
            self._offset = self._last_line_end()
            self._tail = self._before(self._offset)
            return
        rotated = Path(f"{path}.1")
        if inode == self._inode:
            self._offset = offset
        elif rotated.exists() and rotated.stat().st_ino == inode:
            os.close(self._fd)
            self._fd, self._inode = self._open(rotated)
            self._offset = offset
        elif inode:
            self._note = f"{path} is another file than before: lines between the two may be missing"
        if self._offset and zlib.crc32(self._before(self._offset)) != tail:
            self._offset = 0  # another file with the inode of the one that was read
            self._note = f"{path} is another file than before: lines between the two may be missing"
        self._tail = self._before(self._offset)

    @staticmethod
    def _open(path: Path) -> tuple[int, int]:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return fd, os.fstat(fd).st_ino

    def _last_line_end(self) -> int:
        size = os.fstat(self._fd).st_size
        end = os.pread(self._fd, _LONGEST_LINE, max(0, size - _LONGEST_LINE))
        return size - (len(end) - 1 - end.rfind(b"\n")) if b"\n" in end else 0

    def _before(self, offset: int) -> bytes:
        start = max(0, offset - _TAIL_BYTES)
        return os.pread(self._fd, offset - start, start)

    def read_lines(self) -> Lines:
        found = Lines(notes=[self._note] if self._note else [])
        self._note = ""
        try:
            for _ in range(8):  # a file that is rotated more often than that within one look is read on later
                if not (self._read_on(found) and self._follow()):
                    break
        except OSError as error:
            if not found.lines:  # what was read comes first; the next look says why it sees nothing
                raise UnknownHealth(f"kernel log {self._path} cannot be read: {error.strerror}") from error
        return found

    def _read_on(self, found: Lines) -> bool:
        """Read the open file; True where that was all of it."""
        if os.fstat(self._fd).st_size < self._offset or self._before(self._offset) != self._tail:
            found.notes.append(f"{self._path} was truncated: it is read from its beginning")
            self._offset = 0
        taken = 0
        while taken < _MOST_BYTES:
            block = os.pread(self._fd, 1 << 20, self._offset)
            end = block.rfind(b"\n") + 1
            if not end:
                if len(block) < _LONGEST_LINE:
                    break
                end = len(block)  # no line, and none of the kernel's
            start = 0
            for line in block[:end].split(b"\n")[:-1]:
                if len(line) <= _LONGEST_LINE:
                    where = f"{self._inode:x}-{self._offset + start:x}-{zlib.crc32(line):x}"
                    found.lines.append(Line(where, line.decode("utf-8", "replace"), 0.0))
                start += len(line) + 1
            self._offset += end
            taken += end
        self._tail = self._before(self._offset)
        return taken < _MOST_BYTES

    def _follow(self) -> bool:
        """Go on with the file that has the name now; False where that is the one that was just read."""
        try:
            if self._path.stat().st_ino == self._inode:
                return False
            fd, inode = self._open(self._path)
        except FileNotFoundError:
            return False  # between the two renames of a rotation
        os.close(self._fd)
        self._fd, self._inode, self._offset, self._tail = fd, inode, 0, b""
        return True

    def memory(self) -> Mapping[str, Any]:
        return {"inode": self._inode, "offset": self._offset, "tail": zlib.crc32(self._tail)}

    def descriptor(self) -> int | None:
        return None

    def close(self) -> None:
        os.close(self._fd)
