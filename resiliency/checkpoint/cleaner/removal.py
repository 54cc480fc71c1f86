# SPDX-License-Identifier: Apache-2.0
"""How the cleaner removes: so that whoever saves or reads at that moment loses nothing.

Complete checkpoints go by the engine's own protocol, marker first and leases asked twice.  For the
rest there is no protocol to rely on: the job may open a save of the very step whose leftovers are
about to go.  So a directory is first renamed, which is atomic, and then looked at: if it is not
what was found dead, it is put back; only what lies under its new name is deleted.  A cleaner that is
killed leaves such a directory, and the next one sweeps it.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from resiliency.checkpoint.cleaner.in_use import IdleLimits, last_change, why_in_use
from resiliency.checkpoint.format.catalog import needless_steps, steps_in
from resiliency.checkpoint.format.lease import leased_steps
from resiliency.checkpoint.format.manifest import MANIFEST
from resiliency.checkpoint.format.marker import MarkerState, marker_name, step_directory, try_read_marker
from resiliency.checkpoint.storage.posix import LocalStorage
from resiliency.runtime import Clock

TRASH = ".cleaner-trash-"
#: A cleaner that lives decides within that time whether to put back what it renamed.
_TRASH_IS_DEAD_S = 60.0
#: More than ever delete one thing at once; what is left then is swept later.
_TRIES = 10


@dataclass(frozen=True)
class Identity:
    """Tells one marker from the next at the same place."""

    content: bytes
    written_ns: int


def old_steps(whole: Sequence[int], left: Mapping[int, float], keep: int, read: Collection[int]) -> list[int]:
    """Which complete checkpoints may go, lowest first.

    Of those that the engine would delete some stay: for each step with a lease `keep` at or below it, as a
    reader that finds its checkpoint damaged takes the one before.

    Args:
        whole: complete steps, lowest first.
        left: those of branches that the job has left (`left_among`).
        read: steps with a lease.
    """
    stay: set[int] = set()
    for step in read:
        stay.update([other for other in whole if other <= step][-keep:])
    return [step for step in needless_steps(whole, left, keep) if step not in stay]


@dataclass(frozen=True)
class Leftover:
    """A checkpoint that stood there with a marker when the cleaner started."""

    root: Path
    step: int
    marker: Identity

    @property
    def path(self) -> Path:
        return self.root / step_directory(self.step)


class RemovalOutcome(Enum):
    REMOVED = "removed"
    WAITS = "waits"  # it may be being written, or is being read
    TAKEN = "taken"  # a save of this step has begun, or it is gone


def leftovers(root: Path, *, quarantined: bool = False) -> list[Leftover]:
    """Checkpoints of `root` with a marker, lowest step first.

    Args:
        quarantined: those that were found bad as well, which people may want to look at.
    """
    storage = LocalStorage(root)
    found = []
    for step in steps_in(storage):
        identity = _identity(root / marker_name(step))
        marker = try_read_marker(storage, step)
        if identity is None or marker is None:
            continue
        if quarantined or marker.state is not MarkerState.CORRUPT:
            found.append(Leftover(root, step, identity))
    return found


def can_remove(leftover: Leftover, timeouts: IdleLimits, clock: Clock) -> bool:
    """Whether nobody reads it, and nobody has written to it for long."""
    if leftover.step in leased_steps(LocalStorage(leftover.root), clock):
        return False
    marker = leftover.root / marker_name(leftover.step)
    return _is_dead(timeouts, clock, marker, leftover.path)


def _is_dead(timeouts: IdleLimits, clock: Clock, *places: Path) -> bool:
    return clock.now().timestamp() - last_change(*places) >= timeouts.unfinished.total_seconds()


def remove_leftover(leftover: Leftover, timeouts: IdleLimits, clock: Clock) -> RemovalOutcome:
    """Remove an unfinished checkpoint and its marker, unless somebody works on it.

    A save makes its folder in the directory, changes the marker, and then its ranks write.  So what was
    renamed is looked at: it must be the same directory, by its inode, which the open descriptor keeps from
    being given to another, and nothing in it may be young.
    """
    marker = leftover.root / marker_name(leftover.step)
    with _held(leftover.path) as old:
        if _identity(marker) != leftover.marker:
            return RemovalOutcome.TAKEN
        if not can_remove(leftover, timeouts, clock):
            return RemovalOutcome.WAITS
        if _identity(marker) != leftover.marker:  # asked again, as that took a while
            return RemovalOutcome.TAKEN
        if old is not None and not _remove_held(leftover.path, old, timeouts, clock):
            return RemovalOutcome.TAKEN
    return RemovalOutcome.REMOVED if _remove_marker(leftover) else RemovalOutcome.TAKEN


def _remove_held(directory: Path, held: int, timeouts: IdleLimits, clock: Clock) -> bool:
    """Remove `directory` if it is the one held open, and still dead.

    What its save wrote before the rename shows in it now; what it writes after, by the old name, fails.
    """
    trash = _trash_in(directory.parent)
    try:
        os.rename(directory, trash)
    except FileNotFoundError:
        return False
    if not os.path.samestat(os.fstat(held), os.stat(trash)) or not _is_dead(timeouts, clock, trash):
        _put_back(trash, directory)
        return False
    _remove_tree(trash)
    return True


def _remove_marker(leftover: Leftover) -> bool:
    marker = leftover.root / marker_name(leftover.step)
    trash = _trash_in(leftover.root)
    try:
        os.rename(marker, trash)
    except FileNotFoundError:
        return False
    ours = _identity(trash) == leftover.marker
    if not ours:
        with suppress(FileExistsError):  # the save has written it anew already
            os.link(trash, marker)
        # The old directory is gone, so this is the save's own.  It may have come to its end, and found no
        # marker to lift, while that was away.
        if (leftover.path / MANIFEST).exists():
            marker.unlink(missing_ok=True)
    trash.unlink()
    LocalStorage(leftover.root).sync_dir("")
    return ours


def remove_job(folder: Path, timeouts: IdleLimits, clock: Clock) -> str:
    """Remove another job's folder; returns why it was left, empty if it is gone."""
    job = folder.name
    if why := why_in_use(folder, job, timeouts, clock):
        return why
    trash = _trash_in(folder.parent)
    os.rename(folder, trash)
    if why := why_in_use(trash, job, timeouts, clock):  # it came to life between look and rename
        _put_back(trash, folder)
        return why
    _remove_tree(trash)
    return ""


