# SPDX-License-Identifier: Apache-2.0
"""A process that is late: an operation of it hangs until another save of its step was committed."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import pytest

from resiliency.checkpoint.commit.commit import CheckpointFormat, Committed, open_save
from resiliency.checkpoint.format.catalog import (
    Condition,
    clean_unfinished,
    forget_failed,
    free_failed,
    half_removed,
    inspect,
    prune,
    remove_checkpoint,
    verify,
)
from resiliency.checkpoint.format.claim import StepTaken, holds_claims_alone
from resiliency.checkpoint.format.dcp import DcpFormat
from resiliency.checkpoint.format.local import LocalFormat
from resiliency.checkpoint.format.manifest import MANIFEST, read_manifest
from resiliency.checkpoint.format.marker import Marker, MarkerState, marker_name, put_marker
from resiliency.checkpoint.state.layout import Shard
from resiliency.checkpoint.storage.interface import Storage
from resiliency.errors import CheckpointError
from resiliency.testing.storage import (
    FaultyStorage,
    LateStorage,
    MemoryStorage,
    StorageFault,
    StorageFaultKind,
    StorageKilled,
)
from tests.checkpoint.storage_builders import assert_holds, save, small_shard

STEP = 2
FORMATS: list[CheckpointFormat[Shard]] = [LocalFormat(threads=1), DcpFormat(threads=1)]
formats = pytest.mark.parametrize("format", FORMATS, ids=lambda item: item.name)
whoever = pytest.mark.parametrize("who", [0, 1], ids=["leader", "follower"])

Outcome = Committed | BaseException

#: Operations of a save between its first look at a step and the marker that lets ranks write; and those in
#: which it has hidden the step and lists what is there.
OPENING, CLEARING = range(3, 28), range(16, 24)


def shards(seed: int) -> list[Shard]:
    return [small_shard(STEP, rank=rank, world_size=2, seed=seed) for rank in range(2)]


def outcome_of(part: Future[Committed]) -> Outcome:
    try:
        return part.result(timeout=60)
    except (CheckpointError, StorageKilled) as error:
        return error


@dataclass
class Start:
    """A start of the job with two ranks, each an agent with its own mount."""

    format: CheckpointFormat[Shard]
    pool: ThreadPoolExecutor
    save_id: str
    seed: int

    def part(self, storage: Storage, rank: int, timeout_s: float) -> Future[Committed]:
        shard, timeout = shards(self.seed)[rank], timedelta(seconds=timeout_s)
        return self.pool.submit(
            save, storage, self.format, [shard], save_id=self.save_id, leads=rank == 0, timeout=timeout
        )

    def save(self, disk: Storage) -> list[Outcome]:
        return [outcome_of(part) for part in [self.part(disk, rank, 20.0) for rank in (0, 1)]]


def leave_unfinished(disk: Storage, format: CheckpointFormat[Shard]) -> None:
    with pytest.raises(CheckpointError):
        save(disk, format, [shards(7)[0]], save_id="dead", timeout=timedelta(0))


def assert_stands(disk: Storage, seed: int, where: str) -> None:
    found = inspect(disk, STEP)
    assert found.condition is Condition.COMPLETE, (where, found.why)
    verify(disk, STEP)
    for shard in shards(seed):
        assert_holds(disk, shard)


@formats
@whoever
@pytest.mark.parametrize("leftover", [False, True], ids=["", "over leftovers"])
@pytest.mark.parametrize("dies", [False, True], ids=["", "and dies there"])
def test_whoever_is_late_at_any_operation_touches_nothing_that_a_later_save_committed(
    format: CheckpointFormat[Shard], who: int, leftover: bool, dies: bool
) -> None:
    """Also not if it dies right after the operation that was late."""
    with ThreadPoolExecutor(5) as pool:
        for operation in itertools.count():
            disk = MemoryStorage()
            if leftover:
                leave_unfinished(disk, format)
            first, second = Start(format, pool, "first", 1), Start(format, pool, "second", 2)
            late = LateStorage(disk, operation, dies=dies)
            part = first.part(late, who, 20.0)
            hangs = pool.submit(late.hangs.wait, 60)
            other = first.part(disk, 1 - who, 0.05)
            wait([part, hangs], return_when=FIRST_COMPLETED)
            if part.done() and not late.hangs.is_set():
                late.hangs.set()
                break  # it has no more operations
            outcome_of(other)
            done = second.save(disk)
            late.answers.set()
            outcome = outcome_of(part)
            where = f"late at {operation}, {late.operations[operation]}: {outcome}, then {done}"
            if all(isinstance(ended, Committed) and not ended.kept for ended in done):
                assert not isinstance(outcome, Committed), where
                assert_stands(disk, 2, where)
            else:  # the late one has only to say that it is done, and its save is there whole
                assert read_manifest(disk, f"step={STEP}").save_id == "first", where
                assert_stands(disk, 1, where)
    assert operation > 10


def leave_half_removed(disk: Storage, format: CheckpointFormat[Shard]) -> None:
    save(disk, format, shards(7), save_id="dead")
    save(disk, format, [small_shard(3)])
    fault = StorageFault(operation=6, kind=StorageFaultKind.KILL)
    with pytest.raises(StorageKilled):
        remove_checkpoint(FaultyStorage(disk, fault), STEP)
    assert list(half_removed(disk)) == [STEP]


def leave_old(disk: Storage, format: CheckpointFormat[Shard]) -> None:
    save(disk, format, shards(7), save_id="dead")
    save(disk, format, [small_shard(3)])


def leave_failed(disk: Storage, format: CheckpointFormat[Shard]) -> None:
    leave_unfinished(disk, format)
    save(disk, format, [small_shard(3)])


def clear_old(disk: Storage) -> None:
    """Steps 2 and 3 were of a branch that somebody has moved away."""
    for step in (2, 3):
        disk.remove_tree(f"step={step}")


@pytest.mark.parametrize("dies", [False, True], ids=["", "and dies there"])
@pytest.mark.parametrize(
    ("leave", "clean", "between"),
    [
        pytest.param(leave_unfinished, partial(clean_unfinished, run_id="run"), None, id="unfinished"),
        pytest.param(leave_failed, free_failed, None, id="data of a failed save"),
        pytest.param(leave_failed, partial(forget_failed, below=3), None, id="failed save"),
        pytest.param(leave_half_removed, partial(prune, keep_last=1), clear_old, id="half removed"),
        pytest.param(leave_old, partial(prune, keep_last=1), clear_old, id="old"),
    ],
)
def test_a_cleaning_that_is_late_at_any_operation_removes_nothing_that_was_committed_meanwhile(
    dies: bool,
    leave: Callable[[Storage, CheckpointFormat[Shard]], None],
    clean: Callable[[Storage], object],
    between: Callable[[Storage], None] | None,
) -> None:
    """What it has seen is another save's before it is removed."""
    with ThreadPoolExecutor(5) as pool:
        for operation in itertools.count():
            disk = MemoryStorage()
            leave(disk, FORMATS[1])
            late = LateStorage(disk, operation, dies=dies)
            cleaning = pool.submit(clean, late)
            hangs = pool.submit(late.hangs.wait, 60)
            wait([cleaning, hangs], return_when=FIRST_COMPLETED)
            if cleaning.done() and not late.hangs.is_set():
                late.hangs.set()
                break
            if between is not None:
                between(disk)
            done = Start(FORMATS[1], pool, "second", 2).save(disk)
            late.answers.set()
            with contextlib.suppress(CheckpointError, StorageKilled):
                cleaning.result(timeout=60)
            assert all(isinstance(ended, Committed) for ended in done), late.operations[operation]
            assert_stands(disk, 2, f"late at {operation}, {late.operations[operation]}, then {done}")
    assert operation > 3


