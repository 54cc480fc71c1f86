# SPDX-License-Identifier: Apache-2.0
"""Probes of a host that is broken: the twin of `resiliency.launch.host_check.probes`.

    HostProbes(host="h2", disk=..., command=broken("flip", "compute"))

`flip` changes one bit of each product, `die` ends the process by SIGKILL, `hang` stops it.  `half` stops it
when its first result is printed, `linger` when all are.  `usual` and `slow` set the clock that each core is
measured by: whatever else the machine does, a product takes what `PACES` says.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from resiliency.launch.host_check import probes

#: Seconds that pass by the clock from one look at it to the next, so for each product.
PACES = {"usual": 0.05, "slow": 0.08}


def broken(fault: str, probe: str) -> tuple[str, ...]:
    """The command of `HostProbes` with `fault` in the probe of this name, and in no other one."""
    return (sys.executable, __file__, fault, probe)


def flip_bit(product: Any) -> None:
    """The lowest bit of one element."""
    import torch

    product.view(torch.int32)[3, 5] ^= 1


def paced_clock(step_s: float) -> Callable[[], float]:
    """A clock of each thread on which each look is `step_s` after the one before."""
    looks = threading.local()

    def clock() -> float:
        looks.count = getattr(looks, "count", 0) + 1
        return float(looks.count * step_s)

    return clock


def main(argv: list[str]) -> int:
    """Run a probe, with the fault if it is the one that has it."""
    fault, faulty, name, directory = argv
    if name == faulty:
        if fault == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault == "hang":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault in PACES:
            probes._clock = paced_clock(PACES[fault])
        elif fault == "flip":
            right = next(probes.measure_compute(Path(directory)))
            wrong = probes.multiply_on_cores(right["platform"], flip_bit)
            print(json.dumps({**right, **wrong}))
            return 0
        elif fault == "half":
            print(json.dumps(next(probes.PROGRAMS[name](Path(directory)))), flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)
    code = probes.main([name, directory])
    if (fault, faulty) == ("linger", name):
        os.kill(os.getpid(), signal.SIGSTOP)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
