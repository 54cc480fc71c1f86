# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import errno
import gc
import os
import re
import shutil
import sys
import weakref
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from resiliency.checkpoint import (
    Capturer,
    RankArena,
    StateWalker,
    clean_up,
    job_directory,
    materialize,
    open_captured,
)
from resiliency.checkpoint.capture.arena import free_others, peek, rank_directory, ranks_in, try_open_slot
from resiliency.checkpoint.capture.job_memory import (
    OWNER_LOCK,
    hold_job,
    remove_if_dead,
    remove_when_dead,
)
from resiliency.checkpoint.capture.limits import check_room, is_leaving, rooms
from resiliency.checkpoint.locks import FileLock
from resiliency.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointMissing,
    ConfigError,
)
from resiliency.testing import warm
from resiliency.testing.processes import Command
from tests.checkpoint.capture_builders import SOON, save
from tests.checkpoint.capturing_until_killed import TENSORS, state_of
from tests.waiting import wait_until

LAYOUT = StateWalker().snapshot({"w": torch.ones(100)}).layout


@contextmanager
def trainer(directory: Path, piece: object) -> Iterator[None]:
    """A process that stands still at `piece` of its second capture; killed with SIGKILL at the end."""
    argv = [sys.executable, "-m", "tests.checkpoint.capturing_until_killed", str(directory), str(piece)]
    with Command(argv) as process:
        process.wait_for_line("^here$", timeout=60)
        yield


@pytest.mark.parametrize("piece", [0, TENSORS - 1, "published"])
def test_a_kill_while_capturing_leaves_the_other_slot_whole(piece: object, tmp_path: Path) -> None:
    directory = job_directory("job", tmp_path)
    with trainer(directory, piece):
        opened = [try_open_slot(path) for path in rank_directory(directory, 0).glob("slot-*")]
        whole = [slot for slot in opened if slot is not None]
        assert [slot.shard.step for slot in whole] == [1] or piece == "published"
        for slot in whole:
            slot.close()
    step = 2 if piece == "published" else 1
    with open_captured(directory, 0) as slot:
        found = materialize(slot.shard)
        assert (slot.shard.step, slot.shard.rank, slot.shard.run_id) == (step, 0, "first")
    expected = state_of(step)
    assert found.pop("step") == expected.pop("step")
    assert all(torch.equal(found[key], expected[key]) for key in expected)  # type: ignore[arg-type]

    # The next process of the rank takes over, keeps the whole capture and reuses the memory.
    files = sorted(rank_directory(directory, 0).glob("slot-*"))
    inodes = [file.stat().st_ino for file in files]
    with RankArena(directory, rank=0) as arena, Capturer(arena) as capturer:
        with arena.captured() as shard:
            assert (shard.step, materialize(shard)["step"]) == (step, step)
        with pytest.raises(CheckpointMissing, match="at step 7"), arena.captured(7):
            pass
        capture = capturer.begin(state_of(3), 3)
        assert capture is not None
        assert capture.wait(SOON)
        assert [h.step for _, h in peek(directory, 0)] == [3, step]
    assert [file.stat().st_ino for file in files] == inodes


def capture(arena: RankArena, step: int) -> None:
    slot = arena.try_take()
    assert slot is not None
    arena.begin(slot, LAYOUT, b"", step)
    arena.publish(slot, b"")


def open_files(path: Path) -> int:
    """How often this process has a file open."""
    found = 0
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found += os.readlink(fd) == str(path)
    return found


def test_ranks_that_run_elsewhere_lose_their_captures_up_to_a_step_unless_they_live(tmp_path: Path) -> None:
    directory = job_directory("job", tmp_path)
    for rank, step in enumerate((7, 8, 9)):
        with RankArena(directory, rank=rank) as arena:
            capture(arena, step)
    with RankArena(directory, rank=3) as living:
        capture(living, 1)
        free_others(directory, [0], step=8)
        assert ranks_in(directory) == [0, 2, 3]
        assert [header.step for _, header in peek(directory, 3)] == [1]
    # Another rank may take the number again.
    with RankArena(directory, rank=1) as again:
        capture(again, 10)
    assert [header.step for _, header in peek(directory, 1)] == [10]


