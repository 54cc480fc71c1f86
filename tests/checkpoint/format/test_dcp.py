# SPDX-License-Identifier: Apache-2.0
"""What this library saves, stock torch loads, and the other way round; at any world size."""

from __future__ import annotations

import io
import os
import pickle
import sys
import zipfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem

from resiliency.checkpoint.format import _compat
from resiliency.checkpoint.format.dcp import METADATA, DcpFormat, dcp_metadata
from resiliency.checkpoint.format.reader import CheckpointReader
from resiliency.checkpoint.format.torch_record import envelope, memory_of
from resiliency.checkpoint.state.layout import Shard
from resiliency.checkpoint.storage.interface import read_file
from resiliency.checkpoint.storage.posix import LocalStorage
from resiliency.checkpoint.torch_dcp.reader import DcpStorageReader
from resiliency.errors import CheckpointIncomplete, LayoutMismatch
from resiliency.testing.processes import Command
from resiliency.testing.storage import FaultyStorage, MemoryStorage
from tests.checkpoint.storage_builders import (
    Part,
    Tie,
    assert_holds,
    folder_of,
    make_shard,
    read_shard,
    save,
    small_shard,
)
from tests.checkpoint.tensor_builders import DTYPES, SHAPES, random_tensor, same_bits, sharded

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_envelope_makes_raw_bytes_a_tensor_for_torch_load(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensor = random_tensor(dtype, shape)
    around = envelope(dtype, shape, position=100, alignment=4096, residue=64)
    assert (100 + len(around.head)) % 4096 == 64
    record = around.head + bytes(memory_of(tensor)) + around.tail
    assert same_bits(torch.load(io.BytesIO(record), weights_only=True), tensor)
    with zipfile.ZipFile(io.BytesIO(record)) as archive:
        assert archive.read("archive/version") == b"3\n"
        assert archive.getinfo("archive/data/0").file_size == tensor.nbytes


@pytest.mark.slow
def test_a_tensor_beyond_4_gib_gets_an_envelope_that_torch_reads(tmp_path: Path) -> None:
    shape = ((4 << 30) + 5,)
    around = envelope(torch.uint8, shape, position=0)
    path = tmp_path / "sparse"
    with path.open("wb") as file:  # a hole reads as zeros and takes no space
        file.write(around.head)
        file.seek(shape[0] - 1, os.SEEK_CUR)
        file.write(b"\x07")
        file.write(around.tail)
    loaded = torch.load(path, weights_only=True, mmap=True)
    assert loaded.shape == shape
    assert loaded[-1] == 7


def test_the_private_names_of_torch_are_where_we_take_them_from(tmp_path: Path) -> None:
    dcp.save({"t": torch.ones(2), "v": 1}, checkpoint_id=tmp_path, no_dist=True)
    metadata = pickle.loads((tmp_path / METADATA).read_bytes())  # noqa: S301
    assert metadata.version == _compat.DCP_VERSION
    assert {type(info) for info in metadata.storage_data.values()} == {_compat.StorageInfo}
    assert _compat.StorageInfo is filesystem._StorageInfo


def all_dtypes_shard(step: int = 1) -> tuple[Shard, dict[str, torch.Tensor]]:
    state = {
        f"{str(dtype).removeprefix('torch.')}-{number}": random_tensor(dtype, shape, number)
        for dtype in DTYPES
        for number, shape in enumerate(SHAPES)
    }
    state["large"] = random_tensor(torch.float32, (3 << 20,))
    return make_shard(state, step=step), state


def test_stock_dcp_reads_every_dtype_and_shape_bit_for_bit(tmp_path: Path) -> None:
    shard, state = all_dtypes_shard()
    save(LocalStorage(tmp_path), DcpFormat(), [shard])
    loaded = {key: random_tensor(tensor.dtype, tuple(tensor.shape), 99) for key, tensor in state.items()}
    dcp.load(loaded, checkpoint_id=tmp_path / "step=1", no_dist=True)
    for key, tensor in state.items():
        assert same_bits(loaded[key], tensor), key
    assert_holds(LocalStorage(tmp_path), shard)


def test_a_large_tensor_lies_at_the_same_place_within_a_page_as_in_the_slot(tmp_path: Path) -> None:
    shard, _ = all_dtypes_shard()
    save(LocalStorage(tmp_path), DcpFormat(), [shard])
    index = CheckpointReader(LocalStorage(tmp_path), 1).index(0)
    record = next(record for record in index.tensors if record.key == "large")
    assert (record.position - shard.layout.by_key["large"].offset_bytes) % 4096 == 0


def test_nested_states_and_plain_leaves_load_under_stock_names(tmp_path: Path) -> None:
    weight, moment = torch.randn(3, 4), torch.randn(3, 4)
    shard = make_shard({"model/weight": weight, "optim/state/0/moment": moment})
    values = [(("optim", "lr"), 0.25), (("optim", "betas"), (0.9, 0.99)), (("name",), "tiny")]
    save(LocalStorage(tmp_path), DcpFormat(values=lambda shard: values), [shard])
    state = {
        "model": {"weight": torch.zeros(3, 4)},
        "optim": {"state": {"0": {"moment": torch.zeros(3, 4)}}, "lr": 0.0, "betas": None},
        "name": "",
    }
    dcp.load(state, checkpoint_id=tmp_path / "step=1", no_dist=True)
    assert torch.equal(state["model"]["weight"], weight)
    assert torch.equal(state["optim"]["state"]["0"]["moment"], moment)
    assert (state["optim"]["lr"], state["optim"]["betas"], state["name"]) == (0.25, (0.9, 0.99), "tiny")


def test_the_whole_state_can_be_rebuilt_by_torch_without_a_template(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    weight = torch.randn(3, 4)
    save(LocalStorage(tmp_path), DcpFormat(), [make_shard({"model/weight": weight})])
    dcp_to_torch_save(tmp_path / "step=1", tmp_path / "out.pt")
    assert torch.equal(torch.load(tmp_path / "out.pt")["model"]["weight"], weight)


def test_tied_and_sliced_tensors_load_under_every_name_and_tied_bytes_are_stored_once(
    tmp_path: Path,
) -> None:
    table = torch.randn(600, 700)
    memory = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    shard = make_shard(
        {
            "embed": table,
            "head": Tie("embed", table),
            "base": Part(memory, is_base=True),
            "rows": Tie("base", memory[1:3], offset_bytes=24),
            "turned": Tie("base", memory.t()),
            "spread": Tie("base", memory[0, 0].expand(5)),
        }
    )
    save(LocalStorage(tmp_path), DcpFormat(), [shard])
    loaded = {
        "embed": torch.zeros(600, 700),
        "head": torch.zeros(600, 700),
        "rows": torch.zeros(2, 6),
        "turned": torch.zeros(6, 4),
        "spread": torch.ones(5),
    }
    dcp.load(loaded, checkpoint_id=tmp_path / "step=1", no_dist=True)
    assert torch.equal(loaded["embed"], table)
    assert torch.equal(loaded["head"], table)
    assert torch.equal(loaded["rows"], memory[1:3])
    assert torch.equal(loaded["turned"], memory.t())
    assert torch.equal(loaded["spread"], torch.zeros(5))
    assert (tmp_path / folder_of(tmp_path, 1) / "__0_0.distcp").stat().st_size < 1.1 * table.nbytes
    assert_holds(LocalStorage(tmp_path), shard)


# --- world sizes --------------------------------------------------------------------------------


def test_replicas_are_written_once_and_every_rank_gets_its_slot_back(tmp_path: Path) -> None:
    shards, _ = sharded(3)
    save(LocalStorage(tmp_path), DcpFormat(), shards)
    sizes = [(tmp_path / folder_of(tmp_path, 1) / f"__{rank}_0.distcp").stat().st_size for rank in range(3)]
    assert sizes[0] > 1_200_000
    assert max(sizes[1:]) < 20_000
    for shard in shards:
        assert_holds(LocalStorage(tmp_path), shard)


def test_a_rank_reads_only_the_indexes_that_it_needs() -> None:
    disk = MemoryStorage()
    save(disk, DcpFormat(), [make_shard({"w": torch.ones(9)}, rank=rank, world_size=4) for rank in range(4)])
    storage = FaultyStorage(disk, count_reads=True)
    read_shard(CheckpointReader(storage, 1), 2)
    assert {name.rpartition("/")[2] for name in storage.operations} == {
        "manifest.json",
        "rank=2.json",
        "__2_0.distcp",
    }


def test_data_parallel_ranks_share_the_writing_when_told_that_they_are_alike(tmp_path: Path) -> None:
    state = {f"layer{n}": random_tensor(torch.float32, (100, 1000), n) for n in range(4)}
    shards = [make_shard(state, rank=rank, world_size=2) for rank in range(2)]
    save(LocalStorage(tmp_path), DcpFormat(spread_unsharded=True), shards)
    sizes = [(tmp_path / folder_of(tmp_path, 1) / f"__{rank}_0.distcp").stat().st_size for rank in range(2)]
    assert max(sizes) < 820_000
    for shard in shards:
        assert_holds(LocalStorage(tmp_path), shard)


def test_parts_that_do_not_make_a_whole_are_never_committed() -> None:
    shards, _ = sharded(3)
    storage = MemoryStorage()
    with pytest.raises(CheckpointIncomplete, match="rows: the ranks wrote 54 of 78 elements"):
        save(storage, DcpFormat(), shards[::2], ranks=[0, 2])
    assert storage.exists("step=1-unfinished")


def test_ranks_that_disagree_about_a_tensor_are_refused() -> None:
    def half(rank: int, offset: int, rows: int) -> Shard:
        part = Part(torch.zeros(2), global_shape=(rows,), offset=(offset,))
        return make_shard({"w": part}, rank=rank, world_size=2)

    with pytest.raises(LayoutMismatch, match="w: rank 1 has"):
        save(MemoryStorage(), DcpFormat(), [half(0, 0, 4), half(1, 2, 5)])
    with pytest.raises(LayoutMismatch, match=r"w: the ranks wrote 4 elements of \[3\]: parts of it overlap"):
        save(MemoryStorage(), DcpFormat(), [half(0, 0, 3), half(1, 1, 3)])


def test_tensors_of_one_name_that_differ_between_ranks_are_all_there_for_stock_torch(tmp_path: Path) -> None:
    states = [{"w": torch.arange(size) + 1.0, "same": torch.ones(2)} for size in (3, 4, 3)]
    shards = [make_shard(state, rank=rank, world_size=3) for rank, state in enumerate(states)]
    save(LocalStorage(tmp_path), DcpFormat(), shards)
    found = {"@rank0": {"w": torch.zeros(3)}, "@rank1": {"w": torch.zeros(4)}}
    dcp.load({**found, "same": torch.zeros(2)}, checkpoint_id=tmp_path / "step=1", no_dist=True)
    assert torch.equal(found["@rank0"]["w"], states[0]["w"])
    assert torch.equal(found["@rank1"]["w"], states[1]["w"])
    for shard in shards:
        assert_holds(LocalStorage(tmp_path), shard)


def names_of(states: Sequence[dict[str, torch.Tensor]]) -> set[str]:
    """What stock readers find of ranks that hold `states`."""
    storage = MemoryStorage()
    shards = [make_shard(state, rank=rank, world_size=len(states)) for rank, state in enumerate(states)]
    save(storage, DcpFormat(), shards)
    found = CheckpointReader(storage, 1)
    assert found.keys().keys() == dcp_metadata(found.indexes()).state_dict_metadata.keys()
    return set(found.keys())


WEIGHT = torch.ones(4, 4)
STATE = {"optimizer/state/0/exp_avg": WEIGHT, "optimizer/state/0/step": torch.ones(())}


def test_stages_without_a_mesh_whose_optimizers_number_alike_are_told_apart() -> None:
    shared = {"model/embedding": torch.ones(7, 4), "seed": torch.ones(3)}
    stages = [{f"model/layer{rank // 2}": WEIGHT, **STATE, **shared} for rank in range(4)]
    own = {f"@rank{rank}.optimizer.state.0.{what}" for rank in (0, 2) for what in ("exp_avg", "step")}
    assert own < names_of(stages)
    assert not {"optimizer.state.0.exp_avg", "optimizer.state.0.step"} & names_of(stages)
    # A block that all stages share is one parameter; the optimizer has two of that shape.
    second = {"optimizer/state/1/exp_avg": WEIGHT}
    blocks = [{f"model/layer{rank}": WEIGHT, "model/shared": WEIGHT, **STATE, **second} for rank in range(2)]
    assert {"@rank0.optimizer.state.1.exp_avg", "@rank1.optimizer.state.1.exp_avg"} < names_of(blocks)
    longer = [{"layer0": WEIGHT, **STATE}, {"layer0": WEIGHT, **STATE, **second, "layer1": WEIGHT}]
    assert {"@rank0.optimizer.state.0.exp_avg", "@rank1.optimizer.state.0.exp_avg"} < names_of(longer)


def test_names_that_meet_only_with_dots_are_told_apart_and_none_is_taken_for_a_made_one() -> None:
    def shard(rank: int, *paths: tuple[str, ...]) -> Shard:
        made = make_shard({"/".join(path): torch.ones(2) for path in paths}, rank=rank, world_size=2)
        assert [entry.path for entry in made.layout.entries] == list(paths)
        return made

    storage = MemoryStorage()
    save(storage, DcpFormat(), [shard(0, ("a", "b"), ("c",)), shard(1, ("a.b",), ("c",))])
    assert set(CheckpointReader(storage, 1).keys()) == {"@rank0.a.b", "@rank1.a.b", "c"}
    with pytest.raises(LayoutMismatch, match=r"@rank1\.a\.b is the name of a tensor"):
        save(MemoryStorage(), DcpFormat(), [shard(0, ("a", "b"), ("@rank1.a.b",)), shard(1, ("a.b",))])


def test_data_parallel_ranks_with_entries_of_their_own_keep_the_names() -> None:
    model = {"model/weight": WEIGHT, **STATE}
    plain = {"model.weight", "optimizer.state.0.exp_avg", "optimizer.state.0.step"}
    assert names_of([model, model]) == plain
    assert names_of([{**model, "average/weight": WEIGHT}, model]) == {*plain, "average.weight"}
    loaders = [{**model, f"loader{rank}": torch.ones(2)} for rank in range(3)]
    assert names_of(loaders) == {*plain, "loader0", "loader1", "loader2"}
    assert names_of([{**model, "other/state/0/exp_avg": WEIGHT}, model]) == {*plain, "other.state.0.exp_avg"}


def test_a_part_that_torch_cannot_place_is_kept_for_our_reader_and_said_aloud(
    caplog: pytest.LogCaptureFixture,
) -> None:
    shard = make_shard({"flat": Part(torch.ones(5), global_shape=(4, 3), offset=(0, 0)), "w": torch.ones(2)})
    storage = MemoryStorage()
    save(storage, DcpFormat(), [shard])
    assert "1 tensors are no blocks of their global tensors (first: flat)" in caplog.text
    assert_holds(storage, shard)
    assert set(dcp_metadata(CheckpointReader(storage, 1).indexes()).state_dict_metadata) == {"w"}


def test_metadata_speaks_of_each_part_once() -> None:
    shards, _ = sharded(2)
    storage = MemoryStorage()
    save(storage, DcpFormat(), shards)
    metadata = dcp_metadata(CheckpointReader(storage, 1).indexes())
    assert len(metadata.state_dict_metadata["rows"].chunks) == 2
    assert len(metadata.state_dict_metadata["shared"].chunks) == 1


def run_ranks(world_size: int, *jobs: tuple[str, Path]) -> None:
    """Real gloo ranks of `storing_ranks.py` do the jobs in order; all must end well."""
    argv = [sys.executable, "-m", "tests.checkpoint.storing_ranks"]
    words = [f"{mode}:{root}" for mode, root in jobs]
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(Command([*argv, str(rank), str(world_size), *words]))
            for rank in range(world_size)
        ]
        for rank in ranks:
            assert rank.wait(timeout=90) == 0, rank.output


def test_real_ranks_exchange_checkpoints_between_ours_and_stock_at_other_world_sizes(tmp_path: Path) -> None:
    by_three, by_two, by_stock = (tmp_path / name for name in ("three", "two", "stock"))
    shards, whole = sharded(3)
    save(LocalStorage(by_three), DcpFormat(), shards)
    by_stock.mkdir()
    run_ranks(2, ("load", by_three), ("save-ours", by_two), ("load", by_two), ("save-stock", by_stock))
    run_ranks(1, ("load", by_three), ("load", by_two))
    by_us = {"rows": torch.zeros(13, 6, dtype=torch.bfloat16), "shared": torch.zeros(300, 1000)}
    dcp.load(by_us, storage_reader=DcpStorageReader(by_stock / "step=1"), no_dist=True)
    assert same_bits(by_us["rows"], whole["rows"])
    assert same_bits(by_us["shared"], whole["shared"])


def test_what_a_format_keeps_between_saves_never_mixes_layouts_ranks_or_values() -> None:
    storage = MemoryStorage()
    kept = noting_format()
    halves = [torch.zeros(300, 4), torch.zeros(4, 300), torch.zeros(7).to(torch.bfloat16)]
    blocks = [[half_of(half, rank) for rank in range(2)] for half in halves]
    for step in range(1, 10):
        # Each layout twice in a row, and again later.
        shards = [
            replace(shard, step=step, values=b"v" * step, buffer=memoryview(os.urandom(shard.buffer.nbytes)))
            for shard in blocks[step // 2 % 3]
        ]
        save(storage, kept, shards)
        for shard in shards:
            assert_holds(storage, shard)
        assert_as_by_a_new_format(storage, noting_format(), shards)


def test_who_writes_what_all_ranks_have_is_decided_anew_for_another_number_of_ranks() -> None:
    kept = DcpFormat(spread_unsharded=True)
    first = small_shard(1)
    for step, world_size in ((1, 1), (2, 1), (3, 2), (4, 1)):
        storage = MemoryStorage()
        shards = [
            replace(first, step=step, rank=rank, world_size=world_size, values=bytes(step))
            for rank in range(world_size)
        ]
        save(storage, kept, shards)
        assert_as_by_a_new_format(storage, DcpFormat(spread_unsharded=True), shards)


def noting_format() -> DcpFormat:
    return DcpFormat(values=lambda shard: [(("note",), shard.values)])


def half_of(half: torch.Tensor, rank: int) -> Shard:
    length, *others = half.shape
    part = Part(half, (2 * length, *others), (rank * length, *(0 for _ in others)))
    return make_shard({"w": part}, rank=rank, world_size=2)


def assert_as_by_a_new_format(storage: MemoryStorage, format: DcpFormat, shards: Sequence[Shard]) -> None:
    """`storage` holds the very bytes that `format` writes of `shards`."""
    expected = MemoryStorage()
    save(expected, format, shards)
    for shard in shards:
        folder = folder_of(storage, shard.step)
        own = [f"{folder}/__{shard.rank}_0.distcp", f"{folder}/rank={shard.rank}.json"]
        for name in (f"step={shard.step}/{METADATA}", *own):
            assert read_file(storage, name) == read_file(expected, name), name
