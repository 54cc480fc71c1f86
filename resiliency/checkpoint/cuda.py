# SPDX-License-Identifier: Apache-2.0
"""Captures from a CUDA device: pinned slots, a side stream, and a fence that the host never waits in.

The copies are enqueued on a stream of their own behind the work that produced the state, and run
while the next forward and backward compute.  The fence makes the *device* wait: kernels enqueued
after it (the optimizer's) start when the copies are done.  That orders the stream that is current in
the thread which fences; a state that is written on other streams needs them to wait as well.  What the
device waits is no time held on the host: it shows as excess of the step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch

from resiliency.checkpoint.copying import flat_bytes
from resiliency.errors import ConfigError

#: Drivers refuse, or take very long for, one huge registration.
SEGMENT_BYTES = 1 << 30
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all contexts of this process

Pair = tuple[torch.Tensor, torch.Tensor]


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class PinnedMemory:
    """Host memory registered with CUDA, in segments, by the thread that owns `device`."""

    def __init__(self, address: int, size: int, device: torch.device) -> None:
        self._device = device
        self._segments: list[int] = []
        with torch.cuda.device(device):  # else a context on device 0 comes to be
            for start in range(address, address + size, SEGMENT_BYTES):
                length = min(SEGMENT_BYTES, address + size - start)
                code = int(_runtime().cudaHostRegister(start, length, _PORTABLE))
                if code:
                    self.close()
                    _forget_failure(device)
                    raise ConfigError(
                        f"CUDA could not pin {length} bytes of shared memory on {device}:"
                        f" {torch.cuda.CudaError(code)}.",
                        hint="Raise the limit on locked memory (ulimit -l, docker run --ulimit memlock=-1).",
                        device=str(device),
                    )
                self._segments.append(start)

    def close(self) -> None:
        """Unpin.  No copy may be under way."""
        with torch.cuda.device(self._device):
            for start in self._segments:
                _runtime().cudaHostUnregister(start)
        self._segments.clear()


def _forget_failure(device: torch.device) -> None:
    # The runtime tells of a failed call again at the next launch of a kernel, which must not be training's.
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device=device)


class DeviceRun:
    """Copies enqueued on the side stream.  Holds the sources until they are done."""

    def __init__(self, device: torch.device, done: torch.cuda.Event, sources: list[torch.Tensor]) -> None:
        self._device = device
        self._event = done
        self._sources = sources

    def fence(self, timeout: timedelta | None) -> bool:
        """Let later work of the calling thread's current stream start after the copies; does not block."""
        if torch.cuda.is_current_stream_capturing():
            return True  # nothing is written while a graph is recorded, and it may not wait for other streams
        torch.cuda.current_stream(self._device).wait_event(self._event)
        return True

    def stop(self) -> None:
        """Nothing: what is enqueued runs."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block the host until the bytes are in the slot."""
        with torch.cuda.device(self._device):  # the publisher's thread has not selected one
            self._event.synchronize()
        self._sources = []
        return True


class DeviceCopier:
    """The side stream of one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def start(self, eager: Iterable[Pair], rest: Iterable[Pair], base: int) -> DeviceRun:
        """Enqueue the copies of (target, source) pairs.

        Args:
            eager: the calling thread's stream waits for these at once: the next forward may write them.
            base: address at which the pinned segments of the targets begin.
        """
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        sources: list[torch.Tensor] = []
        with torch.cuda.stream(self._stream), torch.no_grad():
            _enqueue(eager, sources, base)
            current.wait_event(self._stream.record_event())
            _enqueue(rest, sources, base)
            # A blocking event sleeps in wait(); a spinning one would take a core from training.
            done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            done.record(self._stream)
        return DeviceRun(self.device, done, sources)


def _enqueue(pairs: Iterable[Pair], sources: list[torch.Tensor], base: int) -> None:
    for target, source in pairs:
        if source.numel() == 0:
            continue
        sources.append(source)
        if source.is_conj() or source.is_neg() or not source.is_contiguous():
            # torch packs these into a temporary of the side stream first.
            packed = source.resolve_conj().resolve_neg().contiguous()
            sources.append(packed)
            source = packed
        flat_target, flat_source = flat_bytes(target), flat_bytes(source)
        for start, end in cuts(flat_target.data_ptr() - base, flat_target.numel()):
            flat_target[start:end].copy_(flat_source[start:end], non_blocking=True)


def cuts(offset: int, size: int, segment: int = SEGMENT_BYTES) -> Iterable[tuple[int, int]]:
    """Cut `size` bytes that lie at `offset` of a registered area where its segments meet.

    One copy must not span two registrations.
    """
    start = 0
    while start < size:
        end = min(size, start + segment - (offset + start) % segment)
        yield start, end
        start = end
