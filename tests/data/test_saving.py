# SPDX-License-Identifier: Apache-2.0
"""Saving: the newest whole checkpoint is there after a crash at any moment, on one rank and on many."""

from __future__ import annotations

import errno
import io
import os
import re
import shutil
import signal
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist

from resiliency.data import AtomicDirectory, atomic_torch_save, saving
from resiliency.errors import (
    CheckpointMissing,
    CheckpointWriteFailed,
    ConfigError,
    PeerError,
    ResiliencyError,
)
from resiliency.files import LocalFiles, replacing, write_durably
from resiliency.testing.rank_pool import RankOutcome, RankPool
from resiliency.testing.storage import MemoryStorage, StorageKilled, Survival
from tests.data.crashing_files import CrashingFiles, MemoryFiles, WritingFiles
from tests.waiting import wait_until

T = TypeVar("T")
ROOT = "/ckpt"
SAVES = 4
AFTERMATHS = [
    (Survival.NOTHING, 0),
    (Survival.EVERYTHING, 0),
    *[(Survival.RANDOM, seed) for seed in range(4)],
]


def mono(files: object, root: str = ROOT, keep_last: int = -1) -> AtomicDirectory:
    return AtomicDirectory(root, name="run", strategy="mono", keep_last=keep_last, files=files)  # type: ignore[arg-type]


def save(saver: AtomicDirectory, files: CrashingFiles, content: str, *, force: bool = False) -> None:
    directory = saver.prepare_checkpoint_directory(force)
    files.change("write", lambda: files.inner.write(f"{directory}/state", content))  # type: ignore[attr-defined]
    saver.symlink_latest(directory)


def run_until_crash(
    files: CrashingFiles, keep_last: int, forced: set[int], root: str = ROOT
) -> tuple[int, list[str]]:
    """Saves 0 to 3; returns the number of the last one that returned, and the directories that were
    forced."""
    done, kept = -1, []
    try:
        saver = mono(files, root, keep_last)
        for number in range(SAVES):
            save(saver, files, f"state {number}", force=number in forced)
            done = number
            if number in forced:
                kept.append(os.path.basename(saver.latest() or ""))
    except StorageKilled:
        pass
    return done, kept


def check_after_crash(
    files: MemoryFiles | WritingFiles, done: int, forced: list[str], keep_last: int, root: str
) -> None:
    """Previous or new, never neither; and the next run saves, and leaves no leftovers."""
    survivor = mono(files, root, keep_last)
    latest = survivor.latest()
    if latest is None:
        assert done == -1
    else:
        assert files.read(f"{latest}/state") in (f"state {done}", f"state {done + 1}")
        linked = int(latest.removesuffix("_force").rpartition("_")[2])
        for name in files.list(root):
            number = re.fullmatch(r"run_checkpoint_(\d+)(_force)?", name)
            if number and int(number[1]) <= linked and f".{name}.unfinished" not in files.list(root):
                assert files.read(f"{root}/{name}/state").startswith("state "), "half of it was deleted"
    for name in forced:
        assert files.read(f"{root}/{name}/state").startswith("state ")
    save(survivor, CrashingFiles(files), "state after")
    assert files.read(f"{survivor.latest()}/state") == "state after"
    names = files.list(root)
    assert [name for name in names if name.startswith(".") or name.endswith("_temp")] == []
    directories = [name for name in names if "_checkpoint_" in name]
    for name in directories:
        assert files.read(f"{root}/{name}/state").startswith("state "), "an unfinished directory stayed"
    if keep_last > 0:
        assert len([name for name in directories if not name.endswith("_force")]) <= keep_last


def crash_points(keep_last: int, forced: set[int]) -> Iterator[int]:
    storage = MemoryStorage()
    storage.make_dir("ckpt")
    files = CrashingFiles(MemoryFiles(storage))
    run_until_crash(files, keep_last, forced)
    yield from range(len(files.operations) + 1)


@pytest.mark.parametrize("keep_last", [1, 2, -1])
@pytest.mark.parametrize("forced", [set(), {0, 2}], ids=["unforced", "forced"])
def test_after_a_power_cut_at_every_operation_the_link_leads_to_a_whole_checkpoint_c20_c24_c32(
    keep_last: int, forced: set[int]
) -> None:
    crashes = 0
    for crash_at in crash_points(keep_last, forced):
        storage = MemoryStorage()
        storage.make_dir("ckpt")
        storage.sync_dir("")
        done, kept = run_until_crash(CrashingFiles(MemoryFiles(storage), crash_at), keep_last, forced)
        for survival, seed in AFTERMATHS:
            check_after_crash(MemoryFiles(storage.crash(survival, seed)), done, kept, keep_last, ROOT)
        crashes += 1
    assert crashes > 30


