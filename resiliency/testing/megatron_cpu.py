# SPDX-License-Identifier: Apache-2.0
"""Real Megatron-core and NeMo 2 on CPU ranks with gloo, where CUDA is absent.

Megatron-core and NeMo name the CUDA device directly in many places even when every tensor could
live on the CPU.  Within `installed` those calls mean "the CPU":

    from resiliency.testing import megatron_cpu
    megatron_cpu.install()            # before or after importing NeMo and Megatron
    nl.Trainer(accelerator="cpu", devices=2, ...)

This is what ``benchmark.py --device cpu`` uses, so it is product code with three promises:

* It is never active when a CUDA device works: `install` returns False and changes nothing.
* It refuses versions that it was not tested with (`UntestedVersion`), instead of half working.
* It is undone completely by `uninstall`.

What it does not do: ``torch.cuda.is_available()`` stays False (Lightning must choose its CPU
accelerator), tensors keep ``is_cuda == False``, streams and events order nothing because CPU work
is synchronous, and ``Tensor.cuda()`` returns the same tensor, never a copy.  Code that relies on a
device-to-host copy being a copy must clone by itself.

Kernels without a CPU form must be off in the model's configuration: `CPU_MODEL_CONFIG`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from types import ModuleType
from typing import Any

import torch

from resiliency.errors import UntestedVersion

#: Distributions whose internals the patches below touch, and the release lines they were tested with.
TESTED_VERSIONS: Mapping[str, tuple[str, ...]] = {
    "nemo_toolkit": ("2.7.",),
    "megatron-core": ("0.15.",),
    "nvidia-resiliency-ext": ("0.4.",),
    "lightning": ("2.4.",),
}

#: `TransformerConfig` fields that choose kernels which exist only for CUDA (Apex, Transformer
#: Engine) or that go through torch.compile (slow to start, and needs a C++ compiler).
CPU_MODEL_CONFIG: Mapping[str, bool] = {
    "use_cpu_initialization": True,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "cross_entropy_loss_fusion": False,
    "persist_layer_norm": False,
}

_CPU = torch.device("cpu")
# Patches replace functions of any signature by functions of the same signature.
_Fn = Callable[..., Any]


def check_versions(
    tested: Mapping[str, tuple[str, ...]] = TESTED_VERSIONS,
    installed_version: Callable[[str], str] = metadata.version,
) -> None:
    """Refuse to go on with a missing or untested NeMo, Megatron, Lightning or NVRx.

    Raises:
        UntestedVersion: names the distribution, what was found and what was tested.
    """
    for name, prefixes in tested.items():
        expected = " or ".join(f"{p}*" for p in prefixes)
        try:
            found = installed_version(name)
        except metadata.PackageNotFoundError:
            raise UntestedVersion(
                f"{name} is not installed; this release was tested with {name} {expected}.",
                hint="Install the extra that pins it: pip install 'resiliency[nemo]' -c constraints.txt",
                distribution=name,
            ) from None
        if not found.startswith(prefixes):
            raise UntestedVersion(
                f"{name} {found} is not a version that this release was tested with (expected {expected}).",
                hint="Install the tested one: pip install 'resiliency[nemo]' -c constraints.txt",
                distribution=name,
                found=found,
            )


class _Stream:
    """A stream that is always idle: CPU work has finished when the call returns."""

    cuda_stream = 0

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *exc: object) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def wait_stream(self, other: object) -> None: ...

    def wait_event(self, other: object) -> None: ...

    def record_event(self, event: _CpuEvent | None = None) -> _CpuEvent:
        return event or _CpuEvent()


class _CpuEvent:
    """An event that has always happened already."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def query(self) -> bool:
        return True

    def record(self, *args: object) -> None: ...

    def wait(self, *args: object) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: _CpuEvent) -> float:
        return 0.0


class _Generators(Sequence[torch.Generator]):
    """``torch.cuda.default_generators``: one element, the CPU generator, at every index."""

    def __getitem__(self, index: Any) -> Any:
        return torch.default_generator

    def __len__(self) -> int:
        return 1


def _names_cuda(device: object) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


