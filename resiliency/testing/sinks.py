# SPDX-License-Identifier: Apache-2.0
"""Event sinks that a test owns: one that keeps events, and one that fails on request."""

from __future__ import annotations

import threading

from resiliency.events import EventSink, EventType, RunEvent


class MemorySink:
    """Keeps every event, in the order of arrival.  Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: list[RunEvent] = []
        self.closed = False

    @property
    def events(self) -> list[RunEvent]:
        with self._lock:
            return list(self._events)

    def of_type(self, *types: EventType) -> list[RunEvent]:
        return [event for event in self.events if event.type in types]

    def emit(self, event: RunEvent) -> None:
        with self._lock:
            self._events.append(event)

    def close(self) -> None:
        self.closed = True


class FailingSink:
    """Passes events on to `inner` until `error` is set, then raises it at every call of `emit`."""

    def __init__(self, inner: EventSink, error: OSError | None = None) -> None:
        self.inner = inner
        self.error = error
        self.refused = 0

    def emit(self, event: RunEvent) -> None:
        if self.error is not None:
            self.refused += 1
            raise self.error
        self.inner.emit(event)

    def close(self) -> None:
        self.inner.close()
