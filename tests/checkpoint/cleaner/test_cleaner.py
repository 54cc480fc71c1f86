# SPDX-License-Identifier: Apache-2.0
"""The cleaner removes what nobody needs, and never what somebody may need."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
import torch.distributed as dist

from resiliency.checkpoint.branches import Branches, record_branches
from resiliency.checkpoint.capture.job_memory import hold_job, job_directory
from resiliency.checkpoint.cleaner import cleaner, removal
from resiliency.checkpoint.cleaner.cleaner import Cleaner
from resiliency.checkpoint.cleaner.flags import parse
from resiliency.checkpoint.cleaner.in_use import IdleLimits
from resiliency.checkpoint.commit.commit import open_save
from resiliency.checkpoint.format.catalog import Condition, inspect, list_checkpoints, quarantine, verify
from resiliency.checkpoint.format.dcp import DcpFormat
from resiliency.checkpoint.format.lease import Lease
from resiliency.checkpoint.format.local import LocalFormat
from resiliency.checkpoint.format.manifest import save_folder
from resiliency.checkpoint.format.marker import Marker, MarkerState, put_marker, try_read_marker
from resiliency.checkpoint.format.nemo import record_rank, seal
from resiliency.checkpoint.storage.posix import LocalStorage
from resiliency.errors import CheckpointError
from resiliency.plugins import checkpoint_kinds
from resiliency.runtime import SystemClock
from resiliency.testing import warm
from resiliency.testing.clock import ManualClock
from resiliency.testing.processes import Command
from resiliency.testing.rank_pool import RankPool
from tests.checkpoint.storage_builders import assert_holds, save, small_shard

BENCHMARK = Path(__file__).parents[3] / "benchmark"

HOUR_AGO_S = 3601.0


def make_old(*paths: Path, age_s: float = HOUR_AGO_S) -> None:
    """As if nothing below had changed for an hour."""
    when = datetime.now(timezone.utc).timestamp() - age_s
    for path in paths:
        for parent, directories, files in os.walk(path, topdown=False):
            for name in (*directories, *files):
                os.utime(Path(parent, name), (when, when), follow_symlinks=False)
        os.utime(path, (when, when))


def checkpoints(folder: Path, *steps: int) -> Path:
    """A job's folder with complete checkpoints; returns where they are."""
    root = folder / "checkpoint"
    for step in steps:
        save(LocalStorage(root), DcpFormat(), [small_shard(step)])
    root.mkdir(parents=True, exist_ok=True)
    return root


def unfinished(root: Path, step: int, *, old: bool = True) -> None:
    storage = LocalStorage(root)
    storage.make_dir("")
    open_save(storage, step, "dead-attempt")
    (root / f"step={step}" / save_folder("dead-attempt", 0) / "__0_0.distcp").write_bytes(b"half")
    if old:
        make_old(root / f"step={step}", root / f"step={step}-unfinished")


def nemo(root: Path, step: int, *, sealed: bool = True) -> None:
    """A checkpoint in NeMo's own form."""
    weights = root / f"step={step}" / "weights"
    weights.mkdir(parents=True)
    for name in (".metadata", "metadata.json", "common.pt", "__0_0.distcp"):
        (weights / name).write_text(f"{name} of {step}")
    if sealed:
        record_rank(weights.parent, step=step, rank=0)
        seal(weights.parent, step=step, world_size=1)


def steps_of(root: Path) -> list[int]:
    return [found.step for found in list_checkpoints(LocalStorage(root))]


def clean(prefix: Path, *flags: str, job: str = "mine") -> Cleaner:
    """One pass over persistent storage, in this process."""
    argv = ["--persistent-ckpt-dir-prefix", str(prefix), "--job-identifier", job, *flags]
    cleaner = Cleaner(parse(argv))
    assert cleaner.run_pass(), "a pass without trouble"
    return cleaner


@contextmanager
def running(prefix: Path, *flags: str, tier: str = "persistent") -> Iterator[Command]:
    """The real command."""
    argv = [f"--{tier}-ckpt-dir-prefix", str(prefix), "--job-identifier", "mine", *flags]
    with Command([sys.executable, str(BENCHMARK / "ckpt_cleaner.py"), *argv]) as command:
        yield command


