# SPDX-License-Identifier: Apache-2.0
"""Processes of one interpreter that do one storage operation at a time, in an order that a seed draws.

Each thread of a process is a greenlet: it stops before every operation of its mounts, and the scheduler says
which one goes on.  So a kill between any two operations, an operation that hangs, and an error of one are
values, and a run is the same whenever its seed is.  Time is the scheduler's as well: an operation takes a
hundredth of a second, and a wait lasts until all others wait for longer.
"""

from __future__ import annotations

import errno
import math
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import greenlet

from resiliency.checkpoint.storage.interface import Buffer, ReadableFile, WritableFile
from resiliency.checkpoint.storage.posix import read_failed, write_failed
from resiliency.testing.storage import MemoryStorage, StorageKilled

OPERATION_S = 0.01
#: More are a loop without an end.
MOST_OPERATIONS = 200_000
_LOG_GO_ON = math.log(0.8)


class FaultKind(Enum):
    KILL = "kill"  # the process ends before the operation
    HANG = "hang"  # the operation happens when the process is woken, also if it was killed by then
    ERROR = "error"  # the operation fails
    FULL = "full"  # so does each that needs space, from there on


@dataclass(eq=False)
class Process:
    """What dies as one.

    `faults`: by the number of the operation, counted over all of its threads: among those that read and those
    that write (True), as many more reads say less.
    """

    name: str
    faults: dict[tuple[bool, int], FaultKind] = field(default_factory=dict)
    operations: dict[bool, int] = field(default_factory=lambda: {False: 0, True: 0})
    is_dead: bool = False
    is_full: bool = False
    #: How many errors it has met.
    errors: int = 0

    def plan(self, after: int, kind: FaultKind, *, writes: bool) -> None:
        """A fault so many operations from now."""
        self.faults[writes, self.operations[writes] + after] = kind


@dataclass(eq=False)
class Task:
    """A thread of a process."""

    process: Process
    greenlet: greenlet.greenlet
    wakes_at: float = 0.0
    is_ready: Callable[[], bool] | None = None
    is_hung: bool = False
    result: Any = None
    error: BaseException | None = None

    @property
    def is_over(self) -> bool:
        return self.greenlet.dead


class Scheduler:
    """Runs the threads of all processes.

    Args:
        on_change: called after each operation that changes something: disk, names, who did it.
    """

    def __init__(
        self, seed: int, on_change: Callable[[MemoryStorage, tuple[str, ...], Process], None]
    ) -> None:
        self.rng = random.Random(seed)  # noqa: S311
        self.now = 1_000_000.0
        self.on_change = on_change
        self.tasks: list[Task] = []
        self.operations = 0
        #: What was done: for the report of a run that went wrong.
        self.trace: list[str | tuple[str, ...]] = []
        self._main = greenlet.getcurrent()
        #: Operations that the current thread may do before another one is drawn.
        self._more = 0
        self._current: Task | None = None

    @property
    def current(self) -> Task | None:
        return self._current

    def start(self, process: Process, work: Callable[[], Any]) -> Task:
        """A thread of a process; it begins when it is chosen."""

        def run() -> None:
            try:
                task.result = work()
            except (StorageKilled, greenlet.GreenletExit):
                pass
            except BaseException as error:  # looked at by who started it
                task.error = error

        task = Task(process, greenlet.greenlet(run, self._main))
        self.tasks.append(task)
        return task

    def run(self, *, operations: int | None = None, until: Callable[[], bool] = lambda: False) -> None:
        """Let processes go on: for so many operations, until something holds, or until none can."""
        last = self.operations + operations if operations is not None else MOST_OPERATIONS
        draw = self.rng.random
        while self.operations < last and not until():
            able = [task for task in self.tasks if self._is_able(task)]
            if not able:
                if not self._skip_time():
                    break
                continue
            # So many operations in a row, in the mean four more than one.
            self._more = min(int(math.log(1 - draw()) / _LOG_GO_ON), last - self.operations - 1)
            self._resume(able[int(draw() * len(able))])
        assert self.operations < MOST_OPERATIONS, "a history without an end"

    def kill(self, process: Process) -> None:
        """End a process; an operation that hangs still happens when it is woken."""
        process.is_dead, self._more = True, 0
        for task in list(self.tasks):
            if task.process is process and not task.is_hung:
                self._resume(task)

    def wake(self, process: Process) -> None:
        """The operations of a process that hang happen from now on."""
        for task in self.tasks:
            if task.process is process:
                task.is_hung = False

    def hung(self) -> list[Process]:
        return list(dict.fromkeys(task.process for task in self.tasks if task.is_hung))

    def wait(self, seconds: float, is_ready: Callable[[], bool] | None = None) -> None:
        """The current thread waits."""
        task = self._current
        assert task is not None
        task.wakes_at, task.is_ready = self.now + seconds, is_ready
        self.pause()
        task.wakes_at, task.is_ready = 0.0, None

    def pause(self, *, in_kernel: bool = False) -> None:
        """Let others go on.

        Args:
            in_kernel: what comes next happens even if the process is killed meanwhile.
        """
        task = self._current
        assert task is not None
        if self._more > 0 and not in_kernel and not task.wakes_at:
            self._more -= 1
            return
        self._main.switch()
        if task.process.is_dead and not in_kernel:
            raise StorageKilled

    def told(self) -> str:
        """What was done, a line each."""
        return "\n".join(line if isinstance(line, str) else " ".join(line) for line in self.trace)

    def close(self) -> None:
        """End all threads."""
        for process in {task.process for task in self.tasks}:
            self.wake(process)
            self.kill(process)

    def _is_able(self, task: Task) -> bool:
        if task.is_hung:
            return False
        if task.process.is_dead:
            return True
        if task.is_ready is not None and task.is_ready():
            return True
        return task.wakes_at <= self.now

    def _skip_time(self) -> bool:
        waits = [t.wakes_at for t in self.tasks if not t.is_hung and t.wakes_at < float("inf")]
        if not waits:
            return False
        self.now = max(self.now, min(waits))
        return True

    def _resume(self, task: Task) -> None:
        before, self._current = self._current, task
        try:
            task.greenlet.switch()
        finally:
            self._current = before
        if task.is_over:
            self.tasks.remove(task)


