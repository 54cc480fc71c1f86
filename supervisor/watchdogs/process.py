# SPDX-License-Identifier: Apache-2.0
"""The process of one watchdog, as an event loop sees it: lines with deadlines, an end that never blocks."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from resiliency.tasks import wait_for

logger = logging.getLogger(__name__)

#: Longest line of a process: its findings and its memory.
_LINE_BYTES = 1 << 20
#: After SIGKILL.  A process that waits in the kernel for a device stays until that answers.
_END_S = 0.2


class WatchdogProcess:
    """Starts with its construction; `kill` before it is dropped.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, order: Mapping[str, Any]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "supervisor.watchdogs"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # From a clone or an installation, whatever the working directory.
            cwd=Path(__file__).parents[2],
            start_new_session=True,  # a Ctrl-C is the daemon's, which ends the process itself
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self._buffer = b""
        os.set_blocking(self._stdout.fileno(), False)
        # It reads one line before it does anything, and a pipe takes more than that at once.
        with suppress(BrokenPipeError):
            self._stdin.write(f"{json.dumps(order)}\n".encode())
            self._stdin.flush()

    async def read_line(self, timeout_s: float) -> bytes:
        """The next line; empty when the process has ended.

        Raises:
            TimeoutError: there was none in time.
            ValueError: it is too long.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        while b"\n" not in self._buffer:
            if len(self._buffer) > _LINE_BYTES:
                raise ValueError("a line without an end")
            await _readable(self._stdout.fileno(), deadline - asyncio.get_running_loop().time())
            with suppress(BlockingIOError):
                block = os.read(self._stdout.fileno(), 1 << 16)
                if not block:
                    return b""
                self._buffer += block
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def kill(self) -> int | None:
        """End it; returns its exit code, None where it waits in the kernel."""
        self._process.kill()
        for pipe in (self._stdin, self._stdout):
            with suppress(BrokenPipeError):
                pipe.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        return self._process.returncode

    async def wait_gone(self) -> None:
        """Return when the process has ended after a `kill`, however long it waits in the kernel."""
        if self._process.poll() is not None:
            return
        logger.error("process %d of a watchdog waits in the kernel and does not end", self._process.pid)
        descriptor = os.pidfd_open(self._process.pid)
        try:
            await _readable(descriptor, None)
        finally:
            os.close(descriptor)
        self._process.wait()


async def _readable(descriptor: int, timeout_s: float | None) -> None:
    """Wait until there is something to read.

    Raises:
        TimeoutError: there was nothing in time.
    """
    loop, arrived = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, arrived.set)
    try:
        await wait_for(arrived.wait(), timeout_s)
    except asyncio.TimeoutError:
        raise TimeoutError from None
    finally:
        loop.remove_reader(descriptor)
