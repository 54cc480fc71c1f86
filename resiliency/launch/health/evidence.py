# SPDX-License-Identifier: Apache-2.0
"""What is known of one attempt that failed: values, read by the rules of `diagnosis`.

An attempt is one start of the job.  Nothing here is older than the attempt: errors of an earlier one would
condemn a host again and again.  What could not be read is absent, which differs from "nothing was found": a
host whose kernel log is closed to the launcher has no lines, and no rule concludes anything from that.

Nothing here is a time of day either.  Deaths are in the order in which the launcher noticed them, so the
clocks of hosts need not agree.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from resiliency.rank.checkpoint_steps import CheckpointSteps

_FRAME = re.compile(r'\s*File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)')
_EXCEPTION = re.compile(
    r"(?P<type>(?:[A-Za-z_]\w*\.)*\w*(?:Error|Exception|Interrupt|Exit|Warning|NotFinite|Missing|Corrupt|Mismatch"
    r"|Incomplete|Failed|Shortage|Version))(?::\s?(?P<message>.*))?"
)
_NATIVE = re.compile(r"terminate called after throwing an instance of '(?P<type>[^']+)'")
_WHAT = re.compile(r"\s*what\(\):\s*(?P<message>.*)")
#: torch's launcher and log readers write this before a line: ``[rank3]:``, ``[default0]:``.
_PREFIX = re.compile(r"^(?:\[[a-z_]+\d+\]:\s?)+")
#: Frames of libraries say less than the line of the user's own code that called them.
_LIBRARY = re.compile(r"site-packages|dist-packages|lib/python3|<frozen|<string>|/resiliency/")
#: Frames that are kept of a traceback, and characters of a message.
FRAMES, MESSAGE_CHARS = 8, 2000


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@dataclass(frozen=True, kw_only=True)
class Frame:
    """One line of a traceback."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


@dataclass(frozen=True, kw_only=True)
class RankError:
    """The exception that ended a rank.  `frames`: innermost last.  `step`: the last finished, if known."""

    type: str
    message: str = ""
    frames: tuple[Frame, ...] = ()
    step: int | None = None

    def __str__(self) -> str:
        first, _, _ = self.message.partition("\n")
        return f"{self.type}: {first}" if first else self.type

    @property
    def name(self) -> str:
        """The type without its module."""
        return self.type.rpartition(".")[2]

    @property
    def user_frame(self) -> Frame | None:
        """The innermost frame outside of libraries."""
        return next((frame for frame in reversed(self.frames) if not _LIBRARY.search(frame.file)), None)


@dataclass(frozen=True, kw_only=True)
class RankDeath:
    """The end of one rank.

    `exit_code` is negative for a signal.  `ended_by_us`: by the launcher.  `hang`: why its monitor ended it.
    `log`: the last lines of its standard error, where that is kept.  `step`: the last one that it finished.
    """

    rank: int
    host: str
    exit_code: int
    error: RankError | None = None
    hang: str = ""
    ended_by_us: bool = False
    log: tuple[str, ...] = ()
    step: int | None = None

    @property
    def signal(self) -> int:
        """Number of the signal that ended the rank, else 0; a shell reports signal 9 as exit code 137."""
        if self.exit_code < 0:
            return -self.exit_code
        return self.exit_code - 128 if 128 < self.exit_code <= 128 + 64 and self.error is None else 0

    @property
    def text(self) -> str:
        """What the rank has said of its end: its exception; where none is known, the end of its log."""
        # A log that ends with an exception may hold errors that the program has handled before.
        return f"{self.error.type}: {self.error.message}" if self.error is not None else "\n".join(self.log)


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """What one host knows beside its ranks, about this attempt alone.

    Args:
        oom_kills: kills that the memory groups have counted since the attempt began; None: unknown.
        kernel: lines of the kernel since the attempt began; None: they cannot be read.
        full: directories of the job whose file system is full.
    """

    host: str
    oom_kills: int | None = None
    kernel: tuple[str, ...] | None = None
    full: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """All that is known of one attempt.

    Args:
        deaths: in the order in which they were noticed.
        step: newest step that a rank has finished; None: none, or ranks do not report steps.
        uptime_s: how long the ranks ran, by the launcher's own monotonic clock; None: unknown.
        lost_hosts: hosts that left without a word.
        checkpoints: from which the attempt began and which it has saved; None: no rank has said.
    """

    attempt: int
    deaths: tuple[RankDeath, ...] = ()
    hosts: tuple[HostFacts, ...] = ()
    step: int | None = None
    uptime_s: float | None = None
    lost_hosts: tuple[str, ...] = ()
    checkpoints: CheckpointSteps | None = None

    def facts(self, host: str) -> HostFacts:
        return next((facts for facts in self.hosts if facts.host == host), HostFacts(host=host))


def read_traceback(lines: Iterable[str], *, step: int | None = None) -> RankError | None:
    """The last exception that a text shows, Python's or one of C++; None where there is none."""
    frames: list[Frame] = []
    found: RankError | None = None
    native = ""
    for line in (_PREFIX.sub("", raw.rstrip()) for raw in lines):
        if line.startswith("Traceback (most recent call last)"):
            frames = []
        elif frame := _FRAME.match(line):
            frames.append(Frame(file=frame["file"], line=int(frame["line"]), function=frame["function"]))
        elif exception := _EXCEPTION.fullmatch(line):
            found = _error(exception["type"], exception["message"] or "", frames, step)
            frames = []
        elif instance := _NATIVE.match(line):
            native = instance["type"]
        elif native and (what := _WHAT.match(line)):
            # A Python exception before it is the cause: the process has aborted while it tore down.
            found = found or _error(native, what["message"], [], step)
            native = ""
    return found


def _error(type: str, message: str, frames: Sequence[Frame], step: int | None) -> RankError:
    return RankError(
        type=type.replace("::", "."),
        message=message[:MESSAGE_CHARS],
        frames=tuple(frames[-FRAMES:]),
        step=step,
    )
