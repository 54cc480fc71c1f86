# SPDX-License-Identifier: Apache-2.0
"""Format of the persistent tier: what stock `torch.distributed.checkpoint.load` reads.

    step=7/.metadata              torch's own: keys, shapes, which file holds which part
    step=7/manifest.json          ours, ignored by stock readers
    step=7/save=5f0c.../            the folder of this save, see `resiliency.checkpoint.format.manifest`
      __0_0.distcp                rank 0's parts, each a record that `torch.load` reads; then its
                                  layout, and what is no tensor
      rank=0.json                 ours

A machine without this library opens it, at any world size.  With it, every byte is verified and
whole ranges go from the device into place: the files are laid out so that a large tensor begins
at the same place within a page as in the slot, and is written from there without a copy.
"""

from __future__ import annotations

import hashlib
import heapq
import io
import itertools
import json
import logging
import math
import pickle
from collections.abc import Callable, Iterable, Sequence

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from resiliency.checkpoint.format._compat import DCP_VERSION, StorageInfo
from resiliency.checkpoint.format.index_tables import TableRows
from resiliency.checkpoint.format.local import LAYOUT_BLOB, add_blobs
from resiliency.checkpoint.format.manifest import (
    BlobRecord,
    RankIndex,
    TensorRecord,
    data_directory,
    table_digest,
)
from resiliency.checkpoint.format.shared_names import SharedNames, mesh_note, meshes_alike
from resiliency.checkpoint.format.torch_record import RecordFile, memory_of
from resiliency.checkpoint.format.writers import shared_entries, writers_among
from resiliency.checkpoint.state.layout import Shard, StateLayout, TensorEntry, TensorView, contiguous_stride
from resiliency.checkpoint.state.mesh_contents import checksums, within_others
from resiliency.checkpoint.state.rank_sets import mesh_of
from resiliency.checkpoint.storage.chunked_file import (
    DEFAULT_THREADS,
    FilePiece,
    FileRecord,
    Pace,
    Want,
    read_ranges,
    write_shard_file,
)
from resiliency.checkpoint.storage.interface import Buffer, Storage
from resiliency.checkpoint.storage.memory import PAGE_BYTES
from resiliency.checkpoint.threads import map_parallel
from resiliency.errors import CheckpointIncomplete, LayoutMismatch
from resiliency.runtime import no_garbage_collection

logger = logging.getLogger(__name__)

METADATA = ".metadata"
#: More ranks than save from one host; their plans are kept.
_MOST_PLANS = 32

Path = tuple[str | int, ...]
#: Gives the leaves of a shard's state that are no tensors, each with its place in the tree.
NonTensorValues = Callable[[Shard], Iterable[tuple[Path, object]]]
#: Gives the metadata of a checkpoint from all its indexes: of their ranks, tensors and leaves alone, and of
#: which meshes hold the same.
Describe = Callable[[Sequence[RankIndex]], Metadata]
#: Gives the keys and bytes of a shard's objects that stock readers look up by name, from every rank.
Objects = Callable[[Shard], Iterable[tuple[str, bytes]]]


def no_values(shard: Shard) -> Iterable[tuple[Path, object]]:
    """The default: plain values are read by this library alone."""
    return ()


def no_objects(shard: Shard) -> Iterable[tuple[str, bytes]]:
    """The default: no rank adds an object of its own."""
    return ()


