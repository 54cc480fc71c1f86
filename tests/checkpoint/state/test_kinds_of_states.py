# SPDX-License-Identifier: Apache-2.0
"""What people keep in states: each kind comes back equal in type and bits, or is refused by name."""

from __future__ import annotations

import argparse
import collections
import io
import pickle
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._C._functorch import _add_batch_dim
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.masked import masked_tensor
from torch.optim import lr_scheduler

from resiliency.checkpoint import StateWalker, materialize, restore_into
from resiliency.errors import ConfigError, LayoutMismatch
from resiliency.testing.rank_pool import RankPool
from tests.checkpoint.capture_builders import bits, saved
from tests.checkpoint.comparing import assert_same


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


# ------------------------------------------------------------------------ objects that the program holds, too

HELD: dict[str, Callable[[int], Any]] = {
    "dict": lambda n: {"step": n},
    "list": lambda n: [n] * (n + 1),
    "ordered": lambda n: collections.OrderedDict(zip("ab" if n else "ba", (n, 1), strict=True)),
    "default": lambda n: collections.defaultdict(int, step=n),
    "counter": lambda n: collections.Counter(step=n),
    "deque": lambda n: collections.deque([n] * (n + 1), maxlen=9),
    "set": lambda n: {n},
    "namespace": lambda n: types.SimpleNamespace(step=n),
    "arguments": lambda n: argparse.Namespace(step=n),
    "array": lambda n: np.array([str(n)]),
    "view from behind": lambda n: np.arange(n, n + 6)[::-2],
}


@pytest.mark.parametrize("place", ["at the top", "in a dict", "in a list", "in each other"])
@pytest.mark.parametrize("kind", HELD)
def test_an_object_that_the_program_holds_shows_what_was_restored(
    kind: str, place: str, tmp_path: Path, stack: ExitStack
) -> None:
    def state(held: Any) -> Any:
        inside = {"in a dict": {"held": held}, "in a list": [held, 0], "in each other": [({"held": held},)]}
        return {"weight": torch.zeros(2), "part": inside.get(place, held)}

    shard = saved(state(HELD[kind](3)), tmp_path / "job", stack)
    held = HELD[kind](0)
    restore_into(state(held), shard)
    assert_same(held, HELD[kind](3))


