# SPDX-License-Identifier: Apache-2.0
"""What a rank pays for being watched: a reported step, and each look at what its main thread is in.

    python3 benchmark/health_cost.py

A rank works in steps, pure Python or torch, in seconds with many looks a second and seconds without any, in
turn.  From the difference follows the cost of a look, and of the ten looks a second of a launcher.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from statistics import median

import torch
from measuring import count, machine

from resiliency import progress
from resiliency.launch.hangs.moments import MomentsOfRank
from resiliency.launch.hangs.slow_ranks import LOOKS_PER_S
from resiliency.progress import STEP_PAGE_ENV, StepPage, report_step
from resiliency.rank.inspection import questions_file
from resiliency.runtime import STOP_NOTES_ENV

#: Looks a second in the seconds that are compared with quiet ones.
MANY_PER_S = 500


def _python() -> None:
    total = 0
    for number in range(20_000):
        total += number * number


def _torch() -> None:
    matrix = torch.ones(256, 256)
    for _ in range(4):
        matrix = matrix @ matrix / 256


STEPS: dict[str, Callable[[], None]] = {"Python alone": _python, "torch": _torch}


def _work(answers: Connection, step: Callable[[], None], until: float) -> None:
    """Steps until then, and at the end the seconds of each with the time at which it ended."""
    torch.set_num_threads(1)
    progress.watch_rank()
    taken = []
    while time.monotonic() < until:
        began = time.perf_counter()
        step()
        taken.append((time.monotonic(), time.perf_counter() - began))
    began = time.perf_counter()
    for number in range(100_000):
        report_step(number)
    answers.send((taken, (time.perf_counter() - began) / 100_000))


def measure(step: Callable[[], None], seconds: int) -> tuple[float, float, float]:
    """Seconds of a step without looks, of a reported step, and what a look adds to the rank's time."""
    context = multiprocessing.get_context("fork")
    page = StepPage(1)
    with tempfile.TemporaryDirectory() as directory:
        os.environ |= {STEP_PAGE_ENV: page.variable(0), STOP_NOTES_ENV: directory}
        mine, theirs = context.Pipe()
        began = time.monotonic() + 0.5
        rank = context.Process(target=_work, args=(theirs, step, began + 2 * seconds))
        rank.start()
        assert rank.pid is not None
        while not questions_file(directory, rank.pid).exists():
            time.sleep(0.01)
        moments = MomentsOfRank(rank.pid, directory)
        watched: list[int] = []
        for second in range(1, 2 * seconds, 2):
            looks = 0
            while time.monotonic() < began + second:
                time.sleep(0.005)
            while time.monotonic() < began + second + 1:
                moments.look()
                looks += 1
                time.sleep(1 / MANY_PER_S)
            watched.append(looks)
        taken, report_s = mine.recv()
        rank.join()
        moments.close()
    page.close()
    windows: list[list[float]] = [[] for _ in range(2 * seconds)]
    for at, step_s in taken:
        if 0 <= (number := int(at - began)) < len(windows):
            windows[number].append(step_s)
    means = [sum(window) / len(window) for window in windows]
    # Of each pair of seconds; what a look takes is what it adds to all steps of a second.
    extra = [
        (busy / quiet - 1) / looks
        for quiet, busy, looks in zip(means[::2], means[1::2], watched, strict=True)
    ]
    return median(means[::2]), report_s, median(extra)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="health_cost.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=count, default=20, metavar="N", help="of each kind (default: 20)")
    args = parser.parse_args()
    print(json.dumps(machine()))
    print("| Step | takes ms | a reported step, us | a look adds us | looks of a launcher add |")
    print("|---|---|---|---|---|")
    for name, step in STEPS.items():
        step_s, report_s, look_s = measure(step, args.seconds)
        share = 100 * LOOKS_PER_S * look_s
        print(f"| {name} | {1e3 * step_s:.2f} | {1e6 * report_s:.2f} | {1e6 * look_s:.0f} | {share:.3f} % |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
