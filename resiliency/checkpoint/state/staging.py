# SPDX-License-Identifier: Apache-2.0
"""Bytes of host memory onto a CUDA device, through pinned buffers of the threads that copy.

What a restore reads lies in pageable memory, from which the driver copies at a tenth of the bus, however
many threads ask; to pin it takes as long as that copy.  A thread that fills one small pinned buffer while the
device fetches the other is as fast as its `memmove`, and several threads come near to the bus
(docs/benchmarks/2026-11-26-gpu.md).
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from resiliency.runtime import RunInfo

logger = logging.getLogger(__name__)

#: Of one buffer; a thread has two.  torch keeps them for the next who wants pinned memory.
STAGE_BYTES = 16 << 20
#: More come no nearer to the bus.
_MOST_THREADS = 8


def threads_to_device() -> int:
    """How many threads a rank may copy with: its share of this host's processors."""
    share = len(os.sched_getaffinity(0)) // RunInfo.from_env().local_world_size
    return max(2, min(_MOST_THREADS, share))


class _Stage:
    """The buffers of one thread for one device."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._buffers = torch.empty(2, STAGE_BYTES, dtype=torch.uint8, pin_memory=True)
        self._sent = [torch.cuda.Event(blocking=True) for _ in self._buffers]  # type: ignore[no-untyped-call]
        self._turn = 0

    def send(self, target: torch.Tensor, source: int) -> None:
        self._turn = 1 - self._turn
        buffer, sent = self._buffers[self._turn, : target.numel()], self._sent[self._turn]
        sent.synchronize()  # at once where nothing was sent from it
        ctypes.memmove(buffer.data_ptr(), source, target.numel())
        with torch.cuda.stream(self._stream):
            target.copy_(buffer, non_blocking=True)
            sent.record(self._stream)

    def wait(self) -> None:
        self._stream.synchronize()


class _OfThread(threading.local):
    """`stages`: None where there is no pinned memory for one."""

    def __init__(self) -> None:
        self.stages: dict[torch.device, _Stage | None] = {}

    def stage(self, device: torch.device) -> _Stage | None:
        if device not in self.stages:
            try:
                self.stages[device] = _Stage(device)
            except RuntimeError as error:  # what torch raises for all of CUDA's errors
                logger.warning("no pinned memory to restore through, copies are slower: %s", error)
                self.stages[device] = None
        return self.stages[device]


_here = _OfThread()


@dataclass(frozen=True)
class StagedPiece:
    """`target`: contiguous bytes of a device, `STAGE_BYTES` at most; `source`: an address."""

    target: torch.Tensor
    source: int

    def copy(self) -> None:
        """Begin; `wait_for_stages` of the same thread waits for the end."""
        if (stage := _here.stage(self.target.device)) is not None:
            stage.send(self.target, self.source)
            return
        memory = (ctypes.c_char * self.target.numel()).from_address(self.source)
        self.target.copy_(torch.frombuffer(memory, dtype=torch.uint8))


def staged_pieces(target: torch.Tensor, source: int) -> Iterable[StagedPiece]:
    """Cut the copy from an address into `target`, the bytes of a contiguous tensor of a device."""
    for number, piece in enumerate(torch.split(target, STAGE_BYTES)):
        yield StagedPiece(piece, source + number * STAGE_BYTES)


def wait_for_stages() -> None:
    """Until all that this thread has begun is on its device."""
    for stage in filter(None, _here.stages.values()):
        stage.wait()
