# SPDX-License-Identifier: Apache-2.0
"""Probes of a host that is broken, or that has something else to do: the twin of the real programs.

    HostProbes(host="h2", disk=..., command=broken("flip", "compute"))

Faults of the host: `flip` changes one bit of each product on one core, `crash` ends a probe that measures by
SIGSEGV, `hang` keeps it silent, and `half` does when its first result is printed.

No faults: `late` never begins to measure, `stop` is stopped by a signal, `die` is ended by SIGKILL, `eat`
takes memory until the kernel ends it, `crash-once` works the second time, `orphan` hangs and leaves a child
that holds its output, `linger` does not end when all is said.  `isa` computes by other instructions.

`usual` and `slow` set the clock that each core is measured by, as `flip` and `isa` do: whatever else the
machine does, a product takes what `PACES` says.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from resiliency.launch.host_check import programs

#: Seconds that pass by the clock from one look at it to the next, so for each product.
PACES = {"usual": 0.05, "slow": 0.08, "flip": 0.05, "isa": 0.05}


def broken(fault: str, probe: str) -> tuple[str, ...]:
    """The command of `HostProbes` with `fault` in the probe of this name, and in no other one."""
    return (sys.executable, __file__, fault, probe)


def flip_bit(product: Any) -> None:
    """The lowest bit of one element, on one core of the host."""
    import torch

    if os.sched_getaffinity(0) == {max(os.sched_getaffinity(os.getpid()))}:
        product.view(torch.int32)[3, 5] ^= 1


def paced_clock(step_s: float) -> Callable[[], float]:
    """A clock of each thread on which each look is `step_s` after the one before."""
    looks = threading.local()

    def clock() -> float:
        looks.count = getattr(looks, "count", 0) + 1
        return float(looks.count * step_s)

    return clock


def crash() -> None:
    """By a signal, without a file of the memory."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.raise_signal(signal.SIGSEGV)


def say(**line: object) -> None:
    """One line of the probe."""
    print(json.dumps(line), flush=True)


def fail(fault: str, name: str, directory: Path) -> None:
    """Have a fault that is none of the measuring."""
    if fault != "late":
        say(begins=name)
    if fault == "crash":
        crash()
    elif fault == "crash-once":
        marker = directory / "crashed"
        if not marker.exists():
            marker.touch()
            crash()
        marker.unlink()
    elif fault == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "eat":
        Path("/proc/self/oom_score_adj").write_text("1000")  # before its caller
        eaten = []
        while True:
            eaten.append(b"x" * (16 << 20))
    elif fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "orphan":
        (directory / "orphan").write_text(str(os.posix_spawn("/bin/sleep", ["sleep", "600"], os.environ)))
    elif fault == "half":
        say(value=1.0)
    if fault in ("half", "hang", "late", "orphan"):
        signal.pause()


def main(argv: list[str]) -> int:
    """Run a probe, with the fault if it is the one that has it."""
    fault, faulty, name, directory = argv
    if name != faulty:
        return programs.main([name, directory])
    if fault in PACES:
        programs._clock = paced_clock(PACES[fault])
    if fault == "flip":
        programs.multiply_on_cores = partial(programs.multiply_on_cores, spoil=flip_bit)
    elif fault == "isa":
        os.environ["MKL_ENABLE_INSTRUCTIONS"] = "AVX2"
    elif fault not in ("usual", "slow", "linger"):
        fail(fault, name, Path(directory))
    code = programs.main([name, directory])
    if fault == "linger":
        signal.pause()
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
