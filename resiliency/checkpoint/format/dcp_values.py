# SPDX-License-Identifier: Apache-2.0
"""The plain values of a captured state, under the names that stock torch looks for.

`torch.distributed.checkpoint` flattens nested dictionaries to keys with dots; a list is one leaf
unless it holds tensors or dictionaries.  Values whose classes may not be named, or are not
installed here, are left out: this library's own readers still find them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from resiliency.checkpoint.state.layout import Shard
from resiliency.checkpoint.state.skeleton import tree_of
from resiliency.checkpoint.state.stateful import StatefulNode
from resiliency.checkpoint.state.tree import (
    DataclassNode,
    DictNode,
    Node,
    ObjectNode,
    SequenceNode,
    ValueNode,
)
from resiliency.checkpoint.state.values import Allowed, decode, load_values
from resiliency.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)

Path = tuple[str | int, ...]


class _Unknown:
    """Stands for a value that cannot be decoded here."""


class FlattenedValues:
    """For `DcpFormat(values=FlattenedValues())`.

    The tree is walked and not rebuilt, so a state may have containers of any class.

    Args:
        allow: classes that values may name, see `resiliency.checkpoint.state.values`.
    """

    def __init__(self, allow: Iterable[type | str] = ()) -> None:
        self._allowed = Allowed(allow)

    def __call__(self, shard: Shard) -> list[tuple[Path, object]]:
        values = load_values(shard.values)

        def value(index: int) -> object:
            try:
                return decode(values[index], self._allowed)
            except (CheckpointError, ConfigError) as error:
                logger.debug("a value is left out of the persistent tier's stock form: %s", error)
                return _Unknown()

        return list(_walk((), tree_of(shard.layout.skeleton), value))


def _walk(path: Path, node: Node, value: Callable[[int], object]) -> Iterator[tuple[Path, object]]:
    if isinstance(node, ValueNode):
        yield from _values(path, value(node.index))
    elif isinstance(node, ObjectNode):
        found = value(node.index)
        if not isinstance(found, _Unknown):
            yield path, found
    elif isinstance(node, StatefulNode):
        yield from _walk(path, node.item, value)
    elif isinstance(node, DictNode | SequenceNode | DataclassNode):
        for name, item in zip(_names(node), node.items, strict=True):
            yield from _walk((*path, name), item, value)


def _names(node: DictNode | SequenceNode | DataclassNode) -> Iterable[str | int]:
    if isinstance(node, DictNode):
        return map(str, node.keys)
    return range(len(node.items)) if isinstance(node, SequenceNode) else node.names


def _values(path: Path, value: object) -> Iterator[tuple[Path, object]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _values((*path, str(key)), item)
    elif isinstance(value, list) and not _is_one_value(value):
        for position, item in enumerate(value):
            yield from _values((*path, position), item)
    elif path and not isinstance(value, torch.Tensor | torch.Generator | _Unknown):
        yield path, value


def _is_one_value(value: list[Any]) -> bool:
    return not any(
        isinstance(item, torch.Tensor | Mapping) or (isinstance(item, list) and not _is_one_value(item))
        for item in value
    )
