# SPDX-License-Identifier: Apache-2.0
"""A tensor of 8 bits with a scale for each row, as low-bit optimizers keep their state."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map

_AS_IT_IS = (torch.ops.aten.detach.default, torch.ops.aten.view.default, torch.ops.aten.alias.default)


class LowBit(torch.Tensor):
    """`codes` times `scale`, read as float32; `signed` is what its class has to know beside them."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, signed: bool = True) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, signed: bool = True) -> None:
        self.codes, self.scale, self.signed = codes, scale, signed

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], {"signed": self.signed}

    @classmethod
    def __tensor_unflatten__(cls, parts: Any, context: Any, size: Any, stride: Any) -> LowBit:
        return cls(parts["codes"], parts["scale"], **context)

    def dequantized(self) -> torch.Tensor:
        return self.codes.float() * self.scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _AS_IT_IS:
            return cls(args[0].codes, args[0].scale, args[0].signed)
        if func is torch.ops.aten.mul_.Tensor:
            args[0].scale.mul_(args[1])
            return args[0]
        plain = tree_map(lambda each: each.dequantized() if isinstance(each, LowBit) else each, args)
        return func(*plain, **(kwargs or {}))

    __torch_function__ = torch._C._disabled_torch_function_impl


class OtherLowBit(LowBit):
    """Of the same parts, with another meaning."""


def low_bit(rows: int, fill: int, *, cls: type[LowBit] = LowBit, signed: bool = True) -> LowBit:
    """Filled with values that differ by row."""
    codes = (torch.arange(rows * 4, dtype=torch.int32) % 100 + fill).to(torch.int8).view(rows, 4)
    return cls(codes, torch.arange(float(rows)).view(rows, 1) + fill, signed)
