# SPDX-License-Identifier: Apache-2.0
"""The end of a job that is told to end: all ranks save the step at which they stop, and leave.

Where they stop is agreed by `resiliency.checkpoint.termination`; this is what they do there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta

from resiliency.checkpoint.agreement import Agreement
from resiliency.checkpoint.saver import Saver
from resiliency.checkpoint.saves import FINAL, await_tiers
from resiliency.checkpoint.termination import Terminated, Termination, TerminationOptions
from resiliency.events import EventType

logger = logging.getLogger(__name__)


class CommonEnd:
    """One rank's part in it.  Made by all ranks alike, in their main threads.

    Args:
        emit: reports events, from any thread.
        hurry: has the agent write what is captured at full speed.
        flush: brings events home, when the process is about to be ended.
        close: closes the checkpointer; ``finished=False``: without waiting for anything.
    Raises:
        ConfigError: see `Termination`.
    """

    def __init__(
        self,
        agreement: Agreement,
        options: TerminationOptions,
        saver: Saver,
        *,
        emit: Callable[..., None],
        hurry: Callable[[], None],
        flush: Callable[[], None],
        close: Callable[..., None],
    ) -> None:
        self._saver = saver
        self._emit = emit
        self._close = close
        deadline_s = options.deadline.total_seconds()

        def begin(cause: str) -> None:
            emit(EventType.STOP_REQUESTED, cause=cause, deadline_s=deadline_s)
            # Now, and not with the last save: it may need the slots of those under way.
            hurry()

        self._termination = Termination(agreement, options, on_request=begin, on_leave=lambda why: flush())

    @property
    def requested(self) -> bool:
        """See `Termination.requested`."""
        return self._termination.requested

    def request(self) -> None:
        """See `Termination.request`."""
        self._termination.request()

    def time_left(self, *, otherwise: timedelta) -> timedelta:
        """Until the deadline; `otherwise` if no end was asked for."""
        return self._termination.time_left() if self.requested else otherwise

    def boundary(self, step: int, state: object) -> None:
        """Say that `step` steps are done; if all ranks stop here, save it, wait for its commit and close.

        Raises:
            Terminated: the job ends.
        """
        try:
            if not self._termination.boundary(step):
                return
        except Terminated:
            self._close(finished=False)
            raise
        self._end(step, state)

    def leaving(self) -> None:
        """See `Termination.leaving`."""
        self._termination.leaving()

    def close(self, *, finished: bool) -> None:
        """See `Termination.close`."""
        self._termination.close(finished=finished)

    def _end(self, step: int, state: object) -> None:
        termination = self._termination
        self._saver.save(step, state, wait=termination.time_left())
        handles = list(dict.fromkeys(self._saver.newest.values()))
        tiers = await_tiers(handles, termination.time_left)
        terminated = termination.terminated(step, committed=bool(tiers))
        if tiers:
            logger.warning(
                "step %d is committed (%s); %s ends this rank", step, " and ".join(tiers), terminated.cause
            )
            self._emit(EventType.RANK_FINISHED, step, cause=terminated.cause)
        else:
            why = "; ".join(handle.record.why for handle in handles if handle.record.why)
            logger.error(
                "step %d is not committed (%s); it is left to the agent", step, why or "the deadline is over"
            )
        self._close(finished=bool(tiers) and all(handle.state in FINAL for handle in handles))
        raise terminated
