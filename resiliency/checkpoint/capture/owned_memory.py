# SPDX-License-Identifier: Apache-2.0
"""Memory that optimizers alone write: what a capture may copy while the next forward runs.

A parameter that is trained, and what its optimizer keeps for it, change in the optimizer's step and
nowhere else.  Of other tensors nothing is known: a forward may write running statistics, codebooks, and
also parameters that take no gradient (the key encoder of a momentum contrast).

Invariant: each byte of the ranges belongs to a tensor of an optimizer.  Ranges and not storages, as a
buffer may share one with parameters: those of a file that was mapped all do.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from resiliency.checkpoint.state.aliases import span_bytes

#: Torch's table of hooks, which `Optimizer.__init__` makes; without it none can be registered.
_HOOKS = "_optimizer_step_pre_hooks"


@dataclass(frozen=True)
class OwnedMemory:
    """Address ranges [start, end), in order and apart.  Equal if they own the same bytes."""

    starts: tuple[int, ...]
    ends: tuple[int, ...]

    @classmethod
    def of(cls, optimizers: Iterable[torch.optim.Optimizer]) -> OwnedMemory:
        starts: list[int] = []
        ends: list[int] = []
        for start, end in sorted(filter(None, map(_range, _written_by(optimizers)))):
            if ends and start <= ends[-1]:
                ends[-1] = max(ends[-1], end)
            else:
                starts.append(start)
                ends.append(end)
        return cls(tuple(starts), tuple(ends))

    def holds(self, raw: torch.Tensor) -> bool:
        """Whether all bytes of a plain strided tensor are owned."""
        start = raw.data_ptr()
        position = bisect_right(self.starts, start) - 1
        return position >= 0 and start + span_bytes(raw) <= self.ends[position]


class Owners:
    """What the writers of a state own.

    To look at thousands of tensors takes a good part of the time that the walk over the state takes, so it is
    done anew only when a tensor moved or is another object.
    """

    def __init__(self) -> None:
        self._addresses: object = None
        self._tensors: list[int] = []
        self._memory = OwnedMemory((), ())

    def memory(self, writers: Sequence[object], addresses: object) -> OwnedMemory | None:
        """None: not all writers are torch optimizers, so all memory may be theirs.

        Args:
            addresses: of the state: the same object as before if all of it is where it was.
        Returns:
            The same object as before if nothing changed.
        """
        optimizers = [writer for writer in writers if isinstance(writer, torch.optim.Optimizer)]
        if not optimizers or len(optimizers) < len(writers):
            return None
        tensors = list(map(id, _written_by(optimizers)))
        if addresses is not self._addresses or tensors != self._tensors:
            self._addresses, self._tensors = addresses, tensors
            self._memory = OwnedMemory.of(optimizers)
        return self._memory


def unwrapped(optimizer: Any) -> Any:
    """What steps in the end: wrappers such as Accelerate's are torch optimizers without a table of hooks."""
    while isinstance(optimizer, torch.optim.Optimizer) and not hasattr(optimizer, _HOOKS):
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, torch.optim.Optimizer):
            break
        optimizer = inner
    return optimizer


def takes_hooks(optimizer: Any) -> bool:
    """False for a subclass of torch's optimizer that was made without `Optimizer.__init__`."""
    return not isinstance(optimizer, torch.optim.Optimizer) or hasattr(optimizer, _HOOKS)


def why_unfenced(optimizer: object) -> str:
    """How `optimizer` may write its parameters without the hooks of its `step`; empty: in no way known."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return ""
    name = type(optimizer).__name__
    if callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None)):
        return f"{name} writes parameters in train() and eval()"
    if getattr(optimizer, "_overlap_with_ddp", False):
        return f"{name} steps in hooks of DistributedDataParallel"
    parameters = [(group, parameter) for group in optimizer.param_groups for parameter in group["params"]]
    for group, parameter in parameters:
        if group.get("capturable") and parameter.is_cuda:
            return f"{name} is capturable, and a CUDA graph may replay its steps"
        steppers = getattr(parameter, "_in_backward_optimizers", None)
        if steppers and not any(stepper is optimizer for stepper in steppers):
            return f"another optimizer steps parameters of {name} in the backward pass"
    return ""


def _written_by(optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            found += [parameter for parameter in group["params"] if parameter.requires_grad]
        _collect(optimizer.state, found)
    return found


def _collect(value: object, into: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        into.append(value)
    elif isinstance(value, Mapping):
        for item in value.values():
            _collect(item, into)
    elif isinstance(value, list | tuple):
        for item in value:
            _collect(item, into)


def _range(tensor: torch.Tensor) -> tuple[int, int] | None:
    """The bytes of this rank's part; None if they are nowhere, or not in one piece."""
    if type(tensor) not in (torch.nn.Parameter, torch.Tensor):  # else this is too slow for thousands
        tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if hasattr(type(tensor), "__tensor_flatten__"):
            return None
    if tensor.layout is not torch.strided or not (tensor.is_contiguous() or _is_dense(tensor)):
        return None
    start = tensor.data_ptr()
    return (start, start + tensor.nbytes) if start else None


def _is_dense(tensor: torch.Tensor) -> bool:
    return span_bytes(tensor) == tensor.nbytes
