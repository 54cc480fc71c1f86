# SPDX-License-Identifier: Apache-2.0
"""The commit protocol: a kill after every single operation, hostile storages, absent ranks."""

from __future__ import annotations

import errno
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from resiliency.checkpoint.commit import commit as commit_module
from resiliency.checkpoint.commit import vote_blocks
from resiliency.checkpoint.commit.commit import CheckpointFormat, Committed, open_save
from resiliency.checkpoint.commit.protocol import FINAL, FOLLOWER, LEADER, Event, State, next_state
from resiliency.checkpoint.commit.vote_blocks import block_name, blocks_of
from resiliency.checkpoint.format.catalog import Condition, find_newest, inspect, remove_checkpoint
from resiliency.checkpoint.format.dcp import DcpFormat
from resiliency.checkpoint.format.local import LocalFormat
from resiliency.checkpoint.format.manifest import SAVE_PREFIX, RankIndex, read_index, save_folder
from resiliency.checkpoint.format.marker import Marker, MarkerState, marker_name, put_marker, try_read_marker
from resiliency.checkpoint.state.layout import Shard
from resiliency.checkpoint.storage.interface import ReadableFile, Storage, write_file
from resiliency.checkpoint.storage.posix import LocalStorage
from resiliency.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointIncomplete,
    CheckpointMissing,
    CheckpointWriteFailed,
    InternalError,
)
from resiliency.testing import warm
from resiliency.testing.counting_storage import CountingStorage
from resiliency.testing.storage import (
    CachingStorage,
    FaultyStorage,
    MemoryStorage,
    StorageFault,
    StorageFaultKind,
    StorageKilled,
    StorageTrouble,
    Survival,
    TroubledStorage,
)
from tests.checkpoint.storage_builders import assert_holds, make_shard, no_descriptor_left, save, small_shard
from tests.waiting import wait_until, wait_until_equal

FORMATS: list[CheckpointFormat[Shard]] = [LocalFormat(threads=1), DcpFormat(threads=1)]
formats = pytest.mark.parametrize("format", FORMATS, ids=lambda item: item.name)


def two_ranks(step: int) -> list[Shard]:
    return [small_shard(step, rank=rank, world_size=2) for rank in range(2)]


# --- the table ---------------------------------------------------------------------------------


@pytest.mark.parametrize("table", [LEADER, FOLLOWER], ids=["leader", "follower"])
def test_every_state_of_the_table_leads_to_an_end_and_only_ends_have_no_way_on(table: dict) -> None:
    states = {state for state, _ in table} | set(table.values())
    for state in states:
        assert (state in FINAL) == (not any(at is state for at, _ in table)), state
    reached = set(FINAL)
    while grown := {at for (at, _), to in table.items() if to in reached} - reached:
        reached |= grown
    assert reached >= states


@pytest.mark.parametrize("table", [LEADER, FOLLOWER], ids=["leader", "follower"])
def test_an_error_never_leads_to_a_commit_and_is_foreseen_wherever_work_is_done(table: dict) -> None:
    for state in {state for state, _ in table} - {State.NEW}:
        assert table[state, Event.ERROR] in (State.GIVING_UP, State.FAILED)


def test_the_marker_is_lifted_only_after_the_manifest() -> None:
    path, state = [], State.NEW
    event = Event.LEAD
    while state not in FINAL:
        state = next_state(state, event, leads=True)
        path.append(state)
        event = Event.DONE
    assert path.index(State.COLLECTING) < path.index(State.SEALING) < path.index(State.PUBLISHING)
    assert path[-1] is State.COMMITTED


def test_an_unforeseen_event_is_our_bug() -> None:
    with pytest.raises(InternalError, match="leader in state 'new' saw event 'done'"):
        next_state(State.NEW, Event.DONE, leads=True)


# --- votes of many ranks -----------------------------------------------------------------------


def save_by_processes(storage: Storage, leading: Storage, ranks: int) -> list[Committed]:
    """Each rank is a process of its own."""
    shards = [small_shard(1, rank=rank, world_size=ranks) for rank in range(ranks)]
    with ThreadPoolExecutor(ranks) as threads:
        return list(
            threads.map(
                lambda shard: save(
                    storage if shard.rank else leading, LocalFormat(), [shard], leads=not shard.rank
                ),
                shards,
            )
        )


@pytest.mark.parametrize("ranks", [1, 64, 65, 128, 1000, 10_000])
def test_blocks_are_of_all_ranks_and_there_are_as_few_of_them_as_ranks_in_one(ranks: int) -> None:
    blocks = blocks_of(range(ranks))
    assert [rank for block in blocks for rank in block] == list(range(ranks))
    assert len(blocks) <= len(blocks[0]) <= max(64, int(ranks**0.5) + 1)


def test_a_leader_reads_the_votes_of_its_block_and_one_file_of_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vote_blocks, "LEAST", 3)
    monkeypatch.setattr(commit_module, "COLLECTED_WITHIN_S", 60.0)
    storage = MemoryStorage()
    leading = CountingStorage(storage)
    assert len(save_by_processes(storage, leading, 8)) == 8
    votes = {name.rpartition("/")[2] for name in leading.counts.opened if "rank=" in name or "votes=" in name}
    assert votes == {"rank=1.json", "rank=2.json", "votes=3.json", "votes=6.json"}
    for rank in range(8):
        assert_holds(storage, small_shard(1, rank=rank, world_size=8))


