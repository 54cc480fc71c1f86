# SPDX-License-Identifier: Apache-2.0
"""What is listed as left of a job's saves, and that all ranks come to the same list."""

from __future__ import annotations

import os
import pickle
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from resiliency.checkpoint.capture.arena import RankArena
from resiliency.checkpoint.format.catalog import quarantine, remove_checkpoint
from resiliency.checkpoint.format.dcp import DcpFormat
from resiliency.checkpoint.format.manifest import HEAD_BYTES
from resiliency.checkpoint.format.marker import Marker, MarkerState, lift_marker, put_marker
from resiliency.checkpoint.locations import Place, ShardLocation, ShardRequest
from resiliency.checkpoint.ranks import RankGroup
from resiliency.checkpoint.recovery.inventory import (
    FoundSave,
    Inventory,
    find_save,
    list_local,
    list_memory,
    open_location,
    quarantine_location,
    take_inventory,
)
from resiliency.checkpoint.storage.posix import LocalStorage
from resiliency.errors import CheckpointCorrupt, CheckpointIncomplete, ConfigError
from resiliency.testing.counting_storage import CountingStorage
from resiliency.testing.rank_pool import RankOutcome, RankPool
from tests.checkpoint.held import (
    arena_of,
    commit_for_all,
    commit_locally,
    content,
    flip,
    keep_in_memory,
    local_of,
    make,
    replicate,
)
from tests.checkpoint.storage_builders import file_in, make_shard, read_shard, save, small_shard

T = TypeVar("T")


def seen(locations: list[ShardLocation]) -> set[tuple[int, int, str, str]]:
    return {(h.step, h.rank, h.place.value, h.source_host) for h in locations}


def test_a_host_lists_its_own_checkpoints_and_its_copies_of_those_of_others(tmp_path: Path) -> None:
    for step in (1, 2):
        commit_locally(tmp_path, "a", [make(step, 0, 3), make(step, 1, 3)])
        commit_locally(tmp_path, "b/x", [replace(make(step, 2, 3), group="odd")])
    replicate(tmp_path, "b/x", 2, to="a")
    found = list_local(local_of(tmp_path, "a"), "a")
    assert seen(found) == {
        *((step, rank, "local", "a") for step in (1, 2) for rank in (0, 1)),
        (2, 2, "replica", "b%2Fx"),
    }
    assert {h.save_id for h in found} == {"session-1", "session-2"}
    assert {(h.host, h.world_size, h.run_id) for h in found} == {("a", 3, "run")}
    assert [h.group for h in found if h.rank == 2] == ["odd"]
    for location in found:
        shard = read_shard(open_location(location), location.rank)
        assert content(shard) == content(make(location.step, location.rank, 3))
        assert location.size_bytes >= shard.layout.size_bytes
    assert list_local(local_of(tmp_path, "nobody"), "nobody") == []


def spoil(step: Path, how: str) -> None:
    if how == "marked":
        quarantine(LocalStorage(step.parent), 1, "it was bad")
    elif how == "never committed":
        (step / "manifest.json").unlink()
    elif how == "manifest torn":
        os.truncate(step / "manifest.json", 50)
    elif how == "renamed":
        step.rename(step.with_name("step=3"))
    elif how == "of another format":
        shutil.rmtree(step)
        shards = [small_shard(1, rank=rank, world_size=2) for rank in (0, 1)]
        save(LocalStorage(step.parent), DcpFormat(), shards)
    elif how == "file gone":
        file_in(step, "rank=1.slot.bin").unlink()
    elif how == "file cut":
        os.truncate(file_in(step, "rank=1.slot.bin"), 10)
    elif how == "index gone":
        file_in(step, "rank=1.json").unlink()
    elif how == "index torn":
        os.truncate(file_in(step, "rank=1.json"), 100)


@pytest.mark.parametrize(
    "how", ["marked", "never committed", "manifest torn", "renamed", "of another format"]
)
def test_a_checkpoint_that_is_not_whole_is_not_listed(tmp_path: Path, how: str) -> None:
    for step in (1, 2):
        commit_locally(tmp_path, "a", [make(step, 0, 2), make(step, 1, 2)])
    spoil(local_of(tmp_path, "a") / "step=1", how)
    assert seen(list_local(local_of(tmp_path, "a"), "a")) == {(2, 0, "local", "a"), (2, 1, "local", "a")}


