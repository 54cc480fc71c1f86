# SPDX-License-Identifier: Apache-2.0
"""What the machine can do at best: copy memory, write a file and sync it, read a file.

Each limit moves as many bytes as a checkpoint, in the plainest way, between buffers that were touched
before.  Ranks measure theirs at the same time, since they save at the same time.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

_PIECE_BYTES = 8 << 20
#: Larger states are copied in rounds through a buffer of that size, far beyond any cache.
_BUFFER_BYTES = 512 << 20


def timed(action: Callable[[], object]) -> float:
    """Seconds that `action` takes."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


class Limits:
    """The limits for the `tensors` of one rank, measured with files in `directory`."""

    def __init__(self, tensors: Sequence[torch.Tensor], directory: Path) -> None:
        self.size_bytes = sum(tensor.nbytes for tensor in tensors)
        self._tensors = list(tensors)
        self._buffer = mmap.mmap(-1, _whole_pages(min(self.size_bytes, _BUFFER_BYTES)))
        self._view = memoryview(self._buffer)
        for start in range(0, len(self._view), mmap.PAGESIZE):  # touched, and no zeros to be optimised away
            self._view[start] = 1 + start // mmap.PAGESIZE % 255
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._buffer))
        self._path = directory / "raw"

    def copy(self, threads: int) -> float:
        """Copy all tensors into host memory, in pieces, with `threads`."""
        # Looked up anew: a saver may have moved tensors into shared memory.
        sources = [(tensor.data_ptr(), tensor.nbytes) for tensor in self._tensors]
        pieces = _cut(sources, len(self._view) - len(self._view) % _PIECE_BYTES or len(self._view))

        def work(number: int) -> None:
            for source, at, size in pieces[number::threads]:
                ctypes.memmove(self._address + at, source, size)

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(int, range(threads)))  # the threads exist
            return timed(lambda: list(pool.map(work, range(threads))))

    def write(self, writers: int, *, direct: bool) -> float:
        """Write as many bytes in order, `writers` files side by side, each synced at its end."""
        paths = [self._path.with_suffix(f".{number}") for number in range(writers)]
        for path in paths:  # to let go of the old file's blocks would cost a fifth of the time
            path.unlink(missing_ok=True)

        def work(path: Path) -> None:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | (os.O_DIRECT if direct else 0), 0o644)
            try:
                for offset, piece in self._pieces(writers):
                    os.pwrite(fd, piece, offset)
                os.fsync(fd)
            finally:
                os.close(fd)

        with ThreadPoolExecutor(writers) as pool:
            seconds = timed(lambda: list(pool.map(work, paths)))
        for path in paths[1:]:
            path.unlink()
        return seconds

    def read(self, *, direct: bool) -> float:
        """Read in order what `write` with one writer left, past or through an empty page cache."""
        path = self._path.with_suffix(".0")
        drop_from_cache(path)
        fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
        try:

            def work() -> None:
                for offset, piece in self._pieces(1):
                    os.preadv(fd, [piece], offset)

            return timed(work)
        finally:
            os.close(fd)

    def read_cached(self, threads: int) -> float:
        """Copy that file out of the page cache, with `threads`."""
        path = self._path.with_suffix(".0")
        read_all(path)
        fd = os.open(path, os.O_RDONLY)
        pieces = self._pieces(1)

        def work(number: int) -> None:
            for offset, piece in pieces[number::threads]:
                os.preadv(fd, [piece], offset)

        try:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(int, range(threads)))  # the threads exist
                return timed(lambda: list(pool.map(work, range(threads))))
        finally:
            os.close(fd)

    def _pieces(self, writers: int) -> list[tuple[int, memoryview]]:
        """One writer's share: where in the file, and what.  Whole pages, as direct writes need."""
        share = _whole_pages(self.size_bytes // writers)
        pieces = []
        for offset in range(0, share, _PIECE_BYTES):
            at = offset % max(len(self._view) - _PIECE_BYTES + 1, 1) // mmap.PAGESIZE * mmap.PAGESIZE
            length = min(_PIECE_BYTES, share - offset, len(self._view) - at)
            pieces.append((offset, self._view[at : at + length]))
        return pieces


def _whole_pages(size: int) -> int:
    return max(1, -(-size // mmap.PAGESIZE)) * mmap.PAGESIZE


def _cut(sources: Sequence[tuple[int, int]], room: int) -> list[tuple[int, int, int]]:
    """(source address, place in the buffer, size) of all pieces; the buffer is used over and over."""
    pieces, at = [], 0
    for address, size in sources:
        for start in range(0, size, _PIECE_BYTES):
            length = min(_PIECE_BYTES, size - start)
            if at + length > room:
                at = 0
            pieces.append((address + start, at, length))
            at += length
    return pieces


def read_all(path: Path) -> None:
    """Bring a file, or all files in a directory, into the page cache."""
    buffer = bytearray(_PIECE_BYTES)
    for each in path.rglob("*") if path.is_dir() else [path]:
        if each.is_file():
            with each.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass


def drop_from_cache(path: Path) -> None:
    """Take the pages of a file, or of all files in a directory, out of the page cache (after a sync)."""
    for file in path.rglob("*") if path.is_dir() else [path]:
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            try:
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
