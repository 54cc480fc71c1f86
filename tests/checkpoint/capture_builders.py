# SPDX-License-Identifier: Apache-2.0
"""What the capture tests share: states, and the bits of tensors."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from resiliency.checkpoint import Capturer, RankArena, Shard, StateWalker, open_captured
from resiliency.checkpoint.state.copying import flat_bytes

SOON = timedelta(seconds=30)


def bits(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Everything about a tensor's contents, NaN payloads included."""
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    data = flat_bytes(plain).tolist() if plain.numel() else []
    return plain.dtype, tuple(plain.shape), data


def save(state: object, directory: Path, step: int = 1, *, allow: Iterable[type | str] | None = None) -> None:
    """Capture `state` the way a training loop does, and end the process's part."""
    walker = StateWalker(allow=allow)
    with RankArena(directory, rank=0) as arena, Capturer(arena, walker=walker) as capturer:
        capture = capturer.begin(state, step)
        assert capture is not None
        assert capturer.fence(SOON)
        assert capture.wait(SOON)
        assert capture.error is None


def saved(
    state: object, directory: Path, stack: ExitStack, *, allow: Iterable[type | str] | None = None
) -> Shard:
    """`state` in a slot, as another process would borrow it until `stack` ends."""
    save(state, directory, allow=allow)
    return stack.enter_context(open_captured(directory, 0)).shard


class Gate:
    """Lets copy threads stop before their piece and go on when the test says so."""

    def __init__(self) -> None:
        self.arrived = threading.Event()
        self._open = threading.Event()

    def __call__(self, _: int) -> None:
        self.arrived.set()
        assert self._open.wait(30)

    def open(self) -> None:
        self._open.set()
