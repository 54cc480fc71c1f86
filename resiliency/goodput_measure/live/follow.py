# SPDX-License-Identifier: Apache-2.0
"""Follows logs while they are written, and measures their jobs again and again, at the price of what is new.

A line counts once its newline is there.  A file that is not there yet is waited for; one that was replaced
is read to its end before the one that has its name now, and one that became shorter is read from its begin.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from itertools import chain
from typing import BinaryIO

from resiliency.errors import ConfigError
from resiliency.events import RunEvent
from resiliency.goodput_measure.jobs import JobEvents, Options
from resiliency.goodput_measure.live.figures import LiveFigures, figures_so_far
from resiliency.goodput_measure.lives import to_us
from resiliency.goodput_measure.reader import EventReader, ReadStats, portions_of
from resiliency.runtime import Clock


class LogTail:
    """New events of one file at each call of `poll`."""

    def __init__(self, path: str | os.PathLike[str], stats: ReadStats) -> None:
        self._path = os.fspath(path)
        self._stats = stats
        self._file: BinaryIO | None = None
        self._reader = EventReader(self._path, stats)

    def poll(self) -> Iterator[RunEvent]:
        """Yield what was written since the last call.

        Raises:
            ConfigError: the file is there and cannot be read.
        """
        try:
            yield from self._read()  # also of a file that has lost its name since: its last events
            if self._is_replaced():
                yield from self.finish()
                self._file = open(self._path, "rb")  # noqa: SIM115 (closed by `close`)
                yield from self._read()
        except FileNotFoundError:
            pass  # not there yet, or no longer
        except OSError as error:
            raise ConfigError(
                f"cannot read the event log {self._path!r}: {error.strerror}.", path=self._path
            ) from error

    def finish(self) -> Iterator[RunEvent]:
        """Yield the last event, where its newline is missing; nothing more is read of this file."""
        yield from self._reader.close()
        self._reader = EventReader(self._path, self._stats)
        self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _read(self) -> Iterator[RunEvent]:
        if self._file is not None:
            yield from self._reader.feed(portions_of(self._file))

    def _is_replaced(self) -> bool:
        """Whether the file that has the name now is another one than the one that is open, or shorter."""
        there = os.stat(self._path)
        if self._file is None:
            return True
        opened = os.fstat(self._file.fileno())
        same = (there.st_dev, there.st_ino) == (opened.st_dev, opened.st_ino)
        return not same or there.st_size < self._file.tell()


def follow(
    paths: Sequence[str | os.PathLike[str]],
    jobs: Mapping[str, JobEvents],
    options: Options,
    *,
    stats: ReadStats,
    every_s: float,
    clock: Clock,
    wait: Callable[[float], bool],
) -> Iterator[list[LiveFigures]]:
    """Yield figures of the jobs that have begun, whenever there is something new to tell.

    While a job runs, its wall time goes on though nothing is written, so that a hang shows.  Ends when all
    jobs have ended and nothing came for a period, or when `wait` says so; then all that the files hold was
    added to `jobs`.

    Args:
        jobs: by name; events are added to them.
        every_s: between two looks.  A look that takes long is followed by a pause as long.
        wait: waits that many seconds, or less; True ends the iteration.
    """
    with ExitStack() as stack:
        tails = [stack.enter_context(closing(LogTail(path, stats))) for path in paths]
        while True:
            began = time.monotonic()
            is_new = _add_events(chain.from_iterable(tail.poll() for tail in tails), jobs, stats)
            now = to_us(clock.now())
            begun = [job for job in jobs.values() if job.goodput_events]
            running = running_jobs(jobs, now)
            if begun and (is_new or running):
                yield [figures_so_far(job, options, until=now if job in running else None) for job in begun]
            elif begun and not running:
                break
            if wait(max(every_s, time.monotonic() - began)):
                break
        _add_events(chain.from_iterable(tail.finish() for tail in tails), jobs, stats)


def running_jobs(jobs: Mapping[str, JobEvents], now: int) -> list[JobEvents]:
    """Those that have not ended, with `now` in microseconds since the epoch."""
    return [job for job in jobs.values() if not job.builder.has_ended(now)]


def _add_events(events: Iterable[RunEvent], jobs: Mapping[str, JobEvents], stats: ReadStats) -> bool:
    """Returns whether there are any of the jobs."""
    is_new = False
    for event in events:
        if (job := jobs.get(event.job_name)) is not None:
            job.add_full(event)
            stats.events += 1
            is_new = True
    return is_new