@pytest.mark.parametrize("keep_last", [1, 2, -1])
def test_after_a_kill_at_every_operation_on_a_real_disk_with_leftovers_of_the_other_library_c23(
    keep_last: int, tmp_path: Path
) -> None:
    for crash_at in crash_points(keep_last, {1}):
        root = tmp_path / str(crash_at)
        root.mkdir()
        (root / "run.latest_checkpoint_temp").symlink_to("run_checkpoint_9")
        files = CrashingFiles(WritingFiles(), crash_at)
        done, kept = run_until_crash(files, keep_last, {1}, str(root))
        check_after_crash(WritingFiles(), done, kept, keep_last, str(root))


def test_keep_last_counts_whole_checkpoints_and_forced_ones_stay(tmp_path: Path) -> None:
    saver = AtomicDirectory(tmp_path, name="run", strategy="mono", keep_last=2)
    for number in range(6):
        with saver.checkpoint(force=number == 1):
            pass
    assert sorted(name for name in os.listdir(tmp_path) if "_checkpoint_" in name) == [
        "run_checkpoint_1_force",
        "run_checkpoint_4",
        "run_checkpoint_5",
    ]
    assert os.readlink(tmp_path / "run.latest_checkpoint") == "run_checkpoint_5"


def test_directories_without_a_link_are_never_deleted_and_the_choice_is_named_c25(tmp_path: Path) -> None:
    saver = AtomicDirectory(tmp_path, name="run", strategy="mono")
    for _ in range(3):
        with saver.checkpoint(force=True):
            pass
    (tmp_path / "run.latest_checkpoint").unlink()
    for refused in (saver.latest, saver.prepare_checkpoint_directory):
        with pytest.raises(ConfigError, match=r"has 3 checkpoints of 'run', the newest .*_2_force.*no link"):
            refused()
    assert len(os.listdir(tmp_path)) == 3
    saver.symlink_latest(tmp_path / "run_checkpoint_2_force")
    assert saver.latest() == str(tmp_path / "run_checkpoint_2_force")


def test_a_link_that_leads_nowhere_is_refused_until_another_is_chosen(tmp_path: Path) -> None:
    saver = AtomicDirectory(tmp_path, name="run", strategy="mono")
    for _ in range(2):
        with saver.checkpoint():
            pass
    shutil.rmtree(tmp_path / "run_checkpoint_1")
    with pytest.raises(CheckpointMissing, match="leads to run_checkpoint_1, which is not in"):
        saver.prepare_checkpoint_directory()
    saver.symlink_latest(tmp_path / "run_checkpoint_0")
    assert saver.latest() == str(tmp_path / "run_checkpoint_0")


