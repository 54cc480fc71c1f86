# SPDX-License-Identifier: Apache-2.0
"""Replicas on disk: a kill after every operation, full disks, bad bytes, bad names, broken receptions."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from resiliency.checkpoint.format.catalog import Condition, inspect, quarantine, verify
from resiliency.checkpoint.format.lease import Lease
from resiliency.checkpoint.format.manifest import (
    MANIFEST,
    Manifest,
    RankIndex,
    index_name,
    read_index,
    read_manifest,
    write_index,
    write_manifest,
)
from resiliency.checkpoint.format.marker import Marker, MarkerState, put_marker, try_read_marker
from resiliency.checkpoint.replication.copy_plan import CopyPlan
from resiliency.checkpoint.replication.existing import ReplicaKept
from resiliency.checkpoint.replication.replica_store import ReplicaStore, ReplicaWriter, is_host_directory
from resiliency.checkpoint.storage.chunked_file import FileRecord
from resiliency.checkpoint.storage.interface import ReadableFile, Storage, WritableFile, read_file
from resiliency.checkpoint.storage.memory import page_memory
from resiliency.checkpoint.storage.posix import LocalStorage, read_failed
from resiliency.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointIncomplete,
    CheckpointWriteFailed,
    ConfigError,
    PeerError,
)
from resiliency.testing.storage import (
    FaultyStorage,
    MemoryStorage,
    StorageFault,
    StorageFaultKind,
    StorageKilled,
    Survival,
)
from resiliency.testing.system_faults import NO_THREAD, SystemFault
from tests.checkpoint.held import flip
from tests.checkpoint.peer_builders import commit_step, shard, tree
from tests.checkpoint.storage_builders import assert_holds, file_in, folder_of
from tests.checkpoint.system_errors import nothing_leaks, numbers

OWNER = "host-a"
LARGE = 9 << 20  # three chunks


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> LocalStorage:
    """The owner's own checkpoints: steps 1 and 2 of two ranks, and step 3 with files of several chunks."""
    storage = LocalStorage(tmp_path_factory.mktemp("owner"))
    for step in (1, 2):
        commit_step(storage, step, ranks=(2, 3))
    commit_step(storage, 3, ranks=(2, 3), size_bytes=LARGE)
    return storage


def chunks_of(storage: Storage, copy_plan: CopyPlan) -> Iterator[tuple[int, int, memoryview]]:
    for file, record in enumerate(copy_plan.files):
        content = read_file(storage, f"step={copy_plan.step}/{record.name}")
        for number in range(len(record.digests)):
            start, length = copy_plan.extent(file, number)
            data = page_memory(length)
            data[:length] = content[start : start + length]
            yield file, number, data[:length]


def receive(
    store: ReplicaStore, storage: Storage, step: int, source_host: str = OWNER, *, attempt_id: str = ""
) -> ReplicaWriter:
    """All of a copy, as far as it is not there."""
    copy_plan = CopyPlan.read(storage, step)
    replica_writer = store.begin(source_host, copy_plan, attempt_id=attempt_id)
    if not replica_writer.is_held:
        wanted = {(f, n) for f, first, end in replica_writer.missing(1000) for n in range(first, end)}
        for file, number, data in chunks_of(storage, copy_plan):
            if (file, number) in wanted:
                replica_writer.write_chunk(file, number, data)
        replica_writer.finish()
    return replica_writer


def assert_replica(storage: Storage, step: int, *ranks: int, size_bytes: int = 40_000) -> None:
    assert inspect(storage, step).condition is Condition.COMPLETE
    for rank in ranks or (2, 3):
        assert_holds(storage, shard(step, rank, 4, size_bytes))


def memory_store(storage: Storage) -> ReplicaStore:
    return ReplicaStore(Path("/nowhere"), open_storage=lambda source_host: storage)


@pytest.mark.parametrize("step", [1, 3])
def test_a_replica_is_the_original_byte_for_byte_and_reads_like_it(
    tmp_path: Path, original: LocalStorage, step: int
) -> None:
    store = ReplicaStore(tmp_path)
    receive(store, original, step)
    found = LocalStorage(tmp_path / "replicas" / OWNER)
    assert tree(found.root / f"step={step}") == tree(original.root / f"step={step}")
    assert found.list("") == [f"step={step}"]
    assert_replica(found, step, size_bytes=LARGE if step == 3 else 40_000)
    assert verify(found, step) > 0
    assert store.source_hosts() == [OWNER]
    assert receive(store, original, step).is_held
    assert receive(ReplicaStore(tmp_path), original, step).is_held