class DcpFormat:
    """Writes the persistent tier.

    Of identical copies (`TensorEntry.replica_id`) only number 0 is written.

    What depends on the layout alone is kept from one save to the next: use one object for all of them.

    Args:
        spread_unsharded: tensors that no rank shards are the same on all ranks (plain data
            parallelism): each is written by one of up to 64 ranks, and the bytes are balanced.  Ranks
            that have different ones are refused when the checkpoint is sealed.  Without it every rank
            writes its own, since they might differ.
        values: values that stock readers shall find as well; rank 0's are written.
        objects: records of `torch.save` that stock readers shall find as well; of all ranks.
        threads: writes per rank that are under way at a time.
        pace: called before each chunk with its size, see `resiliency.checkpoint.storage.chunked_file.Pace`.
        extra_files: files of other readers to put beside (name to bytes), such as Megatron's.
        describe: gives what is written as `.metadata`; called anew only when its answer may differ.
    """

    name = "dcp"

    def __init__(
        self,
        *,
        spread_unsharded: bool = False,
        values: NonTensorValues = no_values,
        objects: Objects = no_objects,
        threads: int = DEFAULT_THREADS,
        pace: Pace | None = None,
        extra_files: dict[str, bytes] | None = None,
        describe: Describe | None = None,
    ) -> None:
        self._spread = spread_unsharded
        self._values = values
        self._objects = objects
        self._threads = threads
        self._pace = pace
        self._extra_files = dict(extra_files or {})
        self._describe = describe or dcp_metadata
        self._plans: dict[int, _FilePlan] = {}
        self._described: tuple[object, list[bytes]] | None = None

    def write_rank(
        self, storage: Storage, directory: str, shard: Shard, *, run_id: str, save_id: str
    ) -> RankIndex:
        plan = self._plan(shard)
        content = _Values(plan)
        for path, value in self._values(shard) if shard.rank == 0 else ():
            content.add_value(path, value)
        for key, data in self._objects(shard):
            content.add_object(key, data, (key,))
        pieces = [FilePiece(position, _source(shard, source)) for position, source in plan.parts]
        pieces += [FilePiece(position, data) for position, data in content.parts]
        blobs = add_blobs(pieces, plan.file, shard)
        file = write_shard_file(
            storage,
            directory,
            plan.file,
            pieces,
            pieces[-1].end,
            threads=self._threads,
            pace=self._pace,
        )
        found = checksums(shard, plan.meshes)
        notes = (mesh_note(mesh, checksum, plan.file) for mesh, checksum in found.items())
        return RankIndex(
            rank=shard.rank,
            step=shard.step,
            run_id=run_id,
            save_id=save_id,
            fingerprint=shard.layout.fingerprint,
            files=(file,),
            tensors=plan.records,
            blobs=(*content.blobs, *blobs, *plan.notes, *notes),
            shared=plan.shared,
        )

    def _plan(self, shard: Shard) -> _FilePlan:
        """Of this very layout, which is the same object as long as the structure of the state holds."""
        plan = self._plans.get(shard.rank)
        if plan is None or plan.layout is not shard.layout or plan.world_size != shard.world_size:
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            spread = _Spread(shard) if self._spread else None
            plan = self._plans[shard.rank] = _FilePlan(shard, spread)
        return plan

    def seal(self, storage: Storage, directory: str, indexes: Sequence[RankIndex]) -> Sequence[FileRecord]:
        """Write `.metadata` from all indexes, and the extra files, into the folder of the save.

        Raises:
            LayoutMismatch: ranks were to have the same tensors and do not, or parts of tensors overlap.
            CheckpointIncomplete: the parts of a tensor do not add up to the whole.
        """
        if self._spread:
            _check_alike(storage, directory, indexes)
        place = data_directory(directory, indexes[0].folder)
        extra = [write_whole_file(storage, place, name, data) for name, data in self._extra_files.items()]
        folder = indexes[0].folder.encode()
        parts = [part for text in self._metadata(indexes) for part in (text, folder)][:-1]
        ends = list(itertools.accumulate(map(len, parts)))
        pieces = [FilePiece(end - len(part), part) for end, part in zip(ends, parts, strict=True)]
        return [*extra, write_shard_file(storage, place, METADATA, pieces, ends[-1])]

    def _metadata(self, indexes: Sequence[RankIndex]) -> list[bytes]:
        """What stands before, between and behind the names of the save's folder: those differ from save to
        save, and are equally long."""
        # By checksums: the tables of other ranks are parsed only when one of them changed.
        of = [
            (index.rank, table_digest(index, "tensors"), [blob for blob in index.blobs if blob.path])
            for index in indexes
        ]
        question = of, meshes_alike(indexes)
        if self._described is not None and self._described[0] == question:
            return self._described[1]
        with no_garbage_collection():  # of millions of records, none refers to itself
            map_parallel(RankIndex.load, indexes, "resiliency-tables")
            content = pickle.dumps(self._describe(indexes))
        folder = indexes[0].folder.encode()
        texts = content.split(folder) if folder else [content]
        # 150 bytes for each tensor of each rank: 3 GB at ten thousand ranks, which took half an hour to make.
        self._described = (question, texts) if folder else None
        return texts


def write_whole_file(storage: Storage, directory: str, name: str, data: bytes) -> FileRecord:
    """A small file of a checkpoint, durable and with its checksums."""
    return write_shard_file(storage, directory, name, [FilePiece(0, data)], len(data))


