# SPDX-License-Identifier: Apache-2.0
"""The job of `health_campaign.py`: DDP over gloo, with ranks that stand still or are slow when told to.

    health_workload.py DIRECTORY

``DIRECTORY/schedule.json`` lists the faults.  The rank of fault n waits for ``armed-<n>``, writes
``begin-<n>`` when it comes to the place, and goes on when the other side lets it: by SIGCONT, by opening the
pipe ``gate-<n>``, or by ``over-<n>``.  With ``end`` the job ends.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from health_faults import COLLECTIVES, Fault, FaultKind
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from resiliency.progress import report_step, watch_rank

DIRECTORY = Path(sys.argv[1])
SCHEDULE = [Fault.from_json(one) for one in json.loads((DIRECTORY / "schedule.json").read_text())]
MINE = [fault for fault in SCHEDULE if fault.rank == int(os.environ["RANK"])]
#: Own work of a step, and how much longer a slow loader takes for a batch.
WORK_S, SLEEP_S = 0.005, 0.06


def due(*kinds: FaultKind) -> Fault | None:
    """The fault of one of these kinds that is to happen here now."""
    for fault in MINE:
        if fault.kind in kinds and _is("armed", fault) and not _is("over", fault):
            return fault
    return None


def _is(state: str, fault: Fault) -> bool:
    return (DIRECTORY / f"{state}-{fault.number}").exists()


def begin(fault: Fault) -> None:
    if not _is("begin", fault):
        file = DIRECTORY / f"begin-{fault.number}"
        part = file.with_suffix(f".{os.getpid()}")
        part.write_text(f"{time.time()} {os.getpid()}")
        part.replace(file)


def stand_still(fault: Fault) -> None:
    if _is("begin", fault):
        return
    begin(fault)
    if fault.is_stop:
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        (DIRECTORY / f"gate-{fault.number}").read_bytes()


class Samples(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Any:
        while True:
            if (stuck := due(FaultKind.LOADER)) is not None:
                stand_still(stuck)
            if (slow := due(FaultKind.WORKER)) is not None:
                begin(slow)
                time.sleep(SLEEP_S)
            yield torch.ones(64)


def work() -> None:
    end = time.thread_time() + WORK_S
    matrix = torch.ones(64, 64)
    while time.thread_time() < end:
        matrix = matrix @ matrix / 64


def save(state: dict[str, Any]) -> None:
    fault = due(FaultKind.SAVE)
    if fault is not None and not _is("begin", fault):
        begin(fault)
        torch.save(state, DIRECTORY / f"gate-{fault.number}")  # a pipe: as a storage that does not answer


def main() -> None:
    watch_rank()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    batches = iter(DataLoader(Samples(), batch_size=1, num_workers=1, prefetch_factor=1))
    step, ends = 0, torch.zeros(1)
    while not ends:
        batch = next(batches)
        work()
        stuck = due(FaultKind.STEP_ONE, FaultKind.STOPPED, FaultKind.STUCK)
        if (slow := due(FaultKind.THROTTLED)) is not None:
            begin(slow)
        for number in range(COLLECTIVES):
            if stuck is not None and stuck.collective == number:
                stand_still(stuck)
            if number == 1:
                model(batch).sum().backward()
            else:
                ends = torch.tensor([float((DIRECTORY / "end").exists())])
                dist.all_reduce(ends)
        optimizer.step()
        save(model.state_dict())
        report_step(step)
        step += 1
    os._exit(0)


if __name__ == "__main__":
    main()
