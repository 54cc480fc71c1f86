# SPDX-License-Identifier: Apache-2.0
"""What agents before this one committed in the local tier, asked of a disk that may be slow, or hang.

The agent's main thread asks, which must not wait: ranks take an agent that says nothing for hung.  So another
thread looks, and the answer is taken whenever it is there, until a save would have been given up, too.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future

from resiliency.checkpoint.agent.protocol import Attach
from resiliency.checkpoint.commit.retention import committed_save
from resiliency.checkpoint.names import save_id_of
from resiliency.checkpoint.storage.posix import LocalStorage
from resiliency.checkpoint.threads import TaskThread
from resiliency.errors import CheckpointError

logger = logging.getLogger(__name__)


class CommitLookup:
    """The question whether an attempt has committed a step already, by any try.

    Args:
        timeout_s: when to stop asking.
    """

    def __init__(self, look: Future[str | None], attempt_id: str, step: int, timeout_s: float) -> None:
        self._look = look
        self._attempt_id = attempt_id
        self._step = step
        self._until = time.monotonic() + timeout_s

    def is_over(self) -> bool:
        """Whether there is an answer, or none comes, which counts as no."""
        return self._look.done() or time.monotonic() >= self._until

    def is_committed(self) -> bool:
        """The answer; once it is over."""
        if not self._look.done():
            logger.error(
                "the local tier does not answer: whether an earlier agent committed step %d is not known",
                self._step,
            )
            return False
        try:
            return self._look.result() == save_id_of(self._attempt_id, self._step)
        except CheckpointError as error:
            logger.warning("the local tier cannot be looked at: %s", error)
            return False


class CommitLookups:
    """Asks.  For one thread, which never waits here."""

    def __init__(self) -> None:
        self._looks = TaskThread("resiliency-look")

    def ask(self, member: Attach, step: int) -> CommitLookup:
        storage = LocalStorage(member.settings.local_directory)
        look = self._looks.submit(lambda: committed_save(storage, step))
        return CommitLookup(look, member.attempt_id, step, member.settings.save_timeout_s)

    def close(self) -> None:
        """Leave the thread behind if its disk hangs; it keeps nobody."""
        self._looks.close()
