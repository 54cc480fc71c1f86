# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import argparse
import collections
import ctypes
import dataclasses
import enum
import json
import mmap
import os
import random
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from resiliency.checkpoint import (
    Placement,
    ShardedView,
    StateLayout,
    StateWalker,
    materialize,
    register_sharded_type,
    restore_into,
)
from resiliency.checkpoint.state.fill import plan_restore
from resiliency.checkpoint.state.layout import contiguous_stride
from resiliency.checkpoint.state.rank_sets import mesh_of
from resiliency.checkpoint.state.snapshot import sharded_objects
from resiliency.checkpoint.state.tensors import leaf_of
from resiliency.errors import CheckpointCorrupt, CheckpointError, ConfigError, LayoutMismatch
from tests.checkpoint.capture_builders import bits, saved
from tests.checkpoint.comparing import assert_same
from tests.checkpoint.state.states import Frozen, Moments, Pair, states
from tests.waiting import wait_until


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def erase(state: Any) -> None:
    """Zero every tensor in place."""
    if isinstance(state, torch.Tensor):
        state.untyped_storage().fill_(0)
    elif isinstance(state, dict):
        for item in state.values():
            erase(item)
    elif isinstance(state, (list, tuple)) and not isinstance(state, torch.Size):
        for item in state:
            erase(item)
    elif dataclasses.is_dataclass(state):
        erase([getattr(state, field.name) for field in dataclasses.fields(state)])


@given(state=states)
@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
def test_any_state_comes_back_bit_for_bit_as_new_objects_and_in_place(state: Any) -> None:
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        shard = saved(state, Path(directory) / "job", stack)
        assert StateLayout.from_json(shard.layout.to_json()) == shard.layout
        found = materialize(shard, allow=[Moments, Pair])
        assert_same(found, state)
        erase(found)
        assert_same(restore_into(found, shard, allow=[Moments, Pair]), state)


def test_restores_into_the_tensors_of_a_module_and_of_an_optimizer_that_never_stepped(
    tmp_path: Path, stack: ExitStack
) -> None:
    def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4))
        model[2].weight = model[0].weight
        return model, torch.optim.AdamW(model.parameters())

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.arange(12.0).view(3, 4)).square().sum().backward()
        optimizer.step()

    model, optimizer = build()
    step(model, optimizer)
    shard = saved({"model": model, "optimizer": optimizer, "step": 7}, tmp_path / "job", stack)
    assert sum("weight" in entry.key for entry in shard.layout.entries if "model" in entry.key) == 2

    other, fresh = build()
    memory = other[0].weight.data_ptr()
    state = {"model": other, "optimizer": fresh, "step": 0}
    assert restore_into(state, shard) is state
    assert state["step"] == 7
    assert other[0].weight.data_ptr() == memory == other[2].weight.data_ptr()

    step(model, optimizer)
    step(other, fresh)
    for mine, theirs in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        assert bits(mine) == bits(theirs)


def test_tied_tensors_are_stored_once_and_come_back_tied(tmp_path: Path, stack: ExitStack) -> None:
    base = torch.arange(10.0)
    square = torch.arange(9.0).view(3, 3)
    state = {
        "tied": [base, base], "inside": base[2:5], "columns": [square[:, :1], square[:, 1:]],
        "overlapping": [torch.arange(8)[:5]], "transposed": [square.t(), square.t()],
    }  # fmt: skip
    storage = torch.arange(8)
    state["overlapping"] = [storage[:5], storage[3:]]
    shard = saved(state, tmp_path / "job", stack)
    assert shard.layout.size_bytes <= 64 * 3 + 64

    found = materialize(shard)
    assert_same(found, state)
    found["tied"][1][2] = -1
    assert found["tied"][0][2] == found["inside"][0] == -1
    found["overlapping"][0][4] = -1
    assert found["overlapping"][1][1] == -1
    found["transposed"][0][0, 1] = -1
    assert found["transposed"][1][0, 1] == found["columns"][0][1, 0] == -1


