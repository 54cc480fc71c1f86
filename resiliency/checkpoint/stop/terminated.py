# SPDX-License-Identifier: Apache-2.0
"""What a program sees of a common stop: its options, and the exception that ends the job.

How the ranks come to it is told in `resiliency.checkpoint.stop.termination`.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

from resiliency.errors import ConfigError

_FLUSH_S = 0.5


@dataclass(frozen=True, kw_only=True)
class TerminationOptions:
    """What ends a job before its end, and how long that may take.

    Attributes:
        deadline: from the signal until the checkpoint must be committed.  Less than what the platform
            leaves between its signal and SIGKILL, by some seconds: Kubernetes 30 s by default.
        signals: those that stop the job.  SIGINT, if it is one of them, ends at once the second time.
        address: of rank 0, as the other hosts reach it; default: MASTER_ADDR or its host's name.
    """

    deadline: timedelta = timedelta(seconds=25)
    signals: tuple[signal.Signals, ...] = (signal.SIGTERM,)
    address: str = ""

    def __post_init__(self) -> None:
        if self.deadline <= timedelta(0):
            raise ConfigError(f"a termination deadline must be positive, found {self.deadline}.")
        for number in self.signals:
            if number in (signal.SIGKILL, signal.SIGSTOP):
                raise ConfigError(f"{signal.Signals(number).name} cannot be caught.")


class Terminated(SystemExit):
    """Training was stopped from outside; ends the process unless it is caught.

    Attributes:
        step: that was reached.
        committed: the checkpoint of that step is committed; then `code` is 0, else 128 + signal.
        cause: the signal's name, and what went wrong if something did.
    """

    def __init__(self, code: int, *, step: int, committed: bool, cause: str) -> None:
        super().__init__(code)
        self.step = step
        self.committed = committed
        self.cause = cause


def end_process(code: int) -> None:
    """End this process from any thread, whatever the others are stuck in."""

    def flush() -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()

    # The stuck thread may hold the stream's lock.
    flusher = threading.Thread(target=flush, name="resiliency-flush", daemon=True)
    with suppress(RuntimeError):  # without a thread nothing is flushed, and the process ends all the same
        flusher.start()
        flusher.join(_FLUSH_S)
    os._exit(code)
