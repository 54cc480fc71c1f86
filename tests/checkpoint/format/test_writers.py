# SPDX-License-Identifier: Apache-2.0
"""Manifests say who wrote what several ranks hold; heads of indexes and glances answer most questions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from resiliency.checkpoint.commit.commit import CheckpointFormat
from resiliency.checkpoint.format.catalog import Condition, glance, inspect
from resiliency.checkpoint.format.dcp import DcpFormat
from resiliency.checkpoint.format.index_tables import IndexTable
from resiliency.checkpoint.format.local import LocalFormat
from resiliency.checkpoint.format.manifest import (
    HEAD_BYTES,
    MANIFEST,
    RankIndex,
    index_name,
    parse_index,
    read_index,
    read_manifest,
    try_read_index,
    write_index,
)
from resiliency.checkpoint.format.reader import CheckpointReader
from resiliency.checkpoint.format.writers import MOST_WRITERS, find_writers, writers_among
from resiliency.checkpoint.recovery.inventory import find_save
from resiliency.checkpoint.state.layout import Shard
from resiliency.checkpoint.state.rank_sets import ranks_of
from resiliency.checkpoint.storage.checksums import DEFAULT_ALGORITHM, digest_function
from resiliency.checkpoint.storage.interface import Storage, read_file, write_file
from resiliency.checkpoint.storage.posix import LocalStorage
from resiliency.errors import CheckpointCorrupt, CheckpointIncomplete, ConfigError
from resiliency.plugins.checkpoint_kinds import verify
from resiliency.testing.counting_storage import CountingStorage
from resiliency.testing.storage import MemoryStorage
from tests.checkpoint.storage_builders import Part, assert_holds, folder_of, make_shard, save, small_shard

#: A tensor for each writer, and some more.
WEIGHTS = {f"layer.{number}": torch.full((8,), float(number)) for number in range(MOST_WRITERS + 6)}


def replicated(world_size: int) -> list[Shard]:
    return [make_shard(WEIGHTS, rank=rank, world_size=world_size) for rank in range(world_size)]


def hybrid(replicas: int, *, owner: int = 0) -> list[Shard]:
    """Two halves of a tensor, each on every second rank; one replica owns its halves."""
    halves = torch.arange(8.0).split(4)
    world_size = 2 * replicas
    return [
        make_shard(
            {"w": Part(halves[rank % 2], (8,), (4 * (rank % 2),), replica_id=int(rank // 2 != owner))},
            rank=rank,
            world_size=world_size,
        )
        for rank in range(world_size)
    ]


def opened_by_a_reader(storage: MemoryStorage, rank: int) -> int:
    """How many files `rank` opens to find all it had, before it reads tensors."""
    counting = CountingStorage(storage)
    CheckpointReader(counting, 1).open_shard(rank)
    return counting.counts.operations["open"]


def test_a_rank_opens_as_many_files_of_a_replicated_job_of_any_size() -> None:
    opened = {}
    for world_size in (2 * MOST_WRITERS, 4 * MOST_WRITERS):
        storage = MemoryStorage()
        shards = replicated(world_size)
        save(storage, DcpFormat(spread_unsharded=True), shards)
        for rank in (0, 1, world_size - 1):
            assert_holds(storage, shards[rank])
        opened[world_size] = [opened_by_a_reader(storage, rank) for rank in (0, 1, world_size - 1)]
        writers = [index.rank for index in CheckpointReader(storage, 1).indexes() if index.tensors]
        assert writers == writers_among(world_size)
        assert len(writers) == MOST_WRITERS
    first, second = opened.values()
    assert first == second


def test_a_replica_opens_its_own_index_and_its_writers() -> None:
    storage = MemoryStorage()
    shards = hybrid(20, owner=7)
    save(storage, DcpFormat(), shards)
    for shard in shards:
        assert_holds(storage, shard)
    counting = CountingStorage(storage)
    CheckpointReader(counting, 1).open_shard(38)
    indexes = {name.rpartition("/")[2] for name in counting.counts.opened if name.endswith(".json")}
    assert indexes == {MANIFEST, "rank=38.json", "rank=14.json"}
    by_table = read_manifest(storage, "step=1").written_by
    assert by_table is not None
    assert sorted(map(ranks_of, by_table.values())) == [[14], [15]]


def test_a_manifest_names_writers_by_sets_of_entries_not_by_entry() -> None:
    sizes = []
    for count in (1, 50):
        storage = MemoryStorage()
        parts = {f"w{number}": torch.ones(4) for number in range(count)}
        save(
            storage,
            DcpFormat(spread_unsharded=True),
            [make_shard(parts, rank=r, world_size=4) for r in range(4)],
        )
        sizes.append(len(read_file(storage, f"step=1/{MANIFEST}")))
    assert abs(sizes[1] - sizes[0]) < 200


def test_an_entry_that_no_rank_wrote_is_no_commit() -> None:
    storage = MemoryStorage()
    shards = hybrid(3, owner=9)  # nobody
    whole = make_shard({"x": torch.ones(2)}, rank=6, world_size=7)
    shards = [replace(shard, world_size=7) for shard in shards]
    with pytest.raises(
        CheckpointIncomplete, match=r"w at \[0\]: rank 0 holds a float32 copy \[4\] of it, and no rank"
    ):
        save(storage, DcpFormat(), [*shards, whole])
    assert glance(storage, 1).condition is Condition.UNFINISHED


def test_a_copy_of_another_shape_is_not_taken_for_what_was_written() -> None:
    first = make_shard({"w": torch.ones(4), "v": torch.ones(2)}, rank=0, world_size=2)
    other = make_shard({"w": Part(torch.ones(5), replica_id=1)}, rank=1, world_size=2)
    with pytest.raises(CheckpointIncomplete, match=r"w at \[0\]: rank 1 holds a float32 copy \[5\] of it"):
        save(MemoryStorage(), DcpFormat(), [first, other])


def test_the_proof_is_made_again_when_a_rank_writes_less_than_before() -> None:
    dcp = DcpFormat()
    both = {"w": torch.ones(4), "v": torch.ones(2)}
    copy = make_shard({"w": Part(torch.ones(4), replica_id=1)}, rank=1, world_size=2)
    for _ in range(2):
        save(MemoryStorage(), dcp, [make_shard(both, world_size=2), copy])
    with pytest.raises(CheckpointIncomplete, match=r"w at \[0\]: rank 1 holds .* and no rank wrote it"):
        save(MemoryStorage(), dcp, [make_shard({"v": both["v"]}, world_size=2), copy])


def unread(table: Sequence[object]) -> IndexTable[object]:
    """A table as of another rank, which must not be looked into."""

    def load() -> bytes:
        raise AssertionError("the table was read")

    assert isinstance(table, IndexTable)
    return IndexTable(len(table), table.digest, load, lambda item: item, "here")


def test_a_later_save_of_the_same_tensors_looks_into_no_table_of_another_rank() -> None:
    storage, dcp = MemoryStorage(), DcpFormat()
    save(storage, dcp, hybrid(3))
    indexes = CheckpointReader(storage, 1).indexes()
    # What rank 0 votes with is of its own making; of all others it has what it read.
    later = [replace(index, shared=unread(index.shared) if index.shared else ()) for index in indexes]
    later = [replace(index, tensors=unread(index.tensors) if index.tensors else ()) for index in later]
    assert [file.name for file in dcp.seal(storage, "step=1", later)] == [".metadata"]
    assert find_writers(later) == read_manifest(storage, "step=1").written_by
    with pytest.raises(AssertionError, match="the table was read"):
        find_writers(later[:-1])


# --- version 1 ------------------------------------------------------------------------------------


def as_version_1(storage: MemoryStorage, step: int) -> None:
    """Rewrite indexes and manifest as the release before wrote them."""
    directory = f"step={step}"
    manifest = read_manifest(storage, directory)
    digests = {}
    for rank in manifest.ranks:
        index = read_index(storage, f"{directory}/{manifest.folder}", rank)[0]
        for file in index.files:
            storage.replace(f"{directory}/{file.name}", f"{directory}/{file.name.rpartition('/')[2]}")
        files = tuple(replace(file, name=file.name.rpartition("/")[2]) for file in index.files)
        fields = asdict(replace(index, files=files, tensors=tuple(index.tensors), shared=()))
        for name in ("shared", "try_number", "folder", "shown"):
            del fields[name]
        digests[rank] = write_sealed(storage, index_name(directory, rank), fields)
    storage.remove_tree(f"{directory}/{manifest.folder}")
    old = {**asdict(manifest), "ranks": digests, "format_version": 1}
    for name in ("size_bytes", "written_by", "folder"):
        del old[name]
    write_sealed(storage, f"{directory}/{MANIFEST}", old)


def write_sealed(storage: MemoryStorage, name: str, fields: Mapping[str, object]) -> str:
    body = json.dumps(fields, separators=(",", ":"))
    digest = digest_function(DEFAULT_ALGORITHM)(body.encode())
    head = f'{{"algorithm":"{DEFAULT_ALGORITHM}","digest":"{digest}","body":'
    write_file(storage, name, f"{head}\n{body}\n}}\n".encode())
    return digest


@pytest.mark.parametrize("shards", [replicated(5), hybrid(3, owner=1)], ids=["replicated", "hybrid"])
def test_checkpoints_of_format_version_1_are_still_read(shards: Sequence[Shard]) -> None:
    storage = MemoryStorage()
    save(storage, DcpFormat(spread_unsharded=len(shards) == 5), shards)
    as_version_1(storage, 1)
    for shard in shards:
        assert_holds(storage, shard)
    assert inspect(storage, 1).condition is Condition.COMPLETE
    found = glance(storage, 1)
    assert (found.condition, found.size_bytes) == (Condition.COMPLETE, 0)
    assert CheckpointReader(storage, 1).verify() > 0


# --- indexes --------------------------------------------------------------------------------------


def long_index() -> RankIndex:
    """The index of a rank with thousands of tensors."""
    storage = MemoryStorage()
    save(storage, LocalFormat(), [small_shard(1)])
    index = read_index(storage, folder_of(storage, 1), 0)[0]
    rows = [replace(index.tensors[0], key=f"layer.{number}.weight") for number in range(2000)]
    return replace(index, tensors=tuple(rows))


def test_the_head_of_a_long_index_is_read_without_its_tables() -> None:
    storage = CountingStorage(MemoryStorage())
    storage.make_dir("step=1")
    index = long_index()
    digest = write_index(storage, "step=1", index)
    storage.restart_count()
    found, _ = read_index(storage, "step=1", 0, digest)
    assert (found.files, found.blobs, len(found.tensors)) == (index.files, index.blobs, 2000)
    assert storage.counts.read_bytes == HEAD_BYTES
    assert storage.counts.operations["open"] == 1
    assert found == index  # which reads the rest
    assert storage.counts.operations["open"] == 2
    assert parse_index(read_file(storage, "step=1/rank=0.json"), "here", digest) == (index, digest)


def test_a_short_index_is_read_by_one_open() -> None:
    storage = CountingStorage(MemoryStorage())
    save(storage, LocalFormat(), [small_shard(1)])
    place = folder_of(storage, 1)
    storage.restart_count()
    assert len(list(read_index(storage, place, 0)[0].tensors)) == 4
    assert storage.counts.operations == {"open": 1, "read": 1}


@pytest.mark.parametrize("cut", [1, 5000, HEAD_BYTES + 5000])
def test_a_torn_index_is_no_vote_and_found_by_whoever_reads_it(cut: int) -> None:
    storage = MemoryStorage()
    storage.make_dir("step=1")
    digest = write_index(storage, "step=1", long_index())
    content = read_file(storage, "step=1/rank=0.json")
    for torn in (content[:-cut], content[:-cut] + bytes(cut)):
        write_file(storage, "step=1/rank=0.json", torn)
        if len(torn) < len(content):
            assert try_read_index(storage, "step=1", 0) is None
        with pytest.raises(CheckpointCorrupt, match=r"rank=0\.json"):
            list(read_index(storage, "step=1", 0, digest)[0].tensors)
        with pytest.raises(CheckpointCorrupt):
            parse_index(torn, "here", digest)


def spoil_table(storage: Storage, name: str) -> None:
    """Change a byte behind the head of a long index."""
    content = bytearray(read_file(storage, name))
    assert len(content) > HEAD_BYTES + 5000
    content[-5000] ^= 1
    write_file(storage, name, content)


@pytest.mark.parametrize("format", [DcpFormat(), LocalFormat()], ids=["dcp", "local"])
def test_whoever_verifies_a_checkpoint_finds_a_bad_byte_in_a_table_of_an_index(
    tmp_path: Path, format: CheckpointFormat[Shard]
) -> None:
    storage = LocalStorage(tmp_path)
    parts = {f"layers/{number}/attention/weight": torch.zeros(1) for number in range(600)}
    save(storage, format, [make_shard(parts)])
    reader = CheckpointReader(storage, 1)
    assert reader.verify() > 0
    assert verify(tmp_path / "step=1") is None
    name = f"{folder_of(storage, 1)}/rank=0.json"
    spoil_table(storage, name)
    assert CheckpointReader(storage, 1).index(0).files  # its head is good
    for check in (CheckpointReader.verify, lambda reader: reader.verify_named(name)):
        with pytest.raises(CheckpointCorrupt, match=r"rank=0\.json was changed or cut: a table"):
            check(CheckpointReader(storage, 1))
    assert "rank=0.json was changed or cut: a table" in (verify(tmp_path / "step=1") or "")


@pytest.mark.slow
def test_every_bad_byte_of_an_index_is_found() -> None:
    storage = MemoryStorage()
    save(storage, DcpFormat(spread_unsharded=True), [small_shard(1, rank=r, world_size=2) for r in range(2)])
    content = read_file(storage, f"{folder_of(storage, 1)}/rank=1.json")
    for position in range(len(content)):
        bad = bytearray(content)
        bad[position] ^= 4
        # ConfigError: it names a checksum that this installation does not know.
        with pytest.raises((CheckpointCorrupt, ConfigError)):
            parse_index(bytes(bad), "here")


def test_a_table_that_goes_between_head_and_rows_is_told_as_what_it_is() -> None:
    storage = MemoryStorage()
    storage.make_dir("step=1")
    write_index(storage, "step=1", long_index())
    index, _ = read_index(storage, "step=1", 0)
    storage.remove("step=1/rank=0.json")
    with pytest.raises(CheckpointIncomplete, match=r"the index memory:/step=1/rank=0.json is gone"):
        list(index.tensors)


# --- a glance -------------------------------------------------------------------------------------


def test_a_glance_costs_the_same_for_any_number_of_ranks() -> None:
    found = []
    for world_size in (2, 40):
        storage = CountingStorage(MemoryStorage())
        shards = [small_shard(1, rank=rank, world_size=world_size) for rank in range(world_size)]
        save(storage, DcpFormat(), shards)
        size = sum(storage.open(file.name).size_bytes for file in CheckpointReader(storage, 1).files())
        storage.restart_count()
        assert glance(storage, 1).size_bytes == size
        found.append(storage.restart_count().total)
        save_found = find_save(storage, 1)  # what one rank does while all others wait
        assert save_found is not None
        assert (save_found.world_size, save_found.size_bytes) == (world_size, size)
        assert storage.restart_count().total == found[-1]
    assert found == [3, 3]  # is it marked; open and read the manifest


def test_a_glance_tells_marked_stock_and_damaged_checkpoints_as_a_whole_inspection_does() -> None:
    storage = MemoryStorage()
    for step in (1, 2, 3):
        save(storage, DcpFormat(), [small_shard(step)])
    write_file(storage, "step=1/manifest.json", b"junk")
    write_file(storage, "step=2-unfinished", b"")
    storage.make_dir("step=4")
    write_file(storage, "step=4/.metadata", b"of torch")
    for step in (1, 2, 3, 4):
        assert glance(storage, step) == inspect(storage, step)