def test_a_chunk_that_differs_from_its_digest_is_not_written(original: LocalStorage) -> None:
    operations = FaultyStorage(MemoryStorage())
    store = memory_store(operations)
    copy_plan = CopyPlan.read(original, 1)
    replica_writer = store.begin(OWNER, copy_plan)
    file, number, data = next(chunks_of(original, copy_plan))
    data[100] ^= 1
    before = len(operations.operations)
    with pytest.raises(CheckpointCorrupt, match=r"chunk 0 of .*/rank=2\.slot\.bin"):
        replica_writer.write_chunk(file, number, data)
    assert len(operations.operations) == before
    with pytest.raises(CheckpointIncomplete, match="have not come"):
        replica_writer.finish()
    data[100] ^= 1
    for file, number, data in chunks_of(original, copy_plan):
        replica_writer.write_chunk(file, number, data)
        replica_writer.write_chunk(file, number, data)  # twice does no harm
    replica_writer.finish()
    assert_replica(operations.inner, 1)


# --- kills, and what a power cut leaves -----------------------------------------------------------


def operations_of_a_copy(original: LocalStorage, step: int) -> int:
    faulty = FaultyStorage(MemoryStorage())
    receive(memory_store(faulty), original, step)
    return len(faulty.operations)


@pytest.mark.parametrize("kind", [StorageFaultKind.KILL, StorageFaultKind.TORN_KILL])
@pytest.mark.parametrize("survival", list(Survival))
@pytest.mark.parametrize("twice", [False, True])
def test_a_kill_at_any_operation_leaves_the_older_replica_and_the_new_one_hidden_or_whole(
    original: LocalStorage, kind: StorageFaultKind, survival: Survival, twice: bool
) -> None:
    outcomes = set()
    for operation in range(operations_of_a_copy(original, 2)):
        disk = MemoryStorage()
        receive(memory_store(disk), original, 1)
        for _ in range(1 + twice):  # the agent that goes on is killed as well
            fault = StorageFault(operation=operation, kind=kind)
            try:
                receive(memory_store(FaultyStorage(disk, fault)), original, 2)
            except StorageKilled:
                disk = disk.crash(survival, seed=operation)
        assert_replica(disk, 1)
        found = inspect(disk, 2).condition
        outcomes.add(found)
        if found is Condition.COMPLETE:
            assert_replica(disk, 2)
        else:
            assert found is Condition.UNFINISHED or not disk.exists("step=2")
        receive(memory_store(disk), original, 2)  # whatever it was, the next try makes it whole
        assert_replica(disk, 2)
        assert_replica(disk.crash(Survival.NOTHING), 2)
        assert disk.list("") == ["step=1", "step=2"]
        assert sorted(disk.list("step=2")) == original.list("step=2")
    assert Condition.UNFINISHED in outcomes


def test_an_agent_that_was_killed_receives_only_the_ranks_that_had_not_come_whole(
    original: LocalStorage,
) -> None:
    disk = MemoryStorage()
    copy_plan = CopyPlan.read(original, 3)
    replica_writer = memory_store(disk).begin(OWNER, copy_plan)
    for file, number, data in chunks_of(original, copy_plan):
        if (file, number) == (1, 2):
            break
        replica_writer.write_chunk(file, number, data)
    after = disk.crash(Survival.EVERYTHING)
    resumed = memory_store(after).begin(OWNER, copy_plan)
    assert [run[0] for run in resumed.missing(100)] == [1]
    receive(memory_store(after), original, 3)
    assert_replica(after.crash(Survival.NOTHING), 3, size_bytes=LARGE)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("kind", [StorageFaultKind.ERROR, StorageFaultKind.ERROR_FROM])
def test_a_storage_that_refuses_any_operation_leaves_the_older_replica(
    original: LocalStorage, number: int, kind: StorageFaultKind
) -> None:
    count = operations_of_a_copy(original, 2)
    for operation in range(count):
        disk = MemoryStorage()
        receive(memory_store(disk), original, 1)
        store = memory_store(FaultyStorage(disk, StorageFault(operation=operation, kind=kind, errno=number)))
        copy_plan = CopyPlan.read(original, 2)
        with pytest.raises(CheckpointWriteFailed, match=errno.errorcode[number]):
            receive_or_abort(store, original, copy_plan)
        assert_replica(disk, 1)
        if inspect(disk, 2).condition is Condition.COMPLETE:
            assert operation == count - 1  # the sync of the marker's end
            assert_replica(disk, 2)
        receive(memory_store(disk), original, 2)
        assert_replica(disk, 2)


