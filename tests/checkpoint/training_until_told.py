# SPDX-License-Identifier: Apache-2.0
"""A small training program that ends when it is told to: ranks of one host, coupled in each step.

    python -m tests.checkpoint.training_until_told DIRECTORY STEPS [every=STEPS] [rate=BYTES/S] [size=FLOATS]
        [deadline=SECONDS] [hold=RANK,STEP,FIFO] [signals=TERM,USR1]

It says which steps it does, where it stopped or started, and a digest of its weights there.  The rank
to hold reads from a FIFO in front of the collective of that step, so that the others sit in it.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import threading
from datetime import timedelta

import torch
import torch.distributed as dist

from resiliency.checkpoint import Checkpointer, CheckpointerOptions, SaveState, Terminated, TerminationOptions
from resiliency.checkpoint.agent.client import LinkOptions
from tests.waiting import agent_of

RANK, WORLD_SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
SOON = timedelta(seconds=60)


def say(*words: object) -> None:
    # In one write: the ranks share a pipe.
    sys.stdout.write(" ".join(map(str, ("rank", RANK, *words))) + "\n")
    sys.stdout.flush()


def digest(weights: torch.Tensor) -> str:
    return hashlib.sha256(weights.detach().numpy().tobytes()).hexdigest()


def main() -> None:
    directory, steps = sys.argv[1], int(sys.argv[2])
    extra = dict(part.split("=", 1) for part in sys.argv[3:])
    if WORLD_SIZE > 1:
        store = os.environ.get("STORE")
        dist.init_process_group(
            "gloo", init_method=f"file://{store}" if store else None, rank=RANK, world_size=WORLD_SIZE
        )
    held, held_step, fifo = extra.get("hold", "-1,-1,").split(",")
    weights = torch.nn.Parameter(torch.zeros(int(extra.get("size", 1000))))
    optimizer = torch.optim.AdamW([weights], lr=0.1)
    state = {"weights": weights, "optimizer": optimizer}
    checkpoints = Checkpointer(
        directory,
        every_steps=int(extra.get("every", 0)),
        options=CheckpointerOptions(
            bytes_per_s=int(extra.get("rate", 0)), link=LinkOptions(grace=timedelta(seconds=5))
        ),
        termination=TerminationOptions(
            deadline=timedelta(seconds=float(extra.get("deadline", 60))),
            signals=[signal.Signals[f"SIG{name}"] for name in extra.get("signals", "TERM").split(",")],
        ),
    )
    with checkpoints:
        say("agent", agent_of(checkpoints))
        restored = checkpoints.restore(state)
        say("starts", restored.step, restored.tier.value, digest(weights))
        try:
            for step in range(restored.step + 1, steps + 1):
                gradient = torch.full_like(weights, 1.0 / (step + RANK))
                if (RANK, step) == (int(held), int(held_step)):
                    say("is held")
                    with open(fifo) as hold:
                        hold.read()
                if WORLD_SIZE > 1:
                    dist.all_reduce(gradient)
                weights.grad = gradient
                threading.Event().wait(0.005)  # some work
                optimizer.step()
                say("step", step)
                handle = checkpoints.step(step, state)
                if handle is not None:
                    handle.wait(SOON, until=SaveState.CAPTURED)
                    say("captured", step, handle.state.value)
        except Terminated as terminated:
            say("stopped", terminated.step, terminated.code, digest(weights))
            raise


if __name__ == "__main__":
    main()
