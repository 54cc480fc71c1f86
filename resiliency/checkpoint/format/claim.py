# SPDX-License-Identifier: Apache-2.0
"""The right of one process to change a step: a folder of its own in the step's directory.

A process may be late: its mount hung, the job was started again, and the step was saved by others since.  No
lock keeps it away, for a lock ends where its host does.  So all that it can do when it wakes must be without
effect:

- What it writes lies in its folder.  A process that claims the step after it removes all other folders.
- Names that several saves of a step share (the marker, the manifest, `.metadata`) are changed by renames
  alone, from or into that folder: these fail once it is gone.
- Nothing of a directory is removed where it lies.  It is moved into the folder first, folders of others too.
- A folder is made before the look at the step, and the marker comes after it.  So of two that claim a step at
  once, one sees the other, and a process that has hidden a step looks again whether it was committed.  What
  is committed after that look is seen by its folder once that was moved, and is put back.

The manifest is moved away first, and the files after it: beside a manifest are its files.
"""

from __future__ import annotations

import errno
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from resiliency.checkpoint.format.manifest import MANIFEST, SAVE_PREFIX, parse_manifest
from resiliency.checkpoint.format.marker import (
    LIFTED,
    Marker,
    encode_marker,
    marker_name,
    parse_marker,
    read_marker,
    step_directory,
)
from resiliency.checkpoint.storage.interface import Storage, read_file, write_file
from resiliency.errors import CheckpointCorrupt, CheckpointMissing, CheckpointWriteFailed, ConfigError

#: Begins the name of the folder of a removal.
_REMOVAL_PREFIX = "removal="
#: The marker, in the folder of its save, before it is placed.
_PLACED = "marker"
_OLD = "old."
#: Begin names of ranks' files in older formats, which had no folders.
OLD_DATA = ("rank=", "__")
#: Begin names that are of one save alone.  Where a mount renames no directories (GCS FUSE), these are removed
#: in place.
_UNSHARED = (SAVE_PREFIX, _REMOVAL_PREFIX, *OLD_DATA)


class StepTaken(CheckpointWriteFailed):
    """Another process has claimed the step since this one did."""


@dataclass(frozen=True)
class StepLook:
    """What is at a step.

    Args:
        manifest: its bytes; None: there is none.
        is_shown: the save that it is of has lifted its marker.  False for older formats.
    """

    marker: Marker | None
    manifest: bytes | None = None
    is_shown: bool = False

    @property
    def commit(self) -> tuple[bytes | None, bool]:
        """Differs between two looks if something was committed between them."""
        return self.manifest, self.is_shown


def look_at(storage: Storage, step: int) -> StepLook:
    """Raises CheckpointCorrupt: the storage does not say what is there."""
    directory = step_directory(step)
    marker = read_marker(storage, step)
    try:
        content = read_file(storage, f"{directory}/{MANIFEST}")
    except CheckpointMissing:
        return StepLook(marker)
    try:
        folder = parse_manifest(content, "").folder
    except (CheckpointCorrupt, ConfigError):
        folder = ""
    return StepLook(marker, content, bool(folder) and storage.exists(f"{directory}/{folder}/{LIFTED}"))


def is_claim(name: str) -> bool:
    """Whether a name in a step's directory is a folder of a save or a removal: no checkpoint by itself."""
    return name.startswith((SAVE_PREFIX, _REMOVAL_PREFIX))


def holds_claims_alone(storage: Storage, step: int) -> bool:
    """Whether a step has a directory with nothing in it but what a late process left, or one that was killed.

    A folder whose save has lifted its marker is a checkpoint that lost its manifest.
    """
    directory = step_directory(step)
    names = storage.list(directory)
    return _are_claims(storage, directory, names) if names else storage.exists(directory)


def holds_more_than_claims(storage: Storage, step: int) -> bool:
    """Whether there is anything at a step but such things, by one listing: others may come and go."""
    directory = step_directory(step)
    return not _are_claims(storage, directory, storage.list(directory))


def _are_claims(storage: Storage, directory: str, names: Sequence[str]) -> bool:
    return all(map(is_claim, names)) and not any(
        storage.exists(f"{directory}/{name}/{LIFTED}") for name in names
    )