def test_a_rank_that_waits_for_a_directory_which_is_removed_makes_a_new_one(tmp_path: Path) -> None:
    directory = job_directory("job", tmp_path)
    with RankArena(directory, rank=0) as arena:
        capture(arena, 1)
    where = rank_directory(directory, 0)
    (where / OWNER_LOCK).write_text(str(2**22 + 1))  # of a dead process: no number is as large
    removing = FileLock(where / OWNER_LOCK)
    assert removing.try_lock(exclusive=True)
    with futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(RankArena, directory, rank=0)
        wait_until(lambda: open_files(removing.path) >= 2, "it does not wait for the lock")
        where.rename(tmp_path / "aside")
        removing.close()
        with waiting.result(60) as arena:
            capture(arena, 2)
            assert [header.step for _, header in peek(directory, 0)] == [2]


def test_clean_up_removes_what_the_dead_left_and_nothing_of_the_living(tmp_path: Path) -> None:
    dead, living, held = (job_directory(name, tmp_path) for name in ("dead", "living", "held"))
    foreign = tmp_path / "resiliency-notes.txt"
    foreign.write_text("mine")
    with trainer(dead, "published"):
        pass
    save({"w": torch.ones(3)}, held)
    agent = hold_job(held)
    with trainer(living, 0):
        assert clean_up(tmp_path) == []  # too young: a restart may be on its way
        assert clean_up(tmp_path, idle=timedelta(0), keep=dead) == []
        assert clean_up(tmp_path, idle=timedelta(0)) == [dead]
        with open_captured(living, 0) as slot:
            assert slot.shard.step == 1
    assert held.exists()
    agent.close()
    assert clean_up(tmp_path, idle=timedelta(0)) == sorted([held, living])
    assert list(tmp_path.iterdir()) == [foreign]


def test_a_rank_has_one_living_owner(tmp_path: Path) -> None:
    directory = job_directory("job", tmp_path)
    with RankArena(directory, rank=0):
        with pytest.raises(ConfigError, match=rf"owned by a living process \(pid {os.getpid()}\)"):
            RankArena(directory, rank=0)
        with RankArena(directory, rank=1):
            pass
    with RankArena(directory, rank=0):
        assert not remove_if_dead(directory)


DYING = """
import ctypes, os, pathlib, platform, sys, threading
from resiliency.checkpoint.capture.arena import RankArena
arena = RankArena(pathlib.Path(sys.argv[1]), rank=0)
threading.Thread(target=lambda: (open(sys.argv[2]).read(), os._exit(0))).start()
print("dying", flush=True)
# The main thread alone: the process is a zombie by all signs, and its files stay open until the other ends.
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)
"""


@pytest.mark.parametrize("successor", ["trainer", "cleaner"])
def test_a_predecessor_that_is_still_dying_is_waited_for(tmp_path: Path, successor: str) -> None:
    directory = job_directory("job", tmp_path)
    lifeline = tmp_path / "lifeline"
    os.mkfifo(lifeline)

    def succeed() -> bool:
        if successor == "cleaner":
            return remove_when_dead(directory)
        RankArena(directory, rank=0).close(remove=True)
        return True

    argv = [sys.executable, "-c", DYING, str(directory), str(lifeline)]
    with Command(argv) as dying:
        dying.wait_for_line("^dying$", timeout=60)
        wait_until(lambda: is_leaving(dying.pid), "it does not die")
        with futures.ThreadPoolExecutor(1) as pool:
            with lifeline.open("wb"):
                done = pool.submit(succeed)
                assert not futures.wait([done], timeout=0.2).done
            assert done.result(60)
    assert list(tmp_path.iterdir()) == [lifeline]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_worker_that_outlives_its_trainer_does_not_keep_the_locks(tmp_path: Path) -> None:
    directory = job_directory("job", tmp_path)
    (told, tell), (go, end) = os.pipe(), os.pipe()
    if (child := os.fork()) == 0:
        arena = RankArena(directory, rank=0)
        slot = arena.try_take()
        assert slot is not None
        arena.begin(slot, LAYOUT, b"", 1)
        if os.fork():
            os.read(told, 1)
            os._exit(0)  # the trainer dies while capturing
        os.close(end)
        os.write(tell, b"1")
        os.read(go, 1)  # the worker stays
        os._exit(0)
    os.close(go)
    os.waitpid(child, 0)
    try:
        with RankArena(directory, rank=0) as arena:
            assert all(slot.try_take() for slot in arena.slots)
        assert remove_if_dead(directory)
    finally:
        for fd in (end, told, tell):
            os.close(fd)