@pytest.mark.parametrize("fault", ["gone", "torn", "other"])
def test_votes_that_nobody_collects_are_read_by_the_leader(
    monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """The collector is gone, was killed as it wrote, or wrote what is no vote."""
    monkeypatch.setattr(vote_blocks, "LEAST", 2)
    monkeypatch.setattr(commit_module, "COLLECTED_WITHIN_S", 0.1)

    def collect(collector: Any) -> bool:
        if fault != "gone":
            content = b'["{"algo' if fault == "torn" else b"[1, 2]"
            write_file(storage, block_name(collector._place, collector._block), content)
        return True

    monkeypatch.setattr(vote_blocks.BlockCollector, "try_collect", collect)
    storage = MemoryStorage()
    assert len(save_by_processes(storage, storage, 5)) == 5
    assert inspect(storage, 1).condition is Condition.COMPLETE


# --- saves that succeed ------------------------------------------------------------------------


@formats
def test_a_save_comes_back_bit_for_bit(tmp_path: Path, format: CheckpointFormat[Shard]) -> None:
    for storage in (MemoryStorage(), LocalStorage(tmp_path)):
        shards = two_ranks(7)
        done = save(storage, format, shards)
        assert (done.step, done.kept) == (7, False)
        for shard in shards:
            assert_holds(storage, shard)
        assert storage.list("") == ["step=7"]


@formats
def test_a_committed_save_needs_nothing_that_a_crash_could_take(format: CheckpointFormat[Shard]) -> None:
    storage = MemoryStorage()
    shards = two_ranks(3)
    save(storage, format, shards)
    for shard in shards:
        assert_holds(storage.crash(Survival.NOTHING), shard)


@formats
def test_a_save_writes_in_its_own_folder_alone_and_what_saves_share_is_only_renamed(
    format: CheckpointFormat[Shard],
) -> None:
    storage = FaultyStorage(MemoryStorage())
    save(storage, format, two_ranks(1))
    changes = [operation for operation in storage.operations if not operation.startswith("sync_dir")]
    own = f"step=1/{save_folder('attempt-0', 1)}"
    for change in changes:
        kind, *names = change.split()
        assert kind in ("create", "write", "sync", "make_dir", "replace"), change
        assert change == "make_dir " or any(name.startswith(own) for name in names), change


@pytest.mark.parametrize("leads", [True, False])
@pytest.mark.parametrize(
    "again", [{"save_id": "attempt-0"}, {"save_id": "attempt-1", "restored_save": "attempt-0"}]
)
def test_a_step_that_this_very_save_or_the_one_the_job_went_on_from_committed_is_kept_as_it_is(
    again: dict[str, Any], leads: bool
) -> None:
    storage = MemoryStorage()
    save(storage, LocalFormat(), [small_shard(4)])
    done = save(storage, LocalFormat(), [small_shard(4, seed=9)], leads=leads, **again)
    assert done.kept
    assert_holds(storage, small_shard(4))


@pytest.mark.parametrize("leads", [True, False])
@pytest.mark.parametrize("restored_save", ["attempt-0-3", "other-4", ""])
def test_a_step_of_a_branch_that_the_job_has_left_stays_and_does_not_count_as_saved(
    leads: bool, restored_save: str
) -> None:
    """Also where the job went on from another save of that step."""
    storage = MemoryStorage()
    save(storage, LocalFormat(), [small_shard(4)])
    with pytest.raises(CheckpointWriteFailed, match=r"step=4 was saved by an earlier start .*attempt-0"):
        save(
            storage,
            LocalFormat(),
            [small_shard(4, seed=9)],
            save_id="attempt-1",
            restored_save=restored_save,
            leads=leads,
        )
    assert_holds(storage, small_shard(4))


def test_a_checkpoint_of_another_run_at_the_same_step_is_never_overwritten() -> None:
    storage = MemoryStorage()
    save(storage, LocalFormat(), [small_shard(4)])
    with pytest.raises(CheckpointWriteFailed, match="is a checkpoint of run 'run', this is run 'other'"):
        save(storage, LocalFormat(), [small_shard(4)], run_id="other")
    assert_holds(storage, small_shard(4))


@pytest.mark.parametrize("operation", ["open", "list", "exists"])
@pytest.mark.parametrize("times", [1, 2, 3])
def test_storage_that_does_not_say_what_stands_at_a_step_costs_the_save_and_not_the_checkpoint(
    operation: str, times: int
) -> None:
    storage = MemoryStorage()
    save(storage, LocalFormat(), [small_shard(5)])
    troubled = TroubledStorage(storage, StorageTrouble(step=5, operation=operation, times=times))
    with pytest.raises(CheckpointError):
        save(troubled, LocalFormat(), [small_shard(5, seed=9)], save_id="attempt-1")
    assert_holds(storage, small_shard(5))
    assert inspect(storage, 5).condition is Condition.COMPLETE


def test_a_committed_step_is_not_opened_for_another_save() -> None:
    storage = MemoryStorage()
    save(storage, LocalFormat(), [small_shard(5)])
    with pytest.raises(CheckpointWriteFailed, match="step=5 holds a committed checkpoint"):
        open_save(storage, 5, "attempt-1")
    assert_holds(storage, small_shard(5))


@pytest.mark.parametrize(
    ("name", "content"),
    [("precious", b"1"), ("manifest.json", b'{\n "files": {}}')],
    ids=["anything", "of NeMo, of old"],
)
def test_a_foreign_directory_at_the_same_step_is_never_overwritten(name: str, content: bytes) -> None:
    storage = MemoryStorage()
    storage.make_dir("step=4")
    write_file(storage, f"step=4/{name}", content)
    with pytest.raises(CheckpointWriteFailed, match="was not written by this library"):
        save(storage, LocalFormat(), [small_shard(4)])
    assert storage.list("step=4") == [name]


@pytest.mark.parametrize("content", [b"", b"{torn", b"[]", b'{"state":"writing","save_id":"x","reason":""}'])
@formats
def test_a_stale_marker_with_leftovers_never_breaks_the_next_save(
    format: CheckpointFormat[Shard], content: bytes
) -> None:
    storage = MemoryStorage()
    write_file(storage, marker_name(5), content)
    storage.make_dir("step=5/rank=0")
    write_file(storage, "step=5/rank=0/slot.bin", b"old")
    write_file(storage, "step=5/rank=9.json", b"old")
    save(storage, format, [small_shard(5)])
    assert_holds(storage, small_shard(5))
    assert "rank=9.json" not in storage.list("step=5")


# --- a kill after every operation ---------------------------------------------------------------


def restored_step(storage: Storage, ranks: int) -> int:
    """What a fresh reader finds, checked in full."""
    found = find_newest(storage)
    for shard in two_ranks(found.step)[:ranks]:
        assert_holds(storage, shard)
    return found.step


def operations_of_a_save(format: CheckpointFormat[Shard]) -> int:
    storage = FaultyStorage(MemoryStorage())
    save(storage, format, two_ranks(2))
    return len(storage.operations)


@formats
@pytest.mark.parametrize("kind", [StorageFaultKind.KILL, StorageFaultKind.TORN_KILL])
def test_a_power_cut_at_any_operation_leaves_the_previous_or_the_new_step(
    format: CheckpointFormat[Shard], kind: StorageFaultKind
) -> None:
    count = operations_of_a_save(format)
    outcomes = []
    for operation in range(count + 1):
        disk = MemoryStorage()
        save(disk, format, two_ranks(1))
        faulty = FaultyStorage(disk, StorageFault(operation=operation, kind=kind))
        if operation < count:
            with pytest.raises(StorageKilled):
                save(faulty, format, two_ranks(2))
        else:
            save(faulty, format, two_ranks(2))
        worlds = [(Survival.NOTHING, 0), (Survival.EVERYTHING, 0)]
        worlds += [(Survival.RANDOM, seed) for seed in range(6)]
        steps = [restored_step(disk.crash(*world), 2) for world in worlds]
        outcomes.append(set(steps))
        after = disk.crash(Survival.RANDOM, operation)
        save(after, format, two_ranks(2), save_id="attempt-1", restored_save="attempt-0")
        assert restored_step(after, 2) == 2, f"a save after a cut at operation {operation}"
    assert outcomes[0] == {1}
    assert outcomes[-1] == {2}
    assert all(outcome <= {1, 2} for outcome in outcomes)


@pytest.mark.parametrize("format", ["LocalFormat", "DcpFormat"])
def test_sigkill_at_any_operation_on_disk_leaves_the_previous_or_the_new_step(
    tmp_path: Path, format: str
) -> None:
    """One process forks a child for every operation; each child kills itself there."""
    argv = [sys.executable, "-m", "tests.checkpoint.storing_until_killed", str(tmp_path), format]
    done = warm.run(argv, timeout=120, check=True)
    deaths = [int(line) for line in done.stdout.split()]
    assert len(deaths) > 20
    steps = []
    for number, status in enumerate(deaths):
        storage = LocalStorage(tmp_path / str(number))
        assert status == (-signal.SIGKILL if number < len(deaths) - 1 else 0)
        steps.append(restored_step(storage, 1))
    assert steps == sorted(steps), "once the new step is there it stays"
    assert (steps[0], steps[-1]) == (1, 2)


# --- storages that fail -------------------------------------------------------------------------


@formats
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("kind", [StorageFaultKind.ERROR, StorageFaultKind.ERROR_FROM])
def test_an_error_at_any_operation_fails_the_save_by_name_and_nothing_else(
    format: CheckpointFormat[Shard], number: int, kind: StorageFaultKind
) -> None:
    count = operations_of_a_save(format)
    for operation in range(0, count, 1 if number == errno.EIO else 7):
        disk = MemoryStorage()
        save(disk, format, two_ranks(1))
        fault = StorageFault(operation=operation, kind=kind, errno=number)
        with pytest.raises(CheckpointWriteFailed, match=errno.errorcode[number]):
            save(FaultyStorage(disk, fault), format, two_ranks(2))
        # Its last operation alone may fail after the fact: then the new step is shown, and whole.
        assert restored_step(disk, 2) in ({1, 2} if operation == count - 1 else {1})
        for shard in two_ranks(1):
            assert_holds(disk, shard)
        assert inspect(disk, 1).condition is Condition.COMPLETE


def test_a_save_that_failed_says_why_in_its_marker() -> None:
    disk = MemoryStorage()
    fault = StorageFault(operation=8, kind=StorageFaultKind.ERROR, errno=errno.ENOSPC)
    with pytest.raises(CheckpointWriteFailed):
        save(FaultyStorage(disk, fault), LocalFormat(threads=1), [small_shard(2)])
    marker = try_read_marker(disk, 2)
    assert marker is not None
    assert marker.state is MarkerState.FAILED
    assert "ENOSPC" in marker.reason
    assert "ENOSPC" in inspect(disk, 2).why


def test_a_real_full_disk_fails_the_save_and_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        storage = LocalStorage(disk)
        save(storage, LocalFormat(), [small_shard(1)])
        (disk / "ballast").write_bytes(bytes(190 << 10))
        large = make_shard({"w": torch.zeros(100 << 10, dtype=torch.uint8)}, step=2)
        with pytest.raises(CheckpointWriteFailed, match=r"ENOSPC.*free space"):
            save(storage, LocalFormat(), [large])
        assert_holds(storage, small_shard(1))
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with pytest.raises(CheckpointWriteFailed, match="EROFS"):
            save(storage, LocalFormat(), [small_shard(50)])
        assert_holds(storage, small_shard(1))
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_slow_disk_delays_a_save_and_does_not_fail_it() -> None:
    fault = StorageFault(operation=0, kind=StorageFaultKind.SLOW, delay=timedelta(milliseconds=2))
    disk = MemoryStorage()
    save(FaultyStorage(disk, fault), LocalFormat(), [small_shard(1)])
    assert_holds(disk, small_shard(1))


# --- several processes --------------------------------------------------------------------------


@formats
@pytest.mark.parametrize("leftover", [False, True])
def test_leader_and_followers_commit_through_the_directory_alone(
    tmp_path: Path, format: CheckpointFormat[Shard], leftover: bool
) -> None:
    storage = LocalStorage(tmp_path)
    if leftover:
        put_marker(storage, 3, Marker(state=MarkerState.WRITING, save_id="older"))
        storage.make_dir("step=3/rank=1")
        write_file(storage, "step=3/rank=1.json", b"{}")
    shards = [small_shard(3, rank=rank, world_size=3) for rank in range(3)]
    with ThreadPoolExecutor(3) as pool:
        # Followers first: they must wait for the leader, not write among the leftovers.
        parts = [
            pool.submit(save, storage, format, [shard], leads=shard.rank == 0) for shard in reversed(shards)
        ]
        assert not any(part.result(timeout=60).kept for part in parts)
    for shard in shards:
        assert_holds(storage, shard)
    assert storage.list("") == ["step=3"]


def test_a_rank_that_never_votes_fails_the_save_and_is_named() -> None:
    storage = MemoryStorage()
    save(storage, LocalFormat(), [small_shard(1)])
    shards = [small_shard(2, rank=rank, world_size=4) for rank in (0, 2)]
    with pytest.raises(CheckpointIncomplete, match=r"2 of 4 ranks .* within 0.2 s: 1, 3\.") as caught:
        save(storage, LocalFormat(), shards, timeout=timedelta(seconds=0.2))
    assert caught.value.fields["missing_ranks"] == [1, 3]
    assert find_newest(storage).step == 1


def test_the_vote_of_a_dead_attempt_is_not_counted() -> None:
    storage = MemoryStorage()
    stale = small_shard(2, rank=1, world_size=2)
    with pytest.raises(CheckpointIncomplete):
        save(storage, LocalFormat(), [small_shard(2, world_size=2)], timeout=timedelta(seconds=0.05))
    late = FaultyStorage(storage)
    put_marker(storage, 2, Marker(state=MarkerState.WRITING, save_id="attempt-0"))
    with pytest.raises(CheckpointIncomplete, match="leader did not commit"):
        save(late, LocalFormat(), [stale], leads=False, timeout=timedelta(seconds=0.05))
    assert "rank=1.json" in storage.list(f"step=2/{save_folder('attempt-0', 1)}")
    with pytest.raises(CheckpointIncomplete, match="1 of 2 ranks"):
        save(
            storage,
            LocalFormat(),
            [small_shard(2, world_size=2)],
            save_id="attempt-1",
            timeout=timedelta(seconds=0.05),
        )


def test_a_follower_without_a_leader_gives_up_at_its_deadline() -> None:
    with pytest.raises(CheckpointIncomplete, match=r"the leader did not open the save within 0\.05 s"):
        save(
            MemoryStorage(),
            LocalFormat(),
            [small_shard(2, rank=1, world_size=2)],
            leads=False,
            timeout=timedelta(seconds=0.05),
        )


def test_a_follower_that_cannot_write_fails_the_leader_at_once_and_both_say_why(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    broken = FaultyStorage(
        storage, StorageFault(operation=3, kind=StorageFaultKind.ERROR, errno=errno.EDQUOT)
    )
    with ThreadPoolExecutor(2) as pool:
        leader = pool.submit(save, storage, LocalFormat(), [small_shard(2, world_size=2)])
        follower = pool.submit(
            save, broken, LocalFormat(threads=1), [small_shard(2, rank=1, world_size=2)], leads=False
        )
        with pytest.raises(CheckpointWriteFailed, match="EDQUOT"):
            follower.result(timeout=60)
        with pytest.raises(CheckpointWriteFailed, match="rank 1 could not write"):
            leader.result(timeout=60)
    with pytest.raises(CheckpointMissing):
        find_newest(storage)


def test_a_follower_votes_when_nothing_of_its_part_can_fail_any_more(pair: Pair) -> None:
    """A vote whose sync hangs or fails does not count: what it names may be lost."""
    votes = 0
    for operation in itertools.count():
        disk = MemoryStorage()
        open_save(disk, 2, pair.save_id, 1)
        mount = FaultyStorage(disk, StorageFault(operation=operation, kind=StorageFaultKind.ERROR))
        shards, timeout = [small_shard(2, rank=1, world_size=2)], timedelta(seconds=0.05)
        with pytest.raises(CheckpointError) as caught:
            save(mount, LocalFormat(threads=1), shards, leads=False, timeout=timeout)
        if isinstance(caught.value, CheckpointIncomplete):  # it waited for its leader
            break
        place = f"step=2/{save_folder(pair.save_id, 1)}"
        assert "rank=1.json" not in disk.list(place), mount.operations[operation]
        votes += "rank=1.json" in mount.operations[operation]
    assert votes == 4  # create, write, sync, and the vote itself


def test_a_leader_that_gives_up_releases_its_followers_with_the_reason(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    with ThreadPoolExecutor(2) as pool:
        follower = pool.submit(
            save, storage, LocalFormat(), [small_shard(2, rank=1, world_size=3)], leads=False
        )
        leader = pool.submit(
            save, storage, LocalFormat(), [small_shard(2, world_size=3)], timeout=timedelta(seconds=2)
        )
        with pytest.raises(CheckpointIncomplete, match=r"1 of 3 ranks .*: 2"):
            leader.result(timeout=60)
        with pytest.raises(CheckpointWriteFailed, match=r"given up by its leader: .*1 of 3 ranks"):
            follower.result(timeout=60)


def test_a_leader_whose_claim_fails_behind_its_marker_keeps_no_follower_waiting(tmp_path: Path) -> None:
    count = FaultyStorage(MemoryStorage())
    save(count, LocalFormat(), [small_shard(2)])
    behind = count.operations.index("sync_dir ")
    storage = LocalStorage(tmp_path)
    broken = FaultyStorage(storage, StorageFault(operation=behind, kind=StorageFaultKind.ERROR))
    with ThreadPoolExecutor(1) as pool:
        follower = pool.submit(
            save, storage, LocalFormat(), [small_shard(2, rank=1, world_size=2)], leads=False
        )
        with pytest.raises(CheckpointWriteFailed, match="EIO"):
            save(broken, LocalFormat(), [small_shard(2, world_size=2)])
        with pytest.raises(CheckpointWriteFailed, match=r"given up by its leader: .*EIO"):
            follower.result(timeout=60)


class CountedLooks(FaultyStorage):
    """Counts operations that look."""

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self.looks: list[str] = []

    def open(self, name: str) -> ReadableFile:
        self.looks.append(f"open {name}")
        return super().open(name)

    def list(self, name: str) -> list[str]:
        self.looks.append(f"list {name}")
        return super().list(name)

    def exists(self, name: str) -> bool:
        self.looks.append(f"exists {name}")
        return super().exists(name)


def test_a_leader_lists_the_votes_of_all_ranks_at_once_and_looks_less_often_the_longer_it_waits() -> None:
    storage = CountedLooks(MemoryStorage())
    with pytest.raises(CheckpointIncomplete, match="99 of 100 ranks"):
        save(storage, LocalFormat(), [small_shard(2, world_size=100)], timeout=timedelta(seconds=1))
    assert len(storage.looks) < 80, storage.looks
    votes = f"list step=2/{save_folder('attempt-0', 1)}"
    assert len([look for look in storage.looks if look != votes]) < 20, storage.looks


class VotesUnlisted(FaultyStorage):
    """Cannot list a save's folder at first."""

    times = 3

    def list(self, name: str) -> list[str]:
        if SAVE_PREFIX in name and self.times:
            self.times -= 1
            raise CheckpointCorrupt(f"cannot read {name}: EIO")
        return super().list(name)


def test_a_leader_whose_storage_cannot_be_listed_for_a_moment_finds_the_votes_later(pair: Pair) -> None:
    storage = pair.storage
    pair.storage = troubled = VotesUnlisted(storage)
    leader = pair.pool.submit(pair.lead, LocalFormat())
    wait_until(lambda: not troubled.times, "the leader does not look")
    pair.storage = storage
    pair.follow(LocalFormat())
    assert not leader.result(timeout=60).kept


@pytest.mark.parametrize("ttl", [timedelta(minutes=1), timedelta.max], ids=["a minute", "for ever"])
def test_a_follower_whose_mount_still_shows_a_lifted_marker_sees_the_commit_and_reads_it(
    pair: Pair, ttl: timedelta
) -> None:
    storage = pair.storage
    cached = CachingStorage(storage, ttl)
    pair.storage = cached
    follower = pair.follow_first(LocalFormat())
    pair.storage = storage
    assert not pair.lead(LocalFormat()).kept
    assert not follower.result(timeout=60).kept
    assert cached.exists(marker_name(2)), "the cache has nothing to be wrong about"
    assert try_read_marker(cached, 2) is None
    assert inspect(cached, 2).condition is Condition.COMPLETE
    again = save(cached, LocalFormat(), [small_shard(2, world_size=2)])
    assert again.kept, "a leader on that host takes it for unfinished"


@pytest.mark.parametrize("state", [MarkerState.REMOVING, MarkerState.CORRUPT, MarkerState.FAILED])
def test_no_other_marker_is_taken_for_lifted(state: MarkerState) -> None:
    storage = MemoryStorage()
    save(storage, LocalFormat(), [small_shard(2)])
    cached = CachingStorage(storage, timedelta(minutes=1))
    put_marker(storage, 2, Marker(state=state, save_id="attempt-0"))
    assert try_read_marker(cached, 2) is not None
    storage.remove(marker_name(2))
    assert try_read_marker(cached, 2) is not None


@pytest.mark.parametrize("who", ["leader", "follower"])
def test_an_overtaken_save_waits_for_others_no_longer_than_its_own_part_took(pair: Pair, who: str) -> None:
    overtaken = threading.Event()
    overtaken.set()
    began = time.monotonic()
    rank = int(who == "follower")
    with pytest.raises(
        CheckpointWriteFailed, match=r"did not answer for [34] s, and the job goes on or ends"
    ):
        save(
            pair.storage,
            LocalFormat(),
            [small_shard(2, rank=rank, world_size=2)],
            leads=who == "leader",
            overtaken=overtaken,
        )
    assert time.monotonic() - began < 10


def test_a_follower_does_not_vote_where_its_step_is_being_saved_as_another(pair: Pair) -> None:
    class Replaced(LocalFormat):
        def write_rank(
            self, storage: Storage, directory: str, shard: Shard, *, run_id: str, save_id: str
        ) -> RankIndex:
            index = super().write_rank(storage, directory, shard, run_id=run_id, save_id=save_id)
            open_save(storage, 2, "attempt-1", 1)
            return index

    open_save(pair.storage, 2, pair.save_id, 1)
    with pytest.raises(CheckpointWriteFailed, match="is being saved as 'attempt-1' by now"):
        pair.follow(Replaced())
    assert pair.storage.list("step=2") == [save_folder("attempt-1", 1)]
    assert pair.storage.list(f"step=2/{save_folder('attempt-1', 1)}") == []


# --- another try of a save that failed ------------------------------------------------------------


class Refusing(LocalFormat):
    """A host that has nothing to write."""

    def write_rank(
        self, storage: Storage, directory: str, shard: Shard, *, run_id: str, save_id: str
    ) -> RankIndex:
        raise CheckpointWriteFailed(f"rank {shard.rank} has no slot")


class Looked(threading.Event):
    """Says when a save begins to wait, or ends."""

    def __init__(self) -> None:
        super().__init__()
        self.now = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.now.set()
        return super().wait(timeout)


@dataclass
class Pair:
    """A leader and a follower of step 2, which try it again and again under one save id."""

    storage: Storage
    pool: ThreadPoolExecutor
    try_number: int = 1
    save_id: str = "attempt-0"

    def lead(self, format: LocalFormat) -> Committed:
        shards = [small_shard(2, world_size=2)]
        return save(self.storage, format, shards, try_number=self.try_number, save_id=self.save_id)

    def follow(
        self, format: LocalFormat, looked: Looked | None = None, *, try_number: int | None = None
    ) -> Committed:
        looked = looked or Looked()
        number = self.try_number if try_number is None else try_number
        try:
            shards = [small_shard(2, rank=1, world_size=2)]
            return save(
                *(self.storage, format, shards),
                leads=False,
                try_number=number,
                save_id=self.save_id,
                cancel=looked,
            )
        finally:
            looked.now.set()

    def follow_first(self, format: LocalFormat) -> Future[Committed]:
        """The follower's part, which has looked before the leader begins."""
        looked = Looked()
        part = self.pool.submit(self.follow, format, looked)
        assert looked.now.wait(60)
        return part

    def fail_by(self, who: str) -> None:
        if who == "leader":
            with pytest.raises(CheckpointWriteFailed, match="rank 0 has no slot"):
                self.lead(Refusing())
            with pytest.raises(CheckpointWriteFailed, match="given up by its leader: rank 0 has no slot"):
                self.follow(LocalFormat())
        else:
            follower = self.follow_first(Refusing())
            with pytest.raises(CheckpointWriteFailed, match="rank 1 could not write its part"):
                self.lead(LocalFormat())
            with pytest.raises(CheckpointWriteFailed, match="rank 1 has no slot"):
                follower.result(timeout=60)
        self.try_number += 1


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with ThreadPoolExecutor(1) as pool:
        yield Pair(LocalStorage(tmp_path), pool)


@pytest.mark.parametrize("who", ["leader", "follower"])
def test_another_try_commits_although_a_follower_looks_before_its_leader_has_begun(
    pair: Pair, who: str
) -> None:
    pair.fail_by(who)
    pair.fail_by(who)
    follower = pair.follow_first(LocalFormat())
    assert not pair.lead(LocalFormat()).kept
    assert not follower.result(timeout=60).kept
    for rank in (0, 1):
        assert_holds(pair.storage, small_shard(2, rank=rank, world_size=2))


@pytest.mark.parametrize("who", ["leader", "follower"])
@pytest.mark.parametrize("first", ["leader", "follower"])
def test_a_follower_is_told_when_its_leader_refuses_once_more(pair: Pair, who: str, first: str) -> None:
    pair.fail_by(who)
    if first == "follower":
        follower = pair.follow_first(LocalFormat())
        with pytest.raises(CheckpointWriteFailed, match="rank 0 has no slot"):
            pair.lead(Refusing())
        with pytest.raises(CheckpointWriteFailed, match="given up by its leader: rank 0 has no slot"):
            follower.result(timeout=60)
    else:
        pair.fail_by("leader")


def test_a_follower_does_not_vote_in_another_try_for_files_that_went_with_the_first(pair: Pair) -> None:
    class Overtaken(LocalFormat):
        def write_rank(
            self, storage: Storage, directory: str, shard: Shard, *, run_id: str, save_id: str
        ) -> RankIndex:
            index = super().write_rank(storage, directory, shard, run_id=run_id, save_id=save_id)
            open_save(storage, 2, save_id, 2)
            return index

    open_save(pair.storage, 2, "attempt-0", 1)
    with pytest.raises(CheckpointWriteFailed, match="of try 1, and its leader is at try 2"):
        pair.follow(Overtaken())
    second = save_folder("attempt-0", 2)
    assert pair.storage.list("step=2") == [second]
    assert pair.storage.list(f"step=2/{second}") == []  # nor does it refuse the second one


def test_a_follower_that_is_late_with_its_refusal_of_one_try_does_not_refuse_the_next(pair: Pair) -> None:
    pair.fail_by("leader")
    leader = pair.pool.submit(pair.lead, LocalFormat())
    wait_for_second_try(pair.storage)
    with pytest.raises(CheckpointWriteFailed, match="of try 1, and its leader is at try 2"):
        pair.follow(Refusing(), try_number=1)
    assert not pair.follow(LocalFormat()).kept
    assert not leader.result(timeout=60).kept


@pytest.mark.parametrize(("save_id", "try_number"), [("attempt-0", 2), ("attempt-1", 1)], ids=["try", "save"])
def test_a_refusal_that_comes_in_the_next_try_or_save_lands_nowhere(
    pair: Pair, save_id: str, try_number: int
) -> None:
    """Between a follower's last look and its write its leader may have begun anew."""
    open_save(pair.storage, 2, "attempt-0", 1)
    with pytest.raises(CheckpointWriteFailed, match="rank 1 has no slot"):
        pair.follow(Refusing())
    refusal = f"step=2/{save_folder('attempt-0', 1)}/rank=1.failed"
    assert pair.storage.exists(refusal)
    pair.save_id, pair.try_number = save_id, try_number
    leader = pair.pool.submit(pair.lead, LocalFormat())
    wait_until_equal(lambda: begun(pair.storage), (MarkerState.WRITING, save_id, try_number))
    with pytest.raises(CheckpointWriteFailed, match="ENOENT"):
        write_file(pair.storage, refusal, b"late")
    assert not pair.follow(LocalFormat()).kept
    assert not leader.result(timeout=60).kept


@pytest.mark.parametrize("operation", ["create {vote}.unsynced", "replace {vote}.unsynced {vote}"])
def test_a_vote_that_comes_in_the_next_try_lands_nowhere_as_its_files_went_with_the_first(
    pair: Pair, operation: str
) -> None:
    part = LocalFormat(threads=1), [small_shard(2, rank=1, world_size=2)]
    open_save(pair.storage, 2, "attempt-0", 1)
    seen = FaultyStorage(pair.storage)
    with pytest.raises(CheckpointIncomplete, match="leader did not commit"):
        save(seen, *part, leads=False, timeout=timedelta(seconds=0.2))
    open_save(pair.storage, 2, "attempt-0", 1)
    vote = f"step=2/{save_folder('attempt-0', 1)}/rank=1.json"
    votes_at = seen.operations.index(operation.format(vote=vote))
    late = FaultyStorage(pair.storage, StorageFault(operation=votes_at, kind=StorageFaultKind.HANG))
    first = pair.pool.submit(save, late, *part, leads=False)
    assert late.hangs.wait(60)
    with ThreadPoolExecutor(1) as pool:
        pair.try_number = 2
        leader = pool.submit(pair.lead, LocalFormat())
        wait_for_second_try(pair.storage)
        own = f"step=2/{save_folder('attempt-0', 2)}/rank=0.json"
        wait_until(lambda: pair.storage.exists(own), "the leader does not write its part")
        late.answers.set()
        with pytest.raises(CheckpointWriteFailed, match="step=2 belongs to another save by now"):
            first.result(timeout=60)
        assert not pair.storage.exists(vote)
        assert not pair.follow(LocalFormat()).kept
        assert not leader.result(timeout=60).kept
    for rank in (0, 1):
        assert_holds(pair.storage, small_shard(2, rank=rank, world_size=2))


@pytest.mark.parametrize("number", [1, 2])
def test_an_index_says_which_try_it_votes_in(number: int) -> None:
    storage = MemoryStorage()
    save(storage, LocalFormat(), [small_shard(2)], try_number=number)
    place = f"step=2/{save_folder('attempt-0', number)}"
    assert read_index(storage, place, 0)[0].try_number == number
    assert_holds(storage, small_shard(2))


def test_a_follower_that_is_late_where_nobody_saves_any_more_leaves_nothing_in_the_way() -> None:
    class Forgotten(Refusing):
        def write_rank(self, storage: Storage, *args: Any, **kwargs: Any) -> RankIndex:
            remove_checkpoint(storage, 2)  # as a later start of the job does
            storage.make_dir("step=2/save=0")  # as one whose call was under way
            return super().write_rank(storage, *args, **kwargs)

    storage = MemoryStorage()
    open_save(storage, 2, "attempt-0", 1)
    with pytest.raises(CheckpointWriteFailed, match="rank 1 has no slot"):
        save(storage, Forgotten(), [small_shard(2, rank=1, world_size=2)], leads=False)
    assert storage.list("step=2") == ["save=0"]
    assert not save(storage, LocalFormat(), [small_shard(2)], save_id="attempt-1").kept
    assert "save=0" not in storage.list("step=2")


def test_a_leader_that_gives_up_late_does_not_hide_what_a_later_start_committed_at_its_step(
    pair: Pair,
) -> None:
    shard, cancel = small_shard(2), threading.Event()
    save(seen := FaultyStorage(MemoryStorage()), LocalFormat(threads=1), [shard])
    syncs_at = seen.operations.index(f"sync step=2/{save_folder('attempt-0', 1)}/rank=0.slot.bin")
    late = FaultyStorage(pair.storage, StorageFault(operation=syncs_at, kind=StorageFaultKind.HANG))
    first = pair.pool.submit(save, late, LocalFormat(threads=1), [shard], cancel=cancel)
    assert late.hangs.wait(60)
    cancel.set()  # as a save whose storage hangs
    pair.storage.remove_tree("step=2")
    save(pair.storage, LocalFormat(), [shard], save_id="attempt-1")
    late.answers.set()
    with pytest.raises(CheckpointWriteFailed, match="was cancelled"):
        first.result(timeout=60)
    assert inspect(pair.storage, 2).condition is Condition.COMPLETE


def test_ranks_that_wait_when_their_save_is_cancelled_say_so_and_blame_nobody(pair: Pair) -> None:
    for leads in (True, False):
        cancel = Looked()
        shard = small_shard(2, rank=int(not leads), world_size=2)
        part = pair.pool.submit(save, pair.storage, LocalFormat(), [shard], leads=leads, cancel=cancel)
        assert cancel.now.wait(60)
        cancel.set()
        with pytest.raises(CheckpointWriteFailed, match="step 2: the save was cancelled while it waited"):
            part.result(timeout=60)
        marker = try_read_marker(pair.storage, 2)
        assert marker is not None
        assert "cancelled while it waited" in marker.reason
        open_save(pair.storage, 2, "attempt-0")
        if leads:
            put_marker(pair.storage, 2, replace(marker, save_id="older"))  # the follower waits for its own


def wait_for_second_try(storage: Storage) -> None:
    """Until the leader has begun it."""
    wait_until_equal(lambda: begun(storage), (MarkerState.WRITING, "attempt-0", 2))


def begun(storage: Storage) -> tuple[MarkerState, str, int] | None:
    marker = try_read_marker(storage, 2)
    return None if marker is None else (marker.state, marker.save_id, marker.try_number)


@pytest.mark.parametrize("older", ["", ', "attempt": "0b5"'], ids=["first", "with-random-names-of-tries"])
def test_a_marker_of_an_older_version_which_has_no_number_is_of_any_try(pair: Pair, older: str) -> None:
    def put(state: str) -> None:
        content = f'{{"state": "{state}", "save_id": "attempt-0", "reason": "no space"{older}}}'
        write_file(pair.storage, marker_name(2), content.encode())

    for pair.try_number in (1, 2):
        put("failed")
        with pytest.raises(CheckpointWriteFailed, match="given up by its leader: no space"):
            pair.follow(LocalFormat())
        put("writing")
        with pytest.raises(CheckpointWriteFailed, match="rank 1 has no slot"):  # it takes part
            pair.follow(Refusing())


def test_a_cancelled_save_does_not_begin() -> None:
    from resiliency.checkpoint.commit.commit import SaveTicket, commit

    cancel = threading.Event()
    cancel.set()
    shard = small_shard(1, world_size=2)
    ticket = SaveTicket(step=1, run_id="r", save_id="s", world_size=2, ranks=range(2))
    storage = FaultyStorage(MemoryStorage())
    with pytest.raises(CheckpointWriteFailed, match="step 1: the save was cancelled before claiming"):
        commit(storage, LocalFormat(), ticket, {0: shard}, leads=True, cancel=cancel)
    assert storage.operations == []


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"step": -1}, "step -1"),
        ({"save_id": ""}, "save id ''"),
        ({"save_id": "a/b"}, "save id 'a/b'"),
        ({"try_number": 0}, "try 0"),
        ({"ranks": [2]}, r"ranks \[2\]"),
    ],
)
def test_a_ticket_that_cannot_work_is_refused(change: dict[str, object], found: str) -> None:
    from resiliency.checkpoint.commit.commit import SaveTicket

    good = {"step": 1, "run_id": "r", "save_id": "s", "world_size": 2, "ranks": [0]}
    with pytest.raises(CheckpointError, match=found):
        SaveTicket(**{**good, **change})  # type: ignore[arg-type]


def test_out_of_descriptors_no_marker_is_seen_where_there_is_none(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    put_marker(storage, 1, Marker(state=MarkerState.WRITING))
    with no_descriptor_left():
        found = [try_read_marker(storage, step) for step in (1, 2)]
    assert found == [Marker(state=MarkerState.UNKNOWN), None]
