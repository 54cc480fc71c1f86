# SPDX-License-Identifier: Apache-2.0
"""Lines that the launchers of a job write for each other, under keys of the rendezvous store.

A key is a list that any launcher adds to and reads as a whole, or a text that one launcher writes.  A store
that is away or hangs costs `DEADLINE_S` for each call, and nothing else: what is said over it is advice.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

DEADLINE_S = 2.0


class SharedLines:
    """Args:
    call: runs a function with the rendezvous store; waits for one that is away no longer than `DEADLINE_S`.
    """

    def __init__(self, call: Callable[[Callable[[Any], Any]], Any]) -> None:
        self._call = call

    def add(self, key: str, line: str) -> None:
        self._try(lambda store: store.append(key, line + "\n"))

    def read(self, key: str) -> list[str] | None:
        """All lines so far; None where the store did not answer."""
        value = self._try(lambda store: store.get(key) if store.check([key]) else b"")
        return None if value is None else value.decode(errors="replace").splitlines()

    def put(self, key: str, text: str) -> None:
        """Replace what this launcher, and no other, writes under `key`."""
        self._try(lambda store: store.set(key, text))

    def read_each(self, keys: Sequence[str]) -> list[str]:
        """The texts under `keys`; empty ones for those that are not there, or if the store did not answer."""

        def read(store: Any) -> list[bytes]:
            if store.check(keys):  # two calls of the store, and not two for each of a thousand hosts
                return list(store.multi_get(keys))
            return [store.get(key) if store.check([key]) else b"" for key in keys]

        values = self._try(read)
        return [value.decode(errors="replace") for value in values or [b""] * len(keys)]

    def drop(self, key: str) -> None:
        self._try(lambda store: store.delete_key(key))

    def _try(self, work: Callable[[Any], T]) -> T | None:
        """What `work` returns; None when it raises or takes longer, and then nobody waits for it."""
        answers: list[T] = []

        def run() -> None:
            try:
                answers.append(self._call(work))
            except (RuntimeError, OSError) as error:  # torch's store raises RuntimeError
                logger.debug("the rendezvous store did not answer: %s", error)

        thread = threading.Thread(target=run, name="resiliency-shared-lines", daemon=True)
        thread.start()
        thread.join(DEADLINE_S)
        return answers[0] if answers else None