def receive_or_abort(store: ReplicaStore, storage: Storage, copy_plan: CopyPlan) -> None:
    replica_writer = store.begin(OWNER, copy_plan)
    try:
        for file, number, data in chunks_of(storage, copy_plan):
            replica_writer.write_chunk(file, number, data)
        replica_writer.finish()
    except CheckpointWriteFailed:
        replica_writer.abort()
        raise


def test_an_abort_frees_the_space(original: LocalStorage) -> None:
    disk = MemoryStorage()
    replica_writer = memory_store(disk).begin(OWNER, CopyPlan.read(original, 2))
    replica_writer.abort()
    replica_writer.abort()
    assert disk.list("") == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "none", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_real_full_disk_refuses_before_the_first_chunk_and_is_as_free_as_before(
    small_disk: Path, original: LocalStorage
) -> None:
    store = ReplicaStore(small_disk)
    receive(store, original, 1)
    (small_disk / "ballast").write_bytes(bytes(12 << 20))
    free = os.statvfs(small_disk).f_bavail
    with pytest.raises(CheckpointWriteFailed, match="ENOSPC"):
        store.begin(OWNER, CopyPlan.read(original, 3))
    assert os.statvfs(small_disk).f_bavail == free
    assert_replica(LocalStorage(small_disk / "replicas" / OWNER), 1)
    (small_disk / "ballast").unlink()
    receive(store, original, 3)
    assert_replica(LocalStorage(small_disk / "replicas" / OWNER), 3, size_bytes=LARGE)


# --- several receptions ---------------------------------------------------------------------------


def test_another_connection_takes_over_what_has_come_and_the_first_can_do_no_more(
    original: LocalStorage,
) -> None:
    disk = MemoryStorage()
    store = memory_store(disk)
    copy_plan = CopyPlan.read(original, 3)
    first = store.begin(OWNER, copy_plan)
    chunks = list(chunks_of(original, copy_plan))
    first.write_chunk(*chunks[0])
    second = store.begin(OWNER, copy_plan)
    assert second.missing(100) == ((0, 1, 3), (1, 0, 3))
    for act in (lambda: first.write_chunk(*chunks[1]), first.finish):
        with pytest.raises(PeerError, match="taken over"):
            act()
    first.suspend()
    first.abort()
    for chunk in chunks[1:]:
        second.write_chunk(*chunk)
    second.finish()
    assert_replica(disk, 3, size_bytes=LARGE)


def test_a_newer_copy_removes_an_unfinished_older_one_but_none_that_is_being_received(
    tmp_path: Path, original: LocalStorage
) -> None:
    store = ReplicaStore(tmp_path)
    root = LocalStorage(tmp_path / "replicas" / OWNER)
    active = store.begin(OWNER, CopyPlan.read(original, 1))
    receive(store, original, 2)
    assert root.list("") == ["step=1", "step=1-unfinished", "step=2"]
    active.suspend()
    receive(store, original, 3)
    assert root.list("") == ["step=2", "step=3"]
    with pytest.raises(PeerError, match="taken over"):
        active.finish()
    store.close()


def test_owners_do_not_get_in_each_others_way(tmp_path: Path, original: LocalStorage) -> None:
    store = ReplicaStore(tmp_path)
    one = store.begin("a", CopyPlan.read(original, 1))
    receive(store, original, 2, source_host="b")
    assert store.source_hosts() == ["a", "b"]
    one.abort()
    assert store.retire("b", 3, run_id="run") == [2]
    assert LocalStorage(tmp_path / "replicas").list("b") == []


def test_a_damaged_replica_is_received_anew(tmp_path: Path, original: LocalStorage) -> None:
    store = ReplicaStore(tmp_path)
    receive(store, original, 1)
    root = LocalStorage(tmp_path / "replicas" / OWNER)
    quarantine(root, 1, "found bad")
    assert not receive(store, original, 1).is_held
    assert_replica(root, 1)
    file = file_in(tmp_path / "replicas" / OWNER / "step=1", "rank=2.slot.bin")
    os.truncate(file, 100)
    assert not receive(store, original, 1).is_held
    assert_replica(root, 1)
    flip(file)
    assert not receive(store, original, 1).is_held
    assert_replica(root, 1)