def _is_block(entry: TensorEntry) -> bool:
    """Whether torch can place the part: a flattened range of a matrix, say, it cannot."""
    return len(entry.shape) == len(entry.global_shape) == len(entry.global_offset)


class _Spread:
    """Who writes which of the entries that all ranks have whole, by a rule that all ranks compute alike.

    It holds as long as they have the same ones, which `digest` is for.  Which of the copies an entry is
    (`TensorEntry.replica_id`) does not count.
    """

    def __init__(self, shard: Shard) -> None:
        self.keys = {entry.key for entry in shard.layout.entries if _is_everywhere(entry)}
        self.others: set[str] = set()
        loads = [(0, rank) for rank in writers_among(shard.world_size)]
        by_key = shard.layout.by_key
        for entry in sorted((by_key[key] for key in self.keys), key=lambda e: (-e.size_bytes, e.key)):
            load, rank = heapq.heappop(loads)
            heapq.heappush(loads, (load + entry.size_bytes, rank))
            if rank != shard.rank:
                self.others.add(entry.key)
        self.digest = hashlib.blake2b(
            json.dumps(_everywhere(shard.layout)).encode(), digest_size=16
        ).hexdigest()


def _is_everywhere(entry: TensorEntry) -> bool:
    return not entry.is_sharded and not mesh_of(entry.attributes)


def _everywhere(layout: StateLayout) -> list[tuple[str, str, tuple[int, ...], str]]:
    """Key, dtype, shape and base of what all ranks have whole."""
    entries = [entry for entry in layout.entries if _is_everywhere(entry)]
    keys = {entry.key for entry in entries}
    found = [(entry.key, entry.dtype, entry.shape, "") for entry in entries]
    found += [(view.key, view.dtype, view.shape, view.base) for view in layout.views if view.base in keys]
    return sorted(found)


#: Begins the name of an empty blob, which ends with the digest of what all ranks have whole.
_ALIKE = "alike:"


def _check_alike(storage: Storage, directory: str, indexes: Sequence[RankIndex]) -> None:
    """Raise LayoutMismatch unless all ranks have the same whole tensors: else some are written by none."""
    digests = {
        index.rank: next((blob.key for blob in index.blobs if blob.key.startswith(_ALIKE)), "")
        for index in indexes
    }
    first = indexes[0]
    other = next((index for index in indexes if digests[index.rank] != digests[first.rank]), None)
    if other is None:
        return
    mine, theirs = (set(_everywhere(_layout_of(storage, directory, each))) for each in (first, other))
    key, dtype, shape, _ = min(mine ^ theirs)
    has, lacks = (first, other) if (key, dtype, shape) in {item[:3] for item in mine} else (other, first)
    raise LayoutMismatch(
        f"{key}: rank {has.rank} has a {dtype} tensor {list(shape)} that rank {lacks.rank} has not, or"
        f" not alike ({len(mine ^ theirs)} differences).  With replicated=True each tensor is written by one"
        " rank, so all must have the same ones.",
        hint="Give all ranks the tensor, save it as bytes or a list, or make the Checkpointer without"
        " replicated=True.",
        key=key,
        rank=has.rank,
    )


def _layout_of(storage: Storage, directory: str, index: RankIndex) -> StateLayout:
    blob = index.blob(LAYOUT_BLOB)
    name = "" if blob is None else index.path_of(blob.file)
    file = next((file for file in index.files if file.name == name), None)
    if blob is None or file is None:
        raise CheckpointIncomplete(f"rank {index.rank} wrote no layout.", rank=index.rank)
    content = bytearray(blob.size_bytes)
    wanted = Want(blob.position, memoryview(content), blob.key)
    read_ranges(storage, file.inside(directory), [wanted], threads=1)
    return StateLayout.from_json(bytes(content))


