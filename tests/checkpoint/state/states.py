# SPDX-License-Identifier: Apache-2.0
"""States of all kinds, for tests that take any."""

from __future__ import annotations

import dataclasses
import math
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.complex64, torch.complex128, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32,
    torch.int64, torch.uint16, torch.uint32, torch.uint64,
]  # fmt: skip


@dataclasses.dataclass
class Moments:
    mean: Any
    count: int


@dataclasses.dataclass(frozen=True)
class Frozen:
    weight: torch.Tensor


class Pair(NamedTuple):
    left: Any
    right: Any


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any bit pattern (so also every NaN), any dtype, with strides of several kinds."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    size = max(1, math.prod(shape)) * 2
    raw = draw(st.binary(min_size=size * 16, max_size=size * 16))
    if dtype is torch.bool:
        raw = bytes(byte & 1 for byte in raw)
    flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype)
    form = draw(st.sampled_from(["plain", "offset", "strided", "transposed", "expanded", "parameter"]))
    count = math.prod(shape)
    if form == "offset":
        return flat[1 : count + 1].view(shape)
    if form == "strided":
        return flat[: 2 * count : 2].view(shape) if count else flat[:0].view(shape)
    tensor = flat[:count].view(shape)
    if form == "transposed":
        return tensor.permute(list(reversed(range(len(shape)))))
    if form == "expanded" and count:
        return tensor.unsqueeze(0).expand(3, *shape)
    if form == "parameter" and (dtype.is_floating_point or dtype.is_complex):
        return torch.nn.Parameter(tensor)
    return tensor


plain_values = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(), st.complex_numbers(),
    st.sampled_from([torch.bfloat16, torch.device("cpu"), torch.Size([2, 3]), Path("a/b")]),
    st.integers(-(2**200), 2**600), st.frozensets(st.integers()),
    st.sampled_from([np.float32(1.5), np.int64(3), np.array(["a", "bc"]), np.datetime64("2020-01-01")]),
)  # fmt: skip


keys = st.one_of(st.text(max_size=3), st.integers(0, 3), st.tuples(st.integers(0, 1), st.text(max_size=1)))


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
        st.builds(Pair, inner, inner),
        st.builds(Moments, inner, st.integers()),
    )


states = st.recursive(st.one_of(tensors(), plain_values), containers, max_leaves=8)
