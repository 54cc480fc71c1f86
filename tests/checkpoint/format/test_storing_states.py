# SPDX-License-Identifier: Apache-2.0
"""Real states, captured by the walker, through both formats and back; stock torch loads them."""

from __future__ import annotations

import dataclasses
import mmap
import tempfile
from collections import OrderedDict
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings

from resiliency.checkpoint import Capturer, RankArena, open_captured
from resiliency.checkpoint.commit.commit import CheckpointFormat
from resiliency.checkpoint.format.dcp import DcpFormat
from resiliency.checkpoint.format.dcp_values import FlattenedValues
from resiliency.checkpoint.format.local import LocalFormat
from resiliency.checkpoint.format.reader import CheckpointReader
from resiliency.checkpoint.format.torch_record import memory_of
from resiliency.checkpoint.state.fill import materialize, restore_into
from resiliency.checkpoint.state.layout import Shard
from resiliency.checkpoint.state.snapshot import StateWalker
from resiliency.checkpoint.storage.interface import Buffer, Storage, WritableFile
from resiliency.checkpoint.storage.posix import LocalStorage
from resiliency.checkpoint.torch_dcp import DcpStorageReader, DcpStorageWriter
from resiliency.checkpoint.torch_dcp import files as dcp_files
from resiliency.testing.storage import MemoryStorage
from tests.checkpoint.capture_builders import SOON, saved
from tests.checkpoint.comparing import assert_same
from tests.checkpoint.shard_builders import shard_of
from tests.checkpoint.state import states as any_state
from tests.checkpoint.storage_builders import content_of, read_shard, save

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 5))
    model[2].weight = torch.nn.Parameter(model[0].weight.detach().t().clone())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    for _ in range(2):
        model(torch.randn(4, 5)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    return {
        "model": model.state_dict(),
        "optim": optimizer.state_dict(),
        "progress": {"samples": 12, "names": ["a", "b"]},
    }


formats = pytest.mark.parametrize(
    "format", [LocalFormat(), DcpFormat(values=FlattenedValues())], ids=lambda item: item.name
)


@formats
def test_a_trained_state_comes_back_bit_for_bit(tmp_path: Path, format: CheckpointFormat[Shard]) -> None:
    state = state_of(*trained())
    save(LocalStorage(tmp_path), format, [shard_of(state)])
    shard = read_shard(CheckpointReader(LocalStorage(tmp_path), 7), 0)
    made = materialize(shard)
    assert made["progress"] == state["progress"]
    other_model, other_optimizer = trained()
    other = state_of(other_model, other_optimizer)
    restore_into(other, shard)
    for found in (made, other):
        assert all(torch.equal(found["model"][key], value) for key, value in state["model"].items())
        for number, entry in state["optim"]["state"].items():
            assert all(torch.equal(found["optim"]["state"][number][key], entry[key]) for key in entry)


def test_stock_torch_loads_a_trained_state_with_its_plain_values(tmp_path: Path) -> None:
    state = state_of(*trained())
    save(LocalStorage(tmp_path), DcpFormat(values=FlattenedValues()), [shard_of(state)])
    other = state_of(*trained())
    other["progress"] = {"samples": 0, "names": []}
    other["optim"]["param_groups"][0]["lr"] = 9.0
    dcp.load(other, checkpoint_id=tmp_path / "step=7", no_dist=True)
    assert other["progress"] == {"samples": 12, "names": ["a", "b"]}
    assert other["optim"]["param_groups"] == state["optim"]["param_groups"]
    assert all(torch.equal(other["model"][key], value) for key, value in state["model"].items())
    moments = state["optim"]["state"][0]
    assert all(torch.equal(other["optim"]["state"][0][key], moments[key]) for key in moments)


# --- every kind of state, captured for real, on disk and back ------------------------------------


@dataclasses.dataclass
class Moments:
    mean: torch.Tensor
    count: int = 3


class Pair(NamedTuple):
    left: Any
    right: Any


class Counter:
    """Has `state_dict` and `load_state_dict`, and is no module."""

    def __init__(self, value: float) -> None:
        self.total = torch.full((3,), value)
        self.calls = int(value)

    def state_dict(self) -> dict[str, object]:
        return {"total": self.total, "calls": self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total.copy_(state["total"])
        self.calls = state["calls"]


def raw(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(64, dtype=torch.uint8).view(dtype)


def aliased() -> dict[str, Any]:
    base = torch.arange(24.0).reshape(4, 6)
    return {
        "base": base, "tied": [base, base], "turned": base.t(), "window": base[::2, 1::2],
        "spread": base[0, 0].expand(3, 2), "none of it": base[:0],
        "channels": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    }  # fmt: skip


STATES: dict[str, Callable[[], Any]] = {
    "containers": lambda: OrderedDict(
        a=[torch.ones(2), (torch.zeros(1), 5)], b=Pair(torch.ones(3), None), c=Moments(torch.ones(4)), d={}
    ),
    "a list": lambda: [torch.ones(2), [], {"n": 1}],
    "a tensor alone": lambda: torch.arange(5),
    "no tensors": lambda: {"n": 1, "text": "\0\ud800", "huge": 10**400, "nan": float("nan")},
    "nothing": dict,
    "scalars": lambda: {
        "t": torch.tensor(2.5), "b": torch.tensor(True), "n": np.float64(3), "a": np.arange(3)
    },
    "empty tensors": lambda: {
        "f": torch.empty(0, 3), "c": torch.empty(2, 0, dtype=torch.complex64), "b": torch.ones(3).bool()[:0]
    },
    "aliases": aliased,
    "lazy complex": lambda: {
        "conjugated": torch.view_as_complex(torch.randn(3, 2)).conj(),
        "negated": torch.view_as_complex(torch.randn(3, 2)).conj().imag,
    },
    "eight bits": lambda: {
        name: raw(getattr(torch, name))
        for name in ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")
    },
    "few bits": lambda: {
        name: raw(getattr(torch, name)) for name in ("uint4", "int4", "uint1", "bits8", "float4_e2m1fn_x2")
    },
    "many bits": lambda: {
        name: raw(getattr(torch, name))
        for name in ("bfloat16", "complex32", "complex128", "uint16", "uint64")
    },
    "quantised": lambda: {
        "tensor": torch.quantize_per_tensor(torch.randn(5), 0.1, 3, torch.qint8),
        "wide": torch.quantize_per_tensor(torch.randn(5), 0.1, 3, torch.qint32),
        "channels": torch.quantize_per_channel(
            torch.randn(2, 3), torch.tensor([0.1, 0.2]), torch.tensor([1, 0]), 0, torch.quint8
        ),
    },
    # What DeepSpeed's engine puts together: partitions in lists, shapes and settings among them.
    "in DeepSpeed's style": lambda: {
        "module": OrderedDict(weight=torch.ones(2, 2).bfloat16()), "ds_version": "0.17", "dp_world_size": 2,
        "param_shapes": [OrderedDict(weight=torch.Size([2, 2]))], "client_state": {"step": 3},
        "optimizer_state_dict": {
            "single_partition_of_fp32_groups": [torch.arange(4.0)], "zero_stage": 2, "overflow": False,
            "base_optimizer_state": {
                "state": {0: {"exp_avg": torch.ones(4), "step": torch.tensor(3.0)}},
                "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.95), "params": [0]}],
            },
        },
    },
    "names that torch joins alike": lambda: {
        "a": {"b": torch.ones(3), "c": torch.ones(1)}, "a.b": torch.zeros(3), "a.c": torch.ones(2),
        "x": {1: torch.ones(2), "1": torch.zeros(2)}, "y/z": torch.ones(1), "y": {"z": torch.zeros(1)},
    },
    "odd keys": lambda: {(1, 2): torch.ones(1), None: torch.zeros(1), True: torch.ones(2), "": torch.ones(3)},
}  # fmt: skip


@formats
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_")
@pytest.mark.parametrize("name", STATES)
def test_every_kind_of_state_comes_back_from_disk_bit_for_bit(
    tmp_path: Path, format: CheckpointFormat[Shard], name: str
) -> None:
    state = STATES[name]()
    allow = [Moments, Pair]
    with ExitStack() as stack:
        save(LocalStorage(tmp_path), format, [saved(state, tmp_path / "job", stack)])
    reader = CheckpointReader(LocalStorage(tmp_path), 1)
    reader.verify()
    shard = read_shard(reader, 0)
    found = materialize(shard, allow=allow)
    assert_same(found, state)
    assert_same(restore_into(found, shard, allow=allow), state)


@formats
@given(state=any_state.states)
@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
def test_any_generated_state_comes_back_from_storage_bit_for_bit(
    format: CheckpointFormat[Shard], state: Any
) -> None:
    storage = MemoryStorage()
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        save(storage, format, [saved(state, Path(directory) / "job", stack)])
    shard = read_shard(CheckpointReader(storage, 1), 0)
    assert_same(materialize(shard, allow=[any_state.Moments, any_state.Pair]), state)


@formats
def test_objects_with_a_state_of_their_own_come_back_in_place(
    tmp_path: Path, format: CheckpointFormat[Shard]
) -> None:
    with ExitStack() as stack:
        state = {"counter": Counter(4), "more": [Counter(5)]}
        save(LocalStorage(tmp_path), format, [saved(state, tmp_path / "job", stack)])
    target = {"counter": Counter(0), "more": [Counter(0)]}
    restore_into(target, read_shard(CheckpointReader(LocalStorage(tmp_path), 1), 0))
    assert (target["counter"].calls, target["counter"].total.tolist()) == (4, [4, 4, 4])
    assert (target["more"][0].calls, target["more"][0].total.tolist()) == (5, [5, 5, 5])


def test_values_beside_tensors_in_containers_of_any_class_are_there_for_stock_torch(tmp_path: Path) -> None:
    state = {"pair": Pair(torch.ones(2), 5), "moments": Moments(torch.ones(1), 7), "a": np.arange(3)}
    save(LocalStorage(tmp_path), DcpFormat(values=FlattenedValues()), [shard_of(state)])
    found = {"pair": {"0": torch.zeros(2), "1": 0}, "moments": {"mean": torch.zeros(1), "count": 0}}
    dcp.load(found, checkpoint_id=tmp_path / "step=7")
    assert (found["pair"]["1"], found["moments"]["count"]) == (5, 7)
    assert (found["pair"]["0"].tolist(), found["moments"]["mean"].tolist()) == ([1, 1], [1])
    array = {"a": torch.zeros(3, dtype=torch.int64)}
    dcp.load(array, checkpoint_id=tmp_path / "step=7")
    assert array["a"].tolist() == [0, 1, 2]


def test_names_that_torch_joins_alike_are_all_there_for_stock_torch(tmp_path: Path) -> None:
    state = {"a": {"b": torch.ones(3)}, "a.b": torch.zeros(4)}
    save(LocalStorage(tmp_path), DcpFormat(), [shard_of(state)])
    found = {"a.b": torch.zeros(3), "a.b~2": torch.ones(4)}
    dcp.load(found, checkpoint_id=tmp_path / "step=7")
    assert found["a.b"].tolist() == [1, 1, 1]
    assert found["a.b~2"].tolist() == [0, 0, 0, 0]


def test_a_structure_that_changes_and_changes_back_is_stored_each_time(tmp_path: Path) -> None:
    def build(step: int) -> dict[str, Any]:
        state: dict[str, Any] = {"w": torch.full((3,), float(step)), "step": step}
        return {**state, "w": state["w"].repeat(5), "v": torch.tensor(step)} if step in (2, 3) else state

    storage = LocalStorage(tmp_path / "ckpt")
    with RankArena(tmp_path / "job", rank=0) as arena, Capturer(arena) as capturer:
        for step in range(1, 6):
            capture = capturer.begin(build(step), step)
            assert capture is not None
            assert capturer.fence(SOON)
            assert capture.wait(SOON)
            with open_captured(tmp_path / "job", 0) as captured:
                save(storage, DcpFormat(values=FlattenedValues()), [captured.shard])
    shards = [read_shard(CheckpointReader(storage, step), 0) for step in range(1, 6)]
    for step, shard in enumerate(shards, start=1):
        assert_same(materialize(shard), build(step))
    prints = [shard.layout.fingerprint for shard in shards]
    assert prints[0] == prints[3] == prints[4]
    assert prints[1] == prints[2] != prints[0]


class SparseStorage(LocalStorage):
    """Leaves a hole wherever zeros are written, so that many gigabytes of them cost nothing."""

    def create(self, name: str, size_bytes: int = 0) -> WritableFile:
        return _SparseWriter(super().create(name))


class _SparseWriter:
    def __init__(self, inner: WritableFile) -> None:
        self._inner = inner
        self.sync, self.close = inner.sync, inner.close

    def write_at(self, offset: int, *parts: Buffer) -> None:
        for part in map(memoryview, parts):
            words = torch.int64 if part.nbytes % 8 == 0 else torch.uint8
            if part.nbytes and torch.frombuffer(part, dtype=words).any():
                self._inner.write_at(offset, part)
            offset += part.nbytes


def untouched(size: int) -> mmap.mmap:
    """Zeros of which no page exists until it is written."""
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def engine_save(state: dict[str, torch.Tensor], storage: Storage, root: Path) -> None:
    snapshot = StateWalker().snapshot(state)
    large, after = snapshot.layout.entries
    memory = memoryview(untouched(snapshot.layout.size_bytes))
    memory[large.end_bytes - 1] = 7
    memory[after.offset_bytes : after.end_bytes] = bytes(memory_of(state["z"]))
    shard = Shard(layout=snapshot.layout, values=b"[]", step=1, rank=0, world_size=1, buffer=memory)
    save(storage, DcpFormat(), [shard])


def torch_save(state: dict[str, torch.Tensor], storage: Storage, root: Path) -> None:
    state["large"][-1] = 7
    dcp.save(state, storage_writer=DcpStorageWriter(root / "step=1", open_storage=lambda root: storage))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
@pytest.mark.parametrize(
    "write", [engine_save, pytest.param(torch_save, marks=pytest.mark.thorough("the engine's is near"))]
)
def test_what_lies_beyond_four_gibibytes_is_written_and_read_at_its_place(
    tmp_path: Path, write: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dcp_files, "FILE_BYTES", 1 << 40)  # one file, with the small tensor at its end
    size = (4 << 30) + (9 << 20) + 5
    write(
        {"large": torch.frombuffer(untouched(size), dtype=torch.uint8), "z": torch.arange(5.0)},
        SparseStorage(tmp_path),
        tmp_path,
    )
    reader = CheckpointReader(LocalStorage(tmp_path), 1)
    index = reader.index(0)
    placed = {record.key: record for record in index.tensors}
    assert placed["z"].position > 1 << 32
    assert content_of(tmp_path, 1, index, placed["large"])[-3:].tolist() == [0, 0, 7]
    assert content_of(tmp_path, 1, index, placed["z"]).tolist() == [0, 1, 2, 3, 4]
    for ours in (None, DcpStorageReader(tmp_path / "step=1")):
        found = {"z": torch.zeros(5)}
        dcp.load(found, checkpoint_id=tmp_path / "step=1", storage_reader=ours)
        assert found["z"].tolist() == [0, 1, 2, 3, 4]
    if write is engine_save:
        assert reader.open_shard(0).layout.entries[1].offset_bytes > 1 << 32
