# SPDX-License-Identifier: Apache-2.0
"""Probes of a host that is broken: the twin of `resiliency.launch.host_check.probes`.

    HostProbes(host="h2", disk=..., command=broken("flip", "compute"))

`flip` changes one bit of each product, `die` ends the process by SIGKILL, `hang` stops it, `slow` stops it
for 20 of every 50 ms, which leaves at most 60 % of its speed.  `half` stops it when its first result is
printed, `linger` when all are.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from resiliency.launch.host_check import probes

#: The process that stops and continues a slow one; ends with it.
_DUTY_CYCLE = """
import os, signal, sys, time
pid = int(sys.argv[1])
try:
    while os.getppid() == pid:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.020)
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.030)
except ProcessLookupError:
    pass
"""


def broken(fault: str, probe: str) -> tuple[str, ...]:
    """The command of `HostProbes` with `fault` in the probe of this name, and in no other one."""
    return (sys.executable, __file__, fault, probe)


def flip_bit(product: Any) -> None:
    """The lowest bit of one element."""
    import torch

    product.view(torch.int32)[3, 5] ^= 1


def main(argv: list[str]) -> int:
    """Run a probe, with the fault if it is the one that has it."""
    fault, faulty, name, directory = argv
    if name == faulty:
        if fault == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault == "hang":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault == "slow":
            subprocess.Popen([sys.executable, "-S", "-E", "-c", _DUTY_CYCLE, str(os.getpid())])
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
