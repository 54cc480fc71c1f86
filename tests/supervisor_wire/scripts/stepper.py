# SPDX-License-Identifier: Apache-2.0
"""A worker that finishes a hundred steps a second and reports them, until SIGTERM; without torch.

At its end it says how many steps it made, and the longest time that one of them took.
"""

import os
import signal
import sys
import threading
import time

from resiliency.progress import report_kept, report_step


def say(text: str) -> None:
    who = f"rank {os.environ['RANK']} attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}"
    os.write(1, f"{who} {text}\n".encode())


def train_forever(ended: threading.Event) -> tuple[int, float]:
    step, longest_s = 0, 0.0
    while not ended.wait(0.01):
        began = time.monotonic()
        report_step(step)
        longest_s = max(longest_s, time.monotonic() - began)
        step += 1
    return step, longest_s


def main() -> int:
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    report_step(0)
    report_kept(0)
    say(f"is in {os.environ.get('RESILIENCY_FAILURE_DOMAINS', 'no known domain')}")
    say(f"pid {os.getpid()} ready")
    steps, longest_s = train_forever(ended)
    say(f"made {steps} steps, the longest report took {longest_s:.4f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
