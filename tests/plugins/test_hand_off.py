# SPDX-License-Identifier: Apache-2.0
"""Checkpoints go to the replicator from a thread beside training, with a real process on the other side."""

from __future__ import annotations

import copy
import errno
import logging
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from resiliency.checkpoint.format.catalog import Condition, inspect
from resiliency.checkpoint.format.lease import Lease
from resiliency.checkpoint.format.local import LocalFormat
from resiliency.checkpoint.gke.hand_off import give_up
from resiliency.checkpoint.gke.replicated_job import ReplicatedJob
from resiliency.checkpoint.storage.posix import LocalStorage
from resiliency.checkpoint.trainer.handles import SaveHandle, SaveState
from resiliency.errors import ConfigError
from resiliency.plugins.hand_off import HandOff
from resiliency.testing.processes import Command
from resiliency.testing.replicator import start_replicator
from resiliency.testing.storage import StorageTrouble, TroubledStorage
from tests.checkpoint.storage_builders import no_descriptor_left, save, small_shard
from tests.waiting import wait_until, wait_until_equal

SOON = timedelta(seconds=60)
LOCAL = ("local",)


class Job:
    """A training whose local tier is the volume of a replicator."""

    def __init__(
        self, volume: Path, replicator: Command, *, node_rank: int = 0, nodes: int = 1, **options: Any
    ) -> None:
        self.volume = volume
        self.replicator = replicator
        self.node_rank, self.nodes = node_rank, nodes
        job = ReplicatedJob(directory=volume, job_name="llama-3", node_rank=node_rank, nodes=nodes)
        options = {"timeout": SOON, "end_timeout": SOON, **options}
        self.hand_off = HandOff(job, is_first=True, **options)

    def saves(self, step: int, tiers: tuple[str, ...] = LOCAL) -> SaveHandle:
        handle = SaveHandle(step, tiers)
        self.hand_off.saved(handle)
        return handle

    def saved(self, step: int) -> None:
        """A save that is complete on all hosts."""
        handle = self.saves(step)
        shard = small_shard(step, rank=self.node_rank, world_size=self.nodes)
        save(LocalStorage(self.volume), LocalFormat(), [shard], ranks=[self.node_rank])
        handle.update(state=SaveState.COMMITTED, committed_in=LOCAL, complete=True)

    def step_done(self) -> None:
        self.hand_off.step_done()

    def wait_for_kept(self, step: int) -> None:
        self.replicator.wait_for_line(f"kept {step}$", timeout=SOON.total_seconds())

    def wait_for_waiting(self, *steps: int) -> None:
        wait_until_equal(lambda: self.hand_off.waiting, list(steps))


@contextmanager
def training(volume: Path, **options: Any) -> Iterator[Job]:
    """It ends by an error, as far as the hand-over knows, if it did not end before."""
    volume.mkdir(exist_ok=True)
    with start_replicator(volume) as replicator:
        job = Job(volume, replicator, **options)
        job.hand_off.meet()
        try:
            yield job
        finally:
            job.hand_off.stop()


class SlowVolume:
    """What the job reads of the volume before each hand-over does not answer until `answer` is called."""

    def __init__(self, volume: Path) -> None:
        self._file = volume / "replicator.errors"
        os.mkfifo(self._file)

    def answer(self) -> None:
        os.close(os.open(self._file, os.O_WRONLY))


def test_steps_are_handed_over_in_order_beside_training_and_the_last_one_at_its_end(tmp_path: Path) -> None:
    with training(tmp_path) as job:
        job.saved(1)
        job.saved(2)
        job.step_done()
        job.wait_for_kept(1)
        job.wait_for_kept(2)
        last = job.saves(3)
        save(LocalStorage(tmp_path), LocalFormat(), [small_shard(3)])
        later = threading.Timer(
            0.2, lambda: last.update(state=SaveState.COMMITTED, committed_in=LOCAL, complete=True)
        )
        later.start()
        job.hand_off.finish()
        job.wait_for_kept(3)
        later.join()


