# SPDX-License-Identifier: Apache-2.0
"""Reads committed checkpoints of any of our formats, verifying every byte on the way.

Two ways in: `CheckpointReader.read_shard` brings back what a rank had captured, into a slot;
`CheckpointReader.read_tensors` fills tensors that are cut differently from those that were saved.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from resiliency.checkpoint.local_format import LAYOUT_BLOB, SLOT_BLOB, VALUES_BLOB
from resiliency.checkpoint.manifest import (
    Manifest,
    RankIndex,
    TensorRecord,
    read_index,
    read_manifest,
)
from resiliency.checkpoint.marker import MarkerState, step_directory, try_read_marker
from resiliency.checkpoint.rank_sets import mesh_of, ranks_of
from resiliency.checkpoint.shard_file import (
    DEFAULT_THREADS,
    FileRecord,
    Pace,
    Want,
    check_size,
    read_ranges,
    verify_file,
)
from resiliency.checkpoint.shared_names import SharedNames
from resiliency.checkpoint.storage import Storage, page_memory
from resiliency.checkpoint.table import Shard, StateLayout, TensorEntry
from resiliency.checkpoint.torch_record import memory_of
from resiliency.errors import CheckpointCorrupt, CheckpointIncomplete, LayoutMismatch


@dataclass(frozen=True)
class Target:
    """A region of the global tensor `key` that belongs into `tensor`, starting at `offsets`."""

    key: str
    tensor: torch.Tensor
    offsets: tuple[int, ...]


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
            self._indexes[rank], _ = read_index(self._storage, self._directory, rank, digest)
        return self._indexes[rank]

    def indexes(self) -> list[RankIndex]:
        return [self.index(rank) for rank in self.manifest.ranks]

    def files(self) -> list[FileRecord]:
        """Every file with content; their names are relative to the root of the storage."""
        records = [record for index in self.indexes() for record in index.files]
        return [record.inside(self._directory) for record in (*self.manifest.files, *records)]

    def verify(self) -> int:
        """Read and compare everything; returns the bytes read.  Raises like `read_shard`."""
        return sum(
            verify_file(self._storage, record, threads=self._threads, pace=self.pace)
            for record in self.files()
        )

    def read_layout(self, rank: int) -> StateLayout:
        return StateLayout.from_json(self._read_blobs(rank, LAYOUT_BLOB)[0])

    def open_shard(self, rank: int) -> Shard:
        """The state of `rank`, whose tensors are read, and verified, when they are asked for.

        They go straight to where they belong, which saves a copy of the state and the memory for it;
        the price is that bad bytes show when some of the state is overwritten (`Shard.load` raises
        like `read_shard`).  That the files are there in full length is found out here.
        """
        layout, values = self._read_values(rank)
        places = self._places(rank, layout)
        for name in {place.file for place in places}:
            check_size(self._storage, self._opened_files()[name].inside(self._directory))
        by_offset = {place.offset: place for place in places if place.size_bytes}

        def load(ranges: Sequence[tuple[int, memoryview]]) -> None:
            self._read([by_offset[offset].want(memory) for offset, memory in ranges if memory.nbytes])

        # Memory that is never touched costs nothing.
        return self._shard(rank, layout, values, page_memory(layout.size_bytes, large=True), load)

    def read_shard(self, rank: int, buffer: memoryview | None = None) -> Shard:
        """The state of `rank` as it was captured.

        Args:
            buffer: slot to fill, of at least `layout.size_bytes`; default: new memory.  It may
                hold bad bytes when this raises.
        Raises:
            CheckpointCorrupt: bytes differ from those that were committed.
            CheckpointIncomplete: a file or a rank is missing.
            LayoutMismatch: `buffer` is too small.
        """
        layout, values = self._read_values(rank)
        if buffer is None:
            # Page-aligned, unlike a tensor's memory: the device can fill it directly.
            buffer = page_memory(layout.size_bytes, large=True)
        if buffer.nbytes < layout.size_bytes:
            raise LayoutMismatch(
                f"the slot has {buffer.nbytes} bytes, rank {rank} of step {self.manifest.step} "
                f"needs {layout.size_bytes}.",
                rank=rank,
            )
        slot = self.index(rank).blob(SLOT_BLOB)
        if slot is not None:  # in one piece, so that all of it goes there directly
            places = [_Place(0, slot.size_bytes, slot.file, slot.position, SLOT_BLOB)]
        else:
            places = self._places(rank, layout)
        self._read([place.want(buffer[place.offset :][: place.size_bytes]) for place in places])
        return self._shard(rank, layout, values, buffer)

    def _shard(
        self,
        rank: int,
        layout: StateLayout,
        values: bytes,
        buffer: memoryview,
        load: Callable[[Sequence[tuple[int, memoryview]]], None] | None = None,
    ) -> Shard:
        return Shard(
            layout=layout,
            values=values,
            step=self.manifest.step,
            rank=rank,
            world_size=self.manifest.world_size,
            buffer=buffer,
            run_id=self.manifest.run_id,
            load=load,
        )

    def read_tensors(self, targets: Iterable[Target]) -> int:
        """Fill CPU tensors from whichever ranks hold their parts; returns the bytes filled.

        A target that is one saved part, contiguous, is filled in place; any other is put together
        from the rows that it shares with the saved parts.

        Raises:
            LayoutMismatch: a key is unknown, or dtype or shape do not fit.
            CheckpointIncomplete: the parts that exist do not cover a target.
        """
        parts = self._parts_by_key()
        assembly = _Assembly()
        for target in targets:
            assembly.add(target, parts.get(target.key, ()), self.path)
        self._read(assembly.wants)
        return assembly.finish()

    def keys(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Global tensors: key, as `.metadata` has it, to dtype and global shape."""
        return {key: (parts[0].dtype, parts[0].global_shape) for key, parts in self._parts_by_key().items()}

    def _parts_by_key(self) -> dict[str, list[TensorRecord]]:
        parts: dict[str, dict[tuple[int, ...], TensorRecord]] = defaultdict(dict)
        indexes = self.indexes()
        names = SharedNames(indexes)
        for index in indexes:
            for record in index.tensors:
                if not record.hidden:
                    parts[names.name(index.rank, record)].setdefault(record.offsets, record)
        return {key: list(by_offset.values()) for key, by_offset in parts.items()}

    def _places(self, rank: int, layout: StateLayout) -> list[_Place]:
        """Where the bytes of each entry are."""
        slot = self.index(rank).blob(SLOT_BLOB)
        if slot is not None:
            return [
                _Place(
                    entry.offset_bytes,
                    entry.size_bytes,
                    slot.file,
                    slot.position + entry.offset_bytes,
                    entry.key,
                )
                for entry in layout.entries
            ]
        records = [(entry, self._find(rank, entry, layout.disk_names[entry.key])) for entry in layout.entries]
        return [
            _Place(entry.offset_bytes, entry.size_bytes, record.file, record.position, entry.key)
            for entry, record in records
        ]

    def _find(self, rank: int, entry: TensorEntry, key: str) -> TensorRecord:
        """The part that `rank` wrote itself, else the copy of the rank that owns it: one of the same mesh."""
        mesh = mesh_of(entry.attributes)
        sharing = ranks_of(mesh) if mesh else self.manifest.ranks
        for holder in (rank, *(other for other in sharing if other != rank)):
            for record in self._records(holder).get((key, entry.global_offset), ()):
                is_same = mesh_of(record.attributes) == mesh
                if is_same and record.shape == entry.shape and record.dtype == entry.dtype:
                    return record
        raise CheckpointIncomplete(
            f"{self.path} holds no bytes for {entry.key} at {entry.global_offset} of rank {rank}.",
            rank=rank,
            path=self.path,
            key=entry.key,
        )

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
            wants.append((blob.file, Want(blob.position, memoryview(contents[-1]), key)))
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


