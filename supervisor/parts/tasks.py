# SPDX-License-Identifier: Apache-2.0
"""Tasks of one process, and one log line for each outage of a part that it speaks to."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from typing import Any

from resiliency.tasks import end_tasks

logger = logging.getLogger(__name__)


class Tasks:
    """Tasks that end with their owner; the first error of one ends the owner's `run_all` with it."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed: asyncio.Future[None] | None = None

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def fail(self, error: BaseException) -> None:
        """End `run_all` with `error`."""
        if self._failed is not None and not self._failed.done():
            self._failed.set_exception(error)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    async def run_all(self, *work: Coroutine[Any, Any, None]) -> None:
        """Run `work`, none of which ends in order, and what `start` adds.

        Raises:
            BaseException: of the first task that failed.
        """
        self._failed = asyncio.get_running_loop().create_future()
        for one in work:
            self.start(one)
        try:
            await self._failed
        finally:
            tasks = list(self._tasks)
            await end_tasks(tasks)


class Contact:
    """Whether another part answers: one line for an outage, one for its end."""

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address = name, address
        self.problem = ""
        self._at: float | None = None
        self._announced = False

    @property
    def age_s(self) -> float | None:
        """Since the last contact; None before the first."""
        return None if self._at is None else time.monotonic() - self._at

    def succeeded(self, what: str = "") -> None:
        if self.problem or not self._announced:
            logger.info("%s at %s: connected%s", self.name, self.address, f", {what}" if what else "")
        self._announced = True
        self._at, self.problem = time.monotonic(), ""

    def failed(self, error: Exception) -> None:
        if not self.problem:
            logger.warning("%s at %s: %s  Trying again.", self.name, self.address, error)
        self.problem = str(error)
