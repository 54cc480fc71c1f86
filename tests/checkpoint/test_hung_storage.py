# SPDX-License-Identifier: Apache-2.0
"""Storage that does not answer: a call of the system that does not return.

A pipe in the place of a file is that for real: who opens it waits for the other end.
"""

from __future__ import annotations

import itertools
import os
import queue
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import psutil
import pytest

from resiliency.checkpoint.agent.jobs import SaveJob, ShowJob
from resiliency.checkpoint.agent.protocol import Done, Settings
from resiliency.checkpoint.agent.tier_writers import Worker
from resiliency.checkpoint.capture.arena import RankArena, open_captured
from resiliency.checkpoint.capture.capturer import Capturer
from resiliency.checkpoint.capture.job_memory import DEFAULT_ROOT
from resiliency.checkpoint.commit.retention import BEING_TAKEN
from resiliency.checkpoint.format.catalog import Condition, list_checkpoints
from resiliency.checkpoint.format.marker import put_marker
from resiliency.checkpoint.locks import FileLock
from resiliency.checkpoint.names import TierName
from resiliency.checkpoint.recovery.restore import Tier
from resiliency.checkpoint.storage.interface import Storage
from resiliency.checkpoint.storage.posix import LocalStorage
from resiliency.checkpoint.storage.throttle import Throttle
from resiliency.checkpoint.storage.watched import CallTimeouts
from resiliency.checkpoint.trainer.handles import SaveState
from resiliency.testing.storage import FaultyStorage, MemoryStorage, StorageFault, StorageFaultKind
from tests import agent_host
from tests.checkpoint.checkpointer_builders import Place, make_state
from tests.checkpoint.hanging_storage import Hang
from tests.waiting import agent_of, wait_until, wait_until_equal

