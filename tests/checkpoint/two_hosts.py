# SPDX-License-Identifier: Apache-2.0
"""One rank of two hosts on one machine that share a directory and the memory file system.

    python -m tests.checkpoint.two_hosts RANK ROOT VICTIM

The victim kills its agent in the middle of step 2.
"""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from resiliency.checkpoint import Checkpointer, CheckpointerOptions
from resiliency.errors import ResiliencyError
from resiliency.runtime import RunInfo
from tests.waiting import agent_of, wait_until

SOON = timedelta(minutes=4)
STEPS = 3


def main(rank: int, root: Path, victim: int) -> None:
    store = dist.FileStore(str(root / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=SOON)
    memory = root / "memory"
    memory.mkdir(exist_ok=True)
    # The others must learn of it long before the save's own timeout, which is 10 minutes.
    options = CheckpointerOptions(arena_root=memory, bytes_per_s=16 << 20)
    info = RunInfo(job_name="two", host=f"host-{rank}", rank=rank, world_size=2)
    state = {"shared": torch.zeros(4 << 20), "also": torch.zeros(4 << 20), "rank": rank}
    with Checkpointer(root / "ckpt", replicated=True, info=info, options=options) as checkpoints:
        restored = checkpoints.restore(state)
        value = float(state["shared"][0])
        print("restored", restored.step, restored.tier.value, value, state["rank"], flush=True)
        for step in range(restored.step + 1, STEPS + 1):
            for name in ("shared", "also"):
                state[name].fill_(step)
            handle = checkpoints.save(step, state)
            if step == 2 and rank == victim:
                begun = f"ckpt/step=2/*/__{victim}_0.distcp"
                wait_until(lambda of=begun: any(root.glob(of)), "its part is not written")
                os.kill(agent_of(checkpoints), signal.SIGKILL)
            assert handle.wait(SOON)
            print("saved", step, handle.state.value, handle.record.why, flush=True)
            dist.barrier()
    dist.destroy_process_group()


def open_with_memory_at(rank: int, roots: list[str]) -> str:
    """Opens a checkpointer whose captures go to ``roots[rank]``; returns why that was refused."""
    info = RunInfo(job_name="refused", host=f"host-{rank}", rank=rank, world_size=2)
    options = CheckpointerOptions(arena_root=Path(roots[rank]))
    try:
        Checkpointer(Path(roots[0]) / "ckpt", info=info, options=options).close()
    except ResiliencyError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
