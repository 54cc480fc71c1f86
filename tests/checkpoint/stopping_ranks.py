# SPDX-License-Identifier: Apache-2.0
"""What ranks of the pool run in tests of a common stop: a loop of collectives, and real signals."""

from __future__ import annotations

import os
import signal
import threading
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from resiliency.checkpoint.ranks import RankGroup
from resiliency.checkpoint.stop.termination import Terminated, Termination, TerminationOptions
from resiliency.testing import Phase
from resiliency.testing.rank_pool import fault_point

#: Far more than any of these tests takes.
STEPS = 1_000_000


def stop_together(
    rank: int,
    deadline_s: float = 30.0,
    numbers: tuple[signal.Signals, ...] = (signal.SIGTERM,),
    hold: str = "",
) -> tuple[int, int, list[str]]:
    """Step until all stop; returns where, with which code, and which causes were told.

    Args:
        hold: a FIFO that the last rank reads from before the collective of step 3; a rank that knows of the
            stop makes a file beside it.
    """
    world_size = dist.get_world_size()
    causes: list[str] = []

    def requested(cause: str) -> None:
        causes.append(cause)
        if hold:
            Path(f"{hold}-{rank}").touch()

    options = TerminationOptions(deadline=timedelta(seconds=deadline_s), signals=numbers)
    with Termination(RankGroup(rank, world_size), options, on_request=requested) as termination:
        for step in range(1, STEPS):
            fault_point(step=step, phase=Phase.STEP_STARTED)
            if hold and step == 3 and rank == world_size - 1:
                with open(hold) as fifo:
                    fifo.read()
            dist.all_reduce(torch.ones(1))
            fault_point(step=step, phase=Phase.STEP_FINISHED)
            try:
                if termination.boundary(step):
                    return step, int(termination.terminated(step, committed=True).code or 0), causes
            except Terminated as terminated:
                return step, int(str(terminated.code)), [*causes, terminated.cause]
    raise AssertionError("nobody asked for a stop")


def ask_in_a_handler(rank: int) -> bool:
    """The program's own handler asks for a stop while its thread is in the middle of a boundary."""
    with Termination(RankGroup(rank, 1), TerminationOptions(signals=())) as termination:
        before = signal.signal(signal.SIGALRM, lambda *_: termination.request())
        with termination._lock:
            signal.raise_signal(signal.SIGALRM)
        signal.signal(signal.SIGALRM, before)
        return any(termination.boundary(step) for step in range(STEPS))


def interrupt_twice(rank: int) -> None:
    """Two times Ctrl-C, to a rank that does not come to its next boundary."""
    asked = threading.Event()
    options = TerminationOptions(deadline=timedelta(seconds=60), signals=(signal.SIGINT,))
    with Termination(RankGroup(rank, 1), options, on_request=lambda _: asked.set()):
        os.kill(os.getpid(), signal.SIGINT)
        asked.wait()
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait()
