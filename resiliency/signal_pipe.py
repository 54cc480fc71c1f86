# SPDX-License-Identifier: Apache-2.0
"""Signals of this process, as bytes in a pipe that another thread reads.

A handler in Python runs only when the main thread is back in the interpreter, and a training thread
may sit in a collective for minutes.  The interpreter's own handler in C does not wait: it writes the
signal's number to the wake-up descriptor.  A program has one such descriptor, and others (asyncio)
may take it away, so the handler in Python writes too, with a mark; the reader counts each signal by
the greater of the two.  Nothing else happens in either, except that handlers which were there before
are called, and that bytes are passed on to the wake-up descriptor that was there before.
"""

from __future__ import annotations

import os
import signal
import threading
import weakref
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from types import FrameType
from typing import Any

from resiliency.errors import ConfigError

#: Set in a byte that the handler in Python wrote.  Signal numbers are below it.
_HANDLED = 0x80


class SignalPipe:
    """Catches `numbers` from construction to `close`; both belong into the main thread.

    Raises:
        ConfigError: this is not the main thread.
    """

    def __init__(self, numbers: Iterable[signal.Signals]) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError(
                f"signals can be handled from the main thread only, and this is"
                f" {threading.current_thread().name!r}.",
                hint="Make it in the main thread, or without signals.",
            )
        self._out, self._in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._native: Counter[int] = Counter()
        self._handled: Counter[int] = Counter()
        self._reported: Counter[int] = Counter()
        self._open = True
        self._previous: dict[signal.Signals, Any] = {}
        self._previous_fd = signal.set_wakeup_fd(self._in, warn_on_full_buffer=False)
        for number in numbers:
            self._previous[number] = signal.signal(number, self._handle)
        _pipes.add(self)

    def fileno(self) -> int:
        """Readable when a signal came."""
        return self._out

    def read(self) -> list[signal.Signals]:
        """The caught signals that came since the last call, each as often as it came."""
        found = b""
        with suppress(BlockingIOError):
            while chunk := os.read(self._out, 4096):
                found += chunk
        if self._previous_fd >= 0:
            with suppress(OSError):
                os.write(self._previous_fd, bytes(byte for byte in found if byte < _HANDLED))
        for byte in found:
            (self._handled if byte & _HANDLED else self._native)[byte & ~_HANDLED] += 1
        came = []
        for number in self._previous:
            count = max(self._native[number], self._handled[number])
            came += [number] * (count - self._reported[number])
            self._reported[number] = count
        return came

    def close(self, *, ending: bool = False) -> None:
        """Put back what was there before, unless somebody else took its place meanwhile.  Idempotent.

        Args:
            ending: this process ends because of such a signal: one more of it is ignored.  Ctrl-C is not.
        """
        if not self._open:
            return
        self._open = False
        if threading.current_thread() is threading.main_thread():
            self._put_back()
            for number in self._previous if ending else ():
                if number is not signal.SIGINT and signal.getsignal(number) is signal.SIG_DFL:
                    signal.signal(number, signal.SIG_IGN)
        self._close_pipe()

    def _put_back(self) -> None:
        current = signal.set_wakeup_fd(self._previous_fd)
        if current != self._in:
            signal.set_wakeup_fd(current)
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._handle:
                # None: it was not installed from Python, and cannot be put back from there.
                signal.signal(number, signal.SIG_DFL if previous is None else previous)

    def _close_pipe(self) -> None:
        for later in list(_pipes):
            later._skip(self)
        os.close(self._in)
        os.close(self._out)

    def _skip(self, closed: SignalPipe) -> None:
        """Pass on to what was there before `closed`, whose descriptor is about to be somebody else's."""
        if self._previous_fd == closed._in:
            self._previous_fd = closed._previous_fd
        for number, previous in self._previous.items():
            if previous == closed._handle:
                self._previous[number] = closed._previous[number]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        previous = self._previous.get(signal.Signals(number))
        if self._open:
            with suppress(OSError):
                os.write(self._in, bytes([number | _HANDLED]))
        elif previous in (None, signal.SIG_DFL):
            # Closed in another thread, which may not put handlers back: do as if it had.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        # Ctrl-C's own handler raises: that is what catching it is to replace.
        if callable(previous) and (not self._open or previous is not signal.default_int_handler):
            previous(number, frame)

    def _forget(self) -> None:
        """In a forked child: its signals are not its parent's."""
        if self._open:
            self._open = False
            self._put_back()
            self._close_pipe()


_pipes: weakref.WeakSet[SignalPipe] = weakref.WeakSet()
_forking = threading.local()


def _hold() -> None:
    """Before a fork: a signal to the new child must not be written into the pipe that it inherits."""
    caught = {number for pipe in list(_pipes) if pipe._open for number in pipe._previous}
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, caught)


def _let_go() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _leave_to_parent() -> None:
    for pipe in list(_pipes):
        pipe._forget()
    _let_go()


os.register_at_fork(before=_hold, after_in_parent=_let_go, after_in_child=_leave_to_parent)
