# SPDX-License-Identifier: Apache-2.0
"""Where a rank that hangs is, and the processes that it has forked: a loader's worker, for one."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from resiliency.proc_stat import handles_signal

_SIGNAL = signal.SIGRTMIN + 9
_NAME = "rank-pool-stacks"
#: A process that can write its stacks does so within milliseconds, also on a busy machine within this.
_WRITE_S = 2.0
_POLL_S = 0.05


def offer_stacks() -> None:
    """Let `take_stacks` see this process, and all that it forks."""
    fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)  # open for the life of the process
    faulthandler.register(_SIGNAL, file=fd, all_threads=True)


def take_stacks(pid: int) -> str:
    """The stacks of all threads of process `pid` and of its children; empty where nothing can be seen."""
    import psutil  # imported when it is needed: `resiliency.testing` is cheap to import

    found = []
    with suppress(OSError, psutil.Error):
        (text,) = (fd for fd in Path(f"/proc/{pid}/fd").iterdir() if _NAME in os.readlink(fd))
        family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        with text.open("rb") as file:
            for process in family:
                # One that has called exec has no handler any more.
                if not handles_signal(process.pid, _SIGNAL) or process.status() == psutil.STATUS_STOPPED:
                    continue
                process.send_signal(_SIGNAL)
                deadline, written = time.monotonic() + _WRITE_S, b""
                while time.monotonic() < deadline:
                    time.sleep(_POLL_S)
                    more = file.read()
                    written += more
                    if written and not more:
                        break
                found.append(f"process {process.pid}:\n{written.decode(errors='replace')}")
    return "\n".join(found)
