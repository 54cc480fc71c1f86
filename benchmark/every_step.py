# SPDX-License-Identifier: Apache-2.0
"""What a save at every step costs: steps without saves and steps that are all saved, in turn.

    python3 benchmark/every_step.py --directory /mnt/disk
    python3 benchmark/every_step.py --directory /mnt/disk --size-gib 1 --slots 1

One rank trains with one thread, so that a core is free where there are two.  A save that is due while no slot
is free is skipped by rule, and counted.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from ckpt_training import Training
from measuring import count, file_system, machine

from resiliency.checkpoint import Checkpointer, CheckpointerOptions, SaveHandle
from resiliency.errors import ConfigError
from resiliency.runtime import RunInfo

#: Percent of a step.
LIMIT = 3.0
WAIT = timedelta(minutes=3)


@dataclass(kw_only=True)
class Found:
    """Seconds of a round's median step, and how the saves of all rounds ended."""

    size_bytes: int
    without_s: list[float] = field(default_factory=list)
    with_saves_s: list[float] = field(default_factory=list)
    held_s: list[float] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)

    @property
    def excess_percent(self) -> float:
        pairs = zip(self.with_saves_s, self.without_s, strict=True)
        return 100 * statistics.median(saved / without - 1 for saved, without in pairs)

    @property
    def is_met(self) -> bool:
        return self.excess_percent <= LIMIT


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="every_step.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory", type=Path, help="on the disk to save to (default: a temporary one)")
    parser.add_argument(
        "--size-gib", type=float, default=0.25, metavar="G", help="state of the rank (default: %(default)s)"
    )
    parser.add_argument(
        "--step-s", type=float, default=0.5, metavar="S", help="length of a step (default: %(default)s)"
    )
    parser.add_argument("--steps", type=count, default=10, metavar="N", help="of a round (default: 10)")
    parser.add_argument(
        "--rounds", type=count, default=4, metavar="N", help="with saves, and without (default: 4)"
    )
    parser.add_argument("--slots", type=int, default=0, metavar="N", help="see `CheckpointerOptions`")
    parser.add_argument("--export", type=Path, metavar="FILE.json", help="write every figure there")
    return parser


def main() -> int:
    """Exit codes: 0 the excess is within its limit, 1 it is not."""
    args = build_parser().parse_args()
    torch.set_num_threads(1)
    if args.directory:
        args.directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="every-step-", dir=args.directory) as name:
        store = dist.FileStore(f"{name}/store", 1)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            found = measure(Path(name), args)
        finally:
            dist.destroy_process_group()
        facts = machine() | {"storage": file_system(Path(name))}
    print(as_text(found))
    if args.export:
        record = {**vars(found), "excess_percent": found.excess_percent, "machine": facts}
        args.export.write_text(json.dumps(record, indent=2) + "\n")
    return 0 if found.is_met else 1


def measure(directory: Path, args: argparse.Namespace) -> Found:
    training = Training(int(args.size_gib * 2**30), 0)
    batch = training.batch_for(args.step_s)
    for _ in range(3):  # larger batches take less per sample
        training.set_batch(batch)
        batch = max(1, round(batch * args.step_s / (training.steps(3, lambda: None) / 3)))
    found = Found(size_bytes=sum(tensor.nbytes for tensor in training.tensors()))
    with Checkpointer(
        directory / "saved",
        every_steps=1,
        keep=2,
        info=RunInfo(job_name=directory.name),
        options=CheckpointerOptions(slots=args.slots),
    ) as checkpoints:
        checkpoints.prewarm(training.state)
        step = 0
        for number in range(2 * args.rounds + 1):
            saves = number % 2 == 1
            handles: list[SaveHandle | None] = []
            ends = [time.perf_counter()]
            for _ in range(args.steps):
                step += 1
                training.steps(1, lambda: None)
                if saves:
                    handles.append(checkpoints.step(step, training.state))
                ends.append(time.perf_counter())
            seconds = statistics.median(end - begin for begin, end in pairwise(ends))
            checkpoints.fence()
            checkpoints.wait(WAIT)
            if not number:  # the first steps are slower
                continue
            (found.with_saves_s if saves else found.without_s).append(seconds)
            records = [handle.record for handle in handles if handle]
            if records:
                found.held_s.append(statistics.median(record.held_s for record in records))
            found.outcomes.update(record.state.value for record in records)
        shutil.rmtree(directory / "saved", ignore_errors=True)
    return found


def as_text(found: Found) -> str:
    without, saved = statistics.median(found.without_s), statistics.median(found.with_saves_s)
    outcome = "met" if found.is_met else "MISSED"
    return (
        f"{found.size_bytes / 2**30:.2f} GiB: a step takes {1e3 * without:.0f} ms,"
        f" with a save at every step {1e3 * saved:.0f} ms;"
        f" of that held {1e3 * statistics.median(found.held_s):.1f} ms\n"
        f"saves: {', '.join(f'{number} {name}' for name, number in sorted(found.outcomes.items()))}\n"
        f"excess: {found.excess_percent:.1f} % of a step (limit {LIMIT:g} %): {outcome}"
    )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ConfigError as error:
        sys.exit(str(error))