@pytest.mark.parametrize("first", ["a save", "a removal"])
@pytest.mark.parametrize(
    "order", [["first", "second"], ["second", "first"]], ids=["", "which has begun before"]
)
def test_of_two_that_open_a_step_at_once_the_late_one_touches_nothing_of_the_other(
    first: str, order: list[str]
) -> None:
    """The first has seen the folder of the second, and hangs until that one has committed."""
    with ThreadPoolExecutor(4) as pool:
        for pause, reached in itertools.product(CLEARING, OPENING):
            disk = MemoryStorage()
            leave_unfinished(disk, FORMATS[0])
            hung = LateStorage(disk, pause + 1)
            late, other = LateStorage(hung, pause), LateStorage(disk, reached)
            parts: dict[str, Future[object]] = {}
            for who in order:
                if who == "second":
                    mount, part = other, partial(save, other, save_id="second")
                    parts[who] = pool.submit(part, FORMATS[0], [small_shard(STEP, seed=2)])
                elif first == "a save":
                    mount, part = late, partial(save, late, save_id="first")
                    parts[who] = pool.submit(part, FORMATS[0], [small_shard(STEP, seed=1)])
                else:
                    mount = late
                    parts[who] = pool.submit(clean_unfinished, late, run_id="run")
                hangs = [mount.hangs] if who == "second" else [late.hangs, hung.hangs]
                parts[who].add_done_callback(lambda _, hangs=hangs: [each.set() for each in hangs])
                assert mount.hangs.wait(60)
            late.answers.set()
            assert hung.hangs.wait(60)
            other.answers.set()
            outcome = outcome_of(parts["second"])
            hung.answers.set()
            with contextlib.suppress(CheckpointError):
                parts["first"].result(timeout=60)
            if isinstance(outcome, Committed) and not outcome.kept:
                where = f"{pause}, {reached}: {hung.operations[pause + 1 : pause + 2]}"
                assert inspect(disk, STEP).condition is Condition.COMPLETE, where
                verify(disk, STEP)
                assert_holds(disk, small_shard(STEP, seed=2))


