# SPDX-License-Identifier: Apache-2.0
"""The evidence of one attempt, as one host can see it: counted and read from where the attempt began.

Nothing here waits for a device or a file system: a launcher that hangs over a diagnosis helps no job.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from resiliency.cgroups import oom_kills
from resiliency.launch.health.causes import Cause
from resiliency.launch.health.error_kinds import may_be_full
from resiliency.launch.health.evidence import (
    FRAMES,
    Evidence,
    Frame,
    HostFacts,
    RankDeath,
    RankError,
    read_traceback,
    with_chain,
)
from resiliency.launch.health.rules import judge
from resiliency.launch.incident import read_tail

KERNEL_LOG = Path("/dev/kmsg")
#: Records of the kernel that are read at most for one failure, and lines that are kept.
KERNEL_RECORDS, KERNEL_LINES, RECORD_BYTES = 5000, 200, 8192
LOG_LINES = 20
#: torch's text where a worker wrote no error file.
NO_ERROR_FILE = "<NONE>"
#: After these signals the end of the standard error is kept; after SIGABRT an exception in it is the reason,
#: as processes often abort while they tear down.  Another signal came from outside, whatever was printed.
_WITH_LOG = frozenset(
    {signal.SIGABRT, signal.SIGTERM, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}
)
#: Ends of which another rank may be the reason, and ends without a word.
_UNEXPLAINED = frozenset({Cause.PEER_LOST, Cause.EXIT_CODE})
#: Name of a type before a message: ``torch.OutOfMemoryError: CUDA out of memory``.
_TYPED = re.compile(r"(?P<type>[A-Za-z_][\w.]*(?:<locals>[\w.]+)*): ?(?P<message>.*)", re.DOTALL)
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
    ) -> RankDeath:
        """In the order in which deaths are noticed.

        Args:
            error: content of torch's error file; empty where there is none.
            hang: what a rank monitor noted before it ended the rank.
            step: the last one that the rank has finished, by the step page.
        """
        has_log = exit_code > 0 or -exit_code in _WITH_LOG
        log = read_tail(stderr_file) if stderr_file and has_log else ()
        printed = read_traceback(log) if exit_code > 0 or exit_code == -signal.SIGABRT else None
        death = RankDeath(
            rank=rank,
            host=self._host,
            exit_code=exit_code,
            error=read_error_file(error) or printed,
            hang=hang or "",
            log=log[-LOG_LINES:],
            step=step,
        )
        self._deaths.append(death)
        return death

    def is_explained(self) -> bool:
        """True if a rank of this host has failed by itself and said or shown why.

        An abort in native code may be the answer to what another rank sent, so it explains nothing.
        """
        evidence = Evidence(attempt=0, deaths=tuple(self._deaths))
        return any(
            judge(death, evidence).rule.cause not in _UNEXPLAINED
            and not (death.signal == signal.SIGABRT and not (death.error is not None and death.error.frames))
            for death in self._deaths
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
        return any(
            death.signal == signal.SIGBUS or (death.error is not None and may_be_full(death.error))
            for death in self._deaths
        )

    def close(self) -> None:
        self._kernel.close()


def read_error_file(content: Mapping[str, object]) -> RankError | None:
    """The exception in torch's error file, a crash note's or one of `record`; None where it holds none."""
    step = content.get("step")
    known_step = step if isinstance(step, int) else None
    if (error := _read_entry(content.get("error"), known_step)) is not None:
        chain = content.get("chain")
        entries = chain if isinstance(chain, Sequence) else ()
        return with_chain(error, *filter(None, map(_read_entry, entries)))
    message = content.get("message", "")
    details = message if isinstance(message, Mapping) else {}
    text = str(details.get("message", "") if details else message).strip()
    if not text or text == NO_ERROR_FILE:
        return None
    typed = _TYPED.fullmatch(text)
    kind, rest = (typed["type"], typed["message"]) if typed else ("Error", text)
    extra = details.get("extraInfo")
    shown = read_traceback(_lines(extra.get("py_callstack")) if isinstance(extra, Mapping) else ())
    error = RankError(
        type=kind, message=rest.strip(), frames=shown.frames if shown is not None else (), step=known_step
    )
    return with_chain(error, *(shown.chain if shown is not None else ()))


def _read_entry(entry: object, step: int | None = None) -> RankError | None:
    """An exception as a crash note has it."""
    if not isinstance(entry, Mapping) or not entry.get("type"):
        return None
    return RankError(
        type=str(entry["type"]),
        message=str(entry.get("message", "")),
        frames=tuple(_read_frames(entry.get("frames")))[-FRAMES:],
        step=step,
    )


def _read_frames(entries: object) -> Iterator[Frame]:
    for entry in entries if isinstance(entries, Sequence) else ():
        with suppress(ValueError, TypeError):
            file, line, function = entry
            yield Frame(file=str(file), line=int(line), function=str(function))


def _lines(text: object) -> list[str]:
    return str(text or "").splitlines()


def _is_full(directory: str) -> bool:
    try:
        room = os.statvfs(directory)
    except OSError:
        return False
    return room.f_bavail * room.f_frsize < FULL_BYTES or (room.f_files > 0 and room.f_favail == 0)
