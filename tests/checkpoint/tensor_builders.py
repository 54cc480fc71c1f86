# SPDX-License-Identifier: Apache-2.0
"""Tensors of every dtype and shape, and whether two hold the same bits."""

from __future__ import annotations

import torch

from resiliency.checkpoint.format.torch_record import memory_of
from resiliency.checkpoint.state.layout import Shard
from tests.checkpoint.storage_builders import (
    Part,
    make_shard,
)

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e8m0fnu, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16,
    torch.uint32, torch.uint64, torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip
SHAPES = [(), (0,), (1,), (3, 5), (2, 0, 4), (2, 3, 4)]


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype is torch.bool else 256
    bits = torch.randint(0, high, (tensor.nbytes,), dtype=torch.uint8, generator=generator)
    memory_of(tensor)[:] = memory_of(bits)
    return tensor


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.dtype, a.shape) == (b.dtype, b.shape) and bytes(memory_of(a.contiguous())) == bytes(
        memory_of(b.contiguous())
    )


def sharded(world_size: int, rows: int = 13) -> tuple[list[Shard], dict[str, torch.Tensor]]:
    """Ranks that each hold uneven rows of one tensor, a replicated one, and one of their own."""
    whole = random_tensor(torch.bfloat16, (rows, 6), 1)
    shared = random_tensor(torch.float32, (300, 1000), 2)
    shards = []
    for rank, part in enumerate(torch.tensor_split(whole, world_size)):
        start = sum(len(p) for p in torch.tensor_split(whole, world_size)[:rank])
        shards.append(
            make_shard(
                {
                    "rows": Part(part, global_shape=(rows, 6), offset=(start, 0)),
                    "shared": Part(shared, replica_id=rank),
                    f"own/{rank}": torch.tensor([rank]),
                },
                rank=rank,
                world_size=world_size,
            )
        )
    return shards, {"rows": whole, "shared": shared}