def test_another_save_replaces_an_older_one_of_its_step_but_not_one_of_this_session(tmp_path: Path) -> None:
    old, new = LocalStorage(tmp_path / "old"), LocalStorage(tmp_path / "new")
    commit_step(old, 5, attempt_id="first")
    commit_step(new, 5, attempt_id="second")
    store = ReplicaStore(tmp_path / "here")
    receive(store, old, 5)
    assert not receive(store, new, 5).is_held
    root = LocalStorage(tmp_path / "here" / "replicas" / OWNER)
    assert read_manifest(root, "step=5").save_id == "second-5"
    with pytest.raises(ReplicaKept, match="first-5"):
        store.begin(OWNER, CopyPlan.read(old, 5), attempt_id="second")
    assert inspect(root, 5).condition is Condition.COMPLETE


def test_at_the_step_that_was_restored_only_the_sessions_own_save_of_it_is_turned_away(
    tmp_path: Path,
) -> None:
    """What stands there may be of a save that was abandoned; a repair brings the one that was restored."""
    saves = {name: LocalStorage(tmp_path / name) for name in ("abandoned", "restored", "now")}
    for name, storage in saves.items():
        commit_step(storage, 5, attempt_id=name)
    store = ReplicaStore(tmp_path / "here")
    store.spared_step = 5
    receive(store, saves["abandoned"], 5, attempt_id="now")
    assert not receive(store, saves["restored"], 5, attempt_id="now").is_held
    root = LocalStorage(tmp_path / "here" / "replicas" / OWNER)
    with pytest.raises(ReplicaKept, match="a copy of the save that was restored"):
        store.begin(OWNER, CopyPlan.read(saves["now"], 5), attempt_id="now")
    assert read_manifest(root, "step=5").save_id == "restored-5"


def test_retiring_spares_what_is_newer_read_or_received(tmp_path: Path, original: LocalStorage) -> None:
    store = ReplicaStore(tmp_path)
    for step in (1, 2):
        receive(store, original, step)
    root = LocalStorage(tmp_path / "replicas" / OWNER)
    replica_writer = store.begin(OWNER, CopyPlan.read(original, 3))
    with Lease(root, 1):
        assert store.retire(OWNER, 4, run_id="run") == [2]
    assert try_read_marker(root, 3) is not None
    assert store.retire(OWNER, 3, run_id="run") == [1]
    replica_writer.suspend()
    assert store.retire(OWNER, 4, run_id="run") == [3]
    assert root.list("") == []
    assert store.retire("nobody", 4, run_id="run") == []


def test_what_another_run_has_is_neither_retired_nor_replaced(tmp_path: Path) -> None:
    ours, theirs = LocalStorage(tmp_path / "ours"), LocalStorage(tmp_path / "theirs")
    for step in (1, 2):
        commit_step(ours, step)
        commit_step(theirs, step, attempt_id="another", run_id="another")
    store = ReplicaStore(tmp_path / "here")
    root = LocalStorage(tmp_path / "here" / "replicas" / OWNER)
    receive(store, ours, 1)
    receive(store, theirs, 2)
    with pytest.raises(ReplicaKept, match=r"of run 'another', offered was one of run 'run'"):
        store.begin(OWNER, CopyPlan.read(ours, 2), attempt_id="session")
    assert receive(store, theirs, 2).is_held
    assert store.retire(OWNER, 9, run_id="run") == [1]
    quarantine(root, 2, "found bad")
    assert store.retire(OWNER, 9, run_id="run") == []
    (root.root / "step=2" / MANIFEST).unlink()
    assert store.retire(OWNER, 9, run_id="another") == []  # nobody can tell any more
    put_marker(root, 2, Marker(state=MarkerState.WRITING))
    assert store.retire(OWNER, 9, run_id="run") == [2]  # unfinished, and so no run's


# --- what strangers might send --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../a", "/a", "a\0", "x" * 300, "%2e"])
def test_no_owner_leads_out_of_the_directory(name: str, tmp_path: Path, original: LocalStorage) -> None:
    assert not is_host_directory(name)
    with pytest.raises(PeerError, match="not the directory name"):
        ReplicaStore(tmp_path).begin(name, CopyPlan.read(original, 1))
    assert list(tmp_path.iterdir()) == []