def _factory(original: _Fn) -> _Fn:
    """``torch.zeros(..., device="cuda", pin_memory=True)`` and its like, on the CPU."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)
        return original(*args, **kwargs)

    return call


def _to(original: _Fn) -> _Fn:
    @functools.wraps(original)
    def call(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args and _names_cuda(args[0]):
            args = (_CPU, *args[1:])
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        return original(self, *args, **kwargs)

    return call


def _type(original: _Fn) -> _Fn:
    """Megatron compares ``param.type()`` with "torch.cuda.FloatTensor" to choose an optimizer path."""

    @functools.wraps(original)
    def call(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not args and not kwargs:
            return original(self).replace("torch.", "torch.cuda.", 1)
        if args and isinstance(args[0], str):
            args = (args[0].replace("torch.cuda.", "torch.", 1), *args[1:])
        return original(self, *args, **kwargs)

    return call


def _same_object(original: _Fn) -> _Fn:
    return functools.wraps(original)(lambda self, *args, **kwargs: self)


def _returns(value: object) -> Callable[[_Fn], _Fn]:
    return lambda original: lambda *args, **kwargs: value


def _becomes(value: object) -> Callable[[_Fn], object]:
    return lambda original: value


def _seed(seed: int) -> torch.Generator:
    return torch.default_generator.manual_seed(seed)


def _get_rng_state(device: object = None) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, device: object = None) -> None:
    torch.set_rng_state(state)


#: (owner, attribute, original -> replacement), each with who needs it.
_PATCHES: list[tuple[object, str, Callable[[Any], object]]] = [
    # Named as `device=torch.cuda.current_device()` all over Megatron and NeMo.
    (torch.cuda, "current_device", _returns(_CPU)),
    # nemo.lightning.megatron_init seeds Megatron's RNG tracker only when there is a device.
    (torch.cuda, "device_count", _returns(1)),
    # megatron.core.tensor_parallel.random runs a callback at once instead of queueing it;
    # nemo.lightning.io.pl asserts it when it loads a checkpoint.
    (torch.cuda, "is_initialized", _returns(True)),
    (torch.cuda, "set_device", _returns(None)),
    (torch.cuda, "synchronize", _returns(None)),
    (torch.cuda, "reset_peak_memory_stats", _returns(None)),
    (torch.cuda, "is_current_stream_capturing", _returns(False)),
    # Megatron's gradient buckets and checkpoint staging order work with streams and events.
    (torch.cuda, "Stream", _becomes(_Stream)),
    (torch.cuda, "Event", _becomes(_CpuEvent)),
    (torch.cuda, "stream", _returns(contextlib.nullcontext())),
    (torch.cuda, "current_stream", _returns(_Stream())),
    (torch.cuda, "default_stream", _returns(_Stream())),
    # Megatron's RNG tracker keeps one "CUDA" state per name; here they are states of the CPU generator.
    (torch.cuda, "default_generators", _becomes(_Generators())),
    (torch.cuda, "manual_seed", _becomes(_seed)),
    (torch.cuda, "get_rng_state", _becomes(_get_rng_state)),
    (torch.cuda, "set_rng_state", _becomes(_set_rng_state)),
    (torch.cuda.random, "get_rng_state", _becomes(_get_rng_state)),
    # Literal device="cuda" and pin_memory=True.
    (torch, "tensor", _factory),
    (torch, "zeros", _factory),
    (torch, "ones", _factory),
    (torch, "empty", _factory),
    (torch, "full", _factory),
    (torch, "empty_like", _factory),
    (torch.Tensor, "to", _to),
    (torch.Tensor, "cuda", _same_object),
    (torch.Tensor, "pin_memory", _same_object),
    (torch.nn.Module, "cuda", _same_object),
    (torch.Tensor, "type", _type),
]


class GroupStepAdamW(torch.optim.AdamW):
    """AdamW that keeps its step count in the param group, as Apex's and TE's FusedAdam do.

    Without Apex and Transformer Engine, Megatron falls back to ``torch.optim.AdamW``, whose
    per-parameter ``step`` tensors its distributed optimizer cannot checkpoint: the reshardable
    formats fail on save (a 0-dim tensor is no slice of the gradient buffer) or on load.

    One count serves a whole group, so every parameter must get a gradient from the first step on;
    Megatron's gradient buffers guarantee that.
    """

    def __init__(self, params: Any, *, adam_w_mode: bool = True, **kwargs: Any) -> None:
        super().__init__(params, **kwargs)
        for group in self.param_groups:
            group["decoupled_weight_decay"] = adam_w_mode

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Adam's own __setstate__ wants state["step"] of every parameter.
        torch.optim.Optimizer.__setstate__(self, state)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            done = float(group.get("step", 0))
            for param in group["params"]:
                if self.state.get(param):
                    self.state[param]["step"] = torch.tensor(done)
        loss = super().step(closure)
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                self.state[param].pop("step", None)
        return loss


def _patch_optimizer(optimizer: Any) -> None:
    """Give ``megatron.core.optimizer`` an Adam that can be checkpointed."""
    distributed = optimizer.distrib_optimizer
    if not distributed.HAVE_APEX_OR_TE:
        replacements = {
            "Adam": GroupStepAdamW,
            "USING_PYTORCH_OPTIMIZER": False,
            "USING_APEX_OPTIMIZER": True,
            "HAVE_APEX_OR_TE": True,
        }
        for module in (optimizer, distributed):
            for name, value in replacements.items():
                if hasattr(module, name):
                    _set(module, name, value)
    # In fp32 the main parameters are views of leaf parameters, and of all the loaders only this
    # one is not under no_grad.
    cls = distributed.DistributedOptimizer
    name = "load_parameter_state_from_dp_reshardable"
    _set(cls, name, torch.no_grad()(getattr(cls, name)))


def _patch_nemo_io(pl: Any) -> None:
    """``nemo.lightning.io.pl`` builds a CUDA device only to move CUDA tensors."""
    _set(pl, "_fix_tensors_device", lambda checkpoint: checkpoint)


def _patch_random(random: Any) -> None:
    """Megatron warns at every fork of its tracker that the CPU generator changed: here it is that one."""
    _set(logging.getLogger(random.__name__), "disabled", True)


_MODULE_PATCHES: dict[str, Callable[[Any], None]] = {
    "megatron.core.tensor_parallel.random": _patch_random,
    "megatron.core.optimizer": _patch_optimizer,
    "nemo.lightning.io.pl": _patch_nemo_io,
}


class _PatchOnImport(importlib.abc.MetaPathFinder):
    """Patches a module as soon as it has been imported, so that `install` may come first."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        patch = _MODULE_PATCHES.get(fullname)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path) if patch else None
        if patch is None or spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            patch(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_hook = _PatchOnImport()
_saved: list[tuple[Any, str, Any]] = []
_MISSING = object()


def _set(owner: Any, name: str, value: object) -> None:
    _saved.append((owner, name, vars(owner).get(name, _MISSING)))
    setattr(owner, name, value)


def install() -> bool:
    """Make CUDA calls mean the CPU in this process; idempotent.

    Returns:
        True when active; False where a CUDA device works, and then nothing was changed.
    Raises:
        UntestedVersion: NeMo, Megatron, Lightning or NVRx is missing or not a tested version.
    """
    if _saved:
        return True
    if torch.cuda.is_available():
        return False
    check_versions()
    for owner, name, make in _PATCHES:
        _set(owner, name, make(getattr(owner, name)))
    for name, patch in _MODULE_PATCHES.items():
        if name in sys.modules:
            patch(sys.modules[name])
    sys.meta_path.insert(0, _hook)
    return True


def uninstall() -> None:
    """Undo `install`.  What other modules imported by value in between stays as it is."""
    if _hook in sys.meta_path:
        sys.meta_path.remove(_hook)
    while _saved:
        owner, name, original = _saved.pop()
        if original is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, original)


@contextlib.contextmanager
def installed() -> Iterator[bool]:
    """`install` on entry, `uninstall` on exit of the outermost; yields whether it is active."""
    outermost = not _saved
    try:
        yield install()
    finally:
        if outermost:
            uninstall()