class StepClaim:
    """See the module.  A claim that has been overtaken raises StepTaken whatever it does."""

    def __init__(self, storage: Storage, step: int, folder: str) -> None:
        self.step = step
        self.folder = folder
        self._storage = storage
        self._directory = step_directory(step)

    @classmethod
    def for_removal(cls, storage: Storage, step: int) -> StepClaim:
        return cls(storage, step, f"{_REMOVAL_PREFIX}{uuid.uuid4().hex[:16]}")

    @property
    def place(self) -> str:
        """The folder, relative to the storage."""
        return f"{self._directory}/{self.folder}"

    def take(self) -> None:
        """Make the folder; what comes next is a look at the step."""
        self._storage.make_dir(self.place)

    def others(self) -> list[str]:
        """What else is in the directory."""
        return [name for name in self._storage.list(self._directory) if name != self.folder]

    def committed(self, folders: Iterable[str]) -> list[str]:
        """Those whose saves have lifted their markers."""
        saves = [name for name in folders if name.startswith(SAVE_PREFIX)]
        return [name for name in saves if self._storage.exists(f"{self._directory}/{name}/{LIFTED}")]

    def mark(self, marker: Marker) -> None:
        """Put a marker in place of any that is there; durable when this returns, name included."""
        write_file(self._storage, f"{self.place}/{_PLACED}", encode_marker(marker))
        self._move(f"{self.place}/{_PLACED}", marker_name(self.step))
        self._storage.sync_dir("")

    def try_lift(self, is_ours: Callable[[Marker], bool]) -> bool:
        """Show the step: take the marker away if it is ours; durable when this returns.

        False: it is not, or is gone.
        """
        return self._try_take(is_ours, LIFTED)

    def take_back(self, marker: Marker) -> None:
        """Take the marker away again, if it still stands, of a save or removal that has come to nothing."""
        self._try_take(lambda found: found == marker, _PLACED)

    def _try_take(self, is_ours: Callable[[Marker], bool], to: str) -> bool:
        name, taken = marker_name(self.step), f"{self.place}/{to}"
        if not self._is(name, is_ours):
            return False
        if not self._try_move(name, taken):
            return False
        if not self._is(taken, is_ours):  # replaced since
            self._move(taken, name)
            return False
        self._storage.sync_dir("")
        return True

    def clear(
        self, *, own: bool = False, only: Collection[str] | None = None, committed: Collection[str] = ()
    ) -> None:
        """Remove all else in the directory, the manifest first.

        Args:
            own: also what an earlier process has left in the folder.
            only: of folders of others these alone; one that has come since is of a save that overtook this.
            committed: folders that may go although their saves were committed.
        Raises:
            StepTaken: another save was committed since; it stands as before.
        """
        for name in self._storage.list(self.place) if own else ():
            self._storage.remove_tree(f"{self.place}/{name}")
        names = self.others()
        self._clear(
            [name for name in names if only is None or name in only or not name.startswith(_UNSHARED)],
            committed,
        )
        # A late leader may have shown its manifest since; its folder is gone, so there is no other to show.
        if late := [name for name in self.others() if not name.startswith(_UNSHARED)]:
            self._clear(late, committed)

    def _clear(self, names: Sequence[str], committed: Collection[str]) -> None:
        ordered = sorted(names, key=lambda name: (name.startswith(_UNSHARED), name != MANIFEST))
        taken: dict[str, str] = {}
        for name in ordered:
            taken[name] = self._take_in(name)
            is_save = name.startswith(SAVE_PREFIX) and name not in committed
            if is_save and self._storage.exists(f"{taken[name]}/{LIFTED}"):
                for moved, place in reversed(taken.items()):  # the manifest last
                    if place != f"{self._directory}/{moved}" and self._storage.exists(place):
                        self._move(place, f"{self._directory}/{moved}")
                raise self.overtaken()
        for place in taken.values():
            self._storage.remove_tree(place)

    def _take_in(self, name: str) -> str:
        """Move what is in the directory into the folder; returns where it is."""
        path, taken = f"{self._directory}/{name}", f"{self.place}/{_OLD}{name}"
        try:
            self._try_move(path, taken)
        except StepTaken:
            raise
        except CheckpointWriteFailed:
            if not name.startswith(_UNSHARED):
                raise
            return path  # a mount without renames of directories
        return taken

    def drop(self) -> None:
        """Remove the folder, and the directory if nothing else is in it."""
        self._storage.remove_tree(self.place)
        self._storage.remove_empty_dir(self._directory)

    def overtaken(self) -> StepTaken:
        return StepTaken(
            f"{self._storage.describe(self._directory)} belongs to another save by now.",
            hint="A process was late: what was saved since stays as it is.",
            step=self.step,
            path=self._storage.describe(self._directory),
        )

    def _is(self, name: str, is_ours: Callable[[Marker], bool]) -> bool:
        try:
            return is_ours(parse_marker(read_file(self._storage, name)))
        except CheckpointMissing:
            return False

    def _try_move(self, source: str, target: str) -> bool:
        """False: there is no `source`, as another removal was quicker."""
        try:
            self._move(source, target)
        except StepTaken:
            raise
        except CheckpointWriteFailed as error:
            if error.fields.get("errno") != errno.ENOENT:
                raise
            return False
        return True

    def _move(self, source: str, target: str) -> None:
        with self.changing():
            self._storage.replace(source, target)

    @contextmanager
    def changing(self) -> Iterator[None]:
        """For operations in the folder: that it is gone means that another has claimed the step."""
        try:
            yield
        except CheckpointWriteFailed as error:
            if error.fields.get("errno") != errno.ENOENT or self._storage.exists(self.place):
                raise
            raise self.overtaken() from error
