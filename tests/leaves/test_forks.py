# SPDX-License-Identifier: Apache-2.0
"""What a forked child lets go of, and what wakes a thread that waits for descriptors."""

from __future__ import annotations

import gc
import os
import select

import pytest

from resiliency.forks import call_in_child
from resiliency.proc_stat import read_stat, stat_fields
from resiliency.wake_pipe import WakePipe


class Held:
    """A pipe that a child must not keep; or one that it finds closed."""

    def __init__(self) -> None:
        self.reading, self.writing = os.pipe()
        call_in_child(self.let_go)

    def let_go(self) -> None:
        os.close(self.writing)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_lets_go_of_what_still_lives_and_of_nothing_else() -> None:
    closed, held, gone = Held(), Held(), Held()
    os.close(closed.writing)
    kept = gone.reading, gone.writing
    del gone
    gc.collect()
    child = os.fork()
    if child == 0:
        try:
            os.fstat(kept[1])
            os.fstat(held.writing)
        except OSError:
            os._exit(0 if is_open(kept[1]) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert is_open(held.writing)
    for fd in (closed.reading, held.reading, held.writing, *kept):
        os.close(fd)


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def test_a_wake_pipe_is_readable_from_wake_to_clear_and_never_blocks() -> None:
    pipe = WakePipe()
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    assert not poll.poll(0)
    for _ in range(100_000):  # more than a pipe holds
        pipe.wake()
    assert poll.poll(0)
    while poll.poll(0):
        pipe.clear()
    pipe.clear()
    pipe.close()
    pipe.close()
    pipe.wake()


def test_the_kernel_says_what_runs_here() -> None:
    assert read_stat()[0] == stat_fields(os.getpid())[0] == "R"
    assert int(stat_fields()[1]) == os.getppid()
    assert stat_fields(2**22 + 1) == []
    with pytest.raises(OSError, match="No such"):
        read_stat(2**22 + 1)
