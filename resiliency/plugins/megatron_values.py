# SPDX-License-Identifier: Apache-2.0
"""Megatron's sharded tensors and objects as the leaves that the checkpoint engine captures.

A `ShardedTensor` becomes a block of its global tensor, as Megatron writes it: prepended axes are
axes of length 1, and a flattened range is a block of the grid ``[fragments of each axis..., elements
of a fragment]``, with the shape before as an attribute.  A `ShardedObject` becomes the bytes that
Megatron's readers look for under its unique key.
"""

from __future__ import annotations

import functools
import io
import json
import math
import pickle
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, is_main_replica

from resiliency.checkpoint.format.megatron import COMMON_FILE, FILE, ORIGINAL_SHAPE
from resiliency.checkpoint.state.tensors import Placement, ShardedView, register_sharded_type
from resiliency.errors import CheckpointCorrupt, ConfigError


@dataclass(frozen=True)
class CommonPart:
    """What no rank shards, packed; rank 0's is written."""

    data: bytes
    rank: int


def register() -> None:
    """Teach the engine about the types of this module and Megatron's; may be repeated."""
    register_sharded_type(ShardedTensor, _describe_tensor)
    register_sharded_type(ShardedObject, _describe_object)
    register_sharded_type(CommonPart, _describe_common)


def block(tensor: ShardedTensor, data: torch.Tensor) -> torch.Tensor:
    """`data` of `tensor`, on the same memory, with as many axes as its global tensor has on disk."""
    flattened = tensor.flattened_range is not None
    axes = len(tensor.global_shape) if flattened else tensor.prepend_axis_num
    return data[(None,) * axes] if axes else data


def block_place(tensor: ShardedTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Global shape and offset of the block on disk.

    Raises:
        ConfigError: a flattened part of a tensor that is cut unevenly, which Megatron cannot write either.
    """
    if tensor.flattened_range is None:
        return tuple(tensor.global_shape), tuple(tensor.global_offset)
    if tensor.axis_fragmentations is None:
        raise ConfigError(
            f"{tensor.key} is a flattened part of a tensor that is not cut into a regular grid.",
            key=tensor.key,
        )
    shape = (*tensor.axis_fragmentations, math.prod(tensor.local_shape))
    return shape, (*tensor.local_chunk_offset_in_global(), tensor.flattened_range.start)


def packed(value: object) -> bytes:
    """A record as Megatron's readers expect it."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def unpacked(data: bytes, what: str, **options: Any) -> Any:
    """Inverse of `packed`.  It unpickles, as Megatron's own readers do: trust what you give it.

    Raises:
        CheckpointCorrupt: it is no such record, or names classes that are not installed.
    """
    try:
        return torch.load(io.BytesIO(data), weights_only=False, **options)
    except (RuntimeError, pickle.UnpicklingError, EOFError, ImportError, AttributeError) as error:
        raise CheckpointCorrupt(f"{what} cannot be unpickled: {error}.", key=what) from error


def _describe_tensor(tensor: ShardedTensor) -> ShardedView:
    if tensor.data is None:
        raise ConfigError(f"{tensor.key} has no data to save.", key=tensor.key)
    original = tuple(tensor.global_shape) if tensor.flattened_range is not None else None
    placement = _placement(tensor.key, *block_place(tensor), _replica(tensor.replica_id), original)
    return ShardedView(data=block(tensor, tensor.data), placement=placement)


@functools.cache  # of one job: the same at each save
def _placement(
    key: str,
    shape: tuple[int, ...],
    offset: tuple[int, ...],
    replica_id: int,
    original: tuple[int, ...] | None,
) -> Placement:
    return Placement(
        global_shape=shape,
        global_offset=offset,
        replica_id=replica_id,
        name=key,
        attributes=() if original is None else ((ORIGINAL_SHAPE, json.dumps(original)),),
    )


def _describe_object(obj: ShardedObject) -> ShardedView:
    placement = Placement(
        global_shape=tuple(obj.global_shape),
        global_offset=tuple(obj.global_offset),
        replica_id=_replica(obj.replica_id),
        name=obj.unique_key,
    )
    data = _packed_nothing() if obj.data is None else packed([obj.data])
    return ShardedView(data=data, placement=placement)


@functools.cache
def _packed_nothing() -> bytes:
    # Layers without extra state have an object all the same: most objects of a model are this one.
    return packed([None])


def _describe_common(part: CommonPart) -> ShardedView:
    placement = Placement(
        global_shape=(),
        global_offset=(),
        replica_id=int(part.rank != 0),
        name=COMMON_FILE,
        attributes=((FILE, COMMON_FILE),),
    )
    return ShardedView(data=part.data, placement=placement)


def _replica(replica_id: int | tuple[int, ...]) -> int:
    # The engine asks only whether it is the one that is written.
    return int(not is_main_replica(replica_id))
