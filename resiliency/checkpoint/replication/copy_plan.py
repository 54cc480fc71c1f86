# SPDX-License-Identifier: Apache-2.0
"""What a copy will consist of: the manifest, the indexes, and from them every file and digest.

Both sides read the same bytes by the same rules, so a chunk is named by two numbers.  On the
receiving side nothing of it is believed: the manifest must match its own seal, each index the
digest in the manifest, and every name must be one that a checkpoint may have.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from resiliency.checkpoint.format.manifest import (
    MANIFEST,
    SAVE_PREFIX,
    Manifest,
    RankIndex,
    manifest_path,
    parse_index,
    parse_manifest,
    read_manifest_bytes,
)
from resiliency.checkpoint.format.marker import marker_name, step_directory
from resiliency.checkpoint.storage.checksums import digest_function
from resiliency.checkpoint.storage.chunked_file import FileRecord
from resiliency.checkpoint.storage.interface import Storage, read_file
from resiliency.errors import CheckpointCorrupt, CheckpointIncomplete, CheckpointMissing

#: More is not read into memory at once.
LARGEST_CHUNK_BYTES = 64 << 20
NO_RANK = -1
_PART = re.compile(r"[A-Za-z0-9_.=+-]{1,200}")
_RESERVED = re.compile(rf"(save=\w+/)?({re.escape(MANIFEST)}|rank=\d+\.(json|failed))(/.*)?")
_MOST_PARTS = 4


@dataclass(frozen=True)
class CopyPlan:
    """One committed step of one host, as its manifest and indexes say.

    Args:
        manifest_bytes: the file `manifest.json`.
        index_bytes: rank to the file `rank=R.json`.
        folder: of the save, in the step's directory; empty: there is none.
    """

    step: int
    save_id: str
    folder: str
    manifest_bytes: bytes = field(repr=False)
    index_bytes: Mapping[int, bytes] = field(repr=False)
    #: All other files, in an order that follows from the above; names relative to the step's directory.
    files: tuple[FileRecord, ...] = field(repr=False)
    #: Of each file the rank that wrote it; `NO_RANK` for files of the checkpoint as a whole.
    file_ranks: tuple[int, ...] = field(repr=False)

    @classmethod
    def of(cls, manifest_bytes: bytes, index_bytes: Mapping[int, bytes], *, step: int) -> CopyPlan:
        """Verify the chain of digests and read what there is to copy.

        Raises:
            CheckpointCorrupt: something does not match its digest, or cannot be part of a checkpoint.
            ConfigError: written by a newer release, or with checksums that cannot be computed here.
        """
        try:
            manifest = parse_manifest(manifest_bytes, _received(MANIFEST))
            return cls._of(manifest, manifest_bytes, index_bytes, step, describe=_received)
        except RecursionError:
            raise CheckpointCorrupt("the manifest or an index is nested too deeply.") from None

    @classmethod
    def _of(
        cls,
        manifest: Manifest,
        manifest_bytes: bytes,
        index_bytes: Mapping[int, bytes],
        step: int,
        *,
        describe: Callable[[str], str],
    ) -> CopyPlan:
        _require(manifest.step == step, f"the manifest is of step {manifest.step}, expected {step}")
        _require(
            manifest.ranks.keys() == index_bytes.keys(), "the indexes are not those of the manifest's ranks"
        )
        indexes = []
        for rank, digest in sorted(manifest.ranks.items()):
            path = describe(manifest.index_name(step_directory(step), rank))
            index, _ = parse_index(index_bytes[rank], path, digest)
            same = (index.rank, index.step, index.save_id) == (rank, step, manifest.save_id)
            _require(same, f"the index of rank {rank} belongs to another save")
            indexes.append(index)
        files = _files(manifest, indexes)
        ranks = [NO_RANK] * len(manifest.files) + [index.rank for index in indexes for _ in index.files]
        if manifest.folder:
            _check_name(manifest.folder)
            _require(manifest.folder.startswith(SAVE_PREFIX), f"{manifest.folder!r} is no folder of a save")
        return cls(
            step, manifest.save_id, manifest.folder, manifest_bytes, dict(index_bytes), files, tuple(ranks)
        )

    @classmethod
    def read(cls, storage: Storage, step: int) -> CopyPlan:
        """That of a committed step.

        Raises:
            CheckpointIncomplete: it is not there, or hidden by a marker.
            CheckpointCorrupt: as `of`.
        """
        directory = step_directory(step)
        path = storage.describe(directory)
        if storage.exists(marker_name(step)):
            raise CheckpointIncomplete(f"{path} is marked as unfinished.", path=path, step=step)
        manifest_bytes = read_manifest_bytes(storage, directory)
        manifest = parse_manifest(manifest_bytes, manifest_path(storage, directory))
        try:
            indexes = {
                rank: read_file(storage, manifest.index_name(directory, rank)) for rank in manifest.ranks
            }
        except CheckpointMissing as error:
            raise CheckpointIncomplete(
                f"{path} lacks a file: {error.message}", path=path, step=step
            ) from error
        return cls._of(manifest, manifest_bytes, indexes, step, describe=storage.describe)

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @property
    def chunk_bytes(self) -> int:
        """Of the largest chunk."""
        return max((min(file.chunk_bytes, file.size_bytes) for file in self.files), default=0)

    @property
    def directories(self) -> list[str]:
        """Below the step's own, parents first."""
        return parents_of(record.name for record in self.files)

    def extent(self, file: int, number: int) -> tuple[int, int]:
        """Offset and length of a chunk."""
        record = self.files[file]
        start = number * record.chunk_bytes
        return start, min(record.chunk_bytes, record.size_bytes - start)

    def has(self, file: int, number: int) -> bool:
        return 0 <= file < len(self.files) and 0 <= number < len(self.files[file].digests)


