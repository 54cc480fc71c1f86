# SPDX-License-Identifier: Apache-2.0
"""Names on disk: ``step=N`` and the marker ``step=N-unfinished`` that hides it from readers.

The presence of the marker alone decides: a marker that is empty, torn or of another program hides
its checkpoint as well.  Its content only tells why it is there, and to the ranks of one save that
they mean the same try.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path

from resiliency.checkpoint.format.manifest import read_manifest
from resiliency.checkpoint.storage.interface import Storage, read_file, write_file
from resiliency.checkpoint.storage.posix import SHORTAGES
from resiliency.errors import CheckpointCorrupt, CheckpointError, CheckpointMissing, ConfigError
from resiliency.files import posix_path

MARKER_SUFFIX = "-unfinished"
_STEP = re.compile(r"step=(\d+)")
#: The marker of a save once it was lifted, in the folder of the save.
LIFTED = "unfinished"
#: The number of a try where nobody counts.
UNNUMBERED = 0


class MarkerState(str, Enum):
    CLEARING = "clearing"  # leftovers of an earlier attempt are being removed
    WRITING = "writing"  # ranks may write
    FAILED = "failed"  # the save gave up
    CORRUPT = "corrupt"  # found bad after it was committed
    REMOVING = "removing"  # being deleted by retention
    UNKNOWN = "unknown"  # written by something else, or torn


#: These hide what the save that they name has left, or its checkpoint; no other save's.
_OF_A_SAVE = tuple(state for state in MarkerState if state is not MarkerState.UNKNOWN)


@dataclass(frozen=True, kw_only=True)
class Marker:
    """Why a step is hidden.

    `try_number` tells the tries of one save apart, which share its id; `UNNUMBERED` where there is but
    one, and in markers of older versions.

    Args:
        run_id: of the save; empty: unknown, in markers of older versions and of other programs.
        until: when the save has ended in any case, in seconds since 1970.
    """

    state: MarkerState
    save_id: str = ""
    reason: str = ""
    try_number: int = UNNUMBERED
    run_id: str = ""
    until: int = 0


def step_directory(step: int) -> str:
    return f"step={step}"


def marker_name(step: int) -> str:
    return step_directory(step) + MARKER_SUFFIX


def parse_step(name: str) -> int | None:
    """Step of a checkpoint directory's name; None for anything else, markers included."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def split_path(path: str | os.PathLike[str]) -> tuple[Path, int]:
    """Directory of all checkpoints and step, from the path of one of them.

    Raises:
        ConfigError: the path does not end in ``step=N``, and so cannot have a marker beside it; or it is no
            path of a file system.
    """
    place = posix_path(path)
    step = parse_step(place.name)
    if step is None:
        raise ConfigError(
            f"a checkpoint is a directory called step=N, found {os.fspath(path)!r}.",
            hint="N counts finished steps, such as /ckpt/step=100.",
            path=os.fspath(path),
        )
    return place.parent, step


def put_marker(storage: Storage, step: int, marker: Marker) -> None:
    """Hide `step`; durable when this returns, name included."""
    write_file(storage, marker_name(step), encode_marker(marker))
    storage.sync_dir("")


def encode_marker(marker: Marker) -> bytes:
    return json.dumps({**asdict(marker), "state": marker.state.value}).encode() + b"\n"


def lift_marker(storage: Storage, step: int) -> None:
    """Show `step`; durable when this returns."""
    storage.remove(marker_name(step))
    storage.sync_dir("")


def try_read_marker(storage: Storage, step: int) -> Marker | None:
    """The marker of `step`, None when there is none.

    A marker that cannot be read hides its step: a checkpoint must not come out of hiding because its device
    is in trouble.
    """
    try:
        return read_marker(storage, step)
    except CheckpointCorrupt:
        return Marker(state=MarkerState.UNKNOWN)


def read_marker(storage: Storage, step: int) -> Marker | None:
    """As `try_read_marker`, for callers that delete what a marker hides.

    Raises:
        CheckpointCorrupt: the storage does not say whether there is one: the step may be committed.
    """
    try:
        content = read_file(storage, marker_name(step))
    except CheckpointMissing:
        return None
    except CheckpointCorrupt as error:
        # Out of descriptors, reading fails also where there is none, and looking does not.
        if error.fields.get("errno") in SHORTAGES and not storage.exists(marker_name(step)):
            return None
        raise
    marker = parse_marker(content)
    return None if _is_lifted(storage, step, marker) else marker


def parse_marker(content: bytes) -> Marker:
    """Of the bytes of its file; UNKNOWN for what is none."""
    try:
        record = json.loads(content)
        return Marker(
            state=MarkerState(record["state"]),
            save_id=str(record["save_id"]),
            reason=str(record["reason"]),
            try_number=int(record.get("try_number", UNNUMBERED)),
            run_id=str(record.get("run_id", "")),
            until=int(record.get("until", 0)),
        )
    except (ValueError, KeyError, TypeError):
        return Marker(state=MarkerState.UNKNOWN)


def _is_lifted(storage: Storage, step: int, marker: Marker) -> bool:
    """Whether a marker that is there hides nothing.

    Either a late save put it there, and another one was committed at the step: it has lifted its own (see
    `format.claim`).  Or a mount shows a marker that another host has lifted: one with a metadata cache (GCS
    FUSE) opens a file for a minute or longer after its removal; its listings are fresh.  A listing alone may
    be older than the marker (NFS), so the manifest of the very save that the marker names is asked for as
    well: a save writes it last.
    """
    if marker.state not in _OF_A_SAVE or not marker.save_id:
        return False
    try:
        directory = step_directory(step)
        manifest = read_manifest(storage, directory)
        if manifest.save_id != marker.save_id:
            # Without a folder its files may have gone before it.
            return bool(manifest.folder) and _has_lifted(
                storage, f"{directory}/{manifest.folder}", manifest.save_id
            )
        return marker.state is MarkerState.WRITING and marker_name(step) not in storage.list("")
    except (CheckpointError, ConfigError):
        return False


def _has_lifted(storage: Storage, folder: str, save_id: str) -> bool:
    try:
        return parse_marker(read_file(storage, f"{folder}/{LIFTED}")).save_id == save_id
    except CheckpointMissing:
        return False
