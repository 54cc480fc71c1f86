# SPDX-License-Identifier: Apache-2.0
"""The envelope that makes raw tensor bytes in the middle of a file loadable by `torch.load`.

`torch.load` reads a ZIP archive of stored (uncompressed) members, one of which is the tensor's
storage.  An archive needs only a head before those bytes and a tail after them, so a tensor of
any size is wrapped without being copied or even read.  The storage's CRC is written as 0, which
`torch.load` does not look at (torch offers the same with ``set_crc32_options(False)``); our own
digests cover every byte of the file.
"""

from __future__ import annotations

import ctypes
import functools
import io
import math
import pickle
import struct
import sys
import zlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from resiliency.checkpoint.storage.memory import PAGE_BYTES

SourceT = TypeVar("SourceT")

_UTF8 = 0x0800
_NO_ZIP64 = 0xFFFFFFFF
_STORAGE_MEMBER = b"archive/data/0"
_STORAGE_ALIGNMENT = 64
#: Smaller tensors are copied into a chunk with their neighbours anyway: no page for each of them.
_PAGE_ALIGNED_FROM_BYTES = 1 << 20

#: dtypes that torch pickles as a typed storage; all others go as bytes with the dtype beside them.
_TYPED_STORAGE = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage,
    torch.int8: torch.CharStorage,
    torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
    torch.complex64: torch.ComplexFloatStorage,
    torch.complex128: torch.ComplexDoubleStorage,
}


@dataclass(frozen=True)
class Envelope:
    """Bytes to put right before and right after the bytes of a tensor."""

    head: bytes
    tail: bytes


def envelope(
    dtype: torch.dtype, shape: tuple[int, ...], *, position: int, alignment: int = 64, residue: int = 0
) -> Envelope:
    """Head and tail of a contiguous CPU tensor's record that starts at `position` of a file.

    Args:
        alignment: the tensor's bytes start where (file position - `residue`) is a multiple of it.
    """
    return _envelope(dtype, shape, (residue - position) % alignment, alignment)


# The same tensors are saved again and again, at the same positions.  One takes 1 KiB, and up to a page of
# padding.
@functools.lru_cache(maxsize=4096)
def _envelope(dtype: torch.dtype, shape: tuple[int, ...], residue: int, alignment: int) -> Envelope:
    # `residue` counts from where the record starts.
    size = math.prod(shape) * dtype.itemsize
    archive = _Archive()
    archive.add(b"archive/data.pkl", _pickled(dtype, shape))
    archive.add(b"archive/.format_version", b"1")
    archive.add(b"archive/.storage_alignment", str(_STORAGE_ALIGNMENT).encode())
    archive.add(b"archive/byteorder", sys.byteorder.encode())
    archive.add(b"archive/version", b"3\n")
    archive.open(_STORAGE_MEMBER, size, residue, alignment)
    return Envelope(head=bytes(archive.head), tail=archive.tail(size))


class RecordFile(Generic[SourceT]):
    """Plans a file of records, in order, without touching what goes into it.

    `parts` has what comes where: bytes, or what stands for the bytes of a tensor.
    """

    def __init__(self, end: int = 0) -> None:
        self.parts: list[tuple[int, bytes | SourceT]] = []
        self.end = end

    def put(self, data: bytes | SourceT, size_bytes: int) -> int:
        """Append bytes; returns their position."""
        position = self.end
        self.parts.append((position, data))
        self.end += size_bytes
        return position

    def put_record(
        self, dtype: torch.dtype, shape: tuple[int, ...], data: SourceT, residue: int
    ) -> tuple[int, tuple[int, int]]:
        """Append a tensor; returns the position of its bytes, and start and length of its record.

        Args:
            residue: a large tensor begins there within a page of the file, best as in memory.
        """
        size = math.prod(shape) * dtype.itemsize
        large = size >= _PAGE_ALIGNED_FROM_BYTES
        around = envelope(
            dtype,
            shape,
            position=self.end,
            alignment=PAGE_BYTES if large else _STORAGE_ALIGNMENT,
            residue=residue if large else 0,
        )
        start = self.put(around.head, len(around.head))
        position = self.put(data, size)
        self.put(around.tail, len(around.tail))
        return position, (start, self.end - start)