def parents_of(names: Iterable[str]) -> list[str]:
    """All directories above the files `names`, parents first."""
    found: set[str] = set()
    for name in names:
        while name := name.rpartition("/")[0]:
            found.add(name)
    return sorted(found)


def _files(manifest: Manifest, indexes: list[RankIndex]) -> tuple[FileRecord, ...]:
    records = (*manifest.files, *(record for index in indexes for record in index.files))
    names: set[str] = set()
    for record in records:
        _check_name(record.name)
        _require(record.name not in names, f"{record.name!r} is there twice")
        names.add(record.name)
        sizes = (record.size_bytes, record.chunk_bytes)
        _require(all(type(size) is int for size in sizes), f"{record.name!r} has sizes {sizes}")
        plausible = record.size_bytes >= 0 and 0 < record.chunk_bytes <= LARGEST_CHUNK_BYTES
        _require(plausible, f"{record.name!r} has sizes {sizes}, and chunks of {LARGEST_CHUNK_BYTES} at most")
        chunks = -(-record.size_bytes // record.chunk_bytes)
        _require(
            len(record.digests) == chunks,
            f"{record.name!r} has {len(record.digests)} digests for {chunks} chunks",
        )
        digest_function(record.algorithm)
    for name in names:
        _require(names.isdisjoint(parents_of([name])), f"{name!r} is inside a file")
    return records


def _check_name(name: object) -> None:
    parts = name.split("/") if isinstance(name, str) else []
    good = 0 < len(parts) <= _MOST_PARTS and all(_PART.fullmatch(p) and p.strip(".") for p in parts)
    _require(good, f"no file of a checkpoint is called {str(name)[:200]!r}")
    _require(not _RESERVED.fullmatch(str(name)), f"{name!r} is no name for data")


def _require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise CheckpointCorrupt(f"this is no checkpoint that can be copied: {otherwise}.")


def _received(name: str) -> str:
    return f"the received {name.rpartition('/')[2]}"
