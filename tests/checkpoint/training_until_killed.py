# SPDX-License-Identifier: Apache-2.0
"""A small training program for tests of the agent: one rank, a state that depends on every step.

    python -m tests.checkpoint.training_until_killed DIRECTORY STEPS EVERY [park=STEP] [rate=BYTES/S]
        [grace=SECONDS] [size=FLOATS] [fail=STEP] [local=DIRECTORY] [memory=DIRECTORY]

DIRECTORY is that of the persistent tier; with "-" there is none.

It says where it starts, what became of each save, and a digest of its weights at the end.  At the
step to park at it saves, waits until that is captured, says so and stops for ever.
"""

from __future__ import annotations

import hashlib
import sys
import threading
from datetime import timedelta
from pathlib import Path

import torch

from resiliency.checkpoint import Checkpointer, CheckpointerOptions, LocalTier, SaveState
from resiliency.checkpoint.agent.client import LinkOptions
from resiliency.checkpoint.capture.job_memory import DEFAULT_ROOT
from tests.waiting import agent_of

SOON = timedelta(seconds=60)


def say(*words: object) -> None:
    print(*words, flush=True)


def main() -> None:
    directory, steps, every = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    extra = dict(part.split("=") for part in sys.argv[4:])
    local = LocalTier(directory=extra["local"], every_steps=every) if "local" in extra else None
    options = CheckpointerOptions(
        arena_root=Path(extra.get("memory", DEFAULT_ROOT)),
        bytes_per_s=int(extra.get("rate", 0)),
        link=LinkOptions(grace=timedelta(seconds=float(extra.get("grace", 60)))),
    )
    park, fail = int(extra.get("park", -1)), int(extra.get("fail", -1))
    torch.manual_seed(0)
    weights = torch.nn.Parameter(torch.zeros(int(extra.get("size", 1000))))
    optimizer = torch.optim.AdamW([weights], lr=0.1)
    state = {"weights": weights, "optimizer": optimizer}
    persistent = None if directory == "-" else directory
    interval = every if persistent else 0
    with Checkpointer(persistent, every_steps=interval, keep=3, local=local, options=options) as checkpoints:
        say("agent", agent_of(checkpoints))
        restored = checkpoints.restore(state)
        say("restored", restored.step, restored.tier.value)
        for step in range(restored.step + 1, steps + 1):
            weights.grad = torch.full_like(weights, 1.0 / step)
            optimizer.step()
            handle = checkpoints.step(step, state)
            if step == fail:
                raise SystemExit("training failed")
            if step == park:
                assert handle is not None
                assert handle.wait(SOON, until=SaveState.CAPTURED)
                say("parked", step, handle.state.value)
                threading.Event().wait()
            if handle is not None and not extra.get("rate"):
                assert handle.wait(SOON)
                say("saved", step, handle.state.value)
        say("digest", hashlib.sha256(weights.detach().numpy().tobytes()).hexdigest())


if __name__ == "__main__":
    main()
