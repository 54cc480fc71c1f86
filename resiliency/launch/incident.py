# SPDX-License-Identifier: Apache-2.0
"""What went wrong with a worker, in the words that a person looks for first."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from resiliency.launch.health.evidence import RankDeath, signal_name

#: Bytes from the end of a log in which the exception is looked for.
TAIL_BYTES = 8192


@dataclass(frozen=True, kw_only=True)
class RankFault:
    """The end of one worker.  `exit_code` is negative for a signal."""

    rank: int
    local_rank: int
    host: str
    pid: int
    attempt: int
    exit_code: int
    cause: str
    time: datetime
    log_file: str | None

    def __str__(self) -> str:
        log = self.log_file or "none kept (--log-dir DIR --tee 3 keeps them)"
        return (
            f"rank {self.rank} (host {self.host}, local rank {self.local_rank}, pid {self.pid}): "
            f"{self.cause}\n"
            f"    at {self.time:%Y-%m-%d %H:%M:%S} UTC in attempt {self.attempt}, log file: {log}"
        )


def cause_of(death: RankDeath) -> str:
    """Name the cause: a hang, else the signal or exit code with the exception behind it."""
    if death.hang:
        return f"hang: {death.hang}"
    died = signal_name(-death.exit_code) if death.exit_code < 0 else f"exit code {death.exit_code}"
    return f"{died}, {death.error}" if death.error is not None else died


def read_tail(path: str) -> tuple[str, ...]:
    """The last lines of a log; none of one that cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(max(os.fstat(file.fileno()).st_size - TAIL_BYTES, 0))
            return tuple(file.read().decode(errors="replace").splitlines())
    except OSError:
        return ()


def summarise(script: str, faults: Sequence[RankFault], *, restarts: int, max_restarts: int) -> str:
    """The last words of a failed job: every rank of this host that failed in the last attempt."""
    spent = f"{restarts} of {max_restarts} restarts used"
    if not faults:
        return f"{script} failed on another host; {spent}."
    ranks = "1 rank" if len(faults) == 1 else f"{len(faults)} ranks"
    lines = "\n".join(f"  {fault}" for fault in sorted(faults, key=lambda fault: (fault.time, fault.rank)))
    return f"{script} failed: {ranks} on this host, {spent}.  First to fail comes first.\n{lines}"