def test_two_small_views_of_a_large_tensor_do_not_store_the_large_tensor(
    tmp_path: Path, stack: ExitStack
) -> None:
    large = torch.arange(1 << 16).view(256, 256)
    state = [large[:, 0], large[:, 1]]
    shard = saved(state, tmp_path / "job", stack)
    assert shard.layout.size_bytes == 2 * 256 * 8
    assert_same(materialize(shard), state)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_lazily_conjugated_quantised_and_sparse_tensors_come_back(tmp_path: Path, stack: ExitStack) -> None:
    state = {
        "conjugated": torch.randn(3, dtype=torch.complex64).conj(),
        "quantised": torch.quantize_per_tensor(torch.randn(5), 0.1, 3, torch.qint8),
        "channels": torch.quantize_per_channel(
            torch.randn(2, 3), torch.tensor([0.1, 0.2]), torch.tensor([0, 1]), 0, torch.quint8
        ),
    }
    sparse = torch.tensor([[0.0, 2.0], [3.0, 0.0]]).to_sparse()
    shard = saved({**state, "sparse": sparse}, tmp_path / "job", stack)
    found = materialize(shard)
    for key, tensor in state.items():
        assert bits(found[key]) == bits(tensor)
    assert found["quantised"].q_scale() == 0.1
    assert found["channels"].q_per_channel_zero_points().tolist() == [0, 1]
    assert found["sparse"].to_dense().tolist() == sparse.to_dense().tolist()


def test_values_may_change_without_a_new_layout_and_structure_may_not() -> None:
    walker = StateWalker()
    weight = torch.zeros(3)
    first = walker.snapshot({"weight": weight, "step": 1, "losses": []})
    same = walker.snapshot({"weight": torch.ones(3), "step": 2, "losses": [0.5, 0.25]})
    assert same.layout.fingerprint == first.layout.fingerprint
    assert same.values != first.values
    assert same.sources[0].tolist() == [1, 1, 1]
    others = [
        {"weight": torch.zeros(4), "step": 1, "losses": []},
        {"weight": torch.zeros(3, dtype=torch.float64), "step": 1, "losses": []},
        {"weight": weight, "step": 1, "losses": weight},
        {"weight": weight, "step": 1, "losses": Moments(weight.clone(), 1)},
        {"weight": weight, "step": torch.tensor(1), "losses": []},
        {"weights": weight, "step": 1, "losses": []},
        {"weight": 1, "step": 1, "losses": []},
        [weight],
    ]
    fingerprints = {walker.snapshot(state).layout.fingerprint for state in others}
    assert len(fingerprints | {first.layout.fingerprint}) == 9
    again = walker.snapshot({"weight": weight, "step": 1, "losses": []})
    assert again.layout.fingerprint == first.layout.fingerprint


def test_a_tie_that_is_broken_is_a_new_layout() -> None:
    walker = StateWalker()
    a, b = torch.zeros(3), torch.zeros(3)
    tied, apart = walker.snapshot([a, a]), walker.snapshot([a, b])
    assert len(tied.layout.entries) == 1
    assert len(apart.layout.entries) == 2
    assert tied.layout.fingerprint != apart.layout.fingerprint


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ({"a": {"w": torch.zeros(4)}, "n": 1}, ["a/w", "(3,)", "(4,)"]),
        ({"a": {"w": torch.zeros(3).double()}, "n": 1}, ["a/w", "float32", "float64"]),
        ({"a": {"v": torch.zeros(3)}, "n": 1}, ["a", "'v'", "'w'"]),
        ({"a": {"w": None}, "n": 1}, ["a/w", "a tensor", "NoneType"]),
        ({"a": {"w": torch.zeros(3)}, "n": torch.zeros(1)}, ["n", "a plain value", "Tensor"]),
        ({"a": [torch.zeros(3)], "n": 1}, ["a", "a dict", "list"]),
    ],
)
def test_a_mismatch_names_the_key_and_both_sides_and_changes_nothing(
    target: Any, words: list[str], tmp_path: Path, stack: ExitStack
) -> None:
    shard = saved({"a": {"w": torch.ones(3)}, "n": 2}, tmp_path / "job", stack)
    with pytest.raises(LayoutMismatch) as caught:
        restore_into(target, shard)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert target["n"] == 1 or isinstance(target["n"], torch.Tensor)


