# SPDX-License-Identifier: Apache-2.0
"""A job that is told to end where a save of its last step was begun before: it ends alike on all ranks."""

from __future__ import annotations

import itertools
import signal
import sys
import threading
import time
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path

import pytest

from resiliency.checkpoint.format.catalog import Condition, list_checkpoints
from resiliency.checkpoint.ranks import RankGroup
from resiliency.checkpoint.stop.termination import Termination, TerminationOptions
from resiliency.checkpoint.storage.posix import LocalStorage
from resiliency.checkpoint.trainer.common_end import SaveOutcome, is_to_be_tried_again, outcome_of
from resiliency.checkpoint.trainer.handles import SaveHandle, SaveState
from resiliency.testing.processes import Command
from tests.checkpoint.stopping_threads import QUIET, SOON_S, together

PROGRAM = "tests.checkpoint.hosts_told_to_end"


# --- what all know -------------------------------------------------------------------------------


def come_to_the_stop(termination: Termination) -> None:
    termination.request()
    for step in itertools.count(1):
        if termination.boundary(step):
            return


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_all_ranks_hear_what_any_of_them_found(world_size: int) -> None:
    def find(rank_group: RankGroup) -> frozenset[str] | None:
        with Termination(rank_group, QUIET, leave=lambda _: None) as termination:
            come_to_the_stop(termination)
            return termination.collect({"all:same", f"rank:{rank_group.rank % 2}"})

    everything = {"all:same", *(f"rank:{rank % 2}" for rank in range(world_size))}
    assert together(world_size, find) == [everything] * world_size


@pytest.mark.parametrize(
    ("absent", "how"), [(0, "left"), (0, "died"), (2, "left before"), (2, "left"), (2, "died")]
)
def test_without_one_rank_the_others_hear_at_once_that_not_all_have_spoken(absent: int, how: str) -> None:
    options = TerminationOptions(deadline=timedelta(seconds=10 * SOON_S), signals=())
    stopped = threading.Barrier(3)

    def find(rank_group: RankGroup) -> frozenset[str] | None:
        termination = Termination(rank_group, options, leave=lambda _: None)
        try:
            come_to_the_stop(termination)
            if rank_group.rank == absent and how == "left before":
                termination.close()
            stopped.wait(SOON_S)
            if rank_group.rank != absent:
                return termination.collect({"found"})
            if how == "died":  # as the kernel does it
                for peer in list(termination._peers.values()):
                    with suppress(OSError):  # the other end was faster
                        peer._socket.shutdown(2)
            return None
        finally:
            termination.close(finished=False)

    assert together(3, find) == [None] * 3


def test_a_rank_that_says_nothing_is_awaited_until_the_deadline_and_no_longer() -> None:
    stopped, over = threading.Barrier(2), threading.Event()

    def find(rank_group: RankGroup) -> frozenset[str] | None:
        with Termination(rank_group, QUIET, leave=lambda _: None) as termination:
            come_to_the_stop(termination)
            termination._deadline = time.monotonic() + 0.5
            stopped.wait(SOON_S)
            if rank_group.rank == 1:
                over.wait(SOON_S)
                return None
            found = termination.collect({"found"})
            assert termination._left_s() == 0.0
            over.set()
            return found

    assert together(2, find) == [None, None]


# --- what that means -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcomes", "again"),
    [
        ("failed", True),
        ("failed here", True),  # another host has its part
        ("failed committed", False),  # some were only not told
        ("failed open", False),  # it may still succeed, and if not, there is no time left
        ("here", False),
        ("committed", False),
        ("", False),
    ],
)
def test_all_try_again_if_some_failed_and_none_knows_better(outcomes: str, again: bool) -> None:
    found = {f"local:{outcome}" for outcome in outcomes.split()} | {"persistent:failed"}
    assert is_to_be_tried_again("local", found) is again
    assert is_to_be_tried_again("persistent", found)


def test_in_the_local_tier_a_step_is_committed_for_all_once_it_is_complete() -> None:
    handle = SaveHandle(1, ("local", "persistent"))
    assert {outcome_of(tier, handle) for tier in ("local", "persistent")} == {SaveOutcome.OPEN}
    handle.update(committed_in=("local",))
    assert (outcome_of("local", handle), outcome_of("persistent", handle)) == (
        SaveOutcome.HERE,
        SaveOutcome.OPEN,
    )
    handle.update(state=SaveState.COMMITTED)
    assert outcome_of("persistent", handle) is SaveOutcome.FAILED
    handle.update(complete=True, committed_in=("local", "persistent"))
    assert {outcome_of(tier, handle) for tier in ("local", "persistent")} == {SaveOutcome.COMMITTED}


# --- two hosts -----------------------------------------------------------------------------------


def end_of_two_hosts(directory: Path, what: str) -> tuple[list[int], list[str]]:
    """Exit codes, and what rank 0 wrote."""
    argv = [sys.executable, "-m", PROGRAM]
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                Command([*argv, str(rank), str(directory), what], env={"OMP_NUM_THREADS": "1"})
            )
            for rank in (0, 1)
        ]
        codes = [rank.wait(timeout=3 * SOON_S) for rank in ranks]
        return codes, ranks[0].lines


def complete(directory: Path) -> list[int]:
    found = list_checkpoints(LocalStorage(directory))
    return [checkpoint.step for checkpoint in found if checkpoint.condition is Condition.COMPLETE]


@pytest.mark.thorough("another common end is near")
@pytest.mark.slow
def test_a_last_step_that_failed_on_one_host_and_hung_on_the_other_is_saved_again_by_both(
    tmp_path: Path,
) -> None:
    codes, _ = end_of_two_hosts(tmp_path, "slow")
    assert codes == [0, 0]
    assert complete(tmp_path / "ckpt") == [1]


@pytest.mark.thorough("another common end is near")
@pytest.mark.slow
def test_a_last_step_that_one_host_has_and_the_other_could_not_write_is_completed(tmp_path: Path) -> None:
    codes, _ = end_of_two_hosts(tmp_path, "local")
    assert codes == [0, 0]
    assert [complete(tmp_path / f"disk-{rank}") for rank in (0, 1)] == [[1], [1]]


@pytest.mark.slow
def test_when_a_rank_dies_at_the_end_the_others_neither_try_again_nor_wait_for_it(tmp_path: Path) -> None:
    codes, lines = end_of_two_hosts(tmp_path, "dead")
    assert codes == [128 + signal.SIGTERM, -signal.SIGKILL]
    assert any("is not saved again: not all ranks say what became of it" in line for line in lines)
    assert complete(tmp_path / "ckpt") == []