def test_a_moved_tree_still_opens_and_a_relative_directory_is_taken_where_it_is_c26(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with AtomicDirectory("out", name="run", strategy="mono").checkpoint() as directory:
        atomic_torch_save({"step": 3}, os.path.join(directory, "state.pt"))
    os.rename(tmp_path / "out", tmp_path / "moved")
    monkeypatch.chdir("/")
    latest = AtomicDirectory(tmp_path / "moved", name="run", strategy="mono").latest()
    assert latest == str(tmp_path / "moved" / "run_checkpoint_0")
    assert torch.load(os.path.join(latest, "state.pt")) == {"step": 3}
    assert torch.load(tmp_path / "moved" / "run.latest_checkpoint" / "state.pt") == {"step": 3}


def test_a_tree_of_cycling_utils_goes_on_where_its_absolute_link_leads(tmp_path: Path) -> None:
    for name in ("run_checkpoint_0", "run_checkpoint_1", "run_checkpoint_2", "run_checkpoint_3_force"):
        (tmp_path / name).mkdir()
    (tmp_path / "run.latest_checkpoint").symlink_to(f"/elsewhere/{tmp_path.name}/run_checkpoint_1")
    saver = AtomicDirectory(tmp_path, name="run", strategy="mono")
    assert saver.latest() == str(tmp_path / "run_checkpoint_1")
    with saver.checkpoint() as directory:
        assert os.path.basename(directory) == "run_checkpoint_4"
        assert len(os.listdir(tmp_path)) == 7, "nothing goes before the new one is linked"
    # The old library set no markers: what it left unfinished cannot be told from what is whole, and stays.
    assert len(os.listdir(tmp_path)) == 6


def test_a_saver_takes_no_directories_of_one_whose_name_begins_like_its_own_c31(tmp_path: Path) -> None:
    outer = AtomicDirectory(tmp_path, name="run_checkpoint", strategy="mono", keep_last=1)
    for _ in range(3):
        with outer.checkpoint():
            pass
    saver = AtomicDirectory(tmp_path, name="run", strategy="mono", keep_last=1)
    assert saver.latest() is None
    with saver.checkpoint():
        pass
    assert outer.latest() == str(tmp_path / "run_checkpoint_checkpoint_2")


def test_an_unfinished_directory_of_this_run_stays_while_it_may_be_written(tmp_path: Path) -> None:
    saver = AtomicDirectory(tmp_path, name="run", strategy="mono", keep_last=1)
    slow = saver.prepare_checkpoint_directory()
    with saver.checkpoint() as fast:
        pass
    assert os.path.isdir(slow)
    saver.symlink_latest(slow)
    assert saver.latest() == fast, "an older checkpoint that is finished later is not the latest"
    later = AtomicDirectory(tmp_path, name="run", strategy="mono", keep_last=1)
    with later.checkpoint():
        pass
    assert not os.path.exists(slow)


def test_a_block_that_fails_links_nothing(tmp_path: Path) -> None:
    saver = AtomicDirectory(tmp_path, name="run", strategy="mono")
    with saver.checkpoint() as good:
        pass
    for _ in range(2):
        with (  # noqa: PT012  # after a part was written
            pytest.raises(ValueError, match="no weights"),
            saver.checkpoint() as directory,
        ):
            atomic_torch_save({}, f"{directory}/state.pt")
            raise ValueError("no weights")
        assert saver.latest() == good
        # At once: a disk that is full would be full for the next checkpoint too.
        assert sorted(os.listdir(tmp_path)) == ["run.latest_checkpoint", "run_checkpoint_0"]
    with saver.checkpoint() as after:
        pass
    assert os.path.basename(after) == "run_checkpoint_3", "a name is given once"


class FailingLinks(LocalFiles):
    """The directory cannot be synced after the link is there."""

    linked = False

    def rename(self, source: str, target: str) -> None:
        super().rename(source, target)
        self.linked = target.endswith(".latest_checkpoint")

    def sync_dir(self, path: str) -> None:
        if self.linked:
            raise OSError(errno.EIO, "Input/output error", path)
        super().sync_dir(path)


@pytest.mark.parametrize("files", [LocalFiles(), FailingLinks()], ids=["whole", "half"])
def test_what_a_failed_block_has_linked_itself_is_not_deleted(files: LocalFiles, tmp_path: Path) -> None:
    saver = mono(files, str(tmp_path))
    with (  # noqa: PT012  # after it was linked
        pytest.raises((ValueError, CheckpointWriteFailed)),
        saver.checkpoint() as directory,
    ):
        saver.symlink_latest(directory)
        raise ValueError("later")
    assert saver.latest() == directory
    assert os.path.isdir(directory)


class FullFiles(LocalFiles):
    """Storage that refuses what it took, while it is synced; and deletions, until it is mended."""

    mended = True

    def sync_tree(self, path: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", path)

    def remove_tree(self, path: str) -> None:
        if not self.mended:
            raise OSError(errno.EIO, "Input/output error", path)
        super().remove_tree(path)


def test_a_checkpoint_that_cannot_be_synced_is_deleted(tmp_path: Path) -> None:
    saver = mono(FullFiles(), str(tmp_path))
    with (
        pytest.raises(CheckpointWriteFailed, match="No space left"),
        saver.checkpoint() as directory,
    ):
        atomic_torch_save({}, f"{directory}/state.pt")
    assert os.listdir(tmp_path) == []
    assert saver.latest() is None


def test_what_cannot_be_deleted_at_once_hides_no_error_and_goes_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = FullFiles()
    files.mended = False
    saver = mono(files, str(tmp_path))
    with pytest.raises(ValueError, match="no weights"), saver.checkpoint():
        raise ValueError("no weights")
    assert "run_checkpoint_0 is not whole and could not be deleted: [Errno 5]" in caplog.text
    assert len(os.listdir(tmp_path)) == 2
    files.mended = True
    directory = saver.prepare_checkpoint_directory()
    assert sorted(os.listdir(tmp_path)) == [
        f".{os.path.basename(directory)}.unfinished",
        os.path.basename(directory),
    ]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"keep_last": 0}, "keep_last is 0; it is at least 1, or -1 to keep all"),
        ({"strategy": "sync"}, "no strategy 'sync'; choose one of sync_any, sync_all, async, mono"),
        ({"name": "a/b"}, "'a/b' cannot be"),
        ({"strategy": "sync_any"}, "one master, and no rank is its master"),
    ],
)
def test_arguments_that_cannot_work_are_refused_at_once_c27_c28_c33(
    options: dict[str, object], text: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=text):
        AtomicDirectory(tmp_path, **options)  # type: ignore[arg-type]


