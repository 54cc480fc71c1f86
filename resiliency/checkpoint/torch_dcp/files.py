# SPDX-License-Identifier: Apache-2.0
"""The files of one rank of a `torch.distributed.checkpoint` save plan.

    step=7/save=5f0c.../__3_0.distcp      rank 3's items, each a record that `torch.load` reads
    step=7/save=5f0c.../__3_1.distcp      more of them: a file ends once it holds `FILE_BYTES`

Tensors in host memory go from there to the device without a copy.  Others (of a GPU, strided) are
copied first, and the memory for that is bounded by the size of one file and one tensor.
"""

from __future__ import annotations

import io
from collections.abc import Hashable, Iterator

import torch
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from resiliency.checkpoint.format._compat import StorageInfo
from resiliency.checkpoint.format.manifest import BlobRecord, TensorRecord, data_directory
from resiliency.checkpoint.format.torch_record import RecordFile, memory_of
from resiliency.checkpoint.storage.chunked_file import FilePiece, FileRecord, write_shard_file
from resiliency.checkpoint.storage.interface import Buffer, Storage
from resiliency.checkpoint.storage.memory import PAGE_BYTES, address_of
from resiliency.errors import InternalError

#: `Manifest.format` of what these files belong to: torch's own states, without slots of the engine.
DCP_STATE_FORMAT = "dcp-state"
FILE_BYTES = 1 << 30

Path = tuple[str | int, ...]


def file_name(rank: int, number: int) -> str:
    """As torch names its files, and as `rank_of` reads the rank."""
    return f"__{rank}_{number}.distcp"


def rank_of(name: str) -> int | None:
    """Rank that wrote a file of this name; None for other names."""
    name = name.rpartition("/")[2]
    head = name.removeprefix("__").partition("_")[0]
    return int(head) if name.startswith("__") and head.isdecimal() else None


class PlannedFiles:
    """Writes the items of a plan and remembers where each is."""

    def __init__(self, storage: Storage, directory: str, folder: str, *, rank: int, threads: int) -> None:
        self.records: list[FileRecord] = []
        self.tensors: list[TensorRecord] = []
        self.blobs: list[BlobRecord] = []
        self.results: list[WriteResult] = []
        self._storage = storage
        self._directory = directory
        self._folder = folder
        self._rank = rank
        self._threads = threads

    def write(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Write and sync all items; their names become durable with the directory.

        Raises:
            CheckpointWriteFailed: the storage refused.
        """
        paths = plan.planner_data if isinstance(plan.planner_data, dict) else {}
        file = self._new_file()
        for item in _tensors_last(plan):
            if file.end >= FILE_BYTES:
                self._finish(file)
                file = self._new_file()
            path = tuple(paths.get(item.index.fqn, (item.index.fqn,)))
            data = planner.resolve_data(item)
            if isinstance(data, torch.Tensor):
                file.add_tensor(item, path, data.detach())
            else:
                file.add_bytes(item, path, data)
        if file.parts:
            self._finish(file)

    def _new_file(self) -> _ItemFile:
        return _ItemFile(file_name(self._rank, len(self.records)), self._folder)

    def _finish(self, file: _ItemFile) -> None:
        pieces = [FilePiece(position, data) for position, data in file.parts]
        place = data_directory(self._directory, self._folder)
        record = write_shard_file(self._storage, place, file.name, pieces, file.end, threads=self._threads)
        self.records.append(record)
        self.tensors += file.tensors
        self.blobs += file.blobs
        self.results += file.results


def _tensors_last(plan: SavePlan) -> Iterator[WriteItem]:
    yield from (item for item in plan.items if item.type is WriteItemType.BYTE_IO)
    yield from (item for item in plan.items if item.type is not WriteItemType.BYTE_IO)


class _ItemFile(RecordFile[Buffer]):
    """What comes where in one file."""

    def __init__(self, name: str, folder: str) -> None:
        super().__init__()
        self.name = name
        self._folder = folder
        self.tensors: list[TensorRecord] = []
        self.blobs: list[BlobRecord] = []
        self.results: list[WriteResult] = []
        # Tied tensors share a record.  The tensors are kept: freed memory could be given out again.
        self._written: dict[Hashable, tuple[torch.Tensor, int, tuple[int, int]]] = {}

    def add_bytes(self, item: WriteItem, path: Path, data: io.BytesIO) -> None:
        content = data.getbuffer()
        position = self.put(content, content.nbytes)
        self._note_blob(item, path, position, content.nbytes)

    def add_tensor(self, item: WriteItem, path: Path, tensor: torch.Tensor) -> None:
        if item.tensor_data is None:
            raise InternalError(f"the save plan has a tensor without its place: {item.index}.")
        place = item.tensor_data.chunk
        if not _is_plain(tensor) or tensor.shape != place.sizes:
            # Quantised, sparse, or made anew by a planner: a record that torch alone understands.
            file = io.BytesIO()
            torch.save(tensor.cpu().clone(), file)  # a view would bring all memory behind it
            self.add_bytes(item, path, file)
            return
        position, record = self._put_tensor(tensor)
        self.tensors.append(
            TensorRecord(
                key=item.index.fqn,
                dtype=str(tensor.dtype).removeprefix("torch."),
                global_shape=tuple(item.tensor_data.size),
                offsets=tuple(place.offsets),
                shape=tuple(tensor.shape),
                file=self.name,
                position=position,
                size_bytes=tensor.nbytes,
                path=path,
                record=record,
            )
        )
        self._note(item, *record)

    def _put_tensor(self, tensor: torch.Tensor) -> tuple[int, tuple[int, int]]:
        bits = (tensor.dtype, tensor.is_conj(), tensor.is_neg())
        key = (tensor.device, tensor.data_ptr(), *bits, tensor.shape, tensor.stride())
        if key in self._written:
            return self._written[key][1:]
        data = memory_of(tensor.cpu().resolve_conj().resolve_neg().contiguous())
        residue = address_of(data) % PAGE_BYTES
        position, record = self.put_record(tensor.dtype, tuple(tensor.shape), data, residue)
        self._written[key] = (tensor, position, record)
        return position, record

    def _note_blob(self, item: WriteItem, path: Path, position: int, size: int) -> None:
        self.blobs.append(
            BlobRecord(key=item.index.fqn, file=self.name, position=position, size_bytes=size, path=path)
        )
        self._note(item, position, size)

    def _note(self, item: WriteItem, start: int, length: int) -> None:
        info = StorageInfo(data_directory(self._folder, self.name), start, length)
        self.results.append(WriteResult(index=item.index, size_in_bytes=length, storage_data=info))


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the bytes, dtype and shape say all."""
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_quantized
