# SPDX-License-Identifier: Apache-2.0
"""Writes goodput events, where the published calculator and ours can read them.

The published log is small on purpose: six event types, one JSON object a line, one line per
checkpoint and not one per rank.  The full event log beside it has everything else; the ledger and
the timeline need that one.  `open_event_stream` opens both and is what the launcher and the
training callbacks use:

    with open_event_stream(RunInfo.from_env()) as stream:
        stream.emit(EventType.CHECKPOINT_SAVED, step=100)

A plain script can use `GoodputTracker`, and a shell
``python3 -m resiliency.goodput_measure.tracker --event-type user_scheduled``.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from datetime import timezone
from pathlib import Path

from resiliency import log
from resiliency.errors import ControlPlaneError, ResiliencyError
from resiliency.events import (
    BackgroundSink,
    EventSink,
    EventStream,
    EventType,
    FileSink,
    JsonValue,
    RunEvent,
    events_path,
)
from resiliency.goodput_measure.cloud import CloudLog, is_installed
from resiliency.runtime import RunInfo

logger = logging.getLogger(__name__)

#: When true, goodput events go to a file even where Google Cloud Logging could be used.
FILE_TRACKING_ENV = "GOODPUT_USE_FILE_TRACKING"

#: The published event types, in the order in which events with equal timestamps are sorted.
GOODPUT_TYPES = (
    EventType.USER_SCHEDULED,
    EventType.JOB_STARTED,
    EventType.CHECKPOINT_LOADED,
    EventType.CHECKPOINT_SAVED,
    EventType.USER_TERMINATED,
    EventType.JOB_TERMINATED,
)
_WITH_NODE_RANK = frozenset({EventType.JOB_STARTED, EventType.JOB_TERMINATED})
_WITH_STEP = frozenset({EventType.CHECKPOINT_LOADED, EventType.CHECKPOINT_SAVED})
_FALSE = frozenset({"", "0", "false", "no", "off"})


def goodput_path(info: RunInfo) -> Path:
    """File of the published events: ``<run_dir>/<job_name>-goodput.log``."""
    return Path(info.run_dir) / f"{info.job_name}-goodput.log"


def published_record(event: RunEvent) -> dict[str, JsonValue] | None:
    """`event` with exactly the published keys; None when it does not belong in that log.

    Every rank loads a checkpoint, but the published log counts checkpoints: only rank 0 (or a
    process that is no rank) speaks for the job.
    """
    if event.type not in GOODPUT_TYPES or (event.type in _WITH_STEP and event.rank):
        return None
    record: dict[str, JsonValue] = {
        "timestamp": event.time.astimezone(timezone.utc).isoformat(timespec="microseconds"),
        "job_name": event.job_name,
        "event_type": event.type.value,
    }
    if event.type in _WITH_NODE_RANK:
        record["node_rank"] = event.node_rank
    elif event.type in _WITH_STEP:
        record["step"] = event.step or 0
    return record


def _published_line(event: RunEvent) -> str | None:
    record = published_record(event)
    return None if record is None else json.dumps(record, ensure_ascii=False)


class GoodputSink(FileSink):
    """Appends the published six event types to a file; everything else passes it by."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path, encode=_published_line)


class CloudGoodputSink:
    """Sends the published events to Google Cloud Logging, and to a file once that has failed.

    The first refused call ends the attempt for the life of the process: a job that trains for
    weeks must not pay a network timeout for every checkpoint.
    """

    def __init__(self, log: CloudLog, fallback: str | os.PathLike[str]) -> None:
        self._log: CloudLog | None = log
        self._fallback_path = fallback
        self._fallback: GoodputSink | None = None

    def emit(self, event: RunEvent) -> None:
        record = published_record(event)
        if record is None:
            return
        if self._log is not None:
            try:
                self._log.write(record)
                return
            except ControlPlaneError as error:
                logger.warning("goodput events go to %s from now on: %s", self._fallback_path, error)
                self._log.close()
                self._log = None
        if self._fallback is None:
            self._fallback = GoodputSink(self._fallback_path)
        self._fallback.emit(event)

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None
        if self._fallback is not None:
            self._fallback.close()


