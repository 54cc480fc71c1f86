# SPDX-License-Identifier: Apache-2.0
"""The training job under every contestant: a stack of linear layers under AdamW, real in all it does.

The forward reads the parameters, the backward writes the gradients, the optimizer writes everything
that is saved.  Ranks name their tensors apart, as pipeline stages do, so each of them saves all of its
own; one number goes around at every step, which keeps ranks in step as a gradient reduction would.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class Training:
    """One rank's model and optimizer, about `size_bytes` of saved state together."""

    def __init__(self, size_bytes: int, rank: int, *, batch: int = 1) -> None:
        numbers = size_bytes // 12  # each parameter has two moments; four bytes each
        width = min(1024, max(16, math.isqrt(numbers // 2)))
        layers = max(2, round(numbers / (width * width + width)))
        self.model = nn.Sequential(*(_linear(width) for _ in range(layers)))
        # Like Xavier's, but cheap: filling gigabytes with random numbers takes longer than a save.
        self._input = torch.randn(batch, width)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.rank = rank
        self.forward_backward()
        self.update()  # the optimizer makes its state at its first step

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def state_dict(self) -> dict[str, Any]:
        parts = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return {f"rank{self.rank}": parts}

    def tensors(self) -> list[torch.Tensor]:
        """All saved tensors."""
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        return [*(parameter.detach() for parameter in self.model.parameters()), *moments]

    def forward_backward(self) -> None:
        """What may run beside a copy of the state."""
        self.optimizer.zero_grad(set_to_none=False)
        self.model(self._input).square().mean().backward()

    def update(self) -> None:
        """What may not: it writes the state."""
        dist.all_reduce(torch.zeros(1))
        self.optimizer.step()

    def set_batch(self, batch: int) -> None:
        self._input = torch.randn(batch, self._input.shape[1])

    def steps(self, count: int, between: Callable[[], object]) -> float:
        """Seconds of that many steps."""
        began = time.perf_counter()
        for _ in range(count):
            self.forward_backward()
            self.update()
            between()
        return time.perf_counter() - began

    def batch_for(self, seconds: float) -> int:
        """How many samples make forward and backward take that long."""
        self.set_batch(32)
        self.forward_backward()
        began = time.perf_counter()
        for _ in range(3):
            self.forward_backward()
        return max(1, math.ceil(32 * seconds / ((time.perf_counter() - began) / 3)))

    def digest(self) -> str:
        """Equal for equal states, bit by bit."""
        digest = 0
        for tensor in self.tensors():
            digest = zlib.crc32(tensor.numpy().data, digest)
        return f"{digest:08x}"

    @torch.no_grad()
    def forget(self) -> None:
        """Overwrite everything, so that a restore has to bring it back."""
        for tensor in self.tensors():
            tensor.fill_(-1.0)


def _linear(width: int) -> nn.Module:
    layer = nn.utils.skip_init(nn.Linear, width, width)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        pattern = torch.linspace(-1.0, 1.0, width) / math.sqrt(width)
        for row in range(width):
            layer.weight[row].copy_(pattern.roll(row))
        layer.bias.zero_()
    return nn.Sequential(layer, nn.Tanh())