SOON = timedelta(seconds=60)
#: Of a call, in these tests.
WAIT = timedelta(seconds=0.2)
pytestmark = [
    pytest.mark.usefixtures("agents_at_once"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


def complete(storage: Storage) -> list[int]:
    return [found.step for found in list_checkpoints(storage) if found.condition is Condition.COMPLETE]


def lent(rank_directory: Path) -> int:
    """How many slots somebody reads."""
    with ExitStack() as opened:
        locks = [FileLock(path) for path in rank_directory.glob("slot-*")]
        for lock in locks:
            opened.callback(lock.close)
        return sum(not lock.try_lock(exclusive=True) for lock in locks)


# --- a worker, and every operation of a commit ------------------------------------------------------


@dataclass
class Bench:
    """A worker over a storage that hangs at one operation, and captures to give it."""

    root: Path
    arena: RankArena
    capturer: Capturer
    storage: FaultyStorage
    worker: Worker
    done: queue.SimpleQueue[Done]
    save_timeout: timedelta = WAIT

    @property
    def settings(self) -> Settings:
        return Settings(
            directory="",
            keep=9,
            replicated=False,
            bytes_per_s=0,
            save_timeout_s=self.save_timeout.total_seconds(),
        )

    def save(self, step: int) -> None:
        capture = self.capturer.begin(make_state(step), step, wait=SOON)
        assert capture is not None
        self.capturer.fence()
        assert capture.wait(SOON)
        slot = open_captured(self.root, 0, step=step)
        assert self.worker.try_put(
            SaveJob(
                tier=TierName.PERSISTENT,
                step=step,
                attempt_id="s",
                run_id="run",
                world_size=1,
                ranks=(0,),
                slots={0: slot},
                settings=self.settings,
            )
        )

    def report(self) -> Done:
        return self.done.get(timeout=60)

    def lent(self) -> int:
        return lent(self.root / "rank-0")


@contextmanager
def bench(root: Path, operation: int) -> Iterator[Bench]:
    storage = FaultyStorage(MemoryStorage(), StorageFault(operation=operation, kind=StorageFaultKind.HANG))
    done: queue.SimpleQueue[Done] = queue.SimpleQueue()
    with ExitStack() as opened:
        arena = RankArena(root, rank=0, world_size=1, slots=3, run_id="s")
        opened.callback(arena.close, remove=True)
        capturer = Capturer(arena)
        opened.callback(capturer.close)
        worker = Worker(TierName.PERSISTENT, lambda _, told: done.put(told), Throttle(), lambda _: storage)
        opened.callback(worker.close, SOON)
        opened.callback(wait_until, lambda: not worker.why_hung(), "the storage hangs on")
        opened.callback(storage.answers.set)
        yield Bench(root, arena, capturer, storage, worker, done)


def operations_of_a_save(root: Path) -> list[str]:
    with bench(root, operation=-1) as made:
        made.save(1)
        assert made.report().error == ""
        return list(made.storage.operations)


@pytest.mark.slow
def test_a_save_whose_storage_hangs_at_any_operation_fails_by_name_and_keeps_only_its_own_slot(
    tmp_path: Path,
) -> None:
    operations = operations_of_a_save(tmp_path / "whole")
    commits_at = [what.startswith("replace step=1-unfinished ") for what in operations].index(True)
    assert commits_at > 10
    for number, operation in enumerate(operations):
        with bench(tmp_path / str(number), operation=number) as made:
            made.save(1)
            made.save(2)
            assert made.storage.hangs.wait(60)
            wait_until(made.worker.why_hung, "no hang is seen")
            made.worker.look_for_hang()
            made.worker.look_for_hang()  # says nothing twice
            first, second = made.report(), made.report()
            what, *_, name = operation.split(" ")
            call = f"{what} memory:/{name} has not returned for ".replace("make_dir", "create directory")
            call = call.replace("replace ", "rename to ")
            assert call.replace("sync_dir", "sync directory") in first.error, operation
            assert (first.step, first.left_out) == (1, False)
            assert (second.step, second.left_out) == (2, True)
            assert second.error == first.error
            assert made.lent() == 1
            # Else the interpreter would not end before the storage answers.
            assert [thread for thread in threading.enumerate() if not thread.daemon] == [
                threading.main_thread()
            ]
            made.storage.answers.set()
            wait_until_equal(made.lent, 0)
            made.save(3)
            assert (made.report().error, made.lent()) == ("", 0)
            # What was given up is not shown, unless it was whole already.
            assert complete(made.storage) == ([1, 3] if number >= commits_at else [3]), operation
            assert made.done.empty()


def test_a_hang_while_nothing_is_saved_is_no_failed_save_but_leaves_out_those_that_wait(
    tmp_path: Path,
) -> None:
    with bench(tmp_path, operation=0) as made:
        put_marker(made.storage.inner, 7, BEING_TAKEN)
        assert made.worker.try_put(ShowJob(settings=made.settings))
        assert made.storage.hangs.wait(60)
        made.save(8)
        wait_until(made.worker.why_hung, "no hang is seen")
        made.worker.look_for_hang()
        report = made.report()
        assert (report.step, report.left_out) == (8, True)
        assert "step=7" in report.error
        assert made.lent() == 0
        assert made.done.empty()


def test_a_worker_whose_storage_hangs_is_left_behind_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with bench(tmp_path, operation=3) as made:
        made.save(1)
        assert made.storage.hangs.wait(60)
        began = time.monotonic()
        made.worker.close(WAIT)
        assert time.monotonic() - began < 30
        assert "the agent leaves without the persistent tier: the storage does not answer" in caplog.text
        assert made.lent() == 1


def test_a_worker_that_is_left_at_a_young_call_is_busy_and_does_not_hang(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with bench(tmp_path, operation=3) as made:
        made.save_timeout = SOON
        made.save(1)
        assert made.storage.hangs.wait(60)
        made.worker.close(timedelta(0))
        assert "the agent leaves without the persistent tier: it is still busy." in caplog.text


def test_a_worker_with_a_full_queue_whose_storage_hangs_is_left_at_once(tmp_path: Path) -> None:
    with bench(tmp_path, operation=3) as made:
        made.save(1)
        assert made.storage.hangs.wait(60)
        while made.worker.try_put(ShowJob(settings=made.settings)):
            pass
        timeout = timedelta(seconds=2)
        wait_until(lambda: made.worker.why_hung(CallTimeouts(longest=timeout)), "no hang is seen")
        began = time.monotonic()
        made.worker.close(timeout)
        assert time.monotonic() - began < timeout.total_seconds()


def test_who_loses_patience_gives_calls_that_are_old_by_then_as_long_as_others(tmp_path: Path) -> None:
    with bench(tmp_path, operation=3) as made:
        made.save_timeout = SOON
        made.save(1)
        assert made.storage.hangs.wait(60)
        wait_until(lambda: made.worker.why_hung(CallTimeouts(longest=WAIT)), "no hang is seen")
        told = time.monotonic() + SOON.total_seconds()
        assert not made.worker.why_hung(CallTimeouts(longest=WAIT, since=told))
        told = time.monotonic()
        wait_until(lambda: made.worker.why_hung(CallTimeouts(longest=WAIT, since=told)), "no hang is seen")
        assert time.monotonic() - told >= WAIT.total_seconds()


# --- a trainer and its agent ----------------------------------------------------------------------


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path, f"hung-{os.getpid()}-{tmp_path.name}")
    yield place
    agent_host.wait_for_end(tmp_path.name)


def test_training_goes_on_beside_hung_storage_says_what_was_not_saved_and_saves_when_it_answers(
    place: Place,
) -> None:
    with place.open(save_timeout=timedelta(seconds=2)) as checkpoints:
        agent = agent_of(checkpoints)
        assert checkpoints.save(1, make_state(1)).wait(SOON)
        hang = Hang(place.directory, 2)
        handles = [checkpoints.save(step, make_state(step)) for step in (2, 3)]
        assert all(handle.wait(SOON) for handle in handles)
        for step in (4, 5, 6):  # its slots are lent, and the newest capture stays
            handles.append(checkpoints.save(step, make_state(step)))
            assert handles[-1].wait(SOON)
        states = [handle.state for handle in handles]
        # Its own call hangs, or already that of the tidying which follows step 1.
        assert states[0] in (SaveState.FAILED, SaveState.SKIPPED)
        assert states[1:] == [SaveState.SKIPPED] * 4
        for handle in handles:
            assert f"open {place.directory}/step=2-unfinished has not returned for" in handle.record.why
        text = checkpoints.metrics_text()
        for outcome in (SaveState.FAILED, SaveState.SKIPPED):
            assert f'saves_total{{rank="0",outcome="{outcome.value}"}} {states.count(outcome)}' in text
        assert 'checkpoint_hung_tiers{rank="0"} 1' in text
        slots = next(DEFAULT_ROOT.glob(f"resiliency-*{place.root.name}*/rank-0"))
        assert lent(slots) == states.count(SaveState.FAILED)  # the call that hangs reads there
        hang.end()
        wait_until_equal(lambda: lent(slots), 0)
        steps = itertools.count(7)

        def committed() -> int | None:
            """A save may come before the agent has seen that the call returned."""
            handle = checkpoints.save(step := next(steps), make_state(step))
            assert handle.wait(SOON)
            return step if handle.state is SaveState.COMMITTED else None

        last = wait_until(committed, "saves are skipped still")
        # The agent says so with its next word, which may come after that on the save.
        wait_until(
            lambda: 'checkpoint_hung_tiers{rank="0"} 0' in checkpoints.metrics_text(), "the tier hangs still"
        )
        assert checkpoints.agent_pid == agent
    assert complete_in(place) == [1, last]


def complete_in(place: Place) -> list[int]:
    return complete(LocalStorage(place.directory))


def test_trainer_and_agent_end_at_once_beside_hung_storage_and_nothing_is_lost(place: Place) -> None:
    with place.open(save_timeout=timedelta(seconds=2)) as checkpoints:
        agent = psutil.Process(agent_of(checkpoints))
        assert checkpoints.save(1, make_state(1)).wait(SOON)
        hang = Hang(place.directory, 2)
        assert checkpoints.save(2, make_state(2)).wait(SOON)
        began = time.monotonic()
    agent.send_signal(signal.SIGTERM)
    psutil.wait_procs([agent], timeout=60)
    assert not agent.is_running()
    assert time.monotonic() - began < 30  # less than its grace and what a thread is waited for
    hang.take_away()
    assert complete_in(place) == [1]
    state = make_state(0)
    with place.open() as checkpoints:
        restored = checkpoints.restore(state)
        assert (restored.step, restored.tier, state["lr"]) == (2, Tier.MEMORY, 2)
        assert checkpoints.save(3, state).wait(SOON)
    assert complete_in(place) == [1, 2, 3]  # the second as it was in memory alone
