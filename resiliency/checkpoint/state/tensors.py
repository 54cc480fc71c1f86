# SPDX-License-Identifier: Apache-2.0
"""What counts as a tensor in a state, and where its bytes are.

A *leaf* is anything that carries tensor bytes: a tensor or parameter, a DTensor (its local shard),
a numpy array, or an object of a registered sharded type.  `Leaf.raw` is always a plain strided
tensor on the memory of the trained object, so copying into it restores the object in place.

Sharded types of other libraries are taught by `register_sharded_type`; this package imports none
of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from resiliency.checkpoint.state.layout import Path
from resiliency.checkpoint.state.rank_sets import MESH, text_of_ranks
from resiliency.checkpoint.state.values import class_name
from resiliency.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where a rank's part lies in the tensor that all ranks form together."""

    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    replica_id: int = 0
    #: The tensor's name on all ranks; None: the path in the state.
    name: str | None = None
    attributes: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class ShardedView:
    """What a registered sharded type holds: a tensor part, or (`data` no tensor) an opaque object.

    `data` is the memory of the object itself, never a copy; None if it holds nothing.
    """

    data: Any
    placement: Placement


Describe = Callable[[Any], ShardedView]
Assign = Callable[[Any, Any], None]


def _set_data(holder: Any, data: Any) -> None:
    holder.data = data


@dataclass(frozen=True)
class ShardedType:
    describe: Describe
    assign: Assign


_sharded: dict[str, ShardedType] = {}
_kinds: dict[type, str | None] = {}
_covering: dict[type, ShardedType | None] = {}


def register_sharded_type(cls: type | str, describe: Describe, *, assign: Assign = _set_data) -> None:
    """Teach captures about a library's own sharded tensor or object type.

    Args:
        cls: the class, or its name as ``module:qualname`` so that it need not be imported.
            Subclasses are included.
        describe: from an instance to its memory and placement.
        assign: stores restored data that is not a tensor; default: sets the attribute ``data``.
    """
    _sharded[cls if isinstance(cls, str) else class_name(cls)] = ShardedType(describe, assign)
    _kinds.clear()
    _covering.clear()


def sharded_type(cls: type) -> ShardedType | None:
    """The registration that covers `cls`."""
    if cls not in _covering:
        found = (_sharded.get(class_name(base)) for base in cls.__mro__)
        _covering[cls] = next((each for each in found if each is not None), None)
    return _covering[cls]


@dataclass(frozen=True)
class Leaf:
    """Tensor bytes of one node of the state."""

    raw: torch.Tensor
    #: None: not sharded.
    placement: Placement | None = None
    #: The DTensor or wrapper whose part `raw` is: a write to one counts in its version, not in its part's.
    owner: torch.Tensor | None = None

    @property
    def written(self) -> tuple[torch.Tensor, ...]:
        """The tensors whose versions tell whether it was written: a part may also be written by itself."""
        return (self.raw,) if self.owner is None else (self.raw, self.owner)


def leaf_kind(obj: object) -> str | None:
    """``tensor``, ``parameter``, ``dtensor``, ``numpy``, ``sharded``, or None for anything else."""
    cls = type(obj)
    try:
        kind = _kinds[cls]
    except KeyError:
        kind = _kinds[cls] = _kind_of(cls)
    if kind == "numpy" and not _numpy_fits(obj):
        return None
    return kind


def _kind_of(cls: type) -> str | None:
    if sharded_type(cls) is not None:
        return "sharded"
    if issubclass(cls, DTensor):
        return "dtensor"
    if issubclass(cls, torch.nn.Parameter):
        return "parameter"
    if issubclass(cls, torch.Tensor):
        return "tensor"
    numpy = sys.modules.get("numpy")
    return "numpy" if numpy is not None and cls is numpy.ndarray else None


# Kinds and sizes that numpy and torch agree on; torch can share their memory.
_NUMPY_KINDS = {"b": (1,), "i": (1, 2, 4, 8), "u": (1, 2, 4, 8), "f": (2, 4, 8), "c": (8, 16)}


def _numpy_fits(array: Any) -> bool:
    # torch shares memory only with native byte order and non-negative strides; it warns about read-only.
    return (
        array.itemsize in _NUMPY_KINDS.get(array.dtype.kind, ())
        and array.dtype.isnative
        and bool(array.flags.writeable)
        and all(s >= 0 and s % array.itemsize == 0 for s in array.strides)
    )


