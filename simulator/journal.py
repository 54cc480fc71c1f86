# SPDX-License-Identifier: Apache-2.0
"""What an effect needs to be undone, on disk before the effect.

Each simulator appends to a file of its own, which it holds locked while it lives.  An unlocked file is of a
simulator that was killed: the next one, of whatever job, undoes what is open there.  Lines are JSON or
empty; an entry is open until a line says that it is done.  The directory must be the host's own.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import stat
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from resiliency.errors import ConfigError, ResiliencyError
from resiliency.events import JsonValue
from resiliency.files import sync_dir

logger = logging.getLogger(__name__)

Record = dict[str, JsonValue]
_SUFFIX = ".journal"


class Recovered(NamedTuple):
    """What became of the effects that killed simulators left: numbers of effects."""

    undone: int = 0
    kept: int = 0


def default_directory() -> Path:
    """On the host's own disk, so that it outlives a restart of the host; one for each user."""
    return Path("/var/tmp", f"resiliency-simulator-{os.getuid()}")  # noqa: S108  checked by `Journal`


def boot_id() -> str:
    """Differs after a restart of the host, and from that of every other host."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class Journal:
    """The open effects of this process.

    Args:
        directory: created with mode 0700; must belong to this user.
    Raises:
        ConfigError: the directory belongs to another user, or cannot be written.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = directory.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
                raise ConfigError(
                    f"--state_dir {directory} is not a directory of this user that only this user can write.",
                    hint="Name another one, on a disk of this host.",
                )
            self.path = directory / f"{uuid.uuid4().hex}{_SUFFIX}"
            # Created under a name that nobody looks at, and locked before it has its own.
            hidden = self.path.with_suffix(".new")
            self._fd = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            self._append({"boot": boot_id()})
            hidden.rename(self.path)
            sync_dir(self._directory)
        except OSError as error:
            raise ConfigError(
                f"--state_dir {directory} cannot be written: {error.strerror}.",
                hint="Name a directory on a disk of this host.",
            ) from error
        self._next = 0
        self._open: set[int] = set()

    def begin_effect(self, record: Mapping[str, JsonValue]) -> int:
        """Write what undoing needs; durable when this returns.  Returns the number of the entry.

        Raises:
            OSError: it is not on disk; the effect must not happen.
        """
        number, self._next = self._next, self._next + 1
        self._append({"begin": number, "record": dict(record)})
        self._open.add(number)
        return number

    def end_effect(self, number: int) -> None:
        """The effect is undone, or never happened."""
        self._append({"done": number})
        self._open.discard(number)

    def close(self) -> None:
        """Remove the file unless an effect is open, which is left to the next start; idempotent."""
        if self._fd < 0:
            return
        if not self._open:
            self.path.unlink(missing_ok=True)
        os.close(self._fd)
        self._fd = -1

    def recover(self, undo: Callable[[Record, bool], None]) -> Recovered:
        """Undo what simulators that are gone have left.

        Args:
            undo: called with a record, and whether it is of this boot of this host; raises
                `ResiliencyError` when it cannot, and the entry stays for the next start.
        """
        undone, kept = Recovered()
        for path in sorted(self._directory.glob(f"*{_SUFFIX}")):
            if path == self.path:
                continue
            with suppress(FileNotFoundError):
                fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    found = _recover_file(path, fd, undo)
                    undone, kept = undone + found.undone, kept + found.kept
                except BlockingIOError:
                    pass  # its simulator lives
                finally:
                    os.close(fd)
        return Recovered(undone, kept)

    def _append(self, entry: Record) -> None:
        _write(self._fd, entry)


def _write(fd: int, entry: Record) -> None:
    # A line that a full disk has torn must not swallow the next one: each begins a line of its own.
    left = b"\n" + json.dumps(entry).encode() + b"\n"
    while left:
        left = left[os.write(fd, left) :]
    os.fsync(fd)


def _recover_file(path: Path, fd: int, undo: Callable[[Record, bool], None]) -> Recovered:
    boot, entries = "", dict[int, Record]()
    for line in path.read_text(errors="replace").splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # empty, or torn: its effect did not begin
        boot = entry.get("boot", boot)
        if "begin" in entry:
            entries[entry["begin"]] = entry["record"]
        entries.pop(entry.get("done", -1), None)
    undone, kept = Recovered()
    # The last effect first: one may lie upon another.
    for number, record in sorted(entries.items(), reverse=True):
        try:
            undo(record, boot == boot_id())
            _write(fd, {"done": number})
        except (ResiliencyError, OSError) as error:
            logger.error("effect kept: %s; the next start tries again, see %s", error, path)
            kept += 1
        else:
            undone += 1
    if not kept:
        path.unlink(missing_ok=True)
    return Recovered(undone, kept)
