# SPDX-License-Identifier: Apache-2.0
"""The node of an object with a state of its own, and what optimizers need beside that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from resiliency.checkpoint.state.layout import Path
from resiliency.checkpoint.state.tensors import (
    leaf_of,
    wrapped,
)
from resiliency.checkpoint.state.tree import (
    DictNode,
    Finish,
    Gathered,
    Node,
    StructureChanged,
    TensorNode,
    TensorSource,
    ValueNode,
    constantly,
    is_stateful,
    listed_keys,
)
from resiliency.checkpoint.state.values import class_name
from resiliency.checkpoint.state.wrappers import WrapperNode
from resiliency.errors import CheckpointError, ConfigError, LayoutMismatch


@dataclass(frozen=True)
class StatefulNode:
    """A module, optimizer or other object that gives and takes its own state."""

    cls: str
    item: Node

    def gather(self, obj: Any, into: Gathered) -> None:
        if not is_stateful(obj) or class_name(type(obj)) != self.cls:
            raise StructureChanged
        self.item.gather(obj.state_dict(), into)

    def rebuild(self, source: TensorSource) -> Any:
        return self.item.rebuild(source)

    def restore(self, target: Any, source: TensorSource, path: Path) -> Finish:
        if not is_stateful(target):
            return self.item.restore(target, source, path)
        state = target.state_dict()
        if isinstance(target, torch.nn.Module):
            _refer_to_wrappers(target, state)
        self._check_optimizer(target, state, source, path)
        mark = source.mark()
        outer, source.partial = source.partial, None
        try:
            finish_state = self.item.restore(state, source, path)
        except LayoutMismatch as error:
            # A module has all its tensors from the start, and would refuse others when much is overwritten.
            if "expected_shape" in error.fields or isinstance(target, torch.nn.Module):
                raise
            # An optimizer that has not stepped yet has no state to read into: give it new tensors.
            source.forget(mark)
            source.allowed.trust(state)
            if isinstance(target, torch.optim.Optimizer):
                _check_moments(self.item, target, source)
            finish_state = constantly(self.item.rebuild(source))
        finally:
            source.partial = outer

        def finish() -> Any:
            _load_state(target, finish_state(), path)
            return target

        return finish

    def _check_optimizer(self, target: Any, state: Any, source: TensorSource, path: Path) -> None:
        """Torch lets an optimizer take the settings and moments of any other, and fail or diverge later."""
        if not isinstance(target, torch.optim.Optimizer) or class_name(type(target)) == self.cls:
            return
        groups = _saved_groups(self.item, source)
        saved, found = ({key for group in part for key in group} for part in (groups, state["param_groups"]))
        if groups and saved != found:
            raise LayoutMismatch(
                f"{'/'.join(map(str, path))}: the checkpoint holds the state of {self.cls.rpartition(':')[2]}"
                f" with {listed_keys(saved - found)}, the state to restore has {type(target).__name__}"
                f" with {listed_keys(found - saved)}.",
                hint="Build the optimizer that was saved, or leave it out: restore({...}, partial=True).",
                key="/".join(map(str, path)),
            )

    def to_json(self) -> Any:
        return {"n": "stateful", "class": self.cls, "item": self.item.to_json()}


def check_takes_back(module: torch.nn.Module, state: dict[str, Any], path: Path) -> None:
    """Raise ConfigError for a state that the module gives and would not load: of FSDP1, LOCAL_STATE_DICT over
    parameters that keep their shapes."""
    flat = next((name for name in state if name.endswith("_flat_param")), None)
    if flat is not None and not any(name.endswith("_flat_param") for name, _ in module.named_parameters()):
        key = "/".join(map(str, (*path, flat)))
        raise ConfigError(
            f"{key}: torch gives FSDP's LOCAL_STATE_DICT with use_orig_params=True, and does not load it.",
            hint="FSDP.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT) before the save.",
            key=key,
        )


def _refer_to_wrappers(module: torch.nn.Module, state: dict[str, Any]) -> None:
    """Put the module's own wrapper tensors where its state holds detached ones, which have a context of their
    own."""
    names = [name for name, value in state.items() if wrapped(value) is not None]
    if not names:
        return
    own: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    own.update(module.named_buffers(remove_duplicate=False))
    for name in names:
        if type(own.get(name)) is type(state[name]):
            state[name] = own[name]


def _saved_groups(optimizer: Node, source: TensorSource) -> list[dict[str, Any]]:
    """The parameter groups of an optimizer's state; empty if they hold tensors, such as a learning rate."""
    if isinstance(optimizer, ValueNode):  # it has not stepped
        state = source.value(optimizer.index)
        return state.get("param_groups", []) if isinstance(state, dict) else []
    nodes = dict(zip(optimizer.keys, optimizer.items, strict=True)) if isinstance(optimizer, DictNode) else {}
    groups = nodes.get("param_groups")
    return source.value(groups.index) if isinstance(groups, ValueNode) else []


