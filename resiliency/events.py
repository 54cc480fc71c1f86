# SPDX-License-Identifier: Apache-2.0
"""Run events: one stream of facts about a job, with several sinks.

Events are for machines, logs are for people: goodput, the ledger and the incident timeline read
events and never parse logs.  An event is a frozen value; a sink is anything with `emit` and
`close`.  Emitting never raises into training: a sink that fails is reported once and dropped.

Each process appends whole lines to one file that all processes of the host share.  A line is
written with a single `write` on a descriptor opened with O_APPEND, so lines of different
processes do not interleave on a local file system, and a kill leaves at most the last line torn.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from enum import Enum
from pathlib import Path
from typing import Protocol, TypeAlias, runtime_checkable

from resiliency.runtime import Clock, RunInfo, SystemClock

logger = logging.getLogger(__name__)

JsonValue: TypeAlias = "str | int | float | bool | list[JsonValue] | dict[str, JsonValue] | None"


class EventType(str, Enum):
    """Every event that the project writes.  The value is the word on the wire."""

    __hash__ = str.__hash__  # that of Enum is written in Python, and a log may hold millions

    # --- goodput (the published six, in the order in which equal timestamps are sorted) ---------
    USER_SCHEDULED = "user_scheduled"
    JOB_STARTED = "job_started"
    CHECKPOINT_LOADED = "checkpoint_loaded"
    CHECKPOINT_SAVED = "checkpoint_saved"
    USER_TERMINATED = "user_terminated"
    JOB_TERMINATED = "job_terminated"
    # --- launcher: one incident is the spans between these ---------------------------------------
    FAULT_DETECTED = "fault_detected"  # fields: cause, exit_code or signal, log_file; rank when known
    HANG_DETECTED = (
        "hang_detected"  # fields: cause (a sentence), kind, ranks, hosts, phase, frame, waiting, silent
    )
    # fields: cause (a sentence), ranks, hosts, delay, own_s, usual_s
    STRAGGLER_SUSPECTED = "straggler_suspected"
    # fields: cause, advice, decided_by, confidence, ranks, hosts, sentence
    DIAGNOSED = "diagnosed"
    WORKERS_STOPPED = "workers_stopped"
    RENDEZVOUS_DONE = "rendezvous_done"
    WORKERS_STARTED = "workers_started"
    HOST_CHECKED = "host_checked"  # fields: health, why, probes, links; see docs/health.md
    # --- supervisor: what it did about an incident of the job --------------------------------------
    ACTION_DECIDED = "action_decided"  # fields: incident, action, cause; host, spare, replicas
    ACTION_ENDED = "action_ended"  # fields: incident, action, outcome, duration_s
    # --- one rank, in the order of its life ------------------------------------------------------
    PROCESS_STARTED = "process_started"  # kernel's start time of the process
    IMPORTED = "imported"  # the training stack is imported
    INITIALIZED = "initialized"  # process groups and model exist; training loop about to start
    RESTORE_STARTED = "restore_started"
    STEP_STARTED = "step_started"  # only for the first step of an attempt
    STEP_FINISHED = "step_finished"  # step: number of steps finished; fields: duration_s
    SAVE_STARTED = "save_started"  # training is held from here ...
    SAVE_RELEASED = "save_released"  # ... to here
    SAVE_FAILED = "save_failed"
    FAULT_INJECTED = "fault_injected"
    STOP_REQUESTED = "stop_requested"  # from outside; fields: cause, deadline_s
    RANK_FINISHED = "rank_finished"


@dataclass(frozen=True, kw_only=True)
class RunEvent:
    """One fact.  `rank` is None for the launcher; `step` counts finished optimizer steps."""

    type: EventType
    time: datetime
    job_name: str
    host: str = ""
    node_rank: int = 0
    rank: int | None = None
    attempt: int | None = None
    step: int | None = None
    fields: Mapping[str, JsonValue] = field(default_factory=dict)

    def to_json(self) -> str:
        """One line without its newline.  None fields are left out."""
        record: dict[str, JsonValue] = {
            "timestamp": self.time.astimezone(timezone.utc).isoformat(timespec="microseconds"),
            "job_name": self.job_name,
            "event_type": self.type.value,
            "host": self.host,
            "node_rank": self.node_rank,
        }
        for name in ("rank", "attempt", "step"):
            value = getattr(self, name)
            if value is not None:
                record[name] = value
        if self.fields:
            record["fields"] = dict(self.fields)
        # An event must not fail because of a value in it: what JSON lacks becomes null or its text.
        try:
            return _dumps(record, allow_nan=False)
        except ValueError:
            record["fields"] = json.loads(_dumps(self.fields), parse_constant=lambda _: None)
            return _dumps(record)

    @classmethod
    def from_json(cls, line: str) -> RunEvent:
        """Parse a line.  Keys come in any order, and a count may be a float without a fraction.

        Raises:
            ValueError: not JSON, a field is missing or of the wrong type, or the event is unknown.
        """
        record = json.loads(line)
        if not isinstance(record, dict):
            raise ValueError(f"an event is a JSON object, found {type(record).__name__}")
        try:
            stamp = record["timestamp"]
            if not isinstance(stamp, str):
                raise ValueError(f"timestamp must be text such as 2026-01-31T12:00:00Z, found {stamp!r}")
            time = datetime.fromisoformat(stamp.replace("Z", "+00:00") if "Z" in stamp else stamp)
            if time.tzinfo is None:
                time = time.replace(tzinfo=timezone.utc)
            fields = record.get("fields", {})
            if not isinstance(fields, dict):
                raise ValueError("fields must be an object")
            return cls(
                type=EventType(record["event_type"]),
                time=time,
                job_name=str(record["job_name"]),
                host=str(record.get("host", "")),
                node_rank=_optional_count(record, "node_rank") or 0,
                rank=_optional_count(record, "rank"),
                attempt=_optional_count(record, "attempt"),
                step=_optional_count(record, "step"),
                fields=fields,
            )
        except KeyError as error:
            raise ValueError(f"event without {error.args[0]!r}") from None


def _dumps(record: Mapping[str, JsonValue], *, allow_nan: bool = True) -> str:
    return json.dumps(
        dict(record), separators=(",", ":"), ensure_ascii=False, allow_nan=allow_nan, default=str
    )


#: A double is exact up to here.  A larger count is damage.
_LARGEST_COUNT = 2**53


def _optional_count(record: Mapping[str, JsonValue], name: str) -> int | None:
    """The count under `name`; 60.0 is 60, because Google Cloud Logging keeps every number as a double."""
    value = record.get(name)
    # As in almost all lines, of which a log may have millions.
    if value is None or (type(value) is int and 0 <= value <= _LARGEST_COUNT):
        return value
    if (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and 0 <= value <= _LARGEST_COUNT  # false for NaN, too
        and value == int(value)
    ):
        return int(value)
    raise ValueError(f"{name} must be a whole number from 0 to 2**53, found {value!r}")


#: What a sink may fail with: storage, or an event that its encoder cannot carry.
_SINK_ERRORS = (OSError, ValueError, TypeError)


class EventSink(Protocol):
    """Where events go.  `emit` may block; wrap a slow sink in `BackgroundSink`."""

    def emit(self, event: RunEvent) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class BufferedSink(EventSink, Protocol):
    """A sink that takes events before it has written them."""

    def flush(self, timeout: timedelta) -> bool: ...


class FileSink:
    """Appends one JSON line per event to `path`, shared by all processes of a host.

    Args:
        path: file to append to; created with its parents.
        encode: event to line; None skips the event.
    """

    def __init__(
        self, path: str | os.PathLike[str], encode: Callable[[RunEvent], str | None] = RunEvent.to_json
    ) -> None:
        self.path = Path(path)
        self._encode = encode
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def emit(self, event: RunEvent) -> None:
        line = self._encode(event)
        if line is not None and self._fd >= 0:
            # A file name that is no UTF-8 becomes a JSON escape instead of an exception.
            os.write(self._fd, line.encode(errors="backslashreplace") + b"\n")

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class BackgroundSink:
    """Hands events to `inner` on a thread, so that the training thread never touches a file.

    The queue is bounded: when storage stalls for long enough to fill it, the oldest duty wins
    (training goes on) and the number of dropped events is logged at `close`.
    """

    def __init__(self, inner: EventSink, *, capacity: int = 100_000) -> None:
        self._inner = inner
        self._queue: queue.Queue[RunEvent | threading.Event | None] = queue.Queue(capacity)
        self._dropped = 0
        self._thread = threading.Thread(target=self._run, name="resiliency-events", daemon=True)
        self._thread.start()

    def emit(self, event: RunEvent) -> None:
        try:
            self._queue.put_nowait(event)
        except queue.Full:
            self._dropped += 1

    def flush(self, timeout: timedelta = timedelta(seconds=5)) -> bool:
        """Wait until everything emitted so far has reached `inner`; False when time runs out."""
        deadline = time.monotonic() + timeout.total_seconds()
        done = threading.Event()
        try:
            self._queue.put(done, timeout=timeout.total_seconds())
        except queue.Full:
            return False
        return done.wait(max(deadline - time.monotonic(), 0.0))

    def close(self) -> None:
        if not self._thread.is_alive():
            return
        try:
            self._queue.put(None, timeout=5)
        except queue.Full:
            self._dropped += self._queue.qsize()
        self._thread.join(timeout=5)
        if self._thread.is_alive():
            logger.warning("the event log did not drain within 5 s; its last events are lost")
            return
        self._inner.close()
        if self._dropped:
            logger.warning("%d events were dropped because their sink was too slow", self._dropped)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            try:
                self._inner.emit(item)
            except _SINK_ERRORS:
                self._dropped += 1
                if self._dropped == 1:
                    logger.warning("cannot write the event log", exc_info=True)


class EventStream:
    """Stamps facts with identity and time and hands them to every sink.

    Thread-safe.  A sink that fails is closed, reported once and left out from then on.
    """

    def __init__(self, info: RunInfo, sinks: Iterable[EventSink] = (), clock: Clock | None = None) -> None:
        self.info = info
        self._sinks = list(sinks)
        self._observers: list[Callable[[RunEvent], None]] = []
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()

    def emit(
        self,
        type: EventType,
        *,
        step: int | None = None,
        rank: int | None = None,
        attempt: int | None = None,
        time: datetime | None = None,
        **fields: JsonValue,
    ) -> RunEvent:
        """Record a fact now (or at `time`); `rank` and `attempt` default to this process's own."""
        event = RunEvent(
            type=type,
            time=time or self._clock.now(),
            job_name=self.info.job_name,
            host=self.info.host,
            node_rank=self.info.node_rank,
            rank=self.info.rank if rank is None else rank,
            attempt=self.info.attempt if attempt is None else attempt,
            step=step,
            fields=fields,
        )
        with self._lock:
            for sink in tuple(self._sinks):
                try:
                    sink.emit(event)
                except _SINK_ERRORS as error:
                    self._sinks.remove(sink)
                    logger.warning("event sink %r failed and is left out: %s", sink, error)
                    with suppress(OSError):
                        sink.close()
        for observer in self._observers:
            observer(event)
        return event

    def observe(self, observer: Callable[[RunEvent], None]) -> None:
        """Call `observer` with every event, on the emitting thread, after the sinks have it.

        Unlike a sink, an observer may emit events itself, and may raise into the emitter: this is
        how faults are injected at an event.
        """
        self._observers.append(observer)

    def flush(self, timeout: timedelta = timedelta(seconds=5)) -> bool:
        """Wait until every sink has written what was emitted so far; False when time runs out.

        For a process that is about to die; `close` does it for one that ends in order.
        """
        with self._lock:
            sinks = [sink for sink in self._sinks if isinstance(sink, BufferedSink)]
        deadline = time.monotonic() + timeout.total_seconds()
        written = True
        for sink in sinks:
            left_s = max(deadline - time.monotonic(), 0.0)
            written &= sink.flush(timedelta(seconds=left_s))
        return written

    def close(self) -> None:
        """Close every sink; idempotent."""
        with self._lock:
            sinks, self._sinks = self._sinks, []
        for sink in sinks:
            sink.close()

    def __deepcopy__(self, memo: object) -> EventStream:
        # Trainers deep-copy their configuration, callbacks included (NeMo does, to record it); a
        # copy of a callback still speaks for the same process.
        return self

    def __enter__(self) -> EventStream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def events_path(info: RunInfo) -> Path:
    """File that holds all events of a job on this host: ``<run_dir>/<job_name>-events.jsonl``."""
    return Path(info.run_dir) / f"{info.job_name}-events.jsonl"
