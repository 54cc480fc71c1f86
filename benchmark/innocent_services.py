# SPDX-License-Identifier: Apache-2.0
"""The other side of `benchmark.innocent_job`: what a sound job waits for, each played by a thread."""

from __future__ import annotations

import ctypes
import fcntl
import os
import pty
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO

_PTRACE_SEIZE, _PTRACE_INTERRUPT, _PTRACE_DETACH, _WALL = 0x4206, 0x4207, 17, 0x40000000
_HOLDER = "import fcntl, sys; f = open(sys.argv[1], 'r+'); fcntl.lockf(f, fcntl.LOCK_EX); sys.stdin.read()"


class OtherSide:
    """A service, terminal, lock holder and debugger for one job, each for `seconds` from when it is asked."""

    def __init__(self, root: Path, seconds: float) -> None:
        self._root, self._seconds = root, seconds
        self._over = threading.Event()
        self._closing = ExitStack()
        self._threads: list[threading.Thread] = []
        server = self._closing.enter_context(socket.create_server(("127.0.0.1", 0)))
        (root / "port").write_text(str(server.getsockname()[1]))
        local = self._closing.enter_context(socket.socket(socket.AF_UNIX))
        local.bind(str(root / "unix"))
        local.listen()
        os.mkfifo(root / "fifo")
        main, terminal = pty.openpty()
        self._closing.callback(os.close, main)
        self._closing.callback(os.close, terminal)
        (root / "terminal").symlink_to(os.ttyname(terminal))
        for name in ("flock", "record"):
            (root / name).touch()
        flock = self._closing.enter_context((root / "flock").open())
        fcntl.flock(flock, fcntl.LOCK_EX)
        self._start(lambda: self._serve(server))
        self._start(lambda: self._serve(local))
        for act in (
            lambda: self._pipe(),
            lambda: self._terminal(main),
            lambda: self._unlock(flock),
            self._debug,
        ):
            self._start(act)
        argv = [sys.executable, "-c", _HOLDER, str(root / "record")]
        self._holder = subprocess.Popen(argv, stdin=subprocess.PIPE)
        self._start(self._end_holder)

    def close(self) -> None:
        self._over.set()
        with suppress(OSError):  # a reader or writer of the pipe that is left
            os.close(os.open(self._root / "fifo", os.O_RDWR | os.O_NONBLOCK))
        self._holder.kill()
        self._holder.wait()
        for thread in self._threads:
            thread.join()
        self._closing.close()

    def _start(self, act: Callable[[], None]) -> None:
        thread = threading.Thread(target=act, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _wait_for(self, name: str) -> bool:
        """Until the job has come to its step; False when it is over before."""
        while not (self._root / name).exists():
            if self._over.wait(0.1):
                return False
        return True

    def _late(self) -> bool:
        return self._over.wait(self._seconds)

    def _serve(self, server: socket.socket) -> None:
        server.settimeout(0.1)
        while not self._over.is_set():
            with suppress(TimeoutError):
                link, _ = server.accept()
                self._start(lambda link=link: self._answer(link))  # type: ignore[misc]

    def _answer(self, link: socket.socket) -> None:
        with link, suppress(OSError):
            asked = link.recv(1 << 16) if link.family == socket.AF_INET else b""
            until = time.monotonic() + self._seconds
            if b"slow" in asked:
                while time.monotonic() < until and not self._over.wait(0.1):
                    link.recv(2000)
            elif b"drip" not in asked:
                self._late()
            link.sendall(b"HTTP/1.0 200 OK\r\n\r\nyes")
            while b"drip" in asked and time.monotonic() < until and not self._over.wait(0.1):
                link.sendall(bytes(2000))
            # Closing with words unread resets the connection, and the answer is lost.
            link.shutdown(socket.SHUT_WR)
            link.settimeout(self._seconds)
            while link.recv(1 << 20):
                pass

    def _pipe(self) -> None:
        if self._wait_for("at-step") and not self._late():
            with suppress(OSError), (self._root / "fifo").open("r+b", buffering=0) as pipe:
                os.set_blocking(pipe.fileno(), False)
                with suppress(BlockingIOError):
                    while pipe.read(1 << 16):
                        pass

    def _terminal(self, main: int) -> None:
        if self._wait_for("at-step") and not self._late():
            os.write(main, b"c\n")

    def _unlock(self, lock: IO[str]) -> None:
        if self._wait_for("at-step") and not self._late():
            fcntl.flock(lock, fcntl.LOCK_UN)

    def _end_holder(self) -> None:
        if self._wait_for("at-step") and not self._late() and self._holder.stdin is not None:
            self._holder.stdin.close()

    def _debug(self) -> None:
        if not self._wait_for("trace-me"):
            return
        pid, libc = int((self._root / "trace-me").read_text()), ctypes.CDLL(None, use_errno=True)
        if libc.ptrace(_PTRACE_SEIZE, pid, None, None) == 0:
            libc.ptrace(_PTRACE_INTERRUPT, pid, None, None)
            self._late()
            os.waitpid(pid, _WALL)
            libc.ptrace(_PTRACE_DETACH, pid, None, None)
