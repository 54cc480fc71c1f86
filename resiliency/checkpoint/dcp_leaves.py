# SPDX-License-Identifier: Apache-2.0
"""The plain values of a captured state, under the names that stock torch looks for.

`torch.distributed.checkpoint` flattens nested dictionaries to keys with dots; a list is one leaf
unless it holds tensors or dictionaries.  Values whose classes may not be named, or are not
installed here, are left out: this library's own readers still find them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from resiliency.checkpoint.skeleton import from_bytes
from resiliency.checkpoint.table import Shard
from resiliency.checkpoint.values import Allowed, decode, load_values
from resiliency.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)

Path = tuple[str | int, ...]


class _Unknown:
    """Stands for a value that cannot be decoded here."""


class PlainLeaves:
    """For `DcpFormat(leaves=PlainLeaves())`.

    Args:
        allow: classes that values may name, see `resiliency.checkpoint.values`.
    """

    def __init__(self, allow: Iterable[type | str] = ()) -> None:
        self._allowed = Allowed(allow)

    def __call__(self, shard: Shard) -> list[tuple[Path, object]]:
        state = from_bytes(shard.layout.skeleton).rebuild(_Hollow(shard, self._allowed))
        return list(_leaves((), state))


class _Hollow:
    """A source without tensor bytes: what is rebuilt from it costs nothing."""

    def __init__(self, shard: Shard, allowed: Allowed) -> None:
        self.allowed = allowed
        self._values = load_values(shard.values)

    def value(self, index: int) -> Any:
        try:
            return decode(self._values[index], self.allowed)
        except (CheckpointError, ConfigError) as error:
            logger.debug("a value is left out of the persistent tier's stock form: %s", error)
            return _Unknown()

    def fresh(self, key: str) -> torch.Tensor:
        return torch.empty(0)

    def target(self, key: str, raw: torch.Tensor) -> None:
        pass

    def mark(self) -> int:
        return 0

    def forget(self, mark: int) -> None:
        pass


def _leaves(path: Path, value: object) -> Iterator[tuple[Path, object]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves((*path, str(key)), item)
    elif isinstance(value, list) and not _is_leaf(value):
        for position, item in enumerate(value):
            yield from _leaves((*path, position), item)
    elif path and not isinstance(value, torch.Tensor | _Unknown):
        yield path, value


def _is_leaf(value: list[Any]) -> bool:
    return not any(
        isinstance(item, torch.Tensor | Mapping) or (isinstance(item, list) and not _is_leaf(item))
        for item in value
    )