@dataclass(frozen=True)
class Wrapped:
    """A tensor of a wrapper subclass, which holds its data as other tensors (torchao's low-bit ones, float8).

    Attributes:
        tensor: itself, or the local part of a DTensor.
        placement: of that part; None: it is no DTensor.
    """

    tensor: Any
    placement: Placement | None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def stride(self) -> tuple[int, ...]:
        return tuple(self.tensor.stride())

    def flatten(self) -> tuple[tuple[str, ...], Any]:
        """The names of the attributes that hold its parts, and what else its class needs to be made anew."""
        names, context = self.tensor.__tensor_flatten__()
        return tuple(names), context


def wrapped(obj: object) -> Wrapped | None:
    """`obj` if it is of a wrapper subclass, or a DTensor of one; None: it has memory of its own."""
    cls = type(obj)
    if cls is torch.Tensor or cls is torch.nn.Parameter or not isinstance(obj, torch.Tensor):
        return None
    if sharded_type(cls) is not None:
        return None
    if isinstance(obj, DTensor):
        local = wrapped(obj._local_tensor)
        return None if local is None else replace(local, placement=_dtensor_placement(obj))
    if not hasattr(cls, "__tensor_flatten__") or hasattr(obj, "wait") or obj.layout is not torch.strided:
        return None
    return Wrapped(obj, None)


def leaf_of(obj: Any, kind: str, path: Path) -> Leaf:
    """The bytes of `obj`, whose `leaf_kind` is `kind`.

    Raises:
        ConfigError: a tensor without plain memory (meta, sparse CSR, a jagged one, ...).
    """
    if kind == "dtensor":
        return Leaf(_plain(obj.to_local(), path), _dtensor_placement(obj), obj)
    if kind == "numpy":
        return Leaf(torch.from_numpy(obj))
    return Leaf(_plain(obj, path))


def _plain(tensor: torch.Tensor, path: Path) -> torch.Tensor:
    """`tensor` itself if its bytes can be copied as they are, quantised ones as their integers."""
    cls: type = type(tensor)
    if cls not in (torch.Tensor, torch.nn.Parameter) and hasattr(cls, "__tensor_flatten__"):
        wait = getattr(tensor, "wait", None)  # a collective's pending result has it
        tensor = wait() if wait is not None else tensor
        if type(tensor) is cls:
            refuse(tensor, path, f"is a wrapper subclass ({cls.__name__})")
    if torch.nn.parameter.is_lazy(tensor):
        refuse(tensor, path, "has no shape yet: its module has not been called")
    if tensor.is_nested:
        refuse(tensor, path, "is nested")
    if tensor.layout is not torch.strided:
        refuse(tensor, path, f"has layout {tensor.layout}")
    if tensor.device.type == "meta":
        refuse(tensor, path, "is on the meta device, so it has no data")
    if not _has_memory(tensor):
        refuse(tensor, path, f"({cls.__name__}) has no memory of its own")
    return quantized_integers(tensor) if tensor.is_quantized else tensor


def _has_memory(tensor: torch.Tensor) -> bool:
    """Not so fakes of a tracer, wrappers of `torch.func` and of classes that keep their data elsewhere."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return False
    try:
        return not tensor.numel() or bool(tensor.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError, TypeError):
        return False


def refuse(tensor: torch.Tensor, path: Path, why: str) -> None:
    """Raise ConfigError: the tensor at `path` of the state cannot be captured."""
    try:
        shape = f" of shape {tuple(tensor.shape)}"
    except RuntimeError:  # nested, or not known yet
        shape = ""
    raise ConfigError(
        f"tensor {'/'.join(map(str, path))!r}{shape} {why}; it cannot be captured.",
        hint="Save its parts as plain tensors, or teach captures about its type with register_sharded_type.",
        key="/".join(map(str, path)),
    )


_QUANTIZED = {torch.quint8: torch.uint8, torch.qint8: torch.int8, torch.qint32: torch.int32}


def quantized_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The integers behind a quantised tensor, on the same memory."""
    if tensor.dtype not in _QUANTIZED:
        raise ConfigError(f"quantised dtype {tensor.dtype} cannot be captured.", dtype=str(tensor.dtype))
    integers = torch.empty(0, dtype=_QUANTIZED[tensor.dtype], device=tensor.device)
    return integers.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def quantizer_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Plain values from which `quantized_like` makes an equal quantiser."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.qscheme() == torch.per_tensor_affine:
        return ("tensor", dtype, tensor.q_scale(), tensor.q_zero_point())
    if tensor.qscheme() == torch.per_channel_affine:
        scales, zeros = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
        return ("channel", dtype, scales.tolist(), zeros.tolist(), tensor.q_per_channel_axis())
    raise ConfigError(f"quantisation scheme {tensor.qscheme()} cannot be captured.")