def sweep(directory: Path, clock: Clock) -> None:
    """Delete what a cleaner that was killed had renamed."""
    with suppress(FileNotFoundError):
        for path in directory.iterdir():
            if not path.name.startswith(TRASH):
                continue
            with suppress(FileNotFoundError):  # another host's cleaner is quicker
                # Renaming sets this time, and nothing else on the way does.
                if clock.now().timestamp() - path.lstat().st_ctime >= _TRASH_IS_DEAD_S:
                    _remove_tree(path)


def _identity(marker: Path) -> Identity | None:
    """Of the marker at a path; None when there is none."""
    try:
        with open(marker, "rb") as file:
            return Identity(file.read(), os.fstat(file.fileno()).st_mtime_ns)
    except FileNotFoundError:
        return None


@contextmanager
def _held(directory: Path) -> Iterator[int | None]:
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        yield None
        return
    try:
        yield fd
    finally:
        os.close(fd)


def _put_back(trash: Path, directory: Path) -> None:
    """Undo a rename, also if another host has made the directory again meanwhile."""
    try:
        os.rename(trash, directory)
    except OSError:
        for path in trash.iterdir():
            os.rename(path, directory / path.name)
        trash.rmdir()


def _trash_in(directory: Path) -> Path:
    return directory / f"{TRASH}{uuid.uuid4().hex}"


def _remove_tree(path: Path) -> None:
    # A save that clears what was left, or a cleaner of another host, may delete the same files: look again.
    for _ in range(_TRIES):
        with suppress(FileNotFoundError):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        if not os.path.lexists(path):
            return