@pytest.mark.parametrize("how", ["file gone", "file cut", "index gone", "index torn"])
def test_damage_to_one_shard_leaves_the_others_listed(tmp_path: Path, how: str) -> None:
    commit_locally(tmp_path, "a", [make(1, 0, 2), make(1, 1, 2)])
    spoil(local_of(tmp_path, "a") / "step=1", how)
    assert seen(list_local(local_of(tmp_path, "a"), "a")) == {(1, 0, "local", "a")}


def test_a_holding_whose_checkpoint_was_replaced_is_not_opened(tmp_path: Path) -> None:
    commit_locally(tmp_path, "a", [make(1, 0, 1)])
    [location] = list_local(local_of(tmp_path, "a"), "a")
    shutil.rmtree(local_of(tmp_path, "a"))
    commit_locally(tmp_path, "a", [make(1, 0, 1)], attempt_id="later")
    with pytest.raises(CheckpointIncomplete, match="is not the save session-1 any more"):
        open_location(location)


def test_a_shard_is_set_aside_only_if_it_is_bad_on_the_host_that_holds_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    commit_locally(tmp_path, "a", [make(1, 0, 2), make(1, 1, 2)])
    both = list_local(local_of(tmp_path, "a"), "a")
    for location in both:
        quarantine_location(location, "said the new host")
    assert list_local(local_of(tmp_path, "a"), "a") == both
    assert "check that host's memory (ECC).  Its report: said the new host" in caplog.text
    flip(file_in(local_of(tmp_path, "a") / "step=1", "rank=0.slot.bin"))
    for location in both:
        quarantine_location(location, "said the new host")
    assert seen(list_local(local_of(tmp_path, "a"), "a")) == {(1, 1, "local", "a")}


def test_a_shard_whose_long_index_is_bad_behind_its_head_is_set_aside(tmp_path: Path) -> None:
    parts = {f"layers/{number}/attention/weight": torch.zeros(1) for number in range(600)}
    commit_locally(tmp_path, "a", [make_shard(parts)])
    index = file_in(local_of(tmp_path, "a") / "step=1", "rank=0.json")
    assert index.stat().st_size > HEAD_BYTES + 5000
    flip(index, position=-5000)
    [location] = list_local(local_of(tmp_path, "a"), "a")
    quarantine_location(location, "a table is bad")
    assert list_local(local_of(tmp_path, "a"), "a") == []


def test_captures_of_all_ranks_are_listed_with_session_and_group(tmp_path: Path) -> None:
    for step in (1, 2):
        keep_in_memory(tmp_path, "a", replace(make(step, 0, 4), group="left"))
    keep_in_memory(tmp_path, "a", make(2, 3, 4), attempt_id="other")
    with RankArena(arena_of(tmp_path, "a"), rank=3, world_size=4) as arena:
        slot = arena.try_take()
        assert slot is not None
        arena.begin(slot, make(3, 3, 4).layout, b"", 3)  # and never ended
        found = list_memory(arena_of(tmp_path, "a"), "a")
        arena.abandon(slot)
    assert {(h.save_id, h.rank, h.group, h.place) for h in found} == {
        ("session-1", 0, "left", Place.MEMORY),
        ("session-2", 0, "left", Place.MEMORY),
        ("other-2", 3, "", Place.MEMORY),
    }
    assert list_memory(arena_of(tmp_path, "a"), "a", [3]) == [h for h in found if h.rank == 3]


