# SPDX-License-Identifier: Apache-2.0
"""What people keep in states: each kind comes back equal in type and bits, or is refused by name."""

from __future__ import annotations

import argparse
import base64
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
from resiliency.checkpoint.state.values import Allowed, decode
from resiliency.errors import ConfigError, LayoutMismatch
from resiliency.testing.rank_pool import RankPool
from tests.checkpoint.capture_builders import bits, saved
from tests.checkpoint.comparing import assert_same
from tests.checkpoint.shard_builders import shard_of


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


def test_a_parameter_in_a_namespace_stays_the_parameter_of_the_program(
    tmp_path: Path, stack: ExitStack
) -> None:
    def settings(value: float) -> types.SimpleNamespace:
        return types.SimpleNamespace(scale=torch.nn.Parameter(torch.full((2,), value)))

    shard = saved({"settings": settings(3.0)}, tmp_path / "job", stack, allow=["torch:Tensor"])
    held = settings(0.0)
    scale = held.scale
    restore_into({"settings": held}, shard)
    assert held.scale is scale
    assert (scale.tolist(), scale.requires_grad) == ([3.0, 3.0], True)


def test_what_was_one_object_is_one_again_and_what_was_two_is_two(tmp_path: Path, stack: ExitStack) -> None:
    shared, itself = [1, 2], types.SimpleNamespace(step=3)
    itself.me = itself
    state = {"both": collections.OrderedDict(a=shared, b=shared), "itself": itself, "sets": [{1}, {2}]}
    shard = saved(state, tmp_path / "job", stack)
    one, namespace, common = [0], types.SimpleNamespace(me=None), {0}
    target = {"both": collections.OrderedDict(a=one, b=[9]), "itself": namespace, "sets": [common, common]}
    found = restore_into(target, shard)
    assert found["both"]["a"] is found["both"]["b"] is one
    assert found["itself"] is namespace is namespace.me
    assert found["sets"] == [{1}, {2}]


def test_a_deep_list_is_put_in_place(tmp_path: Path, stack: ExitStack) -> None:
    def deep(value: int) -> list[Any]:
        nested: list[Any] = [value]
        for _ in range(280):
            nested = [nested]
        return nested

    shard = saved({"deep": deep(3)}, tmp_path / "job", stack)
    assert restore_into({"deep": deep(0)}, shard)["deep"] == deep(3)


@pytest.mark.parametrize("held", [None, torch.ones(3)])
def test_a_part_that_does_not_fit_a_sampler_leaves_no_tensor_that_nothing_fills(
    held: Any, tmp_path: Path, stack: ExitStack
) -> None:
    """An array that is read-only cannot be filled in place: it is made, and the rest may not fit then."""

    class Both(Sampler):
        def __init__(self, order: Any, more: Any) -> None:
            self.order, self.more = order, more

        def state_dict(self) -> dict[str, Any]:
            return {"order": self.order, "more": self.more}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.order, self.more = state["order"], state["more"]

    shard = saved({"x": Both(np.arange(100_000), torch.ones(3))}, tmp_path / "job", stack)
    target = Both(np.frombuffer(bytes(800_000), np.int64), held)
    restore_into({"x": target}, shard)
    assert target.order.tolist() == list(range(100_000))
    assert target.more.tolist() == [1.0] * 3


# ----------------------------------------------------------------------------------------------------- numpy

RECORDS = [("a", "i4"), ("b", "f8")]
ARRAYS: dict[str, Any] = {
    "masked": np.ma.masked_array([1.5, 2.5], mask=[True, False], fill_value=7.0),
    "masked by nothing": np.ma.masked_array([1.5, 2.5]),
    "masked for good": np.ma.masked_array([(1, 2.5)], mask=[(True, False)], dtype=RECORDS, hard_mask=True),
    "records": np.rec.array([(1, 2.5)], dtype=RECORDS),
    "a structured value": np.array([(1, 2.5)], dtype=RECORDS)[0],
    "an empty text": np.str_(""),
    "matrix": np.array([[1, 2], [3, 4]]).view(np.matrix),
    "ml_dtypes bfloat16": np.array([1.5, 2.5], dtype=ml_dtypes.bfloat16),
    "ml_dtypes float8": np.array([1.5, 2.0], dtype=ml_dtypes.float8_e4m3fn),
    "ml_dtypes int4": np.array([1, -2], dtype=ml_dtypes.int4),
    "ml_dtypes scalar": ml_dtypes.bfloat16(1.5),
    "fields with gaps": np.zeros(2, dtype=np.dtype({"names": ["a"], "formats": ["i1"], "itemsize": 24})),
    "aligned fields": np.zeros(2, dtype=np.dtype([("a", "i1"), ("b", "i8")], align=True)),
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
        assert (str(found.dtype), found.dtype.type) == (str(value.dtype), value.dtype.type)
        assert found.dtype == value.dtype
        assert_same(np.ma.getmaskarray(found), np.ma.getmaskarray(value))
        assert str(found.tolist()) == str(value.tolist())
        if value.dtype.names is None and not value.dtype.hasobject:
            assert found.tobytes() == value.tobytes()
        if isinstance(value, np.ma.MaskedArray):
            assert (found.mask is np.ma.nomask) == (value.mask is np.ma.nomask)
            assert found.hardmask == value.hardmask
        assert getattr(found, "fill_value", 0) == getattr(value, "fill_value", 0)


class Measured(np.ndarray):
    """An array with a unit that its pickle knows nothing of."""


class Length(np.float64):
    """A number with one."""


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (np.zeros(2).view(Measured), "Measured"),
        (Length(1.5), "numpy:dtype"),
        (np.ma.masked, "MaskedConstant"),
        (np.rec.array([(1, 2.5)], dtype=RECORDS)[0], "numpy:dtype"),
    ],
)
def test_a_value_of_numpy_that_a_restore_could_not_make_is_refused_at_the_save(value: Any, name: str) -> None:
    with pytest.raises(ConfigError, match=f"lengths: .* names .*{name}"):
        StateWalker(allow=()).snapshot({"lengths": value, "weight": torch.zeros(1)})


