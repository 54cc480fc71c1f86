# SPDX-License-Identifier: Apache-2.0
"""The sharded state of a Megatron job, built once and used again for as long as it is true.

Megatron builds a sharded state dict anew for each save: thousands of small objects that name where
each part of each tensor belongs.  They stay the same while no tensor of the model and the optimizer
moves, and only the few objects that hold values have to be asked for again.

Nothing is saved from a stale tree: each time, all parameters, buffers and optimizer states are looked
up where they live now, and compared by identity and address; any difference, or anything that is not
understood, means that Megatron builds a new tree.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from resiliency.checkpoint.state.tensors import ShardedView, register_sharded_type, sharded_type

logger = logging.getLogger(__name__)

MODEL = "sharded_state_dict"
OPTIMIZER = "optimizer"
#: Objects of the distributed optimizer that say how its buckets are cut, which never changes.
_CONSTANT = (".per_bucket_numel", ".per_bucket_numel_unpadded")


class NotReusable(Exception):
    """Internal: something in the tree cannot be brought up to date; it says what."""


class PreparedState:
    """One tree, with what tells whether it is still true.

    Args:
        model: whose parameters it names: the list of model chunks.
        optimizer: Megatron's, inside NeMo's wrapper.
        tree: after Megatron's preparations for saving; sharded tensors and objects only.
        padding: sharded tensors of the tree that pad a bucket; their bytes mean nothing.
    Raises:
        NotReusable: no way is known to tell, or to bring it up to date.
    """

    def __init__(
        self, model: torch.nn.Module, optimizer: Any, tree: dict[str, Any], padding: Collection[int]
    ) -> None:
        self._model = model
        self._optimizer = _distributed(optimizer)
        self._addresses = self._look()
        self._values = _optimizer_objects(self._optimizer, tree[OPTIMIZER])
        refreshed = {id(obj) for obj in self._values.values()}
        self._check_objects(tree, refreshed)
        self._check_tensors(tree, padding)
        self._parts = [
            (
                part.key,
                tuple(part.global_offset),
                part.replica_id,
                None if id(part) in padding else _place(part),
            )
            for part in nested_values(tree)
            if isinstance(part, ShardedTensor | ShardedObject)
        ]
        register_sharded_type(_Described, lambda described: described.view)
        #: What to capture.
        self.tree = dict_list_map_outplace(
            lambda part: part if id(part) in refreshed else _Described(_describe(part)), tree
        )

    def is_like(self, other: PreparedState) -> bool:
        """Whether both name the same parts of the same memory."""
        return self._addresses == other._addresses and self._parts == other._parts

    def is_of(self, model: torch.nn.Module, optimizer: Any) -> bool:
        """Whether it was built from these: the tensors of a training before may still be where they were."""
        return model is self._model and self._optimizer in getattr(
            optimizer, "chained_optimizers", [optimizer]
        )

    def refresh(self) -> bool:
        """Bring the values up to date; False if a tensor moved, or there is more to save than before."""
        if self._look() != self._addresses or not _is_stateless(self._model):
            return False
        values = self._optimizer.state_dict()
        if values.keys() != self._values.keys():
            return False
        for name, obj in self._values.items():
            obj.data = values[name]
        return True

    def _look(self) -> list[Any]:
        """Where everything lives that the tree refers to."""
        return [(id(t), t.data_ptr(), t.shape, t.dtype) for t in self._tensors()]

    def _tensors(self) -> Iterator[torch.Tensor]:
        for module in self._model.modules():
            yield from (p for p in module._parameters.values() if p is not None)
            yield from (buffer for _, buffer in saved_buffers(module))
        inner = self._optimizer.optimizer
        for group in inner.param_groups:
            yield from group["params"]
        for state in inner.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))

    def _check_objects(self, tree: dict[str, Any], refreshed: set[int]) -> None:
        for part in nested_values(tree):
            if not isinstance(part, ShardedObject) or id(part) in refreshed or part.data is None:
                continue
            is_empty = isinstance(part.data, torch.Tensor) and part.data.numel() == 0
            if not is_empty and not part.key.endswith(_CONSTANT):
                raise NotReusable(f"{part.key} holds values")
        if not _is_stateless(self._model):
            raise NotReusable("a module has extra state")

    def _check_tensors(self, tree: dict[str, Any], padding: Collection[int]) -> None:
        """All of them must be views of what `_look` watches, and no copies made for one save."""
        watched = {t.untyped_storage().data_ptr() for t in self._tensors()}
        for part in nested_values(tree):
            if not isinstance(part, ShardedTensor) or id(part) in padding:
                continue
            if part.data is None or part.data.untyped_storage().data_ptr() not in watched:
                raise NotReusable(f"{part.key} is made anew for each save")


def saved_buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Own buffers of a module that its state dict holds."""
    hidden = module._non_persistent_buffers_set
    return ((n, b) for n, b in module._buffers.items() if b is not None and n not in hidden)


@dataclass(frozen=True)
class _Described:
    """A part that the engine was told about before: what it is need not be worked out again."""

    view: ShardedView


def _describe(part: ShardedTensor | ShardedObject) -> ShardedView:
    registered = sharded_type(type(part))
    assert registered is not None  # MegatronSaving did it
    return registered.describe(part)


def _place(part: ShardedTensor | ShardedObject) -> tuple[object, ...]:
    data = part.data
    if not isinstance(data, torch.Tensor):
        return ()
    return data.data_ptr(), data.dtype, tuple(data.shape), data.stride()


def _distributed(optimizer: Any) -> DistributedOptimizer:
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    if len(chained) != 1 or type(chained[0]) is not DistributedOptimizer:
        raise NotReusable("it is not of one distributed optimizer")
    return chained[0]


def _optimizer_objects(optimizer: DistributedOptimizer, tree: Any) -> dict[str, ShardedObject]:
    """The objects of the optimizer's tree that hold what its `state_dict` gives, by name."""
    values = optimizer.state_dict()
    (own,) = tree.values() if isinstance(tree, dict) else tree
    found = {name: own.get(name) for name in values}
    if not all(isinstance(obj, ShardedObject) for obj in found.values()):
        raise NotReusable("the optimizer's values are not where they are expected")
    return found


def _is_stateless(model: torch.nn.Module) -> bool:
    """Whether no module gives extra state (such as the scales of 8-bit kernels)."""
    default = torch.nn.Module.get_extra_state
    for module in model.modules():
        if type(module).get_extra_state is not default:
            extra = module.get_extra_state()
            if extra is not None and not (isinstance(extra, torch.Tensor) and extra.numel() == 0):
                return False
    return True
