# SPDX-License-Identifier: Apache-2.0
"""The generations in one host's local tier: which may go, and which must make way.

A generation here is one host's part of a save.  It is worth something only together with those of the
other hosts, so nothing goes because something newer is here: it goes when something newer is known to
be complete everywhere, or when the hosts have agreed that it never will be
(`resiliency.checkpoint.replication.completion`).

Where complete generations are handed over to somebody who renames them away
(`resiliency.checkpoint.gke.replicator`), each of them stays until that is done, or given up: then a note
``step=N.given-up`` says so.  No more than so many wait: the oldest is given up for the newest, as a tier
that took nothing new would cost every host of the job more with each step.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from resiliency.checkpoint.format.catalog import (
    clean_unfinished,
    half_removed,
    is_damaged,
    list_steps,
    marked_steps,
    remove_checkpoint,
    remove_checkpoints,
    steps_in,
    try_read_committed,
)
from resiliency.checkpoint.format.manifest import MANIFEST, Manifest, read_manifest
from resiliency.checkpoint.format.marker import (
    Marker,
    MarkerState,
    lift_marker,
    parse_step,
    step_directory,
    try_read_marker,
)
from resiliency.checkpoint.locks import FileLock
from resiliency.checkpoint.names import save_id_of, session_of
from resiliency.checkpoint.storage.interface import Storage
from resiliency.checkpoint.storage.posix import write_failed
from resiliency.errors import CheckpointCorrupt, CheckpointIncomplete, CheckpointWriteFailed, ConfigError

logger = logging.getLogger(__name__)

#: End of the name of the note that a generation is not handed over any more.
GIVEN_UP = ".given-up"
#: Hides a generation while it is handed over.  What still stands behind it is whole.
HANDED_OVER = Marker(state=MarkerState.REMOVING, reason="handed over")
#: Longest wait for who deletes or hands over generations just now.
_LOCK = timedelta(seconds=5)
_POLL_S = 0.02


def retire(
    storage: Storage,
    *,
    run_id: str,
    complete: Mapping[int, str],
    keep: int,
    backlog: int = 0,
    alone: bool = False,
    restored_step: int = 0,
) -> list[int]:
    """Delete generations of a run below its newest complete one; returns the steps that went.

    That one stays, and `keep` - 1 older ones: of those known to be complete the newest, then others,
    which may have been complete in an earlier session.

    Args:
        complete: step to save id of generations that are complete on all hosts.
        backlog: complete ones go by being handed over; so many that wait for it stay beyond `keep`.  0:
            nobody takes any.
        alone: this host is the whole job, so what the session of the newest one committed is complete.
        restored_step: where this start of the job went on; it was complete, and newer ones of an earlier
            start may not have been.  0: nowhere.
    """
    newest = max(complete)
    is_elsewhere = backlog > 0 and not storage.exists(step_directory(newest))
    if committed_save(storage, newest) != complete[newest] and not is_elsewhere:
        return []  # replaced or gone meanwhile: it vouches for nothing any more
    if alone:
        complete = _saved_by(storage, session_of(complete[newest], newest), before=newest) | dict(complete)
    waiting = _still_waiting(storage, complete, most=keep + backlog) if backlog else ()
    older = []
    for step in list_steps(storage)[1]:
        manifest = try_read_committed(storage, step) if step < newest else None
        if manifest is not None and manifest.run_id == run_id:
            older.append((step == restored_step or complete.get(step) == manifest.save_id, step))
    needless = {step for _, step in sorted(older, reverse=True)[keep - 1 :] if step not in waiting}
    needless.update(step for step in half_removed(storage) if step < newest)
    gone = remove_checkpoints(storage, needless)
    if backlog:
        _forget_notes(storage, below=min(complete))
    return gone


def remove_given_up(storage: Storage, saves: Mapping[int, str]) -> list[int]:
    """Delete generations that never become complete, as all hosts have agreed; returns the steps that went.

    Args:
        saves: step to save id; what stands at a step by another name stays.
    """
    begun = half_removed(storage)
    return remove_checkpoints(
        storage, [step for step in saves if step in begun or committed_save(storage, step) == saves[step]]
    )


@contextmanager
def locked(directory: Path, timeouts: timedelta = _LOCK) -> Iterator[None]:
    """Keep other processes of this host from deleting or handing over generations in `directory`.

    Raises:
        CheckpointWriteFailed: somebody else does, and does not come to an end.
    """
    try:
        lock = FileLock(directory, directory=True)
    except OSError as error:
        raise write_failed(error, "open", str(directory)) from error
    try:
        _wait_for(lock, timeouts.total_seconds())
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


def clean_tier(storage: Storage) -> list[int]:
    """Delete what unfinished saves and removals left in a local tier; returns the steps that went.

    What was hidden to be handed over, and was not, is shown instead: it may be the last good one, and other
    hosts may have handed over theirs.  On a full disk its marker is empty.  So may be that of a save at a
    power cut, which nobody can tell from it: a generation with a manifest, the last of its files, then stays.

    Where generations are handed over call it `locked`: another process may be about to rename one.
    """
    unclear = set()
    for step in marked_steps(storage):
        marker = try_read_marker(storage, step)
        if marker == HANDED_OVER:
            lift_marker(storage, step)
            logger.info("%s was not handed over, and is shown again", storage.describe(step_directory(step)))
        elif marker is not None and marker.state is MarkerState.UNKNOWN:
            unclear.add(step)
    keep = {step for step in unclear if storage.exists(f"{step_directory(step)}/{MANIFEST}")}
    return clean_unfinished(storage, keep=keep)


def _still_waiting(storage: Storage, complete: Collection[int], *, most: int) -> list[int]:
    """What waits to be handed over, when the oldest beyond `most` have been given up."""
    waiting = awaiting(storage, complete)
    for step in waiting[:-most]:
        logger.error(
            "step %d is given up: more than %d steps wait in %s to be handed over.  The log of this host's"
            " first rank says what keeps them.",
            *(step, most, storage.describe()),
        )
        try:
            give_up(storage, step)
        except CheckpointWriteFailed as error:  # the disk may be full: the more reason to free its place
            logger.warning("that step %d is given up could not be noted: %s", step, error)
    return waiting[-most:]


def _saved_by(storage: Storage, session: str, *, before: int) -> dict[int, str]:
    """Step to save id of what a session has committed."""
    found = {step: committed_save(storage, step) for step in steps_in(storage) if step < before}
    return {
        step: save for step, save in found.items() if save is not None and save == save_id_of(session, step)
    }


def _forget_notes(storage: Storage, *, below: int) -> None:
    """Remove notes on generations that are gone.  Newer ones stay: who hands over may come to them."""
    names = set(storage.list(""))
    for name in names:
        directory = name.removesuffix(GIVEN_UP)
        step = parse_step(directory) if directory != name else None
        if step is not None and step < below and directory not in names:
            storage.remove(name)


def delete_superseded(storage: Storage, *, step: int, run_id: str, save_id: str) -> None:
    """Delete this run's generation at `step` if an earlier session made it.

    Other hosts may not have theirs, and a mixture of the two is no checkpoint; what comes now is of one
    piece.  The last good generation of a host makes no way: until the new one is there, there would be none.

    Raises:
        CheckpointWriteFailed: it is the last one, or somebody reads it.
    """
    manifest = committed(storage, step)
    if manifest is None or manifest.run_id != run_id or manifest.save_id == save_id:
        return
    path = storage.describe(step_directory(step))
    # A newer one may be a part that no other host has: only what is older may have been complete.
    older = (committed(storage, other) for other in steps_in(storage) if other < step)
    spare = any(other is not None and other.run_id == run_id for other in older)
    if not spare and not is_damaged(storage, step):
        raise CheckpointWriteFailed(
            f"{path} was saved before this start of the job, and there is none before it here: it stays.",
            step=step,
            path=path,
        )
    logger.info("%s was saved before this start of the job, and makes way", path)
    if not remove_checkpoint(storage, step):
        raise CheckpointWriteFailed(
            f"{path} was saved before this start of the job, and is being read.", step=step, path=path
        )


def committed_save(storage: Storage, step: int) -> str | None:
    """The save id of what is committed at `step`; None if nothing is."""
    manifest = committed(storage, step)
    return None if manifest is None else manifest.save_id


def committed(storage: Storage, step: int) -> Manifest | None:
    """The manifest of what is committed at `step`; None if nothing is, or it cannot be read."""
    if try_read_marker(storage, step) is not None:
        return None
    try:
        return read_manifest(storage, step_directory(step))
    except (CheckpointIncomplete, CheckpointCorrupt, ConfigError):
        return None