def test_a_directory_of_nobody_is_not_linked_to(tmp_path: Path) -> None:
    saver = AtomicDirectory(tmp_path, name="run", strategy="mono")
    for path in (tmp_path / "other_checkpoint_1", tmp_path / "deeper" / "run_checkpoint_1"):
        with pytest.raises(ConfigError, match="is no checkpoint directory of 'run'"):
            saver.symlink_latest(path)
    with pytest.raises(ConfigError, match="there is no directory"):
        saver.symlink_latest(tmp_path / "run_checkpoint_1")


# --- many ranks ----------------------------------------------------------------------------------


def saver_of(rank: int, root: str, **options: object) -> AtomicDirectory:
    return AtomicDirectory(root, rank == 0, "run", timeout=timedelta(seconds=30), **options)  # type: ignore[arg-type]


def save_twice(rank: int, root: str, strategy: str) -> list[str]:
    """One rank votes for a forced checkpoint first, then all do."""
    saver = saver_of(rank, root, strategy=strategy)
    found = []
    for votes in ({1}, {0, 1, 2}):
        with saver.checkpoint(force=rank in votes) as directory:
            atomic_torch_save({"rank": rank}, f"{directory}/{rank}.pt")
        found.append(os.path.basename(directory))
    assert saver.latest() == directory
    return found


@pytest.mark.parametrize(
    ("strategy", "names"),
    [
        ("sync_any", [["run_checkpoint_0_force", "run_checkpoint_1_force"]] * 3),
        ("sync_all", [["run_checkpoint_0", "run_checkpoint_1_force"]] * 3),
        (
            "async",
            [
                [
                    f"run_rank_{rank}_checkpoint_0" + "_force" * (rank == 1),
                    f"run_rank_{rank}_checkpoint_1_force",
                ]
                for rank in range(3)
            ],
        ),
    ],
)
def test_each_strategy_votes_and_names_as_it_says_on_the_cpu_c29(
    strategy: str, names: list[list[str]], rank_pool: RankPool, tmp_path: Path
) -> None:
    assert rank_pool.run(save_twice, 3, str(tmp_path), strategy).values == names
    if strategy != "async":
        for name in names[0]:
            assert sorted(os.listdir(tmp_path / name)) == ["0.pt", "1.pt", "2.pt"]


class ThreadRanks:
    """Ranks that are threads of one process, each on a host of its own; they lose one that is killed."""

    first_on_host = True

    def __init__(self, rank: int, meeting: threading.Barrier, values: list[object]) -> None:
        self.rank, self._meeting, self._values = rank, meeting, values

    def gather(self, value: object) -> list[object]:
        try:
            self._values[self.rank] = value
            self._meeting.wait(60)
            told = list(self._values)
            self._meeting.wait(60)
        except threading.BrokenBarrierError:
            raise PeerError(f"rank {self.rank} lost another rank") from None
        return told