def goodput_sink(info: RunInfo, env: Mapping[str, str] | None = None) -> EventSink:
    """The sink for the published events that this machine and `env` call for.

    A file when GOODPUT_USE_FILE_TRACKING is set; else Google Cloud Logging when its client is
    installed and finds credentials; else a file, with one warning where there is a client.  Never raises
    for lack of a cloud.
    """
    env = os.environ if env is None else env
    path = goodput_path(info)
    level = logging.DEBUG
    if env.get(FILE_TRACKING_ENV, "").strip().lower() not in _FALSE:
        return GoodputSink(path)
    if is_installed():
        try:
            return BackgroundSink(CloudGoodputSink(CloudLog(info.job_name), path))
        except ControlPlaneError as error:
            reason = str(error)
            # A job that restarts a hundred times should not say it a hundred times.
            level = logging.DEBUG if info.attempt else logging.WARNING
    else:
        reason = "the Google Cloud Logging client is not installed (pip install 'resiliency[cloud]')."
    logger.log(
        level, "goodput events go to %s: %s  Set %s=1 to choose that.", path, reason, FILE_TRACKING_ENV
    )
    return GoodputSink(path)


def open_event_stream(info: RunInfo, env: Mapping[str, str] | None = None) -> EventStream:
    """Open this host's full event log and, where this process speaks for the job, the goodput log.

    In a worker both are written by a thread, so that a stalled disk never stalls a step; the
    launcher writes directly, so that what it has said survives its own death.
    """
    full: EventSink = FileSink(events_path(info))
    if info.rank is None:
        return EventStream(info, [full, goodput_sink(info, env)])
    sinks: list[EventSink] = [BackgroundSink(full)]
    if info.is_first_rank:
        goodput = goodput_sink(info, env)
        sinks.append(BackgroundSink(goodput) if isinstance(goodput, FileSink) else goodput)
    return EventStream(info, sinks)


class GoodputTracker:
    """The published six events as methods, for scripts that use neither our launcher nor NeMo.

    Say ``checkpoint_loaded(0)`` on a fresh start: the published formula counts progress from the
    smallest step that was ever loaded, and without it a job that started fresh and later resumed
    at step 500 would seem to have started at 500.
    """

    def __init__(self, stream: EventStream | None = None) -> None:
        self._stream = stream or open_event_stream(RunInfo.from_env())

    def user_scheduled(self) -> None:
        self._stream.emit(EventType.USER_SCHEDULED)

    def job_started(self) -> None:
        self._stream.emit(EventType.JOB_STARTED)

    def checkpoint_loaded(self, step: int) -> None:
        self._stream.emit(EventType.CHECKPOINT_LOADED, step=step)

    def checkpoint_saved(self, step: int) -> None:
        self._stream.emit(EventType.CHECKPOINT_SAVED, step=step)

    def user_terminated(self) -> None:
        self._stream.emit(EventType.USER_TERMINATED)

    def job_terminated(self) -> None:
        self._stream.emit(EventType.JOB_TERMINATED)

    def close(self) -> None:
        self._stream.close()

    def __enter__(self) -> GoodputTracker:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Record what no process of the job can know: when the user scheduled it or ended it."""
    parser = argparse.ArgumentParser(
        prog="python3 -m resiliency.goodput_measure.tracker",
        description="Record one goodput event of the job named by JOB_IDENTIFIER.",
    )
    parser.add_argument(
        "--event-type",
        required=True,
        choices=[EventType.USER_SCHEDULED.value, EventType.USER_TERMINATED.value],
    )
    arguments = parser.parse_args(argv)
    try:
        info = RunInfo.from_env()
        log.configure(info)
        with open_event_stream(info) as stream:
            stream.emit(EventType(arguments.event_type))
    except (ResiliencyError, OSError) as error:
        print(f"tracker: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
