# SPDX-License-Identifier: Apache-2.0
"""Checkpoints go to GKE's replicator and come back, with a real process on the other side."""

from __future__ import annotations

import errno
import logging
import os
import signal
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from resiliency.checkpoint.agent.jobs import ShowJob
from resiliency.checkpoint.agent.protocol import Settings
from resiliency.checkpoint.agent.tier_writers import Worker
from resiliency.checkpoint.commit.retention import clean_tier
from resiliency.checkpoint.format.catalog import Condition, inspect, quarantine
from resiliency.checkpoint.format.lease import Lease
from resiliency.checkpoint.format.local import LocalFormat
from resiliency.checkpoint.format.marker import Marker, MarkerState, put_marker
from resiliency.checkpoint.gke.hand_off import locked
from resiliency.checkpoint.gke.replicated_job import ReplicatedJob
from resiliency.checkpoint.gke.replicator import (
    NotHandedOver,
    Replicator,
    ReplicatorError,
    ReplicatorFailed,
    ReplicatorSilent,
    meet_replicators,
)
from resiliency.checkpoint.names import TierName
from resiliency.checkpoint.ranks import RankGroup
from resiliency.checkpoint.storage.posix import LocalStorage
from resiliency.checkpoint.storage.throttle import Throttle
from resiliency.errors import CheckpointIncomplete, ConfigError
from resiliency.runtime import RunInfo
from resiliency.testing.processes import Command
from resiliency.testing.rank_pool import RankPool
from resiliency.testing.replicator import ReplicatorFault, start_replicator
from resiliency.testing.storage import StorageTrouble, TroubledStorage
from tests.checkpoint.storage_builders import assert_holds, save, small_shard

SOON = timedelta(seconds=60)
#: For what never comes: long enough to be looked at more than once.
BRIEF = timedelta(seconds=0.5)


def job(directory: Path, *, node_rank: int = 0, nodes: int = 1) -> ReplicatedJob:
    return ReplicatedJob(directory=directory, job_name="llama-3", node_rank=node_rank, nodes=nodes)


@contextmanager
def serving(
    directory: Path, *, store: Path | None = None, fault: ReplicatorFault = ReplicatorFault.NONE
) -> Iterator[Command]:
    directory.mkdir(exist_ok=True)
    with start_replicator(directory, store=store, fault=fault) as command:
        yield command


def commit(directory: Path, step: int, *, rank: int = 0, world_size: int = 1) -> None:
    """What an agent leaves in the local tier of its host."""
    shard = small_shard(step, rank=rank, world_size=world_size)
    save(LocalStorage(directory), LocalFormat(), [shard], ranks=[rank])


def hand_over(replicator: Replicator, command: Command, step: int) -> None:
    commit(replicator.job.directory, step)
    assert replicator.hand_over(step)
    command.wait_for_line(rf"kept {step}", timeout=60)


def test_a_step_that_was_handed_over_is_there_again_after_the_next_start(tmp_path: Path) -> None:
    volume = tmp_path / "local"
    with serving(volume) as command:
        replicator = Replicator(job(volume))
        replicator.start(SOON)
        assert replicator.restore(SOON) is None
        hand_over(replicator, command, 10)
        hand_over(replicator, command, 20)
        assert not (volume / "step=20").exists()

        replicator = Replicator(job(volume))
        replicator.start(SOON)
        assert replicator.restore(SOON) == 20
    assert (volume / "step=20").is_symlink()
    assert not list(volume.glob("*.restore"))
    assert inspect(LocalStorage(volume), 20).condition is Condition.COMPLETE
    assert_holds(LocalStorage(volume), small_shard(20))