def test_a_normal_end_leaves_nothing(tmp_path: Path) -> None:
    directory = job_directory("job", tmp_path)
    arenas = [RankArena(directory, rank=rank) for rank in range(2)]
    for arena in arenas:
        with Capturer(arena) as capturer:
            capturer.begin({"w": torch.ones(5)}, 1)
        arena.close(remove=True)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(CheckpointMissing, match=r"no capture of rank 0; steps found in .*: none"):
        open_captured(directory, 0)


def test_an_asked_step_that_is_not_in_memory_is_named_with_those_that_are(tmp_path: Path) -> None:
    directory = job_directory("job", tmp_path)
    save({"w": torch.ones(5)}, directory, step=4)
    save({"w": torch.ones(5)}, directory, step=6)
    with open_captured(directory, 0, step=4) as slot:
        assert slot.shard.step == 4
    with pytest.raises(CheckpointMissing, match=r"at step 5; steps found in .*: 6, 4"):
        open_captured(directory, 0, step=5)


def test_a_capture_whose_layout_is_gone_is_passed_over_for_an_older_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = job_directory("job", tmp_path)
    save({"w": torch.ones(5)}, directory, step=1)
    save({"w": torch.ones(6)}, directory, step=2)
    newest = peek(directory, 0)[0][1]
    (rank_directory(directory, 0) / f"layout-{newest.fingerprint}.json").unlink()
    with open_captured(directory, 0) as slot:
        assert slot.shard.step == 1
    assert "step 2 of rank 0 skipped" in caplog.text