class _Archive:
    """Just enough of the ZIP format: stored members, and one last member whose bytes come later."""

    def __init__(self) -> None:
        self.head = bytearray()
        self._directory = bytearray()
        self._members = 0

    def add(self, name: bytes, data: bytes) -> None:
        self._enter(name, len(data), zlib.crc32(data), b"")
        self.head += data

    def open(self, name: bytes, size: int, residue: int, alignment: int) -> None:
        zip64 = struct.pack("<HHQQ", 1, 16, size, size) if size >= _NO_ZIP64 else b""
        # The padding is an extra field of its own (4 bytes of header), as torch pads.
        start = len(self.head) + 30 + len(name) + len(zip64) + 4
        padding = (residue - start) % alignment
        extra = zip64 + struct.pack("<2sH", b"FB", padding) + bytes(padding)
        self._enter(name, size, 0, extra)

    def tail(self, size: int) -> bytes:
        """Directory and end records, for a last member of `size` bytes."""
        start = len(self.head) + size
        length = len(self._directory)
        end64 = struct.pack(
            "<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, self._members, self._members, length, start
        )
        locator = struct.pack("<4sIQI", b"PK\6\7", 0, start + length, 1)
        end = struct.pack(
            "<4sHHHHIIH", b"PK\5\6", 0, 0, self._members, self._members, length, min(start, _NO_ZIP64), 0
        )
        return bytes(self._directory) + end64 + locator + end

    def _enter(self, name: bytes, size: int, crc: int, extra: bytes) -> None:
        offset = len(self.head)
        short = min(size, _NO_ZIP64)
        version = 45 if size >= _NO_ZIP64 else 20
        common = struct.pack("<HHHHIII", _UTF8, 0, 0, 0, crc, short, short)
        self.head += struct.pack("<4sH", b"PK\3\4", version) + common
        self.head += struct.pack("<HH", len(name), len(extra)) + name + extra
        # Offsets never need the long form: the head is small, and the long member is the last.
        zip64 = struct.pack("<HHQQ", 1, 16, size, size) if size >= _NO_ZIP64 else b""
        self._directory += struct.pack("<4sHH", b"PK\1\2", version, version) + common
        self._directory += struct.pack("<HHHHHII", len(name), len(zip64), 0, 0, 0, 0, offset) + name + zip64
        self._members += 1


class _StorageStub:
    """Stands for the storage while the tensor around it is pickled."""


class _TensorStub:
    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self._dtype = dtype
        self._shape = shape

    def __reduce__(self) -> tuple[object, ...]:
        stride, step = [], 1
        for size in reversed(self._shape):
            stride.append(step)
            step *= max(size, 1)
        common: tuple[object, ...] = (
            _StorageStub(),
            0,
            self._shape,
            tuple(reversed(stride)),
            False,
            OrderedDict(),
        )
        if self._dtype in _TYPED_STORAGE:
            return torch._utils._rebuild_tensor_v2, common
        return torch._utils._rebuild_tensor_v3, (*common, self._dtype)


class _TensorPickler(pickle.Pickler):
    """Pickles a tensor as torch does, without having one."""

    def __init__(self, file: io.BytesIO, dtype: torch.dtype, numel: int) -> None:
        super().__init__(file, protocol=2)
        typed = _TYPED_STORAGE.get(dtype)
        kind = typed or torch.UntypedStorage
        self._storage_id = ("storage", kind, "0", "cpu", numel if typed else numel * dtype.itemsize)

    def persistent_id(self, obj: object) -> object:
        return self._storage_id if isinstance(obj, _StorageStub) else None


def _pickled(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    file = io.BytesIO()
    _TensorPickler(file, dtype, math.prod(shape)).dump(_TensorStub(dtype, shape))
    return file.getvalue()


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, writable; the view keeps the tensor alive.

    Through the address, since numpy has no bfloat16 and torch works without numpy.
    """
    if tensor.nbytes == 0:
        return memoryview(bytearray())
    area = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    area.owner = tensor  # type: ignore[attr-defined]
    return memoryview(area).cast("B")