class _Assembly:
    """Targets, the ranges to read for them, and the copies that remain after reading."""

    def __init__(self) -> None:
        self.wants: list[tuple[str, Want]] = []
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._filled = 0

    def add(self, target: Target, parts: Sequence[TensorRecord], path: str) -> None:
        tensor = target.tensor.detach()
        _check_fit(target, parts, path)
        self._filled += tensor.nbytes
        covered = 0
        for part in parts:
            low, high = overlap(target.offsets, tensor.shape, part.offsets, part.shape)
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            covered += math.prod(b - a for a, b in zip(low, high, strict=True))
            if tuple(tensor.shape) == part.shape and tensor.is_contiguous():
                self.wants.append((part.file, Want(part.position, memory_of(tensor), part.key)))
            else:
                self._add_rows(target, part, low, high)
        if covered < tensor.numel():
            raise CheckpointIncomplete(
                f"{path}: {target.key} at {target.offsets}: {covered} of {tensor.numel()} elements are "
                "in the checkpoint.",
                path=path,
                key=target.key,
            )

    def finish(self) -> int:
        for destination, source in self._copies:
            destination.copy_(source)
        return self._filled

    def _add_rows(
        self, target: Target, part: TensorRecord, low: tuple[int, ...], high: tuple[int, ...]
    ) -> None:
        """Read whole rows of the saved part, those that overlap, and copy the overlap out of them."""
        dtype = target.tensor.dtype
        first, rows = (low[0] - part.offsets[0], high[0] - low[0]) if low else (0, 1)
        row_shape = part.shape[1:]
        row_bytes = math.prod(row_shape) * dtype.itemsize
        scratch = torch.empty((rows, *row_shape) if low else (), dtype=dtype)
        position = part.position + first * row_bytes
        self.wants.append((part.file, Want(position, memory_of(scratch), part.key)))
        source, destination = scratch, target.tensor.detach()
        for dim, (a, b) in enumerate(zip(low, high, strict=True)):
            start = 0 if dim == 0 else a - part.offsets[dim]
            source = source.narrow(dim, start, b - a)
            destination = destination.narrow(dim, a - target.offsets[dim], b - a)
        self._copies.append((destination, source))


def _check_fit(target: Target, parts: Sequence[TensorRecord], path: str) -> None:
    dtype = str(target.tensor.dtype).removeprefix("torch.")
    if not parts:
        raise LayoutMismatch(f"{path} has no tensor {target.key!r}.", path=path, key=target.key)
    saved = parts[0]
    same_rank = len(target.offsets) == target.tensor.dim() == len(saved.global_shape)
    corners = zip(target.offsets, target.tensor.shape, saved.global_shape, strict=same_rank)
    fits = same_rank and all(offset + size <= whole for offset, size, whole in corners)
    if dtype != saved.dtype or not fits:
        raise LayoutMismatch(
            f"{target.key}: the model wants {dtype} {list(target.tensor.shape)} at {list(target.offsets)}, "
            f"{path} holds {saved.dtype} {list(saved.global_shape)}.",
            path=path,
            key=target.key,
        )


def overlap(
    offsets: Sequence[int], shape: Sequence[int], other_offsets: Sequence[int], other_shape: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Lowest and highest corner, in global coordinates, of what two regions share."""
    low = tuple(max(a, b) for a, b in zip(offsets, other_offsets, strict=True))
    ends = zip(offsets, shape, other_offsets, other_shape, strict=True)
    return low, tuple(min(a + n, b + m) for a, n, b, m in ends)