def test_the_name_of_a_group_must_fit_into_a_slot(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at most 128 bytes"):
        RankArena(tmp_path / "arena", rank=0, group="g" * 129)


def test_a_checkpoint_for_all_holds_the_shards_of_all_its_ranks(tmp_path: Path) -> None:
    storage = commit_for_all(tmp_path, [make(5, rank, 3) for rank in range(3)])
    commit_for_all(tmp_path, [make(6, rank, 3) for rank in range(3)])
    quarantine(storage, 6, "it was bad")
    assert find_save(storage, 6) is None
    found = find_save(storage, 5)
    assert found is not None
    assert (found.step, found.save_id, found.world_size, found.run_id) == (5, "session-5", 3, "run")
    assert {(h.rank, h.host, h.place) for h in found.locations()} == {
        (r, "", Place.PERSISTENT) for r in range(3)
    }


def spoil_for_all(step: Path, how: str) -> None:
    if how == "index gone":
        file_in(step, "rank=2.json").unlink()
    else:
        (step / "rank=2.corrupt").write_text("a restore found it bad")


@pytest.mark.parametrize("how", ["index gone", "found bad before"])
def test_a_damaged_checkpoint_of_another_number_of_ranks_stands_in_nobodys_way(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    commit_for_all(tmp_path, [make(4, 0, 1)])
    storage = commit_for_all(tmp_path, [make(5, rank, 3) for rank in range(3)])
    assert [save.step for save in of_shared_storage(tmp_path).saves] == [5]  # refuses a job of one rank
    spoil_for_all(tmp_path / "persistent" / "step=5", how)
    assert [save.step for save in of_shared_storage(tmp_path).saves] == [4]
    assert "step=5: an index is missing, or a shard was found bad before" in caplog.text
    # Ranks that want it find out themselves.
    assert find_save(storage, 5, world_size=3) is not None
    assert find_save(storage, 5) is not None


def test_a_checkpoint_of_another_number_of_ranks_is_found_by_as_few_operations_whatever_that_is(
    tmp_path: Path,
) -> None:
    counts = []
    for ranks in (2, 12):
        storage = CountingStorage(
            commit_for_all(tmp_path / str(ranks), [make(5, rank, ranks) for rank in range(ranks)])
        )
        found = find_save(storage, 5, world_size=ranks + 1)
        assert found is not None
        assert (found.world_size, found.size_bytes > 0) == (ranks, True)
        counts.append(storage.counts.operations)
    assert counts[0] == counts[1]
    assert counts[1].total() <= 7


@dataclass(frozen=True)
class Taken:
    """What a rank's inventory told it."""

    name: str
    needs: tuple[ShardRequest, ...]
    locations: tuple[ShardLocation, ...]
    saves: tuple[FoundSave, ...]
    stored: tuple[int, ...]
    firsts: tuple[int, ...]


def inventory_of(rank: int, root: Path, hosts: list[str], groups: list[str], together: bool) -> Taken:
    def list_here(is_first: bool) -> list[ShardLocation]:
        assert is_first == (hosts.index(hosts[rank]) == rank)
        return list_local(local_of(root, hosts[rank]), hosts[rank]) if is_first else []

    storage = LocalStorage(root / "persistent") if rank == 0 else LocalStorage(root / "not here")
    found = take_inventory(
        RankGroup.of_process_group(),
        host=hosts[rank],
        group=groups[rank],
        interchangeable=together,
        list_here=list_here,
        storage=storage,
    )
    firsts = tuple(map(found.first_on, dict.fromkeys(hosts)))
    return Taken(found.name, found.needs, found.locations, found.saves, found.stored, firsts)


def test_all_ranks_come_to_the_same_inventory(tmp_path: Path, rank_pool: RankPool) -> None:
    commit_for_all(tmp_path, [make(1, rank, 4) for rank in range(4)])
    commit_locally(tmp_path, "a", [make(2, 0, 4), make(2, 2, 4)])
    commit_locally(tmp_path, "b", [make(2, 1, 4)])
    arguments = (tmp_path, ["a", "b", "a"], ["even", "", "even"])
    first, *others = rank_pool.run(inventory_of, 3, *arguments, False, timeout=120.0).values
    assert others == [first, first]
    assert first.needs == tuple(
        ShardRequest(rank=rank, host=host, world_size=3, group=group)
        for rank, (host, group) in enumerate(zip(*arguments[1:], strict=True))
    )
    assert [(save.step, save.world_size) for save in first.saves] == [(1, 4)]
    places = [(h.step, h.rank, h.host, h.world_size) for h in first.locations]
    assert sorted(places) == [
        *((1, rank, "", 4) for rank in range(4)),
        (2, 0, "a", 4),
        (2, 1, "b", 4),
        (2, 2, "a", 4),
    ]
    assert (first.stored, first.firsts) == ((1,), (0, 1))
    [same, *_] = rank_pool.run(inventory_of, 3, *arguments, True, timeout=120.0).values
    assert {(thing.group, thing.world_size) for thing in (*same.needs, *same.locations)} == {
        ("replicated", 3)
    }


class Weighed(RankGroup):
    """The ranks of the process group, and the size of the longest text that any of them gave at once."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size)
        self.longest = 0

    def gather(self, value: T) -> list[T]:
        values = super().gather(value)
        self.longest = max(self.longest, *(len(pickle.dumps(each)) for each in values))
        return values


def listed_by(rank: int, steps: list[list[int]]) -> tuple[int, list[int], list[int], list[int]]:
    """The longest text, and the steps that are known: at first, with step 40, and all."""

    def list_here(is_first: bool) -> list[ShardLocation]:
        return [
            ShardLocation(
                step=step, save_id=f"s-{step}", run_id="run", rank=rank, world_size=2, host=f"host-{rank}",
                place=Place.LOCAL, root=f"/local/{rank}", digest=f"{step:064}",
            )
            for step in steps[rank]
        ]  # fmt: skip

    rank_group = Weighed(rank, 2)
    found = take_inventory(
        rank_group, host=f"host-{rank}", group="", interchangeable=False, list_here=list_here, storage=None
    )
    longest = rank_group.longest

    def known() -> list[int]:
        return sorted({location.step for location in found.locations})

    first = known()
    found.look_at(40)
    then = known()
    assert found.sources()[0].step == 10
    return longest, first, then, known()


def test_a_host_with_hundreds_of_steps_lists_those_that_may_be_restored_and_others_when_they_are_asked_for(
    rank_pool: RankPool,
) -> None:
    # The disk of host 1 was full after step 10: all that came later is on host 0 alone.
    steps = [list(range(1, 501)), list(range(1, 11))]
    first, second = rank_pool.run(listed_by, 2, steps, timeout=120.0).values
    assert first == second
    longest, at_first, then, at_last = first
    assert longest < 8000  # and 70,000 if all were listed at once
    assert at_first == [*range(1, 11), *range(485, 501)]
    assert then == [*range(1, 11), 40, *range(485, 501)]
    assert at_last == steps[0]


def of_shared_storage(root: Path) -> Inventory:
    return take_inventory(
        RankGroup(0, 1),
        host="a",
        group="",
        interchangeable=False,
        list_here=lambda is_first: [],
        storage=LocalStorage(root / "persistent"),
    )


def test_shared_storage_is_looked_into_newest_first_and_only_as_far_as_is_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2, 3, 4):
        storage = commit_for_all(tmp_path, [make(step, 0, 1)])
    for step in (2, 4):
        (tmp_path / "persistent" / f"step={step}" / "manifest.json").unlink()
    inventory = of_shared_storage(tmp_path)
    assert (inventory.stored, [save.step for save in inventory.saves]) == ((4, 3, 2, 1), [3])
    assert ("step=4" in caplog.text, "step=2" in caplog.text) == (True, False)
    assert (inventory.has_newer(2), inventory.has_newer(1), inventory.has_newer(None)) == (False, True, True)
    inventory.look_at(1)
    assert [save.step for save in inventory.saves] == [3, 1]
    inventory.look_further()
    assert "step=2" in caplog.text
    assert not inventory.has_newer(None)
    # What comes or goes after the look is not in it.
    commit_for_all(tmp_path, [make(5, 0, 1)])
    remove_checkpoint(storage, 1)
    assert [source.step for source in inventory.sources()] == [3, 1]
    inventory.bad.update(location for location in inventory.locations if location.step == 3)
    assert [source.step for source in inventory.sources()] == [1]


def test_a_step_that_is_committed_while_a_job_starts_can_be_asked_for(tmp_path: Path) -> None:
    storage = commit_for_all(tmp_path, [make(1, 0, 1)])
    put_marker(storage, 1, Marker(state=MarkerState.WRITING))
    inventory = of_shared_storage(tmp_path)
    assert (inventory.stored, inventory.saves, inventory.sources()) == ((), (), [])
    lift_marker(storage, 1)
    inventory.look_at(1)
    assert [save.step for save in inventory.saves] == [1]


def test_storage_that_cannot_be_listed_fails_all_ranks(tmp_path: Path, rank_pool: RankPool) -> None:
    (tmp_path / "persistent").symlink_to("persistent")  # a loop
    report = rank_pool.run(inventory_of, 2, tmp_path, ["a", "b"], ["", ""], False, timeout=120.0)
    assert report.outcomes == [RankOutcome.ERROR, RankOutcome.ERROR]
    assert CheckpointCorrupt.__name__ in report[0].error
    assert "1 of 2 ranks failed while listing checkpoints; rank 0: cannot read" in report[1].error


def test_a_local_disk_that_cannot_be_listed_only_takes_its_own_shards_away(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    commit_locally(tmp_path, "a", [make(1, 0, 2)])
    replicas = local_of(tmp_path, "a") / "replicas"
    replicas.mkdir()
    (replicas / "b").symlink_to("b")
    assert seen(list_local(local_of(tmp_path, "a"), "a")) == {(1, 0, "local", "a")}
    assert "skipping" in caplog.text
