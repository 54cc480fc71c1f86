# SPDX-License-Identifier: Apache-2.0
"""The training of goodput_under_failures.py: torch, gloo, a step of some 20 ms, a checkpoint of a few MiB.

Every launcher can start it.  Rank 0 notes the step that it begins with and each finished step, with their
times, in a file, over all attempts: the largest step before a moment says how far training had come.

With `--events` every rank also writes the events of its life, from which the ledger tells where time went.
"""

from __future__ import annotations

import argparse
import os
import time
from contextlib import ExitStack
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from failures_savers import SAVERS, TELLING

from resiliency.events import EventStream, EventType
from resiliency.goodput_measure.tracker import open_event_stream
from resiliency.runtime import RunInfo, process_start_time

#: Width of the one layer.
WIDTH = 768
ROWS = 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--memory", type=Path, required=True, help="for captures; in memory")
    parser.add_argument("--disk", type=Path, help="for the local tier; default: in --directory")
    parser.add_argument("--save", choices=list(SAVERS), required=True)
    parser.add_argument("--save-every", type=int, required=True, metavar="STEPS")
    parser.add_argument(
        "--ends-at",
        type=float,
        required=True,
        metavar="S",
        help="by the host's monotonic clock, all attempts",
    )
    parser.add_argument("--events", action="store_true", help="for the ledger, into RESILIENCY_RUN_DIR")
    args = parser.parse_args()
    args.disk = args.disk or args.directory / "local"
    with ExitStack() as stack:
        events: EventStream | None = None
        if args.events:
            events = stack.enter_context(open_event_stream(RunInfo.from_env()))
            events.emit(EventType.PROCESS_STARTED, time=process_start_time())
        _train(args, events)


def _train(args: argparse.Namespace, events: EventStream | None) -> None:
    def tell(type: EventType, **fields: Any) -> None:
        if events is not None:
            events.emit(type, **fields)

    import torch
    from torch import distributed

    tell(EventType.IMPORTED)
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    tell(EventType.INITIALIZED)
    if args.save not in TELLING:
        tell(EventType.RESTORE_STARTED)
    weight, velocity = torch.zeros(WIDTH, WIDTH, requires_grad=True), torch.zeros(WIDTH, WIDTH)
    state = {"weight": weight.detach(), "velocity": velocity}
    done, save = SAVERS[args.save](args, state, events)
    if args.save not in TELLING:
        tell(EventType.CHECKPOINT_LOADED, step=done)
    notes = os.open(args.directory / "steps", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    step = done

    def note(type: EventType, **fields: Any) -> None:
        """The same moment in the notes and in the events."""
        now = datetime.now(timezone.utc)
        if rank == 0:
            os.write(notes, f"{now.timestamp():.6f} {step}\n".encode())
        tell(type, step=step, time=now, **fields)

    note(EventType.STEP_STARTED)
    # Nothing else ends a job whose measurement was killed.  Ranks may end a step apart: one that waits for
    # the other fails, is started again, and ends here, too.
    while time.monotonic() < args.ends_at:
        step += 1
        (gradient,) = torch.autograd.grad((torch.randn(ROWS, WIDTH) @ weight - 1).square().mean(), weight)
        distributed.all_reduce(gradient)
        velocity.mul_(0.9).add_(gradient)
        weight.data.sub_(velocity, alpha=1e-3)
        note(EventType.STEP_FINISHED)
        if rank == 0 and step == done + 1:
            print(f"first step {step}", flush=True)
        save(step)


if __name__ == "__main__":
    main()