# --- old complete checkpoints ---------------------------------------------------------------------


def test_the_newest_complete_ones_stay_and_older_ones_go(tmp_path: Path) -> None:
    root = checkpoints(tmp_path / "mine", 1, 2, 3, 4)
    unfinished(root, 5, old=False)
    clean(tmp_path, "--num-checkpoints-to-keep", "2")
    assert steps_of(root) == [3, 4, 5]
    assert_holds(LocalStorage(root), small_shard(4))
    assert not list(root.glob("step=*-unfinished"))[1:]


def test_what_the_job_has_left_by_a_rollback_goes_when_the_new_branch_has_as_many(tmp_path: Path) -> None:
    root = checkpoints(tmp_path / "mine", 1, 2, 5)
    record_branches(LocalStorage(root), Branches().after(2, "attempt-0"))
    for step, left in ((3, [2, 3, 5]), (4, [3, 4])):
        save(LocalStorage(root), DcpFormat(), [small_shard(step)], save_id=f"attempt.1-{step}")
        clean(tmp_path, "--num-checkpoints-to-keep", "2")
        assert steps_of(root) == left


def test_nemos_own_checkpoints_count_and_go_like_the_engines(tmp_path: Path) -> None:
    root = checkpoints(tmp_path / "mine", 2, 4)
    nemo(root, 1)
    nemo(root, 3)
    nemo(root, 5, sealed=False)  # by NeMo's own callback
    clean(tmp_path, "--num-checkpoints-to-keep", "2")
    assert steps_of(root) == [4, 5]
    assert checkpoint_kinds.verify(root / "step=5") is None


def test_a_damaged_checkpoint_does_not_count_and_is_left_for_people(tmp_path: Path) -> None:
    root = checkpoints(tmp_path / "mine", 1, 2, 3, 4)
    next((root / "step=4").rglob("__0_0.distcp")).write_bytes(b"torn")
    nemo(root, 5)
    (root / "step=5" / "weights" / "common.pt").write_text("torn")
    quarantine(LocalStorage(root), 3, "bytes differ")
    clean(tmp_path, "--num-checkpoints-to-keep", "1")
    assert steps_of(root) == [2, 3, 4, 5]
    assert inspect(LocalStorage(root), 2).condition is Condition.COMPLETE


def test_a_checkpoint_of_torch_alone_is_nobodys_to_delete(tmp_path: Path) -> None:
    root = checkpoints(tmp_path / "mine", 2, 3)
    (root / "step=1").mkdir()
    (root / "step=1" / ".metadata").write_text("torch's")
    clean(tmp_path, "--num-checkpoints-to-keep", "1")
    assert steps_of(root) == [1, 3]


