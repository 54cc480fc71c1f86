# SPDX-License-Identifier: Apache-2.0
"""Local checkpoints of a NeMo job handed over to GKE's multi-tier replicator, and taken back at a start.

The protocol is told in `resiliency.checkpoint.gke.replicator`.  Here is when it is spoken: the replicators
are met before the checkpoint process starts, for they clean the volume; and a step is handed over once it
is complete on all hosts, at the end of a later step of training.  A thread does it: what it takes to rename
a checkpoint in a volume, and to make that durable, training does not wait for.  Nothing that goes wrong
then ends training, and what passes costs no step:

    an error, or a step in use    tried again until `timeouts` is over: the replicators of other hosts wait
    longer than that              given up, with an error in the log; a step in use goes despite its reader
    as long as nothing succeeds   each later step has one try: if it fails, the step is given up
    no checkpoint, no replicator  given up at once
    a replicator takes nothing    with two steps untaken the others wait; after `timeouts` the log says so

A step that waits is not deleted until too many do: the local tier gives up the oldest then.  One that was
given up stays in the local tier until newer ones take its place.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from datetime import timedelta

from resiliency.checkpoint.gke.replicated_job import ReplicatedJob
from resiliency.checkpoint.gke.replicator import (
    TIMEOUT,
    NotHandedOver,
    Replicator,
    ReplicatorBusy,
    StepGivenUp,
    meet_replicators,
)
from resiliency.checkpoint.names import TierName
from resiliency.checkpoint.ranks import RankGroup
from resiliency.checkpoint.storage.interface import Storage
from resiliency.checkpoint.trainer.handles import FINAL, SaveHandle
from resiliency.errors import ConfigError, ResiliencyError

logger = logging.getLogger(__name__)

#: At the end of a training: until the last step is complete on all hosts, and until it is handed over.
_LAST_STEP = timedelta(seconds=60)
#: When a training ends by an error: until the thread has put aside what it is at.
_STOP = timedelta(seconds=10)
#: Saves that are followed: of older ones nobody is told that they became complete.
_FOLLOWED = 16
#: How long nothing may be handed over before steps are given up.
WAIT = timedelta(minutes=10)
#: Between two tries at a step that waits; twice as long each time, but not at the end.
_AGAIN_S = 0.5
_LONGEST_PAUSE_S = 10.0


class HandOff:
    """What one rank does about it: the first of each host talks to the replicator, the others take part
    where all must.

    Args:
        job: as the replicator is told; its directory is the local tier's.
        is_first: of its host.
        timeout: longest wait for the replicator at a start, for each of its two answers.
        end_timeout: longest wait at the end of a training for the last step to be complete, and as long
            once more for it to be handed over.
        timeouts: how long nothing may be handed over before steps are given up.
        backlog: generations beyond the local tier's `keep` that may wait; the oldest is given up for another.
        storage: that directory, for tests.
    """

    def __init__(
        self,
        job: ReplicatedJob,
        *,
        is_first: bool,
        timeout: timedelta = TIMEOUT,
        end_timeout: timedelta = _LAST_STEP,
        timeouts: timedelta = WAIT,
        backlog: int = 4,
        storage: Storage | None = None,
    ) -> None:
        if backlog < 1:
            raise ConfigError(f"at least 1 step must be able to wait for its hand-over, found {backlog}.")
        self.job = job
        self.backlog = backlog
        #: Steps of this start that were given up.
        self.given_up: list[int] = []
        self._timeout = timeout
        self._end_timeout = end_timeout
        self._timeouts = timeouts
        self._replicator = Replicator(job, storage=storage) if is_first else None
        self._hand_off: _HandOffThread | None = None

    def __deepcopy__(self, memo: object) -> HandOff:
        # NeMo's trainer copies its plugins, to record them; a copy speaks for the same host.
        return self

    def meet(self) -> None:
        """Announce this start, and wait for what the replicators bring back; collective.

        Raises:
            ReplicatorError, PeerError: on all ranks; a replicator did not do its part.
        """
        self.stop()
        step = meet_replicators(self._replicator, RankGroup.of_process_group(), timeout=self._timeout)
        if self._replicator is None:
            return
        if step is not None:
            logger.info("the replicators brought back step %d", step)
        self.given_up = []
        self._hand_off = _HandOffThread(self._replicator, self._timeouts, self.given_up)

    @property
    def waiting(self) -> list[int]:
        """Steps that were saved, are not handed over, and still may be."""
        return [] if self._hand_off is None else self._hand_off.waiting

    def saved(self, handle: SaveHandle) -> None:
        """A save has begun."""
        if self._hand_off is not None and TierName.LOCAL.value in handle.record.tiers:
            self._hand_off.follow(handle)

    def step_done(self) -> None:
        """A step of training has ended: let that be handed over which is complete; waits for nothing."""
        if self._hand_off is not None:
            self._hand_off.look()

    def finish(self) -> None:
        """Hand over the last step of a training."""
        hand_off, self._hand_off = self._hand_off, None
        if hand_off is None:
            return
        hand_off.wait_for_last(self._end_timeout)
        ended = hand_off.close(self._end_timeout, last_look=True)
        if hand_off.waiting:
            why = hand_off.trouble or "not complete on all hosts"
            if not ended:
                why = f"{self.job.directory} does not answer"
            logger.error("steps %s were not handed over: %s", hand_off.waiting, why)

    def stop(self) -> None:
        """Hand over nothing any more, and wait for nothing but what is being handed over just now."""
        hand_off, self._hand_off = self._hand_off, None
        if hand_off is not None and not hand_off.close(timedelta(), last_look=False):
            logger.error("a step is still being handed over: %s does not answer", self.job.directory)


class _HandOffThread:
    """Hands over in a thread what training tells it to follow.

    Args:
        given_up: takes the steps that are.
    """

    def __init__(self, replicator: Replicator, timeouts: timedelta, given_up: list[int]) -> None:
        self._replicator = replicator
        self._wait_s = timeouts.total_seconds()
        self._given_up = given_up
        #: Why the oldest complete step waits; empty: it does not.
        self.trouble = ""
        #: Since when nothing could be handed over; used by the thread alone, as are the next ones.
        self._held_up_since: float | None = None
        #: The oldest step that the replicator has not taken, since when, and whether the log has it.
        self._untaken: int | None = None
        self._untaken_since = 0.0
        self._is_stall_reported = False
        #: Steps given up of which the local tier does not know it yet.
        self._unnoted: set[int] = set()
        self._pause_s = 0.0
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
        # Its last try begins within the timeout; a busy machine takes longer than that over it.
        self._thread.join((timeout + _STOP).total_seconds())
        return not self._thread.is_alive()

    # --- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._await_question():
            try:
                is_done = self._hand_over_complete()
            except Exception:  # the border of this thread: the next look may fare better
                logger.exception("handing over to the replicator failed")
                is_done = False
            self._pause_s = 0.0 if is_done else min(max(2 * self._pause_s, _AGAIN_S), _LONGEST_PAUSE_S)

    def _await_question(self) -> bool:
        with self._changed:
            # Steps of training may be short: they do not shorten the pause before another try.
            if self._pause_s and not self._changed.wait_for(lambda: self._is_closed, self._pause_s):
                return True
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

    def _hand_over_complete(self) -> bool:
        """Each of the steps that are complete on all hosts, in order: all hosts must hand over the same, and
        may learn of several at once.  False: something is to be tried again.
        """
        for step in self._complete():
            if self._is_stopped:
                break
            if not self._is_dealt_with(step):
                return False
        self._note_given_up()
        return not self._unnoted

    def _is_dealt_with(self, step: int) -> bool:
        """Try to hand a step over; False if it is to be tried again, before any newer one."""
        now = time.monotonic()
        is_late = self._held_up_since is not None and now - self._held_up_since >= self._wait_s
        try:
            if self._replicator.hand_over(step, despite_readers=is_late):
                self._held_up_since, self.trouble, self._pause_s = None, "", 0.0
                if self._is_stall_reported:
                    logger.info("the replicator takes steps again")
                self._untaken, self._is_stall_reported = None, False
                # What was overtaken is not worth handing over, and would come out of order.
                with self._changed:
                    self._drop([older for older in self._followed if older <= step])
                return True
            self.trouble = f"step {step} is in use"
        except StepGivenUp as error:
            logger.warning("%s", error)
            self._given_up.append(step)
            with self._changed:
                self._drop([step])
            return True
        except ReplicatorBusy as error:
            self.trouble, self._held_up_since = str(error), None
            self._note_untaken(error, now)
            return False
        except NotHandedOver as error:
            self.trouble = str(error)
        except ResiliencyError as error:  # training goes on whatever is wrong with the volume
            self._give_up(step, str(error))
            return True
        if is_late:
            self._give_up(step, f"nothing could be handed over for {self._wait_s:g} s: {self.trouble}")
            return True
        if self._held_up_since is None:
            self._held_up_since = now
            logger.warning("%s; it is tried again for %g s", self.trouble, self._wait_s)
        return False

    def _note_untaken(self, error: ReplicatorBusy, now: float) -> None:
        untaken = error.fields["untaken"]
        assert isinstance(untaken, list)
        if untaken[0] != self._untaken:
            self._untaken, self._untaken_since = untaken[0], now
        elif not self._is_stall_reported and now - self._untaken_since >= self._wait_s:
            self._is_stall_reported = True
            logger.error(
                "the replicator has taken nothing for %g s: steps %s lie in the volume.  Newer ones stay in"
                " the local tier, which gives up the oldest of them, until it goes on or the job is started"
                " again.  It may wait for the replicator of another host, which did not get a step.",
                *(self._wait_s, untaken),
            )

    def _give_up(self, step: int, why: str) -> None:
        logger.error(
            "step %d was not handed over and is given up: %s  It stays in the local tier of this host until"
            " newer ones take its place.  Replicators of hosts that handed it over wait for it until the job"
            " is started again.",
            *(step, why),
        )
        self._given_up.append(step)
        self._unnoted.add(step)
        with self._changed:
            self._drop([step])

    def _note_given_up(self) -> None:
        """Let the local tier delete what was given up."""
        for step in sorted(self._unnoted):
            try:
                self._replicator.give_up(step)
            except (ResiliencyError, OSError) as error:
                logger.debug("that step %d was given up could not be noted: %s", step, error)
                return
            self._unnoted.discard(step)

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
