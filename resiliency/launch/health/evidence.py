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
from collections.abc import Iterable
from dataclasses import dataclass, replace

from resiliency.rank.checkpoint_steps import CheckpointSteps
from resiliency.rank.error_text import CHAIN, shorten

_FRAME = re.compile(r'\s*File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)')
#: A line outside of a traceback counts only with a name that an error has.
_EXCEPTION = re.compile(
    r"(?P<type>(?:[A-Za-z_]\w*\.)*\w*(?:Error|Exception|Interrupt|Exit|Warning|NotFinite|Missing|Corrupt|Mismatch"
    r"|Incomplete|Failed|Shortage|Version))(?::\s?(?P<message>.*))?"
)
#: The line that ends a traceback: its place tells that it names the exception, whatever the name is.
_LAST_LINE = re.compile(r"(?P<type>[A-Za-z_][\w.]*(?:<locals>[\w.]+)*)(?::\s?(?P<message>.*))?")
_TRACEBACK = "Traceback (most recent call last):"
#: How torch and others begin the traceback of another process within the message of their own exception.
_OF_ANOTHER_PROCESS = f"Original {_TRACEBACK}"
#: What Python writes between an exception and the one that it led to.
_LINKS = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
_NATIVE = re.compile(r"terminate called after throwing an instance of '(?P<type>[^']+)'")
_WHAT = re.compile(r"\s*what\(\):\s*(?P<message>.*)")
#: torch's launcher and log readers write this before a line: ``[rank3]:``, ``[default0]:``.
_PREFIX = re.compile(r"^(?:\[[a-z_]+\d+\]:\s?)+")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
#: A line of torch's C++ log: ``[W1128 03:11:52.918273645 ProcessGroupNCCL.cpp:1496] ...``.
_NATIVE_LOG = re.compile(r"\[[WEIF]\d{4} ")
#: What follows has ended nothing: it came up while the interpreter was about to end.
_IGNORED = ("Exception ignored in", "Error in atexit._run_exitfuncs")
#: Frames of libraries say less than the line of the user's own code that called them.
_LIBRARY = re.compile(r"site-packages|dist-packages|lib/python3|<frozen|<string>|/resiliency/")
#: Frames that are kept of a traceback.
FRAMES = 8


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
    """The exception that ended a rank.

    `frames`: innermost last.  `step`: the last finished, if known.  `chain`: the exceptions that led to this
    one (`__cause__`, `__context__`, the one of a loader worker), nearest first, without chains of their own.
    """

    type: str
    message: str = ""
    frames: tuple[Frame, ...] = ()
    step: int | None = None
    chain: tuple[RankError, ...] = ()

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
    """The end of one rank, or the error with which it is about to end.

    `exit_code` is negative for a signal.  `ended_by_us`: by the launcher.  `hang`: why its monitor ended it.
    `log`: the last lines of its standard error, where it can be read.  `step`: the last one that it finished.
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
        """The exception of the rank and those that led to it, a line each; else the end of its log."""
        # A log that ends with an exception may hold errors that the program has handled before.
        if self.error is None:
            return "\n".join(self.log)
        return "\n".join(f"{error.type}: {error.message}" for error in (self.error, *self.error.chain))


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
        reports_steps: a rank has shown that it reports steps, so that no step means that none was finished.
        uptime_s: how long the ranks ran, by the launcher's own monotonic clock; None: unknown.
        lost_hosts: hosts that left without a word.
        checkpoints: from which the attempt began and which it has saved; None: no rank has said.
    """

    attempt: int
    deaths: tuple[RankDeath, ...] = ()
    hosts: tuple[HostFacts, ...] = ()
    step: int | None = None
    reports_steps: bool = True
    uptime_s: float | None = None
    lost_hosts: tuple[str, ...] = ()
    checkpoints: CheckpointSteps | None = None

    def facts(self, host: str) -> HostFacts:
        return next((facts for facts in self.hosts if facts.host == host), HostFacts(host=host))


