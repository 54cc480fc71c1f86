# SPDX-License-Identifier: Apache-2.0
"""One rank of two hosts that are told to end at a step that both began to save, and one could not write.

    python -m tests.checkpoint.hosts_told_to_end RANK ROOT WHAT

Each host has memory and an agent of its own.  That of rank 1 cannot write until its save has failed.  WHAT is

    slow     that of rank 0, which leads the commit, is in the middle of its part, and stands still there
             until its rank waits for the end of this save
    dead     the same, and then rank 1 is killed
    local    the local tier, of which rank 0's host has its part
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from resiliency.checkpoint import Checkpointer, CheckpointerOptions, LocalTier, SaveState, TerminationOptions
from resiliency.checkpoint.agent.client import LinkOptions
from resiliency.runtime import RunInfo
from resiliency.testing.processes import stop_process, wait_for_exit
from tests.waiting import agent_of, wait_until

SOON = timedelta(minutes=2)
#: Long enough that what waits until then is seen to hang.
DEADLINE = timedelta(minutes=10)
STEP = 1


def main(rank: int, root: Path, what: str) -> None:
    store = dist.FileStore(str(root / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=SOON)
    pids = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    state = {"mine": torch.full((4 << 20,), float(rank))}  # 16 MiB
    with open_checkpointer(rank, root, what) as checkpoints:
        agent = agent_of(checkpoints)
        if rank == 1:
            limit = resource.prlimit(agent, resource.RLIMIT_FSIZE)
            resource.prlimit(agent, resource.RLIMIT_FSIZE, (100 << 10, limit[1]))
        handle = checkpoints.save(STEP, state)
        if rank == 1:
            assert handle.wait(SOON)
            assert handle.state is SaveState.FAILED
            resource.prlimit(agent, resource.RLIMIT_FSIZE, limit)
        elif what == "local":
            assert handle.wait(SOON)
            assert handle.state is SaveState.COMMITTED
        else:
            begun = f"ckpt/step={STEP}/*/__0_0.distcp"
            wait_until(lambda: any(root.glob(begun)), "nothing is written")
            stop_process(agent)
        dist.barrier()
        if rank == 1:
            checkpoints.request_stop()
        wait_until(lambda: checkpoints.stopping, "no stop was asked for", timeout=SOON.total_seconds())
        if rank == 0 and what != "local":
            assert handle.state is SaveState.CAPTURED
            victim = pids[1] if what == "dead" else 0
            threading.Thread(target=when_it_waits, args=(agent, victim), daemon=True).start()
        elif what == "dead":
            threading.Event().wait()
        checkpoints.step(STEP, state)


def open_checkpointer(rank: int, root: Path, what: str) -> Checkpointer:
    memory = root / "memory"
    memory.mkdir(exist_ok=True)
    local = LocalTier(directory=root / f"disk-{rank}", replicas=0)
    return Checkpointer(
        None if what == "local" else root / "ckpt",
        local=local if what == "local" else None,
        info=RunInfo(job_name="told", host=f"host-{rank}", rank=rank, world_size=2, peer_address="127.0.0.1"),
        options=CheckpointerOptions(
            arena_root=memory,
            # Rank 0 would write for minutes, until it is told to hurry.
            bytes_per_s=0 if rank else 64 << 10,
            link=LinkOptions(grace=timedelta(seconds=5)),
        ),
        termination=TerminationOptions(deadline=DEADLINE, signals=()),
    )


def when_it_waits(agent: int, victim: int) -> None:
    wait_until(main_thread_waits_for_a_save, "nobody waits", timeout=SOON.total_seconds())
    if victim:
        os.kill(victim, signal.SIGKILL)
        wait_for_exit([victim], time.monotonic() + SOON.total_seconds())
    os.kill(agent, signal.SIGCONT)


def main_thread_waits_for_a_save() -> bool:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if frame.f_code.co_name == "wait" and frame.f_code.co_filename.endswith("handles.py"):
            return True
        frame = frame.f_back
    return False


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
