# SPDX-License-Identifier: Apache-2.0
"""The directory in shared memory that a job has on a host: who keeps it, and who may remove it.

Every process of a job holds a shared lock on its ``job.lock`` as long as it lives.  Whoever gets the
exclusive one knows that the job is dead, and may remove what `resiliency.checkpoint.capture.arena` keeps
there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import stat
import threading
import time
import zlib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

from resiliency.checkpoint.capture.limits import is_leaving
from resiliency.checkpoint.locks import FileLock
from resiliency.errors import ConfigError
from resiliency.files import matching

logger = logging.getLogger(__name__)

DEFAULT_ROOT = Path("/dev/shm")  # noqa: S108 (the point of the arena)
PREFIX = "resiliency-"
#: In the directory of each rank: held by the process that is the rank.
OWNER_LOCK = "owner.lock"
#: In the directory of each rank: how many slots it has or is about to allocate, and their size.
_ROOM = "room"
#: How the name of a rank's directory begins that is being removed.
_ASIDE = "removed-"
#: How often a wait looks at the locks of other processes.
LOOK_S = 0.02
_HOLD_TIMEOUT_S = 30.0
#: What a process that was killed may take to give its locks back.
DEATH_TIMEOUT_S = 10.0


def job_directory(job: str, root: Path = DEFAULT_ROOT) -> Path:
    """Where the slots of `job` are; any name becomes a file name."""
    safe = re.sub(r"[^A-Za-z0-9_.]", "_", job)
    if safe != job or len(safe) > 80:  # keep different jobs apart
        safe = f"{safe[:80]}_{zlib.crc32(job.encode()):08x}"
    return root / f"{PREFIX}{safe}-{os.getuid()}"


def hold_job(directory: Path) -> FileLock:
    """Say that the job lives: while the lock is open, nobody cleans `directory` up.

    Launcher, agent and trainers each hold one; the directory is made if need be.
    """
    deadline = time.monotonic() + _HOLD_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            directory.mkdir(mode=0o700, exist_ok=True)
            if directory.stat().st_uid != os.getuid():
                raise ConfigError(f"{directory} belongs to another user.", path=str(directory))
            lock = FileLock(directory / "job.lock", create=True)
        except FileNotFoundError:  # cleaned up since mkdir, or its parent is not there
            if not directory.parent.is_dir():
                raise
            continue
        except FileExistsError:  # cleaned up since mkdir found it, and made again perhaps; or no directory
            with contextlib.suppress(FileNotFoundError):
                if not stat.S_ISDIR(directory.stat().st_mode):
                    raise
            continue
        # A cleaner holds the exclusive lock for the moment in which it removes the directory.
        if lock.try_lock(exclusive=False) and lock.is_current():
            return lock
        lock.close()
        threading.Event().wait(LOOK_S)
    raise ConfigError(
        f"{directory} has been locked by a clean-up for {_HOLD_TIMEOUT_S:.0f} s.",
        hint=f"See who holds it: fuser {directory}/job.lock",
        path=str(directory),
    )


def owner_in(text: bytes) -> int | None:
    """What owner.lock says: the process that took it last, living or not; None while that is written."""
    return int(text) if text.isdigit() else None


def announce_room(where: Path, slots: int, slot_bytes: int) -> None:
    """Say what the slots of a rank are going to take, before they take it."""
    temporary = where / f"{_ROOM}.tmp"
    temporary.write_text(f"{slots} {slot_bytes}")
    temporary.replace(where / _ROOM)


def withdraw_room(where: Path) -> None:
    """The rank allocates nothing any more."""
    (where / _ROOM).unlink(missing_ok=True)


def awaited_room(where: Path) -> int:
    """Bytes that living ranks beside the one in `where` have announced and not allocated yet."""
    return sum(_awaited(other) for other in matching(where.parent, "rank-*") if other != where)


def _awaited(where: Path) -> int:
    try:
        owner = owner_in((where / OWNER_LOCK).read_bytes())
        slots, slot_bytes = map(int, (where / _ROOM).read_text().split())
    except (OSError, ValueError):  # it has not asked for anything, or is gone
        return 0
    if owner is None or is_leaving(owner):
        return 0
    present = [
        path.stat().st_size
        for path in map(where.joinpath, map("slot-{}".format, range(slots)))
        if path.exists()
    ]
    return slots * slot_bytes - sum(min(size, slot_bytes) for size in present)


def try_remove_rank(where: Path) -> bool:
    """Remove what a rank keeps in `where`, unless the rank lives.

    It is put aside before it is deleted, so a process that becomes this rank meanwhile finds all of it, or
    nothing and begins anew.
    """
    aside = where.with_name(f"{_ASIDE}{where.name}")
    remove_rank(aside)  # left by a kill
    try:
        lock = FileLock(where / OWNER_LOCK)
    except FileNotFoundError:
        return False
    try:
        if not (lock.try_lock(exclusive=True) and lock.is_current()):
            return False
        where.rename(aside)
    finally:
        lock.close()
    remove_rank(aside)
    return True


def remove_rank(where: Path) -> None:
    for path in where.iterdir() if where.is_dir() else ():
        path.unlink(missing_ok=True)
    with contextlib.suppress(FileNotFoundError):
        where.rmdir()


def remove_if_dead(directory: Path, *, only_empty: bool = False) -> bool:
    """Remove a job's directory unless a process of the job lives (holds `job.lock`)."""
    try:
        lock = FileLock(directory / "job.lock")
    except (FileNotFoundError, PermissionError):
        with contextlib.suppress(OSError):  # left by a kill right after mkdir, or someone is just starting
            directory.rmdir()
        return False
    try:
        if not lock.try_lock(exclusive=True) or not lock.is_current():
            return False
        ranks = matching(directory, "rank-*")
        if only_empty and ranks:
            return False
        for where in (*ranks, *matching(directory, f"{_ASIDE}*")):
            remove_rank(where)
        lock.path.unlink()
        with contextlib.suppress(OSError):  # a file that is not ours
            directory.rmdir()
        return True
    finally:
        lock.close()


