# SPDX-License-Identifier: Apache-2.0
"""The contract of a storage, run against the real one and its twins alike."""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import random
import resource
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from resiliency.checkpoint.capture.job_memory import DEFAULT_ROOT
from resiliency.checkpoint.storage import memory_files
from resiliency.checkpoint.storage.interface import Storage, read_file, write_file
from resiliency.checkpoint.storage.memory import is_populated
from resiliency.checkpoint.storage.posix import LocalStorage, write_failed
from resiliency.errors import CheckpointCorrupt, CheckpointMissing, CheckpointWriteFailed, ResiliencyError
from resiliency.testing import warm
from resiliency.testing.storage import FaultyStorage, MemoryStorage, StorageFault, StorageFaultKind, Survival


@pytest.fixture(params=["local", "local through the cache", "memory", "faulty without a fault"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    builders: dict[str, Callable[[], Storage]] = {
        "local": lambda: LocalStorage(tmp_path / "a" / "b"),
        "local through the cache": lambda: LocalStorage(tmp_path, direct=False),
        "memory": MemoryStorage,
        "faulty without a fault": lambda: FaultyStorage(MemoryStorage()),
    }
    made = builders[request.param]()
    made.make_dir("")
    return made


def test_of_files_that_reserve_memory_at_once_none_gets_what_another_was_promised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The container has 5 MiB left, and two files of 3 MiB are created."""
    with tempfile.TemporaryDirectory(dir=DEFAULT_ROOT) as directory:
        others = [threading.Event(), threading.Event()]

        def left() -> Iterator[tuple[Path, int]]:
            others.pop().set()
            if others:  # the other one asks, too, before this one takes anything, if it may
                others[0].wait(0.5)
            yield Path("/pod"), (5 << 20) - sum(f.stat().st_blocks * 512 for f in Path(directory).iterdir())

        monkeypatch.setattr(memory_files, "memory_left", left)
        storage = LocalStorage(Path(directory))

        def create(name: str) -> ResiliencyError | None:
            try:
                storage.create(name, 3 << 20).close()
            except CheckpointWriteFailed as error:
                return error
            return None

        with ThreadPoolExecutor(2) as threads:
            refused = [error for error in threads.map(create, "ab") if error is not None]
        assert (
            "is memory: 3.0 MiB more are needed there, the memory limit of the container (/pod) leaves 2.0"
            in (str(*refused))
        )
        assert refused[0].fields["errno"] == errno.ENOSPC
        assert {file.stat().st_size for file in Path(directory).iterdir()} == {0, 3 << 20}


def test_a_file_on_a_disk_asks_for_no_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory_files, "memory_left", lambda: [(Path("/pod"), 0)])
    monkeypatch.setattr(memory_files, "is_in_memory", lambda device: False)
    LocalStorage(tmp_path).create("a", 3 << 20).close()


def test_what_was_written_is_read(storage: Storage) -> None:
    storage.make_dir("x/y")
    write_file(storage, "x/y/f", b"abc")
    assert read_file(storage, "x/y/f") == b"abc"
    assert storage.list("x") == ["y"]
    assert storage.list("x/y") == ["f"]


def test_pieces_may_come_in_any_order_and_gaps_read_as_zeros(storage: Storage) -> None:
    file = storage.create("f")
    file.write_at(10, b"end")
    file.write_at(0, b"start")
    file.sync()
    file.close()
    assert read_file(storage, "f") == b"start" + bytes(5) + b"end"


@pytest.mark.parametrize("sizes", [(4096, 8192), (4096, 0, 4096), (5, 4096, 7), (3,) * 2000, ()])
def test_buffers_of_one_call_follow_each_other(storage: Storage, sizes: tuple[int, ...]) -> None:
    memory = memoryview(mmap.mmap(-1, 1 << 16))
    memory[:] = random.Random(1).randbytes(1 << 16)  # noqa: S311
    ends = list(itertools.accumulate(sizes))
    parts = [memory[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    file = storage.create("f")
    file.write_at(4096, *parts)
    file.sync()
    file.close()
    assert read_file(storage, "f")[4096:] == memory[: sum(sizes)]


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 3 * 4096 + 7])
def test_aligned_and_odd_pieces_of_one_file_read_back_the_same(storage: Storage, size: int) -> None:
    content = random.Random(size).randbytes(size)  # noqa: S311
    memory = memoryview(mmap.mmap(-1, 5 * 4096))
    memory[:size] = content
    whole = size - size % 4096
    file = storage.create("f")
    file.write_at(0, memory[:whole])
    file.write_at(whole, memory[whole:size])
    file.sync()
    file.close()
    reader = storage.open("f")
    assert reader.size_bytes == size
    target = memoryview(mmap.mmap(-1, 5 * 4096))
    assert reader.read_into(0, target) == size
    assert target[:size] == content
    assert reader.read_into(size, target) == 0
    parts = [memoryview(bytearray(length)) for length in (3, 0, 4097, 5 * 4096)]
    assert reader.read_into(0, *parts) == size
    assert b"".join(parts)[:size] == content
    reader.close()


def test_creating_a_file_again_replaces_it(storage: Storage) -> None:
    write_file(storage, "f", b"long content")
    write_file(storage, "f", b"new")
    assert read_file(storage, "f") == b"new"


def test_absence_is_no_error_except_for_reading(storage: Storage) -> None:
    storage.remove("none")
    storage.remove_tree("none")
    assert storage.list("none") == []
    assert not storage.exists("none")
    with pytest.raises(CheckpointMissing, match="none"):
        storage.open("none/at/all")


def test_a_file_needs_its_directory(storage: Storage) -> None:
    with pytest.raises(CheckpointWriteFailed, match="ENOENT"):
        storage.create("none/f")


def test_making_a_directory_twice_keeps_what_is_in_it(storage: Storage) -> None:
    storage.make_dir("d")
    write_file(storage, "d/f", b"1")
    storage.make_dir("d")
    assert storage.list("d") == ["f"]


def test_replace_link_and_remove(storage: Storage) -> None:
    write_file(storage, "a", b"a")
    write_file(storage, "b", b"b")
    storage.replace("a", "b")
    assert storage.list("") == ["b"]
    storage.link("b", "c")
    storage.remove("b")
    assert read_file(storage, "c") == b"a"
    storage.make_dir("d/e")
    write_file(storage, "d/e/f", b"1")
    storage.remove_tree("d")
    assert storage.list("") == ["c"]


@pytest.mark.parametrize("name", ["/etc/passwd", "../f", "d/../../f"])
def test_names_cannot_leave_the_root(tmp_path: Path, name: str) -> None:
    with pytest.raises(ResiliencyError, match="relative"):
        LocalStorage(tmp_path).create(name)


@pytest.mark.parametrize(
    ("number", "hint"),
    [
        (errno.ENOSPC, "free space"),
        (errno.EDQUOT, "quota"),
        (errno.EROFS, "read-only"),
        (errno.EIO, "dmesg"),
        (errno.EFBIG, "ulimit -f"),
        (errno.ENOTSUP, "Older checkpoints"),
    ],
)
def test_an_error_of_the_system_names_path_cause_and_remedy(number: int, hint: str) -> None:
    error = write_failed(OSError(number, "x"), "write", "/ckpt/f")
    assert "/ckpt/f" in str(error)
    assert errno.errorcode[number] in str(error)
    assert hint in str(error)
    assert error.fields["errno"] == number


def test_a_limit_on_the_file_size_is_a_named_error(tmp_path: Path) -> None:
    script = (
        "import resource, sys\n"
        "from resiliency.checkpoint.storage.interface import write_file\n"
        "from resiliency.checkpoint.storage.posix import LocalStorage\n"
        "from resiliency.errors import CheckpointWriteFailed\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))\n"
        "try:\n"
        "    write_file(LocalStorage(sys.argv[1]), 'f', bytes(100_000))\n"
        "except CheckpointWriteFailed as error:\n"
        "    print(error)\n"
    )
    done = warm.run([sys.executable, "-c", script, str(tmp_path)], timeout=60, check=True)
    assert "EFBIG" in done.stdout
    assert "ulimit -f" in done.stdout


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_device_is_a_named_error() -> None:
    with pytest.raises(CheckpointWriteFailed, match="ENOSPC"):
        write_file(LocalStorage("/dev"), "full", b"x")


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    for number in range(20):
        write_file(storage, f"f{number}", b"x")
        read_file(storage, f"f{number}")
        storage.sync_dir("")
    assert len(os.listdir("/proc/self/fd")) == before
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 0


# --- the twin that crashes ---------------------------------------------------------------------


def test_bytes_survive_a_crash_only_after_sync_and_names_only_after_sync_dir() -> None:
    storage = MemoryStorage()
    write_file(storage, "synced", b"1")
    storage.create("not synced").write_at(0, b"2")
    storage.sync_dir("")
    write_file(storage, "nameless", b"3")
    after = storage.crash()
    assert after.list("") == ["not synced", "synced"]
    assert read_file(after, "synced") == b"1"
    assert read_file(after, "not synced") == b""


def test_a_removal_that_was_not_synced_is_undone_by_a_crash() -> None:
    storage = MemoryStorage()
    write_file(storage, "f", b"1")
    storage.sync_dir("")
    storage.remove("f")
    assert storage.crash().list("") == ["f"]
    storage.sync_dir("")
    assert storage.crash().list("") == []


def test_a_random_crash_tears_files_and_is_repeatable() -> None:
    storage = MemoryStorage()
    file = storage.create("f")
    storage.sync_dir("")
    file.write_at(0, b"x" * 2000)
    outcomes = {read_file(storage.crash(Survival.RANDOM, seed), "f") for seed in range(40)}
    assert b"" in outcomes
    assert b"x" * 2000 in outcomes or any(0 < set(o).__len__() < 3 for o in outcomes)
    assert any(b"x" in o and b"\0" in o for o in outcomes), "never torn"
    assert read_file(storage.crash(Survival.RANDOM, 3), "f") == read_file(
        storage.crash(Survival.RANDOM, 3), "f"
    )


def test_a_directory_that_cannot_be_listed_is_a_named_error_and_a_missing_one_is_empty(
    tmp_path: Path,
) -> None:
    storage = LocalStorage(tmp_path)
    assert storage.list("missing") == []
    with pytest.raises(CheckpointCorrupt, match="ENAMETOOLONG"):
        storage.list("x" * 300)


def test_a_name_that_cannot_be_looked_at_is_a_named_error_and_not_absent(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    write_file(storage, "file", b"content")
    assert not storage.exists("file/below")
    with pytest.raises(CheckpointCorrupt, match="ENAMETOOLONG"):
        storage.exists("x" * 300)


def test_a_small_file_is_opened_once_to_be_read(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    write_file(storage, "small", b"content")
    with closing(storage.open("small")) as file:
        assert file.read_into(0, memoryview(bytearray(file.size_bytes))) == 7
        links = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    assert links.count(str(tmp_path / "small")) == 1


def test_an_error_of_the_device_is_no_refusal_to_sync_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(number: int) -> Callable[[int], None]:
        def fsync(fd: int) -> None:
            raise OSError(number, os.strerror(number))

        return fsync

    monkeypatch.setattr(os, "fsync", fails(errno.EINVAL))  # a FUSE object store
    LocalStorage(tmp_path).sync_dir("")
    monkeypatch.setattr(os, "fsync", fails(errno.EIO))
    with pytest.raises(CheckpointWriteFailed, match="EIO"):
        LocalStorage(tmp_path).sync_dir("")


def test_a_fault_strikes_at_its_operation_and_not_before() -> None:
    storage = FaultyStorage(MemoryStorage(), StorageFault(operation=3, kind=StorageFaultKind.ERROR))
    write_file(storage, "a", b"x")  # create, write, sync
    with pytest.raises(CheckpointWriteFailed, match="EIO"):
        write_file(storage, "b", b"x")
    write_file(storage, "c", b"x")
    assert storage.list("") == ["a", "c"]


def test_a_bit_flip_changes_one_bit() -> None:
    storage = FaultyStorage(MemoryStorage(), StorageFault(operation=1, kind=StorageFaultKind.BIT_FLIP))
    write_file(storage, "a", bytes(9))
    assert sorted(read_file(storage, "a")) == [0] * 8 + [0x10]


def is_cached(path: Path) -> bool:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as memory:
        view = memoryview(memory)
        try:
            return is_populated(view)
        finally:
            view.release()


@pytest.mark.parametrize("kernel", ["this", "older"])
@pytest.mark.parametrize("is_warm", [False, True], ids=["cold", "warm"])
def test_a_large_read_leaves_the_page_cache_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel: str, is_warm: bool
) -> None:
    path = tmp_path / "f"
    path.write_bytes(bytes(range(256)) * 4096)
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if is_cached(path):
            pytest.skip("this file system has its files in memory alone")
        if is_warm:
            file.read()
    preadv = os.preadv

    def older(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        if flags & ~os.RWF_NOWAIT:
            raise OSError(errno.EOPNOTSUPP, "unknown flag")
        return preadv(fd, buffers, offset, flags)

    if kernel == "older":
        monkeypatch.setattr(os, "preadv", older)
    target = memoryview(bytearray(1 << 20))
    with closing(LocalStorage(tmp_path).open("f")) as reader:
        for _ in range(5):  # the kernel keeps pages that another core is at, whatever the advice
            assert reader.read_into(0, target[:-5], target[-5:]) == 1 << 20
            if is_cached(path) == is_warm:
                break
    assert is_cached(path) == is_warm
    assert target == path.read_bytes()


@pytest.mark.parametrize("lacking", ["flags", "advice"])
def test_a_large_read_needs_nothing_of_what_spares_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    (tmp_path / "f").write_bytes(bytes(1 << 20))
    preadv = os.preadv

    def lacks(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        if flags and lacking == "flags":  # as Python says that was built for an old C library
            raise NotImplementedError("preadv2: flags unavailable on this platform")
        if flags:
            raise (BlockingIOError if flags == 8 else OSError)(errno.EOPNOTSUPP, "unknown flag")
        return preadv(fd, buffers, offset)

    def no_advice(*_: int) -> None:
        raise OSError(errno.ENOSYS, "not of this kernel")

    monkeypatch.setattr(os, "preadv", lacks)
    monkeypatch.setattr(os, "posix_fadvise", no_advice)
    with closing(LocalStorage(tmp_path).open("f")) as reader:
        assert reader.read_into(0, memoryview(bytearray(1 << 20))) == 1 << 20
