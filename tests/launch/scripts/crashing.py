# SPDX-License-Identifier: Apache-2.0
"""A rank that meets a bad sample in each attempt, on another rank each time; or that just exits.

crashing.py [--step STEP | --exit CODE] [--silent]

It shows that it reports steps, unless it is silent.
"""

import argparse
import os
import signal
import sys

from resiliency.progress import watch_rank
from resiliency.rank import crash_note

parser = argparse.ArgumentParser()
parser.add_argument("--step", type=int)
parser.add_argument("--exit", type=int)
parser.add_argument("--silent", action="store_true")
args = parser.parse_args()
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if not args.silent:
    watch_rank()
crash_note.install(lambda: args.step)  # before the page's, which knows of no step
os.write(1, f"rank {rank} attempt {attempt} runs\n".encode())
if args.exit is not None:
    sys.exit(args.exit)
if rank == attempt % world:
    raise ValueError(f"sample {4711 + rank} is broken")
signal.pause()