def test_no_checkpoint_makes_an_array_of_whatever_its_bytes_point_to() -> None:
    """A dtype of numpy's believes a pickle that there are no objects in it."""

    def call(function: Any, *args: Any, state: Any = None) -> Any:
        return type("Call", (), {"__reduce__": lambda self: (function, args, state)})()

    forged = call(
        np.dtype, "V8", False, True, state=(3, "|", None, ("a",), {"a": (np.dtype("O"), 0)}, 8, 1, 0)
    )
    array = call(np.ndarray, (0,), state=(1, (1,), forged, False, b"A" * 8))
    crafted = {"pickle": base64.b64encode(pickle.dumps(array)).decode()}
    with pytest.raises(ConfigError, match=r"names numpy:(ndarray|dtype), which is not on the list"):
        decode(crafted, Allowed())


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


@pytest.mark.parametrize("parameter", [False, True])
@pytest.mark.parametrize("left", [0, 8])
def test_a_tensor_whose_memory_was_freed_since_the_last_save_is_refused_by_name(
    left: int, parameter: bool
) -> None:
    tensor = torch.nn.Parameter(torch.ones(3)) if parameter else torch.ones(3)
    walker, shard = StateWalker(), shard_of({"x": tensor})
    walker.snapshot({"x": tensor})
    tensor.untyped_storage().resize_(left)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"tensor 'x' of shape \(3,\) .* memory.*cannot be captured"):
            walker.snapshot({"x": tensor})
    with pytest.raises((ConfigError, LayoutMismatch), match=r"x.*(smaller than the tensor|no memory)"):
        restore_into({"x": tensor}, shard)
    tensor.untyped_storage().resize_(12)
    assert len(walker.snapshot({"x": tensor}).sources) == 1


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

    empty = filled(0.0)
    empty._local_shards = []  # as on a rank that has no part of a small tensor
    with pytest.raises(LayoutMismatch, match="s: the checkpoint holds a tensor"):
        restore_into(
            {"s": empty, "x": filled(0.0)}, saved({"s": filled(1.0), "x": target}, tmp_path / "1", stack)
        )
    shard = saved({"s": empty, "x": target}, tmp_path / "2", stack)
    assert restore_into({"s": empty, "x": filled(0.0)}, shard)["s"] is empty
    with pytest.raises(LayoutMismatch, match=r"s: .* ShardedTensor with a tensor"):
        restore_into({"s": filled(0.0), "x": filled(0.0)}, shard)


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
        FullyShardedDataParallel.set_state_dict_type(model, StateDictType.LOCAL_STATE_DICT)
        with pytest.raises(ConfigError, match=r"model/_flat_param: torch .*SHARDED_STATE_DICT"):
            saved({"model": model}, Path(directory, f"local-{rank}"), stack)
    return [weights(model), weights(other)]


def test_a_model_of_fsdp1_with_sharded_state_goes_on_and_one_that_could_not_is_refused_at_the_save(
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


class Compressed(torch.optim.AdamW):
    """Keeps less than it works with."""

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        for moments in state["state"].values():
            moments["exp_avg"] = moments["exp_avg"].bfloat16()
        return state


def test_an_optimizer_that_loads_its_state_in_its_own_way_is_left_alone(
    tmp_path: Path, stack: ExitStack
) -> None:
    def in_half(optimizer: torch.optim.Optimizer) -> None:
        for moments in optimizer.state.values():
            moments["exp_avg"] = moments["exp_avg"].half()

    model = torch.nn.Linear(4, 3)
    optimizer = Compressed(model.parameters())
    train(model, optimizer, 1, seed=1)
    shard = saved([optimizer], tmp_path / "job", stack)
    fresh = Compressed(model.parameters())
    restore_into([fresh], shard)
    train(model, fresh, 1, seed=1)
    with_hook = torch.optim.AdamW(model.parameters())
    with_hook.register_load_state_dict_post_hook(in_half)
    restore_into([with_hook], shard)
    assert {moments["exp_avg"].dtype for moments in with_hook.state.values()} == {torch.float16}
    # Torch's own optimizers work in the dtype of their parameters, which has changed here.
    other = torch.nn.Linear(4, 3).bfloat16()
    narrow = torch.optim.AdamW(other.parameters())
    restore_into([narrow], saved([with_hook], tmp_path / "1", stack))
    train(other, narrow, 1, seed=1)


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
