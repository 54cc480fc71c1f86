# SPDX-License-Identifier: Apache-2.0
"""Which complete generations of a local tier wait for the replicator, and how its rename and retention meet.

Each complete generation stays until it is handed over, or given up: then a note ``step=N.given-up`` says so.
No more than so many wait: the oldest is given up for the newest, as a tier that took nothing new would cost
every host of the job more with each step.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from resiliency.checkpoint.format.marker import parse_step, step_directory
from resiliency.checkpoint.locks import FileLock
from resiliency.checkpoint.storage.interface import Storage
from resiliency.checkpoint.storage.posix import write_failed
from resiliency.errors import CheckpointWriteFailed

logger = logging.getLogger(__name__)

#: End of the name of the note that a generation is not handed over any more.
GIVEN_UP = ".given-up"
#: Longest wait for the process that deletes or hands over generations just now.
_LOCK = timedelta(seconds=5)
_POLL_S = 0.02


class HandOffQueue:
    """The `RetentionHook` of a local tier whose complete generations go to the replicator.

    Args:
        backlog: complete generations beyond those that the tier keeps which may wait.
    """

    def __init__(self, storage: Storage, backlog: int) -> None:
        self._storage = storage
        self._backlog = backlog

    def has_taken(self, step: int) -> bool:
        return not self._storage.exists(step_directory(step))

    def wanted(self, complete: Collection[int], *, keep: int) -> list[int]:
        """What waits to be handed over, when the oldest beyond the backlog have been given up."""
        storage, most = self._storage, keep + self._backlog
        waiting = awaiting(storage, complete)
        for step in waiting[:-most]:
            logger.error(
                "step %d is given up: more than %d steps wait in %s to be handed over.  The log of this"
                " host's first rank says what keeps them.",
                *(step, most, storage.describe()),
            )
            try:
                give_up(storage, step)
            except CheckpointWriteFailed as error:  # the disk may be full: the more reason to free its place
                logger.warning("that step %d is given up could not be noted: %s", step, error)
        return waiting[-most:]

    def forget(self, *, below: int) -> None:
        """Remove notes on generations that are gone.  Newer ones stay: the hand-off may come to them."""
        storage = self._storage
        names = set(storage.list(""))
        for name in names:
            directory = name.removesuffix(GIVEN_UP)
            step = parse_step(directory) if directory != name else None
            if step is not None and step < below and directory not in names:
                storage.remove(name)


@contextmanager
def locked(directory: Path, timeout: timedelta = _LOCK) -> Iterator[None]:
    """Keep other processes of this host from deleting or handing over generations in `directory`.

    Raises:
        CheckpointWriteFailed: somebody else does, and does not come to an end.
    """
    try:
        lock = FileLock(directory, directory=True)
    except OSError as error:
        raise write_failed(error, "open", str(directory)) from error
    try:
        _wait_for(lock, timeout.total_seconds())
        yield
    finally:
        lock.close()


def _wait_for(lock: FileLock, wait_s: float) -> None:
    deadline = time.monotonic() + wait_s
    try:
        while not lock.try_lock(exclusive=True):
            if time.monotonic() >= deadline:
                raise CheckpointWriteFailed(
                    f"another process of this host has been at {lock.path} for {wait_s:g} s.",
                    path=str(lock.path),
                    errno=errno.EBUSY,
                )
            time.sleep(_POLL_S)  # the kernel tells nobody when a lock is free, but who waits without end
    except OSError as error:
        raise write_failed(error, "lock", str(lock.path)) from error


def awaiting(storage: Storage, complete: Collection[int]) -> list[int]:
    """Of the complete generations those that wait to be handed over, oldest first.

    By their names alone: what cannot be read just now waits as well.  As they go in order, what is older than
    one that has gone was overtaken, and does not wait: nobody would ever free its place.
    """
    names = set(storage.list(""))
    last = max((step for step in complete if step_directory(step) not in names), default=-1)
    return [step for step in sorted(complete) if step > last and step_directory(step) + GIVEN_UP not in names]


def give_up(storage: Storage, step: int) -> None:
    """Note that a generation is not handed over any more: it goes like others."""
    storage.create(step_directory(step) + GIVEN_UP).close()
