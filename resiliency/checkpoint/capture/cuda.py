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
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch

from resiliency.checkpoint.state.copying import flat_bytes, strips
from resiliency.errors import ConfigError

#: Drivers refuse, or take very long for, one huge registration.
SEGMENT_BYTES = 1 << 30
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all contexts of this process
#: Of a tensor that is not contiguous, packed on the device at a time.
PACK_BYTES = 64 << 20


class HostRegistry(Protocol):
    """What pins host memory for the copies of a device; any thread may call it."""

    def is_for(self, device: torch.device) -> bool:
        """Whether copies from `device` want pinned memory."""

    def current_device(self) -> torch.device | None:
        """The device of this thread, for memory that is pinned before a state was seen; None: none in use."""

    def register(self, address: int, length: int, device: torch.device) -> str:
        """Pin; what went wrong, or nothing."""

    def unregister(self, address: int, device: torch.device) -> None: ...


class CudaHostRegistry:
    """The registry of CUDA's runtime."""

    def is_for(self, device: torch.device) -> bool:
        return device.type == "cuda"

    def current_device(self) -> torch.device | None:
        # The first alone is true as well where stand-ins run a program for CUDA on a CPU.
        if not (torch.cuda.is_initialized() and torch.cuda.is_available()):  # type: ignore[no-untyped-call]
            return None
        return torch.device("cuda", torch.cuda.current_device())

    def register(self, address: int, length: int, device: torch.device) -> str:
        # A thread that has selected no device is on device 0, and would make a context there.
        with torch.cuda.device(device):
            code = int(_runtime().cudaHostRegister(address, length, _PORTABLE))
            if not code:
                return ""
            # The runtime tells of a failed call again at this thread's next launch of a kernel.
            with contextlib.suppress(RuntimeError):
                torch.ones(1, device=device)
            return str(torch.cuda.CudaError(code))

    def unregister(self, address: int, device: torch.device) -> None:
        with torch.cuda.device(device):
            _runtime().cudaHostUnregister(address)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class PinnedMemory:
    """Host memory registered for the copies of `device`, in segments."""

    def __init__(self, address: int, size: int, device: torch.device, registry: HostRegistry) -> None:
        self._device = device
        self._registry = registry
        self._segments: list[int] = []
        for start in range(address, address + size, SEGMENT_BYTES):
            length = min(SEGMENT_BYTES, address + size - start)
            if why := registry.register(start, length, device):
                self.close()
                raise ConfigError(
                    f"CUDA could not pin {length} bytes of shared memory on {device}: {why}.",
                    hint="Raise the limit on locked memory (ulimit -l, docker run --ulimit memlock=-1), and"
                    " keep arenas in /dev/shm: the kernel pins no files of a disk.",
                    device=str(device),
                )
            self._segments.append(start)

    def close(self) -> None:
        """Unpin.  No copy may be under way."""
        for start in self._segments:
            self._registry.unregister(start, self._device)
        self._segments.clear()


def is_recording() -> bool:
    """Whether what this thread does on the device is recorded in a CUDA graph, and not done."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


class DeviceRun:
    """Copies enqueued on the side stream.  Holds the sources until they are done."""

    def __init__(self, device: torch.device, done: torch.cuda.Event, sources: list[torch.Tensor]) -> None:
        self._device = device
        self._event = done
        self._sources = sources

    def fence(self, timeout: timedelta | None) -> bool:
        """Let later work of the calling thread's current stream start after the copies; does not block."""
        if is_recording():
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


class DeviceTransfer:
    """One entry on its way into a slot, as often as there are captures while the source stays where it is.

    It holds nothing of the state.

    Args:
        position: of the entry among the sources of a snapshot.
        base: address at which the pinned segments of `target` begin.
    """

    def __init__(
        self,
        position: int,
        target: torch.Tensor,
        source: torch.Tensor,
        base: int,
        *,
        segment: int = SEGMENT_BYTES,
    ) -> None:
        self._position = position
        self._target = target
        self._base = base
        self._segment = segment
        self._is_packed = not source.is_contiguous() or source.is_conj() or source.is_neg()
        is_cut = len(list(cuts(target.data_ptr() - base, target.nbytes, segment))) > 1
        self._is_one_copy = not (self._is_packed or is_cut)

    def enqueue(self, sources: Sequence[torch.Tensor]) -> torch.Tensor:
        """Copy, on the current stream; returns the source, which must be kept until that is done."""
        source = sources[self._position]
        if self._is_one_copy:
            self._target.copy_(source, non_blocking=True)
        elif self._is_packed:
            # Into temporaries of this stream, whose memory serves the next ones as soon as they are enqueued:
            # a second copy of the state would not fit beside it.
            for target, strip in strips(self._target, source, PACK_BYTES):
                self._copy(target, strip.resolve_conj().resolve_neg().contiguous())
        else:
            self._copy(self._target, source)
        return source

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        flat_target, flat_source = flat_bytes(target), flat_bytes(source)
        for start, end in cuts(flat_target.data_ptr() - self._base, flat_target.numel(), self._segment):
            flat_target[start:end].copy_(flat_source[start:end], non_blocking=True)


class DeviceCopier:
    """The side stream of one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def start(
        self, eager: Iterable[DeviceTransfer], rest: Iterable[DeviceTransfer], sources: Sequence[torch.Tensor]
    ) -> DeviceRun:
        """Enqueue the copies.

        Args:
            eager: the calling thread's stream waits for these at once: the next forward may write them.
            sources: of a snapshot.
        """
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream), torch.no_grad():
            kept = [transfer.enqueue(sources) for transfer in eager]
            current.wait_event(self._stream.record_event())
            kept += [transfer.enqueue(sources) for transfer in rest]
            # A blocking event sleeps in wait(); a spinning one would take a core from training.
            done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            done.record(self._stream)
        return DeviceRun(self.device, done, kept)


def cuts(offset: int, size: int, segment: int = SEGMENT_BYTES) -> Iterable[tuple[int, int]]:
    """Cut `size` bytes that lie at `offset` of a registered area where its segments meet.

    One copy must not span two registrations.
    """
    start = 0
    while start < size:
        end = min(size, start + segment - (offset + start) % segment)
        yield start, end
        start = end