def test_a_renamed_layer_is_refused_before_any_other_tensor_is_written(
    tmp_path: Path, stack: ExitStack
) -> None:
    def build(name: str, value: float) -> dict[str, Any]:
        model = torch.nn.Sequential(OrderedDict({name: torch.nn.Linear(2, 2)}))
        torch.nn.init.constant_(model[0].weight, value)  # type: ignore[arg-type]
        return {"before": torch.full((3,), value), "model": model, "after": torch.full((3,), value)}

    shard = saved(build("old", 1.0), tmp_path / "job", stack)
    target = build("new", 2.0)
    with pytest.raises(LayoutMismatch, match=r"model: .*new\.weight.*old\.weight"):
        restore_into(target, shard)
    assert bits(target["model"].new.weight) == bits(torch.full((2, 2), 2.0))
    for name in ("before", "after"):
        assert bits(target[name]) == bits(torch.full((3,), 2.0))


def test_an_optimizer_that_refuses_its_state_is_named_with_what_became_of_the_rest(
    tmp_path: Path, stack: ExitStack
) -> None:
    def build(groups: int) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [torch.zeros(1)]} for _ in range(groups)])

    shard = saved({"optimizer": build(1)}, tmp_path / "job", stack)
    with pytest.raises(CheckpointError, match=r"optimizer: SGD refused .*overwritten already") as caught:
        restore_into({"optimizer": build(2)}, shard)
    assert not isinstance(caught.value, LayoutMismatch)


def resident_bytes(tensor: torch.Tensor) -> int:
    """Of the whole pages of a tensor, what the kernel has found memory for."""
    page = mmap.PAGESIZE
    begin = -(-tensor.data_ptr() // page) * page
    pages = (tensor.data_ptr() + tensor.nbytes - begin) // page
    found = (ctypes.c_ubyte * pages)()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(begin), ctypes.c_size_t(pages * page), found) == 0
    return page * sum(each & 1 for each in found)


def test_memory_that_is_to_be_filled_is_mapped_while_ranks_agree_and_holds_what_it_held_until_then(
    tmp_path: Path, stack: ExitStack
) -> None:
    shard = saved({"w": torch.ones(10 << 20)}, tmp_path / "job", stack)
    # Not of `malloc`: it may have as much that is mapped already, of tests before this one.
    target = {"w": torch.frombuffer(mmap.mmap(-1, 40 << 20), dtype=torch.float32)}
    target["w"][0] = 7
    assert resident_bytes(target["w"]) < 20 << 20
    act = plan_restore(target, shard)
    wait_until(lambda: resident_bytes(target["w"]) > 39 << 20, "its pages are not populated")
    assert (target["w"][0], target["w"][-1]) == (7, 0)
    act()
    assert bool(target["w"].eq(1).all())
    plan_restore(target, shard)  # it is mapped
    assert not [thread for thread in threading.enumerate() if thread.name == "resiliency-restore-memory"]


def test_memory_is_filled_as_well_where_no_thread_can_begin_to_map_it_ahead(
    tmp_path: Path, stack: ExitStack
) -> None:
    """Other ranks wait in a collective for what this one says of its plan."""
    shard = saved({"w": torch.ones(1 << 20)}, tmp_path / "job", stack)
    target = {"w": torch.empty(1 << 20)}
    threading.stack_size(1 << 50)  # more than there are addresses: no thread can begin
    try:
        act = plan_restore(target, shard)
    finally:
        threading.stack_size(0)
    act()
    assert bool(target["w"].eq(1).all())


def test_a_shard_in_read_only_memory_can_be_restored(tmp_path: Path, stack: ExitStack) -> None:
    weight = torch.arange(1 << 16)
    shard = saved({"w": weight, "tail": weight[5:]}, tmp_path / "job", stack)
    received = dataclasses.replace(shard, buffer=memoryview(bytes(shard.buffer)))
    target = {"w": torch.zeros_like(weight), "tail": torch.zeros_like(weight[5:])}
    restore_into(target, received)
    assert_same(target, {"w": weight, "tail": weight[5:]})


