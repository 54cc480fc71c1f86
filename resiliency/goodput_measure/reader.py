# SPDX-License-Identifier: Apache-2.0
"""Reads events back, one after the other, in memory that does not grow with the file.

A log of a real job is damaged: a killed process leaves its last line torn, and the next process
appends to it.  Such lines are counted and described, never fatal, and an event that was glued to
a torn one is recovered.  So are events of a time at which no job can have run.

Google Cloud Logging keeps neither whole numbers nor the order of keys; `RunEvent.from_json` accepts both.
Its exports, in which each event has an envelope, are read as well.  Entries of other programs are in there
and no damage.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Container, Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from datetime import datetime
from itertools import chain
from typing import BinaryIO

from resiliency.errors import ConfigError
from resiliency.events import EventType, RunEvent
from resiliency.goodput_measure.cloud import CloudLog, event_in_entry, is_log_entry
from resiliency.goodput_measure.splitter import MAX_TEXT_BYTES, JsonSplitter, JsonText

#: Files below this size are read too fast for a progress bar to be of use.
PROGRESS_FROM_BYTES = 4 << 20

#: Of a file at once.
_READ_BYTES = 1 << 16

_KEPT_EXAMPLES = 3
_KEPT_JOBS = 1000
_EVENT_START = re.compile(rb'\{"(?:timestamp|job_name|event_type|host|node_rank|rank|attempt|step|fields)"')
# A value inside an event may look like the start of one, so the last start alone is not enough.  A bound
# keeps a damaged line that is full of starts from taking quadratic time.
_TRIED_STARTS = 8
# from_json promises ValueError; the others come from absurd numbers and nesting in damaged lines.
_DAMAGE = (ValueError, TypeError, OverflowError, RecursionError)
#: A clock that was never set says 1, 1970 or 9999, and a job would seem to have run for as long.
_YEARS = range(2000, 2200)


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
        reader = EventReader(os.fspath(path), stats)
        for event in chain(reader.feed(_with_progress(file, progress)), reader.close()):
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
                event = _parsed(json.dumps(dict(payload)))
            except _DAMAGE as error:
                stats.count_damage(f"cloud entry {number}", error)
                continue
            stats.count_job(event.job_name)
            if event.job_name == job_name and (types is None or event.type in types):
                stats.events += 1
                yield event


class EventReader:
    """The events in the bytes of one file; `where` names it in messages."""

    def __init__(self, where: str, stats: ReadStats) -> None:
        self._where = where
        self._stats = stats
        self._splitter = JsonSplitter()

    def feed(self, portions: Iterable[bytes]) -> Iterator[RunEvent]:
        """Yield the events that end in `portions`."""
        for portion in portions:
            yield from self._events(self._splitter.feed(portion))

    def close(self) -> Iterator[RunEvent]:
        """Yield the event that the file ends with, where that has no newline; the file is read."""
        return self._events(self._splitter.close())

    def _events(self, texts: Iterable[JsonText]) -> Iterator[RunEvent]:
        stats = self._stats
        for text in texts:
            stats.lines += 1
            try:
                if text.too_long:
                    raise ValueError(f"more than {MAX_TEXT_BYTES} bytes")
                event = _event_of(text.text.decode())
            except _DAMAGE as error:
                stats.count_damage(f"{self._where}:{text.line}", error)
                event = _try_recover(text.text)
                stats.torn_at_end = event is None and text.at_end
            if event is not None:
                stats.count_job(event.job_name)
                yield event


def _event_of(text: str) -> RunEvent | None:
    """The event of a JSON text; None where the text is a log entry of another subject."""
    try:
        return _parsed(text)
    except ValueError:
        entry = json.loads(text)
        if not is_log_entry(entry):
            raise
    found = event_in_entry(entry)
    return None if found is None else _parsed(found if isinstance(found, str) else json.dumps(found))


def _parsed(text: str) -> RunEvent:
    event = RunEvent.from_json(text)
    if event.time.year not in _YEARS:
        raise ValueError(
            f"timestamp {event.time.isoformat()} is outside of {_YEARS.start} to {_YEARS.stop - 1}: "
            "was the clock of the host set?"
        )
    return event


def _try_recover(text: bytes) -> RunEvent | None:
    # A line appended right after a torn one: what follows one of the last starts is a whole event.
    starts = [found.start() for found in _EVENT_START.finditer(text, 1)]
    for start in reversed(starts[-_TRIED_STARTS:]):
        with suppress(*_DAMAGE):
            return _parsed(text[start:].decode())
    return None


def portions_of(file: BinaryIO) -> Iterator[bytes]:
    """What is left of `file`, in parts."""
    return iter(lambda: file.read(_READ_BYTES), b"")


def _with_progress(file: BinaryIO, progress: bool | None) -> Iterator[bytes]:
    size = os.fstat(file.fileno()).st_size
    if progress is None:
        progress = size >= PROGRESS_FROM_BYTES and sys.stderr.isatty()
    if not progress:
        yield from portions_of(file)
        return
    from tqdm import tqdm  # only here: a program that never shows a bar need not load it

    with tqdm(total=size, unit="B", unit_scale=True, desc="reading events", file=sys.stderr) as bar:
        for portion in portions_of(file):
            bar.update(len(portion))
            yield portion