def read_traceback(lines: Iterable[str], *, step: int | None = None) -> RankError | None:
    """The last exception in a text, Python's or one of C++, with its chain; None where there is none."""
    reader = _TracebackReader()
    for raw in lines:
        reader.read(_PREFIX.sub("", _COLOUR.sub("", raw).rstrip()))
    return reader.found(step)


def with_chain(error: RankError, *chain: RankError) -> RankError:
    """`error` with the exceptions that led to it: `chain`, and those of other processes in the messages."""
    flat: list[RankError] = []
    for one in (error, *chain):
        if one is not error:
            flat += [replace(one, chain=()), *one.chain]
        _, mark, text = one.message.partition(_TRACEBACK)
        if mark and (inner := read_traceback((mark + text).splitlines())) is not None:
            flat += [replace(inner, chain=()), *inner.chain]
    return replace(error, chain=tuple(dict.fromkeys(flat))[:CHAIN])


@dataclass(kw_only=True)
class _Shown:
    """One exception of a text.  `message` grows until a line that cannot be of it."""

    type: str
    message: list[str]
    frames: list[Frame]

    def error(self) -> RankError:
        text = shorten("\n".join(self.message))
        return RankError(type=self.type.replace("::", "."), message=text, frames=tuple(self.frames[-FRAMES:]))


class _TracebackReader:
    """Reads a text line by line."""

    def __init__(self) -> None:
        #: Exceptions that are linked with each other, the oldest first, and the one that counts.
        self._group: list[_Shown] = []
        self._last: _Shown | None = None
        self._frames: list[Frame] = []
        self._linked = self._nested = self._in_traceback = self._ignored = False
        #: Whether a line may belong to the message of the last exception.
        self._in_message = False
        #: Whether the program has said more since: then it has handled the exception.
        self._went_on = False
        self._native = ""

    def read(self, line: str) -> None:
        if line in _LINKS:
            self._linked, self._in_message = True, False
        elif line.endswith(_TRACEBACK):
            self._frames, self._in_traceback, self._in_message = [], True, False
            self._nested = line.startswith(_OF_ANOTHER_PROCESS) and self._last is not None
        elif frame := _FRAME.match(line):
            self._frames.append(
                Frame(file=frame["file"], line=int(frame["line"]), function=frame["function"])
            )
        elif ended := self._read_last_line(line):
            self._add(_Shown(type=ended["type"], message=[ended["message"] or ""], frames=self._frames))
        elif instance := _NATIVE.match(line):
            self._native, self._in_message = instance["type"], False
        elif self._native and (what := _WHAT.match(line)):
            # A Python exception right before it is the cause: the process has aborted while it tore down.
            if self._last is None or self._went_on:
                self._add(_Shown(type=self._native, message=[what["message"]], frames=[]))
            self._native = ""
        else:
            self._read_other(line)

    def _read_last_line(self, line: str) -> re.Match[str] | None:
        if self._in_traceback:
            return _LAST_LINE.fullmatch(line)
        # In a message such a line is one of its own: ``ncclSystemError: System call failed``.
        return None if self._in_message else _EXCEPTION.fullmatch(line)

    def _read_other(self, line: str) -> None:
        if line.startswith(_IGNORED):
            self._ignored, self._in_message = True, False
        elif not line or line == '"""' or _NATIVE_LOG.match(line):
            self._in_message = False
        elif self._in_message:
            self._group[-1].message.append(line)
        elif not self._in_traceback:
            self._went_on = True

    def _add(self, shown: _Shown) -> None:
        in_traceback, self._frames, self._in_traceback = self._in_traceback, [], False
        if self._ignored:
            self._ignored = False
            return
        if not (self._linked or self._nested):
            self._group = []
        self._group.append(shown)
        if not self._nested:
            self._last = shown
        self._nested = False
        # A line without a traceback may be anything that is logged, and so has no more lines.
        self._in_message, self._linked, self._went_on = in_traceback, False, False

    def found(self, step: int | None) -> RankError | None:
        if self._last is None:
            return None
        others = [shown.error() for shown in reversed(self._group) if shown is not self._last]
        return replace(self._last.error(), step=step, chain=tuple(others[:CHAIN]))
