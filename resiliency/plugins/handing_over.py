# SPDX-License-Identifier: Apache-2.0
"""Local checkpoints of a NeMo job handed over to GKE's multi-tier replicator, and taken back at a start.

The protocol is told in `resiliency.checkpoint.high_scale`.  Here is when it is spoken: the replicators are
met before the checkpoint process starts, for they clean the volume; and a step is handed over once it is
complete on all hosts, at the end of a later step of training.  A thread does it: what it takes to rename a
checkpoint in a volume, and to make that durable, training does not wait for.  Nothing that goes wrong then
ends training: what was not handed over stays in the local tier, and the log says why.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from datetime import timedelta

from resiliency.checkpoint.agreement import Agreement
from resiliency.checkpoint.high_scale import TIMEOUT, Replicator, meet_replicators
from resiliency.checkpoint.replicated_job import ReplicatedJob
from resiliency.checkpoint.saves import FINAL, SaveHandle
from resiliency.checkpoint.tiers import TierName
from resiliency.errors import ResiliencyError

logger = logging.getLogger(__name__)

#: At the end of a training: until the last step is complete on all hosts, and until it is handed over.
_LAST_STEP = timedelta(seconds=60)
#: When a training ends by an error: until the thread has put aside what it is at.
_STOP = timedelta(seconds=10)
#: Saves that are followed: of older ones nobody is told that they became complete.
_FOLLOWED = 16
#: At the end: between two looks at a step that is in use.
_AGAIN_S = 0.5


class HandingOver:
    """What one rank does about it: the first of each host talks to the replicator, the others take part
    where all must.

    Args:
        job: as the replicator is told; its directory is the local tier's.
        is_first: of its host.
        timeout: longest wait for the replicator at a start, for each of its two answers.
        end_timeout: longest wait at the end of a training for the last step to be complete, and as long
            once more for it to be handed over.
    """

    def __init__(
        self,
        job: ReplicatedJob,
        *,
        is_first: bool,
        timeout: timedelta = TIMEOUT,
        end_timeout: timedelta = _LAST_STEP,
    ) -> None:
        self.job = job
        self._timeout = timeout
        self._end_timeout = end_timeout
        self._replicator = Replicator(job) if is_first else None
        self._courier: _Courier | None = None

    def __deepcopy__(self, memo: object) -> HandingOver:
        # NeMo's trainer copies its plugins, to record them; a copy speaks for the same host.
        return self

    def meet(self) -> None:
        """Announce this start, and wait for what the replicators bring back; collective.

        Raises:
            ReplicatorError, PeerError: on all ranks; a replicator did not do its part.
        """
        self.stop()
        step = meet_replicators(self._replicator, Agreement.of_process_group(), timeout=self._timeout)
        if self._replicator is None:
            return
        if step is not None:
            logger.info("the replicators brought back step %d", step)
        self._courier = _Courier(self._replicator)

    @property
    def waiting(self) -> list[int]:
        """Steps that were saved, are not handed over, and still may be."""
        return [] if self._courier is None else self._courier.waiting

    def saved(self, handle: SaveHandle) -> None:
        """A save has begun."""
        if self._courier is not None and TierName.LOCAL.value in handle.record.tiers:
            self._courier.follow(handle)

    def step_done(self) -> None:
        """A step of training has ended: let that be handed over which is complete; waits for nothing."""
        if self._courier is not None:
            self._courier.look()

    def finish(self) -> None:
        """Hand over the last step of a training."""
        courier, self._courier = self._courier, None
        if courier is None:
            return
        courier.wait_for_last(self._end_timeout)
        ended = courier.close(self._end_timeout, last_look=True)
        if courier.waiting:
            why = "in use, or not complete on all hosts" if ended else f"{self.job.directory} does not answer"
            logger.error("steps %s were not handed over: %s", courier.waiting, why)

    def stop(self) -> None:
        """Hand over nothing any more, and wait for nothing but what is being handed over just now."""
        courier, self._courier = self._courier, None
        if courier is not None and not courier.close(_STOP, last_look=False):
            logger.error("a step is still being handed over: %s does not answer", self.job.directory)


class _Courier:
    """Hands over in a thread what training tells it to follow."""

    def __init__(self, replicator: Replicator) -> None:
        self._replicator = replicator
        #: By step.
        self._followed: dict[int, SaveHandle] = {}
        self._changed = threading.Condition()
        self._is_asked = self._is_closed = self._is_stopped = False
        #: Until when steps in use are asked for again once it is closed.
        self._until = 0.0
        self._thread = threading.Thread(target=self._run, name="resiliency-hand-over", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> list[int]:
        with self._changed:
            return sorted(self._followed)

    def follow(self, handle: SaveHandle) -> None:
        with self._changed:
            self._followed[handle.step] = handle
            # Never a complete one: other hosts hand it over, and the replicators wait for each other.
            older = sorted(self._followed)[:-_FOLLOWED]
            self._drop([step for step in older if not self._followed[step].record.complete])

    def look(self) -> None:
        """Hand over what is complete by now, soon."""
        with self._changed:
            self._is_asked = True
            self._changed.notify()

    def wait_for_last(self, timeout: timedelta) -> None:
        """Wait until the newest save is complete on all hosts, or can not become so any more."""
        with self._changed:
            newest = max(self._followed, default=None)
            handle = None if newest is None else self._followed[newest]
        if handle is not None:
            handle.wait_complete(timeout)

    def close(self, timeout: timedelta, *, last_look: bool) -> bool:
        """End the thread; False if it did not end in time."""
        with self._changed:
            self._is_asked, self._is_closed, self._is_stopped = last_look, True, not last_look
            self._until = time.monotonic() + timeout.total_seconds() - _AGAIN_S
            self._changed.notify()
        self._thread.join(timeout.total_seconds())
        return not self._thread.is_alive()

    # --- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._await_question():
            try:
                self._hand_over_complete()
            except Exception:  # the border of this thread: the next look may fare better
                logger.exception("handing over to the replicator failed")

    def _await_question(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._is_asked or self._is_closed)
            asked, self._is_asked = self._is_asked, False
            if asked or self._is_stopped:
                return asked
            left = any(handle.record.complete for handle in self._followed.values())
            return (
                left
                and time.monotonic() < self._until
                and not self._changed.wait_for(lambda: self._is_stopped, _AGAIN_S)
            )

    def _hand_over_complete(self) -> None:
        """Each of the steps that are complete on all hosts, in order: all hosts must hand over the same, and
        may learn of several at once.
        """
        for step in self._complete():
            if self._is_stopped:
                return
            try:
                if not self._replicator.hand_over(step):
                    logger.debug("step %d is in use: it is handed over after the next step", step)
                    return
            # Training goes on whatever is wrong with the volume.
            except (ResiliencyError, OSError) as error:
                logger.error("step %d was not handed over: %s", step, error)
                gone = [step]
            else:
                # What was overtaken is not worth handing over, and would come out of order.
                gone = [older for older in self.waiting if older <= step]
            with self._changed:
                self._drop(gone)

    def _complete(self) -> list[int]:
        with self._changed:
            self._drop([step for step, handle in self._followed.items() if _is_lost(handle)])
            return sorted(step for step, handle in self._followed.items() if handle.record.complete)

    def _drop(self, steps: Iterable[int]) -> None:
        for step in steps:
            self._followed.pop(step, None)


def _is_lost(handle: SaveHandle) -> bool:
    """Whether a save has ended without this host's part of it, and so never becomes complete."""
    record = handle.record
    return not record.complete and record.state in FINAL and TierName.LOCAL.value not in record.committed_in
