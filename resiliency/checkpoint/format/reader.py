# SPDX-License-Identifier: Apache-2.0
"""Reads committed checkpoints of any of our formats, verifying every byte on the way."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from resiliency.checkpoint.format.local import LAYOUT_BLOB, SLOT_BLOB, VALUES_BLOB
from resiliency.checkpoint.format.manifest import (
    Manifest,
    RankIndex,
    TensorRecord,
    data_directory,
    read_index,
    read_manifest,
    table_digest,
)
from resiliency.checkpoint.format.marker import MarkerState, step_directory, try_read_marker
from resiliency.checkpoint.format.shared_names import SharedNames
from resiliency.checkpoint.state.layout import Shard, StateLayout, TensorEntry
from resiliency.checkpoint.state.rank_sets import mesh_of, ranks_of
from resiliency.checkpoint.storage.chunked_file import (
    DEFAULT_THREADS,
    FileRecord,
    Pace,
    Want,
    check_size,
    read_ranges,
    verify_chunks,
    verify_file,
)
from resiliency.checkpoint.storage.interface import Storage
from resiliency.checkpoint.storage.memory import page_memory
from resiliency.checkpoint.threads import map_parallel
from resiliency.errors import CheckpointCorrupt, CheckpointIncomplete

_RANK_IN_NAME = re.compile(r"(?:^|/)(?:rank=|__)(\d+)")


class CheckpointReader:
    """One committed checkpoint, open for reading.

    Args:
        threads: readers per file.
        pace: called before each chunk with its size: bandwidth cap, progress.  May be set later.
    Raises:
        CheckpointIncomplete: it was never committed, or it is marked as unfinished.
        CheckpointCorrupt: its manifest is not what was written.
    """

    def __init__(
        self, storage: Storage, step: int, *, threads: int = DEFAULT_THREADS, pace: Pace | None = None
    ) -> None:
        self._storage = storage
        self._directory = step_directory(step)
        self._threads = threads
        self.pace = pace
        self._indexes: dict[int, RankIndex] = {}
        self._by_part: dict[int, dict[tuple[str, tuple[int, ...]], list[TensorRecord]]] = {}
        marker = try_read_marker(storage, step)
        if marker is not None:
            why = f" ({marker.reason})" if marker.reason else ""
            raise CheckpointIncomplete(
                f"{self.path} is marked as unfinished: {_MARKED[marker.state]}{why}.",
                hint="Restore another step.",
                step=step,
                path=self.path,
            )
        self.manifest: Manifest = read_manifest(storage, self._directory)
        if self.manifest.step != step:
            raise CheckpointCorrupt(
                f"{self.path} holds step {self.manifest.step}, expected {step}.",
                hint="The directory was renamed.",
                step=step,
                path=self.path,
            )

    @property
    def path(self) -> str:
        return self._storage.describe(self._directory)

    def index(self, rank: int) -> RankIndex:
        """What `rank` wrote, verified against the manifest."""
        if rank not in self._indexes:
            if rank not in self.manifest.ranks:
                here = ", ".join(str(rank) for rank in self.manifest.ranks)
                raise CheckpointIncomplete(
                    f"{self.path} has no shard of rank {rank}; it has those of {here}.",
                    rank=rank,
                    path=self.path,
                    missing_ranks=[rank],
                )
            digest = self.manifest.ranks[rank]
            place = data_directory(self._directory, self.manifest.folder)
            self._indexes[rank], _ = read_index(self._storage, place, rank, digest)
        return self._indexes[rank]

    def indexes(self) -> list[RankIndex]:
        """Of all ranks: for tools, and for loading at another number of ranks."""
        return map_parallel(self.index, list(self.manifest.ranks), "resiliency-indexes")

    def files(self) -> list[FileRecord]:
        """Every file with content; their names are relative to the root of the storage."""
        records = [record for index in self.indexes() for record in index.files]
        return [record.inside(self._directory) for record in (*self.manifest.files, *records)]

    def verify(self) -> int:
        """Read and compare everything, tables of indexes too; returns the bytes of the files with content.

        Raises like `open_shard`.
        """
        map_parallel(RankIndex.check, self.indexes(), "resiliency-tables")
        return sum(
            verify_file(self._storage, record, threads=self._threads, pace=self.pace)
            for record in self.files()
        )

    def verify_shard(self, rank: int) -> int:
        """Read and compare what a restore of `rank` reads; returns the bytes.  Raises like `open_shard`."""
        self.open_shard(rank)
        for index in self._indexes.values():
            index.check()
        files = [record.inside(self._directory) for record in self._opened_files().values()]
        return sum(
            verify_file(self._storage, record, threads=self._threads, pace=self.pace) for record in files
        )

    def verify_named(self, name: str, offsets: Iterable[int] | None = None) -> bool:
        """Read and compare one file, which may be an index; False: it is none of this checkpoint.

        Raises like `open_shard`.

        Args:
            name: relative to the root of the storage.
            offsets: of a file with data, read the chunks there alone.
        """
        own = name.removeprefix(f"{self._directory}/")
        # All formats name a file after the rank that wrote it; what has no such name is rank 0's.
        named = _RANK_IN_NAME.search(own)
        rank = int(named[1]) if named else 0
        if name == own or (rank not in self.manifest.ranks and named):
            return False
        index = self.index(rank) if rank in self.manifest.ranks else None
        if index is not None and name == self.manifest.index_name(self._directory, rank):
            index.check()
            return True
        for record in (*self.manifest.files, *(() if index is None else index.files)):
            if record.name == own:
                inside = record.inside(self._directory)
                if offsets is None:
                    verify_file(self._storage, inside, threads=self._threads, pace=self.pace)
                else:
                    verify_chunks(self._storage, inside, offsets, threads=self._threads)
                return True
        return False

    def open_shard(self, rank: int) -> Shard:
        """The state of `rank`, whose tensors are read, and verified, when they are asked for.

        They go straight to where they belong, which saves a copy of the state and the memory for it;
        the price is that bad bytes show when some of the state is overwritten: `Shard.load` raises as this
        does.  That the files are there in full length is found out here.

        Raises:
            CheckpointCorrupt: bytes differ from those that were committed.
            CheckpointIncomplete: a file or a rank is missing.
        """
        layout, values = self._read_values(rank)
        places = self._places(rank, layout)
        for name in {place.file for place in places}:
            check_size(self._storage, self._opened_files()[name].inside(self._directory))
        by_offset = {place.offset: place for place in places if place.size_bytes}

        def load(ranges: Sequence[tuple[int, memoryview]]) -> None:
            self._read([by_offset[offset].want(memory) for offset, memory in ranges if memory.nbytes])

        # Memory that is never touched costs nothing.
        return Shard(
            layout=layout,
            values=values,
            step=self.manifest.step,
            rank=rank,
            world_size=self.manifest.world_size,
            buffer=page_memory(layout.size_bytes, large=True),
            run_id=self.manifest.run_id,
            load=load,
        )

    def keys(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Global tensors: key, as `.metadata` has it, to dtype and global shape."""
        indexes = self.indexes()
        names = SharedNames(indexes)
        found: dict[str, tuple[str, tuple[int, ...]]] = {}
        for index in indexes:
            for record in index.tensors:
                if not record.hidden:
                    found.setdefault(names.name(index.rank, record), (record.dtype, record.global_shape))
        return found

    def _places(self, rank: int, layout: StateLayout) -> list[_Place]:
        """Where the bytes of each entry are."""
        slot = self.index(rank).blob(SLOT_BLOB)
        if slot is not None:
            return [
                _Place(
                    entry.offset_bytes,
                    entry.size_bytes,
                    self.index(rank).path_of(slot.file),
                    slot.position + entry.offset_bytes,
                    entry.key,
                )
                for entry in layout.entries
            ]
        return [self._find(rank, entry, layout.disk_names[entry.key]) for entry in layout.entries]

    def _find(self, rank: int, entry: TensorEntry, key: str) -> _Place:
        """The part that `rank` wrote itself, else the copy of the rank that owns it: one of the same mesh."""
        mesh = mesh_of(entry.attributes)
        for holder in (rank, *(other for other in self._writers(rank, mesh) if other != rank)):
            for record in self._records(holder).get((key, entry.global_offset), ()):
                is_same = mesh_of(record.attributes) == mesh
                if is_same and record.shape == entry.shape and record.dtype == entry.dtype:
                    file = self.index(holder).path_of(record.file)
                    return _Place(entry.offset_bytes, entry.size_bytes, file, record.position, entry.key)
        raise CheckpointIncomplete(
            f"{self.path} holds no bytes for {entry.key} at {entry.global_offset} of rank {rank}.",
            rank=rank,
            path=self.path,
            key=entry.key,
        )

    def _writers(self, rank: int, mesh: str) -> Iterable[int]:
        """The ranks that may have written what `rank` shares with others on `mesh`."""
        by_table = self.manifest.written_by
        if by_table is None:  # format version 1: search
            return ranks_of(mesh) if mesh else self.manifest.ranks
        text = by_table.get(table_digest(self.index(rank), "shared"))
        return ranks_of(text) if text else ()

    def _records(self, rank: int) -> dict[tuple[str, tuple[int, ...]], list[TensorRecord]]:
        if rank not in self._by_part:
            found: dict[tuple[str, tuple[int, ...]], list[TensorRecord]] = defaultdict(list)
            for record in self.index(rank).tensors:
                found[record.key, record.offsets].append(record)
            self._by_part[rank] = found
        return self._by_part[rank]

    def _read_values(self, rank: int) -> tuple[StateLayout, bytes]:
        layout, values = self._read_blobs(rank, LAYOUT_BLOB, VALUES_BLOB)
        return StateLayout.from_json(layout), values

    def _read_blobs(self, rank: int, *keys: str) -> list[bytes]:
        contents, wants = [], []
        for key in keys:
            blob = self.index(rank).blob(key)
            if blob is None:
                raise CheckpointIncomplete(
                    f"{self.path} holds no {key} of rank {rank}.", rank=rank, path=self.path, key=key
                )
            contents.append(bytearray(blob.size_bytes))
            wants.append(
                (self.index(rank).path_of(blob.file), Want(blob.position, memoryview(contents[-1]), key))
            )
        self._read(wants)
        return [bytes(content) for content in contents]

    def _read(self, wants: Iterable[tuple[str, Want]]) -> None:
        """Fill what is wanted of each file."""
        by_file: dict[str, list[Want]] = defaultdict(list)
        for name, want in wants:
            by_file[name].append(want)
        records = self._opened_files()
        for name, ranges in by_file.items():
            record = records[name].inside(self._directory)
            read_ranges(self._storage, record, ranges, threads=self._threads, pace=self.pace)

    def _opened_files(self) -> dict[str, FileRecord]:
        # Only what was opened on the way here: one of a thousand ranks does not read all indexes.
        return {record.name: record for index in self._indexes.values() for record in index.files}


