# SPDX-License-Identifier: Apache-2.0
"""Checks of an existing replica before it is overwritten or deleted."""

from __future__ import annotations

import logging

from resiliency.checkpoint.format.catalog import is_damaged
from resiliency.checkpoint.format.manifest import MANIFEST, parse_index, read_manifest
from resiliency.checkpoint.format.marker import MarkerState, step_directory, try_read_marker
from resiliency.checkpoint.format.reader import CheckpointReader
from resiliency.checkpoint.names import save_id_of
from resiliency.checkpoint.replication.copy_plan import CopyPlan
from resiliency.checkpoint.storage.interface import Storage, read_file
from resiliency.checkpoint.storage.posix import SHORTAGES
from resiliency.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointIncomplete,
    CheckpointWriteFailed,
    ConfigError,
    PeerError,
)

logger = logging.getLogger(__name__)


class ReplicaKept(PeerError):
    """The existing replica of this step is worth more than the offered one."""


def holds(storage: Storage, copy_plan: CopyPlan, *, attempt_id: str, is_spared: bool = False) -> bool:
    """Whether the copy that is offered stands there whole; else what is there may be replaced.

    Args:
        is_spared: the attempt went on from this step: no whole copy of it is replaced by what the attempt
            saves there anew.  A repair with the save that was restored replaces one of another.
    Raises:
        ReplicaKept: what stands there is another run's, this attempt's own, or spared.
        CheckpointWriteFailed: it cannot be told for now.
    """
    step = copy_plan.step
    try:
        existing = CheckpointReader(storage, step)
        is_same = read_file(storage, f"{step_directory(step)}/{MANIFEST}") == copy_plan.manifest_bytes
    except (CheckpointError, ConfigError) as error:
        _raise_shortage(error)
        return False
    is_whole = _is_whole(storage, existing)
    if is_same:
        return is_whole
    manifest, offered = existing.manifest, _run_of(copy_plan)
    if manifest.run_id != offered:
        raise ReplicaKept(
            f"{existing.path} is a copy of run {manifest.run_id!r}, offered was one of run {offered!r}.",
            hint="Give each job a local directory of its own, or delete what the other one left.",
            path=existing.path,
            step=step,
        )
    if is_whole and manifest.save_id == save_id_of(attempt_id, step) != copy_plan.save_id:
        raise ReplicaKept(
            f"{existing.path} is a copy of this attempt's save, offered was save {copy_plan.save_id!r}.",
            path=existing.path,
            step=step,
        )
    if is_whole and is_spared and copy_plan.save_id == save_id_of(attempt_id, step):
        raise ReplicaKept(
            f"{existing.path} is a copy of the save that was restored, offered was {copy_plan.save_id!r}.",
            path=existing.path,
            step=step,
        )
    return False


def can_delete(storage: Storage, step: int, *, run_id: str) -> bool:
    """Whether nobody but `run_id` has a claim on a replica.  What is unfinished is nobody's."""
    marker = try_read_marker(storage, step)
    if marker is not None and marker.state is not MarkerState.CORRUPT:
        return True
    try:
        return read_manifest(storage, step_directory(step)).run_id == run_id
    except (CheckpointIncomplete, CheckpointCorrupt, ConfigError) as error:
        logger.info(
            "replica of step %d kept: source host unknown (%s); delete it by hand if its job is gone",
            step,
            error,
        )
        return False


def _is_whole(storage: Storage, existing: CheckpointReader) -> bool:
    """By content, not by size.  A copy is offered again after a restart only, so this is seldom read."""
    try:
        existing.verify()
        return not is_damaged(storage, existing.manifest.step)
    except (CheckpointError, ConfigError) as error:
        _raise_shortage(error)
        return False


def _run_of(copy_plan: CopyPlan) -> str:
    """The run that an offered copy belongs to; all its ranks say the same."""
    indexes = (parse_index(content, "an index")[0] for content in copy_plan.index_bytes.values())
    return next((index.run_id for index in indexes), "")


def _raise_shortage(error: CheckpointError | ConfigError) -> None:
    """Raise an error that says nothing of the checkpoint, only of this process."""
    if error.fields.get("errno") in SHORTAGES:
        number = error.fields["errno"]
        raise CheckpointWriteFailed(f"the existing replica cannot be read: {error}", errno=number) from error
