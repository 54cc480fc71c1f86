# SPDX-License-Identifier: Apache-2.0
"""Local checkpoints of a NeMo job handed over to GKE's multi-tier replicator, and taken back at a start.

The protocol is told in `resiliency.checkpoint.high_scale`.  Here is when it is spoken: the replicators are
met before the checkpoint process starts, for they clean the volume; and a step is handed over once it is
complete on all hosts, at the end of a later step of training.  Nothing that goes wrong then ends training:
what was not handed over stays in the local tier, and the log says why.
"""

from __future__ import annotations

import logging
from datetime import timedelta

from resiliency.checkpoint.agreement import Agreement
from resiliency.checkpoint.high_scale import TIMEOUT, Replicator, meet_replicators
from resiliency.checkpoint.replicated_job import ReplicatedJob
from resiliency.checkpoint.saves import SaveHandle
from resiliency.errors import CheckpointError, PeerError

logger = logging.getLogger(__name__)

#: At the end of a training: until the last step is complete on all hosts.
_LAST_STEP = timedelta(seconds=60)


class HandingOver:
    """What one rank does about it: the first of each host talks to the replicator, the others take part
    where all must.

    Args:
        job: as the replicator is told; its directory is the local tier's.
        is_first: of its host.
        timeout: longest wait for the replicator at a start, for each of its two answers.
    """

    def __init__(self, job: ReplicatedJob, *, is_first: bool, timeout: timedelta = TIMEOUT) -> None:
        self.job = job
        self._timeout = timeout
        self._replicator = Replicator(job) if is_first else None
        self._waiting: list[SaveHandle] = []

    def meet(self) -> None:
        """Announce this start, and wait for what the replicators bring back; collective.

        Raises:
            ReplicatorError, PeerError: on all ranks; a replicator did not do its part.
        """
        step = meet_replicators(self._replicator, Agreement.of_process_group(), timeout=self._timeout)
        if self._replicator is not None and step is not None:
            logger.info("the replicators brought back step %d", step)

    def saved(self, handle: SaveHandle) -> None:
        """A save to the local tier has begun."""
        if self._replicator is not None:
            self._waiting.append(handle)

    def hand_over_complete(self) -> None:
        """Hand over the steps that are complete on all hosts: each of them, for all hosts must hand over the
        same, and may learn of several at once.
        """
        if self._replicator is None:
            return
        for handle in [handle for handle in self._waiting if handle.record.complete]:
            try:
                if not self._replicator.hand_over(handle.step):
                    return  # in use: once more after the next step
            except (CheckpointError, PeerError) as error:
                logger.error("step %d was not handed over: %s", handle.step, error)
            self._waiting.remove(handle)

    def finish(self) -> None:
        """Hand over the last step of a training."""
        if self._waiting:
            self._waiting[-1].wait_complete(_LAST_STEP)
        self.hand_over_complete()
