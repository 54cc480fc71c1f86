# SPDX-License-Identifier: Apache-2.0
"""The skeleton of a state: its tree of nodes, made from a state once, written and read as JSON.

The tree names tensors by their key in the table and values by their position; it holds neither.
"""

from __future__ import annotations

import functools
import json
from dataclasses import fields
from typing import Any

import torch

from resiliency.checkpoint.state import values as plain
from resiliency.checkpoint.state.layout import Path
from resiliency.checkpoint.state.stateful import StatefulNode, check_takes_back
from resiliency.checkpoint.state.tensors import Placement, Wrapped, leaf_kind, leaf_of, sharded_type, wrapped
from resiliency.checkpoint.state.tree import (
    DataclassNode,
    DictNode,
    Node,
    ObjectNode,
    SequenceNode,
    TensorNode,
    ValueNode,
    dict_class,
    has_tensors,
    is_stateful,
    path_part,
    sequence_class,
)
from resiliency.checkpoint.state.values import Allowed, class_name
from resiliency.checkpoint.state.wrappers import SparseNode, WrapperNode, is_sparse
from resiliency.errors import CheckpointCorrupt, ConfigError


class Builder:
    """Makes the nodes of one state; numbers values and names tensors in the order of the walk."""

    def __init__(self) -> None:
        self.nodes: list[TensorNode] = []
        #: Where the values are, in their order.
        self.places: list[Path] = []
        self._keys: set[str] = set()

    def build(self, state: object) -> Node:
        """The tree of `state`.

        Raises:
            ConfigError: the state contains itself.
        """
        try:
            return self._node(state, ())
        except RecursionError:
            raise ConfigError("the state contains itself, or is nested too deeply to be saved.") from None

    def _node(self, obj: Any, path: Path) -> Node:
        return self._value(path) if not has_tensors(obj) else self._structured(obj, path)

    def _value(self, path: Path) -> ValueNode:
        self.places.append(path)
        return ValueNode(len(self.places) - 1)

    def _structured(self, obj: Any, path: Path) -> Node:
        if is_sparse(obj):
            indices = self._node(obj._indices(), (*path, "indices"))
            return SparseNode(indices, self._node(obj._values(), (*path, "values")), self._value(path))
        if (parts := wrapped(obj)) is not None:
            return self._wrapper(parts, path)
        kind = leaf_kind(obj)
        if kind is not None:
            return self._leaf(obj, kind, path)
        if isinstance(obj, dict):
            for key in obj:
                _check_key(key, path)
            items = tuple(self._node(item, (*path, path_part(key))) for key, item in obj.items())
            return DictNode(dict_class(type(obj)), tuple(obj), items)
        if isinstance(obj, (list, tuple)):
            items = tuple(self._node(item, (*path, i)) for i, item in enumerate(obj))
            return SequenceNode(sequence_class(obj), items)
        if is_stateful(obj):
            state = obj.state_dict()
            if isinstance(obj, torch.nn.Module):
                check_takes_back(obj, state, path)
            return StatefulNode(class_name(type(obj)), self._node(state, path))
        names = tuple(f.name for f in fields(obj))
        items = tuple(self._node(getattr(obj, name, None), (*path, name)) for name in names)
        return DataclassNode(class_name(type(obj)), names, items)

    def _leaf(self, obj: Any, kind: str, path: Path) -> Node:
        if kind == "sharded":
            view = sharded_type(type(obj)).describe(obj)  # type: ignore[union-attr]
            if not isinstance(view.data, torch.Tensor):
                return ObjectNode(self._value(path).index, view.placement)
        else:
            leaf_of(obj, kind, path)  # what has no memory is refused; later walks do not look closer
        quantized = kind != "sharded" and isinstance(obj, torch.Tensor) and obj.is_quantized
        node = TensorNode(
            key=self._key(path),
            kind=kind,
            path=path,
            requires_grad=kind == "parameter" and bool(obj.requires_grad),
            quantizer=self._value(path).index if quantized else -1,
        )
        self.nodes.append(node)
        return node

    def _wrapper(self, obj: Wrapped, path: Path) -> WrapperNode:
        names, _ = obj.flatten()
        items = tuple(self._structured(getattr(obj.tensor, name), (*path, name)) for name in names)
        return WrapperNode(
            class_name(type(obj.tensor)),
            names,
            items,
            self._value(path).index,
            path,
            obj.shape,
            obj.stride,
            obj.placement,
        )

    def _key(self, path: Path) -> str:
        wanted = key = "/".join(map(str, path)) or "value"
        count = 1
        while key in self._keys:  # {"a/b": x, "a": {"b": y}}, or {1: x, "1": y}
            count += 1
            key = f"{wanted}~{count}"
        self._keys.add(key)
        return key


