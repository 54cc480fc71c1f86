# SPDX-License-Identifier: Apache-2.0
"""Format of NeMo's own saves: the files are NeMo's and Megatron's, index and manifest those of the engine.

    step=40/               the checkpoint directory
      weights/             what NeMo and Megatron write: .metadata, common.pt, __0_0.distcp, ...
      rank=0.json          index: checksums of rank 0's files, by the process that wrote them
      manifest.json        written last, by rank 0
    step=40-unfinished     stands beside the directory until the manifest is durable

Stock readers ignore the extra files.  A checkpoint without a manifest is either unfinished (then its marker
stands beside it) or was written by NeMo alone; `check_unproven` tells the two apart.
"""

from __future__ import annotations

import os
from pathlib import Path

from resiliency.checkpoint.format.manifest import (
    MANIFEST,
    Manifest,
    RankIndex,
    index_name,
    read_index,
    write_index,
    write_manifest,
)
from resiliency.checkpoint.format.marker import parse_step, try_read_marker
from resiliency.checkpoint.storage.chunked_file import record_file
from resiliency.checkpoint.storage.interface import Storage
from resiliency.checkpoint.storage.posix import LocalStorage
from resiliency.errors import CheckpointIncomplete
from resiliency.runtime import SystemClock

#: `Manifest.format`: no rank's state as it was captured, so the engine restores none of these.
NEMO_FORMAT = "nemo"
WEIGHTS = "weights"
#: NeMo and Megatron write these two last; a directory with both, without a marker, is theirs.
_LAST = ("metadata.json", ".metadata")


def record_rank(directory: Path, *, step: int, rank: int) -> None:
    """Write the index of what `rank` wrote (``weights/__<rank>_*``); a rank that wrote nothing has none."""
    storage = storage_of(directory)
    names = [name for name in _written(storage, directory.name) if name.startswith(f"{WEIGHTS}/__{rank}_")]
    if names:
        files = tuple(record_file(storage, directory.name, name) for name in names)
        index = RankIndex(
            rank=rank, step=step, run_id="", save_id="", fingerprint="", files=files, tensors=()
        )
        write_index(storage, directory.name, index)


def seal(directory: Path, *, step: int, world_size: int) -> None:
    """Write the manifest, the last file of a checkpoint; in one process, when every rank has its index.

    Raises:
        CheckpointIncomplete: a file of the checkpoint is in nobody's index.
    """
    storage, name = storage_of(directory), directory.name
    written, there = _written(storage, name), storage.list(name)
    shared = [path for path in written if not path.startswith(f"{WEIGHTS}/__")]
    for path in shared:
        with open(directory / path, "rb") as file:
            os.fsync(file.fileno())
    files = tuple(record_file(storage, name, path) for path in shared)
    ranks = [rank for rank in range(world_size) if index_name(name, rank).removeprefix(f"{name}/") in there]
    indexes = {rank: read_index(storage, name, rank) for rank in ranks}
    records = [*files, *(record for index, _ in indexes.values() for record in index.files)]
    unknown = set(written).difference(record.name for record in records)
    if unknown:
        raise CheckpointIncomplete(
            f"{directory}: no rank recorded a checksum of {sorted(unknown)}.",
            hint="The checkpoint stays marked as unfinished; the one before it is untouched.",
            path=str(directory),
            step=step,
        )
    marker = None if parse_step(name) is None else try_read_marker(storage, step)
    manifest = Manifest(
        step=step,
        run_id="",
        save_id="" if marker is None else marker.save_id,
        world_size=world_size,
        format=NEMO_FORMAT,
        ranks={rank: digest for rank, (_, digest) in indexes.items()},
        files=files,
        created=SystemClock().now().isoformat(timespec="seconds"),
        size_bytes=sum(record.size_bytes for record in records),
    )
    storage.sync_dir(f"{name}/{WEIGHTS}")
    write_manifest(storage, name, manifest)
    storage.sync_dir(name)


def check_unproven(storage: Storage, directory: str) -> None:
    """For a checkpoint without a manifest: whether NeMo has finished it, as far as can be told.

    Raises:
        CheckpointIncomplete: it has not.
    """
    there = storage.list(f"{directory}/{WEIGHTS}")
    missing = [name for name in _LAST if name not in there]
    if missing:
        raise CheckpointIncomplete(
            f"{storage.describe(directory)} has no {MANIFEST} and lacks {' and '.join(missing)}:"
            " it was never finished",
            path=storage.describe(f"{directory}/{WEIGHTS}/{missing[0]}"),
        )


def storage_of(directory: Path) -> LocalStorage:
    """Where checkpoints of NeMo stand.  Through the page cache: NeMo has just written them, or is about to
    read them."""
    return LocalStorage(directory.parent, direct=False)


def _written(storage: Storage, directory: str) -> list[str]:
    return [f"{WEIGHTS}/{name}" for name in storage.list(f"{directory}/{WEIGHTS}")]