class _FilePlan(RecordFile["TensorEntry | TensorView"]):
    """What of one rank's tensors comes where in its file.  Of the layout alone: it holds no bytes of them."""

    def __init__(self, shard: Shard, spread: _Spread | None) -> None:
        super().__init__()
        self.file = f"__{shard.rank}_0.distcp"
        self.layout = shard.layout
        self.world_size = shard.world_size
        self._tensors: list[TensorRecord] = []
        _warn_of_flat(shard)
        shared, others = (spread.keys, spread.others) if spread else (set(), set())
        #: What several ranks hold, this one among them.  The owner of a part cannot tell whether others do.
        held = (e for e in self.layout.entries if e.key in shared or e.replica_id != 0)
        self.shared = TableRows(shared_entries(self.layout, held))
        for entry in self.layout.entries:
            if entry.key not in others if entry.key in shared else entry.replica_id == 0:
                self._add_entry(entry)
        for view in self.layout.views:
            if view.base not in others if view.base in shared else view.replica_id == 0:
                self._add_view(view)
        self.records = TableRows(self._tensors)
        self.meshes = within_others(self.layout)
        self.notes: tuple[BlobRecord, ...] = ()
        if spread is not None:
            self.notes = (BlobRecord(key=_ALIKE + spread.digest, file=self.file, position=0, size_bytes=0),)

    def _add_entry(self, entry: TensorEntry) -> None:
        residue = entry.offset_bytes % PAGE_BYTES
        hidden = entry.is_base or not _is_block(entry)
        if hidden:
            # Only this library reads it; the views of a base are written out for all others.
            self.end += (residue - self.end) % PAGE_BYTES
            position, record = self.put(entry, entry.size_bytes), None
        else:
            position, record = self.put_record(stored_dtype(entry.dtype), entry.shape, entry, residue)
        self._note(entry, position, entry.size_bytes, record, hidden=hidden)

    def _add_view(self, view: TensorView) -> None:
        """A tied tensor shares its record; any other window gets bytes of its own."""
        twin = next((t for t in self._tensors if t.record and self._is_whole(view, t)), None)
        if twin is not None:
            self._note(view, twin.position, twin.size_bytes, twin.record)
            return
        dtype = stored_dtype(view.dtype)
        position, record = self.put_record(dtype, view.shape, view, 0)
        self._note(view, position, math.prod(view.shape) * dtype.itemsize, record)

    def _is_whole(self, view: TensorView, twin: TensorRecord) -> bool:
        base = self.layout.by_key[view.base]
        return (
            not base.is_base
            and twin.key == self.layout.disk_names[base.key]
            and twin.offsets == base.global_offset
            and (view.dtype, view.shape, view.offset_bytes) == (base.dtype, base.shape, 0)
            and view.stride == contiguous_stride(view.shape)
        )

    def _note(
        self,
        item: TensorEntry | TensorView,
        position: int,
        size: int,
        record: tuple[int, int] | None,
        *,
        hidden: bool = False,
    ) -> None:
        self._tensors.append(
            TensorRecord(
                key=self.layout.disk_names[item.key],
                dtype=item.dtype,
                global_shape=item.global_shape,
                offsets=item.global_offset,
                shape=item.shape,
                file=self.file,
                position=position,
                size_bytes=size,
                path=item.path if item.name == item.key else (item.name,),
                record=record,
                hidden=hidden,
                attributes=item.attributes,
            )
        )


def _warn_of_flat(shard: Shard) -> None:
    flat = [entry.key for entry in shard.layout.entries if not _is_block(entry)]
    if flat:
        logger.warning(
            "rank %d: %d tensors are no blocks of their global tensors (first: %s); "
            "stock readers will not find them",
            shard.rank,
            len(flat),
            flat[0],
        )


class _Values(RecordFile[bytes]):
    """What follows the tensors in the file, another at each save: leaves and objects."""

    def __init__(self, plan: _FilePlan) -> None:
        super().__init__(plan.end)
        self.blobs: list[BlobRecord] = []
        self._file = plan.file

    def add_value(self, path: Path, value: object) -> None:
        file = io.BytesIO()
        torch.save(value, file)
        self.add_object(".".join(str(part) for part in path), file.getvalue(), path)

    def add_object(self, key: str, data: bytes, path: Path) -> None:
        position = self.put(data, len(data))
        self.blobs.append(
            BlobRecord(key=key, file=self._file, position=position, size_bytes=len(data), path=path)
        )


_QUANTIZED = {"qint8": torch.int8, "quint8": torch.uint8, "qint32": torch.int32}


def stored_dtype(dtype: str) -> torch.dtype:
    """The dtype that stock readers see: quantized tensors appear as their integers."""
    found: torch.dtype = _QUANTIZED.get(dtype) or getattr(torch, dtype)
    return found


def _source(shard: Shard, source: bytes | TensorEntry | TensorView) -> Buffer:
    if isinstance(source, bytes):
        return source
    return shard.read(source) if isinstance(source, TensorEntry) else _window(shard, source)


