# SPDX-License-Identifier: Apache-2.0
"""What the format for Megatron adds to stock torch's, without Megatron: files, objects, shapes.

The adapter's part is played by two types of this file; `tests/plugins/test_megatron_state.py` has the
real ones, and stock Megatron as the reader.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from resiliency.checkpoint.agent.protocol import Settings, check_settings
from resiliency.checkpoint.format.megatron import COMMON_FILE, FILE, ORIGINAL_SHAPE, MegatronFormat
from resiliency.checkpoint.format.reader import CheckpointReader
from resiliency.checkpoint.state import tensors as leaves
from resiliency.checkpoint.state.fill import plan_restore_tensors
from resiliency.checkpoint.state.layout import Shard
from resiliency.checkpoint.state.snapshot import StateWalker
from resiliency.checkpoint.state.tensors import Placement, ShardedView, register_sharded_type
from resiliency.checkpoint.storage.posix import LocalStorage
from resiliency.errors import ConfigError, InternalError, LayoutMismatch
from tests.checkpoint.storage_builders import read_shard, save

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@dataclass
class FlatPart:
    """Half of the 2 x 3 elements of "matrix", cut after it was flattened."""

    data: torch.Tensor
    rank: int


@dataclass
class Thing:
    """An object, or a file, of one rank."""

    data: object
    placement: Placement


@pytest.fixture(autouse=True)
def _types() -> Iterator[None]:
    """Teach the engine, and let it forget."""
    before = dict(leaves._sharded)
    register_sharded_type(FlatPart, describe_part)
    register_sharded_type(Thing, lambda thing: ShardedView(data=thing.data, placement=thing.placement))
    yield
    leaves._sharded.clear()
    leaves._sharded.update(before)
    leaves._kinds.clear()
    leaves._covering.clear()


def describe_part(part: FlatPart) -> ShardedView:
    placement = Placement(
        global_shape=(1, 1, 6),
        global_offset=(0, 0, 3 * part.rank),
        name="matrix",
        attributes=((ORIGINAL_SHAPE, "[2, 3]"),),
    )
    return ShardedView(data=part.data[None, None], placement=placement)


def record(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def state(rank: int) -> dict[str, object]:
    def place(name: str, replica_id: int = 0, **attributes: str) -> Placement:
        return Placement(
            global_shape=(2,),
            global_offset=(rank,),
            replica_id=replica_id,
            name=name,
            attributes=tuple(attributes.items()),
        )

    return {
        "part": FlatPart(torch.arange(3, dtype=torch.float32) + 3 * rank, rank),
        "own": Thing(record([f"of rank {rank}"]), place(f"random/shard_{rank}_2")),
        "shared": Thing(record(["shared", rank]), place("shared/shard_0_1", rank)),
        "common": Thing(record({"step": 1, "rank": rank}), place(COMMON_FILE, rank, **{FILE: COMMON_FILE})),
    }


def shard(rank: int, of: dict[str, object]) -> Shard:
    snapshot = StateWalker().snapshot(of)
    buffer = bytearray(snapshot.layout.size_bytes)
    for entry, source in zip(snapshot.layout.entries, snapshot.sources, strict=True):
        buffer[entry.offset_bytes : entry.end_bytes] = source.contiguous().numpy().tobytes()
    return Shard(
        layout=snapshot.layout,
        values=snapshot.values,
        step=1,
        rank=rank,
        world_size=2,
        buffer=memoryview(buffer),
    )


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A checkpoint of two ranks."""
    save(LocalStorage(tmp_path), MegatronFormat(), [shard(rank, state(rank)) for rank in range(2)])
    return tmp_path / "step=1"


def test_flattened_parts_are_blocks_of_a_grid_and_their_shape_before_is_told(written: Path) -> None:
    metadata = dcp.FileSystemReader(written).read_metadata()
    assert metadata.mcore_data == {"matrix": {ORIGINAL_SHAPE: (2, 3)}}  # type: ignore[attr-defined]
    loaded = {"matrix": torch.zeros(1, 1, 6)}
    dcp.load(loaded, checkpoint_id=written, no_dist=True)
    assert loaded["matrix"].flatten().tolist() == [0, 1, 2, 3, 4, 5]


def test_objects_of_all_ranks_are_found_by_name_and_of_replicas_the_first(written: Path) -> None:
    loaded = {f"random/shard_{rank}_2": [""] for rank in range(2)} | {"shared/shard_0_1": ["", 9]}
    dcp.load(loaded, checkpoint_id=written, no_dist=True)
    assert loaded == {
        "random/shard_0_2": ["of rank 0"],
        "random/shard_1_2": ["of rank 1"],
        "shared/shard_0_1": ["shared", 0],
    }


def test_the_files_of_megatron_are_there_with_checksums(written: Path) -> None:
    assert json.loads((written / "metadata.json").read_text()) == {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
    assert torch.load(written / COMMON_FILE) == {"step": 1, "rank": 0}
    reader = CheckpointReader(LocalStorage(written.parent), 1)
    names = {Path(record.name).name for record in reader.files()}
    assert names == {".metadata", "metadata.json", COMMON_FILE, "__0_0.distcp", "__1_0.distcp"}
    assert reader.verify() > 0


def test_each_rank_gets_its_own_state_back_and_may_name_only_what_it_has(written: Path) -> None:
    back = read_shard(CheckpointReader(LocalStorage(written.parent), 1), 1)
    target = torch.zeros(1, 1, 3)
    plan_restore_tensors(back, [("part", target)], timeout=timedelta(seconds=60))()
    assert target.flatten().tolist() == [3, 4, 5]
    with pytest.raises(LayoutMismatch, match=r"part: the checkpoint holds shape \(1, 1, 3\)"):
        plan_restore_tensors(back, [("part", torch.zeros(3))])


def test_an_object_that_was_not_packed_is_our_own_error(tmp_path: Path) -> None:
    wrong = state(0) | {"own": Thing(["no bytes"], Placement(global_shape=(), global_offset=(), name="x"))}
    with pytest.raises(InternalError, match="x was captured as list, not as bytes"):
        MegatronFormat().write_rank(LocalStorage(tmp_path), "step=1", shard(0, wrong), run_id="", save_id="")


def test_an_unknown_format_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="format must be one of dcp, megatron, found 'zarr'"):
        check_settings(
            Settings(
                directory="/",
                keep=1,
                replicated=False,
                bytes_per_s=0,
                save_timeout_s=1.0,
                format="zarr",
            )
        )
