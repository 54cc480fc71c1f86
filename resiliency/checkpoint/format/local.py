# SPDX-License-Identifier: Apache-2.0
"""Format of the local tier: the slot of each rank as it lay in memory, in a directory of its own.

    step=7/manifest.json
    step=7/save=5f0c.../            the folder of this save, see `resiliency.checkpoint.format.manifest`
      rank=0.json                 index: chunk digests, run, step, fingerprint, where each tensor is
      rank=0.slot.bin             the slot, byte for byte; then its layout, and what is no tensor

The slot is one large aligned range, so it goes from memory to the device and back without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence

from resiliency.checkpoint.format.manifest import BlobRecord, RankIndex, TensorRecord
from resiliency.checkpoint.state.layout import Shard
from resiliency.checkpoint.storage.chunked_file import (
    DEFAULT_THREADS,
    FilePiece,
    FileRecord,
    Pace,
    write_shard_file,
)
from resiliency.checkpoint.storage.interface import Storage

#: Keys of the blobs that every format of ours holds, and of the one that only this format holds.
LAYOUT_BLOB = "layout"
VALUES_BLOB = "values"
SLOT_BLOB = "slot"


class LocalFormat:
    """Writes the local tier.

    Args:
        threads: writers per rank.
        pace: called before each chunk with its size, see `resiliency.checkpoint.storage.chunked_file.Pace`.
    """

    name = "local"

    def __init__(self, *, threads: int = DEFAULT_THREADS, pace: Pace | None = None) -> None:
        self._threads = threads
        self._pace = pace

    def write_rank(
        self, storage: Storage, directory: str, shard: Shard, *, run_id: str, save_id: str
    ) -> RankIndex:
        # No directory of its own: to make one late would bring back the folder of a save that is over.
        name = f"rank={shard.rank}.slot.bin"
        size = shard.layout.size_bytes
        pieces = [FilePiece(0, shard.buffer[:size])]
        slot = BlobRecord(key=SLOT_BLOB, file=name, position=0, size_bytes=size)
        blobs = add_blobs(pieces, name, shard)
        file = write_shard_file(
            storage, directory, name, pieces, pieces[-1].end, threads=self._threads, pace=self._pace
        )
        return RankIndex(
            rank=shard.rank,
            step=shard.step,
            run_id=run_id,
            save_id=save_id,
            fingerprint=shard.layout.fingerprint,
            files=(file,),
            tensors=tuple(
                TensorRecord(
                    key=shard.layout.disk_names[entry.key],
                    dtype=entry.dtype,
                    global_shape=entry.global_shape,
                    offsets=entry.global_offset,
                    shape=entry.shape,
                    file=name,
                    position=entry.offset_bytes,
                    size_bytes=entry.size_bytes,
                    path=entry.path,
                    hidden=entry.is_base,
                )
                for entry in shard.layout.entries
            ),
            blobs=(slot, *blobs),
            group=shard.group,
        )

    def seal(self, storage: Storage, directory: str, indexes: Sequence[RankIndex]) -> Sequence[FileRecord]:
        """Nothing: the indexes say all."""
        return ()


def add_blobs(pieces: list[FilePiece], file: str, shard: Shard) -> list[BlobRecord]:
    """Put layout and values of a shard behind `pieces`, into the same file: one sync for all."""
    blobs = []
    content = {LAYOUT_BLOB: shard.layout.to_json().encode(), VALUES_BLOB: shard.values}
    for key, data in content.items():
        position = pieces[-1].end if pieces else 0
        pieces.append(FilePiece(position, data))
        blobs.append(BlobRecord(key=key, file=file, position=position, size_bytes=len(data)))
    return blobs
