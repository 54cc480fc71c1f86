# SPDX-License-Identifier: Apache-2.0
"""What the cleaner may not touch: everything that somebody uses, or may be using.

A shared file system tells nobody who works on it, so each sign of life counts, and one is enough.
No sign is no proof of death either: that is why what carries no sign of its own must also have
been left unchanged for a while.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from resiliency.checkpoint.capture.job_memory import DEFAULT_ROOT, job_directory
from resiliency.checkpoint.format.catalog import Condition, list_checkpoints, steps_in
from resiliency.checkpoint.format.lease import CLOCK_SKEW, leased_steps
from resiliency.checkpoint.format.marker import MarkerState, marker_name, step_directory, try_read_marker
from resiliency.checkpoint.format.nemo import WEIGHTS
from resiliency.checkpoint.locks import FileLock
from resiliency.checkpoint.storage.posix import LocalStorage
from resiliency.files import matching
from resiliency.runtime import Clock

CHECKPOINTS = "checkpoint"
REPLICAS = "replicas"
_STEP = re.compile(r"step=\d+")
_SIGN = re.compile(r"in-use-(\d+)-.+")


@dataclass(frozen=True, kw_only=True)
class IdleLimits:
    """How long something must have been unchanged before the cleaner takes it for dead.

    Args:
        unfinished: a checkpoint with a marker.  A save waits for its slowest rank for 10 minutes by
            default, in which nothing may change.
        idle: everything of another job.
    """

    unfinished: timedelta
    idle: timedelta


def is_job(folder: Path) -> bool:
    """Whether `folder` is laid out as a job's: anything else below a prefix is none of ours."""
    own = folder / CHECKPOINTS
    if folder.is_symlink() or not own.is_dir():
        return False
    names = os.listdir(own)
    return not names or any(name == REPLICAS or _STEP.match(name) for name in names)


def roots_of(folder: Path) -> list[Path]:
    """All directories of a job's folder that hold ``step=N``: its own, and those of replicas."""
    own = folder / CHECKPOINTS
    with suppress(OSError):
        return [own, *sorted(path for path in (own / REPLICAS).iterdir() if path.is_dir())]
    return [own]


def say_in_use(folder: Path, clock: Clock, lasts: timedelta) -> None:
    """Leave a sign in the folder of the own job that cleaners of other jobs respect, on all hosts."""
    owner = f"{socket.gethostname()}-{os.getpid()}"
    (folder / f"in-use-{int((clock.now() + lasts).timestamp())}-{owner}").touch()
    signs = sorted((end, path) for path in folder.iterdir() if (end := _sign_end(path)) is not None)
    mine = [path for _, path in signs if path.name.endswith(owner)]
    for end, path in signs:
        if path in mine[:-1] or end < clock.now().timestamp():
            path.unlink(missing_ok=True)


def _sign_end(path: Path) -> float | None:
    """Until when a file says that the folder is in use; None for any other file."""
    match = _SIGN.fullmatch(path.name)
    return int(match[1]) + CLOCK_SKEW.total_seconds() if match else None


def why_in_use(folder: Path, job: str, timeouts: IdleLimits, clock: Clock) -> str:
    """Sign of life of a job, for people; empty when there is none."""
    if _lives_here(job):
        return "a process of this job runs on this host"
    now = clock.now().timestamp()
    if any(end >= now for path in folder.iterdir() if (end := _sign_end(path)) is not None):
        return "its own cleaner runs"
    for root in roots_of(folder):
        storage = LocalStorage(root)
        if leased := leased_steps(storage, clock):
            return f"step {min(leased)} is being read"
        for step in steps_in(storage):
            marker = try_read_marker(storage, step)
            if marker is None or marker.state is MarkerState.CORRUPT:
                continue
            changed = last_change(root / marker_name(step), root / step_directory(step))
            if now - changed < timeouts.unfinished.total_seconds():
                return f"step {step} is being written"
        unchanged_s = now - _newest(root, *root.iterdir())
        if unchanged_s < timeouts.idle.total_seconds():
            return f"it changed within the last {timeouts.idle.total_seconds():g} s"
    return ""


def last_change(*places: Path) -> float:
    """When files, or anything in directories, were last written to; seconds since 1970."""
    return _newest(*places, *(path for place in places for path in _below(place)))


def _below(directory: Path) -> Iterator[Path]:
    for parent, directories, files in os.walk(directory):
        for name in (*directories, *files):
            yield Path(parent, name)


def _newest(*paths: Path) -> float:
    newest = 0.0
    for path in paths:
        with suppress(FileNotFoundError):  # its owner is quicker
            newest = max(newest, path.lstat().st_mtime)
    return newest


def _lives_here(job: str) -> bool:
    """Whether a process holds the captures of `job`.

    A container with a /dev/shm of its own sees none: this proves life, and never death.
    """
    stem = job_directory(f"{job}-{'0' * 8}").name.partition(f"_{'0' * 8}_")[0]
    for directory in matching(DEFAULT_ROOT, f"{stem}_*"):
        try:
            lock = FileLock(directory / "job.lock")
        except FileNotFoundError:
            continue
        except PermissionError:  # of another user, who knows
            return True
        try:
            if not lock.try_lock(exclusive=True):
                return True
        finally:
            lock.close()
    return False


def whole_steps(root: Path) -> list[int]:
    """Steps whose checkpoint is complete as far as names, sizes and manifests tell, lowest first.

    What torch alone wrote is no checkpoint of a job of ours, and what is damaged is for people to look at.
    """
    return [
        found.step
        for found in list_checkpoints(LocalStorage(root))
        if found.condition is Condition.COMPLETE
        or (found.condition is Condition.STOCK and (root / step_directory(found.step) / WEIGHTS).is_dir())
    ]