def _check_key(key: Any, path: Path) -> None:
    """Keys beside tensors are part of a layout, which has to be read without the classes of a job."""
    if type(key) in (str, int):
        return
    try:
        plain.decode(json.loads(json.dumps(plain.encode(key))), Allowed())
    except ConfigError as error:
        raise ConfigError(
            f"{'/'.join(map(str, path)) or 'the state'}: a dict that holds tensors has the key {key!r}, of"
            f" class {class_name(type(key))}, which could not be restored.",
            hint="Use strings, numbers or tuples of them as keys.",
        ) from error


def to_bytes(root: Node) -> bytes:
    """The tree as JSON: what a layout carries."""
    return json.dumps(root.to_json(), separators=(",", ":")).encode("ascii")


def from_bytes(data: bytes) -> Node:
    """Inverse of `to_bytes`.

    Raises:
        CheckpointCorrupt: not a tree that `to_bytes` wrote.
    """
    try:
        return _parse(json.loads(data))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointCorrupt(f"the skeleton of a state layout cannot be read: {error!r}.") from error


# Every save looks at it, and it seldom changes.  As many as two tiers of a large host need.
@functools.lru_cache(maxsize=32)
def tree_of(data: bytes) -> Node:
    """As `from_bytes`, parsed once: for those who only look at the tree."""
    return from_bytes(data)


def _parse(node: Any) -> Node:
    kind = node["n"]
    if kind == "value":
        return ValueNode(node["index"])
    if kind == "tensor":
        return TensorNode(
            node["key"], node["kind"], tuple(node["path"]), node.get("grad", False), node.get("quantizer", -1)
        )
    if kind == "dict":
        keys = tuple(plain.decode(key, Allowed()) for key in node["keys"])
        return DictNode(node["class"], keys, _items(node))
    if kind == "sequence":
        return SequenceNode(node["class"], _items(node))
    if kind == "dataclass":
        return DataclassNode(node["class"], tuple(node["names"]), _items(node))
    if kind == "stateful":
        return StatefulNode(node["class"], _parse(node["item"]))
    if kind == "sparse":
        return SparseNode(_parse(node["indices"]), _parse(node["values"]), ValueNode(node["size"]["index"]))
    if kind == "wrapper":
        return WrapperNode(
            node["class"],
            tuple(node["names"]),
            _items(node),
            node["index"],
            tuple(node["path"]),
            tuple(node["shape"]),
            tuple(node["stride"]),
            _placement(node["placement"]) if "placement" in node else None,
        )
    if kind == "object":
        return ObjectNode(node["index"], _placement(node))
    raise CheckpointCorrupt(f"unknown node {kind!r} in the skeleton of a state layout.")


def sharded_objects(root: Node) -> list[ObjectNode]:
    """The opaque objects of registered sharded types in a tree, in the order of the walk."""
    if isinstance(root, ObjectNode):
        return [root]
    if isinstance(root, StatefulNode):
        return sharded_objects(root.item)
    items = getattr(root, "items", ())
    return [found for item in items for found in sharded_objects(item)]


def _items(node: Any) -> tuple[Node, ...]:
    return tuple(_parse(item) for item in node["items"])


def _placement(node: Any) -> Placement:
    return Placement(
        global_shape=tuple(node["global_shape"]),
        global_offset=tuple(node["global_offset"]),
        replica_id=node["replica_id"],
        name=node["name"],
        attributes=tuple((name, text) for name, text in node["attributes"]),
    )
