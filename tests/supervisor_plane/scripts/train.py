# SPDX-License-Identifier: Apache-2.0
"""A small training on gloo that keeps its checkpoints on the disks and in the memory of its hosts.

train.py DISK MEMORY

Each step's loss depends on the number of ranks, so that a run through any sizes can be worked out again
(`Model`) and compared to the last bit.  Each fifth step is saved, and copied to another host.  Where a file
`save-at` lies beside DISK, only the steps that it names are, and a rank that is told to end does so at once.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from resiliency.checkpoint import Checkpointer, CheckpointerOptions, LocalTier, TerminationOptions
from resiliency.events import EventStream, EventType
from resiliency.goodput_measure.tracker import open_event_stream
from resiliency.runtime import RunInfo, process_start_time

EVERY = 5
STEP_S = 0.05
SOON = timedelta(seconds=120)


class Model:
    """The same on all ranks, after the same steps."""

    def __init__(self, weights: torch.Tensor | None = None) -> None:
        first = torch.linspace(-1.0, 1.0, 16, dtype=torch.float64)
        self.weights = first if weights is None else weights.clone()

    def part(self, step: int, rank: int) -> torch.Tensor:
        """What one rank computes: its loss, and its gradient."""
        generator = torch.Generator().manual_seed(1000 * step + rank)
        inputs = torch.randn(16, generator=generator, dtype=torch.float64)
        activation = torch.tanh((self.weights * inputs).sum())
        return torch.cat([(activation**2)[None], 2 * activation * (1 - activation**2) * inputs])

    def step(self, parts: list[torch.Tensor]) -> str:
        """Finish a step with the parts of all ranks, in their order; returns the loss to the last bit."""
        total = torch.zeros(17, dtype=torch.float64)
        for part in parts:
            total += part
        total /= len(parts)
        self.weights -= 0.1 * total[1:]
        return float(total[0]).hex()


def say(info: RunInfo, text: str) -> None:
    os.write(1, f"rank {info.rank} of {info.world_size} {text}\n".encode())


def main() -> None:
    disk, memory = map(Path, sys.argv[1:])
    memory.mkdir(parents=True, exist_ok=True)
    info = RunInfo.from_env()
    with open_event_stream(info) as events:
        events.emit(EventType.PROCESS_STARTED, time=process_start_time())
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        options = CheckpointerOptions(arena_root=memory, save_timeout=SOON)
        asked = disk.parent / "save-at"
        every = 0 if asked.exists() else EVERY
        local = LocalTier(directory=str(disk), every_steps=every, keep=3, replicas=1)
        # Told to end, all ranks stop at one step and save it.
        termination = None if asked.exists() else TerminationOptions(deadline=SOON, address="127.0.0.1")
        with Checkpointer(
            None,
            local=local,
            replicated=True,
            info=info,
            options=options,
            events=events,
            termination=termination,
        ) as checkpoints:
            train(info, events, checkpoints, asked)


def train(info: RunInfo, events: EventStream, checkpoints: Checkpointer, asked: Path) -> None:
    model = Model()
    # A test has taken the GPU out of this host.
    no_gpu = Path(f"{sys.argv[2]}-no-gpu")
    events.emit(EventType.INITIALIZED)
    events.emit(EventType.RESTORE_STARTED)
    restored = checkpoints.restore({"weights": model.weights})
    events.emit(EventType.CHECKPOINT_LOADED, step=restored.step)
    say(info, f"begins at step {restored.step} from {restored.tier.value}")
    parts = sorted(restored.bytes_by_tier.items(), key=lambda part: part[0].value)
    say(info, f"restored {' '.join(f'{tier.value}={size}' for tier, size in parts)}")
    step = restored.step
    while True:
        begin = time.monotonic()
        step += 1
        if no_gpu.exists():
            raise RuntimeError("No CUDA GPUs are available")
        mine = model.part(step, info.rank or 0)
        parts = [torch.zeros_like(mine) for _ in range(info.world_size)]
        dist.all_gather(parts, mine)
        loss = model.step(parts)
        time.sleep(STEP_S)
        events.emit(EventType.STEP_FINISHED, step=step, duration_s=time.monotonic() - begin)
        say(info, f"step {step} loss {loss}")
        state = {"weights": model.weights}
        handle = checkpoints.step(step, state)
        if asked.exists() and str(step) in asked.read_text().split():
            handle = checkpoints.save(step, state)
        if handle is not None:
            handle.wait(SOON)
            # Hosts are lost at any moment; a step that stands on two of them outlives each loss.
            handle.wait_complete(SOON)


if __name__ == "__main__":
    main()