def test_captures_of_one_layout_share_it_and_an_altered_layout_is_seen(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = job_directory("job", tmp_path)
    save({"w": torch.ones(5)}, directory, step=1)
    save({"w": torch.zeros(5)}, directory, step=2)
    with open_captured(directory, 0, step=1) as older, open_captured(directory, 0, step=2) as newer:
        assert older.shard.layout is newer.shard.layout
    (layout,) = rank_directory(directory, 0).glob("layout-*.json")
    layout.write_text(layout.read_text().replace('"w"', '"v"'))
    with pytest.raises(CheckpointMissing):
        open_captured(directory, 0)
    assert "state layout was altered" in caplog.text


def test_a_capture_whose_memory_is_deleted_meanwhile_fails_by_name_and_later_ones_have_new_memory(
    tmp_path: Path,
) -> None:
    with RankArena(job_directory("job", tmp_path), rank=0) as arena:
        slot = arena.try_take()
        assert slot is not None
        arena.begin(slot, LAYOUT, b"", 1)
        shutil.rmtree(arena.directory)
        with pytest.raises(CheckpointError, match=r"deleted under this process.*RemoveIPC"):
            arena.publish(slot, b"")
        arena.abandon(slot)
        with Capturer(arena) as capturer:
            for step in (2, 3):
                capture = capturer.begin({"w": torch.full((100,), step)}, step, keep=True)
                assert capture is not None
                assert capture.wait(SOON)
                with open_captured(arena.directory, 0) as found:
                    assert materialize(found.shard)["w"][0] == found.header.step == step  # type: ignore[index]
                shutil.rmtree(arena.directory)
            capture.release()


def test_a_torn_header_is_no_capture(tmp_path: Path) -> None:
    directory = job_directory("job", tmp_path)
    save({"w": torch.ones(5)}, directory)
    ((path, _),) = peek(directory, 0)
    with path.open("r+b") as file:
        file.seek(20)
        file.write(b"\xff")
    assert try_open_slot(path) is None


def test_a_slot_that_was_cut_short_or_fails_is_no_capture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = job_directory("job", tmp_path)
    save({"w": torch.ones(5000)}, directory)
    ((path, _),) = peek(directory, 0)

    def fails(*_: object) -> int:
        raise OSError(errno.EIO, "memory that the machine found bad")

    with open_captured(directory, 0) as slot:
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", fails)
            with pytest.raises(CheckpointCorrupt, match="EIO"):
                materialize(slot.shard)
        os.truncate(path, 5000)
        with pytest.raises(CheckpointCorrupt, match="ends at byte 5000"):
            materialize(slot.shard)
    assert try_open_slot(path) is None
    with pytest.raises(CheckpointMissing):
        open_captured(directory, 0)


def test_a_reader_that_closed_its_slot_keeps_no_memory_until_garbage_is_collected(tmp_path: Path) -> None:
    directory = job_directory("job", tmp_path)
    save({"w": torch.ones(5000)}, directory)
    gc.disable()
    try:
        with open_captured(directory, 0) as slot:
            materialize(slot.shard)
        shard = weakref.ref(slot.shard)
        del slot
        assert shard() is None
        assert str(directory) not in Path("/proc/self/maps").read_text()
    finally:
        gc.enable()


def test_running_out_of_shared_memory_is_an_error_that_says_what_to_set(tmp_path: Path) -> None:
    # A limit on file sizes is the one that a test can lower without being root.
    program = (
        "import resource, sys, torch, pathlib\n"
        "from resiliency.checkpoint import Capturer, RankArena\n"
        "from resiliency.checkpoint.capture.arena import peek\n"
        "arena = RankArena(pathlib.Path(sys.argv[1]), rank=0)\n"
        "capturer = Capturer(arena)\n"
        "for step in (1, 2):\n"
        "    capturer.begin({'w': torch.zeros(4)}, step)\n"
        "capturer.fence()\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))\n"
        "try:\n"
        "    capturer.begin({'w': torch.zeros(1 << 20)}, 3)\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, error)\n"
        "print([h.step for _, h in peek(arena.directory, 0)])\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))\n"
        "assert capturer.begin({'w': torch.zeros(1 << 20)}, 4) is not None\n"
        "capturer.close()\n"
    )
    directory = job_directory("job", tmp_path)
    command = [sys.executable, "-c", program, str(directory)]
    output = warm.run(command, check=True, timeout=60).stdout
    assert re.search(r"ConfigError .*8\.0 MiB more.*ulimit -f.* leaves 1\.0 MiB.*Raise it", output), output
    assert "[2, 1]" in output
    with open_captured(directory, 0) as slot:
        assert slot.shard.step == 4


def test_a_slot_more_than_a_rank_wants_goes_with_its_next_capture_and_serves_a_restore_until_then(
    tmp_path: Path,
) -> None:
    directory = job_directory("job", tmp_path)
    with RankArena(directory, rank=0, slots=3) as arena:
        for step in (1, 2, 3):
            capture(arena, step)
    with RankArena(directory, rank=0, slots=2) as arena:
        with arena.captured() as shard:
            assert shard.step == 3
        capture(arena, 4)
        assert [(path.name, header.step) for path, header in peek(directory, 0)] == [
            ("slot-0", 4),
            ("slot-1", 2),
        ]
        assert sorted(path.name for path in rank_directory(directory, 0).glob("slot-*")) == [
            "slot-0",
            "slot-1",
        ]


def test_a_rank_with_one_slot_captures_over_a_capture_that_nobody_needs_any_more(tmp_path: Path) -> None:
    directory = job_directory("job", tmp_path)
    with RankArena(directory, rank=0, slots=1) as arena:
        slot = arena.try_take()
        assert slot is not None
        arena.begin(slot, LAYOUT, b"", 1)
        arena.publish(slot, b"", lend=True)
        assert arena.try_take() is None  # still being written
        arena.end_lend(slot)
        with open_captured(directory, 0):
            assert arena.try_take() is None  # a reader has it
        assert [header.step for _, header in peek(directory, 0)] == [1]
        capture(arena, 2)
        assert [header.step for _, header in peek(directory, 0)] == [2]


def test_ranks_that_ask_for_memory_at_once_are_refused_what_only_one_of_them_could_have(
    tmp_path: Path,
) -> None:
    directory = job_directory("job", tmp_path)
    half = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize // 4 // 2**20 * 2**20  # two slots
    with RankArena(directory, rank=0) as first, RankArena(directory, rank=1) as second:
        assert next(first.make_room(half + (64 << 20), 0)) is None  # about to allocate
        with pytest.raises(
            ConfigError, match=r"and .* MiB for other ranks of this host, the file system leaves"
        ):
            next(second.make_room(half + (64 << 20), 0))
    with RankArena(directory, rank=1) as second:  # the first one is gone, and has not taken it
        assert next(second.make_room(half + (64 << 20), 0)) is None


def test_preflight_refuses_what_the_file_system_cannot_hold(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the file system leaves .*--shm-size.*emptyDir"):
        check_room(tmp_path, 1 << 62)


@pytest.mark.parametrize("version", [1, 2])
def test_preflight_sees_the_tightest_memory_limit_of_the_cgroups_above(version: int, tmp_path: Path) -> None:
    # The layout of the kernel's files, as a container sees them.
    limit, used = (
        ("memory.max", "memory.current")
        if version == 2
        else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    )
    root = tmp_path / "cgroup" if version == 2 else tmp_path / "cgroup/memory"
    inner = root / "pod/container"
    inner.mkdir(parents=True)
    (inner / limit).write_text("max\n" if version == 2 else "9223372036854771712\n")
    (inner / used).write_text("100\n")
    (inner.parent / limit).write_text("1000\n")
    (inner.parent / used).write_text("900\n")
    (inner.parent / "memory.stat").write_text(
        "anon 1\ninactive_file 50\n" if version == 2 else "total_inactive_file 50\n"
    )
    (tmp_path / "proc/self").mkdir(parents=True)
    line = "0::/pod/container\n" if version == 2 else "9:name=systemd:/\n4:memory:/pod/container\n"
    (tmp_path / "proc/self/cgroup").write_text(line)
    found = [
        r for r in rooms(tmp_path, cgroups=tmp_path / "cgroup", proc=tmp_path / "proc") if "memory" in r.limit
    ]
    assert [room.free_bytes for room in found] == [150]
    assert "resources.limits.memory" in found[0].hint


def test_different_job_names_never_share_a_directory() -> None:
    names = ["a", "A", "a/b", "a b", "a_b", "x" * 200, "x" * 201, "../a", "é"]
    directories = {job_directory(name) for name in names}
    assert len(directories) == len(names)
    assert all(directory.parent == Path("/dev/shm") for directory in directories)  # noqa: S108


def test_a_job_is_held_while_others_clean_its_directory_up(tmp_path: Path) -> None:
    directory = tmp_path / "job"

    def hold_and_clean_up(_: int) -> int:
        for _ in range(300):
            hold_job(directory).close()
            remove_if_dead(directory)
        return 300

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # so that another thread goes on between any two calls
    try:
        with futures.ThreadPoolExecutor(4) as pool:
            assert list(pool.map(hold_and_clean_up, range(4))) == [300] * 4
    finally:
        sys.setswitchinterval(interval)
    assert not directory.exists()
