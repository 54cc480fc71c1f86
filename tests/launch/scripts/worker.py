# SPDX-License-Identifier: Apache-2.0
"""A worker for launcher tests: says who it is, does what its arguments ask for, and waits.

It does not import torch unless asked to, because that is two seconds for each start.

    worker.py [--only RANK] [--attempt N] ACTION

ACTION is done by rank --only (default: every rank) in attempt --attempt (default: every attempt);
the others wait for a signal, and exit 0 in attempts without action.
With --told, a graceful worker tells the launcher, as a training does, that it was told to end.
"""

import argparse
import os
import select
import signal
import subprocess
import sys


def say(text: str) -> None:
    who = f"rank {os.environ['RANK']} attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}"
    # One write: the launcher runs scripts unbuffered, and `print` would write its newline apart.
    os.write(1, f"{who} {text}\n".encode())


def wait_for_signal() -> None:
    # Not `signal.pause`: a handler that is due just before it runs only after the next signal.
    select.select([], [], [], 0.5)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", type=int)
    parser.add_argument("--attempt", type=int)
    parser.add_argument("action", choices=["finish", "wait", "graceful", "stubborn", "children", "env"])
    parser.add_argument("--exit", type=int, default=0)
    parser.add_argument("--raise", dest="message")
    parser.add_argument("--told", action="store_true")
    args = parser.parse_args()
    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if args.attempt is not None and attempt != args.attempt:
        say("finished")
        return 0
    if args.only is not None and rank != args.only:
        say(f"pid {os.getpid()} ready")
        while True:
            wait_for_signal()
    return act(args, rank)


def act(args: argparse.Namespace, rank: int) -> int:
    if args.action == "graceful":

        def save(number: int, frame: object) -> None:
            if args.told:
                from resiliency.runtime import StopNote

                StopNote(step=7, committed=True, cause=signal.Signals(number).name).leave()
            say("saved")
            sys.exit(0)

        signal.signal(signal.SIGTERM, save)
        signal.signal(signal.SIGINT, save)
    if args.action == "stubborn":
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: say("ignores the signal"))
    if args.action == "children":
        sleeper = [sys.executable, "-c", "import signal; signal.pause()"]
        # One in the worker's session, one that left it, one whose parent is gone.
        subprocess.Popen(sleeper)
        subprocess.Popen(sleeper, start_new_session=True)
        nested = f"import subprocess; subprocess.Popen({sleeper!r}, start_new_session=True)"
        subprocess.run([sys.executable, "-c", nested], check=True)
    if args.action == "env":
        names = (
            "JOB_IDENTIFIER",
            "RESILIENCY_RUN_DIR",
            "LOCAL_RANK",
            "GROUP_RANK",
            "WORLD_SIZE",
            "MASTER_ADDR",
        )
        say(" ".join(f"{name}={os.environ[name]}" for name in names))
    say(f"pid {os.getpid()} ready")
    if args.message is not None:
        raise ValueError(args.message)
    while args.action in ("wait", "graceful", "stubborn", "children"):
        wait_for_signal()
    return args.exit


if __name__ == "__main__":
    sys.exit(main())
