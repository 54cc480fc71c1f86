# SPDX-License-Identifier: Apache-2.0
"""The rules over attempts: an error that comes again, attempts that bring nothing, and pauses between them.

Nothing else of an earlier attempt counts; cause and culprits remain those of the attempt itself.  A job only
ends for a cause of its own (`OWN`): what comes from outside may last for hours and be over then, and a signal
or an exit code without a word leaves open where it comes from.

An attempt that finished a step beyond the checkpoint from which it began is progress, whatever ended it: the
job does steps again that were lost, and is nearer to its next checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from resiliency.launch.health.causes import OWN, Advice, Cause, Confidence, DecidedBy, Diagnosis
from resiliency.launch.health.evidence import RankError

#: The attempt that ends with the same error for the so many-th time is the last one.
EQUAL_ERRORS = 3
#: An attempt without a known step that ran longer may have trained: its script may report none.
SETUP_S = 900.0
#: An attempt that ended sooner and brought nothing has ended at once; those in a row are followed by pauses.
AT_ONCE_S = 60.0
PAUSES_S = (0.0, 1.0, 2.0, 5.0, 15.0, 30.0, 60.0)
#: Of these the whole message tells what is wrong, also where no line of the program is known.
_BY_MESSAGE = frozenset({Cause.IMPORT, Cause.VERSION, Cause.TOPOLOGY, Cause.NAN})
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+|\b[0-9a-fA-F]{8,}\b")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The attempts without progress that end a job.

    Args:
        attempts: at least so many; 0: never for that reason.
        seconds: for which they ran in all, at least.
    """

    attempts: int = 3
    seconds: float = 600.0


def mask(text: str) -> str:
    """`text` without what differs from attempt to attempt: addresses, ports, process ids, sizes."""
    return _NUMBER.sub("#", _ADDRESS.sub("@", text))


def signature_of(error: RankError | None, cause: Cause) -> str:
    """Type and place of an error of the program; empty where nothing tells that it is the same one again.

    The rank is no part of it: a bad sample shuffles to another one.
    """
    if error is None or cause not in OWN:
        return ""
    if error.user_frame is not None:
        return f"{error.name} at {error.user_frame}"
    first, _, _ = error.message.partition("\n")
    return f"{error.name}: {mask(first)}" if cause in _BY_MESSAGE else ""


def with_history(diagnosis: Diagnosis, history: Sequence[Diagnosis], limits: Limits) -> Diagnosis:
    """`diagnosis`, with the advice STOP where a rule over attempts says so.

    Args:
        history: of earlier attempts of this run, oldest first.
    """
    if diagnosis.advice is Advice.STOP and _was_asked_for(diagnosis):
        return diagnosis
    if diagnosis.advice is Advice.STOP:  # what passes by itself may look the same once or twice
        diagnosis = replace(diagnosis, advice=Advice.RESTART)
    if not _is_own(diagnosis):
        return diagnosis
    known = [*history, diagnosis]
    if diagnosis.rollback is not None:  # from an older checkpoint an error need not repeat
        if 0 < limits.attempts <= (count := _vain_rollbacks(known)):
            why = f"the loss failed again after {count} rollbacks, and at no later step"
            return _stop(diagnosis, DecidedBy.NO_PROGRESS, why)
        return diagnosis
    equal = _same_error(known)
    if len(equal) >= EQUAL_ERRORS:
        others = " and ".join(str(one.attempt) for one in equal[-EQUAL_ERRORS:-1])
        why = f"attempts {others} ended at this step in the same way: a restart would repeat it"
        return _stop(diagnosis, DecidedBy.DETERMINISTIC, why)
    vain = _without_progress(known)
    spent_s = sum(one.uptime_s or 0.0 for one in vain)
    longest_s = max(one.uptime_s or 0.0 for one in known)
    if 0 < limits.attempts <= len(vain) and spent_s >= limits.seconds and spent_s > longest_s:
        why = f"{len(vain)} attempts of {spent_s / 60:.0f} minutes in all finished no new step"
        return _stop(diagnosis, DecidedBy.NO_PROGRESS, why)
    return diagnosis


def pause_after(diagnoses: Sequence[Diagnosis]) -> float:
    """Seconds before the next attempt starts: restarts that are faster than an outage are used up in it.

    Args:
        diagnoses: of this run, oldest first; the last one is of the attempt that has just ended.
    """
    count, attempt = 0, diagnoses[-1].attempt if diagnoses else 0
    earlier: list[Diagnosis | None] = [None, *diagnoses[:-1]]
    for one, before in zip(reversed(diagnoses), reversed(earlier), strict=False):
        # Lost steps that were done again up to the same failure, of a save as a rule, have mended nothing.
        advanced = one.advanced and not (before is not None and _fails_there_again(one, before))
        # One that is missing here was ended by another host, after whatever it had brought.
        if one.attempt != attempt or advanced or one.uptime_s is None or one.uptime_s > AT_ONCE_S:
            break
        attempt -= 1
        # The job waits for another host in any case.
        count += one.cause is not Cause.HOST_LOST
    return PAUSES_S[min(count, len(PAUSES_S)) - 1] if count else 0.0


def _fails_there_again(one: Diagnosis, before: Diagnosis) -> bool:
    return one.error_step is not None and (one.cause, one.error_step) == (before.cause, before.error_step)


def _is_own(diagnosis: Diagnosis) -> bool:
    """The job's own code ended the attempt, beyond a guess."""
    return diagnosis.cause in OWN and diagnosis.confidence is not Confidence.LOW


def _same_error(diagnoses: Sequence[Diagnosis]) -> list[Diagnosis]:
    """The attempts that ended as the last one, with the same error at the same step, the oldest first.

    A step that is not known is not the same; before the first step is a place, too.  An attempt that passed
    the step refutes what came before it.
    """
    last = diagnoses[-1]
    unknown = last.error_step is None and last.advanced is None and last.cause not in _BY_MESSAGE
    if not last.signature or unknown:
        return []
    equal: list[Diagnosis] = []
    for one in reversed(diagnoses):
        if _or(one.step) > _or(last.error_step) + 1:  # by one, ranks of a host may differ
            break
        if (one.cause, one.signature, one.error_step) == (last.cause, last.signature, last.error_step):
            equal.insert(0, one)
    return equal


def _without_progress(diagnoses: Sequence[Diagnosis]) -> list[Diagnosis]:
    """The attempts since the last progress that failed by a cause of their own.

    One of which nobody knows what it brought may have been progress.
    """
    vain: list[Diagnosis] = []
    for one in reversed(diagnoses):
        if one.advanced is not False:
            break
        if _is_own(one):
            vain.append(one)
    return vain


def _vain_rollbacks(diagnoses: Sequence[Diagnosis]) -> int:
    """Failures of the loss after rollbacks, since it failed at a later step than ever before."""
    count, furthest = 0, -2
    for one in diagnoses:
        if one.rollback is not None:
            count = count + 1 if _or(one.error_step) <= furthest else 0
            furthest = max(furthest, _or(one.error_step))
    return count


def _was_asked_for(diagnosis: Diagnosis) -> bool:
    """Whether --on-nan ended the attempt, or what it goes back to is missing; a restart changes neither."""
    return diagnosis.signature.startswith(("LossNotFinite", "CheckpointMissing"))


def _or(count: int | None) -> int:
    return -1 if count is None else count


def _stop(diagnosis: Diagnosis, decided_by: DecidedBy, why: str) -> Diagnosis:
    sentence = f"{diagnosis.sentence}; {why}"
    return replace(diagnosis, advice=Advice.STOP, decided_by=decided_by, sentence=sentence)
