# SPDX-License-Identifier: Apache-2.0
"""What agents before this one committed in the local tier, asked of a disk that may be slow, or hang.

The agent's main thread asks, which must not wait: ranks take an agent that says nothing for hung.  So another
thread looks, and the answer is taken whenever it is there, until a save would have been given up, too.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass

from resiliency.checkpoint.agent.jobs import JobKey
from resiliency.checkpoint.agent.protocol import Attach
from resiliency.checkpoint.commit.retention import committed_save
from resiliency.checkpoint.names import TierTry, save_id_of
from resiliency.checkpoint.storage.posix import LocalStorage
from resiliency.checkpoint.threads import TaskThread
from resiliency.errors import CheckpointError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class CommitLookup:
    """The question whether one try is committed already.  `until`: when to stop asking, monotonic, in s."""

    member: Attach
    tried: TierTry
    look: Future[str | None]
    until: float


class CommitLookups:
    """The questions that are open.  For one thread, which never waits here."""

    def __init__(self) -> None:
        self._looks = TaskThread("resiliency-look")
        self._open: dict[JobKey, CommitLookup] = {}

    def ask(self, member: Attach, tried: TierTry) -> None:
        """Whether this session has committed a step, by any try; nothing new if that is asked already."""
        key = (member.session, tried)
        if key in self._open:
            return
        storage = LocalStorage(member.settings.local_directory)
        self._open[key] = CommitLookup(
            member=member,
            tried=tried,
            look=self._looks.submit(lambda: committed_save(storage, tried.step)),
            until=time.monotonic() + member.settings.save_timeout_s,
        )

    def is_open(self, key: JobKey) -> bool:
        return key in self._open

    def drop(self, key: JobKey) -> None:
        """Whatever the answer, nobody needs it."""
        self._open.pop(key, None)

    def drop_all(self) -> None:
        self._open.clear()

    def take_answered(self) -> Iterator[tuple[CommitLookup, bool]]:
        """Those that have their answer, or get none, which counts as no."""
        now = time.monotonic()
        for key, lookup in list(self._open.items()):
            if lookup.look.done() or now >= lookup.until:
                self.drop(key)
                yield lookup, _is_there(lookup)

    def close(self) -> None:
        """Leave the thread behind if its disk hangs; it keeps nobody."""
        self._looks.close()


def _is_there(lookup: CommitLookup) -> bool:
    if not lookup.look.done():
        logger.error(
            "the local tier does not answer: whether an earlier agent committed step %d is not known",
            lookup.tried.step,
        )
        return False
    try:
        return lookup.look.result() == save_id_of(lookup.member.session, lookup.tried.step)
    except CheckpointError as error:
        logger.warning("the local tier cannot be looked at: %s", error)
        return False
