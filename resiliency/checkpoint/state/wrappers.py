# SPDX-License-Identifier: Apache-2.0
"""Nodes of tensors that hold tensors: sparse ones, and subclasses that wrap others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from resiliency.checkpoint.state import values as plain
from resiliency.checkpoint.state.layout import Path
from resiliency.checkpoint.state.tensors import (
    Leaf,
    Placement,
    Wrapped,
    sharded_type,
    wrapped,
)
from resiliency.checkpoint.state.tree import (
    Finish,
    Gathered,
    Node,
    StructureChanged,
    TensorNode,
    TensorSource,
    ValueNode,
    constantly,
    kind_name,
    mismatch,
    placement_to_json,
)
from resiliency.checkpoint.state.values import class_name
from resiliency.errors import CheckpointError, LayoutMismatch


@dataclass(frozen=True)
class SparseNode:
    """A sparse COO tensor: its indices and values; the number of elements is structure."""

    indices: Node
    values: Node
    size: ValueNode

    def gather(self, obj: Any, into: Gathered) -> None:
        if not is_sparse(obj):
            raise StructureChanged
        self.indices.gather(obj._indices(), into)
        self.values.gather(obj._values(), into)
        self.size.gather([obj.size(), obj.is_coalesced()], into)

    def rebuild(self, source: TensorSource) -> Any:
        # Not on the unfilled tensors: torch checks (or sorts by) the indices when it makes the tensor.
        indices, values = self.indices.rebuild(source), self.values.rebuild(source)
        size, coalesced = self.size.rebuild(source)
        return torch.sparse_coo_tensor(indices, values, size, check_invariants=False, is_coalesced=coalesced)

    def restore(self, target: Any, source: TensorSource, path: Path) -> Finish:
        return constantly(self.rebuild(source))

    def to_json(self) -> Any:
        parts = {"indices": self.indices, "values": self.values, "size": self.size}
        return {"n": "sparse", **{name: node.to_json() for name, node in parts.items()}}


@dataclass(frozen=True)
class WrapperNode:
    """A tensor of a wrapper subclass: its parts; `index` is the value that its class needs beside them.

    `placement` is that of the local part of a DTensor.  Where that is one of several, the parts belong to it
    alone: each is a tensor of its own, called after where it lies.
    """

    cls: str
    names: tuple[str, ...]
    items: tuple[Node, ...]
    index: int
    path: Path
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    placement: Placement | None = None

    def gather(self, obj: Any, into: Gathered) -> None:
        found = wrapped(obj)
        if found is None or (found.shape, found.stride, found.placement) != (
            self.shape,
            self.stride,
            self.placement,
        ):
            raise StructureChanged
        names, context = found.flatten()
        if class_name(type(found.tensor)) != self.cls or names != self.names:
            raise StructureChanged
        first = len(into.leaves)
        for name, node in zip(names, self.items, strict=True):
            node.gather(getattr(found.tensor, name), into)
        # The outermost tensor is what a write is counted in, whatever its parts are in turn.
        into.leaves[first:] = [replace(leaf, owner=obj) for leaf in into.leaves[first:]]
        if self.placement is not None:
            paths = _tensor_paths(self)
            into.leaves[first:] = map(self._placed, into.leaves[first:], paths)
        into.values.append(plain.encode(context))

    def _placed(self, leaf: Leaf, path: Path) -> Leaf:
        """A part of the local part of a DTensor."""
        outer, shape = self.placement, tuple(leaf.raw.shape)
        assert outer is not None, "the caller has looked"
        name = None
        if outer.global_shape != self.shape:
            name = f"{'.'.join(map(str, path))}@{','.join(map(str, outer.global_offset))}"
        placement = Placement(
            global_shape=shape,
            global_offset=(0,) * len(shape),
            replica_id=outer.replica_id,
            name=name,
            attributes=outer.attributes,
        )
        return replace(leaf, placement=placement)

    def rebuild(self, source: TensorSource) -> Any:
        cls = source.allowed.resolve(self.cls)
        parts = {name: node.rebuild(source) for name, node in zip(self.names, self.items, strict=True)}
        return cls.__tensor_unflatten__(parts, source.value(self.index), torch.Size(self.shape), self.stride)

    def restore(self, target: Any, source: TensorSource, path: Path) -> Finish:
        found = wrapped(target)
        if found is None or class_name(type(found.tensor)) != self.cls:
            has = kind_name(target if found is None else found.tensor)
            raise self._differs(path, f"a {self.cls.rpartition(':')[2]} of shape {self.shape}", has, target)
        if found.shape != self.shape:
            raise self._differs(path, f"shape {self.shape}", f"shape {found.shape}", target)
        self.check_place(found.placement, path, target)
        names, context = found.flatten()
        saved = source.value(self.index)
        is_same = names == self.names and plain.encode(saved) == plain.encode(context)
        if not is_same and not (source.allowed.permits(self.cls) and vars(found.tensor).keys() >= set(names)):
            texts = [
                f"{each!r} and parts {', '.join(of)}" for each, of in ((saved, self.names), (context, names))
            ]
            error = self._differs(path, f"a {self.cls} with {texts[0]}", f"one with {texts[1]}", target)
            error.hint = f"If what was saved is to replace that: CheckpointerOptions(allow=[{self.cls!r}])."
            raise error
        finishes = {
            name: node.restore(getattr(found.tensor, name), source, (*path, name))
            if name in names
            else constantly(node.rebuild(source))
            for name, node in zip(self.names, self.items, strict=True)
        }

        def finish() -> Any:
            parts = {name: each() for name, each in finishes.items()}
            if not is_same:
                self._become(found, parts, saved, path)
                return target
            for name, part in parts.items():
                if part is not getattr(found.tensor, name):
                    setattr(found.tensor, name, part)
            return target

        return finish

    def _become(self, found: Wrapped, parts: dict[str, Any], context: Any, path: Path) -> None:
        """Let a tensor have the parts and the context of the one that was saved: modules refer to it."""
        old = found.tensor
        for name, part in parts.items():
            if isinstance(part, torch.Tensor) and part.device != old.device:
                parts[name] = part.to(old.device)  # made anew, on the host
        new = type(old).__tensor_unflatten__(parts, context, torch.Size(self.shape), found.stride)
        vars(old).update(vars(new))
        names, became = found.flatten()
        is_same = names == self.names and plain.encode(became) == plain.encode(context)
        if not is_same or (new.dtype, new.device) != (old.dtype, old.device):
            key = "/".join(map(str, path))
            raise CheckpointError(
                f"{key}: a {self.cls} of {old.dtype} with {became!r} cannot become one of {new.dtype} with"
                f" {context!r}, which was saved.",
                hint="Other parts of the state are overwritten already.  Build it as it was then.",
                key=key,
            )

    def check_place(self, found: Placement | None, path: Path, target: Any = None) -> None:
        """Raise LayoutMismatch unless the part that was saved is the one at `found`."""
        texts = [
            "a whole tensor"
            if each is None
            else f"the part of a tensor {each.global_shape} that begins at {each.global_offset}"
            for each in (self.placement, found)
        ]
        if texts[0] != texts[1]:
            raise self._differs(path, texts[0], texts[1], target)

    def _differs(self, path: Path, expected: str, found: str, target: Any) -> LayoutMismatch:
        error = mismatch(path, expected, found)
        # As for a tensor of another shape: an optimizer that has such state is not given another one's.
        error.fields.update(expected_shape=self.shape, found_shape=tuple(getattr(target, "shape", ())))
        return error

    def to_json(self) -> Any:
        node: dict[str, Any] = {
            "n": "wrapper",
            "class": self.cls,
            "names": list(self.names),
            "items": [node.to_json() for node in self.items],
            "index": self.index,
            "path": list(self.path),
            "shape": list(self.shape),
            "stride": list(self.stride),
        }
        if self.placement is not None:
            node["placement"] = placement_to_json(self.placement)
        return node


def _tensor_paths(node: Node) -> list[Path]:
    """Of the tensors in a part of a wrapper, in the order of the walk."""
    if isinstance(node, TensorNode):
        return [node.path]
    parts = (node.indices, node.values) if isinstance(node, SparseNode) else getattr(node, "items", ())
    return [path for part in parts for path in _tensor_paths(part)]


def is_sparse(obj: object) -> bool:
    if not isinstance(obj, torch.Tensor) or sharded_type(type(obj)) is not None:
        return False
    return obj.layout is torch.sparse_coo
