# SPDX-License-Identifier: Apache-2.0
"""Copies between host memory with a few threads, in pieces small enough to share evenly.

A piece of contiguous memory is one `memmove`, which releases the interpreter lock, never starts
OpenMP's threads (each caller of a torch kernel gets a pool of its own) and keeps every bit.  Only
tensors that are not contiguous go through torch's strided copy, as integers for the same reason.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch

from resiliency.checkpoint.state.staging import staged_pieces, wait_for_stages
from resiliency.checkpoint.threads import CallerThread, TaskThread, helper_thread
from resiliency.errors import CheckpointError

PIECE_BYTES = 16 << 20

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Piece(Protocol):
    """A share of the work."""

    def copy(self) -> None: ...


@dataclass(frozen=True)
class MemoryPiece:
    """`count` bytes from one address to another; the caller keeps the memory alive, see `Copier.start`."""

    target: int
    source: int
    count: int

    def copy(self) -> None:
        ctypes.memmove(self.target, self.source, self.count)


@dataclass(frozen=True)
class StridedPiece:
    """A tensor of any strides, or a strip of one."""

    target: torch.Tensor
    source: torch.Tensor

    def copy(self) -> None:
        self.target.copy_(self.source)


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers, whose copies cannot touch a NaN's payload."""
    if tensor.is_conj() or tensor.is_neg():
        return tensor
    integers = _INTEGERS.get(tensor.element_size())
    return tensor if integers is None else tensor.detach().view(integers)


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as bytes.

    Not `view(-1)`: a single element may have any stride and counts as contiguous.
    """
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def pieces(target: torch.Tensor, source: torch.Tensor) -> Iterable[Piece]:
    """Cut the copy of `source` into `target` (same shape and dtype; if on a device, torch copies)."""
    if source.numel() == 0:
        return
    for dim, (size, step) in enumerate(zip(target.shape, target.stride(), strict=True)):
        if step == 0 and size > 1:  # expanded: torch refuses to write one element twice
            target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    lazy = source.is_conj() or source.is_neg() or target.is_conj() or target.is_neg()
    if lazy:
        yield StridedPiece(target.detach(), source.detach())
    elif target.is_cpu and source.is_cpu and target.is_contiguous() and source.is_contiguous():
        yield from memory_pieces(target.data_ptr(), source.data_ptr(), source.nbytes)
    elif target.is_cuda and source.is_cpu and target.is_contiguous() and source.is_contiguous():
        yield from staged_pieces(flat_bytes(target), source.data_ptr())
    elif target.dim() == 2:  # whole: torch copies a transposed matrix in tiles, but no part of one
        yield StridedPiece(as_integers(target), as_integers(source))
    else:
        blocks = strips(as_integers(target), as_integers(source), PIECE_BYTES)
        yield from itertools.starmap(StridedPiece, blocks)


def strips(
    target: torch.Tensor, source: torch.Tensor, size_bytes: int
) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    """Cut two tensors of one shape alike, into blocks of at most `size_bytes`.

    A block of a contiguous tensor is contiguous.
    """
    if target.nbytes <= size_bytes or target.dim() == 0:
        yield target, source
        return
    dim = next((dim for dim, size in enumerate(target.shape) if size > 1), 0)
    rows = max(1, target.shape[dim] * size_bytes // target.nbytes)
    for block, same in zip(torch.split(target, rows, dim), torch.split(source, rows, dim), strict=True):
        if block.shape[dim] == target.shape[dim]:
            yield block, same
        else:
            yield from strips(block, same, size_bytes)


def memory_pieces(target: int, source: int, size: int) -> Iterable[Piece]:
    """Cut the copy of `size` bytes between two addresses."""
    for start in range(0, size, PIECE_BYTES):
        yield MemoryPiece(target + start, source + start, min(PIECE_BYTES, size - start))


class CopyRun:
    """Copies under way.  Each thread takes the next piece until none is left, or one failed."""

    def __init__(
        self, work: Sequence[Piece], keep: object, before_piece: Callable[[int], None] | None
    ) -> None:
        self._work = work
        self._keep = keep
        self._before = before_piece
        self._next = itertools.count()  # its next() is atomic
        self._lock = threading.Lock()
        self._running = 0
        self._spare: Sequence[TaskThread | CallerThread] = ()
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._stopped = False

    def _start(self, threads: Sequence[TaskThread | CallerThread], at_first: int) -> None:
        self._running = max(1, min(at_first, len(threads), len(self._work)))
        self._spare = threads[self._running : len(self._work)]
        for thread in threads[: self._running]:
            thread.submit(self._take)

    def use_all_threads(self) -> None:
        """Copy with all threads from here on: the caller waits.  Any thread may say so, and several times."""
        with self._lock:
            spare, self._spare = self._spare, ()
            if not self._running:
                return
            self._running += len(spare)
        for thread in spare:
            thread.submit(self._take)

    def _take(self) -> None:
        try:
            with torch.no_grad():
                for index in self._next:
                    if index >= len(self._work) or self._stopped:
                        break
                    if self._before is not None:
                        self._before(index)
                    self._work[index].copy()
                wait_for_stages()
        except Exception as error:  # reported to whoever waits
            self._error, self._stopped = error, True
        finally:
            with self._lock:
                self._running -= 1
                if self._running == 0:
                    self._work, self._keep = (), None  # the memory may be freed from here on
                    self._done.set()

    def stop(self) -> None:
        """Leave the pieces that were not begun.  The run still has to be waited for."""
        self._stopped = True

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until no thread copies any more; False at the timeout.

        Raises:
            CheckpointError: a copy failed.
        """
        if not self._done.wait(None if timeout is None else timeout.total_seconds()):
            return False
        if self._error is not None:
            raise CheckpointError(f"copying the state failed: {self._error!r}.") from self._error
        return True


class Copier:
    """Owns the threads.

    `before_piece` is called in them with the number of each piece: for tests and for pacing.
    """

    def __init__(self, threads: int = 2, *, before_piece: Callable[[int], None] | None = None) -> None:
        self._before = before_piece
        self._threads = [helper_thread(f"resiliency-copy_{number}") for number in range(threads)]

    def start(
        self, work: Sequence[Piece], *, keep: object, paced: bool = True, behind: bool = False
    ) -> CopyRun:
        """Begin to copy.

        Args:
            keep: owns the memory of the pieces and is held until they are done.
            paced: call `before_piece`; False for what somebody waits for.
            behind: what trains meanwhile needs the cores and the memory bus: one thread copies, until
                `CopyRun.use_all_threads`.
        """
        run = CopyRun(work, keep, self._before if paced else None)
        run._start(self._threads, at_first=1 if behind else len(self._threads))
        return run

    def close(self, timeout: timedelta | None = None) -> bool:
        """Wait for what runs, and end the threads; False if a copy still runs at the timeout.  Idempotent."""
        for thread in self._threads:
            thread.close()
        if timeout is None:
            return all(thread.wait_for_end() for thread in self._threads)
        deadline = time.monotonic() + timeout.total_seconds()
        left = (timedelta(seconds=max(0.0, deadline - time.monotonic())) for _ in self._threads)
        return all(thread.wait_for_end(each) for thread, each in zip(self._threads, left, strict=True))

    def __enter__(self) -> Copier:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
