# SPDX-License-Identifier: Apache-2.0
"""Daemon threads that run tasks; the caller never joins them.

Disks may hang for ever, and with them the thread that asked.  An executor of the standard library
would then keep the whole process: when the interpreter ends, it waits for the threads of all of them.
"""

from __future__ import annotations

import errno
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from functools import partial
from typing import TypeVar

from resiliency.errors import ResourceShortage

_T = TypeVar("_T")
_Item = TypeVar("_Item")
#: A thread for fewer costs more than it saves.
_ITEMS_PER_THREAD = 8


def start_thread(thread: threading.Thread) -> None:
    """Start a thread.

    Raises:
        ResourceShortage: this process may have no more threads.
    """
    try:
        thread.start()
    except RuntimeError as error:  # "can't start new thread", and there is no number with it
        raise ResourceShortage(
            f"cannot start thread {thread.name!r}: {error}.",
            hint="See the limit of processes: ulimit -u, and pids.max of the container.",
            errno=errno.EAGAIN,
        ) from error


class TaskThread:
    """A daemon thread that runs its tasks in order until it is closed.

    Args:
        name: of the thread.
    Raises:
        ResourceShortage: this process may have no more threads.
    """

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        start_thread(self._thread)

    def submit(self, work: Callable[[], _T]) -> Future[_T]:
        """Have `work` done after all that was given before.  Its errors are in the future alone."""
        future: Future[_T] = Future()
        self._queue.put(lambda: _carry_out(work, future))
        return future

    def close(self) -> None:
        """The thread ends after what it has been given; what comes later is never done.  Does not wait."""
        self._queue.put(None)

    def wait_for_end(self, timeout: timedelta | None = None) -> bool:
        """Wait until the thread is gone, after `close`; False if it still is not.  None: however long."""
        self._thread.join(None if timeout is None else timeout.total_seconds())
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (task := self._queue.get()) is not None:
            task()
            del task  # while this waits for the next one, it holds nothing of the last


class CallerThread:
    """In place of a `TaskThread` that cannot be had: does the work at once, in the thread that submits it."""

    def submit(self, work: Callable[[], _T]) -> Future[_T]:
        future: Future[_T] = Future()
        _carry_out(work, future)
        return future

    def close(self) -> None:
        """Nothing is left to end."""

    def wait_for_end(self, timeout: timedelta | None = None) -> bool:
        return True


def helper_thread(name: str) -> TaskThread | CallerThread:
    """A thread for work that the caller can do as well: more slowly, but it is done."""
    try:
        return TaskThread(name)
    except ResourceShortage:
        return CallerThread()


def run_parallel(tasks: Sequence[Callable[[], _T]], name: str) -> list[_T]:
    """Do all `tasks` at once, each in a thread of its own; returns what they returned, in their order.

    The caller itself does a single task, and where this process may have no more threads what is left: no
    task may wait for another one to begin.

    All have ended when this returns, and when it raises the error of the first that failed.  Interrupted
    (by Ctrl-C), it waits for them before it raises as well, since they use the caller's memory.  Only a
    second interrupt does not wait: a disk may hang for ever.

    Args:
        name: of the threads; their number follows.
    """
    if len(tasks) == 1:
        return [tasks[0]()]
    threads: list[TaskThread | CallerThread] = []
    futures: list[Future[_T]] = []
    try:
        for number in range(len(tasks)):
            threads.append(helper_thread(f"{name}_{number}"))
        for thread, task in zip(threads, tasks, strict=True):
            futures.append(thread.submit(task))
        for thread in threads:
            thread.close()
        wait(futures)
    except BaseException:
        # For the threads: an interrupt may come when a task is under way and its future not noted yet.
        for thread in threads:
            thread.close()
        for thread in threads:
            thread.wait_for_end()
        raise
    return [future.result() for future in futures]


def map_parallel(
    work: Callable[[_Item], _T], items: Sequence[_Item], name: str, *, threads: int = 16
) -> list[_T]:
    """What `work` gives for each of `items`, in their order; a few of them in this thread, many in up to
    `threads` others.  For work that mostly waits, such as small reads; raises like `run_parallel`."""
    count = min(threads, len(items) // _ITEMS_PER_THREAD)
    if count <= 1:
        return [work(item) for item in items]

    def run(first: int) -> list[_T]:
        return [work(item) for item in items[first::count]]

    stripes = run_parallel([partial(run, first) for first in range(count)], name)
    return [stripes[number % count][number // count] for number in range(len(items))]


def _carry_out(work: Callable[[], _T], future: Future[_T]) -> None:
    try:
        result = work()
    except BaseException as error:  # whoever has the future has the error too
        future.set_exception(error)
    else:
        future.set_result(result)
