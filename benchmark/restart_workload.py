# SPDX-License-Identifier: Apache-2.0
"""The light workload of restart_time.py: torch, gloo, a small checkpoint, and our run events.

It knows nothing of any launcher beyond torchrun's environment variables, so every launcher can
start it.  Rank 0 saves; after a restart all ranks load.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from resiliency.events import EventStream, EventType
from resiliency.goodput_measure.tracker import open_event_stream
from resiliency.runtime import RunInfo, process_start_time
from resiliency.testing.faults import Fault, FaultInjector

#: Width of the one layer: a step of some 20 ms on one core, and a checkpoint of a few MiB.
WIDTH = 768
ROWS = 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--save-every", type=int, required=True, metavar="STEPS")
    parser.add_argument("--fault", type=Fault.parse, action="append", default=[])
    args = parser.parse_args()
    info = RunInfo.from_env()
    with open_event_stream(info) as events:
        events.emit(EventType.PROCESS_STARTED, time=process_start_time())
        with FaultInjector(args.fault, info, events) as injector:
            train(args, info, events, injector)


def train(args: argparse.Namespace, info: RunInfo, events: EventStream, injector: FaultInjector) -> None:
    """Train one rank to its end, or to its fault."""
    import torch  # the import is one of the spans
    from torch import distributed

    events.emit(EventType.IMPORTED)
    distributed.init_process_group("gloo")
    torch.manual_seed(info.rank or 0)
    # No torch.optim: its first use imports a compiler, which would take most of this span.
    weight, velocity = torch.zeros(WIDTH, WIDTH, requires_grad=True), torch.zeros(WIDTH, WIDTH)
    distributed.barrier()  # gloo connects at the first collective
    events.emit(EventType.INITIALIZED)

    events.emit(EventType.RESTORE_STARTED)
    done = 0
    if args.checkpoint.exists():
        state = torch.load(args.checkpoint)
        weight.data.copy_(state["weight"])
        velocity.copy_(state["velocity"])
        done = state["step"]
    events.emit(EventType.CHECKPOINT_LOADED, step=done)

    for step in range(done + 1, args.steps + 1):
        begin = time.monotonic()
        (gradient,) = torch.autograd.grad((torch.randn(ROWS, WIDTH) @ weight - 1).square().mean(), weight)
        distributed.all_reduce(gradient)
        velocity.mul_(0.9).add_(gradient)
        weight.data.sub_(velocity, alpha=1e-3)
        events.emit(EventType.STEP_FINISHED, step=step, duration_s=time.monotonic() - begin)
        if info.is_first_rank:
            print(f"step {step}", flush=True)
        injector.at(step=step)
        if step % args.save_every == 0 and info.is_first_rank:
            events.emit(EventType.SAVE_STARTED, step=step)
            new = args.checkpoint.with_suffix(".new")
            torch.save({"weight": weight.detach(), "velocity": velocity, "step": step}, new)
            os.replace(new, args.checkpoint)
            events.emit(EventType.SAVE_RELEASED, step=step)
            events.emit(EventType.CHECKPOINT_SAVED, step=step)
    events.emit(EventType.RANK_FINISHED, step=args.steps)
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