def forged(change: Callable[[FileRecord], FileRecord]) -> CopyPlan:
    """A checkpoint with perfect digests, and files that are not what they should be."""
    storage = MemoryStorage()
    commit_step(storage, 1)
    manifest = read_manifest(storage, "step=1")
    index, _ = read_index(storage, folder_of(storage, 1), 0)
    changed: RankIndex = replace(index, files=tuple(change(record) for record in index.files))
    digest = write_index(storage, folder_of(storage, 1), changed)
    forgery: Manifest = replace(manifest, ranks={0: digest})
    write_manifest(storage, "step=1", forgery)
    return CopyPlan.read(storage, 1)


@pytest.mark.parametrize(
    "name",
    ["../slot.bin", "/etc/passwd", "a/../../b", "", "manifest.json", "rank=0.json", "rank=7.json/x",
     "a//b", "a/.", "a/b/c/d/e", "a\0b", "a\nb", "step=1 -unfinished", "x" * 300, 7, None],
)  # fmt: skip
def test_no_file_leads_out_of_its_checkpoint(name: object) -> None:
    with pytest.raises(CheckpointCorrupt, match=r"called|no name for data"):
        forged(lambda record: replace(record, name=name))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change",
    [
        {"size_bytes": -1}, {"size_bytes": 1 << 50}, {"size_bytes": "7"}, {"chunk_bytes": 0},
        {"chunk_bytes": 1 << 40}, {"digests": ()}, {"digests": ("a", "b")}, {"algorithm": "rot13"},
    ],
)  # fmt: skip
def test_sizes_and_digests_that_make_no_sense_are_refused(change: dict[str, object]) -> None:
    with pytest.raises((CheckpointCorrupt, ConfigError)):
        forged(lambda record: replace(record, **change))  # type: ignore[arg-type]


