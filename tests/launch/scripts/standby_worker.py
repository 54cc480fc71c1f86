# SPDX-License-Identifier: Apache-2.0
"""A worker for tests of `--standby`: imports a module, says what it has, and then fails or waits.

    standby_worker.py [--module NAME] [--fail-until ATTEMPT] [--wait [ATTEMPT]] [--advance]

In attempts before --fail-until the last rank exits with 3 and the others wait; in later ones all exit
with 0.  With --wait all ranks of that attempt, of the first one if none is named, wait for a signal;
SIGUSR1 ends that wait.  With --advance each attempt finishes a step, so that the launcher does not pause.
"""

import argparse
import importlib
import json
import os
import signal
import sys
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--module")
parser.add_argument("--fail-until", type=int, default=0)
parser.add_argument("--wait", type=int, nargs="?", const=0)
parser.add_argument("--advance", action="store_true")
args = parser.parse_args()
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
module = importlib.import_module(args.module) if args.module else None
words = Path("/proc/self/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
said = {
    "pid": os.getpid(),
    "value": getattr(module, "VALUE", None),
    "argv": sys.argv[1:],
    "name": words[2].decode(),
    "parent": os.getppid(),
}
signal.signal(signal.SIGUSR1, lambda *_: sys.exit())
os.write(1, f"rank {rank} attempt {attempt} says {json.dumps(said)}\n".encode())
if args.advance:
    from resiliency.progress import report_step, watch_rank

    watch_rank()
    report_step(attempt)
if attempt == args.wait:
    signal.pause()
if attempt < args.fail_until:
    if rank == int(os.environ["WORLD_SIZE"]) - 1:
        sys.exit(3)
    signal.pause()
