# SPDX-License-Identifier: Apache-2.0
"""The end of a job that is told to end: all ranks save the step at which they stop, and leave.

Where they stop is agreed by `resiliency.checkpoint.stop.termination`; this is what they do there.

A save of that step may have been begun before, and have failed on some ranks while others still wait for
it.  If each rank tried again as soon as it knows, some would wait for the others until the deadline, in
vain.  So all wait for the end of what is under way, tell each other what became of it, and then try again
together or not at all.  When a rank is gone, or has not heard of its save by the deadline, not at all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from datetime import timedelta
from enum import Enum

from resiliency.checkpoint.names import TierName
from resiliency.checkpoint.ranks import RankGroup
from resiliency.checkpoint.stop.termination import Terminated, Termination, TerminationOptions
from resiliency.checkpoint.trainer.handles import FINAL, SaveHandle, await_tiers
from resiliency.checkpoint.trainer.saver import Saver
from resiliency.events import EventType
from resiliency.runtime import awake_s

logger = logging.getLogger(__name__)

#: Of the time that is left: how much of it a rank waits to hear of its own save.
_OWN_SHARE = 0.8


class CommonEnd:
    """One rank's part in it.  Made by all ranks alike, in their main threads.

    Args:
        emit: reports events, from any thread.
        lift_bandwidth_cap: has the agent write what is captured at full speed.
        flush: brings events home, when the process is about to be ended.
        close: closes the checkpointer; ``finished=False``: without waiting for anything.
    Raises:
        ConfigError: see `Termination`.
    """

    def __init__(
        self,
        rank_group: RankGroup,
        options: TerminationOptions,
        saver: Saver,
        *,
        emit: Callable[..., None],
        lift_bandwidth_cap: Callable[[], None],
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
            lift_bandwidth_cap()

        self._termination = Termination(rank_group, options, on_request=begin, on_leave=lambda why: flush())

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

    def went_on_from(self, step: int) -> None:
        """See `Termination.went_on_from`."""
        self._termination.went_on_from(step)

    def leaving(self) -> None:
        """See `Termination.leaving`."""
        self._termination.leaving()

    def close(self, *, finished: bool) -> None:
        """See `Termination.close`."""
        self._termination.close(finished=finished)

    def _end(self, step: int, state: object) -> None:
        termination = self._termination
        known = self._save(step, state)
        handles = list(dict.fromkeys(self._saver.tried(step).values()))
        seen = await_tiers(handles, termination.time_left)
        tiers = list(dict.fromkeys([*seen, *known]))
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
        self._close(finished=bool(seen) and all(handle.state in FINAL for handle in handles), stopped=True)
        raise terminated

    def _save(self, step: int, state: object) -> tuple[str, ...]:
        """Have all tiers try the step, and once more where that had failed; all ranks alike.

        Returns:
            The tiers that are known to have it, also where this rank was not told.
        """
        saver, termination = self._saver, self._termination
        tried = saver.tried(step)
        untried = tuple(tier for tier in saver.tiers if tier not in tried)
        if untried:
            saver.save(step, state, tiers=tuple(map(TierName, untried)), wait=termination.time_left())
        if not tried:
            return ()
        timeouts = termination.time_left() * _OWN_SHARE  # the rest is for telling each other
        until = awake_s() + timeouts.total_seconds()
        for handle in tried.values():
            handle.wait(timedelta(seconds=max(0.0, until - awake_s())))
        outcomes = {tier: outcome_of(tier, handle) for tier, handle in tried.items()}
        found = termination.collect(f"{tier}:{outcome.value}" for tier, outcome in outcomes.items())
        if found is None:
            if SaveOutcome.FAILED in outcomes.values():
                logger.warning("step %d is not saved again: not all ranks say what became of it", step)
            return ()
        again = tuple(tier for tier in tried if is_to_be_tried_again(tier, found))
        if again:
            logger.warning("step %d is saved again (%s): the first try failed", step, " and ".join(again))
            saver.begin(step, state, again, wait=termination.time_left())
        return tuple(tier for tier in tried if f"{tier}:{SaveOutcome.COMMITTED.value}" in found)


class SaveOutcome(Enum):
    """What one rank knows of a save in one tier."""

    COMMITTED = "committed"  # all ranks could restore it
    HERE = "here"  # this host has committed its part
    FAILED = "failed"
    OPEN = "open"


def outcome_of(tier: str, handle: SaveHandle) -> SaveOutcome:
    record = handle.record
    if tier in record.committed_in:
        # A commit is one of all ranks in the persistent tier alone.
        return (
            SaveOutcome.COMMITTED
            if tier == TierName.PERSISTENT.value or record.complete
            else SaveOutcome.HERE
        )
    return SaveOutcome.FAILED if record.state in FINAL else SaveOutcome.OPEN


def is_to_be_tried_again(tier: str, found: Collection[str]) -> bool:
    """Whether all ranks try again to save to `tier`.

    Not if one of them knows that it is done: then the others have only not been told.  Not while it may
    still succeed.  In the local tier hosts that have their part hear at once that they have it.

    Args:
        found: by any rank, as ``tier:fate``.
    """
    outcomes = {
        SaveOutcome(outcome) for name, _, outcome in (word.partition(":") for word in found) if name == tier
    }
    return SaveOutcome.FAILED in outcomes and not outcomes & {SaveOutcome.COMMITTED, SaveOutcome.OPEN}
