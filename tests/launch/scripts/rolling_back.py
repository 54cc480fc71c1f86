# SPDX-License-Identifier: Apache-2.0
"""A training that saves each ten steps: ``rolling_back.py DIRECTORY``.

In attempt 0 a fault makes the weights NaN at step 18, which the loss shows at step 25: the checkpoint of
step 20 holds it.  Step 45 has a bad sample, in each attempt.
"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from resiliency.checkpoint import Checkpointer
from resiliency.runtime import check_loss

ATTEMPT = int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    state = {"weights": torch.zeros(8)}
    with Checkpointer(sys.argv[1], every_steps=10, keep=9, replicated=True) as checkpoints:
        start = checkpoints.restore(state).step
        os.write(1, f"attempt {ATTEMPT} from {start} with {state['weights'].sum().item():g}\n".encode())
        for step in range(start + 1, 100):
            state["weights"] += 1
            if ATTEMPT == 0 and step == 18:
                state["weights"][3] = float("nan")
            checkpoints.step(step, state)
            if step % 10 == 0:
                assert checkpoints.wait(timedelta(seconds=60))
            if step % 25 == 0 or step == 45:
                check_loss(float("inf") if step == 45 else state["weights"].sum().item(), step=step)


if __name__ == "__main__":
    main()