class Sampler:
    """Compares what it is given with what it has, as samplers do with the size of their data."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes, self.refused = sizes, False

    def state_dict(self) -> dict[str, Any]:
        return {"sizes": self.sizes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.refused = state["sizes"] != self.sizes


def test_an_object_that_takes_its_state_is_not_changed_before_it_does(
    tmp_path: Path, stack: ExitStack
) -> None:
    shard = saved({"sampler": Sampler([1, 2])}, tmp_path / "job", stack)
    sampler = Sampler([1, 3])
    restore_into({"sampler": sampler}, shard)
    assert sampler.refused
    assert sampler.sizes == [1, 3]


# ----------------------------------------------------------------------------------------------------- numpy

ARRAYS: dict[str, Any] = {
    "masked": np.ma.masked_array([1.5, 2.5], mask=[True, False], fill_value=7.0),
    "a masked value": np.ma.masked,
    "records": np.rec.array([(1, 2.5)], dtype=[("a", "i4"), ("b", "f8")]),
    "a record": np.rec.array([(1, 2.5)], dtype=[("a", "i4"), ("b", "f8")])[0],
    "matrix": np.array([[1, 2], [3, 4]]).view(np.matrix),
    "ml_dtypes bfloat16": np.array([1.5, 2.5], dtype=ml_dtypes.bfloat16),
    "ml_dtypes float8": np.array([1.5, 2.0], dtype=ml_dtypes.float8_e4m3fn),
    "ml_dtypes int4": np.array([1, -2], dtype=ml_dtypes.int4),
    "ml_dtypes scalar": ml_dtypes.bfloat16(1.5),
    "fields with gaps": np.zeros(2, dtype=np.dtype({"names": ["a"], "formats": ["i1"], "itemsize": 24})),
    "fields in fields": np.zeros(2, dtype=[("a", [("x", "i4"), ("y", "f8", (2,))])]),
    "fields": np.ones(2, dtype=[("a", "i4"), ("b", "f8", (2,))]),
    "objects": np.array([1, "a", None], dtype=object),
    "other byte order": np.array([1, 2], dtype=">i4"),
    "long double": np.array([1.5], dtype=np.longdouble),
    "times": np.array(["2026-01-01", "NaT"], dtype="M8[ns]"),
    "negative strides": np.arange(5)[::-1],
    "nothing in it": np.zeros((0, 3)),
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_a_numpy_value_of_any_kind_comes_back_equal_with_its_class(
    kind: str, tmp_path: Path, stack: ExitStack
) -> None:
    value = ARRAYS[kind]
    shard = saved({"x": value, "weight": torch.zeros(1)}, tmp_path / "job", stack, allow=())
    again = {"x": value.copy() if isinstance(value, np.ndarray) else value, "weight": torch.ones(1)}
    for found in (materialize(shard)["x"], restore_into(again, shard)["x"]):
        assert type(found) is type(value)
        assert (found.dtype, found.dtype.type) == (value.dtype, value.dtype.type)
        assert_same(np.ma.getmaskarray(found), np.ma.getmaskarray(value))
        assert str(found.tolist()) == str(value.tolist())
        if value.dtype.names is None and not value.dtype.hasobject and value is not np.ma.masked:
            assert found.tobytes() == value.tobytes()
        assert getattr(found, "fill_value", 0) == getattr(value, "fill_value", 0)


class Measured(np.ndarray):
    """An array with a unit that its pickle knows nothing of."""


def test_a_class_of_arrays_that_a_restore_would_not_know_is_refused_at_the_save() -> None:
    with pytest.raises(ConfigError, match=r"lengths: .* names .*Measured"):
        StateWalker(allow=()).snapshot({"lengths": np.zeros(2).view(Measured), "weight": torch.zeros(1)})


# --------------------------------------------------------------------------------------- tensors of all kinds


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(3)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: masked_tensor(torch.ones(2), torch.tensor([True, False])), "MaskedTensor.* no memory"),
        (fake, "FakeTensor.* has no memory"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "is nested"),
        (lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged), "NestedTensor"),
        (lambda: _add_batch_dim(torch.ones(2, 3), 0, 1), "has no memory"),
        (lambda: torch.eye(3).to_sparse_csr(), "has layout torch.sparse_csr"),
        (lambda: torch.ones(4, 4).to_mkldnn(), "has layout torch._mkldnn"),
        (lambda: torch.nn.LazyLinear(3), "/weight'.* has no shape yet: its module has not been called"),
    ],
)
def test_a_tensor_without_plain_memory_is_refused_by_name(make: Callable[[], Any], why: str) -> None:
    with pytest.raises(ConfigError, match=f"tensor 'x.*{why}.*cannot be captured"):
        StateWalker().snapshot({"x": make(), "weight": torch.zeros(1)})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.leaks("descriptors", reason="gloo keeps its socket as long as a tensor refers to the group")
def test_a_sharded_tensor_of_torch_comes_back_in_place_with_its_place(
    tmp_path: Path, stack: ExitStack
) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    stack.callback(dist.destroy_process_group)
    spec = ChunkShardingSpec(dim=0, placements=["rank:0/cpu"])

    def filled(value: float) -> Any:
        return sharded_tensor.full(spec, (4, 2), fill_value=value)

    shard = saved({"x": filled(7.0)}, tmp_path / "job", stack)
    (entry,) = shard.layout.entries
    assert (entry.global_shape, entry.global_offset) == ((4, 2), (0, 0))
    target = filled(0.0)
    assert restore_into({"x": target}, shard)["x"] is target
    assert target.local_tensor().tolist() == [[7.0, 7.0]] * 4


def train_fsdp1(rank: int, directory: str) -> list[Any]:
    def build(seed: int) -> tuple[FullyShardedDataParallel, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        inner = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 3))
        model = FullyShardedDataParallel(inner, use_orig_params=True, device_id=torch.device("cpu"))
        FullyShardedDataParallel.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(model: FullyShardedDataParallel, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(2, 4)).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def weights(model: FullyShardedDataParallel) -> list[Any]:
        with FullyShardedDataParallel.summon_full_params(model):
            return [bits(parameter) for parameter in model.parameters()]

    model, optimizer = build(0)
    step(model, optimizer)
    with ExitStack() as stack:
        shard = saved({"model": model, "optimizer": optimizer}, Path(directory, f"{rank}"), stack)
        step(model, optimizer)
        other, fresh = build(1)
        restore_into({"model": other, "optimizer": fresh}, shard)
        step(other, fresh)
    return [weights(model), weights(other)]


def test_a_model_of_fsdp1_with_sharded_state_goes_on_as_if_nothing_happened(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    for trained, restored in rank_pool.run(train_fsdp1, 2, str(tmp_path)).values:
        assert trained == restored


# ------------------------------------------------------------------------------------- optimizers and modules


class Momentum(torch.optim.Optimizer):
    """Its momentum has a dtype of its own, as that of mixed-precision optimizers."""

    def __init__(self, params: Any, dtype: torch.dtype) -> None:
        super().__init__(params, {"lr": 0.1})
        self._dtype = dtype

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state.setdefault("deep", {"m": [torch.zeros_like(parameter, dtype=self._dtype)]})
            momentum = state["deep"]["m"][0].mul_(0.9).add_(parameter.grad.to(self._dtype))
            parameter.add_(momentum.to(parameter.dtype), alpha=-0.1)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    name: getattr(torch.optim, name)
    for name in (
        *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam"),
        *("RMSprop", "Rprop"),
    )
}
OPTIMIZERS["SGD"] = lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)
OPTIMIZERS["Adam amsgrad"] = lambda params: torch.optim.Adam(params, amsgrad=True)
OPTIMIZERS["momentum in fp32"] = lambda params: Momentum(params, torch.float32)
OPTIMIZERS["momentum in fp16"] = lambda params: Momentum(params, torch.float16)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        batch = torch.randn(2, 4, generator=generator).to(model.weight.dtype)
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_moments_keep_their_own_dtype_and_training_goes_on_bit_for_bit(
    kind: str, dtype: torch.dtype, tmp_path: Path, stack: ExitStack
) -> None:
    def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 3).to(dtype)
        return model, OPTIMIZERS[kind](model.parameters())

    model, optimizer = build()
    train(model, optimizer, 3, seed=1)
    shard = saved([model, optimizer], tmp_path / "job", stack)
    before = pickle.loads(pickle.dumps(optimizer.state_dict()))  # noqa: S301  # our own
    train(model, optimizer, 3, seed=2)
    for steps in (0, 1):  # one that has not stepped, and one that has
        other, fresh = build()
        train(other, fresh, steps, seed=9)
        restore_into([other, fresh], shard)
        assert_same(fresh.state_dict(), before)
        train(other, fresh, 3, seed=2)
        assert_same(other.state_dict(), model.state_dict())
        assert_same(fresh.state_dict(), optimizer.state_dict())


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda opt: lr_scheduler.StepLR(opt, 2),
    "steps": lambda opt: lr_scheduler.MultiStepLR(opt, [1, 3, 3]),
    "constant": lambda opt: lr_scheduler.ConstantLR(opt, total_iters=3),
    "linear": lambda opt: lr_scheduler.LinearLR(opt, total_iters=4),
    "exponential": lambda opt: lr_scheduler.ExponentialLR(opt, 0.9),
    "polynomial": lambda opt: lr_scheduler.PolynomialLR(opt, 5, 2.0),
    "cosine": lambda opt: lr_scheduler.CosineAnnealingLR(opt, 5),
    "restarts": lambda opt: lr_scheduler.CosineAnnealingWarmRestarts(opt, 2, 2),
    "cyclic": lambda opt: lr_scheduler.CyclicLR(opt, 0.01, 0.1, 2, cycle_momentum=False),
    "one cycle": lambda opt: lr_scheduler.OneCycleLR(opt, 0.1, total_steps=20, cycle_momentum=False),
    "plateau": lambda opt: lr_scheduler.ReduceLROnPlateau(opt, patience=1),
    "one after the other": lambda opt: lr_scheduler.SequentialLR(
        opt, [lr_scheduler.ConstantLR(opt), lr_scheduler.ExponentialLR(opt, 0.9)], [2]
    ),
    "chained": lambda opt: lr_scheduler.ChainedScheduler([lr_scheduler.ExponentialLR(opt, 0.9)]),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_scheduler_goes_on_with_the_rates_of_an_undisturbed_run(
    kind: str, tmp_path: Path, stack: ExitStack
) -> None:
    def build() -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        return optimizer, SCHEDULERS[kind](optimizer)

    def rates(optimizer: torch.optim.Optimizer, scheduler: Any, count: int) -> list[float]:
        found = []
        for _ in range(count):
            scheduler.step(*[1.0] * (kind == "plateau"))
            found.append(optimizer.param_groups[0]["lr"])
        return found

    pair = build()
    rates(*pair, 3)
    shard = saved(list(pair), tmp_path / "job", stack)
    again = build()
    restore_into(list(again), shard)
    assert rates(*again, 6) == rates(*pair, 6)


class Extra(torch.nn.Module):
    """Tells of itself what grows while it trains, as modules in FP8 do; `form` is how."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2))
        self.form, self.seen = form, list[float]()

    def get_extra_state(self) -> Any:
        packed = pickle.dumps(self.seen) if self.seen else b""
        if self.form == "tensor":
            return torch.frombuffer(bytearray(packed), dtype=torch.uint8) if packed else torch.empty(0).byte()
        if self.form == "tensors":
            return {"seen": [torch.tensor([one]) for one in self.seen]}
        if self.form == "a tensor or nothing":
            return torch.tensor(self.seen) if self.seen else None
        return io.BytesIO(packed) if self.form == "file" else packed

    def set_extra_state(self, state: Any) -> None:
        if self.form == "tensors":
            self.seen = [float(one) for one in state["seen"]]
        elif self.form == "a tensor or nothing":
            self.seen = state.tolist()
        else:
            packed = state.numpy().tobytes() if self.form == "tensor" else state
            packed = packed.getvalue() if self.form == "file" else packed
            self.seen = pickle.loads(packed)  # noqa: S301  # our own


@pytest.mark.parametrize("form", ["tensor", "tensors", "a tensor or nothing", "bytes", "file"])
def test_what_a_module_says_of_itself_comes_back_whatever_its_size_is_in_a_new_one(
    form: str, tmp_path: Path, stack: ExitStack
) -> None:
    model = torch.nn.Sequential(Extra(form), torch.nn.Linear(2, 2))
    model[0].seen = [0.5, 1.5, 2.5]
    shard = saved({"model": model}, tmp_path / "job", stack)
    other = torch.nn.Sequential(Extra(form), torch.nn.Linear(2, 2))
    restore_into({"model": other}, shard)
    assert other[0].seen == [0.5, 1.5, 2.5]
    assert bits(other[1].weight) == bits(model[1].weight)
    with pytest.raises(LayoutMismatch, match=r"model/1\.weight"):
        restore_into({"model": torch.nn.Sequential(Extra(form), torch.nn.Linear(3, 2))}, shard)
