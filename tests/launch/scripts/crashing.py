# SPDX-License-Identifier: Apache-2.0
"""A rank that meets a bad sample in each attempt, on another rank each time; or that just exits.

crashing.py [--step STEP | --exit CODE]
"""

import argparse
import os
import signal
import sys

from resiliency.rank import crash_note

parser = argparse.ArgumentParser()
parser.add_argument("--step", type=int)
parser.add_argument("--exit", type=int)
args = parser.parse_args()
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
crash_note.install(lambda: args.step)
os.write(1, f"rank {rank} attempt {attempt} runs\n".encode())
if args.exit is not None:
    sys.exit(args.exit)
if rank == attempt % world:
    raise ValueError(f"sample {4711 + rank} is broken")
signal.pause()
