# SPDX-License-Identifier: Apache-2.0
"""Damage of every kind is noticed by name; finding, hiding and deleting checkpoints is safe."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from resiliency.checkpoint.commit.commit import CheckpointFormat, open_save
from resiliency.checkpoint.format.catalog import (
    Condition,
    clean_unfinished,
    find_newest,
    inspect,
    list_checkpoints,
    prune,
    quarantine,
    remove_checkpoint,
    verify,
)
from resiliency.checkpoint.format.claim import StepClaim
from resiliency.checkpoint.format.dcp import DcpFormat
from resiliency.checkpoint.format.lease import Lease
from resiliency.checkpoint.format.local import LocalFormat
from resiliency.checkpoint.format.marker import Marker, MarkerState, put_marker
from resiliency.checkpoint.format.reader import CheckpointReader
from resiliency.checkpoint.state.layout import Shard
from resiliency.checkpoint.storage import checksums
from resiliency.checkpoint.storage.checksums import digest_function
from resiliency.checkpoint.storage.chunked_file import (
    FilePiece,
    Want,
    read_ranges,
    verify_file,
    write_shard_file,
)
from resiliency.checkpoint.storage.interface import Storage, read_file, write_file
from resiliency.checkpoint.storage.posix import LocalStorage
from resiliency.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointIncomplete,
    CheckpointMissing,
    CheckpointWriteFailed,
    ConfigError,
)
from resiliency.testing.counting_storage import CountingStorage
from resiliency.testing.storage import (
    FaultyStorage,
    LateStorage,
    MemoryStorage,
    StorageFault,
    StorageFaultKind,
    StorageKilled,
    StorageTrouble,
    TroubledStorage,
)
from tests.checkpoint.storage_builders import (
    assert_holds,
    folder_of,
    make_shard,
    read_shard,
    save,
    small_shard,
)

formats = pytest.mark.parametrize("format", [LocalFormat(), DcpFormat()], ids=lambda item: item.name)


class ManualClock:
    """Time that a test owns."""

    def __init__(self) -> None:
        self.time = datetime(2030, 1, 1, tzinfo=timezone.utc)

    def monotonic(self) -> float:
        return self.time.timestamp()

    def now(self) -> datetime:
        return self.time


def saved(format: CheckpointFormat[Shard], *steps: int) -> MemoryStorage:
    storage = MemoryStorage()
    for step in steps:
        save(storage, format, [small_shard(step)])
    return storage


def all_files(storage: Storage, directory: str = "step=2") -> list[str]:
    files = []
    for name in storage.list(directory):
        below = storage.list(f"{directory}/{name}")
        files += [f"{directory}/{name}/{leaf}" for leaf in below] or [f"{directory}/{name}"]
    return [name for name in files if not name.endswith("/unfinished")]  # the marker that was lifted


# --- damage -------------------------------------------------------------------------------------


def cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def torn(content: bytes) -> bytes:
    return content[: len(content) // 2] + bytes(len(content) - len(content) // 2)


def flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


def foreign(content: bytes) -> bytes:
    return b"GIF89a" + content


@formats
@pytest.mark.parametrize("damage", [cut, torn, flipped, foreign, None])
def test_damage_to_any_file_is_found_by_name(
    format: CheckpointFormat[Shard], damage: Callable[[bytes], bytes] | None
) -> None:
    names = all_files(saved(format, 2))
    assert len(names) >= 3
    for name in names:
        storage = saved(format, 1, 2)
        if damage is None:
            storage.remove(name)
        else:
            write_file(storage, name, damage(read_file(storage, name)))
        with pytest.raises((CheckpointCorrupt, CheckpointIncomplete)) as caught:
            verify(storage, 2)
        assert name in str(caught.value), name
        quarantine(storage, 2, str(caught.value))
        assert find_newest(storage).step == 1
        assert_holds(storage, small_shard(1))


@formats
def test_every_single_flipped_bit_is_found(format: CheckpointFormat[Shard]) -> None:
    storage = MemoryStorage()
    save(storage, format, [make_shard({"w": torch.arange(5)}, step=2)])
    for name in all_files(storage):
        content = read_file(storage, name)
        for position in range(0, len(content), max(1, len(content) // 60)):
            changed = bytearray(content)
            changed[position] ^= 1 << position % 8
            write_file(storage, name, changed)
            with pytest.raises((CheckpointCorrupt, CheckpointIncomplete, ConfigError, CheckpointError)):
                verify(storage, 2)
        write_file(storage, name, content)
    verify(storage, 2)


def test_a_flipped_bit_names_file_key_offset_and_both_digests(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    shard = make_shard({"a": torch.ones(10), "b": torch.ones(6 << 20)}, step=2)
    save(storage, DcpFormat(), [shard])
    path = tmp_path / folder_of(storage, 2) / "__0_0.distcp"
    with path.open("r+b") as file:
        file.seek(9 << 20)
        file.write(b"\xff")
    with pytest.raises(CheckpointCorrupt, match=r"__0_0\.distcp, bytes 8388608 to \d+ \(b\): ") as caught:
        read_shard(CheckpointReader(storage, 2), 0)
    fields = caught.value.fields
    assert (fields["key"], fields["offset"], fields["path"]) == ("b", 8 << 20, str(path))
    assert fields["expected"] != fields["found"]
    assert "a" not in str(fields["key"])


def test_an_index_of_another_save_is_refused() -> None:
    storage, other = saved(LocalFormat(), 2), MemoryStorage()
    save(other, LocalFormat(), [small_shard(2)], save_id="another")
    index = read_file(other, f"{folder_of(other, 2)}/rank=0.json")
    write_file(storage, f"{folder_of(storage, 2)}/rank=0.json", index)
    with pytest.raises(CheckpointCorrupt, match="not the index that was committed"):
        verify(storage, 2)


def test_a_renamed_checkpoint_is_refused(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    save(storage, LocalFormat(), [small_shard(2)])
    (tmp_path / "step=2").rename(tmp_path / "step=3")
    with pytest.raises(CheckpointCorrupt, match="holds step 2, expected 3"):
        verify(storage, 3)


def test_an_io_error_while_reading_a_checkpoint_passes_it_over() -> None:
    storage = saved(LocalFormat(), 1, 2)
    # The marker check comes first and finds nothing; the first read is the newest manifest.
    failing = FaultyStorage(storage, StorageFault(operation=0, kind=StorageFaultKind.ERROR), count_reads=True)
    assert find_newest(failing).step == 1


def test_an_io_error_at_any_read_of_a_restore_is_named() -> None:
    storage = saved(DcpFormat(), 2)
    count = FaultyStorage(storage, count_reads=True)
    read_shard(CheckpointReader(count, 2), 0)
    for operation in range(len(count.operations)):
        fault = StorageFault(operation=operation, kind=StorageFaultKind.ERROR)
        with pytest.raises(CheckpointCorrupt, match=r"cannot read memory:/step=2/.*: EIO"):
            read_shard(CheckpointReader(FaultyStorage(storage, fault, count_reads=True), 2), 0)


def test_a_bit_that_flips_between_disk_and_memory_is_found() -> None:
    storage = saved(LocalFormat(), 2)
    count = FaultyStorage(storage, count_reads=True)
    read_shard(CheckpointReader(count, 2), 0)
    for operation in range(len(count.operations)):
        fault = StorageFault(operation=operation, kind=StorageFaultKind.BIT_FLIP)
        with pytest.raises((CheckpointCorrupt, CheckpointIncomplete)):
            read_shard(CheckpointReader(FaultyStorage(storage, fault, count_reads=True), 2), 0)


@formats
def test_a_write_that_the_disk_lied_about_is_found(format: CheckpointFormat[Shard]) -> None:
    count = FaultyStorage(MemoryStorage())
    save(count, format, [small_shard(2)])
    writes = [n for n, name in enumerate(count.operations) if name.startswith("write step=2/")]
    for kind in (StorageFaultKind.BIT_FLIP, StorageFaultKind.SHORT_WRITE):
        for operation in writes:
            disk = MemoryStorage()
            faulty = FaultyStorage(disk, StorageFault(operation=operation, kind=kind))
            try:
                save(faulty, format, [small_shard(2)], timeout=timedelta(seconds=0.05))
            except CheckpointError:
                assert inspect(disk, 2).condition is Condition.UNFINISHED
                continue
            with pytest.raises((CheckpointCorrupt, CheckpointIncomplete)):
                verify(disk, 2)


def test_a_rank_that_is_not_there_is_named() -> None:
    with pytest.raises(CheckpointIncomplete, match="no shard of rank 7; it has those of 0"):
        read_shard(CheckpointReader(saved(LocalFormat(), 2), 2), 7)


def test_without_xxhash_new_files_use_crc32_and_foreign_checksums_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    storage = MemoryStorage()
    storage.make_dir("d")
    data = bytes(range(256)) * 100
    record = write_shard_file(storage, "d", "f", [FilePiece(0, data)], len(data), algorithm="crc32")
    assert verify_file(storage, record.inside("d")) == len(data)
    monkeypatch.setattr(checksums, "_ALGORITHMS", {"crc32": checksums._crc32})
    with pytest.raises(ConfigError, match=r"'xxh3_64'; this installation knows crc32.*xxhash"):
        digest_function("xxh3_64")


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("shift", [0, 1, 64, 4096])
def test_pieces_and_ranges_across_chunks_read_back_the_same(tmp_path: Path, threads: int, shift: int) -> None:
    storage = LocalStorage(tmp_path)
    storage.make_dir("d")
    content = bytes(torch.randint(0, 256, (100_000,), dtype=torch.uint8).tolist())
    pieces = [FilePiece(shift, content[:30_000]), FilePiece(shift + 40_000, content[40_000:])]
    size = shift + len(content) + 5
    record = write_shard_file(storage, "d", "f", pieces, size, threads=threads, chunk_bytes=8192)
    expected = bytes(shift) + content[:30_000] + bytes(10_000) + content[40_000:] + bytes(5)
    assert (tmp_path / "d" / "f").read_bytes() == expected
    record = record.inside("d")
    ranges = [(0, size), (5, 3), (8191, 2), (20_000, 50_000), (8192, 8192), (size - 1, 1)]
    targets = [bytearray(length) for _, length in ranges]
    wants = [Want(at, memoryview(into)) for (at, _), into in zip(ranges, targets, strict=True)]
    read_ranges(storage, record, wants, threads=threads)
    assert targets == [bytearray(expected[at : at + length]) for at, length in ranges]
    alone = bytearray(2)
    assert read_ranges(storage, record, [Want(8191, memoryview(alone))]) == 2 * 8192


def test_an_error_of_the_pace_ends_the_transfer(tmp_path: Path) -> None:
    def stop(count: int) -> None:
        raise InterruptedError(count)

    storage = LocalStorage(tmp_path)
    storage.make_dir("d")
    with pytest.raises(InterruptedError):
        write_shard_file(storage, "d", "f", [FilePiece(0, bytes(99))], 99, pace=stop)


# --- finding ------------------------------------------------------------------------------------


def test_the_newest_usable_checkpoint_is_found_among_all_kinds(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    for step in (1, 5, 9, 10, 11):
        save(storage, LocalFormat(), [small_shard(step)])
    put_marker(storage, 11, Marker(state=MarkerState.WRITING))
    (tmp_path / "step=10" / "manifest.json").unlink()
    (tmp_path / folder_of(storage, 9) / "rank=0.slot.bin").write_bytes(b"short")
    (tmp_path / "step=12").mkdir()
    (tmp_path / "step=13-unfinished").touch()
    (tmp_path / "step=x").mkdir()
    (tmp_path / "last").mkdir()
    assert [(item.step, item.condition) for item in list_checkpoints(storage)] == [
        (1, Condition.COMPLETE),
        (5, Condition.COMPLETE),
        (9, Condition.BAD),
        (10, Condition.BAD),
        (11, Condition.UNFINISHED),
        (12, Condition.UNFINISHED),
        (13, Condition.UNFINISHED),
    ]
    assert find_newest(storage).step == 5
    assert find_newest(storage, accept=lambda item: item.step < 5).step == 1


def test_a_stock_checkpoint_is_usable_but_not_called_complete(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="distributed is disabled"):
        dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "step=4", no_dist=True)
    found = find_newest(LocalStorage(tmp_path))
    assert (found.step, found.condition) == (4, Condition.STOCK)


def test_one_of_ours_that_lost_its_manifest_does_not_pass_for_a_stock_one() -> None:
    storage = saved(DcpFormat(), 4)
    storage.remove("step=4/manifest.json")
    assert inspect(storage, 4).condition is Condition.BAD


def test_nothing_usable_says_what_was_there_instead() -> None:
    storage = saved(LocalFormat(), 3)
    quarantine(storage, 3, "bytes differ")
    with pytest.raises(CheckpointMissing, match=r"step 3 \(unfinished: corrupt: bytes differ\)"):
        find_newest(storage)
    with pytest.raises(CheckpointMissing, match="it is empty or does not exist"):
        find_newest(MemoryStorage())


def test_a_marked_checkpoint_is_not_opened() -> None:
    storage = saved(LocalFormat(), 3)
    quarantine(storage, 3, "bytes differ")
    with pytest.raises(CheckpointIncomplete, match=r"found bad \(bytes differ\)"):
        CheckpointReader(storage, 3)


# --- deleting -----------------------------------------------------------------------------------


def test_pruning_keeps_the_last_good_ones_and_whatever_is_not_plainly_old() -> None:
    storage = saved(LocalFormat(), 1, 2, 3, 4, 5, 6)
    quarantine(storage, 6, "bad")
    write_file(storage, "step=5/manifest.json", b"junk")
    with Lease(storage, 2):
        assert prune(storage, keep_last=2, keep=[1]) == []
        assert prune(storage, keep_last=1, keep=[1]) == [3]
    assert prune(storage, keep_last=1) == [1, 2]
    assert [item.step for item in list_checkpoints(storage)] == [4, 5, 6]
    assert find_newest(storage).step == 4
    assert prune(storage, keep_last=1) == []


def test_pruning_reads_manifests_and_no_index() -> None:
    storage = FaultyStorage(saved(LocalFormat(), 1, 2, 3), count_reads=True)
    assert prune(storage, keep_last=2) == [1]
    read = {name for name in storage.operations if "unfinished" not in name and "marker" not in name}
    assert read == {f"read step={step}/manifest.json" for step in (1, 2, 3)}


def test_pruning_after_each_save_looks_at_what_is_new_and_what_goes_however_many_are_kept() -> None:
    def operations(kept: int) -> int:
        inner = saved(LocalFormat(), *range(1, kept + 1))
        known: dict[int, str] = {}
        assert prune(inner, keep_last=kept, known=known) == []
        save(inner, LocalFormat(), [small_shard(kept + 1)])
        storage = CountingStorage(inner)
        assert prune(storage, keep_last=kept, known=known) == [1]
        return storage.counts.total

    assert operations(3) == operations(30)


def test_what_is_known_is_looked_at_again_before_it_goes_and_forgotten_when_it_is_gone() -> None:
    known: dict[int, str] = {}
    storage = saved(LocalFormat(), 1, 2, 3, 4)
    assert prune(storage, keep_last=4, known=known) == []
    storage.remove(f"{folder_of(storage, 1)}/rank=0.json")
    quarantine(storage, 4, "bad")
    assert prune(storage, keep_last=1, known=known) == [2]
    save(storage, LocalFormat(), [small_shard(5)])
    assert prune(storage, keep_last=2, known=known) == []
    assert sorted(known) == [1, 3, 5]


def test_a_checkpoint_that_lacks_an_index_counts_for_none_and_stays() -> None:
    storage = saved(LocalFormat(), 1, 2, 3)
    storage.remove(f"{folder_of(storage, 2)}/rank=0.json")
    assert prune(storage, keep_last=2) == []


def test_a_removal_that_failed_is_tried_again_and_keeps_no_other_from_being_done() -> None:
    storage = saved(LocalFormat(), 1, 2, 3, 4)
    troubled = TroubledStorage(storage, StorageTrouble(step=1, operation="remove_tree"))
    with pytest.raises(CheckpointWriteFailed, match="step=1"):
        prune(troubled, keep_last=2)
    assert storage.list("") == ["step=1", "step=1-unfinished", "step=3", "step=4"]
    assert prune(troubled, keep_last=2) == [1]
    assert storage.list("") == ["step=3", "step=4"]


def test_a_marker_that_another_removal_takes_in_the_same_moment_is_gone_and_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    storage = saved(LocalFormat(), 1)
    claim = StepClaim.for_removal(storage, 1)
    claim.take()
    claim.mark(Marker(state=MarkerState.REMOVING))
    replace = storage.replace

    def late(source: str, target: str) -> None:
        storage.remove(source)
        replace(source, target)

    monkeypatch.setattr(storage, "replace", late)
    assert not claim.try_lift(lambda marker: True)


def test_the_last_good_checkpoint_cannot_be_asked_away() -> None:
    with pytest.raises(ConfigError, match="at least 1, found 0"):
        prune(saved(LocalFormat(), 1), keep_last=0)


def test_a_lease_ends_by_itself() -> None:
    clock = ManualClock()
    storage = saved(LocalFormat(), 1)
    Lease(storage, 1, lasts=timedelta(minutes=5), clock=clock)
    clock.time += timedelta(minutes=5, seconds=30)
    assert not remove_checkpoint(storage, 1, clock=clock), "hosts' clocks may differ by a minute"
    clock.time += timedelta(minutes=1)
    assert remove_checkpoint(storage, 1, clock=clock)
    assert storage.list("") == []


def test_a_lease_on_a_checkpoint_that_is_being_removed_is_refused() -> None:
    storage = saved(LocalFormat(), 1)
    put_marker(storage, 1, Marker(state=MarkerState.REMOVING))
    with pytest.raises(CheckpointIncomplete, match="marked as unfinished"):
        Lease(storage, 1)
    assert storage.list("") == ["step=1", "step=1-unfinished"]


@formats
def test_a_removal_cut_at_any_operation_shows_the_checkpoint_whole_or_not_at_all(
    format: CheckpointFormat[Shard],
) -> None:
    count = FaultyStorage(saved(format, 1, 2))
    remove_checkpoint(count, 1)
    for operation in range(len(count.operations)):
        disk = saved(format, 1, 2)
        fault = StorageFault(operation=operation, kind=StorageFaultKind.TORN_KILL)
        with pytest.raises(StorageKilled):
            remove_checkpoint(FaultyStorage(disk, fault), 1)
        after = disk.crash()
        if inspect(after, 1).is_usable:
            assert_holds(after, small_shard(1))
        else:
            assert inspect(after, 1).condition is Condition.UNFINISHED or not after.exists("step=1")
        clean_unfinished(after, run_id="run")
        assert find_newest(after).step == 2
        assert [item.condition for item in list_checkpoints(after)] in (
            [Condition.COMPLETE],
            [Condition.COMPLETE] * 2,
        )


def test_cleaning_removes_unfinished_saves_but_not_what_people_should_look_at() -> None:
    storage = saved(LocalFormat(), 1, 2, 3)
    quarantine(storage, 1, "bad")
    put_marker(storage, 2, Marker(state=MarkerState.FAILED, run_id="run"))
    for step in (8, 9):
        put_marker(storage, step, Marker(state=MarkerState.WRITING, run_id="run"))
    assert clean_unfinished(storage, run_id="run", keep=[9]) == [2, 8]
    assert storage.list("") == ["step=1", "step=1-unfinished", "step=3", "step=9-unfinished"]


def test_cleaning_leaves_what_another_run_may_be_writing_and_what_no_marker_names_the_run_of() -> None:
    clock = ManualClock()
    storage = MemoryStorage()
    until = int((clock.now() + timedelta(minutes=10)).timestamp())
    for step, run_id in ((1, "other"), (2, "run"), (3, "")):
        open_save(storage, step, f"start-{step}", run_id=run_id, until=until)
    assert clean_unfinished(storage, run_id="run", clock=clock) == [2]
    clock.time += timedelta(minutes=12)
    assert clean_unfinished(storage, run_id="run", clock=clock) == [1], "it has ended in any case"
    assert storage.list("") == ["step=3", "step=3-unfinished"]


def test_leftovers_of_a_killed_save_are_freed_where_the_disk_takes_nothing_before_that() -> None:
    disk = MemoryStorage()
    claim = open_save(disk, 2, "dead", 1, run_id="run")
    write_file(disk, f"{claim.place}/large", bytes(1000))
    full = StorageTrouble(step=2, operation="make_dir", errno=errno.ENOSPC)
    assert clean_unfinished(TroubledStorage(disk, full), run_id="run") == [2]
    assert disk.list("") == []


def test_a_late_quarantine_hides_no_checkpoint_of_another_save() -> None:
    disk = MemoryStorage()
    first = small_shard(2, seed=1)
    save(disk, LocalFormat(), [first], save_id="first")
    late = LateStorage(disk, 2)
    thread = threading.Thread(target=quarantine, args=(late, 2, "bytes differ"))
    thread.start()
    assert late.hangs.wait(60)
    remove_checkpoint(disk, 2)
    save(disk, LocalFormat(), [small_shard(2, seed=2)], save_id="second")
    late.answers.set()
    thread.join(60)
    assert inspect(disk, 2).condition is Condition.COMPLETE
    assert clean_unfinished(disk, run_id="run") == []
    assert disk.list("") == ["step=2"]
