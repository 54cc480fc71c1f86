# SPDX-License-Identifier: Apache-2.0
"""A rank that meets a bad sample in each attempt, on another rank each time; or that just exits.

crashing.py [--step STEP | --exit CODE | --until FILE]

It shows that it reports steps.  With --until, storage is away from rank 0 as long as there is no FILE.
"""

import argparse
import errno
import os
import signal
import sys

from resiliency.progress import watch_rank
from resiliency.rank import crash_note

parser = argparse.ArgumentParser()
parser.add_argument("--step", type=int)
parser.add_argument("--exit", type=int)
parser.add_argument("--until")
args = parser.parse_args()
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
watch_rank()
crash_note.install(lambda: args.step)  # before the page's, which knows of no step
os.write(1, f"rank {rank} attempt {attempt} runs\n".encode())
if args.exit is not None:
    sys.exit(args.exit)
if args.until is not None:
    if os.path.exists(args.until):
        sys.exit(0)
    if rank == 0:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), args.until)
    signal.pause()
if rank == attempt % world:
    raise ValueError(f"sample {4711 + rank} is broken")
signal.pause()
