# SPDX-License-Identifier: Apache-2.0
"""Worker processes of data loaders outlive the signal that tells their rank to stop.

A scheduler sends it to all processes of a job.  A worker of torch's `DataLoader` dies of it, and the rank
fails at its next batch, before the step at which all ranks stop.  So while a rank handles signals itself, the
workers that it starts heed their rank alone: such a signal of another process does nothing while the rank
lives.

The thread that starts them blocks the signals meanwhile.  A new process inherits that, by fork or by exec,
also the server that forks others, and torch's own handler, which comes later, is never called.  A thread in
the worker takes the signals and asks who sent them, which a handler in Python cannot.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

#: The parts of this process that want it, and the loaders' own way to begin while there are any.
_wanted: list[frozenset[signal.Signals]] = []
_iter: Callable[[Any], Iterator[Any]] = DataLoader.__iter__


@contextlib.contextmanager
def outliving(numbers: Collection[signal.Signals]) -> Iterator[None]:
    """For the time in which this process handles `numbers`: workers started meanwhile outlive them."""
    wanted = frozenset(numbers)
    _wanted.append(wanted)
    DataLoader.__iter__ = _begin  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        _wanted.remove(wanted)
        if not _wanted:
            DataLoader.__iter__ = _iter  # type: ignore[method-assign, assignment]


def _begin(loader: DataLoader[Any]) -> Iterator[Any]:
    """In place of `DataLoader.__iter__`."""
    numbers = frozenset().union(*_wanted)
    if not loader.num_workers or not numbers:
        return _iter(loader)
    before = loader.worker_init_fn
    loader.worker_init_fn = HeedRankAlone(numbers, before)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        return _iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        loader.worker_init_fn = before


@dataclass(frozen=True)
class HeedRankAlone:
    """What a worker does first, by any start method; then what the program wants it to do."""

    numbers: frozenset[signal.Signals]
    then: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        # Where the loader began in a server that was there before, nothing is blocked yet.
        signal.pthread_sigmask(signal.SIG_BLOCK, self.numbers)
        threading.Thread(target=self._take, name="resiliency-loader-signals", daemon=True).start()
        if self.then is not None:
            self.then(worker)

    def _take(self) -> None:
        rank = multiprocessing.parent_process()
        assert rank is not None, "a worker has a parent"
        while True:
            sender = signal.sigwaitinfo(self.numbers).si_pid
            if sender == rank.pid or not rank.is_alive():
                os._exit(0)  # as torch's own handler
