# SPDX-License-Identifier: Apache-2.0
"""Carries out a load plan of `torch.distributed.checkpoint` on files with checksums.

An item that asks for a whole saved part, into contiguous host memory of the same dtype, is read in
place.  Of any other part only the rows that overlap are read, into scratch memory that is bounded,
and copied from there (to a GPU, or cut otherwise, or to another dtype, as torch does).
"""

from __future__ import annotations

import io
import math
import pickle
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from resiliency.checkpoint.format._compat import StorageInfo
from resiliency.checkpoint.format.dcp import stored_dtype
from resiliency.checkpoint.format.manifest import RankIndex, TensorRecord
from resiliency.checkpoint.format.marker import step_directory
from resiliency.checkpoint.format.reader import CheckpointReader
from resiliency.checkpoint.format.torch_record import memory_of
from resiliency.checkpoint.storage.chunked_file import FileRecord, Pace, Want, read_ranges
from resiliency.checkpoint.storage.interface import Storage
from resiliency.checkpoint.torch_dcp.files import rank_of
from resiliency.errors import CheckpointCorrupt, CheckpointIncomplete, LayoutMismatch

#: Scratch memory after which what was read is copied to its place.
SCRATCH_BYTES = 256 << 20


class ItemReader:
    """Reads the items of one rank's plan from one committed checkpoint."""

    def __init__(
        self,
        storage: Storage,
        reader: CheckpointReader,
        metadata: Metadata,
        threads: int,
        pace: Pace | None,
    ) -> None:
        self._storage = storage
        self._reader = reader
        self._places: dict[object, StorageInfo] = metadata.storage_data
        self._threads = threads
        self._pace = pace

    def size_bytes(self, plan: LoadPlan) -> int:
        """Of all saved parts that the plan touches."""
        return sum(self._places[index].length for index in {item.storage_index for item in plan.items})

    def read(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        """Fill every item.

        Raises:
            CheckpointCorrupt: bytes differ; names file, key, offset and both digests.
            CheckpointIncomplete: a file or an index is missing.
            LayoutMismatch: a tensor of the state does not fit what the plan says.
        """
        by_file: dict[str, list[tuple[StorageInfo, ReadItem]]] = defaultdict(list)
        for item in plan.items:
            place = self._places[item.storage_index]
            by_file[place.relative_path].append((place, item))
        for name, items in by_file.items():
            self._read_file(name, sorted(items, key=lambda pair: pair[0].offset), planner)

    def _read_file(
        self, name: str, items: Sequence[tuple[StorageInfo, ReadItem]], planner: LoadPlanner
    ) -> None:
        index, file = self._writer_of(name)
        parts = {
            (part.key, part.offsets): part
            for part in index.tensors
            if index.path_of(part.file) == name and part.record is not None
        }
        batch = _Batch(self._reader.path)
        for place, item in items:
            offsets = item.storage_index.offset
            part = parts.get((item.storage_index.fqn, tuple(offsets))) if offsets is not None else None
            batch.add(place, item, part, planner)
            if batch.scratch_bytes >= SCRATCH_BYTES:
                self._run(batch, file)
                batch = _Batch(self._reader.path)
        self._run(batch, file)

    def _run(self, batch: _Batch, file: FileRecord) -> None:
        read_ranges(self._storage, file, batch.wants, threads=self._threads, pace=self._pace)
        for place in batch.placements:
            place()

    def _writer_of(self, name: str) -> tuple[RankIndex, FileRecord]:
        """The index that lists a file; of one rank only, so that no rank reads all indexes."""
        rank = rank_of(name)
        if rank is not None:
            index = self._reader.index(rank)
            for record in index.files:
                if record.name == name:
                    return index, record.inside(step_directory(self._reader.manifest.step))
        raise CheckpointIncomplete(
            f"{self._reader.path}: no rank lists the file {name!r}.", path=self._reader.path
        )


class _Batch:
    """Ranges to read at once, and what to do with them afterwards."""

    def __init__(self, path: str) -> None:
        self.wants: list[Want] = []
        self.placements: list[Callable[[], None]] = []
        self.scratch_bytes = 0
        self._path = path

    def add(
        self, place: StorageInfo, item: ReadItem, part: TensorRecord | None, planner: LoadPlanner
    ) -> None:
        key = item.storage_index.fqn
        if item.type is LoadItemType.BYTE_IO:
            content = self._scratch(place, key)
            self.placements.append(lambda: planner.load_bytes(item, io.BytesIO(content)))
            return
        target = planner.resolve_tensor(item)
        if target.shape != item.lengths:
            raise LayoutMismatch(
                f"{key}: the plan reads {list(item.lengths)}, the state offers {list(target.shape)}.", key=key
            )
        if part is None:
            record = self._scratch(place, key)
            self.placements.append(lambda: self._place_record(record, item, target, planner))
        elif _fits(target, part):
            self.wants.append(Want(part.position, memory_of(target.detach()), key))
            self.placements.append(partial(planner.commit_tensor, item, target.detach()))
        else:
            source = self._rows(item, part)
            self.placements.append(lambda: _copy(source, item, target, planner))

    def _scratch(self, place: StorageInfo, key: str) -> bytearray:
        content = bytearray(place.length)
        self.wants.append(Want(place.offset, memoryview(content), key))
        self.scratch_bytes += place.length
        return content

    def _rows(self, item: ReadItem, part: TensorRecord) -> torch.Tensor:
        """Memory for the rows of a part that hold the region, narrowed to the region."""
        dtype = stored_dtype(part.dtype)
        first, rows = (item.storage_offsets[0], item.lengths[0]) if part.shape else (0, 1)
        row_shape = part.shape[1:]
        scratch = torch.empty((rows, *row_shape) if part.shape else (), dtype=dtype)
        position = part.position + first * math.prod(row_shape) * dtype.itemsize
        self.wants.append(Want(position, memory_of(scratch), part.key))
        self.scratch_bytes += scratch.nbytes
        for dim in range(1, len(part.shape)):
            scratch = scratch.narrow(dim, item.storage_offsets[dim], item.lengths[dim])
        return scratch

    def _place_record(
        self, record: bytearray, item: ReadItem, target: torch.Tensor, planner: LoadPlanner
    ) -> None:
        key = item.storage_index.fqn
        try:
            tensor = torch.load(io.BytesIO(record), map_location="cpu", weights_only=True)
        except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
            raise CheckpointCorrupt(
                f"{self._path}: {key} is as it was written, and torch cannot load it: {error}.",
                hint="Was it written by another release of torch?",
                path=self._path,
                key=key,
            ) from error
        for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            if tensor.shape[dim] != length:
                tensor = tensor.narrow(dim, start, length)
        _copy(tensor, item, target, planner)


def _fits(target: torch.Tensor, part: TensorRecord) -> bool:
    """Whether the bytes of a whole part can go straight into `target`."""
    return (
        target.device.type == "cpu"
        and type(target.detach()) is torch.Tensor
        and target.layout is torch.strided
        and not target.is_quantized
        and not target.is_conj()
        and not target.is_neg()
        and tuple(target.shape) == part.shape
        and target.dtype is stored_dtype(part.dtype)
        and target.is_contiguous()
    )


def _copy(source: torch.Tensor, item: ReadItem, target: torch.Tensor, planner: LoadPlanner) -> None:
    destination = target.detach()
    destination.copy_(source)
    planner.commit_tensor(item, destination)
