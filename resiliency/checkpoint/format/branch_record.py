# SPDX-License-Identifier: Apache-2.0
"""The record of a job's branches in the directory of its checkpoints (`resiliency.checkpoint.branches`).

A rollback writes it before the first save of the new branch is committed.  Without a rollback there is none.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping

from resiliency.checkpoint.branches import Branches
from resiliency.checkpoint.format.manifest import parse_sealed, sealed_file
from resiliency.checkpoint.storage.interface import Storage, read_file, write_file
from resiliency.errors import CheckpointCorrupt, CheckpointMissing

RECORD = "branches.json"


def read_branches(storage: Storage, save_ids: Iterable[str] = ()) -> Branches:
    """The branches of the saves in a tier.

    Args:
        save_ids: of saves that were found there, see `Branches.with_seen`.
    Raises:
        CheckpointCorrupt: the record is not what was written, or cannot be read.
    """
    try:
        content = read_file(storage, RECORD)
    except CheckpointMissing:
        return Branches().with_seen(save_ids)
    path = storage.describe(RECORD)
    try:
        return Branches.of_rows(parse_sealed(content, path)["branches"]).with_seen(save_ids)
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointCorrupt(f"{path} is no record of branches: {error}.", path=path) from error


def record_branches(storage: Storage, branches: Branches) -> None:
    """Add to the record; durable when this returns.

    Raises:
        CheckpointError: it could not be read or written, and is as it was.
    """
    if not branches.known or (known := read_branches(storage)) == (merged := known.merged(branches)):
        return
    storage.make_dir("")
    new = f"{RECORD}.{secrets.token_hex(4)}"
    try:
        write_file(storage, new, sealed_file({"branches": merged.as_rows()}))
        storage.replace(new, RECORD)
    except BaseException:
        storage.remove(new)
        raise
    storage.sync_dir("")


def left_steps(storage: Storage, saves: Mapping[int, str]) -> dict[int, float]:
    """Of saves in a tier those of branches that the job has left.

    Args:
        saves: step to save id of all that are committed there.
    Returns:
        Step to the newest step that it has in common with the live branch.
    """
    branches = read_branches(storage, saves.values())
    return {
        step: branches.left_after(step, save)
        for step, save in saves.items()
        if not branches.is_live(step, save)
    }
