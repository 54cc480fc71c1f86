# SPDX-License-Identifier: Apache-2.0
"""The nodes of a state's tree, and the walks over them.

`Node.gather` walks a state of known structure and picks up its tensors and values in a fixed order,
checking the structure on the way: the steady state of saving.  The way back has two forms:
`Node.rebuild` makes new objects, `Node.restore` goes through objects that exist and marks their
tensors as targets, so that bytes are read straight into them.

A subtree without tensors is one value: lists of losses may grow and settings may come and go
without a new layout.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Protocol

import torch

from resiliency.checkpoint.state import values as plain
from resiliency.checkpoint.state.layout import Path
from resiliency.checkpoint.state.tensors import (
    Leaf,
    Placement,
    leaf_kind,
    leaf_of,
    quantized_integers,
    quantized_like,
    quantizer_of,
    sharded_type,
)
from resiliency.checkpoint.state.values import Allowed, class_name
from resiliency.errors import LayoutMismatch

logger = logging.getLogger(__name__)

#: Run after all bytes are in place; returns the restored object.
Finish = Callable[[], Any]


class StructureChanged(Exception):
    """Internal: a state no longer has the structure of the layout at hand; a new one is made."""


@dataclass
class Gathered:
    """What one walk over a state picked up.  `values` are encoded already."""

    leaves: list[Leaf] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)


class TensorSource(Protocol):
    """Where a walk back takes from."""

    allowed: Allowed
    #: Whether dicts may have other keys than were saved; None: within an object that takes its state whole.
    partial: bool | None
    #: What puts values in the place of the objects that are there.
    putting: plain.Put

    def value(self, index: int) -> Any:
        """The decoded value at `index`."""
        ...

    def fresh(self, key: str) -> torch.Tensor:
        """A new tensor that will hold the bytes of `key` when the restore is done."""
        ...

    def target(self, key: str, raw: torch.Tensor, placement: Placement | None = None) -> None:
        """Let the bytes of `key` be read into `raw`, a part at `placement`.  Raises LayoutMismatch."""
        ...

    def check_place(self, key: str, placement: Placement) -> None:
        """Raise LayoutMismatch unless the part saved as `key` lies at `placement`."""
        ...

    def mark(self) -> int:
        """How many targets there are."""
        ...

    def forget(self, mark: int) -> None:
        """Drop the targets after `mark`."""
        ...


class Node(Protocol):
    def gather(self, obj: Any, into: Gathered) -> None:
        """Pick up the parts of `obj`.  Raises StructureChanged."""
        ...

    def rebuild(self, source: TensorSource) -> Any: ...

    def restore(self, target: Any, source: TensorSource, path: Path) -> Finish: ...

    def to_json(self) -> Any: ...


def mismatch(path: Path, expected: str, found: str) -> LayoutMismatch:
    """Both sides of a difference in structure, by name."""
    key = "/".join(map(str, path)) or "(the whole state)"
    return LayoutMismatch(
        f"{key}: the checkpoint holds {expected}, the state to restore has {found}.", key=key
    )


def listed_keys(keys: Collection[Any], most: int = 5) -> str:
    names = sorted(map(repr, keys))
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(names[:most]) or "nothing else") + more


def kind_name(obj: object) -> str:
    return f"a {type(obj).__name__}"


@dataclass(frozen=True)
class ValueNode:
    """A subtree without tensors."""

    index: int

    def gather(self, obj: Any, into: Gathered) -> None:
        if has_tensors(obj):
            raise StructureChanged
        into.values.append(plain.encode(obj))

    def rebuild(self, source: TensorSource) -> Any:
        return source.value(self.index)

    def restore(self, target: Any, source: TensorSource, path: Path) -> Finish:
        kind = leaf_kind(target)
        if kind not in (None, "numpy") or is_stateful(target):
            raise mismatch(path, "a plain value", kind_name(target))
        source.allowed.trust(target)
        value = source.value(self.index)
        if kind is not None:  # an array that could have been a tensor when it was saved
            form = (value.shape, value.dtype) if plain.is_array(value) else None
            if form != (target.shape, target.dtype):
                held = "a plain value" if form is None else f"{form[1]} {form[0]}"
                raise mismatch(path, held, f"{target.dtype} {target.shape}")
        containers = source.partial is not None
        return lambda: source.putting.put(target, value, containers=containers)

    def to_json(self) -> Any:
        return {"n": "value", "index": self.index}


@dataclass(frozen=True)
class TensorNode:
    """A leaf.  `kind` as `leaf_kind` gives it; `quantizer` is the index of a value, or -1."""

    key: str
    kind: str
    path: Path
    requires_grad: bool = False
    quantizer: int = -1

    def gather(self, obj: Any, into: Gathered) -> None:
        if leaf_kind(obj) != self.kind:
            raise StructureChanged
        if type(obj) is torch.Tensor and self.quantizer < 0 and _is_ordinary(obj):
            into.leaves.append(Leaf(obj))  # most of a state: no need to look closer
            return
        if self.kind == "sharded":
            view = sharded_type(type(obj)).describe(obj)  # type: ignore[union-attr]
            if not isinstance(view.data, torch.Tensor):
                raise StructureChanged
            leaf = leaf_of(view.data, "tensor", self.path)
            into.leaves.append(Leaf(leaf.raw, view.placement))
            return
        if (self.quantizer >= 0) != (isinstance(obj, torch.Tensor) and obj.is_quantized):
            raise StructureChanged
        into.leaves.append(leaf_of(obj, self.kind, self.path))
        if self.quantizer >= 0:
            into.values.append(plain.encode(quantizer_of(obj)))

    def rebuild(self, source: TensorSource) -> Any:
        tensor = source.fresh(self.key)
        if self.quantizer >= 0:
            quantized = quantized_like(source.value(self.quantizer), tuple(tensor.shape))
            source.target(self.key, quantized_integers(quantized))
            return quantized
        if self.kind == "parameter":
            return torch.nn.Parameter(tensor, requires_grad=self.requires_grad)
        return tensor.numpy() if self.kind == "numpy" else tensor

    def restore(self, target: Any, source: TensorSource, path: Path) -> Finish:
        kind = leaf_kind(target)
        if kind is None and self.kind == "numpy" and plain.is_array(target):
            return self._restore_array(target, source, path)
        if kind is None:
            raise mismatch(path, "a tensor", kind_name(target))
        if kind == "sharded":
            view = sharded_type(type(target)).describe(target)  # type: ignore[union-attr]
            if not isinstance(view.data, torch.Tensor):
                raise mismatch(path, "a tensor", f"{kind_name(target)} without a tensor")
            source.target(self.key, leaf_of(view.data, "tensor", path).raw, view.placement)
            return lambda: target
        if (self.quantizer >= 0) and (
            not target.is_quantized or quantizer_of(target) != source.value(self.quantizer)
        ):
            return constantly(self.rebuild(source))
        if self.quantizer < 0 and getattr(target, "is_quantized", False):
            raise mismatch(path, "a tensor that is not quantised", "a quantised one")
        leaf = leaf_of(target, kind, path)
        placement = leaf.placement
        if placement is None and self.kind == "dtensor":  # a plain tensor is a whole one
            shape = tuple(leaf.raw.shape)
            placement = Placement(global_shape=shape, global_offset=(0,) * len(shape))
        source.target(self.key, leaf.raw, placement)
        return lambda: target

    def _restore_array(self, target: Any, source: TensorSource, path: Path) -> Finish:
        """Into one whose memory torch cannot share: it is read-only, or has negative strides."""
        made = self.rebuild(source)
        if (made.shape, made.dtype) != (target.shape, target.dtype):
            raise mismatch(path, f"{made.dtype} {made.shape}", f"{target.dtype} {target.shape}")
        return lambda: source.putting.put(target, made)

    def to_json(self) -> Any:
        node: dict[str, Any] = {"n": "tensor", "key": self.key, "kind": self.kind, "path": list(self.path)}
        if self.requires_grad:
            node["grad"] = True
        if self.quantizer >= 0:
            node["quantizer"] = self.quantizer
        return node


@dataclass(frozen=True)
class ObjectNode:
    """An opaque object of a registered sharded type: its data is a value, its placement structure."""

    index: int
    placement: Placement

    def gather(self, obj: Any, into: Gathered) -> None:
        registered = sharded_type(type(obj))
        view = registered.describe(obj) if registered else None
        if view is None or isinstance(view.data, torch.Tensor) or view.placement != self.placement:
            raise StructureChanged
        into.values.append(plain.encode(view.data))

    def rebuild(self, source: TensorSource) -> Any:
        return source.value(self.index)

    def restore(self, target: Any, source: TensorSource, path: Path) -> Finish:
        registered = sharded_type(type(target))
        if registered is None:
            raise mismatch(path, "a sharded object", kind_name(target))
        view = registered.describe(target)
        if isinstance(view.data, torch.Tensor):
            raise mismatch(path, "nothing or an object", f"{kind_name(target)} with a tensor")
        value = source.value(self.index)

        def finish() -> Any:
            registered.assign(target, value)
            return target

        return finish

    def to_json(self) -> Any:
        return {"n": "object", "index": self.index, **placement_to_json(self.placement)}


_PLAIN_CLASSES: dict[str, Callable[[], Any]] = {
    "dict": dict,
    "collections:OrderedDict": OrderedDict,
    "collections:defaultdict": lambda: defaultdict(None),
}


@dataclass(frozen=True)
class DictNode:
    """A dict or a subclass of it; the order of keys is part of the structure."""

    cls: str
    keys: tuple[Any, ...]
    items: tuple[Node, ...]

    def gather(self, obj: Any, into: Gathered) -> None:
        if dict_class(type(obj)) != self.cls or tuple(obj) != self.keys:
            raise StructureChanged
        for item, node in zip(obj.values(), self.items, strict=True):
            node.gather(item, into)

    def rebuild(self, source: TensorSource) -> Any:
        made = _PLAIN_CLASSES.get(self.cls) or source.allowed.resolve(self.cls)
        result = made()
        for key, node in zip(self.keys, self.items, strict=True):
            result[key] = node.rebuild(source)
        return result

    def restore(self, target: Any, source: TensorSource, path: Path) -> Finish:
        if not isinstance(target, dict):
            raise mismatch(path, "a dict", kind_name(target))
        if set(target) != set(self.keys):
            self._differs(target, source, path)
        finishes = {
            key: _restore_item(key, node, target[key], source, (*path, path_part(key)))
            for key, node in zip(self.keys, self.items, strict=True)
            if key in target
        }

        def finish() -> Any:
            for key, each in finishes.items():
                target[key] = each()
            return target

        return finish

    def _differs(self, target: dict[Any, Any], source: TensorSource, path: Path) -> None:
        """The keys differ: an error, unless a part will do."""
        name = "/".join(map(str, path)) or "(the whole state)"
        lacking, left = set(target) - set(self.keys), set(self.keys) - set(target)
        texts = [
            f"{word} {listed_keys(keys)}, which {other}"
            for word, keys, other in (
                ("the checkpoint does not hold", lacking, "the state to restore has"),
                ("the state to restore does not have", left, "the checkpoint holds"),
            )
            if keys
        ]
        message = f"{name}: {'; '.join(texts)}."
        if not source.partial or (not path and not set(target) & set(self.keys)):
            hint = "Is it built as it was when it was saved?"
            if source.partial is False:
                hint = "restore(state, partial=True) restores what both have and leaves the rest as it is."
            raise LayoutMismatch(message, hint=hint, key=name)
        logger.info("restoring a part.  %s", message)

    def to_json(self) -> Any:
        keys = [plain.encode(key) for key in self.keys]
        return {
            "n": "dict",
            "class": self.cls,
            "keys": keys,
            "items": [node.to_json() for node in self.items],
        }


def _restore_item(key: Any, node: Node, target: Any, source: TensorSource, path: Path) -> Finish:
    """What a module says of itself in `get_extra_state` may have another form in a fresh one."""
    if source.partial is not None or not isinstance(key, str) or key.rpartition(".")[2] != "_extra_state":
        return node.restore(target, source, path)
    mark = source.mark()
    try:
        return node.restore(target, source, path)
    except LayoutMismatch:
        source.forget(mark)
        return constantly(node.rebuild(source))


@dataclass(frozen=True)
class SequenceNode:
    """A list, a tuple or a named tuple."""

    cls: str
    items: tuple[Node, ...]

    def gather(self, obj: Any, into: Gathered) -> None:
        if sequence_class(obj) != self.cls or len(obj) != len(self.items):
            raise StructureChanged
        for item, node in zip(obj, self.items, strict=True):
            node.gather(item, into)

    def _make(self, made: Any, items: list[Any]) -> Any:
        return made._make(items) if hasattr(made, "_make") else made(items)

    def rebuild(self, source: TensorSource) -> Any:
        made = {"list": list, "tuple": tuple}.get(self.cls) or source.allowed.resolve(self.cls)
        return self._make(made, [node.rebuild(source) for node in self.items])

    def restore(self, target: Any, source: TensorSource, path: Path) -> Finish:
        if not isinstance(target, (list, tuple)) or len(target) != len(self.items):
            size = f" of {len(target)}" if isinstance(target, (list, tuple)) else ""
            raise mismatch(path, f"a sequence of {len(self.items)}", kind_name(target) + size)
        finishes = [
            node.restore(item, source, (*path, i))
            for i, (item, node) in enumerate(zip(target, self.items, strict=True))
        ]

        def finish() -> Any:
            items = [each() for each in finishes]
            if isinstance(target, list):
                target[:] = items
                return target
            same = all(new is old for new, old in zip(items, target, strict=True))
            return target if same else self._make(type(target), items)

        return finish

    def to_json(self) -> Any:
        return {"n": "sequence", "class": self.cls, "items": [node.to_json() for node in self.items]}


@dataclass(frozen=True)
class DataclassNode:
    cls: str
    names: tuple[str, ...]
    items: tuple[Node, ...]

    def gather(self, obj: Any, into: Gathered) -> None:
        if class_name(type(obj)) != self.cls:
            raise StructureChanged
        for name, node in zip(self.names, self.items, strict=True):
            node.gather(getattr(obj, name, None), into)

    def rebuild(self, source: TensorSource) -> Any:
        cls = source.allowed.resolve(self.cls)
        result = object.__new__(cls)  # not cls(...): __post_init__ ran when the original was made
        for name, node in zip(self.names, self.items, strict=True):
            object.__setattr__(result, name, node.rebuild(source))
        return result

    def restore(self, target: Any, source: TensorSource, path: Path) -> Finish:
        if class_name(type(target)) != self.cls:
            raise mismatch(path, f"a {self.cls}", kind_name(target))
        finishes = {
            name: node.restore(getattr(target, name, None), source, (*path, name))
            for name, node in zip(self.names, self.items, strict=True)
        }

        def finish() -> Any:
            for name, each in finishes.items():
                object.__setattr__(target, name, each())
            return target

        return finish

    def to_json(self) -> Any:
        items = [node.to_json() for node in self.items]
        return {"n": "dataclass", "class": self.cls, "names": list(self.names), "items": items}


def placement_to_json(placement: Placement) -> dict[str, Any]:
    return {
        "name": placement.name, "global_shape": list(placement.global_shape),
        "global_offset": list(placement.global_offset), "replica_id": placement.replica_id,
        "attributes": [list(pair) for pair in placement.attributes],
    }  # fmt: skip


def _is_ordinary(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_meta)


def constantly(value: Any) -> Finish:
    return lambda: value


def path_part(key: object) -> str | int:
    """A dict key as part of a path."""
    return key if type(key) in (str, int) else repr(key)  # type: ignore[return-value]


def dict_class(cls: type) -> str:
    return "dict" if cls is dict else class_name(cls)


def sequence_class(obj: object) -> str:
    cls = type(obj)
    return cls.__name__ if cls in (list, tuple) else class_name(cls)


def has_tensors(obj: Any) -> bool:
    if leaf_kind(obj) is not None or is_stateful(obj):
        return True
    if isinstance(obj, dict):
        return any(map(has_tensors, obj.values()))
    if isinstance(obj, (list, tuple)):
        return any(map(has_tensors, obj))
    if is_dataclass(obj) and not isinstance(obj, type):
        return any(has_tensors(getattr(obj, f.name, None)) for f in fields(obj))
    return False


def is_stateful(value: object) -> bool:
    """True for what can give and take its own state: modules, optimizers, torch's ``Stateful``."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict") and not isinstance(value, type)
