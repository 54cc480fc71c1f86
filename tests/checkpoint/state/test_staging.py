# SPDX-License-Identifier: Apache-2.0
"""Copies through pinned buffers, whose device is a stand-in that copies when it is waited for.

Their real device is in tests/checkpoint/capture/test_cuda.py.
"""

from __future__ import annotations

import ctypes
from datetime import timedelta

import pytest
import torch

from resiliency.checkpoint.state import staging
from resiliency.checkpoint.state.copying import Copier
from resiliency.checkpoint.state.staging import staged_pieces, threads_to_device
from resiliency.errors import CheckpointError

STAGE_BYTES = 1 << 16
SOON = timedelta(seconds=60)
SIZES = [1, 5, STAGE_BYTES - 1, STAGE_BYTES, STAGE_BYTES + 1, 3 * STAGE_BYTES + 7, *[33] * 50]


class LateDevice:
    """What was sent arrives when the thread waits for it."""

    def __init__(self, device: torch.device) -> None:
        self._sent: list[tuple[torch.Tensor, bytes]] = []

    def send(self, target: torch.Tensor, source: int) -> None:
        self._sent.append((target, ctypes.string_at(source, target.numel())))

    def wait(self) -> None:
        for target, content in self._sent:
            target.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        self._sent.clear()


def no_memory(device: torch.device) -> LateDevice:
    raise RuntimeError("CUDA error: out of memory")


class LostDevice(LateDevice):
    def wait(self) -> None:
        raise RuntimeError("CUDA error: the device is lost")


def copied(threads: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    sources = [torch.randint(256, (size,), dtype=torch.uint8) for size in SIZES]
    targets = [torch.zeros_like(source) for source in sources]
    pairs = list(zip(targets, sources, strict=True))
    work = [piece for target, source in pairs for piece in staged_pieces(target, source.data_ptr())]
    with Copier(threads) as copier:
        assert copier.start(work, keep=sources).wait(SOON)
    return pairs


@pytest.fixture(autouse=True)
def _small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "STAGE_BYTES", STAGE_BYTES)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("stage", [LateDevice, no_memory])
def test_all_bytes_have_arrived_when_the_copy_is_done(
    monkeypatch: pytest.MonkeyPatch, threads: int, stage: object
) -> None:
    monkeypatch.setattr(staging, "_Stage", stage)
    for target, source in copied(threads):
        assert torch.equal(target, source)


def test_a_device_that_is_lost_on_the_way_fails_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_Stage", LostDevice)
    with pytest.raises(CheckpointError, match="the device is lost"):
        copied(2)


@pytest.mark.parametrize(("cores", "ranks", "threads"), [(1, 1, 2), (16, 1, 8), (96, 8, 8), (32, 8, 4)])
def test_ranks_of_a_host_share_its_processors(
    monkeypatch: pytest.MonkeyPatch, cores: int, ranks: int, threads: int
) -> None:
    monkeypatch.setattr(staging.os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert threads_to_device() == threads