def test_frozen_and_immutable_holders_are_restored(tmp_path: Path, stack: ExitStack) -> None:
    shard = saved((Frozen(torch.ones(2)), 5), tmp_path / "job", stack)
    target = (Frozen(torch.zeros(2)), 0)
    found = restore_into(target, shard)
    assert found[1] == 5
    assert found[0] is target[0]
    assert target[0].weight.tolist() == [1, 1]


class Malicious:
    def __reduce__(self) -> Any:
        return os.mkdir, ("should-not-exist",)


def test_a_checkpoint_cannot_run_code_that_nobody_allowed(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shard = saved({"x": torch.ones(1), "evil": Malicious()}, tmp_path / "job", stack)
    with pytest.raises(ConfigError, match=r"names posix:mkdir, which is not on the list.*allow="):
        materialize(shard)
    assert not (tmp_path / "should-not-exist").exists()


def test_opaque_objects_come_back_and_what_cannot_be_saved_is_named(tmp_path: Path, stack: ExitStack) -> None:
    namespace = argparse.Namespace(lr=0.1, hidden=torch.ones(2))
    queue = collections.deque([1, 2], maxlen=4)
    found = materialize(saved({"args": namespace, "queue": queue}, tmp_path / "job", stack))
    assert found["args"].hidden.tolist() == [1, 1]
    assert found["queue"] == queue
    with pytest.raises(ConfigError, match=r"type _thread:lock.*cannot be saved"):
        StateWalker().snapshot({"lock": __import__("threading").Lock()})
    loop: list[Any] = [torch.ones(1)]
    loop.append(loop)
    with pytest.raises(ConfigError, match="contains itself"):
        StateWalker().snapshot(loop)
    with pytest.raises(ConfigError, match=r"'w'.*meta device"):
        StateWalker().snapshot({"w": torch.empty(2, device="meta")})


class Mode(enum.Enum):
    TRAIN = "train"
    STOP = "stop"


@dataclasses.dataclass
class Progress:
    epoch: int
    mode: Mode
    losses: list[float] = dataclasses.field(default_factory=list)


class Plain:
    """No class that a checkpoint may name unasked."""


def odd_state(number: int) -> dict[str, Any]:
    generator, numbers = torch.Generator().manual_seed(number), np.random.default_rng(number)
    return {
        "generator": generator,
        "numbers": numbers,
        "random": random.Random(number),  # noqa: S311 - a state of it, no secret
        "counts": collections.defaultdict(int, {"a": number}),
        "progress": Progress(number, Mode.STOP if number else Mode.TRAIN, [0.5] * number),
        "pair": Pair(number, (Mode.STOP,)),
    }


def test_a_state_of_common_objects_that_saves_comes_back_without_a_list_of_classes(
    tmp_path: Path, stack: ExitStack
) -> None:
    state = odd_state(3)
    state["generator"].set_state(torch.Generator().manual_seed(17).get_state())
    shard = saved(state, tmp_path / "job", stack, allow=())
    target = odd_state(0)
    generator, progress = target["generator"], target["progress"]
    restore_into(target, shard)
    assert target["generator"] is generator  # the sampler that it was given to goes on with it
    assert target["progress"] is progress
    assert progress == Progress(3, Mode.STOP, [0.5] * 3)
    assert torch.equal(generator.get_state(), state["generator"].get_state())
    assert target["numbers"].random() == state["numbers"].random()
    assert target["random"].random() == state["random"].random()
    assert (target["counts"]["a"], target["counts"]["b"]) == (3, 0)
    assert target["pair"] == Pair(3, (Mode.STOP,))


def test_one_object_in_two_places_of_the_target_does_not_lose_what_was_two(
    tmp_path: Path, stack: ExitStack
) -> None:
    shard = saved([Progress(1, Mode.STOP), Progress(2, Mode.STOP)], tmp_path / "job", stack)
    one = Progress(0, Mode.STOP)
    found = restore_into([one, one], shard)
    assert [item.epoch for item in found] == [1, 2]


def test_a_class_that_the_target_does_not_hold_is_built_only_if_it_is_allowed(
    tmp_path: Path, stack: ExitStack
) -> None:
    shard = saved({"best": Progress(3, Mode.STOP)}, tmp_path / "job", stack, allow=())
    with pytest.raises(ConfigError, match=r"names .*Progress.*CheckpointerOptions\(allow="):
        restore_into({"best": None}, shard)
    found = restore_into({"best": None}, shard, allow=[Progress, Mode])
    assert found["best"] == Progress(3, Mode.STOP)


@pytest.mark.parametrize("place", ["settings", "key"])
def test_a_state_that_could_not_be_restored_is_refused_when_it_is_saved(place: str) -> None:
    walker = StateWalker(allow=["builtins:int"])
    good, bad = {"w": torch.ones(1), "deep": [0]}, {"w": torch.ones(1), "deep": [Plain()]}
    if place == "key":
        bad = {"w": torch.ones(1), Mode.STOP: torch.ones(1)}  # type: ignore[dict-item]
    walker.snapshot(good)
    words = (
        r"deep/0: .*:Plain.*CheckpointerOptions\(allow=\[" if place == "settings" else "has the key .*Mode"
    )
    for _ in range(2):  # also where the layout is known
        with pytest.raises(ConfigError, match=words):
            walker.snapshot(bad)
    walker.snapshot(good)
    if place == "settings":
        StateWalker(allow=[Plain]).snapshot(bad)


def test_a_part_of_a_state_is_restored_where_that_is_asked_for(tmp_path: Path, stack: ExitStack) -> None:
    def build(value: float, *names: str) -> dict[str, Any]:
        parts = {name: torch.nn.Linear(2, 2) for name in names}
        for part in parts.values():
            torch.nn.init.constant_(part.weight, value)
        return {**parts, "step": int(value)}

    shard = saved(build(1.0, "model", "ema"), tmp_path / "job", stack)
    target = build(2.0, "model", "head")
    with pytest.raises(LayoutMismatch) as caught:
        restore_into(target, shard)
    for words in ("does not hold 'head', which the state", "does not have 'ema', which", "partial=True"):
        assert words in str(caught.value)
    plan_restore(target, shard, partial=True)()
    assert target["model"].weight.unique().tolist() == [1.0]
    assert target["head"].weight.unique().tolist() == [2.0]
    assert target["step"] == 1
    with pytest.raises(LayoutMismatch, match="'model'"):
        plan_restore({"other": torch.ones(1)}, shard, partial=True)
    # A module is no container of parts: a layer that is not there stays an error.
    with pytest.raises(LayoutMismatch, match=r"model: .*'bias'"):
        plan_restore({"model": torch.nn.Linear(2, 2, bias=False)}, shard, partial=True)


@pytest.mark.parametrize("stepped", [False, True])
def test_the_state_of_another_optimizer_is_refused_with_both_names(
    stepped: bool, tmp_path: Path, stack: ExitStack
) -> None:
    def stepped_once(cls: Any, **settings: Any) -> torch.optim.Optimizer:
        parameter = torch.nn.Parameter(torch.ones(2))
        optimizer: torch.optim.Optimizer = cls([parameter], lr=0.1, **settings)
        if stepped:
            parameter.grad = torch.ones(2)
            optimizer.step()
        return optimizer

    shard = saved({"optimizer": stepped_once(torch.optim.AdamW)}, tmp_path / "job", stack)
    with pytest.raises(LayoutMismatch, match=r"optimizer: .*AdamW.*'betas'.*SGD with .*'momentum'"):
        restore_into({"optimizer": stepped_once(torch.optim.SGD)}, shard)
    own = type("Own", (torch.optim.AdamW,), {})
    restore_into({"optimizer": stepped_once(own, betas=(0.5, 0.5))}, shard)


class LibraryTensor:
    """Like the sharded tensors of training libraries: data with a name and a place."""

    def __init__(self, name: str, data: Any, offset: int) -> None:
        self.name, self.data, self.offset = name, data, offset


def test_registered_sharded_types_keep_their_global_name_and_place(tmp_path: Path, stack: ExitStack) -> None:
    def describe(part: LibraryTensor) -> ShardedView:
        place = Placement(global_shape=(8,), global_offset=(part.offset,), name=part.name, replica_id=1)
        return ShardedView(data=part.data, placement=place)

    register_sharded_type(LibraryTensor, describe)
    state = [LibraryTensor("layers", torch.full((2,), float(i)), 2 * i) for i in range(2)]
    shard = saved([*state, LibraryTensor("extra", {"rng": torch.ones(2)}, 0)], tmp_path / "job", stack)
    assert [(e.key, e.name, e.global_offset, e.replica_id) for e in shard.layout.entries] == [
        ("0", "layers", (0,), 1),
        ("1", "layers", (2,), 1),
    ]
    assert all(entry.is_sharded and entry.global_shape == (8,) for entry in shard.layout.entries)
    ((place, rng),) = sharded_objects(shard.layout, shard.values)
    assert (place.name, rng["rng"].tolist()) == ("extra", [1, 1])
    target = [LibraryTensor("layers", torch.zeros(2), 2 * i) for i in range(2)]
    extra = LibraryTensor("extra", None, 0)
    restore_into([*target, extra], shard)
    assert [part.data.tolist() for part in target] == [[0, 0], [1, 1]]
    assert extra.data["rng"].tolist() == [1, 1]


@pytest.fixture
def mesh(tmp_path: Path, stack: ExitStack) -> DeviceMesh:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    stack.callback(dist.destroy_process_group)
    return init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))