def save_until_one_is_killed(
    storage: MemoryStorage, killed: int, crash_at: int | None
) -> tuple[int, list[int], list[str]]:
    """Two ranks save twice, each its part, and one is killed at an operation of its own, if it comes to it.

    Returns: the last save that returned on any rank, operations of each rank, and what was forced by then."""
    meeting, values = threading.Barrier(2), [None, None]
    done, operations, kept = [-1, -1], [0, 0], []

    def work(rank: int) -> None:
        files = CrashingFiles(MemoryFiles(storage), crash_at if rank == killed else None)
        saver = AtomicDirectory(ROOT, True, "run", keep_last=1, files=files)
        saver._ranks, saver.is_master = ThreadRanks(rank, meeting, values), rank == 0  # type: ignore[assignment, arg-type]
        try:
            for number in range(3):
                directory = saver.prepare_checkpoint_directory(force_save=rank == 1 and number == 0)
                part = f"{directory}/{('state', 'part')[rank]}"
                files.change("write", lambda: files.inner.write(part, f"state {number}"))  # type: ignore[attr-defined]  # noqa: B023
                saver.symlink_latest(directory)
                done[rank] = number
                kept.extend([os.path.basename(directory)] * (number == 0))
        except (StorageKilled, PeerError):
            meeting.abort()
        operations[rank] = len(files.operations)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return max(done), operations, kept


@pytest.mark.parametrize("killed", [0, 1], ids=["master", "other"])
def test_after_a_kill_of_either_rank_at_every_operation_the_link_leads_to_the_parts_of_both(
    killed: int,
) -> None:
    def directory() -> MemoryStorage:
        storage = MemoryStorage()
        storage.make_dir("ckpt")
        storage.sync_dir("")
        return storage

    done, operations, _ = save_until_one_is_killed(directory(), killed, None)
    assert done == 2
    for crash_at in range(operations[killed]):
        storage = directory()
        done, _, forced = save_until_one_is_killed(storage, killed, crash_at)
        for survival, seed in AFTERMATHS[:3]:
            files = MemoryFiles(storage.crash(survival, seed))
            if latest := mono(files).latest():
                assert files.read(f"{latest}/part") == files.read(f"{latest}/state")
            check_after_crash(files, done, forced, 1, ROOT)
    assert operations[killed] >= 6


def construct(rank: int, root: str, masters: list[int], strategies: list[str]) -> str:
    try:
        AtomicDirectory(
            root, rank in masters, "run", strategy=strategies[rank], timeout=timedelta(seconds=30)
        )
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("masters", "strategies", "text"),
    [
        ([], ["sync_any"] * 2, "no rank is its master"),
        ([0, 1], ["sync_any"] * 2, "ranks [0, 1] are masters"),
        ([0], ["sync_any", "sync_all"], "ranks disagree about (strategy, name, keep_last)"),
    ],
)
def test_ranks_that_cannot_agree_all_fail_with_the_reason_c27(
    masters: list[int], strategies: list[str], text: str, rank_pool: RankPool, tmp_path: Path
) -> None:
    for error in rank_pool.run(construct, 2, str(tmp_path), masters, strategies).values:
        assert text in error


def construct_beside(rank: int, root: str, other: str) -> str:
    strategy = ("sync_any", other)[rank]
    try:
        AtomicDirectory(root, rank == 0, "run", strategy=strategy, timeout=timedelta(seconds=1))
    except PeerError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("other", ["async", "mono"])
def test_a_rank_with_directories_of_its_own_waits_for_none_and_one_that_waits_for_it_fails_with_the_reason(
    rank_pool: RankPool, tmp_path: Path, other: str
) -> None:
    waited, alone = rank_pool.run(construct_beside, 2, str(tmp_path), other).values
    assert waited.startswith("rank 0 lost another rank, or waited 0:00:01 for it")
    assert waited.endswith("or has a saver of strategy 'async' or 'mono'.")
    assert alone == ""


def fail_on_one(rank: int, root: str, where: str) -> tuple[str, str | None]:
    """The error of this rank, and the latest checkpoint afterwards."""
    saver = saver_of(rank, root)
    with saver.checkpoint():
        pass
    try:
        if where == "master":
            if rank == 0:
                os.rename(root, root + "-gone")
            dist.barrier()
            try:
                saver.prepare_checkpoint_directory()
            finally:
                dist.barrier()
                if rank == 0:
                    os.rename(root + "-gone", root)
                dist.barrier()
        with saver.checkpoint():
            if rank == 1:
                raise ValueError("no weights")
    except (ResiliencyError, ValueError) as error:
        return f"{type(error).__name__}: {error}", os.path.basename(saver.latest() or "")
    return "", None


def test_an_error_of_the_master_is_the_error_of_all_ranks_c30(rank_pool: RankPool, tmp_path: Path) -> None:
    for error, latest in rank_pool.run(fail_on_one, 2, str(tmp_path / "out"), "master").values:
        assert error.startswith("CheckpointWriteFailed: storage refused")
        assert "No such file or directory" in error
        assert latest == "run_checkpoint_0"


