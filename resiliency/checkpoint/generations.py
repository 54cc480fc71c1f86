# SPDX-License-Identifier: Apache-2.0
"""The generations in one host's local tier: which may go, and which must make way.

A generation here is one host's part of a save.  It is worth something only together with those of the
other hosts, so nothing goes because something newer is here: it goes when something newer is known to
be complete everywhere.

Where complete generations are handed over to somebody who renames them away
(`resiliency.checkpoint.high_scale`), each of them stays until that is done, or given up: then a note
``step=N.given-up`` says so.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

from resiliency.checkpoint.catalog import Condition, inspect, is_damaged, remove_checkpoint, steps_in
from resiliency.checkpoint.manifest import Manifest, read_manifest
from resiliency.checkpoint.marker import step_directory, try_read_marker
from resiliency.checkpoint.storage import Storage
from resiliency.errors import CheckpointCorrupt, CheckpointIncomplete, CheckpointWriteFailed, ConfigError

logger = logging.getLogger(__name__)

#: End of the name of the note that a generation is not handed over any more.
GIVEN_UP = ".given-up"


def retire(
    storage: Storage, *, run_id: str, complete: Mapping[int, str], keep: int, handed_over: bool = False
) -> list[int]:
    """Delete generations of a run below its newest complete one; returns the steps that went.

    That one stays, and `keep` - 1 older ones: of those known to be complete the newest, then others,
    which may have been complete in an earlier session.

    Args:
        complete: step to save id of generations that are complete on all hosts.
        handed_over: complete ones go by being handed over; those that wait for it stay beyond `keep`.
    """
    newest = max(complete)
    is_elsewhere = handed_over and not storage.exists(step_directory(newest))
    if committed_save(storage, newest) != complete[newest] and not is_elsewhere:
        return []  # replaced or gone meanwhile: it vouches for nothing any more
    waiting = awaiting(storage, complete) if handed_over else ()
    older = []
    for step in steps_in(storage):
        found = inspect(storage, step) if step < newest else None
        if found is not None and found.condition is Condition.COMPLETE:
            assert found.manifest is not None
            if found.manifest.run_id == run_id:
                older.append((complete.get(step) == found.manifest.save_id, step))
    needless = [step for _, step in sorted(older, reverse=True)[keep - 1 :] if step not in waiting]
    gone = [step for step in sorted(needless) if remove_checkpoint(storage, step)]
    for step in gone if handed_over else ():
        storage.remove(step_directory(step) + GIVEN_UP)
    return gone


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


def check_backlog(storage: Storage, complete: Collection[int], *, most: int) -> None:
    """See to it that no more than `most` generations wait to be handed over, whatever is wrong there.

    To delete one would be worse: other hosts hand it over, and their replicators wait for this one's.

    Raises:
        CheckpointWriteFailed: there is no place for another one.
    """
    waiting = awaiting(storage, complete)
    if len(waiting) >= most:
        raise CheckpointWriteFailed(
            f"steps {waiting} wait in {storage.describe()} to be handed over, and no more than {most} may.",
            hint="The log of this host's first rank says what keeps them; later saves succeed when they are"
            " gone.",
            path=storage.describe(),
        )


def make_way(storage: Storage, *, step: int, run_id: str, save_id: str) -> None:
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