@pytest.mark.leaks("descriptors", reason="gloo keeps its socket as long as the mesh refers to the group")
def test_a_sharded_model_and_its_new_optimizer_go_on_as_if_nothing_happened(
    mesh: DeviceMesh, tmp_path: Path, stack: ExitStack
) -> None:
    def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = fully_shard(torch.nn.Linear(3, 5), mesh=mesh)
        return model, torch.optim.AdamW(model.parameters())

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.arange(6.0).view(2, 3)).square().sum().backward()
        optimizer.step()

    model, optimizer = build()
    step(model, optimizer)
    shard = saved([model, optimizer], tmp_path / "job", stack)
    other, fresh = build()
    restore_into([other, fresh], shard)
    step(model, optimizer)
    step(other, fresh)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert bits(mine.to_local()) == bits(theirs.to_local())


@pytest.mark.leaks("descriptors", reason="gloo keeps its socket as long as the mesh refers to the group")
def test_dtensors_are_saved_as_local_shards_and_restored_in_place(
    mesh: DeviceMesh, tmp_path: Path, stack: ExitStack
) -> None:
    tensor = distribute_tensor(torch.arange(6.0).view(2, 3), mesh, [Replicate(), Shard(0)])
    shard = saved({"w": torch.nn.Parameter(tensor)}, tmp_path / "job", stack)
    (entry,) = shard.layout.entries
    assert (entry.global_shape, entry.global_offset, entry.replica_id) == ((2, 3), (0, 0), 0)
    target = {"w": distribute_tensor(torch.zeros(2, 3), mesh, [Replicate(), Shard(0)])}
    restore_into(target, shard)
    assert isinstance(target["w"], DTensor)
    assert target["w"].to_local().tolist() == [[0, 1, 2], [3, 4, 5]]


