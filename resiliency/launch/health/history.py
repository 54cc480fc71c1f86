# SPDX-License-Identifier: Apache-2.0
"""The two rules over attempts: a failure that repeats, and attempts that bring nothing.

Nothing else of an earlier attempt counts.  Both rules only ever end a job; cause and culprits remain those
of the attempt itself.  A mistake that no restart should mend is tried once more all the same: a disk that was
away for a moment looks like it.

A budget of attempts refills with progress, and an attempt that was preempted or lost a host takes nothing
from it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from resiliency.launch.health.causes import Advice, Cause, DecidedBy, Diagnosis
from resiliency.launch.health.evidence import RankDeath, signal_name

#: Attempts without progress after which a job ends, unless it is told otherwise.
ATTEMPTS_WITHOUT_PROGRESS = 3
#: An attempt without a known step that ran longer may have trained: its script may report none.
SETUP_S = 900.0
#: Ends that come from outside of the program: that they repeat at a step is chance.
FROM_OUTSIDE = frozenset(
    {
        *(Cause.PREEMPTED, Cause.KILLED, Cause.PEER_LOST, Cause.HOST_LOST, Cause.PORT_TAKEN, Cause.UNKNOWN),
        *(Cause.GPU_FAULT, Cause.GPU_MISSING, Cause.IO_ERROR, Cause.HANG),
    }
)
#: Ends that are no failures of the job: they cost nothing.
FREE = frozenset({Cause.PREEMPTED, Cause.HOST_LOST})
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+|\b[0-9a-fA-F]{8,}\b")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


def mask(text: str) -> str:
    """`text` without what differs from attempt to attempt: addresses, ports, process ids, sizes."""
    return _NUMBER.sub("#", _ADDRESS.sub("@", text))


def signature_of(death: RankDeath) -> str:
    """Type and place of the error.  The rank is no part of it: a bad sample shuffles to another one."""
    error = death.error
    if error is None:
        return signal_name(death.signal) if death.signal else f"exit code {death.exit_code}"
    place = error.user_frame or mask(error.message.partition("\n")[0])
    return f"{error.name} at {place}" if error.user_frame else f"{error.name}: {place}"


def with_history(diagnosis: Diagnosis, history: Sequence[Diagnosis], limit: int) -> Diagnosis:
    """`diagnosis`, with the advice STOP where a rule over attempts says so.

    Args:
        history: of earlier attempts of this run, oldest first.
        limit: attempts without progress after which the job ends; 0: never for that reason.
    """
    if diagnosis.cause in FREE:
        return diagnosis
    if diagnosis.advice is Advice.STOP and not _was_asked_for(diagnosis):
        for one in history:
            same = (one.cause, one.signature) == (diagnosis.cause, diagnosis.signature)
            if same and _or(diagnosis.step) <= _or(one.step) + 1:  # by one, ranks of a host may differ
                return _stop(
                    diagnosis, DecidedBy.DETERMINISTIC, f"attempt {one.attempt} ended in the same way"
                )
        diagnosis = replace(diagnosis, advice=Advice.RESTART)
    if diagnosis.advice is Advice.STOP:
        return diagnosis
    # From an older checkpoint an error need not repeat.
    if diagnosis.rollback is None and (before := _same_error(diagnosis, history)) is not None:
        return _stop(
            diagnosis,
            DecidedBy.DETERMINISTIC,
            f"attempt {before.attempt} ended at this step in the same way: a restart would repeat it",
        )
    if 0 < limit <= attempts_without_progress([*history, diagnosis]):
        return _stop(
            diagnosis,
            DecidedBy.NO_PROGRESS,
            f"{limit} attempts brought no new step and no new checkpoint",
        )
    return diagnosis


def attempts_without_progress(diagnoses: Sequence[Diagnosis]) -> int:
    """How many attempts have failed since the last one that got further than all before it."""
    count, step, checkpoint = 0, -1, -1
    for diagnosis in diagnoses:
        long = diagnosis.uptime_s is None or diagnosis.uptime_s > SETUP_S
        further = _or(diagnosis.step) > step or _or(diagnosis.checkpoint) > checkpoint
        step, checkpoint = max(step, _or(diagnosis.step)), max(checkpoint, _or(diagnosis.checkpoint))
        if further or (long and diagnosis.step is None):
            count = 0
        # The attempt that got further has failed, too, but it is the next one that has to show something.
        elif diagnosis.cause not in FREE:
            count += 1
    return count


def _same_error(diagnosis: Diagnosis, history: Sequence[Diagnosis]) -> Diagnosis | None:
    """An earlier attempt that ended with the same error at the same step; unknown steps are not the same.

    An attempt after it that passed the step refutes it.
    """
    if diagnosis.error_step is None or not diagnosis.signature or diagnosis.cause in FROM_OUTSIDE:
        return None
    key = (diagnosis.cause, diagnosis.signature, diagnosis.error_step)
    for one in reversed(history):
        if _or(one.step) > diagnosis.error_step + 1:  # by one, ranks of a host may differ
            return None
        if (one.cause, one.signature, one.error_step) == key:
            return one
    return None


def _was_asked_for(diagnosis: Diagnosis) -> bool:
    """Whether --on-nan ended the attempt, or what it goes back to is missing; a restart changes neither."""
    return diagnosis.signature.startswith(("LossNotFinite", "CheckpointMissing"))


def _or(count: int | None) -> int:
    return -1 if count is None else count


def _stop(diagnosis: Diagnosis, decided_by: DecidedBy, why: str) -> Diagnosis:
    sentence = f"{diagnosis.sentence}; {why}"
    return replace(diagnosis, advice=Advice.STOP, decided_by=decided_by, sentence=sentence)