def test_training_does_not_wait_for_a_volume_that_is_slow(tmp_path: Path) -> None:
    with training(tmp_path) as job:
        volume = SlowVolume(tmp_path)
        job.saved(5)
        answered = threading.Event()

        def answer_at_last() -> None:  # else a step that waited would never end
            answered.wait(20)
            volume.answer()

        helper = threading.Thread(target=answer_at_last)
        helper.start()
        job.step_done()
        still_there = (tmp_path / "step=5").exists()
        answered.set()
        helper.join()
        assert still_there
        job.wait_for_kept(5)


def test_saves_that_can_not_become_complete_any_more_are_forgotten(tmp_path: Path) -> None:
    with training(tmp_path) as job:
        for state in (SaveState.FAILED, SaveState.SKIPPED):
            job.saves(1).update(state=state)
            job.step_done()
            job.wait_for_waiting()
        job.saves(2, ("local", "persistent")).update(state=SaveState.COMMITTED, committed_in=("persistent",))
        job.saves(3, ("persistent",))
        job.step_done()
        job.wait_for_waiting()
        # Of this one another host lost its part, and will never say so.
        job.saves(4).update(state=SaveState.COMMITTED, committed_in=LOCAL)
        job.saved(5)
        job.saves(6)
        job.step_done()
        job.wait_for_kept(5)
        job.wait_for_waiting(6)
        for step in range(7, 107):
            job.saves(step)
        assert len(job.hand_off.waiting) < 20


def test_a_step_that_is_being_read_is_handed_over_after_a_later_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with training(tmp_path) as job, caplog.at_level(logging.DEBUG):
        job.saved(1)
        with Lease(LocalStorage(tmp_path), 1):
            job.step_done()
            wait_until(lambda: "step 1 is in use" in caplog.text, "nothing is said of its reader")
            assert job.hand_off.waiting == [1]
            assert (tmp_path / "step=1").is_dir()
        job.saved(2)
        job.step_done()
        job.wait_for_kept(1)
        job.wait_for_kept(2)


def test_a_step_that_is_not_whole_is_reported_and_the_next_one_handed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with training(tmp_path) as job, caplog.at_level(logging.ERROR):
        job.saves(1).update(state=SaveState.COMMITTED, committed_in=LOCAL, complete=True)
        job.saved(2)
        job.step_done()
        job.wait_for_kept(2)
    assert "step 1 was not handed over" in caplog.text


def test_a_training_that_fails_hands_over_nothing_more(tmp_path: Path) -> None:
    with training(tmp_path) as job:
        job.saved(1)
        job.hand_off.stop()
        job.step_done()
        job.saves(2)
        assert (tmp_path / "step=1").is_dir()
        assert job.hand_off.waiting == []


