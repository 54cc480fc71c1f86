# SPDX-License-Identifier: Apache-2.0
"""What a copy will consist of: the manifest, the indexes, and from them every file and digest.

Both sides read the same bytes by the same rules, so a chunk is named by two numbers.  On the
receiving side nothing of it is believed: the manifest must match its own seal, each index the
digest in the manifest, and every name must be one that a checkpoint may have.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import cast

from resiliency.checkpoint.checksums import digest_function
from resiliency.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    RankIndex,
    index_name,
    read_index,
    read_manifest,
)
from resiliency.checkpoint.marker import marker_name, step_directory
from resiliency.checkpoint.shard_file import FileRecord
from resiliency.checkpoint.storage import Storage, read_file
from resiliency.errors import CheckpointCorrupt, CheckpointIncomplete, CheckpointMissing

#: More is not read into memory at once.
LARGEST_CHUNK_BYTES = 64 << 20
NO_RANK = -1
_PART = re.compile(r"[A-Za-z0-9_.=+-]{1,200}")
_RESERVED = re.compile(rf"{re.escape(MANIFEST)}|rank=\d+\.(json|failed)")
_MOST_PARTS = 4


@dataclass(frozen=True)
class Blueprint:
    """One committed step of one host, as its manifest and indexes say.

    Args:
        manifest_bytes: the file `manifest.json`.
        index_bytes: rank to the file `rank=R.json`.
    """

    step: int
    save_id: str
    manifest_bytes: bytes = field(repr=False)
    index_bytes: Mapping[int, bytes] = field(repr=False)
    #: All other files, in an order that follows from the above; names relative to the step's directory.
    files: tuple[FileRecord, ...] = field(repr=False)
    #: Of each file the rank that wrote it; `NO_RANK` for files of the checkpoint as a whole.
    file_ranks: tuple[int, ...] = field(repr=False)

    @classmethod
    def of(cls, manifest_bytes: bytes, index_bytes: Mapping[int, bytes], *, step: int) -> Blueprint:
        """Verify the chain of digests and read what there is to copy.

        Raises:
            CheckpointCorrupt: something does not match its digest, or cannot be part of a checkpoint.
            CheckpointIncomplete: the index of a rank is missing.
            ConfigError: written by a newer release, or with checksums that cannot be computed here.
        """
        try:
            return cls._of(manifest_bytes, index_bytes, step)
        except RecursionError:
            raise CheckpointCorrupt("the manifest or an index is nested too deeply.") from None

    @classmethod
    def _of(cls, manifest_bytes: bytes, index_bytes: Mapping[int, bytes], step: int) -> Blueprint:
        directory = step_directory(step)
        names = {index_name(directory, rank): content for rank, content in index_bytes.items()}
        # The two functions below read files; of the whole storage they need no more than this.
        letters = cast(Storage, _Letters({**names, f"{directory}/{MANIFEST}": manifest_bytes}))
        manifest = read_manifest(letters, directory)
        _require(manifest.step == step, f"the manifest is of step {manifest.step}, expected {step}")
        _require(
            manifest.ranks.keys() == index_bytes.keys(), "the indexes are not those of the manifest's ranks"
        )
        indexes = [
            read_index(letters, directory, rank, manifest.ranks[rank])[0] for rank in sorted(manifest.ranks)
        ]
        for rank, index in zip(sorted(manifest.ranks), indexes, strict=True):
            same = (index.rank, index.step, index.save_id) == (rank, step, manifest.save_id)
            _require(same, f"the index of rank {rank} belongs to another save")
        files = _files(manifest, indexes)
        ranks = [NO_RANK] * len(manifest.files) + [index.rank for index in indexes for _ in index.files]
        return cls(step, manifest.save_id, manifest_bytes, dict(index_bytes), files, tuple(ranks))

    @classmethod
    def read(cls, storage: Storage, step: int) -> Blueprint:
        """That of a committed step.

        Raises:
            CheckpointIncomplete: it is not there, or hidden by a marker.
            CheckpointCorrupt: as `of`.
        """
        directory = step_directory(step)
        path = storage.describe(directory)
        if storage.exists(marker_name(step)):
            raise CheckpointIncomplete(f"{path} is marked as unfinished.", path=path, step=step)
        manifest = read_manifest(storage, directory)
        try:
            manifest_bytes = read_file(storage, f"{directory}/{MANIFEST}")
            indexes = {rank: read_file(storage, index_name(directory, rank)) for rank in manifest.ranks}
        except CheckpointMissing as error:
            raise CheckpointIncomplete(
                f"{path} lacks a file: {error.message}", path=path, step=step
            ) from error
        return cls.of(manifest_bytes, indexes, step=step)

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
    _require(not _RESERVED.fullmatch(parts[0]), f"{name!r} is no name for data")


def _require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise CheckpointCorrupt(f"this is no checkpoint that can be copied: {otherwise}.")


class _Letters:
    """Files that came by mail: bytes in memory, to be read once."""

    def __init__(self, contents: Mapping[str, bytes]) -> None:
        self._contents = contents

    def describe(self, name: str = "") -> str:
        return f"the received {name.rpartition('/')[2]}"

    def open(self, name: str) -> _Letter:
        try:
            return _Letter(self._contents[name])
        except KeyError:
            raise CheckpointMissing(f"there is no {self.describe(name)}.") from None


class _Letter:
    def __init__(self, content: bytes) -> None:
        self._file = io.BytesIO(content)
        self.size_bytes = len(content)

    def read_into(self, offset: int, target: memoryview) -> int:
        self._file.seek(offset)
        return self._file.readinto(target)

    def close(self) -> None:
        self._file.close()