def holds_shards(storage: Storage, step: int, shards: Mapping[int, Shard]) -> bool:
    """Whether the checkpoint of `step` has the same tensors as `shards`, by rank, bit for bit."""
    try:
        reader = CheckpointReader(storage, step)
        return all(_is_same(reader.open_shard(rank), shard) for rank, shard in shards.items())
    except (CheckpointCorrupt, CheckpointIncomplete):
        return False


def _is_same(stored: Shard, shard: Shard) -> bool:
    if stored.layout.fingerprint != shard.layout.fingerprint:
        return False
    for entry in stored.layout.entries:
        content = memoryview(bytearray(entry.size_bytes))
        assert stored.load is not None
        stored.load([(entry.offset_bytes, content)])
        if content != shard.read(entry):
            return False
    return True


@dataclass(frozen=True)
class _Place:
    """Which bytes of a file belong at an offset of the slot."""

    offset: int
    size_bytes: int
    file: str
    position: int
    key: str

    def want(self, memory: memoryview) -> tuple[str, Want]:
        return self.file, Want(self.position, memory, self.key)


_MARKED = {
    MarkerState.CLEARING: "its save has just begun",
    MarkerState.WRITING: "its save did not finish",
    MarkerState.FAILED: "its save failed",
    MarkerState.CORRUPT: "it was found bad",
    MarkerState.REMOVING: "it is being removed",
    MarkerState.UNKNOWN: "no reason given",
}
