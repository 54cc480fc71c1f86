# SPDX-License-Identifier: Apache-2.0
"""What the first saves of a job cost where all cores train: was each made, and how long did it hold training?

    python3 benchmark/first_saves.py --directory /mnt/disk --rounds 3

A rank trains on all cores from the start in steps of a fixed time, each with as many passes forward and
backward as fit into it, saves every ten steps, and prepares nothing by hand: no `prewarm`.
A save that is skipped holds nothing, so the time held says little without the number of skipped saves: both
are printed, and a skipped save misses the bar.  Each round is a job of its own in fresh processes.
A round begins with the time that one slot takes on this machine while nothing trains.

A virtual machine that has not used its memory before needs 5 s of a core for a new gigabyte, ten times the
usual; that happens once, so it cannot be repeated.  `--new-memory-s 5` has the preparation take as much
processor time as that, on any machine.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch.distributed as dist
from ckpt_groups import arena
from ckpt_limits import timed
from ckpt_training import Training
from measuring import count, file_system, machine

from resiliency.checkpoint import Checkpointer, CheckpointerOptions, SaveState
from resiliency.checkpoint.capture.slots import SlotFile
from resiliency.checkpoint.storage import memory
from resiliency.runtime import RunInfo

WAIT = timedelta(minutes=3)
#: No save is to hold training longer than this many times a later one, or than `FREE_S`.
FACTOR = 1.5
FREE_S = 0.15


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One job: `saves` saves of `size_bytes` each, one every `every` steps of `step_s`."""

    directory: Path
    memory: Path
    size_bytes: int
    step_s: float
    every: int
    saves: int
    new_memory_s: float


@dataclass(frozen=True, kw_only=True)
class Save:
    """What became of one save.

    Attributes:
        at_s: when it was due, from the first step on.
        passes: forward and backward, since the save before: what else runs on the cores costs some.
    """

    step: int
    state: str
    held_s: float
    at_s: float
    passes: int
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Round:
    """One job, and what a slot costs while nothing trains."""

    slot_s: float
    saves: Sequence[Save]

    @property
    def skipped(self) -> int:
        return sum(save.state != SaveState.COMMITTED for save in self.saves)

    @property
    def ratio(self) -> float:
        """The longest hold over what is allowed; saves are compared with the later half of them."""
        later = statistics.median(save.held_s for save in self.saves[len(self.saves) // 2 :])
        return max(save.held_s for save in self.saves) / max(FACTOR * later, FREE_S)

    @property
    def is_met(self) -> bool:
        return not self.skipped and self.ratio <= 1


def main() -> int:
    """Exit codes: 0 every save was made and none held training for long, 1 not so."""
    args = build_parser().parse_args()
    facts = machine()
    root = args.directory or Path(tempfile.gettempdir())
    root.mkdir(parents=True, exist_ok=True)
    rounds = []
    for _ in range(args.rounds):
        rounds.append(run_round(args, root))
        print(as_text(rounds[-1]), flush=True)
    facts |= {"storage": file_system(root)}
    if args.export:
        found = [asdict(each) | {"skipped": each.skipped, "ratio": each.ratio} for each in rounds]
        args.export.write_text(json.dumps({"machine": facts, "rounds": found}, indent=2) + "\n")
    print(summary(rounds))
    return 0 if all(each.is_met for each in rounds) else 1


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="first_saves.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size-gib", type=float, default=1.0, metavar="G", help="of state (default: 1)")
    parser.add_argument("--step-s", type=float, default=0.3, metavar="S", help="of a step (default: 0.3)")
    parser.add_argument("--every", type=count, default=10, metavar="N", help="steps a save (default: 10)")
    parser.add_argument("--saves", type=count, default=8, metavar="N", help="of each job (default: 8)")
    parser.add_argument("--rounds", type=count, default=3, metavar="N", help="jobs (default: 3)")
    parser.add_argument(
        "--new-memory-s", type=float, default=0.0, metavar="S",
        help="processor time that a new GiB of shared memory takes at least (default: what it takes here)",
    )  # fmt: skip
    parser.add_argument("--directory", type=Path, help="on the disk to save to (default: a temporary one)")
    parser.add_argument("--export", type=Path, metavar="FILE.json", help="write every figure there")
    return parser


def run_round(args: argparse.Namespace, root: Path) -> Round:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="first-saves-", dir=root) as directory, arena() as captures:
        plan = Plan(
            directory=Path(directory), memory=captures, size_bytes=int(args.size_gib * 2**30),
            step_s=args.step_s, every=args.every, saves=args.saves,
            new_memory_s=args.new_memory_s,
        )  # fmt: skip
        here, there = context.Pipe()
        process = context.Process(target=serve, args=(there, plan))
        process.start()
        there.close()
        try:
            found: Round = here.recv()
        finally:
            process.join(WAIT.total_seconds())
    return found


