# SPDX-License-Identifier: Apache-2.0
"""Reads events back, one line at a time, in memory that does not grow with the file.

A log of a real job is damaged: a killed process leaves its last line torn, and the next process
appends to it.  Such lines are counted and described, never fatal, and an event that was glued to
a torn one is recovered.

Google Cloud Logging keeps neither whole numbers nor the order of keys.  `RunEvent.from_json` accepts
both, so a log exported from there, one event a line, is read like a log of our own.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Container, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import BinaryIO

from resiliency.errors import ConfigError
from resiliency.events import EventType, RunEvent
from resiliency.goodput_measure.cloud import CloudLog

#: A longer line is no event of ours; the bound keeps a file without newlines out of memory.
MAX_LINE_BYTES = 1 << 20
#: Files below this size are read too fast for a progress bar to be of use.
PROGRESS_FROM_BYTES = 4 << 20

_KEPT_EXAMPLES = 3
_KEPT_JOBS = 1000
_EVENT_START = re.compile(rb'\{"(?:timestamp|job_name|event_type|host|node_rank|rank|attempt|step|fields)"')
# A value inside an event may look like the start of one, so the last start alone is not enough.  A bound
# keeps a damaged line that is full of starts from taking quadratic time.
_TRIED_STARTS = 8
# from_json promises ValueError; the others come from absurd numbers and nesting in damaged lines.
_DAMAGE = (ValueError, TypeError, OverflowError, RecursionError)


@dataclass
class ReadStats:
    """What a reader saw besides the events that it handed out; grows while reading."""

    lines: int = 0
    events: int = 0
    unparsable: int = 0
    torn_at_end: bool = False
    examples: list[str] = field(default_factory=list)
    jobs: Counter[str] = field(default_factory=Counter)

    @property
    def is_mostly_damaged(self) -> bool:
        """Whether what was read says little of what was written."""
        return 2 * self.unparsable > self.lines

    def count_damage(self, where: str, reason: object) -> None:
        self.unparsable += 1
        if len(self.examples) < _KEPT_EXAMPLES:
            self.examples.append(f"{where}: {reason}")

    def count_job(self, job_name: str) -> None:
        if job_name in self.jobs or len(self.jobs) < _KEPT_JOBS:
            self.jobs[job_name] += 1


def read_events(
    path: str | os.PathLike[str],
    *,
    job_name: str | None = None,
    types: Container[EventType] | None = None,
    stats: ReadStats | None = None,
    progress: bool | None = None,
) -> Iterator[RunEvent]:
    """Yield the events of `path` in file order.

    Args:
        job_name: only this job's events; None means all.
        types: only these types; None means all.
        stats: filled while reading; complete when the iterator is exhausted.
        progress: show a bar on stderr; None means for a large file on a terminal.
    Raises:
        ConfigError: the file cannot be opened.
    """
    stats = ReadStats() if stats is None else stats
    try:
        file = open(path, "rb")  # noqa: SIM115 - closed below; the handler must cover opening only
    except OSError as error:
        raise ConfigError(
            f"cannot read the event log {os.fspath(path)!r}: {error.strerror}.", path=os.fspath(path)
        ) from error
    with file:
        for number, line in enumerate(_with_progress(file, progress), 1):
            text = line.strip()
            if not text:
                continue
            stats.lines += 1
            event = parse_line(text, f"{os.fspath(path)}:{number}", stats)
            if event is None:
                stats.torn_at_end = not line.endswith(b"\n")
                continue
            stats.count_job(event.job_name)
            if job_name in (None, event.job_name) and (types is None or event.type in types):
                stats.events += 1
                yield event


def read_cloud(
    job_name: str,
    *,
    since: datetime,
    types: Container[EventType] | None = None,
    stats: ReadStats | None = None,
) -> Iterator[RunEvent]:
    """Yield the events of `job_name` that Google Cloud Logging has kept since `since`.

    Raises:
        ControlPlaneError: the client is not installed, or the log cannot be read.
    """
    stats = ReadStats() if stats is None else stats
    with closing(CloudLog(job_name)) as log:
        for number, payload in enumerate(log.read(since=since), 1):
            stats.lines += 1
            try:
                event = RunEvent.from_json(json.dumps(dict(payload)))
            except _DAMAGE as error:
                stats.count_damage(f"cloud entry {number}", error)
                continue
            stats.count_job(event.job_name)
            if event.job_name == job_name and (types is None or event.type in types):
                stats.events += 1
                yield event


def parse_line(text: bytes, where: str, stats: ReadStats) -> RunEvent | None:
    """The event of a line; None, and counted as damage, where it has none.  `where`: for the message."""
    try:
        return RunEvent.from_json(text.decode())
    except _DAMAGE as error:
        stats.count_damage(where, error)
        return _try_recover(text)


def _try_recover(text: bytes) -> RunEvent | None:
    # A line appended right after a torn one: what follows one of the last starts is a whole event.
    starts = [found.start() for found in _EVENT_START.finditer(text, 1)]
    for start in reversed(starts[-_TRIED_STARTS:]):
        with suppress(*_DAMAGE):
            return RunEvent.from_json(text[start:].decode())
    return None


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Lines of at most MAX_LINE_BYTES; the rest of a longer one is skipped."""
    while line := file.readline(MAX_LINE_BYTES):
        rest = line
        while len(rest) == MAX_LINE_BYTES and not rest.endswith(b"\n"):
            rest = file.readline(MAX_LINE_BYTES)
        yield line


def _with_progress(file: BinaryIO, progress: bool | None) -> Iterator[bytes]:
    size = os.fstat(file.fileno()).st_size
    if progress is None:
        progress = size >= PROGRESS_FROM_BYTES and sys.stderr.isatty()
    if not progress:
        yield from _lines(file)
        return
    from tqdm import tqdm  # only here: a program that never shows a bar need not load it

    with tqdm(total=size, unit="B", unit_scale=True, desc="reading events", file=sys.stderr) as bar:
        for line in _lines(file):
            bar.update(len(line))
            yield line
