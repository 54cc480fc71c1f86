# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint a job goes back to when its loss is not finite: ``--on-nan rollback``.

The newest checkpoint may hold the damage, so the job goes on from one before it.  If the loss fails again and
no step was finished beyond the first failure, the next attempt goes back one more.  What the job has left is
never restored by itself again: saves are of a branch of their own then (`resiliency.checkpoint.branches`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from resiliency.launch.health.causes import Advice, Cause, Diagnosis
from resiliency.rank.checkpoint_steps import CheckpointSteps


def with_rollback(
    diagnosis: Diagnosis, checkpoints: CheckpointSteps | None, history: Sequence[Diagnosis]
) -> Diagnosis:
    """`diagnosis`, with the branch from which the job goes on if its loss was not finite.

    Args:
        checkpoints: of the attempt that failed.
        history: of earlier attempts of this run, oldest first.
    """
    if diagnosis.cause is not Cause.NAN or diagnosis.signature.startswith("CheckpointMissing"):
        return diagnosis
    if checkpoints is None:
        return replace(
            diagnosis,
            advice=Advice.STOP,
            sentence=f"{diagnosis.sentence}; there is no older checkpoint to go back to",
        )
    before = checkpoints.newest
    last = next((one for one in reversed(history) if one.rollback is not None), None)
    if last is not None and checkpoints.restored is not None and not _is_beyond(diagnosis, last):
        before = checkpoints.restored
    return replace(
        diagnosis,
        advice=Advice.RESTART,
        rollback=(checkpoints.branch + 1, checkpoints.branch, before - 1),
        sentence=f"{diagnosis.sentence}; the job goes back to a checkpoint before step {before}",
    )


def _is_beyond(diagnosis: Diagnosis, last: Diagnosis) -> bool:
    """Whether the loss failed at a later step than it did before the last rollback."""
    here, there = diagnosis.error_step, last.error_step
    return here is not None and there is not None and here > there
