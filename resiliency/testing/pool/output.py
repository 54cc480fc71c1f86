# SPDX-License-Identifier: Apache-2.0
"""Collect the output of a command on a thread, so that a test can wait for a line of it.

The reader sleeps in `poll` on two descriptors: the pipe, and an eventfd with which others ask it
to take in what is there now (`drain`) or to end (`close`).  Neither can be missed, and a child
that holds the pipe open after its parent exited cannot keep the thread alive.
"""

from __future__ import annotations

import os
import select
import threading
import time
from pathlib import Path
from typing import BinaryIO


class OutputReader:
    """Collects what arrives on a pipe, on a thread, into memory and a log file."""

    def __init__(self, log: Path | None) -> None:
        self._log: BinaryIO | None = log.open("wb") if log else None
        self._read_fd, self.write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        self._wake_fd = os.eventfd(0)
        self._changed = threading.Condition()
        self._lines: list[str] = []
        self._partial = b""
        self._drains_asked = self._drains_done = 0
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="command-output", daemon=True)
        self.at_end = False

    def start(self) -> None:
        os.close(self.write_fd)
        self.write_fd = -1
        self._thread.start()

    def lines(self) -> list[str]:
        with self._changed:
            return list(self._lines)

    def text(self) -> str:
        with self._changed:
            whole = "".join(f"{line}\n" for line in self._lines)
            return whole + self._partial.decode(errors="replace")

    def wait_for_more(self, position: int, deadline: float) -> bool:
        """Wait for a line after `position`; False when the deadline or the end comes first."""
        with self._changed:
            self._changed.wait_for(
                lambda: len(self._lines) > position or self.at_end, deadline - time.monotonic()
            )
            return len(self._lines) > position

    def drain(self, timeout: float = 5.0) -> None:
        """Take in everything that is in the pipe now, although others may still hold it open."""
        with self._changed:
            if self.at_end or self._closing:
                return
            self._drains_asked += 1
            mine = self._drains_asked
            os.eventfd_write(self._wake_fd, 1)
            self._changed.wait_for(lambda: self._drains_done >= mine or self.at_end, timeout)

    def close(self) -> None:
        if self._read_fd < 0:
            return
        if self._thread.ident is not None:
            self._closing = True
            os.eventfd_write(self._wake_fd, 1)
            self._thread.join(10)
        for fd in (self._read_fd, self._wake_fd, self.write_fd):
            if fd >= 0:
                os.close(fd)
        self._read_fd = self._wake_fd = self.write_fd = -1
        if self._log:
            self._log.close()

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._read_fd, select.POLLIN)
        poll.register(self._wake_fd, select.POLLIN)
        while not self.at_end and not self._closing:
            ready = {fd for fd, _ in poll.poll()}
            asked = self._drains_asked
            if self._wake_fd in ready:
                os.eventfd_read(self._wake_fd)
                asked = self._drains_asked
            self._take_in()
            with self._changed:
                self._drains_done = asked
                self._changed.notify_all()

    def _take_in(self) -> None:
        while True:
            try:
                data = os.read(self._read_fd, 65536)
            except BlockingIOError:
                return
            if self._log and data:
                self._log.write(data)
                self._log.flush()
            with self._changed:
                *whole, self._partial = (self._partial + data).split(b"\n")
                if not data and self._partial:  # the end closes the last line
                    whole, self._partial = [self._partial], b""
                self._lines += [line.decode(errors="replace") for line in whole]
                self.at_end = not data
                self._changed.notify_all()
            if not data:
                return
