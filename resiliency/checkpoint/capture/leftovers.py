# SPDX-License-Identifier: Apache-2.0
"""Frees the shared memory of dead jobs, of any user: for the epilog of a scheduler.

A job is alive as long as a process of it holds the lock ``job.lock`` in its directory; the kernel gives that
back with the process.  What belongs to another user is touched with that user's rights alone: in a directory
where everybody may write, a link could lead anywhere.
"""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from pathlib import Path

from resiliency.checkpoint.capture.job_memory import DEFAULT_ROOT, PREFIX, idle_s, remove_if_dead, walk
from resiliency.checkpoint.locks import FileLock
from resiliency.files import matching

_NAME = re.compile(rf"{re.escape(PREFIX)}.+-(\d+)")


class LeftoverOutcome(str, Enum):
    """What became of the memory of a job, or would."""

    FREED = "freed"
    WOULD_BE_FREED = "would be freed"
    ALIVE = "a process of the job lives"
    RECENT = "changed too recently"
    REFUSED = "not permitted"


@dataclass(frozen=True, kw_only=True)
class DeadJobMemory:
    """What one job has in shared memory."""

    directory: Path
    user: str
    size_bytes: int
    idle_s: float
    outcome: LeftoverOutcome


def free_leftovers(
    root: Path = DEFAULT_ROOT, *, older_than: timedelta, all_users: bool = False, dry_run: bool = False
) -> list[DeadJobMemory]:
    """Remove what dead jobs left in `root`.

    Args:
        older_than: leave what changed since then: a job that nobody launched may be about to come back.
        all_users: not of this user alone; to free it, this process must be root.
        dry_run: only say what would be done.
    """
    found = []
    for directory in sorted(matching(root, f"{PREFIX}*")):
        uid = _owner(directory)
        if uid is None or not (all_users or uid == os.geteuid()):
            continue
        try:
            with _as_user(uid):
                found.append(_free(directory, uid, older_than.total_seconds(), dry_run=dry_run))
        except PermissionError:
            outcome = LeftoverOutcome.REFUSED
            found.append(
                DeadJobMemory(directory=directory, user=_user(uid), size_bytes=0, idle_s=0.0, outcome=outcome)
            )
    return found


def _free(directory: Path, uid: int, older_than_s: float, *, dry_run: bool) -> DeadJobMemory:
    size, idle = _size(directory), idle_s(directory)
    if idle < older_than_s:
        outcome = LeftoverOutcome.RECENT
    elif not _is_dead(directory):
        outcome = LeftoverOutcome.ALIVE
    elif dry_run:
        outcome = LeftoverOutcome.WOULD_BE_FREED
    else:
        outcome = (
            LeftoverOutcome.FREED
            if remove_if_dead(directory) or not directory.exists()
            else LeftoverOutcome.ALIVE
        )
    return DeadJobMemory(directory=directory, user=_user(uid), size_bytes=size, idle_s=idle, outcome=outcome)


def _is_dead(directory: Path) -> bool:
    try:
        lock = FileLock(directory / "job.lock")
    except FileNotFoundError:
        return True
    try:
        return lock.try_lock(exclusive=True)
    finally:
        lock.close()


def _owner(directory: Path) -> int | None:
    """The user whose job has `directory`; None if it is not what the engine makes."""
    match = _NAME.fullmatch(directory.name)
    try:
        status = directory.lstat()
    except FileNotFoundError:
        return None
    is_ours = match is not None and int(match[1]) == status.st_uid and directory.is_dir()
    return status.st_uid if is_ours and not directory.is_symlink() else None


@contextmanager
def _as_user(uid: int) -> Iterator[None]:
    before = os.geteuid()
    if uid == before:
        yield
        return
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(before)


def _size(directory: Path) -> int:
    total = 0
    for path in walk(directory):
        with suppress(FileNotFoundError):
            total += path.lstat().st_blocks * 512
    return total


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
