# SPDX-License-Identifier: Apache-2.0
"""What went wrong with a worker, in the words that a person looks for first."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from resiliency.launch.health.evidence import signal_name

#: Bytes from the end of a log in which the line that names the exception is looked for.
TAIL_BYTES = 8192
#: What upstream says when a worker wrote no error file.
NO_ERROR_FILE = "<NONE>"
_EXCEPTION_LINE = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Warning)\b.*")


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


def cause_of(
    exit_code: int, *, error: Mapping[str, object], hang: str | None, stderr_file: str | None
) -> str:
    """Name the cause: a hang, else the signal or exit code with the exception behind it.

    Args:
        error: content of torch's error file; empty when the script does not write one.
        hang: what a rank monitor noted before it ended the worker.
        stderr_file: the worker's standard error, when it is kept.
    """
    if hang is not None:
        return f"hang: {hang}"
    died = signal_name(-exit_code) if exit_code < 0 else f"exit code {exit_code}"
    exception = _from_error_file(error)
    # A process that aborts while it tears down after an exception is common with gloo and CUDA;
    # any other signal came from outside, whatever was printed before.
    if not exception and stderr_file and (exit_code > 0 or exit_code == -signal.SIGABRT):
        lines = reversed(read_tail(stderr_file))
        exception = next((line for line in lines if _EXCEPTION_LINE.fullmatch(line)), "")
    return f"{died}, {exception}" if exception else died


def _from_error_file(error: Mapping[str, object]) -> str:
    message = error.get("message", "")
    if isinstance(message, Mapping):
        message = message.get("message", "")
    # The first line: an exception's own text may go on for pages.
    line = str(message).strip().partition("\n")[0]
    return "" if line == NO_ERROR_FILE else line


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
