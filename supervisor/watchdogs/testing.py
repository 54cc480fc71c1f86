# SPDX-License-Identifier: Apache-2.0
"""Twins of what watchdogs look at: GPUs that a file describes, and a kernel's ring buffer in memory.

`FileGpus` also serves for drills on machines without GPUs: ``host_daemon.py --watchdog_gpus FILE``.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from supervisor.watchdogs.ecc import GpuHealth
from supervisor.watchdogs.watchdog import UnknownHealth


class FileGpus:
    """GPUs as a JSON file describes them at each reading: a list of tables with the fields of `GpuHealth`.

    The text ``"hang"`` instead of the list is a driver that never answers, any other text one that says it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> Sequence[GpuHealth]:
        try:
            described = json.loads(self._path.read_text())
            if described == "hang":
                threading.Event().wait()
            if isinstance(described, str):
                raise UnknownHealth(described)
            return [GpuHealth(**gpu) for gpu in described]
        except (OSError, ValueError, TypeError) as error:
            raise UnknownHealth(f"{self._path} describes no GPUs: {error}") from error


class MemoryRing:
    """A kernel's ring buffer of `size` records, with one reader."""

    def __init__(self, size: int = 1000) -> None:
        self._records: deque[tuple[int, bytes]] = deque(maxlen=size)
        self._written = 0
        self._next = 0

    def write(self, text: str, *, at_s: float = 0.0) -> int:
        """Append one record, whose lines after the first are its dictionary; returns its number."""
        number = self._written
        self._records.append((number, f"6,{number},{int(at_s * 1e6)},-;{text}\n".encode()))
        self._written += 1
        return number

    def rewind(self) -> MemoryRing:
        """As a reader that opens it again."""
        self._next = self._records[0][0] if self._records else self._written
        return self

    def read(self) -> bytes:
        if self._next >= self._written:
            raise BlockingIOError
        oldest = self._records[0][0]
        if self._next < oldest:
            self._next = oldest
            raise BrokenPipeError
        number, record = self._records[self._next - oldest]
        assert number == self._next
        self._next += 1
        return record

    def descriptor(self) -> int | None:
        return None