def _window(shard: Shard, view: TensorView) -> Buffer:
    """The bytes of a view in row-major order: a slice of the slot, or else a copy."""
    base = shard.layout.by_key[view.base]
    dtype = stored_dtype(view.dtype)
    start = base.offset_bytes + view.offset_bytes
    size = math.prod(view.shape) * dtype.itemsize
    if size == 0 or view.stride == contiguous_stride(view.shape):
        return shard.buffer[start : start + size]
    last = sum((n - 1) * s for n, s in zip(view.shape, view.stride, strict=True))
    memory = bytearray(shard.buffer[start : start + (last + 1) * dtype.itemsize])
    # As bytes, since not every dtype can be copied strided.
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    strides = (*(stride * dtype.itemsize for stride in view.stride), 1)
    dense = flat.as_strided((*view.shape, dtype.itemsize), strides).contiguous()
    return memory_of(dense)


def dcp_metadata(indexes: Sequence[RankIndex]) -> Metadata:
    """What torch's readers ask for, from what the ranks wrote.

    Raises:
        LayoutMismatch: two ranks disagree about dtype or global shape of a sharded tensor, or their parts of
            it overlap.
        CheckpointIncomplete: the parts of a tensor do not add up to the whole.
    """
    tensors: dict[str, TensorStorageMetadata] = {}
    names = SharedNames(indexes)
    merged = Metadata(state_dict_metadata={}, planner_data={}, storage_data={}, version=DCP_VERSION)
    for index in indexes:
        for record in index.tensors:
            if not record.hidden:
                _add_part(merged, tensors, record, index, names.prefix(index.rank, record))
    for writer, blob in ((index, blob) for index in indexes for blob in index.blobs if blob.path):
        if blob.key in tensors:
            logger.warning("%s is a tensor and a value: stock readers will not find the value", blob.key)
            continue
        merged.state_dict_metadata[blob.key] = BytesStorageMetadata()
        merged.planner_data[blob.key] = blob.path
        place = StorageInfo(writer.path_of(blob.file), blob.position, blob.size_bytes)
        merged.storage_data[MetadataIndex(blob.key)] = place
    for key, tensor in tensors.items():
        _check_whole(key, tensor)
    merged.state_dict_metadata.update(tensors)
    merged.storage_meta = StorageMeta()
    return merged


def _add_part(
    merged: Metadata,
    tensors: dict[str, TensorStorageMetadata],
    record: TensorRecord,
    writer: RankIndex,
    prefix: str,
) -> None:
    dtype, size = stored_dtype(record.dtype), torch.Size(record.global_shape)
    key = f"{prefix}.{record.key}" if prefix else record.key
    tensor = tensors.setdefault(
        key, TensorStorageMetadata(properties=TensorProperties(dtype=dtype), size=size, chunks=[])
    )
    if tensor.properties.dtype != dtype or tensor.size != size:
        raise LayoutMismatch(
            f"{record.key}: rank {writer.rank} has {dtype} {list(size)}, a lower rank has "
            f"{tensor.properties.dtype} {list(tensor.size)}.",
            hint="Ranks name different tensors alike, or were started with different settings.",
            key=record.key,
            rank=writer.rank,
        )
    index = MetadataIndex(key, record.offsets, len(tensor.chunks))
    if index in merged.storage_data or record.record is None:
        return  # a copy that another rank wrote as well
    tensor.chunks.append(
        ChunkStorageMetadata(offsets=torch.Size(record.offsets), sizes=torch.Size(record.shape))
    )
    merged.planner_data[key] = (prefix, *record.path) if prefix else record.path
    merged.storage_data[index] = StorageInfo(writer.path_of(record.file), *record.record)


def _check_whole(key: str, tensor: TensorStorageMetadata) -> None:
    held = sum(math.prod(chunk.sizes) for chunk in tensor.chunks)
    if held < math.prod(tensor.size):
        raise CheckpointIncomplete(
            f"{key}: the ranks wrote {held} of {math.prod(tensor.size)} elements of {list(tensor.size)}.",
            hint="Does exactly one rank hold each part with replica_id 0?",
            key=key,
        )
    if held > math.prod(tensor.size):
        raise LayoutMismatch(
            f"{key}: the ranks wrote {held} elements of {list(tensor.size)}: parts of it overlap.",
            hint="Ranks name different tensors alike: give those of each rank names of their own.",
            key=key,
        )