def test_the_end_of_a_training_does_not_wait_for_ever(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with training(tmp_path, end_timeout=timedelta(seconds=0.2)) as job, caplog.at_level(logging.ERROR):
        volume = SlowVolume(tmp_path)
        job.saved(5)
        job.hand_off.finish()
        assert "steps [5] were not handed over" in caplog.text
        volume.answer()
        job.wait_for_kept(5)
        wait_until(
            lambda: not any(t.name == "resiliency-hand-over" for t in threading.enumerate()),
            "its thread goes on",
        )


def test_a_trainer_may_copy_it_with_its_plugins(tmp_path: Path) -> None:
    job = ReplicatedJob(directory=tmp_path, job_name="llama-3", node_rank=0, nodes=1)
    hand_off = HandOff(job, is_first=True)
    assert copy.deepcopy([hand_off]) == [hand_off]


def test_a_complete_step_that_is_read_for_long_is_handed_over_all_the_same(tmp_path: Path) -> None:
    with training(tmp_path) as job:
        job.saved(1)
        with Lease(LocalStorage(tmp_path), 1):
            for step in range(2, 2 + 17):  # more than are followed
                job.saved(step)
                job.step_done()
            assert 1 in job.hand_off.waiting
        job.step_done()
        job.wait_for_kept(18)
        assert not (tmp_path / "step=1").exists()


def test_a_last_step_that_stays_in_use_is_named_at_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with training(tmp_path, end_timeout=timedelta(seconds=2)) as job, Lease(LocalStorage(tmp_path), 1):
        job.saved(1)
        job.hand_off.finish()
    assert "steps [1] were not handed over: step 1 is in use" in caplog.text


# --- trouble ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operation", "number"),
    [
        ("open", errno.EMFILE),
        ("list", errno.ESTALE),
        ("create", errno.EMFILE),
        ("write", errno.ENOSPC),
        ("sync", errno.EIO),
        ("sync_dir", errno.EIO),
        ("replace", errno.ESTALE),
        ("remove", errno.EIO),
    ],
)
def test_an_error_that_passes_costs_no_step_and_no_order_whatever_it_meets(
    tmp_path: Path, operation: str, number: int
) -> None:
    trouble = StorageTrouble(step=2, operation=operation, errno=number)
    storage = TroubledStorage(LocalStorage(tmp_path), trouble)
    with training(tmp_path, storage=storage) as job:
        for step in (1, 2, 3):
            job.saved(step)
        job.step_done()
        job.wait_for_kept(3)
        job.hand_off.finish()
        assert job.hand_off.given_up == []
    assert storage.is_over
    renamed = [name for name in storage.operations if name.startswith("replace step=")]
    assert renamed == [f"replace step={step} {step}" for step in (1, 2, 3)]
    assert not list(tmp_path.glob("step=*"))


def test_while_no_descriptor_is_left_steps_wait_and_then_go_in_order(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with training(tmp_path) as job:
        for step in (1, 2):
            job.saved(step)
        with no_descriptor_left():
            job.step_done()
            wait_until(lambda: "step 1 could not be handed over for now" in caplog.text, "it was not tried")
            assert job.hand_off.waiting == [1, 2]
        for step in (1, 2):
            job.wait_for_kept(step)
    assert job.hand_off.given_up == []


def test_a_step_that_one_host_of_two_cannot_hand_over_at_first_keeps_no_replicator_waiting(
    tmp_path: Path,
) -> None:
    """A fault at (host b, step 2, the rename): without another try both replicators would wait for ever."""
    store, volumes = tmp_path / "store", [tmp_path / "a", tmp_path / "b"]
    for directory in (store, *volumes):
        directory.mkdir()
    trouble = StorageTrouble(step=2, operation="replace", errno=errno.EIO)
    storages = [LocalStorage(volumes[0]), TroubledStorage(LocalStorage(volumes[1]), trouble)]
    with ExitStack() as stack:
        jobs = [
            Job(
                volume,
                stack.enter_context(start_replicator(volume, store=store)),
                node_rank=rank,
                nodes=2,
                storage=storage,
            )
            for rank, (volume, storage) in enumerate(zip(volumes, storages, strict=True))
        ]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda job: job.hand_off.meet(), jobs))
        for job in jobs:
            stack.callback(job.hand_off.stop)
            for step in (1, 2, 3):
                job.saved(step)
            job.step_done()
        for job in jobs:
            job.replicator.wait_for_line("complete 3$", timeout=SOON.total_seconds())


def test_what_does_not_pass_is_given_up_by_name_and_later_steps_have_one_try_until_one_succeeds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    troubles = [StorageTrouble(step=step, operation="replace", times=1000) for step in (1, 2)]
    storage = TroubledStorage(LocalStorage(tmp_path), *troubles)
    with training(tmp_path, storage=storage, timeouts=timedelta(seconds=0.2)) as job:
        for step in (1, 2, 3):
            job.saved(step)
        job.step_done()
        job.wait_for_kept(3)
        assert job.hand_off.given_up == [1, 2]
        # They are whole, nothing hides them, and the local tier may delete them.
        for step in (1, 2):
            assert inspect(LocalStorage(tmp_path), step).condition is Condition.COMPLETE
            wait_until((tmp_path / f"step={step}.given-up").exists, f"step {step} is not given up")
    assert "step 1 was not handed over and is given up: nothing could be handed over for 0.2 s" in caplog.text