def test_two_hosts_get_back_their_own_parts_also_on_an_empty_host(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    volumes = [tmp_path / "a", tmp_path / "b", tmp_path / "new host"]

    def start(stack: ExitStack, hosts: list[Path]) -> list[tuple[Replicator, Command, int | None]]:
        served = []
        for node_rank, volume in enumerate(hosts):
            command = stack.enter_context(serving(volume, store=store))
            served.append((Replicator(job(volume, node_rank=node_rank, nodes=2)), command))

        def meet(replicator: Replicator) -> int | None:
            replicator.start(SOON)
            return replicator.restore(SOON)

        with ThreadPoolExecutor(2) as pool:
            steps = list(pool.map(meet, [replicator for replicator, _ in served]))
        return [(*one, step) for one, step in zip(served, steps, strict=True)]

    with ExitStack() as stack:
        served = start(stack, volumes[:2])
        assert [step for _, _, step in served] == [None, None]
        for saved, rank in ((5, 0), (5, 1), (6, 0)):  # host 1 never hands over step 6
            replicator, command, _ = served[rank]
            commit(replicator.job.directory, saved, rank=rank, world_size=2)
            replicator.hand_over(saved)
            command.wait_for_line(f"kept {saved}", timeout=60)
    with ExitStack() as stack:
        again = start(stack, [volumes[0], volumes[2]])
        assert [step for _, _, step in again] == [5, 5]
        for rank, (replicator, _, _) in enumerate(again):
            assert_holds(LocalStorage(replicator.job.directory), small_shard(5, rank=rank, world_size=2))


def test_the_config_says_who_we_are(tmp_path: Path) -> None:
    info = RunInfo(job_name="llama-3", node_rank=3, world_size=32, local_world_size=8)
    text = ReplicatedJob.from_run(info, tmp_path, peers_per_node=2, backup_interval_minutes=5).to_yaml()
    assert text.splitlines() == [
        'job-name: "llama-3"',
        'framework: "pytorch.distributed"',
        "node-rank: 3",
        "nodes: 4",
        "peers-per-node: 2",
        "backup-interval-minutes: 5",
    ]


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"job_name": "$HOME"}, r"cannot take the job name '\$HOME'"),
        ({"job_name": "123"}, "at least one letter"),
        ({"node_rank": 2}, "node rank 2 is not below the number of nodes, 2"),
        ({"peers_per_node": 0}, "peers_per_node must be 1 to 1 with 2 nodes, found 0"),
        ({"peers_per_node": 2}, "peers_per_node must be 1 to 1"),
        ({"backup_interval_minutes": 0}, "at least 1, found 0"),
        ({"peer_ranks": (2,)}, r"peer ranks must be 0 to 1, found \(2,\)"),
    ],
)
def test_what_the_replicator_would_choke_on_is_refused(
    tmp_path: Path, wrong: dict[str, object], text: str
) -> None:
    good: dict[str, object] = {"directory": tmp_path, "job_name": "j", "node_rank": 0, "nodes": 2}
    with pytest.raises(ConfigError, match=text):
        ReplicatedJob(**(good | wrong))  # type: ignore[arg-type]


def test_a_replicator_that_takes_nothing_is_named_and_the_config_taken_back(tmp_path: Path) -> None:
    text = r"node 0 did not take .*replicator\.yaml within 0\.5 s"
    with (
        serving(tmp_path, fault=ReplicatorFault.IGNORES_CONFIG),
        pytest.raises(ReplicatorSilent, match=text),
    ):
        Replicator(job(tmp_path)).start(BRIEF)
    assert list(tmp_path.iterdir()) == []


def test_a_config_that_cannot_be_made_durable_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a broken disk does when names are synced: a replicator that came later would clean the volume."""

    def fail(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(ConfigError, match="cannot be written: Input/output error"):
        Replicator(job(tmp_path)).start(BRIEF)
    assert list(tmp_path.iterdir()) == []


def test_a_wait_for_a_replicator_that_is_not_there_is_told_at_once_and_then_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO), pytest.raises(ReplicatorSilent):
        Replicator(job(tmp_path), tell_every=BRIEF / 5).start(BRIEF)
    told = [record for record in caplog.records if "waits for the replicator to take" in record.getMessage()]
    assert [record.levelno for record in told[:2]] == [logging.INFO, logging.WARNING]
    assert str(tmp_path / "replicator.yaml: 0 of 0.5 s") in told[0].getMessage()


def test_a_failed_replicator_raises_with_what_it_said(tmp_path: Path) -> None:
    with serving(tmp_path, fault=ReplicatorFault.FAILS):
        replicator = Replicator(job(tmp_path))
        replicator.start(SOON)
        with pytest.raises(ReplicatorFailed, match="node 0 failed: the bucket is gone"):
            replicator.restore(SOON)
    # It was heard: the next start is not blamed for it.
    assert not (tmp_path / "replicator.failed").exists()


def test_a_failure_of_an_earlier_start_is_logged_and_not_held_against_this_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "replicator.failed").write_text("yesterday")
    (tmp_path / "replicator.errors").write_text("the day before")
    (tmp_path / "llama-3-s7-n0-w0.restore").symlink_to("gone.data")
    with serving(tmp_path), caplog.at_level(logging.WARNING):
        replicator = Replicator(job(tmp_path))
        replicator.start(SOON)
        assert replicator.restore(SOON) is None
    assert "to an earlier start: yesterday" in caplog.text
    assert "to an earlier start: the day before" in caplog.text


def test_complaints_are_logged_and_training_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with serving(tmp_path, fault=ReplicatorFault.COMPLAINS) as command, caplog.at_level(logging.WARNING):
        replicator = Replicator(job(tmp_path))
        replicator.start(SOON)
        assert replicator.restore(SOON) is None
        replicator.check()
        assert "the replicator reports: peer 1 is slow" in caplog.text
        assert not (tmp_path / "replicator.errors").exists()
        hand_over(replicator, command, 1)


def test_a_replicator_that_dies_is_missed_after_the_timeout(tmp_path: Path) -> None:
    with serving(tmp_path, fault=ReplicatorFault.DIES) as command:
        replicator = Replicator(job(tmp_path))
        replicator.start(SOON)
        assert command.wait(timeout=60) == 1
        with pytest.raises(ReplicatorSilent, match="said nothing about a restore within"):
            replicator.restore(BRIEF)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A volume whose replicator holds step 10 of the job."""
    with serving(tmp_path) as command:
        replicator = Replicator(job(tmp_path))
        replicator.start(SOON)
        replicator.restore(SOON)
        hand_over(replicator, command, 10)
    return tmp_path


