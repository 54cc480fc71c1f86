# SPDX-License-Identifier: Apache-2.0
"""Work in threads that use the caller's memory, and a process that may have no more of them."""

from __future__ import annotations

import errno
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType

import pytest
import torch

from resiliency.checkpoint.agent.tier_writers import Worker
from resiliency.checkpoint.capture.arena import RankArena
from resiliency.checkpoint.capture.capturer import CaptureOptions, Capturer
from resiliency.checkpoint.capture.slot_memory import SlotMemory, SlotRoom
from resiliency.checkpoint.names import TierName
from resiliency.checkpoint.ranks import RankGroup
from resiliency.checkpoint.replication.service import PeerService
from resiliency.checkpoint.state.copying import Copier, memory_pieces
from resiliency.checkpoint.stop.termination import Termination
from resiliency.checkpoint.storage.throttle import Throttle
from resiliency.checkpoint.threads import run_parallel
from resiliency.errors import ResourceShortage
from resiliency.testing.system_faults import NO_THREAD, SystemFault
from tests.checkpoint.stopping_threads import QUIET
from tests.checkpoint.system_errors import nothing_leaks

LONG = timedelta(seconds=60)


@pytest.mark.parametrize("by", [0, 1], ids=["while tasks are handed out", "while all are under way"])
def test_an_interrupt_is_raised_when_the_work_that_was_begun_has_ended(by: int) -> None:
    interrupted, never = threading.Event(), threading.Event()
    main = threading.main_thread().ident
    assert main is not None
    begun: list[int] = []
    ended: list[int] = []

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        if not interrupted.is_set():
            interrupted.set()
            raise KeyboardInterrupt

    def work(number: int) -> None:
        begun.append(number)
        while number == by and not interrupted.is_set():
            # Again and again: one that comes just before the main thread waits is seen when that wait ends.
            signal.pthread_kill(main, signal.SIGINT)
            interrupted.wait(0.05)
        assert interrupted.wait(60)
        never.wait(0.3)  # slow work, which orders nothing
        ended.append(number)

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_parallel([lambda: work(0), lambda: work(1)], "errand")
    finally:
        signal.signal(signal.SIGINT, before)
    assert sorted(ended) == sorted(begun)
    assert by in ended


# --- no more threads -----------------------------------------------------------------------------


@pytest.mark.parametrize("call", [0, 1, 2])
def test_tasks_are_done_by_their_caller_where_no_thread_can_be_had_for_them(
    tmp_path: Path, call: int
) -> None:
    with nothing_leaks(), SystemFault(tmp_path, NO_THREAD, call=call, lasts=True):
        assert run_parallel([partial(int, digit) for digit in "375"], "errand") == [3, 7, 5]


def test_a_copy_without_threads_of_its_own_is_made_by_its_caller(tmp_path: Path) -> None:
    source, target = torch.arange(6000, dtype=torch.float64), torch.zeros(6000, dtype=torch.float64)
    pieces = list(memory_pieces(target.data_ptr(), source.data_ptr(), source.nbytes))
    with SystemFault(tmp_path, NO_THREAD, call=0, lasts=True), Copier(2) as copier:
        assert copier.start(pieces, keep=(source, target)).done
    assert target.equal(source)


def test_a_wait_for_slot_memory_ends_at_once_where_no_thread_can_prepare_it_and_the_next_request_may(
    tmp_path: Path,
) -> None:
    room = SlotRoom(tensor_bytes=4096)
    with RankArena(tmp_path / "arena", rank=0) as arena:
        memory = SlotMemory(arena, registry=CaptureOptions().registry)
        with SystemFault(tmp_path, NO_THREAD, call=0):
            memory.request(room)
            began = time.monotonic()
            assert not memory.wait(LONG, room)
            assert time.monotonic() - began < LONG.total_seconds() / 2
        memory.request(room)
        assert memory.wait(LONG, room)
        assert memory.close(LONG)
        memory.unpin()


@contextmanager
def captures(root: Path) -> Iterator[None]:
    with RankArena(root, rank=0) as arena, Capturer(arena):
        yield


@contextmanager
def copies(root: Path) -> Iterator[None]:
    with PeerService("a", root, listen_address="127.0.0.1", on_event=lambda event: None):
        yield


@contextmanager
def stops(root: Path) -> Iterator[None]:
    with Termination(RankGroup(0, 1), QUIET):
        yield


@contextmanager
def writes(root: Path) -> Iterator[None]:
    worker = Worker(TierName.LOCAL, lambda job, done: None, Throttle())
    yield
    worker.close(LONG)


@pytest.mark.parametrize("part", [captures, copies, stops, writes])
def test_a_part_that_cannot_start_one_of_its_threads_says_so_and_leaves_nothing_behind(
    tmp_path: Path, part: Callable[[Path], AbstractContextManager[None]]
) -> None:
    call, hit, failures = 0, True, 0
    while hit:
        numbers: list[object] = []
        with nothing_leaks(), SystemFault(tmp_path, NO_THREAD, call=call) as fault:
            try:
                with part(tmp_path / f"{call}"):
                    pass
            except ResourceShortage as error:
                numbers.append(error.fields["errno"])
        assert numbers in ([], [errno.EAGAIN])
        failures += len(numbers)
        hit, call = fault.hit, call + 1
    assert failures > 0