@contextmanager
def seat(rank: int, world_size: int = 4) -> Iterator[None]:
    """This process as one of several ranks that never talk."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def placed(mesh: DeviceMesh, placements: list[Any], shape: tuple[int, ...] = (6, 4)) -> DTensor:
    local, _ = compute_local_shape_and_global_offset(shape, mesh, placements)
    stride = contiguous_stride(shape)
    return DTensor.from_local(
        torch.zeros(local), mesh, placements, run_check=False, shape=shape, stride=stride
    )  # type: ignore[arg-type]


def test_where_the_parts_of_an_unchanged_state_lie_is_not_computed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[object] = []

    def counted(*args: Any) -> Any:
        asked.append(args)
        return compute_local_shape_and_global_offset(*args)

    monkeypatch.setattr("torch.distributed.tensor._utils.compute_local_shape_and_global_offset", counted)
    with seat(1):
        mesh = init_device_mesh("cpu", (2, 2))
        weights = [placed(mesh, [Replicate(), Shard(0)], (rows, 4)) for rows in (2, 3, 4)]
        state = {"weights": weights, "moments": [torch.zeros_like(weight) for weight in weights]}
        walker = StateWalker()
        before = walker.snapshot(state).layout
        assert len(asked) == len(weights), "a moment lies where its parameter does"
        assert walker.snapshot(state).layout is before
        assert len(asked) == len(weights)
        weights[0] = placed(mesh, [Replicate(), Shard(1)], (2, 4))
        after = walker.snapshot(state).layout
        assert len(asked) == len(weights) + 1
        assert after.by_key["weights/0"].global_offset == (0, 2) != before.by_key["weights/0"].global_offset


def test_a_part_is_never_said_to_lie_where_another_one_did() -> None:
    """Whatever else of a DTensor stays as it was: its mesh, placements, shape, rank, number of ranks."""
    kept = []  # what is known of a mesh ends with it

    def variants() -> Iterator[DTensor]:
        line, turned = DeviceMesh("cpu", [0, 1, 2, 3]), DeviceMesh("cpu", [3, 2, 1, 0])
        grid = DeviceMesh("cpu", [[0, 1], [2, 3]])
        for mesh in (line, turned):
            yield placed(mesh, [Shard(0)])
            yield placed(mesh, [Shard(0)], (7, 4))
            yield placed(mesh, [Shard(1)])
            yield placed(mesh, [Replicate()])
        yield placed(grid, [Shard(0), Shard(0)], (8, 4))
        yield placed(grid, [_StridedShard(0, split_factor=2), Shard(0)], (8, 4))
        yield placed(grid, [Shard(0), Replicate()])
        yield placed(grid, [Replicate(), Shard(0)])

    for rank, world_size in ((1, 4), (2, 4), (2, 8)):
        with seat(rank, world_size):
            tensors = list(variants())
            kept.append(tensors)
            for tensor in (*tensors, *reversed(tensors)):
                found = leaf_of(tensor, "dtensor", ()).placement
                mesh, placements = tensor.device_mesh, tensor.placements
                _, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
                assert found is not None
                assert (found.global_shape, found.global_offset) == (tuple(tensor.shape), tuple(offset))
                is_everywhere = world_size == 4 and placements == (Replicate(),)
                assert mesh_of(found.attributes) == ("" if is_everywhere else "0+4x1")
                copies = [
                    place
                    for place, kind in zip(mesh.get_coordinate() or (), placements, strict=True)
                    if kind.is_replicate()
                ]
                assert found.replica_id == (copies[0] if copies else 0)


def test_tensors_beyond_four_gigabytes_have_a_place_in_the_layout(tmp_path: Path) -> None:
    # A sparse file: nothing of it is ever touched.
    large = torch.from_file(str(tmp_path / "sparse"), shared=True, size=5 << 30, dtype=torch.uint8)
    layout = StateWalker().snapshot({"large": large, "after": torch.ones(2)}).layout
    assert layout.by_key["after"].offset_bytes == 5 << 30
    assert StateLayout.from_json(layout.to_json()) == layout


def test_an_altered_layout_is_refused() -> None:
    text = StateWalker().snapshot({"w": torch.ones(3)}).layout.to_json()
    assert StateLayout.from_json(text).entries[0].shape == (3,)
    with pytest.raises(CheckpointCorrupt, match="fingerprint"):
        StateLayout.from_json(text.replace('"replica_id":0', '"replica_id":1'))
    with pytest.raises(CheckpointCorrupt, match="13 bytes, 12 expected"):
        StateLayout.from_json(text.replace('"size_bytes":12', '"size_bytes":13'))
    with pytest.raises(CheckpointCorrupt, match="version 9"):
        StateLayout.from_json(text.replace('"version":1', '"version":9'))
    with pytest.raises(CheckpointCorrupt, match="unknown fields"):
        StateLayout.from_json(json.dumps({**json.loads(text), "layout": {"entries": [{}], "views": []}}))
    with pytest.raises(CheckpointCorrupt, match="not a state layout"):
        StateLayout.from_json(text[:-5])
    with pytest.raises(CheckpointCorrupt, match="not a state layout"):
        StateLayout.from_json(text.encode().replace(b'"name":"', b'"name":"\xed\xa0\x80'))