def test_a_restore_that_was_announced_and_never_came_names_its_step(saved: Path) -> None:
    with serving(saved, fault=ReplicatorFault.STOPS_AT_PRERESTORE):
        replicator = Replicator(job(saved))
        replicator.start(SOON)
        (saved / "replicator.errors").write_text("cannot reach peer 10.0.0.3")
        with pytest.raises(ReplicatorSilent) as failure:
            replicator.restore(timedelta(seconds=3))
    assert "did not restore step 10 within 3 s" in str(failure.value)
    assert "cannot reach peer 10.0.0.3" in str(failure.value)


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (ReplicatorFault.DANGLING_LINK, "leads to no directory"),
        (ReplicatorFault.WRONG_STEP, "holds step 10"),
        (ReplicatorFault.LOSES_MANIFEST, "manifest.json"),
    ],
)
def test_a_bad_restore_is_left_for_people_and_never_called_a_checkpoint(
    saved: Path, fault: ReplicatorFault, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(saved, fault=fault), caplog.at_level(logging.ERROR):
        replicator = Replicator(job(saved))
        replicator.start(SOON)
        assert replicator.restore(SOON) is None
    assert "what the replicator restored is not used" in caplog.text
    assert why in caplog.text
    assert not list(saved.glob("step=*"))
    assert len(list(saved.glob("*.restore"))) == 1


def test_a_step_that_is_not_whole_is_not_handed_over(saved: Path) -> None:
    with serving(saved):
        replicator = Replicator(job(saved))
        replicator.start(SOON)
        assert replicator.restore(SOON) == 10
        with pytest.raises(CheckpointIncomplete, match="step=11 cannot be handed over"):
            replicator.hand_over(11)
        commit(saved, 12)
        quarantine(LocalStorage(saved), 12, "bytes differ")
        with pytest.raises(CheckpointIncomplete, match="unfinished corrupt: bytes differ"):
            replicator.hand_over(12)
        assert replicator.hand_over(10), "it came from there"
        assert (saved / "step=10").is_symlink()


def test_a_step_that_is_being_read_stays_until_its_reader_is_done(saved: Path) -> None:
    with serving(saved) as command:
        replicator = Replicator(job(saved))
        replicator.start(SOON)
        replicator.restore(SOON)
        commit(saved, 11)
        with Lease(LocalStorage(saved), 11):
            assert not replicator.hand_over(11)
            assert_holds(LocalStorage(saved), small_shard(11))
        assert replicator.hand_over(11)
        command.wait_for_line("kept 11", timeout=60)
        # The replicator dropped what it had restored; the link to that goes with the next hand-over.
        hand_over(replicator, command, 12)
        assert not os.path.lexists(saved / "step=10")


@pytest.mark.slow
def test_a_step_waits_while_the_local_tier_deletes(saved: Path) -> None:
    """It may be this one that is deleted: half of it must never get its new name."""
    commit(saved, 11)
    with locked(saved), pytest.raises(NotHandedOver, match="another process of this host"):
        Replicator(job(saved)).hand_over(11)
    assert_holds(LocalStorage(saved), small_shard(11))
    assert Replicator(job(saved)).hand_over(11)


def clean(volume: Path) -> None:
    """What an agent does that is started anew, at once and at its first save."""
    worker = Worker(TierName.LOCAL, lambda job, done: None, Throttle())
    settings = Settings(
        directory="",
        local_directory=str(volume),
        local_backlog=4,
        keep=1,
        replicated=False,
        bytes_per_s=0,
        save_timeout_s=60,
    )
    assert worker.try_put(ShowJob(settings=settings))
    worker.close(SOON)
    clean_tier(LocalStorage(volume), run_id="run")


@pytest.mark.parametrize("is_full", [False, True], ids=["there-is-room", "the-disk-is-full"])
def test_a_step_that_a_failed_hand_over_left_hidden_outlives_the_cleaning_of_a_new_agent(
    saved: Path, *, is_full: bool
) -> None:
    """Three faults in a row: the step is not renamed, its marker is not removed, and an agent dies."""
    troubles = [StorageTrouble(step=11, operation=operation) for operation in ("replace", "remove")]
    full = [StorageTrouble(step=11, operation="write", errno=errno.ENOSPC)]
    volume = TroubledStorage(LocalStorage(saved), *troubles, *(full if is_full else []))
    commit(saved, 11)
    put_marker(volume, 12, Marker(state=MarkerState.WRITING))
    replicator = Replicator(job(saved), storage=volume)
    with pytest.raises(NotHandedOver, match="step 11 could not be handed over for now"):
        replicator.hand_over(11)
    assert volume.is_over
    assert inspect(volume, 11).condition is Condition.UNFINISHED
    clean(saved)
    # An empty marker does not say that it is one of a hand-over.
    expected = Condition.UNFINISHED if is_full else Condition.COMPLETE
    assert inspect(volume, 11).condition is expected
    assert not (saved / "step=12-unfinished").exists()
    assert replicator.hand_over(11)
    assert_holds_renamed(saved, 11)


def assert_holds_renamed(volume: Path, step: int) -> None:
    os.rename(volume / str(step), volume / f"step={step}")
    assert_holds(LocalStorage(volume), small_shard(step))


def test_a_step_that_is_being_deleted_is_not_shown_for_a_hand_over_that_failed_before(saved: Path) -> None:
    troubles = [StorageTrouble(step=11, operation=operation) for operation in ("replace", "remove")]
    volume = TroubledStorage(LocalStorage(saved), *troubles)
    replicator = Replicator(job(saved), storage=volume)
    for step in (11, 12):
        commit(saved, step)
    with pytest.raises(NotHandedOver):
        replicator.hand_over(11)
    clean(saved)
    put_marker(volume, 11, Marker(state=MarkerState.REMOVING))  # the local tier has given it up meanwhile
    (saved / "step=11" / "manifest.json").unlink()
    assert replicator.hand_over(12)
    assert inspect(volume, 11).condition is Condition.UNFINISHED


def test_nothing_is_handed_to_a_replicator_that_failed(saved: Path) -> None:
    commit(saved, 11)
    (saved / "replicator.failed").write_text("out of memory")
    with pytest.raises(ReplicatorFailed, match="out of memory"):
        Replicator(job(saved)).hand_over(11)
    assert_holds(LocalStorage(saved), small_shard(11))


def test_a_volume_that_is_not_mounted_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no directory .*nowhere\.  .*multitier-checkpoint"):
        Replicator(job(tmp_path / "nowhere")).start(BRIEF)


def test_a_replicator_killed_while_it_restores_leaves_nothing_that_counts(saved: Path) -> None:
    with serving(saved, fault=ReplicatorFault.STOPS_AT_PRERESTORE) as command:
        replicator = Replicator(job(saved))
        replicator.start(SOON)
        command.signal(signal.SIGKILL)
        command.wait(timeout=60)
    with serving(saved):
        replicator.start(SOON)
        assert replicator.restore(SOON) == 10


def _meet(rank: int, volume: str) -> object:
    directory = Path(volume) / str(rank)
    mine = Replicator(job(directory, node_rank=rank, nodes=2)) if directory.is_dir() else None
    try:
        return meet_replicators(mine, RankGroup.of_process_group(), timeout=timedelta(seconds=20))
    except ReplicatorError as error:
        return f"mine: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def test_ranks_learn_together_that_the_replicator_of_one_host_failed(
    tmp_path: Path, rank_pool: RankPool
) -> None:
    with (
        serving(tmp_path / "0", fault=ReplicatorFault.FAILS),
        serving(tmp_path / "1", fault=ReplicatorFault.FAILS),
    ):
        first, second, third = rank_pool.run(_meet, 3, str(tmp_path)).values
    assert str(first).startswith("mine: the replicator of node 0 failed")
    assert str(second).startswith("mine: the replicator of node 1 failed")
    assert "PeerError: 2 of 3 ranks failed while meeting the replicators; rank 0" in str(third)


def test_ranks_agree_on_what_came_back(tmp_path: Path, rank_pool: RankPool) -> None:
    store = tmp_path / "store"
    store.mkdir()
    with serving(tmp_path / "0", store=store), serving(tmp_path / "1", store=store):
        assert rank_pool.run(_meet, 3, str(tmp_path)).values == [None, None, None]
