# SPDX-License-Identifier: Apache-2.0
"""The evidence of one attempt, as one host can see it: counted and read from where the attempt began.

Nothing here waits for a device or a file system: a launcher that hangs over a diagnosis helps no job.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from resiliency.cgroups import oom_kills
from resiliency.launch.health.evidence import (
    Evidence,
    HostFacts,
    RankDeath,
    RankError,
    read_traceback,
)
from resiliency.launch.incident import NO_ERROR_FILE, read_tail

KERNEL_LOG = Path("/dev/kmsg")
#: Records of the kernel that are read at most for one failure, and lines that are kept.
KERNEL_RECORDS, KERNEL_LINES, RECORD_BYTES = 5000, 200, 8192
LOG_LINES = 20
#: A file system with less room is full.
FULL_BYTES = 1 << 20


class KernelLog:
    """Lines that the kernel has written since `mark_start`; a log that may not be read has None."""

    def __init__(self, path: Path = KERNEL_LOG) -> None:
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:  # in containers, as a rule
            self._fd = -1

    def mark_start(self) -> None:
        if self._fd >= 0:
            with suppress(OSError):
                os.lseek(self._fd, 0, os.SEEK_END)

    def try_read(self) -> tuple[str, ...] | None:
        if self._fd < 0:
            return None
        lines: list[str] = []
        for _ in range(KERNEL_RECORDS):
            try:
                record = os.read(self._fd, RECORD_BYTES)
            except BrokenPipeError:  # records were overwritten before they were read; the next read goes on
                continue
            except BlockingIOError:
                break
            except OSError:
                return None
            if not record:
                break
            # priority,number,time,flags;text, and then lines of key=value.
            lines.append(record.decode(errors="replace").partition(";")[2].partition("\n")[0])
        return tuple(lines[-KERNEL_LINES:])

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class EvidenceCollector:
    """What this host knows of the current attempt; `begin_attempt` forgets the one before.

    Args:
        host: name of this host.
        directories: of the job, whose file systems may be full.
    """

    def __init__(self, host: str, directories: tuple[str, ...] = ()) -> None:
        self._host, self._directories = host, directories
        self._kernel = KernelLog()
        self._deaths: list[RankDeath] = []
        self._oom_kills: int | None = None
        self._began = time.monotonic()

    def begin_attempt(self) -> None:
        self._deaths.clear()
        self._kernel.mark_start()
        self._oom_kills = oom_kills()
        self._began = time.monotonic()

    def add_death(
        self,
        *,
        rank: int,
        exit_code: int,
        error: Mapping[str, object],
        hang: str | None,
        stderr_file: str | None,
        step: int | None = None,
    ) -> None:
        """In the order in which deaths are noticed.

        Args:
            error: content of torch's error file; empty where there is none.
            hang: what a rank monitor noted before it ended the rank.
            step: the last one that the rank has finished, by the step page.
        """
        # What a rank has printed explains an exit and an abort; another signal came from outside.
        speaks = exit_code > 0 or exit_code in (-6, -15)
        log = read_tail(stderr_file) if stderr_file and speaks else ()
        self._deaths.append(
            RankDeath(
                rank=rank,
                host=self._host,
                exit_code=exit_code,
                error=read_error_file(error) or read_traceback(log),
                hang=hang or "",
                log=log[-LOG_LINES:],
                step=step,
            )
        )

    def collect(self, *, attempt: int, step: int | None) -> Evidence:
        """All of it, as of now.

        Args:
            step: newest step on the step page of this host.
        """
        noted = [death.error.step for death in self._deaths if death.error and death.error.step is not None]
        before, now = self._oom_kills, oom_kills()
        facts = HostFacts(
            host=self._host,
            oom_kills=None if before is None or now is None else max(now - before, 0),
            kernel=self._kernel.try_read(),
            full=tuple(filter(_is_full, self._directories)) if self._storage_failed() else (),
        )
        return Evidence(
            attempt=attempt,
            deaths=tuple(self._deaths),
            hosts=(facts,),
            step=max([*noted, *([] if step is None else [step])], default=None),
            uptime_s=time.monotonic() - self._began,
        )

    def _storage_failed(self) -> bool:
        """Only then are file systems asked: one that hangs would hold the launcher."""
        names = ("OSError", "CheckpointWriteFailed")
        return any(death.error is not None and death.error.name in names for death in self._deaths)

    def close(self) -> None:
        self._kernel.close()


def read_error_file(content: Mapping[str, object]) -> RankError | None:
    """The exception in torch's error file; None where it holds none."""
    message = content.get("message", "")
    details = message if isinstance(message, Mapping) else {}
    text = str(details.get("message", "") if details else message).strip()
    if not text or text == NO_ERROR_FILE:
        return None
    extra = details.get("extraInfo")
    trace = str(extra.get("py_callstack", "")) if isinstance(extra, Mapping) else ""
    shown = read_traceback(trace.splitlines())
    kind, colon, rest = text.partition(":")
    if not colon or not kind.replace(".", "").isidentifier():
        kind, rest = "Error", text
    step = content.get("step")
    return RankError(
        type=kind,
        message=rest.strip(),
        frames=shown.frames if shown is not None else (),
        step=step if isinstance(step, int) else None,
    )


def _is_full(directory: str) -> bool:
    try:
        room = os.statvfs(directory)
    except OSError:
        return False
    return room.f_bavail * room.f_frsize < FULL_BYTES or (room.f_files > 0 and room.f_favail == 0)