def _load_state(target: Any, state: Any, path: Path) -> None:
    if isinstance(target, torch.optim.Optimizer):
        _distribute_like_parameters(target, state)
    moments = dict(state["state"]) if _casts(target) and isinstance(state, dict) else {}
    try:
        target.load_state_dict(state)
    except (RuntimeError, ValueError, KeyError) as error:
        key = "/".join(map(str, path))
        raise CheckpointError(  # no LayoutMismatch, which says that nothing was changed
            f"{key}: {type(target).__name__} refused the state that was saved: {error}",
            hint="Other parts of the state are overwritten already.  Is it built as it was then?",
            key=key,
        ) from error
    if moments:
        _keep_dtypes(target, moments)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """In the order of the numbers that its state dict has for them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _casts(target: Any) -> bool:
    """Whether torch's own code alone loads its state: with more, the result is what the program wants."""
    if not isinstance(target, torch.optim.Optimizer) or not isinstance(getattr(target, "state", None), dict):
        return False
    cls, base = type(target), torch.optim.Optimizer
    hooks = ("load_state_dict_pre", "load_state_dict_post", "state_dict_pre", "state_dict_post")
    return (
        cls.load_state_dict is base.load_state_dict
        and cls.state_dict is base.state_dict
        and not any(getattr(target, f"_optimizer_{hook}_hooks", None) for hook in hooks)
    )


def _keep_dtypes(optimizer: torch.optim.Optimizer, moments: dict[Any, Any]) -> None:
    """Torch gives what an optimizer keeps the dtype of its parameter; what was saved may have another.

    Torch's own optimizers make what has a parameter's shape in its dtype: where that has changed, they need
    it.
    """
    is_torchs = type(optimizer).__module__.startswith("torch.optim")
    for index, parameter in enumerate(_parameters(optimizer)):
        kept: Any = optimizer.state.get(parameter)
        saved = moments.get(index)
        if not isinstance(kept, dict) or not isinstance(saved, dict):
            continue
        for name, value in saved.items():
            follows = is_torchs and isinstance(value, torch.Tensor) and value.shape == parameter.shape
            if name in kept and not follows:
                kept[name] = _uncast(value, kept[name])


def _uncast(value: Any, cast: Any) -> Any:
    """`cast`, but tensors that have another dtype than in `value` as they are there."""
    if isinstance(value, torch.Tensor) and isinstance(cast, torch.Tensor):
        return cast if value.dtype == cast.dtype else value.to(cast.device)
    if isinstance(value, dict) and isinstance(cast, dict):
        return {key: _uncast(value[key], item) if key in value else item for key, item in cast.items()}
    if type(value) is type(cast) and type(value) in (list, tuple) and len(value) == len(cast):
        return type(value)([_uncast(one, other) for one, other in zip(value, cast, strict=True)])
    return cast


def _check_moments(node: Node, optimizer: torch.optim.Optimizer, source: TensorSource) -> None:
    """Raise LayoutMismatch unless what becomes state of a sharded parameter is of the same part of it."""
    of_all = _item(node, "state")
    for index, parameter in enumerate(_parameters(optimizer)):
        if isinstance(parameter, DTensor):
            moments = _item(of_all, index)
            for moment in moments.items if isinstance(moments, DictNode) else ():
                placement = leaf_of(parameter, "dtensor", ()).placement
                if isinstance(moment, TensorNode) and moment.kind == "dtensor" and placement is not None:
                    source.check_place(moment.key, placement)
                elif isinstance(moment, WrapperNode) and moment.placement is not None:
                    moment.check_place(placement, moment.path, parameter)


def _item(node: Node | None, key: Any) -> Node | None:
    return dict(zip(node.keys, node.items, strict=True)).get(key) if isinstance(node, DictNode) else None


def _distribute_like_parameters(optimizer: torch.optim.Optimizer, state: Any) -> None:
    """New optimizer state of a sharded parameter holds the local shard: make it a DTensor again."""
    for index, parameter in enumerate(_parameters(optimizer)):
        if not isinstance(parameter, DTensor):
            continue
        moments = state["state"].get(index, {})
        for name, value in moments.items():
            is_local = type(value) is torch.Tensor or wrapped(value) is not None
            if is_local and value.shape == parameter.to_local().shape:
                moments[name] = DTensor.from_local(
                    value,
                    parameter.device_mesh,
                    parameter.placements,
                    run_check=False,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