def test_a_step_being_read_stays_with_those_that_its_reader_would_fall_back_to(tmp_path: Path) -> None:
    root = checkpoints(tmp_path / "mine", 1, 2, 3, 4, 5, 6)
    with Lease(LocalStorage(root), 4):
        clean(tmp_path, "--num-checkpoints-to-keep", "2")
        assert steps_of(root) == [3, 4, 5, 6]
    clean(tmp_path, "--num-checkpoints-to-keep", "2")
    assert steps_of(root) == [5, 6]


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--num-checkpoints-to-keep", "0"], "would delete the last checkpoint"),
        (["--job-identifier", "../other"], "cannot name a folder"),
        (["--local-ckpt-dir-prefix", "shared"], "cannot be both tiers"),
        (["--sleep-interval", "0"], "must not be 0"),
        (["--unfinished-age", "nan"], "--unfinished-age must be 0 to 1e\\+09, found nan"),
    ],
)
def test_a_command_line_that_would_do_harm_is_refused(
    flags: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--persistent-ckpt-dir-prefix", "shared", "--job-identifier", "mine", *flags]
    assert cleaner.main(argv) == cleaner.USAGE
    assert re.search(text, capsys.readouterr().err)


# --- unfinished ones ------------------------------------------------------------------------------


def test_what_was_left_unfinished_goes_and_what_is_being_written_stays(tmp_path: Path) -> None:
    root = checkpoints(tmp_path / "mine", 1)
    unfinished(root, 2)
    unfinished(root, 3)
    (root / "step=3" / save_folder("dead-attempt", 0) / "__1_0.distcp").write_bytes(b"a rank writes on")
    unfinished(root, 4, old=False)
    put_marker(LocalStorage(root), 5, Marker(state=MarkerState.FAILED))
    make_old(root / "step=5-unfinished")
    clean(tmp_path)
    assert steps_of(root) == [1, 3, 4]
    assert sorted(path.name for path in root.iterdir()) == [
        "step=1", "step=3", "step=3-unfinished", "step=4", "step=4-unfinished",
    ]  # fmt: skip


def test_quarantined_ones_stay_for_people_unless_told_otherwise(tmp_path: Path) -> None:
    root = checkpoints(tmp_path / "mine", 1, 2)
    quarantine(LocalStorage(root), 1, "bytes differ")
    make_old(root)
    clean(tmp_path)
    assert steps_of(root) == [1, 2]
    clean(tmp_path, "--remove-quarantined")
    assert steps_of(root) == [2]


def test_a_save_that_begins_after_the_cleaner_is_never_taken_for_a_leftover(tmp_path: Path) -> None:
    root = checkpoints(tmp_path / "mine", 1)
    unfinished(root, 3)
    cleaner = clean(tmp_path, "--unfinished-age", "7200")
    unfinished(root, 2)  # as old as a save ever gets
    open_save(LocalStorage(root), 3, "a new attempt")
    make_old(root / "step=3", root / "step=3-unfinished", age_s=9000)
    assert cleaner.run_pass()
    assert [(root / f"step={step}").is_dir() for step in (1, 2, 3)] == [True, True, True]


def _race(rank: int, place: str, rounds: int) -> tuple[int, int, list[str]]:
    """Rank 0 saves a step, and rank 1 removes what was left of it, both at once.

    Returns (saves committed, leftovers removed, committed ones that are not whole).
    """
    root, storage = Path(place), LocalStorage(place)
    timeouts = IdleLimits(unfinished=timedelta(minutes=15), idle=timedelta(0))
    committed = removed = 0
    lasted_s = 0.01
    torn = []
    for step in range(rounds):
        if rank == 0:
            unfinished(root, step)
        dist.barrier()
        found = {one.step: one for one in removal.leftovers(root)}[step]
        dist.barrier()
        saved, began = False, time.perf_counter()
        if step % 2 == rank:  # now the one begins later, now the other
            _busy(random.Random(step).random() * lasted_s)  # noqa: S311
        if rank == 0:
            # A save may fail, if its directory is renamed and put back just as it makes a file there.
            with suppress(CheckpointError):
                save(storage, DcpFormat(threads=1), [small_shard(step)], save_id=f"attempt-{step}")
                saved = True
        else:
            removed += removal.remove_leftover(found, timeouts, SystemClock()).value == "removed"
        dist.barrier()
        lasted_s = min(time.perf_counter() - began, 0.1)
        if saved:
            committed += 1
            try:
                assert try_read_marker(storage, step) is None
                verify(storage, step)
            except (CheckpointError, AssertionError) as error:
                torn.append(f"step {step}: {error}")
        dist.barrier()
    return committed, removed, torn


def _busy(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


@pytest.mark.slow
def test_a_save_of_the_very_step_that_is_being_removed_is_whole(tmp_path: Path, rank_pool: RankPool) -> None:
    rounds = 60
    saver, cleaner = rank_pool.run(_race, 2, str(tmp_path), rounds, timeout=120).values
    assert saver[2] == []
    assert saver[0] >= rounds // 2
    assert cleaner[1] > 0, "never once first: the race was not run"
    assert not list(tmp_path.glob(f"{removal.TRASH}*"))


@pytest.mark.parametrize("opened_anew", [True, False], ids=["new save", "old save goes on"])
def test_a_directory_that_came_to_life_between_look_and_rename_is_put_back(
    tmp_path: Path, opened_anew: bool
) -> None:
    root = checkpoints(tmp_path)
    unfinished(root, 1)
    timeouts = IdleLimits(unfinished=timedelta(minutes=15), idle=timedelta(0))
    held = os.open(root / "step=1", os.O_RDONLY | os.O_DIRECTORY)
    try:
        if opened_anew:
            open_save(LocalStorage(root), 1, "a new attempt")
        (root / "step=1" / "rank=1.json").write_bytes(b"new")
        assert not removal._remove_held(root / "step=1", held, timeouts, SystemClock())
    finally:
        os.close(held)
    assert (root / "step=1" / "rank=1.json").read_bytes() == b"new"
    assert not list(root.glob(f"{removal.TRASH}*"))


@pytest.mark.parametrize("sealed", [True, False])
def test_the_marker_of_a_new_save_is_put_back_unless_the_save_came_to_its_end_meanwhile(
    tmp_path: Path, sealed: bool
) -> None:
    unfinished(tmp_path, 1)
    (leftover,) = removal.leftovers(tmp_path)
    open_save(LocalStorage(tmp_path), 1, "a new attempt")
    if sealed:
        (tmp_path / "step=1" / "manifest.json").touch()
    assert not removal._remove_marker(leftover)
    marker = try_read_marker(LocalStorage(tmp_path), 1)
    assert marker == (None if sealed else Marker(state=MarkerState.WRITING, save_id="a new attempt"))


def test_files_that_another_rank_wrote_meanwhile_are_joined_with_those_put_back(tmp_path: Path) -> None:
    (tmp_path / "trash").mkdir()
    (tmp_path / "trash" / "rank=0").write_text("leader")
    (tmp_path / "step=1").mkdir()
    (tmp_path / "step=1" / "rank=1").write_text("follower")
    removal._put_back(tmp_path / "trash", tmp_path / "step=1")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["rank=0", "rank=1", "step=1"]


# --- other jobs -----------------------------------------------------------------------------------


def test_other_jobs_folders_go_once_they_have_been_idle_and_foreign_ones_never(tmp_path: Path) -> None:
    checkpoints(tmp_path / "mine", 1)
    checkpoints(tmp_path / "dead", 7)
    checkpoints(tmp_path / "quiet", 7)
    (tmp_path / "datasets" / "tokens").mkdir(parents=True)
    (tmp_path / "hf-model" / "checkpoint" / "weights.safetensors").mkdir(parents=True)
    (tmp_path / "a1b2.data").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "quiet")
    make_old(tmp_path / "dead", tmp_path / "datasets", tmp_path / "hf-model")
    clean(tmp_path)
    names = ["a1b2.data", "datasets", "hf-model", "link", "mine", "quiet"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    clean(tmp_path, "--other-jobs-idle", "0")
    names.remove("quiet")
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_a_job_whose_step_is_being_read_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = checkpoints(tmp_path / "other", 7)
    with Lease(LocalStorage(root), 7), caplog.at_level("INFO"):
        make_old(tmp_path / "other")
        clean(tmp_path)
    assert_holds(LocalStorage(root), small_shard(7))
    assert "left alone: step 7 is being read" in caplog.text


def test_a_job_that_writes_a_replica_stays(tmp_path: Path) -> None:
    root = checkpoints(tmp_path / "other", 7)
    replica = root / "replicas" / "host-b"
    unfinished(replica, 8)
    make_old(tmp_path / "other")
    os.utime(next((replica / "step=8").rglob("__0_0.distcp")))
    clean(tmp_path)
    assert (replica / "step=8").is_dir()


def test_a_job_with_a_process_on_this_host_stays(tmp_path: Path) -> None:
    root = checkpoints(tmp_path / "other", 7)
    make_old(tmp_path / "other")
    arena = job_directory("other-0123abcd")
    lock = hold_job(arena)
    try:
        clean(tmp_path)
        assert root.is_dir()
    finally:
        lock.close()
        (arena / "job.lock").unlink()
        arena.rmdir()
    clean(tmp_path)
    assert not root.exists()


def test_cleaners_of_two_jobs_leave_each_other_alone(tmp_path: Path) -> None:
    for job in ("a", "b"):
        checkpoints(tmp_path / job, 1)
    clean(tmp_path, "--other-jobs-idle", "1e9", job="b")
    make_old(tmp_path / "a" / "checkpoint", tmp_path / "b" / "checkpoint")
    clean(tmp_path, job="a")
    assert steps_of(tmp_path / "b" / "checkpoint") == [1]
    (sign,) = (tmp_path / "b").glob("in-use-*")
    assert sign.name.endswith(f"-{socket.gethostname()}-{os.getpid()}")
    # A sign ends by itself.
    sign.rename(sign.with_name(f"in-use-{int(datetime.now().timestamp()) - 600}-gone-1"))
    clean(tmp_path, job="a")
    assert not (tmp_path / "b").exists()


# --- the local tier -------------------------------------------------------------------------------


def local_tier(prefix: Path) -> tuple[Path, Path]:
    root = prefix / "mine" / "checkpoint"
    replica = root / "replicas" / "host-b"
    for place in (root, replica):
        for step in (1, 2, 3):
            save(LocalStorage(place), LocalFormat(), [small_shard(step)])
    return root, replica


def test_generations_of_the_own_local_tier_are_left_to_the_agents(tmp_path: Path) -> None:
    root, replica = local_tier(tmp_path)
    unfinished(root, 9)
    unfinished(replica, 9)
    checkpoints(tmp_path / "other", 1)
    argv = ["--local-ckpt-dir-prefix", str(tmp_path), "--job-identifier", "mine"]
    argv += ["--num-checkpoints-to-keep", "1"]
    assert Cleaner(parse(argv)).run_pass()
    assert (steps_of(root), steps_of(replica)) == ([1, 2, 3], [1, 2, 3, 9])
    assert not (tmp_path / "other").exists(), "on the own host a dead job shows"
    assert Cleaner(parse([*argv, "--prune-local"])).run_pass()
    assert (steps_of(root), steps_of(replica)) == ([3], [3, 9])


# --- trouble --------------------------------------------------------------------------------------


def test_a_dry_run_says_what_would_go_and_removes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = checkpoints(tmp_path / "mine", 1, 2)
    unfinished(root, 3)
    checkpoints(tmp_path / "other", 1)
    make_old(tmp_path / "other")
    before = sorted(tmp_path.rglob("*"))
    with caplog.at_level("INFO"):
        clean(tmp_path, "--dry-run", "--num-checkpoints-to-keep", "1")
    assert sorted(tmp_path.rglob("*")) == before
    for path in (tmp_path / "other", root / "step=1", root / "step=3"):
        assert f"{path} would be removed" in caplog.text


def test_a_place_that_fails_is_said_once_and_the_rest_is_cleaned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = checkpoints(tmp_path / "mine", 1, 2)
    checkpoints(tmp_path / "other", 1)
    make_old(tmp_path / "other")
    loop = root / "step=9-unfinished"
    loop.symlink_to(loop)  # cannot be opened by anyone
    argv = ["--persistent-ckpt-dir-prefix", str(tmp_path), "--job-identifier", "mine"]
    cleaner = Cleaner(parse([*argv, "--num-checkpoints-to-keep", "1"]))
    with caplog.at_level("WARNING"):
        assert not cleaner.run_pass()
        assert not cleaner.run_pass()
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith(f"reading {root} failed, will be tried again: [Errno 40]")
    assert steps_of(root) == [2, 9]
    assert not (tmp_path / "other").exists()
    loop.unlink()
    assert cleaner.run_pass()


def test_a_prefix_that_comes_later_is_waited_for(tmp_path: Path) -> None:
    cleaner = clean(tmp_path / "later", "--num-checkpoints-to-keep", "1")
    root = checkpoints(tmp_path / "later" / "mine", 1, 2)
    assert cleaner.run_pass()
    assert steps_of(root) == [2]


def test_what_a_killed_cleaner_had_renamed_is_swept_later(tmp_path: Path) -> None:
    root = checkpoints(tmp_path / "mine", 1)
    trash = root / f"{removal.TRASH}abc"
    trash.mkdir()
    (trash / "file").write_text("x")
    clean(tmp_path)
    assert trash.is_dir(), "it may be about to be put back"
    clock = ManualClock(datetime.now(timezone.utc) + timedelta(minutes=2))
    removal.sweep(root, clock)
    assert not trash.exists()


# --- the command ----------------------------------------------------------------------------------


def test_once_makes_one_pass_and_exits_with_0(tmp_path: Path) -> None:
    root = checkpoints(tmp_path / "mine", 1, 2)
    with running(tmp_path, "--once", "--num-checkpoints-to-keep", "1") as command:
        assert command.wait(timeout=60) == 0
    assert steps_of(root) == [2]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_ends_it_at_once(tmp_path: Path, number: signal.Signals, code: int) -> None:
    with running(tmp_path, "--sleep-interval", "3600") as command:
        command.wait_for_line("is kept clean", timeout=60)
        command.signal(number)
        assert command.wait(timeout=60) == code


def test_persistent_storage_is_left_to_the_first_host(tmp_path: Path) -> None:
    root = checkpoints(tmp_path / "mine", 1, 2)
    argv = [str(BENCHMARK / "ckpt_cleaner.py"), "--persistent-ckpt-dir-prefix", str(tmp_path), "--once"]
    done = warm.run(
        [sys.executable, *argv, "--job-identifier", "mine", "--num-checkpoints-to-keep", "1"],
        env={**os.environ, "NODE_RANK": "1"},
        timeout=60,
        check=True,
    )
    assert "is left to the cleaner of the first host" in done.stderr
    assert steps_of(root) == [1, 2]


# --- a job in full swing --------------------------------------------------------------------------


@pytest.mark.slow
def test_a_job_that_saves_and_is_killed_beside_two_cleaners_always_finds_its_newest(tmp_path: Path) -> None:
    root = tmp_path / "mine" / "checkpoint"
    flags = ("--sleep-interval", "0.01", "--num-checkpoints-to-keep", "1")
    job = [sys.executable, "-m", "tests.checkpoint.saving_beside_cleaners", str(root)]
    newest = 0
    with running(tmp_path, *flags) as first, running(tmp_path, *flags) as second:
        for life in range(3):
            with Command(job) as saver:
                began = int(saver.wait_for_line(r"^began (\d+)", timeout=180)[1])
                assert began >= newest, "a committed checkpoint was lost"
                saver.wait_for_line("committed", timeout=180, count=5 + 5 * life)
                saver.signal(signal.SIGKILL)
                saver.wait(timeout=60)
                newest = max(int(line.split()[1]) for line in saver.lines if line.startswith("committed"))
        for cleaner in (first, second):
            cleaner.wait_for_line("removed: the newest 1", timeout=180)
            assert cleaner.returncode is None
    storage = LocalStorage(root)
    usable = [found.step for found in list_checkpoints(storage) if found.condition is Condition.COMPLETE]
    assert max(usable) >= newest
    verify(storage, max(usable))
    for cleaner in (first, second):
        assert "WARNING" not in cleaner.output


@pytest.mark.thorough("a save of the step that is being removed is near")
@pytest.mark.slow
def test_training_with_an_agent_resumes_where_it_was_beside_a_cleaner(tmp_path: Path) -> None:
    root = tmp_path / "mine" / "checkpoint"
    argv = [sys.executable, "-m", "tests.checkpoint.training_until_killed", str(root)]
    env = {"JOB_IDENTIFIER": f"mine-{os.getpid()}"}
    with running(tmp_path, "--sleep-interval", "0.01", "--num-checkpoints-to-keep", "1") as cleaner:
        with Command([*argv, "6", "1", "grace=1"], env=env) as trainer:
            assert trainer.wait(timeout=300) == 0
            trainer.survivors(timeout=60)
            saved = [line.split()[1:] for line in trainer.lines if line.startswith("saved")]
        assert [int(step) for step, _ in saved] == list(range(1, 7))
        assert {state for _, state in saved} == {"committed"}
        with Command([*argv, "7", "1", "grace=1"], env=env) as trainer:
            trainer.wait_for_line("restored 6 ", timeout=180)
            assert trainer.wait(timeout=300) == 0
            trainer.survivors(timeout=60)
        cleaner.wait_for_line("removed: the newest 1", timeout=180)
    assert json.loads((root / "step=7" / "manifest.json").read_text())["body"]["step"] == 7
    verify(LocalStorage(root), 7)