def quantized_like(quantizer: tuple[Any, ...], shape: tuple[int, ...]) -> torch.Tensor:
    """An unfilled quantised tensor, see `quantizer_of`."""
    scheme, dtype, scale, zero, *axis = quantizer
    kind = getattr(torch, dtype)
    if scheme == "tensor":
        return torch._empty_affine_quantized(shape, scale=scale, zero_point=zero, dtype=kind)
    scales = torch.tensor(scale, dtype=torch.float64)
    zeros = torch.tensor(zero, dtype=torch.int64)
    return torch._empty_per_channel_affine_quantized(
        shape, scales=scales, zero_points=zeros, axis=axis[0], dtype=kind
    )


# Torch's rule takes 0.1 ms, for thousands of tensors at each save, and training waits for it.  A mesh that is
# gone must not be kept: it has open sockets.
_placements: WeakKeyDictionary[DeviceMesh, dict[tuple[object, ...], _OnMesh]] = WeakKeyDictionary()
#: Of one mesh; an optimizer's moments share those of their parameters.
_MOST_PLACEMENTS = 1 << 14


@dataclass(frozen=True)
class _OnMesh:
    """A placement on a mesh of `size` ranks.  `is_whole`: each of them has all of the tensor."""

    placement: Placement
    size: int
    is_whole: bool


def _dtensor_placement(tensor: DTensor) -> Placement:
    mesh = tensor.device_mesh
    # All that the answer depends on, by value, as is the mesh: what is known cannot be out of date.
    key = (tensor.shape, tensor.placements, mesh.get_coordinate())
    known = _placements.get(mesh)
    if known is None:
        known = _placements[mesh] = {}
    found = known.get(key)
    if found is None:
        if len(known) >= _MOST_PLACEMENTS:
            known.clear()
        found = known[key] = _placement_on(mesh, *key)
    if found.is_whole and found.size == dist.get_world_size():  # like one without a mesh
        return replace(found.placement, attributes=())
    return found.placement


def _placement_on(
    mesh: DeviceMesh, shape: torch.Size, placements: tuple[Any, ...], coordinate: tuple[int, ...] | None
) -> _OnMesh:
    # The one place that needs torch's own rule for uneven and strided shards.
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(p.is_partial() for p in placements):
        raise ConfigError("a DTensor with a pending reduction (Partial) cannot be captured; redistribute it.")
    _, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
    replica = 0
    for size, position, placement in zip(mesh.shape, coordinate or (), placements, strict=False):
        if isinstance(placement, Replicate):
            replica = replica * size + position
    size, ranks = _mesh_text(mesh)
    placement = Placement(
        global_shape=tuple(shape),
        global_offset=tuple(offset),
        replica_id=replica,
        attributes=((MESH, ranks),),
    )
    return _OnMesh(placement, size, all(p.is_replicate() for p in placements))


# Asked for each shape on a mesh, and there are few meshes.
_meshes: WeakKeyDictionary[DeviceMesh, tuple[int, str]] = WeakKeyDictionary()


def _mesh_text(mesh: DeviceMesh) -> tuple[int, str]:
    """How many ranks it has, and which."""
    known = _meshes.get(mesh)
    if known is None:
        ranks = mesh.mesh.flatten().tolist()
        known = _meshes[mesh] = len(ranks), text_of_ranks(ranks)
    return known


def _local_shard(tensor: Any) -> ShardedView:
    """Of the type that FSDP1's sharded state dicts and torch's older sharding have."""
    shards = tensor.local_shards()
    if len(shards) > 1:
        raise ConfigError(
            f"a {type(tensor).__name__} of {len(shards)} parts on one rank cannot be captured.",
            hint="Save its parts as plain tensors.",
        )
    shape = tuple(tensor.metadata().size)
    if not shards:
        return ShardedView(
            data=None, placement=Placement(global_shape=shape, global_offset=(0,) * len(shape))
        )
    offset = tuple(shards[0].metadata.shard_offsets)
    return ShardedView(data=shards[0].tensor, placement=Placement(global_shape=shape, global_offset=offset))


register_sharded_type(
    "torch.distributed._shard.sharded_tensor.api:ShardedTensor",
    _local_shard,
    assign=lambda holder, data: None,  # a rank without a part has nothing to take
)
