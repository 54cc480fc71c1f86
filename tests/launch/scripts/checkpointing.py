# SPDX-License-Identifier: Apache-2.0
"""A worker with a checkpointer, which does what signals tell it.

    checkpointing.py DIRECTORY [BYTES_PER_S]

SIGUSR1: save the next step, and say so once it is captured (with a bandwidth cap) or committed.
SIGUSR2: end well.
"""

import os
import signal
import sys
from datetime import timedelta

COMMANDS = {signal.SIGUSR1, signal.SIGUSR2}
signal.pthread_sigmask(signal.SIG_BLOCK, COMMANDS)

import torch  # noqa: E402  # its threads inherit the mask
import torch.distributed as dist  # noqa: E402

from resiliency.checkpoint import Checkpointer, CheckpointerOptions, SaveState  # noqa: E402

SOON = timedelta(seconds=60)


def say(text: str) -> None:
    who = f"rank {os.environ['RANK']} attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}"
    # One write: the launcher runs scripts unbuffered, and `print` would write its newline apart.
    os.write(1, f"{who} {text}\n".encode())


def main() -> None:
    directory, rate = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0
    dist.init_process_group("gloo", timeout=SOON)
    state = {"weights": torch.zeros(1 << 18), "rank": dist.get_rank()}
    options = CheckpointerOptions(bytes_per_s=rate)
    with Checkpointer(directory, replicated=True, options=options) as checkpoints:
        restored = checkpoints.restore(state)
        say(f"restored {restored.step} {restored.tier.value}")
        say(f"agent {checkpoints.agent_pid}")
        say(f"pid {os.getpid()} ready")
        step = restored.step
        while signal.sigwait(COMMANDS) == signal.SIGUSR1:
            step += 1
            state["weights"].fill_(step)
            handle = checkpoints.save(step, state)
            assert handle.wait(SOON, until=SaveState.CAPTURED if rate else SaveState.COMMITTED)
            say(f"saved {step} {handle.state.value} agent {checkpoints.agent_pid}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
