# SPDX-License-Identifier: Apache-2.0
"""A trainer that captures step 1 whole, then stops for ever in the middle of the capture of step 2.

    python -m tests.checkpoint.capturing_until_killed DIRECTORY PIECE

It writes a line when it has come to piece PIECE (a number, or `published` for none) of step 2.
"""

from __future__ import annotations

import sys
import threading
from datetime import timedelta
from pathlib import Path

import torch

from resiliency.checkpoint import CaptureOptions, Capturer, RankArena

TENSORS = 4
SOON = timedelta(seconds=30)


def state_of(step: int) -> dict[str, object]:
    tensors = {f"w{i}": torch.full((1000,), float(step), dtype=torch.float64) for i in range(TENSORS)}
    return {**tensors, "step": step}


def main() -> None:
    directory, piece = Path(sys.argv[1]), sys.argv[2]
    step = 1

    def stop(index: int) -> None:
        if step == 2 and str(index) == piece:
            print("here", flush=True)
            threading.Event().wait()

    arena = RankArena(directory, rank=0, world_size=1, run_id="first")
    options = CaptureOptions(threads=1, eager_below_bytes=0, before_piece=stop)
    capturer = Capturer(arena, options)
    for step in (1, 2):
        capture = capturer.begin(state_of(step), step)
        assert capture is not None
        assert capture.wait(timedelta(minutes=5))
    print("here", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
