# SPDX-License-Identifier: Apache-2.0
"""An error of the operating system at every single call of a save, a restore and a prune, raw as it comes."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import pytest

from resiliency.checkpoint.commit.commit import CheckpointFormat, Committed
from resiliency.checkpoint.format.catalog import Condition, inspect, list_checkpoints, prune
from resiliency.checkpoint.format.dcp import DcpFormat
from resiliency.checkpoint.format.local import LocalFormat
from resiliency.checkpoint.format.reader import CheckpointReader
from resiliency.checkpoint.state.layout import Shard
from resiliency.checkpoint.storage.posix import LocalStorage
from resiliency.errors import CheckpointError, CheckpointIncomplete, CheckpointWriteFailed
from resiliency.testing.system_faults import NO_THREAD, SystemFault
from tests.checkpoint.storage_builders import assert_holds, read_shard, save, small_shard
from tests.checkpoint.system_errors import NUMBERS, nothing_leaks, numbers

#: Of a test that hangs; every wait that it makes ends long before.
LONG_S = 60.0
ROLES = ["leader", "follower"]


class Sides:
    """Two hosts of one job, as threads: each has its own path to the storage of both."""

    def __init__(self, root: Path, format: CheckpointFormat[Shard]) -> None:
        self.storage = LocalStorage(root / "shared")
        self.format = format
        self.roots = {role: root / role for role in ROLES}
        self.storage.make_dir("")
        for path in self.roots.values():
            path.symlink_to(root / "shared")
        self.step = 1
        save(self.storage, format, self.shards(1))

    def shards(self, step: int) -> list[Shard]:
        return [small_shard(step, rank=rank, world_size=2) for rank in range(2)]

    def save(self, role: str) -> Committed:
        rank = ROLES.index(role)
        storage = LocalStorage(self.roots[role])
        return save(storage, self.format, [self.shards(self.step)[rank]], leads=rank == 0)

    def save_both(self, fault: SystemFault) -> dict[str, Future[Committed]]:
        with fault:
            parts: dict[str, Future[Committed]] = {role: Future() for role in ROLES}

            def run(role: str) -> None:
                try:
                    parts[role].set_result(self.save(role))
                except BaseException as error:
                    parts[role].set_exception(error)

            threads = [threading.Thread(target=run, args=(role,), name=role) for role in ROLES]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(LONG_S)
        return parts


def error_of(action: Callable[[], object]) -> CheckpointError | None:
    """What it raises, of ours; anything else is raised."""
    try:
        action()
    except CheckpointError as error:
        return error
    return None


def ended_well(part: Future[Committed]) -> bool:
    """Whether it succeeded; else by an error of ours, and not because it waited in vain."""
    error = part.exception(LONG_S)
    assert error is None or isinstance(error, CheckpointError), repr(error)
    assert not isinstance(error, CheckpointIncomplete), repr(error)
    return error is None


#: The other format makes the same calls, and is asked with one error.
CASES = [(LocalFormat(threads=2), number) for number in NUMBERS] + [(DcpFormat(threads=2), errno.EIO)]


@pytest.mark.parametrize(
    ("format", "number"),
    CASES,
    ids=[f"{form.name}-{errno.errorcode.get(n, 'no-thread')}" for form, n in CASES],
)
@pytest.mark.parametrize("role", ROLES)
def test_an_error_at_any_call_of_one_host_ends_the_save_by_name_and_the_other_host_does_not_wait(
    tmp_path: Path, role: str, format: CheckpointFormat[Shard], number: int
) -> None:
    sides, call, hit, failures = Sides(tmp_path, format), 0, True, 0
    while hit:
        sides.step = call + 2
        fault = SystemFault(sides.roots[role], number, call=call, thread=role)
        with nothing_leaks():
            parts = sides.save_both(fault)
        hit, call = fault.hit, call + 1
        ended = {each: ended_well(part) for each, part in parts.items()}
        error = parts[role].exception()
        if error is not None:
            assert isinstance(error, CheckpointError)
            assert number in (error.fields.get("errno"), NO_THREAD), (fault.calls[call - 1], error)
            failures += 1
        if any(ended.values()):
            for shard in sides.shards(sides.step):
                assert_holds(sides.storage, shard)
        for shard in sides.shards(1):
            assert_holds(sides.storage, shard)
    assert all(ended.values()), "without an error it succeeds"
    assert failures > 5 or (number == NO_THREAD and not failures)


def test_a_leader_that_cannot_write_at_all_still_ends_and_says_why(tmp_path: Path) -> None:
    """Its word cannot come through, and its own part waits for nothing."""
    storage = LocalStorage(tmp_path / "leader")
    storage.make_dir("")
    fault = SystemFault(storage.root, errno.ESTALE, call=0, lasts=True)
    with fault, pytest.raises(CheckpointWriteFailed, match="ESTALE") as caught:
        save(storage, LocalFormat(), [small_shard(2, world_size=2)])
    assert caught.value.fields["errno"] == errno.ESTALE


def test_where_a_checkpoint_of_another_run_stands_a_follower_says_so_as_its_leader_does(
    tmp_path: Path,
) -> None:
    """The leader cannot tell it: a marker of its own would hide what is not its own."""
    sides = Sides(tmp_path, LocalFormat())
    shard = sides.shards(1)[1]
    with pytest.raises(CheckpointWriteFailed, match="is a checkpoint of run 'run', this is run 'other'"):
        save(sides.storage, sides.format, [shard], run_id="other", save_id="other-0", leads=False)


@numbers
def test_an_error_at_any_call_of_a_restore_is_named_and_the_next_restore_succeeds(
    tmp_path: Path, number: int
) -> None:
    sides, call, hit, failures = Sides(tmp_path, LocalFormat()), 0, True, 0

    def read_whole(storage: LocalStorage) -> None:
        read_shard(CheckpointReader(storage, 1), 0)
        CheckpointReader(storage, 1).verify()

    while hit:
        storage = LocalStorage(sides.roots["leader"])
        with nothing_leaks(), SystemFault(storage.root, number, call=call) as fault:
            error = error_of(partial(read_whole, storage))
        if isinstance(error, CheckpointIncomplete):  # a marker that cannot be read hides its checkpoint
            assert fault.calls[call].endswith("-unfinished")
        else:
            assert error is None or error.fields["errno"] == number, (fault.calls[call], error)
        failures += error is not None
        hit, call = fault.hit, call + 1
        assert_holds(storage, sides.shards(1)[0])
    assert failures > 5 or number == NO_THREAD


@numbers
def test_an_error_at_any_call_of_a_prune_is_named_and_costs_no_checkpoint_that_is_kept(
    tmp_path: Path, number: int
) -> None:
    sides, call, hit, failures = Sides(tmp_path, LocalFormat()), 0, True, 0
    for step in (2, 3):
        save(sides.storage, sides.format, sides.shards(step))
    while hit:
        storage = LocalStorage(sides.roots["leader"])
        with nothing_leaks(), SystemFault(storage.root, number, call=call) as fault:
            error = error_of(partial(prune, storage, keep_last=2))
        # Python's `rmtree` closes a descriptor again that it could not close.
        assert error is None or error.fields["errno"] in (number, errno.EBADF), (fault.calls[call], error)
        failures += error is not None
        hit, call = fault.hit, call + 1
        for step in (2, 3):
            assert inspect(sides.storage, step).condition is Condition.COMPLETE
        prune(sides.storage, keep_last=2)
        assert [found.step for found in list_checkpoints(sides.storage)] == [2, 3]
        save(sides.storage, sides.format, sides.shards(1))
    assert failures > 5 or number == NO_THREAD
