# SPDX-License-Identifier: Apache-2.0
"""A thread that watches one attempt after the other, from its begin to its end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

A = TypeVar("A")

_END_S = 5.0


class AttemptThread(Generic[A]):
    """Runs ``watch(attempt, over)`` for each attempt; `over` is set when that ends, and then it returns.

    Training never waits for it, and goes on where it raises.
    """

    def __init__(self, watch: Callable[[A, threading.Event], None], *, name: str) -> None:
        self._watch = watch
        self._name = name
        self._attempt: A | None = None
        self._over = threading.Event()
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def begin(self, attempt: A) -> None:
        with self._changed:
            self._over.set()
            self._over = threading.Event()
            self._attempt = attempt
            self._changed.notify_all()

    def end(self) -> None:
        with self._changed:
            self._attempt = None
            self._over.set()

    def close(self) -> None:
        with self._changed:
            self._attempt = None
            self._closed = True
            self._over.set()
            self._changed.notify_all()
        self._thread.join(_END_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._attempt is None and not self._closed:
                    self._changed.wait()
                attempt, over = self._attempt, self._over
            if attempt is None:
                return
            try:
                self._watch(attempt, over)
            except Exception:  # the border of this thread
                logger.exception("%s has ended for this attempt; training goes on", self._name)
            over.wait()
