# SPDX-License-Identifier: Apache-2.0
"""Memory as addresses and pages: aligned for unbuffered I/O, copied without the interpreter, faulted in."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import mmap

from resiliency.checkpoint.threads import run_parallel
from resiliency.errors import ResourceShortage

#: Alignment of address, offset and length that unbuffered I/O asks for on every common device.
PAGE_BYTES = 4096
#: What one call maps.  Meanwhile other threads of the process cannot map memory: 1 ms, or 20 ms where a
#: virtual machine has not touched it before.  After each call a thread waits for the interpreter's lock.
_POPULATE_BYTES = 4 << 20
_MADV_POPULATE_WRITE = 23  # Linux 5.14


class _PyBuffer(ctypes.Structure):
    """Python's Py_buffer: the one way to the address of a read-only buffer without numpy."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


def address_of(buffer: memoryview) -> int:
    """Address of the first byte; valid while the buffer is."""
    info = _PyBuffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(buffer), ctypes.byref(info), 0)
    try:
        return int(info.buf or 0)
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(info))


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy without holding the interpreter, so that threads copy side by side."""
    if target.readonly or target.nbytes != source.nbytes:
        target[:] = source  # raises what Python raises for it
    elif target.nbytes:
        ctypes.memmove(address_of(target), address_of(source), target.nbytes)


def page_memory(size_bytes: int, *, large: bool = False) -> memoryview:
    """New memory of this process that begins on a page, so that unbuffered I/O can fill it.

    Args:
        large: all of it will be used at once: ask for huge pages.  Faulting in a gigabyte by small ones
            takes as long as reading it from a fast disk.
    Raises:
        ResourceShortage: this process may have no more memory.
    """
    try:
        # Private: what `mmap` gives by default is shared memory, whose pages cost twice as much.
        memory = mmap.mmap(-1, max(size_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise ResourceShortage(
            f"cannot map {size_bytes} bytes of memory: {error.strerror}.",
            hint="See the memory limit of the container, ulimit -v and vm.overcommit_memory.",
            errno=error.errno or errno.ENOMEM,
        ) from error
    if large and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


def is_page_aligned(buffer: memoryview, offset: int) -> bool:
    """Whether unbuffered I/O can move `buffer` to or from `offset` of a file."""
    if offset % PAGE_BYTES or buffer.nbytes % PAGE_BYTES or not buffer.nbytes:
        return False
    return address_of(buffer) % PAGE_BYTES == 0


def populate(memory: memoryview, *, threads: int = 1) -> bool:
    """Take the page faults of `memory` now; False where the kernel cannot, and the first copy takes them.

    Its content stays.  Not by MAP_POPULATE: Python holds its lock while it maps, and all threads
    would stand still.

    Args:
        threads: that many, each for a part of the memory.
    """
    share = -(-memory.nbytes // max(1, threads * PAGE_BYTES)) * PAGE_BYTES
    if threads == 1 or share < _POPULATE_BYTES:
        return _populate(memory)
    parts = [memory[begin : begin + share] for begin in range(0, memory.nbytes, share)]
    return all(run_parallel([functools.partial(_populate, part) for part in parts], "resiliency-populate"))


def is_populated(memory: memoryview) -> bool:
    """Whether no page of `memory` has a fault to take; False where the kernel does not say."""
    begin = address_of(memory) // PAGE_BYTES * PAGE_BYTES
    pages = -(-(address_of(memory) + memory.nbytes - begin) // PAGE_BYTES)
    resident = ctypes.create_string_buffer(pages)
    failed = _libc().mincore(ctypes.c_void_p(begin), ctypes.c_size_t(pages * PAGE_BYTES), resident)
    return not failed and b"\0" not in resident.raw


def _populate(memory: memoryview) -> bool:
    begin = address_of(memory) // PAGE_BYTES * PAGE_BYTES
    end = address_of(memory) + memory.nbytes
    for address in range(begin, end, _POPULATE_BYTES):
        length = min(_POPULATE_BYTES, end - address)
        if _libc().madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), _MADV_POPULATE_WRITE):
            return False
    return True


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)  # its calls release the interpreter's lock