def test_a_save_that_a_removal_overtakes_leaves_no_sign_of_a_commit() -> None:
    """Else later saves would take what it leaves for a checkpoint that lost its manifest."""

    class Meanwhile(FaultyStorage):
        def replace(self, source: str, target: str) -> None:
            if target == marker_name(STEP) and self.inner.exists(f"step={STEP}/{MANIFEST}"):
                self.inner.remove(f"step={STEP}/{MANIFEST}")  # by a removal that took the folders that it saw
                self.inner.remove_tree(f"step={STEP}/{found.folder}")
            super().replace(source, target)

    disk = MemoryStorage()
    save(disk, FORMATS[0], [small_shard(STEP)])
    found = read_manifest(disk, f"step={STEP}")
    put_marker(disk, STEP, Marker(state=MarkerState.FAILED))
    with pytest.raises(StepTaken):
        open_save(Meanwhile(disk), STEP, "second")
    assert holds_claims_alone(disk, STEP)
    assert not save(disk, FORMATS[0], [small_shard(STEP, seed=2)], save_id="third").kept
    assert_holds(disk, small_shard(STEP, seed=2))


@formats
@pytest.mark.parametrize("run_id", ["run", "evaluation"])
def test_a_save_whose_step_is_cleaned_while_it_is_in_flight_is_committed_or_says_that_it_is_not(
    format: CheckpointFormat[Shard], run_id: str
) -> None:
    """At any operation.  What another run does leaves it alone."""
    with ThreadPoolExecutor(5) as pool:
        for operation in itertools.count():
            disk = MemoryStorage()
            late = LateStorage(disk, operation)
            start = Start(format, pool, "first", 1)
            timeout_s = 0.3 if run_id == "run" else 20.0
            parts = [start.part(late if rank == 0 else disk, rank, timeout_s) for rank in (0, 1)]
            hangs = pool.submit(late.hangs.wait, 60)
            wait([parts[0], hangs], return_when=FIRST_COMPLETED)
            if parts[0].done() and not late.hangs.is_set():
                late.hangs.set()
                break
            clean_unfinished(disk, run_id=run_id)
            late.answers.set()
            outcomes = [outcome_of(part) for part in parts]
            if run_id == "evaluation" or isinstance(outcomes[0], Committed):
                assert isinstance(outcomes[0], Committed), (late.operations[operation], outcomes)
                assert_stands(disk, 1, f"cleaned at {operation}, {late.operations[operation]}")
    assert operation > 10