def test_a_block_that_fails_on_one_rank_is_linked_on_none(rank_pool: RankPool, tmp_path: Path) -> None:
    values = rank_pool.run(fail_on_one, 2, str(tmp_path / "out"), "block").values
    assert [latest for _, latest in values] == ["run_checkpoint_0"] * 2
    assert values[1][0] == "ValueError: no weights"
    assert values[0][0].startswith("PeerError")
    assert "rank 1: ValueError: no weights" in values[0][0]
    assert sorted(os.listdir(tmp_path / "out")) == ["run.latest_checkpoint", "run_checkpoint_0"]


class TellingFiles(LocalFiles):
    """Leaves a file when a sync begins."""

    def sync_tree(self, path: str) -> None:
        Path(path).with_name("syncing").touch()
        super().sync_tree(path)


def write_late(rank: int, root: str) -> bool:
    """Whether a sync began while rank 1 still wrote."""
    saver = saver_of(rank, root, files=TellingFiles())
    directory = saver.prepare_checkpoint_directory()
    early = False
    if rank == 1:
        with suppress(AssertionError):
            early = wait_until(lambda: os.path.exists(f"{root}/syncing"), "no sync", timeout=0.5)
        atomic_torch_save({"rank": rank}, f"{directory}/{rank}.pt")
    saver.symlink_latest(directory)
    return early


def test_no_rank_syncs_before_all_have_written(rank_pool: RankPool, tmp_path: Path) -> None:
    assert rank_pool.run(write_late, 2, str(tmp_path)).values == [False, False]
    assert (tmp_path / "syncing").exists()


def link_another_on_one(rank: int, root: str) -> str:
    saver = saver_of(rank, root)
    directory = saver.prepare_checkpoint_directory()
    try:
        saver.symlink_latest(f"{root}/other" if rank == 1 else directory)
    except ResiliencyError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_wrong_directory_on_one_rank_is_an_error_of_all(rank_pool: RankPool, tmp_path: Path) -> None:
    for error in rank_pool.run(link_another_on_one, 2, str(tmp_path)).values:
        assert error.startswith(f"ConfigError: {tmp_path}/other is no checkpoint directory of 'run'")


class StaleFiles(LocalFiles):
    """A host that sees the link of a while ago."""

    def read_link(self, path: str) -> str | None:
        return "run_checkpoint_0"


def latest_where_one_host_is_behind(rank: int, root: str) -> str:
    saver = saver_of(rank, root, files=StaleFiles() if rank == 1 else LocalFiles())
    for _ in range(2):
        with saver.checkpoint():
            pass
    return os.path.basename(saver.latest() or "")


def test_the_latest_checkpoint_is_the_same_one_on_all_ranks(rank_pool: RankPool, tmp_path: Path) -> None:
    values = rank_pool.run(latest_where_one_host_is_behind, 2, str(tmp_path)).values
    assert values == ["run_checkpoint_1"] * 2


class BlindFiles(LocalFiles):
    """A host that does not share the directory."""

    def is_dir(self, path: str) -> bool:
        return False


def prepare_where_one_host_sees_nothing(rank: int, root: str) -> str:
    saving._VISIBLE_S = 0.3
    saver = saver_of(rank, root, files=BlindFiles() if rank == 1 else LocalFiles())
    try:
        saver.prepare_checkpoint_directory()
    except CheckpointWriteFailed as error:
        return str(error)
    return ""