def serve(parent: Connection, plan: Plan) -> None:
    """Entry of the rank's process."""
    store = dist.FileStore(str(plan.directory / "store"), 1)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    training = Training(plan.size_bytes, 0)
    _make_memory_dear(plan.new_memory_s)
    slot = SlotFile(plan.memory / "alone")
    slot_s = timed(lambda: slot.reserve(plan.size_bytes, 0))
    saves = _train(plan, training)  # the slot stays until then: memory that was just freed comes for less
    slot.close()
    parent.send(Round(slot_s=slot_s, saves=saves))
    dist.destroy_process_group()


def _make_memory_dear(seconds_per_gib: float) -> None:
    """Let each call that faults in a slot take so much processor time, outside the interpreter's lock."""
    libc, work = memory._libc(), bytes(1 << 20)

    class Dear:
        @staticmethod
        def madvise(address: ctypes.c_void_p, length: ctypes.c_size_t, advice: int) -> int:
            until = time.thread_time() + seconds_per_gib * length.value / 2**30
            failed: int = libc.madvise(address, length, advice)
            while time.thread_time() < until:
                zlib.crc32(work)
            return failed

    if seconds_per_gib:
        memory._libc = Dear  # type: ignore[assignment]


def _step(training: Training, step_s: float) -> int:
    """One step; returns the number of its passes.  Without the time of the optimizer."""
    until, passes = time.perf_counter() + step_s, 0
    while not passes or time.perf_counter() < until:
        training.forward_backward()
        passes += 1
    training.update()
    return passes


def _train(plan: Plan, training: Training) -> list[Save]:
    handles, due, done, passes = [], [], [], 0
    update_s = min(timed(training.update) for _ in range(5))
    options = CheckpointerOptions(arena_root=plan.memory)
    info = RunInfo(job_name=plan.directory.name, rank=0, world_size=1)
    with Checkpointer(
        plan.directory / "saved", every_steps=plan.every, keep=2, info=info, options=options
    ) as checkpoints:
        began = time.perf_counter()
        for step in range(1, plan.every * (plan.saves + 1)):  # the last save has its steps as well
            passes += _step(training, max(plan.step_s - update_s, plan.step_s / 2))
            at = time.perf_counter() - began
            if handle := checkpoints.step(step, training.state):
                handles.append(handle)
                due.append(at)
                done.append(passes)
                passes = 0
    return [
        Save(
            step=handle.step, state=handle.state.value, held_s=handle.record.held_s, at_s=at_s,
            passes=passes, why=handle.record.why,
        )
        for handle, at_s, passes in zip(handles, due, done, strict=True)
    ]  # fmt: skip


def as_text(found: Round) -> str:
    lines = [f"a slot takes {found.slot_s:.2f} s while nothing trains"]
    for save in found.saves:
        lines.append(
            f"  step {save.step:4d}  due at {save.at_s:6.2f} s  {save.state:9s}  held {save.held_s:6.3f} s"
            f"  {save.passes:4d} passes  {save.why}"
        )
    return "\n".join(lines)


def summary(rounds: Sequence[Round]) -> str:
    made = [len(each.saves) - each.skipped for each in rounds]
    held = [max(save.held_s for save in each.saves) for each in rounds]
    ratios = [each.ratio for each in rounds]
    return "\n".join(
        [
            f"saves made, of {len(rounds[0].saves)}: {made}; not made: {[each.skipped for each in rounds]}",
            f"longest hold: {statistics.median(held):.3f} s ({min(held):.3f} to {max(held):.3f})",
            f"first saves / 1.5 x later ones, or 0.15 s: {statistics.median(ratios):.2f}"
            f" ({min(ratios):.2f} to {max(ratios):.2f})",
            "met" if all(each.is_met for each in rounds) else "MISSED",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
