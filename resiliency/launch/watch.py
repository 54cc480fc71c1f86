# SPDX-License-Identifier: Apache-2.0
"""What the launcher waits for: the death of a worker, a signal, or the monitor interval.

Signals only set a flag and write a byte.  Exceptions out of a handler would come in the middle of
starting or stopping workers and lose track of them, so the flag is looked at where the launcher
waits.  The one exception is code of others that waits inside itself, at the rendezvous: there,
within `interruptible`, the handler raises.
"""

from __future__ import annotations

import logging
import os
import select
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

from resiliency.wake_pipe import WakePipe

logger = logging.getLogger(__name__)

#: Signals for which upstream installs handlers each time it starts workers.
UPSTREAM_HANDLES = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def stop_ignoring(numbers: Iterable[signal.Signals]) -> None:
    """Before anything is started that lives on: shells ignore SIGINT in what scripts run behind them.

    Ranks do not inherit that once `SignalBox` handles it, so the import template must not, either.
    """
    for number in numbers:
        if number != signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
            default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, default)


class SignalBox:
    """Signals that ask the launcher to end.

    Args:
        raise_for: builds the exception that means "ended by this signal".
    """

    def __init__(self, raise_for: Callable[[signal.Signals], Exception]) -> None:
        self._raise_for = raise_for
        self._interruptible = False
        self._installed: set[int] = set()
        self._left_alone = {number: signal.getsignal(number) for number in UPSTREAM_HANDLES}
        self._came = WakePipe()
        #: The first signal that came, if any.
        self.first: signal.Signals | None = None
        #: True, and its descriptor readable, from the second signal on: somebody is out of patience.
        self.at_once = False
        self._came_again = WakePipe()
        self.at_once_fd = self._came_again.fileno()

    @property
    def wake_fd(self) -> int:
        """Readable once a signal came."""
        return self._came.fileno()

    def handle(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        del frame
        if self.first is None:
            self.first = signal.Signals(number)
            self._came.wake()
        elif not self.at_once:
            self.at_once = True
            self._came_again.wake()
        if self._interruptible:
            self._interruptible = False
            raise self._raise_for(self.first)

    def install(self, numbers: Iterable[signal.Signals]) -> None:
        """Handle `numbers`; a hang-up that is ignored already (nohup) stays ignored."""
        for number in numbers:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self.handle)
                self._installed.add(number)

    def reinstate(self) -> None:
        """Undo what upstream's agent did to signals that were not asked for."""
        for number, handler in self._left_alone.items():
            if number not in self._installed:
                signal.signal(number, handler)

    def check(self) -> None:
        """Raise if a signal came."""
        if self.first is not None:
            raise self._raise_for(self.first)

    @contextmanager
    def interruptible(self, *, check: bool = True) -> Iterator[None]:
        """Within, the next signal raises at once instead of at the next `check`."""
        self._interruptible = True
        try:
            if check:
                self.check()  # after the flag: a signal that came between the two is not missed
            yield
        finally:
            self._interruptible = False

    def wait(self, timeout_s: float) -> None:
        """Return when a signal came, or time is up."""
        select.select([self.wake_fd], [], [], timeout_s)

    def close(self) -> None:
        """Ignore further signals: what is left to do is short and must not be cut."""
        for number in self._installed:
            signal.signal(number, signal.SIG_IGN)


class WorkerWatch:
    """Wakes when one of a set of processes ends, where the kernel can tell (pidfd)."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._poll = select.poll()
        self._fds: set[int] = set()
        for pid in pids:
            try:
                fd = os.pidfd_open(pid)
            except (AttributeError, OSError) as error:
                logger.debug("cannot watch process %d, falling back to a poll: %s", pid, error)
                continue
            self._fds.add(fd)
            self._poll.register(fd, select.POLLIN)

    def wait(self, timeout_s: float, *wake_fds: int) -> bool:
        """Return when a watched process ended, one of `wake_fds` is readable, or time is up; -1 never is.

        Returns:
            Whether one of `wake_fds` is readable.
        """
        woken = False
        for wake_fd in wake_fds:
            if wake_fd >= 0:
                self._poll.register(wake_fd, select.POLLIN)
        for fd, _ in self._poll.poll(timeout_s * 1000):
            if fd in wake_fds:
                woken = True
            else:
                # Level-triggered: a worker that finished early would wake every later wait.
                self._discard(fd)
        return woken

    def close(self) -> None:
        for fd in tuple(self._fds):
            self._discard(fd)

    def _discard(self, fd: int) -> None:
        self._poll.unregister(fd)
        self._fds.discard(fd)
        os.close(fd)
