# SPDX-License-Identifier: Apache-2.0
"""Tasks of an orchestrator: they end with it, and one that fails is in the log and ends no other."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from resiliency.tasks import end_tasks

logger = logging.getLogger(__name__)


class LoggedTasks:
    """Tasks that are started by code that does not wait for them.

    Args:
        owner: as the log names it.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s: a task of it has failed, which is a bug", self._owner, exc_info=error)

    async def end(self) -> None:
        """Cancel them, and wait for their ends."""
        await end_tasks(self._tasks)
