# SPDX-License-Identifier: Apache-2.0
"""Retention of local checkpoints: which to delete, which to replace.

A local checkpoint is one host's part of a save and has no value without the parts of the other hosts.  So a
newer one on this host is no reason to delete it.  It is deleted when a newer save is complete on all hosts,
or when the hosts agree that its own save never will be (`resiliency.checkpoint.replication.completion`).

Another program on the host may rename complete local checkpoints to take them.  Retention asks a
`RetentionHook` about that program; `resiliency.checkpoint.gke.hand_off` has the only one.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Protocol

from resiliency.checkpoint.branches import Branches, read_branches
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
    step_directory,
    try_read_marker,
)
from resiliency.checkpoint.names import attempt_id_of, save_id_of
from resiliency.checkpoint.storage.interface import Storage
from resiliency.errors import CheckpointCorrupt, CheckpointIncomplete, CheckpointWriteFailed, ConfigError

logger = logging.getLogger(__name__)

#: Hides a local checkpoint while another program takes it; a checkpoint that is still behind it is intact.
BEING_TAKEN = Marker(state=MarkerState.REMOVING, reason="handed over")


class RetentionHook(Protocol):
    """A program that takes complete local checkpoints away, as retention sees it."""

    def has_taken(self, step: int) -> bool:
        """Whether a complete local checkpoint may be gone because the program has it."""
        ...

    def wanted(self, complete: Collection[int], *, keep: int) -> Collection[int]:
        """The complete local checkpoints that the program has yet to take: they may not be deleted.

        Args:
            keep: complete local checkpoints that the tier keeps for itself.
        """
        ...

    def forget(self, *, below: int) -> None:
        """Retention asks no more about steps below that one."""
        ...


def retire(
    storage: Storage,
    *,
    run_id: str,
    complete: Mapping[int, str],
    keep: int,
    hook: RetentionHook | None = None,
    alone: bool = False,
    restored_step: int = 0,
) -> list[int]:
    """Delete local checkpoints of a run below its newest complete one; returns the deleted steps.

    That one stays, and `keep` - 1 older ones: of those known to be complete the newest, then others,
    which may have been complete in an earlier attempt.  Of a branch that the job has left none stays once the
    live one has a complete local checkpoint of its own.

    Args:
        complete: step to save id of saves that are complete on all hosts.
        hook: of the program that takes complete ones away; None: there is none.
        alone: this host is the whole job, so what the attempt of the newest one committed is complete.
        restored_step: where this start of the job went on; it was complete, and newer ones of an earlier
            start may not have been.  0: nowhere.
    """
    newest = max(complete)
    is_taken = hook is not None and hook.has_taken(newest)
    if committed_save(storage, newest) != complete[newest] and not is_taken:
        return []  # replaced or gone meanwhile: it vouches for nothing any more
    if alone:
        complete = _saved_by(storage, attempt_id_of(complete[newest], newest), before=newest) | dict(complete)
    wanted = () if hook is None else hook.wanted(complete, keep=keep)
    recorded = read_branches(storage)
    found = {step: try_read_committed(storage, step) for step in list_steps(storage)[1]}
    saves = {step: m.save_id for step, m in found.items() if m is not None and m.run_id == run_id}
    left = recorded.left_steps(saves)
    if newest in left:
        return []  # the job went back while it became complete
    older = [
        (step == restored_step or complete.get(step) == save, step)
        for step, save in saves.items()
        if step < newest and step not in left
    ]
    needless = [step for _, step in sorted(older, reverse=True)[keep - 1 :] if step not in wanted]
    needless += [step for step, common in left.items() if common < newest]
    begun = {step: marker for step, marker in half_removed(storage).items() if step < newest}
    gone = remove_checkpoints(storage, begun | {step: saves[step] for step in needless}, recorded=recorded)
    if hook is not None:
        hook.forget(below=min(complete))
    return gone


def remove_given_up(storage: Storage, saves: Mapping[int, str]) -> list[int]:
    """Delete local checkpoints that never become complete, as all hosts agreed; returns the deleted steps.

    Args:
        saves: step to save id; a step with another save id stays.
    """
    begun = half_removed(storage)
    return remove_checkpoints(storage, {step: begun.get(step, save) for step, save in saves.items()})


def show_untaken(storage: Storage) -> None:
    """Show what was hidden to be taken away, and was not: it may be the last good one, and those of other
    hosts may have been taken."""
    for step in marked_steps(storage):
        if try_read_marker(storage, step) == BEING_TAKEN:
            lift_marker(storage, step)
            logger.info("%s was not taken away, and is shown again", storage.describe(step_directory(step)))


def clean_tier(storage: Storage, *, run_id: str) -> list[int]:
    """Delete what unfinished saves and removals of a run left in a local tier; returns the steps that went.

    As `clean_unfinished`, and what no marker names the run of, as in older versions.  On a full disk the
    marker of what was hidden to be taken is empty.  So may be that of a save at a power cut, and the two look
    alike: a generation with a manifest, the last of its files, then stays.
    """
    show_untaken(storage)
    gone = clean_unfinished(storage, run_id=run_id)
    for step in marked_steps(storage):
        marker = try_read_marker(storage, step)
        if marker is None or marker.run_id or marker.state is MarkerState.CORRUPT:
            continue
        is_unclear = marker.state is MarkerState.UNKNOWN
        if is_unclear and storage.exists(f"{step_directory(step)}/{MANIFEST}"):
            continue
        if remove_checkpoint(storage, step, expected=marker):
            gone.append(step)
    return sorted(gone)


def _saved_by(storage: Storage, attempt_id: str, *, before: int) -> dict[int, str]:
    """Step to save id of what an attempt has committed."""
    found = {step: committed_save(storage, step) for step in steps_in(storage) if step < before}
    return {
        step: save
        for step, save in found.items()
        if save is not None and save == save_id_of(attempt_id, step)
    }


def remove_left(storage: Storage, step: int, branches: Branches) -> None:
    """Delete the checkpoint of `step` if it is of a branch that the job has left.

    Raises:
        CheckpointWriteFailed: another program reads it.
    """
    manifest = committed(storage, step) if branches.known else None
    if manifest is None or branches.is_live(step, manifest.save_id):
        return
    path = storage.describe(step_directory(step))
    # Unless it went, another program is at that, or reads it.
    is_gone = remove_checkpoint(storage, step, expected=manifest.save_id)
    if not is_gone and committed_save(storage, step) == manifest.save_id:
        raise CheckpointWriteFailed(
            f"{path} is of a branch that the job has left, and is being read.", step=step, path=path
        )
    logger.info("%s deleted: it was of a branch that the job has left", path)


def delete_superseded(storage: Storage, *, step: int, run_id: str, save_id: str) -> None:
    """Delete this run's generation at `step` if an earlier attempt made it.

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
            f"{path} was saved before this start of the job, and there is none before it here: it is kept.",
            step=step,
            path=path,
        )
    logger.info("%s was saved before this start of the job: deleted", path)
    if not remove_checkpoint(storage, step, expected=manifest.save_id):
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