def test_manifest_and_indexes_must_fit_each_other(original: LocalStorage) -> None:
    good = CopyPlan.read(original, 1)
    other = CopyPlan.read(original, 2)
    flipped = bytearray(good.manifest_bytes)
    flipped[len(flipped) // 2] ^= 1
    with pytest.raises(CheckpointCorrupt, match="changed or cut"):
        CopyPlan.of(bytes(flipped), good.index_bytes, step=1)
    with pytest.raises(CheckpointCorrupt, match="not the index that was committed"):
        CopyPlan.of(good.manifest_bytes, other.index_bytes, step=1)
    with pytest.raises(CheckpointCorrupt, match="not those of the manifest"):
        CopyPlan.of(good.manifest_bytes, {2: good.index_bytes[2]}, step=1)
    with pytest.raises(CheckpointCorrupt, match="of step 1, expected 2"):
        CopyPlan.of(good.manifest_bytes, good.index_bytes, step=2)
    with pytest.raises(CheckpointCorrupt):
        CopyPlan.of(b"[" * 100_000, good.index_bytes, step=1)


def test_a_file_that_does_not_parse_is_named_where_it_is(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    commit_step(storage, 1)
    for name in (index_name(folder_of(storage, 1), 0), f"step=1/{MANIFEST}"):
        path = tmp_path / name
        path.write_bytes(b"[" * 100_000)
        with pytest.raises(CheckpointCorrupt) as corrupt:
            CopyPlan.read(storage, 1)
        assert str(corrupt.value).startswith(f"{path} is not a file of this format")


def test_an_unfinished_or_missing_step_has_no_blueprint(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    commit_step(storage, 1)
    with pytest.raises(CheckpointIncomplete):
        CopyPlan.read(storage, 2)
    (tmp_path / "step=1" / MANIFEST).rename(tmp_path / "kept")
    with pytest.raises(CheckpointIncomplete):
        CopyPlan.read(storage, 1)
    (tmp_path / "kept").rename(tmp_path / "step=1" / MANIFEST)
    storage.remove(index_name(folder_of(storage, 1), 0))
    with pytest.raises(CheckpointIncomplete):
        CopyPlan.read(storage, 1)


def test_a_copy_in_which_a_restore_found_a_bad_shard_is_received_again(
    tmp_path: Path, original: LocalStorage
) -> None:
    store = ReplicaStore(tmp_path)
    receive(store, original, 3)
    replica = tmp_path / "replicas" / OWNER / "step=3"
    (replica / "rank=2.corrupt").write_text("a bit flipped")
    assert not receive(store, original, 3).is_held
    assert not (replica / "rank=2.corrupt").exists()
    verify(LocalStorage(replica.parent), 3)


class OutOfDescriptors(LocalStorage):
    """For one file that is opened, counted from 0, no descriptor is left."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.opened = 0
        self.fails_at = -1

    def open(self, name: str) -> ReadableFile:
        self.opened += 1
        if self.opened - 1 == self.fails_at:
            raise read_failed(OSError(errno.EMFILE, "none left"), self.describe(name))
        return super().open(name)


def test_a_replica_is_not_replaced_because_a_descriptor_was_lacking_to_look_at_it(
    tmp_path: Path, original: LocalStorage
) -> None:
    storage = OutOfDescriptors(tmp_path / "replicas" / OWNER)
    store = ReplicaStore(tmp_path, open_storage=lambda source_host: storage)
    receive(store, original, 1)
    before = storage.opened
    assert receive(store, original, 1).is_held
    looks = storage.opened - before
    assert looks > 3
    for number in range(looks):
        storage.opened, storage.fails_at = 0, number
        with suppress(CheckpointWriteFailed):  # it cannot be told
            assert store.begin(OWNER, CopyPlan.read(original, 1)).is_held
        assert_replica(LocalStorage(storage.root), 1)
    store.close()


class FailsOnce(LocalStorage):
    """The first sync of a shard file fails, as the kernel tells of lost writes once."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.failed = False

    def create(self, name: str, size_bytes: int = 0) -> WritableFile:
        file = super().create(name, size_bytes)
        if name.endswith("slot.bin"):
            sync = file.sync

            def fail_once() -> None:
                if not self.failed:
                    self.failed = True
                    raise CheckpointWriteFailed("sync: input/output error")
                sync()

            file.sync = fail_once  # type: ignore[method-assign]
        return file


def test_writes_that_were_lost_are_not_forgotten_by_the_next_connection(
    tmp_path: Path, original: LocalStorage
) -> None:
    storage = FailsOnce(tmp_path)
    store = ReplicaStore(tmp_path, open_storage=lambda source_host: storage)
    copy_plan = CopyPlan.read(original, 3)
    replica_writer = store.begin(OWNER, copy_plan)
    chunks = list(chunks_of(original, copy_plan))
    first_file = [chunk for chunk in chunks if chunk[0] == chunks[0][0]]
    for chunk in first_file[:-1]:
        replica_writer.write_chunk(*chunk)
    with pytest.raises(CheckpointWriteFailed, match="input/output error"):
        replica_writer.write_chunk(*first_file[-1])  # with the last one the file is synced
    replica_writer.suspend()  # the connection broke before it could tell
    again = store.begin(OWNER, copy_plan)
    assert sum(end - first for _, first, end in again.missing(1000)) == sum(
        len(record.digests) for record in copy_plan.files
    )
    store.close()


def test_a_copy_for_whose_manifest_there_is_no_room_gives_all_its_space_back(
    tmp_path: Path, original: LocalStorage
) -> None:
    class Full(LocalStorage):
        def create(self, name: str, size_bytes: int = 0) -> WritableFile:
            if name.endswith(MANIFEST):
                raise CheckpointWriteFailed("no space left on device")
            return super().create(name, size_bytes)

    root = tmp_path / "replicas" / OWNER
    store = ReplicaStore(tmp_path, open_storage=lambda source_host: Full(root))
    copy_plan = CopyPlan.read(original, 3)
    replica_writer = store.begin(OWNER, copy_plan)
    for file, number, data in chunks_of(original, copy_plan):
        replica_writer.write_chunk(file, number, data)
    with pytest.raises(CheckpointWriteFailed, match="no space left"):
        replica_writer.finish()
    replica_writer.abort()
    assert not list(root.rglob("slot.bin"))


@numbers
def test_an_error_of_the_system_at_any_call_of_a_copy_is_named_and_the_next_one_arrives(
    tmp_path: Path, original: LocalStorage, number: int
) -> None:
    call, hit, failures = 0, True, 0
    while hit:
        root = tmp_path / str(call)
        store = ReplicaStore(root)
        receive(store, original, 1)
        with nothing_leaks(), SystemFault(root, number, call=call) as fault:
            try:
                receive(store, original, 2)
            except CheckpointError as error:
                errors = [error]
            else:
                errors = []
            store.close()
        assert all(error.fields.get("errno") == number for error in errors), (fault.calls[call], errors)
        failures += len(errors)
        hit, call = fault.hit, call + 1
        replicas = LocalStorage(root / "replicas" / OWNER)
        assert_replica(replicas, 1)
        receive(store, original, 2)
        assert_replica(replicas, 2)
        store.close()
    assert failures > 10 or number == NO_THREAD
