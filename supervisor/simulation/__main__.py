# SPDX-License-Identifier: Apache-2.0
"""Play histories of a virtual fleet from seeds; of one that fails, show the smallest that still does."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from supervisor.simulation.run import Result, run, scenario, shrink


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python3 -m supervisor.simulation", description=__doc__)
    parser.add_argument(
        "--hosts", type=int, default=12, help="hosts; up to 16, the most of each history (12)"
    )
    parser.add_argument("--seed", type=int, default=0, help="the first seed (0)")
    parser.add_argument("--seeds", type=int, default=1, help="how many, one after another (1)")
    parser.add_argument("--verbose", action="store_true", help="print what each history did")
    options = parser.parse_args(argv)
    for name, least in (("hosts", 4), ("seeds", 1), ("seed", 0)):
        if getattr(options, name) < least:
            parser.error(f"--{name} must be {least} or more, found {getattr(options, name)}")
    began = shown = time.monotonic()
    seconds = messages = effects = 0.0
    for number in range(options.seeds):
        seed = options.seed + number
        result = run(scenario(seed, options.hosts))
        seconds, messages, effects = (
            seconds + result.seconds,
            messages + result.messages,
            effects + result.effects,
        )
        if options.verbose or result.violation:
            _show(result)
        if result.violation:
            _show_smallest(result)
            return 1
        if time.monotonic() - shown > 5.0:
            shown = time.monotonic()
            print(f"{number + 1} of {options.seeds} seeds, {shown - began:.0f} s", flush=True)
    print(
        f"{options.seeds} seeds with {options.hosts} hosts: all invariants held in {seconds / 3600:.1f} h of"
        f" virtual time, {messages:.0f} messages, {effects:.0f} effects;"
        f" {time.monotonic() - began:.1f} s of real time"
    )
    return 0


def _show(result: Result) -> None:
    drawn = result.scenario
    policy = "a reckless policy" if drawn.reckless else "the default policy"
    print(
        f"seed {drawn.seed}: {drawn.hosts} hosts, {policy}, {result.seconds:.0f} s, {result.effects} effects"
    )
    for fault in drawn.faults:
        print(f"  fault {fault}")
    for line in result.history:
        print(f"  {line}")
    if result.violation:
        print(f"  VIOLATED {result.violation}")


def _show_smallest(result: Result) -> None:
    smallest = shrink(result.scenario, lambda less: bool(run(less).violation))
    if smallest != result.scenario:
        print("the same with as few faults as fail:")
        _show(run(smallest))


if __name__ == "__main__":
    sys.exit(main())
