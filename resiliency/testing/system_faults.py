# SPDX-License-Identifier: Apache-2.0
"""Errors of the operating system at one single call, beneath everything that would give them a name.

`resiliency.testing.storage.FaultyStorage` raises our own errors between the operations of a storage.  This
one raises what the system raises, where it does: in any call on files, memory or threads.

    with SystemFault(tmp_path / "leader", errno.EIO, call=7) as fault:
        ...
    assert fault.hit  # else there are no more than 6 calls

Two sides of one process have a path each to one directory (a symbolic link is enough), and a thread each;
a thread that another one starts belongs to the side of that one.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

#: By path, or relative to an open directory.
_BY_NAME = ("open", "listdir", "scandir", "lstat", "stat", "mkdir", "unlink", "rmdir", "rename", "replace",
            "link", "statvfs")  # fmt: skip
#: By descriptor.
_BY_DESCRIPTOR = ("fstat", "preadv", "pread", "pwritev", "fsync", "close", "posix_fadvise")
#: Instead of an error number: the next thread cannot be started.
NO_THREAD = -1


class SystemFault:
    """Fails the `call`-th call (from 0) on what lies below `root`; a context manager.

    Args:
        root: its spelling counts, not what it leads to.
        number: `errno` of the error; with ENOMEM, memory that is mapped counts too; `NO_THREAD`: only the
            starts of threads count.
        lasts: all later calls fail as well.
        thread: name of the thread whose side this is, for what has no path: memory and threads.
    """

    def __init__(self, root: Path, number: int, *, call: int, thread: str = "", lasts: bool = False) -> None:
        self.calls: list[str] = []
        self._root = os.fspath(root)
        self._number = number
        self._call = call
        self._lasts = lasts
        self._thread = thread or threading.current_thread().name
        self._fds: dict[int, str] = {}
        self._lock = threading.RLock()
        self._stack = ExitStack()
        self._sides: dict[threading.Thread, str] = {}

    @property
    def hit(self) -> bool:
        """Whether it has come to that."""
        return len(self.calls) > self._call

    def __enter__(self) -> SystemFault:
        from resiliency.checkpoint.storage import posix

        for name in _BY_NAME:
            self._patch(os, name, self._by_name(name, getattr(os, name)))
        for name in _BY_DESCRIPTOR:
            self._patch(os, name, self._by_descriptor(name, getattr(os, name)))
        self._patch(posix, "_preallocate", self._by_descriptor("fallocate", posix._preallocate))
        self._patch(mmap, "mmap", self._memory(mmap.mmap))
        self._patch(threading.Thread, "start", self._start(threading.Thread.start))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _patch(self, owner: object, name: str, replacement: object) -> None:
        self._stack.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, replacement)

    def _by_name(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any = ".", *args: Any, **more: Any) -> Any:
            directory = more.get("dir_fd", path if isinstance(path, int) else None)
            where = self._fds.get(directory) if directory is not None else os.fspath(path)
            if not isinstance(where, str) or not f"{where}/".startswith(f"{self._root}/"):
                return real(path, *args, **more)
            self._count(f"{name} {where}")
            result = real(path, *args, **more)
            if name == "open":
                self._fds[result] = where
            return result

        return call

    def _by_descriptor(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(fd: int, *args: Any) -> Any:
            where = self._fds.pop(fd, None) if name == "close" else self._fds.get(fd)
            if where is None:
                return real(fd, *args)
            if name == "close":
                real(fd)  # Linux closes it whatever it answers
            self._count(f"{name} {where}")
            return None if name == "close" else real(fd, *args)

        return call

    def _memory(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            is_new = args[0] == -1 and self._number == errno.ENOMEM
            if is_new and self._side(threading.current_thread()) == self._thread:
                self._count("mmap")
            return real(*args, **more)

        return call

    def _start(self, real: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
        def start(thread: threading.Thread) -> None:
            side = self._sides[thread] = self._side(threading.current_thread())
            if side == self._thread:
                self._count(f"thread {thread.name}", is_thread=True)
            real(thread)

        return start

    def _side(self, thread: threading.Thread) -> str:
        return self._sides.get(thread, thread.name)

    def _count(self, what: str, *, is_thread: bool = False) -> None:
        if is_thread != (self._number == NO_THREAD):
            return
        with self._lock:
            self.calls.append(what)
            late = len(self.calls) - 1 - self._call
            is_due = late == 0 or (late > 0 and self._lasts)
        if is_due and is_thread:
            raise RuntimeError("can't start new thread")
        if is_due:
            raise OSError(self._number, os.strerror(self._number))