def test_a_step_that_stays_in_use_is_handed_over_when_patience_is_over(tmp_path: Path) -> None:
    with training(tmp_path, timeouts=timedelta(seconds=0.2)) as job, Lease(LocalStorage(tmp_path), 1):
        job.saved(1)
        job.step_done()
        job.wait_for_kept(1)
        assert job.hand_off.given_up == []


def test_when_the_replicator_has_failed_every_step_is_left_to_the_local_tier(tmp_path: Path) -> None:
    with training(tmp_path) as job:
        (tmp_path / "replicator.failed").write_text("out of memory")
        for step in (1, 2):
            job.saved(step)
            job.step_done()
            wait_until((tmp_path / f"step={step}.given-up").exists, f"step {step} is not given up")
            assert (tmp_path / f"step={step}").is_dir()
        assert job.hand_off.given_up == [1, 2]


def test_steps_that_the_local_tier_gave_up_are_passed_over_and_newer_ones_go_in_order(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    storage = LocalStorage(tmp_path)
    with training(tmp_path, storage=TroubledStorage(storage)) as job, caplog.at_level(logging.WARNING):
        for step in (1, 2, 3, 4):
            job.saved(step)
        for step in (1, 2):
            give_up(storage, step)
        storage.remove_tree("step=1")  # of 2 only the note is there yet
        job.step_done()
        job.wait_for_kept(3)
        job.wait_for_kept(4)
        assert job.hand_off.given_up == [1, 2]
        assert (tmp_path / "step=2").is_dir()
    assert "step 1 is not handed over: the local tier gave it up" in caplog.text
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_step_that_the_replicator_brought_back_holds_nothing_up_when_it_is_saved_again(
    tmp_path: Path,
) -> None:
    with training(tmp_path) as job:
        job.saved(10)
        os.rename(tmp_path / "step=10", tmp_path / "brought-back.data")
        (tmp_path / "step=10").symlink_to("brought-back.data")
        job.saved(11)
        job.step_done()
        job.wait_for_kept(11)
        assert job.hand_off.given_up == []


@pytest.mark.slow
def test_a_replicator_that_takes_nothing_gets_no_more_until_it_does_and_then_the_rest_in_order(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As one does that waits for another host's: without a word."""
    with (
        # Longer than a replicator on a busy machine takes for a step.
        training(tmp_path, timeouts=timedelta(seconds=1)) as job,
        caplog.at_level(logging.INFO, logger="resiliency"),
    ):
        job.replicator.signal(signal.SIGSTOP)
        for step in range(1, 7):
            job.saved(step)
        job.step_done()
        told = "the replicator has taken nothing for 1 s: steps [1, 2]"
        wait_until(lambda: told in caplog.text, "it is not missed")
        give_up(LocalStorage(tmp_path), 3)  # as the local tier does when too many wait
        job.wait_for_waiting(4, 5, 6)
        assert sorted(name for name in os.listdir(tmp_path) if name.isdecimal()) == ["1", "2"]
        job.replicator.signal(signal.SIGCONT)
        for step in (1, 2, 4, 5, 6):
            job.wait_for_kept(step)
        assert job.hand_off.given_up == [3]
    assert caplog.text.count("the replicator has taken nothing") == 1
    assert "the replicator takes steps again" in caplog.text


def test_a_backlog_of_nothing_is_refused(tmp_path: Path) -> None:
    job = ReplicatedJob(directory=tmp_path, job_name="llama-3", node_rank=0, nodes=1)
    with pytest.raises(ConfigError, match="at least 1 step must be able to wait"):
        HandOff(job, is_first=True, backlog=0)
