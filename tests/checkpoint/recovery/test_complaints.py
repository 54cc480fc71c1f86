# SPDX-License-Identifier: Apache-2.0
"""What ranks complain about is read again by few of them, and only proven damage hides a checkpoint."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from resiliency.checkpoint.format.catalog import Condition, glance, verify
from resiliency.checkpoint.format.dcp import DcpFormat
from resiliency.checkpoint.format.manifest import HEAD_BYTES, MANIFEST, index_name, save_folder
from resiliency.checkpoint.format.reader import CheckpointReader
from resiliency.checkpoint.locations import ShardRequest
from resiliency.checkpoint.recovery.complaints import Complaint, choose_readers, complaint_of, try_quarantine
from resiliency.checkpoint.state.layout import Shard
from resiliency.checkpoint.storage.chunked_file import CHUNK_BYTES
from resiliency.checkpoint.storage.interface import ReadableFile, Storage, WritableFile, read_file, write_file
from resiliency.checkpoint.storage.posix import LocalStorage, read_failed
from resiliency.errors import CheckpointCorrupt, CheckpointError
from resiliency.testing.counting_storage import CountingStorage
from resiliency.testing.rank_pool import RankPool
from resiliency.testing.storage import MemoryStorage
from tests.checkpoint.agreeing_threads import ends_of
from tests.checkpoint.restoring_ranks import opened, state
from tests.checkpoint.storage_builders import make_shard, save, small_shard

SOON = timedelta(seconds=60)
RANKS = 6
#: Three hosts of two ranks.
NEEDS = [ShardRequest(rank=rank, host=f"host-{rank // 2}", world_size=RANKS) for rank in range(RANKS)]
FOLDER = f"step=1/{save_folder('attempt-0', 1)}"
FILE_OF_2 = f"{FOLDER}/__2_0.distcp"


class Broken(CountingStorage):
    """A mount whose files cannot be read: the device fails."""

    def open(self, name: str) -> ReadableFile:
        super().open(name).close()
        if not name.endswith("-unfinished"):
            raise read_failed(OSError(errno.EIO, "fails"), self.describe(name))
        return super().open(name)


def saved() -> MemoryStorage:
    storage = MemoryStorage()
    save(storage, DcpFormat(), [small_shard(1, rank=rank, world_size=RANKS) for rank in range(RANKS)])
    return storage


def damage(storage: MemoryStorage, name: str) -> None:
    content = bytearray(read_file(storage, name))
    content[len(content) // 2] ^= 1
    write_file(storage, name, content)


def complain(
    mounts: Sequence[Storage],
    complaints: dict[int, Complaint],
    within: timedelta = SOON,
    hide_within: timedelta = SOON,
) -> bool:
    """All ranks make their complaints; whether the damage is proven."""
    answers = ends_of(
        len(mounts),
        lambda rank_group: try_quarantine(
            rank_group,
            mounts[rank_group.rank],
            1,
            complaints.get(rank_group.rank),
            NEEDS,
            within=within,
            hide_within=hide_within,
        ),
    )
    assert all(answer == answers[0] for answer in answers)
    assert isinstance(answers[0], bool)
    return answers[0]


def test_a_file_that_all_ranks_complain_about_is_read_by_one_of_them() -> None:
    storage = saved()
    damage(storage, FILE_OF_2)
    mounts = [CountingStorage(storage) for _ in range(RANKS)]
    assert complain(mounts, {rank: Complaint(2, FILE_OF_2) for rank in range(RANKS)})
    assert [mount.counts.read_bytes > 0 for mount in mounts].count(True) == 1
    found = glance(storage, 1)
    assert found.condition is Condition.UNFINISHED
    assert FILE_OF_2 in found.why


@pytest.mark.parametrize(
    "name",
    [FILE_OF_2, index_name(FOLDER, 2), f"step=1/{MANIFEST}", ""],
    ids=["data", "index", "manifest", "shard"],
)
def test_damage_of_any_file_is_proven(name: str) -> None:
    storage = saved()
    damage(storage, name or FILE_OF_2)
    assert complain([storage] * RANKS, {2: Complaint(2, name)})
    assert glance(storage, 1).condition is Condition.UNFINISHED


@pytest.mark.parametrize("kept", [None, 0, 20, -1], ids=["gone", "empty", "started", "nearly whole"])
@pytest.mark.parametrize(
    "name",
    [FILE_OF_2, index_name(FOLDER, 2), f"step=1/{MANIFEST}", ""],
    ids=["data", "index", "manifest", "shard"],
)
def test_a_checkpoint_that_is_being_copied_is_passed_over_and_not_hidden(name: str, kept: int | None) -> None:
    storage = saved()
    late = name or FILE_OF_2
    content = read_file(storage, late)
    if kept is None:
        storage.remove(late)
    else:
        write_file(storage, late, content[:kept])
    assert not complain([storage] * RANKS, {2: Complaint(2, name)})
    assert storage.list("") == ["step=1"]
    write_file(storage, late, content)
    assert verify(storage, 1) > 0


def test_a_long_index_that_is_being_copied_is_not_hidden() -> None:
    storage = MemoryStorage()
    parts = {f"layers/{number}/attention/weight": torch.zeros(1) for number in range(600)}
    save(storage, DcpFormat(), [make_shard(parts)])
    index = index_name(FOLDER, 0)
    content = read_file(storage, index)
    for kept in (1000, HEAD_BYTES, HEAD_BYTES + 1000):
        write_file(storage, index, content[:kept])
        assert not complain([storage] * RANKS, {0: Complaint(0, index)})
    assert storage.list("") == ["step=1"]


def test_a_rank_that_finds_good_files_bad_hides_nothing(caplog: pytest.LogCaptureFixture) -> None:
    storage = saved()
    complaints = {2: Complaint(2, FILE_OF_2), 3: Complaint(3), 4: Complaint(0, f"step=1/{MANIFEST}")}
    assert not complain([storage] * RANKS, complaints)
    assert glance(storage, 1).condition is Condition.COMPLETE
    assert f"a rank found step 1 bad that is good here ({FILE_OF_2})" in caplog.text


@pytest.mark.parametrize("broken", [[2, 3], list(range(RANKS))], ids=["one host", "all hosts"])
def test_a_device_that_fails_proves_no_damage(broken: list[int]) -> None:
    storage = saved()
    mounts = [Broken(storage) if rank in broken else storage for rank in range(RANKS)]
    assert not complain(mounts, {rank: Complaint(rank) for rank in broken})
    assert glance(storage, 1).condition is Condition.COMPLETE


class Exhausted(CountingStorage):
    """Read by a process that may have no more threads."""

    def open(self, name: str) -> ReadableFile:
        if name.endswith(".distcp"):
            raise RuntimeError("can't start new thread")
        return super().open(name)


def test_a_rank_that_has_proven_the_damage_hides_it_and_not_rank_0_which_has_no_mount() -> None:
    storage = saved()
    damage(storage, FILE_OF_2)
    bare = MemoryStorage()
    mounts = [bare if rank < 2 else storage for rank in range(RANKS)]
    complaints = {rank: Complaint(2, FILE_OF_2) for rank in range(4)}  # so a rank of the last host reads
    assert complain(mounts, complaints)
    assert glance(storage, 1).condition is Condition.UNFINISHED
    assert bare.list("") == []


class BadMiddle(CountingStorage):
    """A mount that gives an error for two chunks in a row, so each of two threads meets one."""

    def open(self, name: str) -> ReadableFile:
        file = super().open(name)
        return _BadMiddle(file, self.describe(name)) if name.endswith(".distcp") else file


class _BadMiddle:
    def __init__(self, inner: ReadableFile, path: str) -> None:
        self.inner, self.path = inner, path
        self.size_bytes = inner.size_bytes

    def read_into(self, offset: int, *targets: memoryview) -> int:
        if offset // CHUNK_BYTES in (1, 2):
            raise read_failed(OSError(errno.EIO, "fails"), self.path)
        return self.inner.read_into(offset, *targets)

    def close(self) -> None:
        self.inner.close()


def test_the_chunk_that_was_found_bad_is_read_before_the_rest_of_its_file() -> None:
    storage = MemoryStorage()
    save(storage, DcpFormat(), [make_shard({"weight": torch.ones(9 * CHUNK_BYTES // 8)})])
    [name] = [
        record.name for record in CheckpointReader(storage, 1).files() if record.name.endswith("distcp")
    ]
    content = bytearray(read_file(storage, name))
    assert len(content) > 4 * CHUNK_BYTES  # layout and values stand in the last chunk
    content[3 * CHUNK_BYTES + 4096] ^= 1
    write_file(storage, name, content)
    assert not complain([BadMiddle(storage)] * RANKS, {0: Complaint(0, name)})
    assert not complain([BadMiddle(storage)] * RANKS, {0: Complaint(0, name, (0, 1 << 40))})
    assert complain([BadMiddle(storage)] * RANKS, {0: Complaint(0, name, (3 * CHUNK_BYTES,))})
    assert glance(storage, 1).condition is Condition.UNFINISHED


class Stuck(CountingStorage):
    """A mount that can be read, and whose writes hang until `released`."""

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self.released = threading.Event()

    def create(self, name: str, size_bytes: int = 0) -> WritableFile:
        self.released.wait(SOON.total_seconds())
        return super().create(name, size_bytes)


def test_a_marker_that_cannot_be_written_holds_the_ranks_up_until_the_deadline_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    storage = saved()
    damage(storage, FILE_OF_2)
    mounts = [Stuck(storage) for _ in range(RANKS)]
    assert complain(mounts, {2: Complaint(2, FILE_OF_2)}, hide_within=timedelta(milliseconds=300))
    assert "was not hidden within 0:00:00.3" in caplog.text
    for mount in mounts:
        mount.released.set()


def test_a_reader_without_threads_stays_with_the_others(caplog: pytest.LogCaptureFixture) -> None:
    storage = saved()
    damage(storage, FILE_OF_2)
    mounts = [Exhausted(storage) for _ in range(RANKS)]
    assert not complain(mounts, {2: Complaint(2, FILE_OF_2)})
    assert 'was not read again: RuntimeError("can\'t start new thread")' in caplog.text


def test_where_the_directory_is_missing_nothing_is_hidden() -> None:
    storage = saved()
    mounts = [MemoryStorage() for _ in range(RANKS)]
    assert not complain(mounts, {rank: Complaint(rank) for rank in range(RANKS)})
    assert [mount.list("") for mount in mounts] == [[]] * RANKS
    assert glance(storage, 1).condition is Condition.COMPLETE


class Hanging(CountingStorage):
    """A mount whose data files hang until `released`."""

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self.released = threading.Event()
        self.ended = threading.Event()

    def open(self, name: str) -> ReadableFile:
        if name.endswith(".distcp"):
            self.released.wait(SOON.total_seconds())
            self.ended.set()
        return super().open(name)


def test_a_mount_that_hangs_holds_the_ranks_up_until_the_deadline_alone() -> None:
    storage = saved()
    damage(storage, FILE_OF_2)
    mounts = [Hanging(storage) for _ in range(RANKS)]
    assert not complain(mounts, {2: Complaint(2, FILE_OF_2)}, within=timedelta(milliseconds=300))
    assert glance(storage, 1).condition is Condition.COMPLETE
    for mount in mounts:
        mount.released.set()
    assert any(mount.ended.wait(SOON.total_seconds()) for mount in mounts[:1])


def test_readers_are_of_hosts_without_complaints_and_each_file_has_one() -> None:
    wide = [ShardRequest(rank=rank, host=f"host-{rank // 2}", world_size=12) for rank in range(12)]
    of_two_hosts = {rank: Complaint(rank) for rank in range(4)}
    assert sorted(choose_readers(of_two_hosts, wide).values()) == [4, 6, 8, 10]
    of_all_hosts = {rank: Complaint(0, "step=1/a") for rank in range(0, 12, 2)}
    assert choose_readers(of_all_hosts, wide) == {Complaint(0, "step=1/a"): 1}
    of_all_ranks = {rank: Complaint(rank, f"step=1/{rank % 3}") for rank in range(12)}
    assert list(choose_readers(of_all_ranks, wide).values()) == [0, 2, 4]
    at = {rank: Complaint(rank, "step=1/a", offsets) for rank, offsets in enumerate([(), (9,), (4,), (9,)])}
    assert choose_readers(at, wide) == {Complaint(0, "step=1/a", (4, 9)): 4}
    assert choose_readers({0: Complaint(0)}, wide[:1]) == {Complaint(0): 0}


def test_a_complaint_names_the_file_that_the_error_names() -> None:
    storage = saved()
    path = storage.describe(FILE_OF_2)
    assert complaint_of(storage, 2, CheckpointCorrupt("bad.", path=path)) == Complaint(2, FILE_OF_2)
    at = CheckpointCorrupt("bad.", path=path, offset=4096)
    assert complaint_of(storage, 2, at) == Complaint(2, FILE_OF_2, (4096,))
    for error in (CheckpointError("no file."), CheckpointCorrupt("elsewhere.", path="/local/step=1/x")):
        assert complaint_of(storage, 2, error) == Complaint(2)


def finding_fault(rank: int, directory: Path, job: str) -> list[str]:
    """Save two steps; at the next start rank 1, on a host with bad memory, finds both bad."""
    with opened(directory, job, rank, 2) as checkpoints:
        for step in (1, 2):
            assert checkpoints.save(step, state(step)).wait(SOON)

    def fill(_shard: Shard) -> None:
        if rank == 1:
            raise CheckpointCorrupt("a bit flipped.", path=str(directory / "step=2" / "__1_0.distcp"))

    with opened(directory, job, rank, 2) as checkpoints:
        with pytest.raises(CheckpointCorrupt) as caught:
            checkpoints.restore_with(fill)
        storage = LocalStorage(directory)
        return [str(caught.value), *(glance(storage, step).condition.value for step in (1, 2))]


@pytest.mark.thorough("a rank that finds good files bad is near")
@pytest.mark.slow
def test_a_host_that_finds_fault_with_good_checkpoints_hides_none_from_the_next_start(
    tmp_path: Path, rank_pool: RankPool
) -> None:
    job = f"complaints-{os.getpid()}"
    report = rank_pool.run(finding_fault, 2, tmp_path, job, timeout=120.0, operation_timeout=60.0)
    for text, *conditions in report.values:
        assert text.startswith("none of the 2 checkpoints that are left can be used")
        assert conditions == ["complete", "complete"]