class Mount:
    """A disk as the threads of one process see it."""

    def __init__(self, scheduler: Scheduler, process: Process, disk: MemoryStorage, name: str) -> None:
        self.root = name
        self.disk = disk
        self._scheduler = scheduler
        self._process = process

    def describe(self, name: str = "") -> str:
        return f"{self.root}/{name}"

    def create(self, name: str, size_bytes: int = 0) -> WritableFile:
        self._step("create", name, write_failed, needs_space=True)
        writer = self.disk.create(name, size_bytes)
        self._changed(name)
        return _Writer(self, writer, name)

    def open(self, name: str) -> ReadableFile:
        self._step("open", name, read_failed)
        return self.disk.open(name)

    def make_dir(self, name: str) -> None:
        self._step("make_dir", name, write_failed, needs_space=True)
        self.disk.make_dir(name)
        self._changed(name)

    def list(self, name: str) -> list[str]:
        self._step("list", name, read_failed)
        return self.disk.list(name)

    def exists(self, name: str) -> bool:
        self._step("exists", name, read_failed)
        return self.disk.exists(name)

    def replace(self, source: str, target: str) -> None:
        self._step("replace", f"{source} {target}", write_failed)
        self.disk.replace(source, target)
        self._changed(source, target)

    def link(self, source: str, target: str) -> None:
        self._step("link", f"{source} {target}", write_failed)
        self.disk.link(source, target)
        self._changed(target)

    def remove(self, name: str) -> None:
        self._step("remove", name, write_failed)
        self.disk.remove(name)
        self._changed(name)

    def remove_tree(self, name: str) -> None:
        self._step("remove_tree", name, write_failed)
        self.disk.remove_tree(name)
        self._changed(name)

    def remove_empty_dir(self, name: str) -> None:
        self._step("remove_empty_dir", name, write_failed)
        self.disk.remove_empty_dir(name)
        self._changed(name)

    def sync_dir(self, name: str) -> None:
        self._step("sync_dir", name, write_failed)
        self.disk.sync_dir(name)

    def _changed(self, *names: str) -> None:
        self._scheduler.on_change(self.disk, names, self._process)

    def _step(
        self, what: str, name: str, failed: Callable[..., Exception], *, needs_space: bool = False
    ) -> None:
        scheduler, process = self._scheduler, self._process
        if process.is_dead:
            raise StorageKilled
        writes = failed is write_failed
        fault = process.faults.pop((writes, process.operations[writes]), None) if process.faults else None
        process.operations[writes] += 1
        scheduler.operations += 1
        scheduler.now += OPERATION_S
        task = scheduler.current
        assert task is not None
        if fault is FaultKind.HANG:
            task.is_hung = True
            scheduler.trace.append(f"{process.name} hangs at {what} {name}")
        scheduler.pause(in_kernel=fault is FaultKind.HANG)
        scheduler.trace.append((process.name, what, self.root, name))
        if fault is FaultKind.KILL:
            scheduler.trace.append(f"{process.name} is killed")
            process.is_dead = True
            raise StorageKilled
        if fault is FaultKind.FULL:
            process.is_full = True
        is_full = process.is_full and needs_space
        if fault is FaultKind.ERROR or is_full:
            process.errors += 1
            scheduler.trace.append(f"{process.name} fails at that")
            number = errno.ENOSPC if is_full else errno.EIO
            raise failed(OSError(number, os.strerror(number)), *_about(failed, what, self.describe(name)))


def _about(failed: Callable[..., Exception], what: str, path: str) -> tuple[str, ...]:
    return (what, path) if failed is write_failed else (path,)


class _Writer:
    def __init__(self, mount: Mount, inner: WritableFile, name: str) -> None:
        self._mount = mount
        self._inner = inner
        self._name = name

    def write_at(self, offset: int, *data: Buffer) -> None:
        self._mount._step("write", self._name, write_failed, needs_space=True)
        self._inner.write_at(offset, *data)
        self._mount._changed(self._name)

    def sync(self) -> None:
        self._mount._step("sync", self._name, write_failed)
        self._inner.sync()

    def close(self) -> None:
        self._inner.close()