def remove_when_dead(directory: Path) -> bool:
    """`remove_if_dead`, after trainers that were killed have given their locks back."""
    deadline = time.monotonic() + DEATH_TIMEOUT_S
    while not remove_if_dead(directory):
        if time.monotonic() >= deadline or not directory.exists() or not _owners_leave(directory):
            return False
        threading.Event().wait(LOOK_S)
    return True


def _owners_leave(directory: Path) -> bool:
    for where in matching(directory, "rank-*"):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            owner = owner_in((where / OWNER_LOCK).read_bytes())
            if owner is None or not is_leaving(owner):
                return False
    return True


def clean_up(
    root: Path = DEFAULT_ROOT, *, idle: timedelta = timedelta(minutes=10), keep: Path | None = None
) -> list[Path]:
    """Remove what dead jobs of this user left in `root`.

    A job without a launcher or agent of ours has no living process between the death of a rank and
    its restart: `idle` is how long it may take.

    Returns the directories that were removed.
    """
    removed = []
    for directory in sorted(matching(root, f"{PREFIX}*-{os.getuid()}")):
        if directory != keep and idle_s(directory) >= idle.total_seconds() and remove_if_dead(directory):
            removed.append(directory)
            logger.warning(
                "memory of a dead job freed: %s, untouched for %.0f s or more",
                directory,
                idle.total_seconds(),
            )
    return removed


def idle_s(directory: Path) -> float:
    """Seconds since anything in `directory` changed."""
    newest = 0.0
    for path in walk(directory):
        with contextlib.suppress(FileNotFoundError):
            newest = max(newest, path.stat().st_mtime)
    return time.time() - newest


def walk(directory: Path) -> Iterator[Path]:
    """A job's directory, and all that is in it."""
    yield directory
    yield from matching(directory, "*")
    for where in matching(directory, "rank-*"):
        yield from matching(where, "*")
