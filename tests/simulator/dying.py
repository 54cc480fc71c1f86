# SPDX-License-Identifier: Apache-2.0
"""Plays one fault, and kills itself at a point of its life: ``dying.py POINT STATE_DIR SETTING``.

SETTING is JSON: injector, fault and what they need; see `build`.  test_recovery.py uses it, and imports
`build` to make the injector that undoes what this process has left.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from simulator.faults import Kind, PlannedFault
from simulator.injectors import Injector
from simulator.injectors.gpu import PowerCap
from simulator.injectors.host import FullDisk, MemoryPressure, NetworkCut
from simulator.injectors.processes import CpuQuota, Niceness, Stop
from simulator.job import Job
from simulator.journal import Journal, Record
from simulator.player import Player

#: In the order in which a fault goes through them.
POINTS = ("aimed", "written", "injected", "ending", "ended", "closed")


class FileGpus:
    """GPUs whose power limits are in a file, so that two processes see the same ones.  Milliwatts.

    Args:
        pids: processes that compute on each of them.
    """

    def __init__(self, path: Path, pids: Sequence[int] = ()) -> None:
        self._path = path
        self._pids = list(pids)

    def refusal(self) -> str:
        return ""

    def bus_id(self, gpu: int) -> str:
        return f"0000:{gpu:02x}:00"

    def processes(self, gpu: int) -> list[int]:
        return self._pids

    def power_limit(self, gpu: int) -> int:
        return int(json.loads(self._path.read_text())[gpu])

    def power_range(self, gpu: int) -> tuple[int, int]:
        return 200_000, 700_000

    def set_power_limit(self, gpu: int, milliwatts: int) -> None:
        limits = json.loads(self._path.read_text())
        limits[gpu] = milliwatts
        self._path.write_text(json.dumps(limits))


def build(setting: dict[str, Any]) -> Injector:
    job = Job(setting["job"], 0)
    makers: dict[str, Any] = {
        "stop": lambda: Stop(job),
        "niceness": lambda: Niceness(job),
        "cpu_quota": lambda: CpuQuota(job),
        "power_cap": lambda: PowerCap(job, FileGpus(Path(setting["gpus"]), setting["pids"])),
        "memory": lambda: MemoryPressure(),
        "disk_full": lambda: FullDisk(Path(setting["disk"]), []),
        "network_cut": lambda: NetworkCut(job),
    }
    made: Injector = makers[setting["injector"]]()
    return made


class DyingInjector:
    """Another injector, with a death before or after it acts."""

    def __init__(self, inner: Injector, point: str) -> None:
        self._inner = inner
        self._point = point
        self.name, self.kinds, self.outlives_boot = inner.name, inner.kinds, inner.outlives_boot

    def refusal(self) -> str:
        return self._inner.refusal()

    def aim_fault(self, fault: PlannedFault) -> Record:
        record = self._inner.aim_fault(fault)
        self._die("aimed")
        return record

    def inject(self, record: Record) -> None:
        self._die("written")
        self._inner.inject(record)
        self._die("injected")

    def end_effect(self, record: Record) -> None:
        self._die("ending")
        self._inner.end_effect(record)
        self._die("ended")

    def _die(self, point: str) -> None:
        if point == self._point:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    point, state_dir, setting = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    journal = Journal(state_dir)
    injector = DyingInjector(build(setting), point)
    fault = PlannedFault(kind=Kind(setting["kind"]), at_us=0, node=0, duration_us=1, **setting["fault"])
    player = Player([fault], Job(setting["job"], 0), [injector], journal, wait=lambda timeout_s: False)
    summary = player.play()
    print(summary, flush=True)
    # At the point "closed" the effect has ended, and the journal's file is still there.
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