def test_hosts_that_do_not_share_the_directory_are_an_error_on_all_ranks_c27(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    for error in rank_pool.run(prepare_where_one_host_sees_nothing, 2, str(tmp_path)).values:
        assert "run_checkpoint_0 was made by the master, and this host does not see it" in error
        assert "take strategy='async'" in error


def prepare_alone(rank: int, root: str) -> str:
    saver = saver_of(rank, root)
    if rank == 0:
        try:
            saver.prepare_checkpoint_directory()
        except PeerError as error:
            return str(error)
    return ""


def test_a_rank_that_does_not_come_is_an_error_and_no_wait_for_ever(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    error, _ = rank_pool.run(prepare_alone, 2, str(tmp_path), timeout=60).values
    assert "rank 0 lost another rank, or waited" in error


# --- single files --------------------------------------------------------------------------------


def test_a_file_holds_the_old_object_until_the_new_one_is_whole_c21(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    atomic_torch_save({"step": 1}, path)
    with pytest.raises(AttributeError, match="local object"):
        atomic_torch_save(lambda: None, path)
    assert torch.load(path) == {"step": 1}
    assert os.listdir(tmp_path) == ["state.pt"]
    atomic_torch_save({"step": 2}, str(path), _use_new_zipfile_serialization=False)
    assert torch.load(path) == {"step": 2}


def save_until_killed(rank: int, path: str, kill_at: int) -> int:
    """Replace a file, killed before the operation of this number, if there are so many; returns how many
    there are."""
    count = 0

    def counted(operation: Callable[..., T]) -> Callable[..., T]:
        def run(*args: Any, **options: Any) -> T:
            nonlocal count
            if count == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1
            return operation(*args, **options)

        return run

    class Between:
        """Comes to be saved behind a part of the file."""

        def __reduce__(self) -> tuple[object, ...]:
            return counted(lambda: (OrderedDict, ()))()

    names = ("open", "listdir", "fsync", "replace", "unlink", "close")
    before = {name: getattr(os, name) for name in names}
    try:
        for name, operation in before.items():
            setattr(os, name, counted(operation))
        atomic_torch_save({"state": "new", "weights": torch.ones(1000), "rest": Between()}, path)
    finally:
        for name, operation in before.items():
            setattr(os, name, operation)
    return count


def test_after_a_kill_at_every_operation_a_file_is_old_or_new_and_leftovers_go_with_the_next_save(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    def run(path: Path, kill_at: int) -> Any:
        return rank_pool.run(save_until_killed, 1, str(path), kill_at, group=False, timeout=60)

    found = []
    (count,) = run(tmp_path / "whole", -1).values
    for kill_at in range(count):
        path = tmp_path / str(kill_at) / "state.pt"
        path.parent.mkdir()
        atomic_torch_save({"state": "old"}, path)
        assert run(path, kill_at).outcomes == [RankOutcome.DIED]
        found.append(torch.load(path)["state"])
        atomic_torch_save({}, path)
        assert os.listdir(path.parent) == ["state.pt"]
    replaced = found.index("new")
    assert found == ["old"] * replaced + ["new"] * (count - replaced)
    assert replaced >= 4


def test_a_file_object_and_a_missing_directory_are_refused_c22(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="to a path, and was given a BytesIO"):
        atomic_torch_save({}, io.BytesIO())  # type: ignore[arg-type]
    with pytest.raises(CheckpointWriteFailed, match=r"missing/state.pt could not be saved: No such file"):
        atomic_torch_save({}, tmp_path / "missing" / "state.pt")


def leftover_of(path: Path, host: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a writer of this host leaves when it is killed."""
    monkeypatch.setenv("NODE_NAME", host)
    with replacing(path) as temporary:
        temporary.write_text("half")
    left = temporary.with_name(temporary.name)
    os.rename(path, left)
    return left


def test_two_writers_of_one_file_do_not_mix_and_leftovers_of_the_dead_are_removed_c21(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state"
    kept = {
        leftover_of(tmp_path / "other", "here", monkeypatch).name,
        leftover_of(tmp_path / "state.pt", "here", monkeypatch).name,
        # The locks of its writer may be on that host alone.
        leftover_of(path, "there", monkeypatch).name,
    }
    # A file of the user's.
    (tmp_path / ".state.backup.temp").touch()
    leftover = leftover_of(path, "here", monkeypatch)
    with replacing(path) as first:
        first.write_text("first")
        assert not leftover.exists()
        with replacing(path) as second:
            assert first.exists(), "its writer lives"
            second.write_text("second")
        assert path.read_text() == "second"
    assert path.read_text() == "first"
    assert set(os.listdir(tmp_path)) == {*kept, ".state.backup.temp", "state"}
    write_durably(path, b"third")
    assert path.read_bytes() == b"third"


def test_the_bytes_and_the_name_of_a_replaced_file_are_synced_c20(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    real_sync, real_replace = os.fsync, os.replace

    def fsync(descriptor: int) -> None:
        steps.append("sync " + os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))[:7])
        real_sync(descriptor)

    def rename(source: str, target: str) -> None:
        steps.append("replace")
        real_replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", rename)
    (tmp_path / "out").mkdir()
    atomic_torch_save({}, tmp_path / "out" / "state")
    assert steps == ["sync .state.", "replace", "sync out"]
