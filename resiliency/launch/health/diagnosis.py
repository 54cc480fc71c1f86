# SPDX-License-Identifier: Apache-2.0
"""Why an attempt ended, and what to do: `diagnose`, a pure function of evidence and history.

The first death is the suspect.  Others are echoes of it: ranks whose peer is gone fail in a collective, and
the launcher ends those that are left.  The first death that is no echo counts, because a rank may notice the
loss of a peer before the launcher does.

    evidence of this attempt --> rules, one death at a time --> the suspect --> cause, culprits, advice
    diagnoses of earlier attempts --> rules over attempts (`history`) --> STOP, or nothing
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from resiliency.launch.health.causes import OWN, Advice, Cause, Confidence, DecidedBy, Diagnosis
from resiliency.launch.health.evidence import (
    Evidence,
    Frame,
    HostFacts,
    RankDeath,
    RankError,
    signal_name,
)
from resiliency.launch.health.history import SETUP_S, Limits, signature_of, with_history
from resiliency.launch.health.rollback import with_rollback
from resiliency.launch.health.rules import SHARED_MEMORY, Judgement, is_disk_fault, is_fatal_xid, judge

__all__ = [
    "Advice",
    "Cause",
    "Confidence",
    "DecidedBy",
    "Diagnosis",
    "Evidence",
    "Frame",
    "HostFacts",
    "Limits",
    "RankDeath",
    "RankError",
    "diagnose",
]

#: Characters of an exception in a sentence, and ranks that are named.
ERROR_CHARS, NAMED = 200, 4


def diagnose(
    evidence: Evidence,
    history: Sequence[Diagnosis] = (),
    *,
    limits: Limits = Limits(),  # noqa: B008  (a frozen value)
    rolls_back: bool = False,
) -> Diagnosis:
    """The verdict on one attempt.

    Cause, culprits and confidence follow from `evidence` alone.  `history`, the diagnoses of earlier
    attempts of this run, can only turn the advice into STOP, and a rollback into one that goes further.

    Args:
        limits: when attempts without progress end the job.
        rolls_back: a loss that is not finite is answered by an older checkpoint.
    """
    found = _of_attempt(evidence)
    if rolls_back:
        found = with_rollback(found, evidence.checkpoints, history)
    return with_history(found, history, limits)


def _of_attempt(evidence: Evidence) -> Diagnosis:
    judged = [judge(death, evidence) for death in evidence.deaths if not death.ended_by_us]
    echoes = [one for one in judged if one.rule.cause is Cause.PEER_LOST]
    suspects = [one for one in judged if one.rule.cause is not Cause.PEER_LOST]
    # A death without a word may be an echo: one that says something goes first.
    suspects = [one for one in suspects if one.rule.cause is not Cause.EXIT_CODE] or suspects
    silent = all(one.rule.cause is Cause.EXIT_CODE for one in suspects)
    if silent and (found := _beside_ranks(evidence)) is not None:
        return found
    # A rank that failed by itself may end with an echo: it has told its peers, or has waited for them, since.
    suspects = suspects or list(filter(None, (_before_echo(one, evidence) for one in echoes)))
    if not suspects:
        return _of_echoes(evidence, echoes)
    first = suspects[0]
    death, rule = first.death, first.rule
    same = [one.death for one in suspects if one.rule.cause is rule.cause and one.death.hang == death.hang]
    ranks = tuple(sorted({other.rank for other in same}))
    return _diagnosis(
        evidence,
        rule.cause,
        rule.advice,
        rule.confidence,
        _sentence(first, ranks, evidence),
        ranks=ranks,
        hosts=tuple(dict.fromkeys(other.host for other in same)),
        signature=signature_of(first.error, rule.cause),
        error_step=_step_of(death, evidence),
    )


def _before_echo(echo: Judgement, evidence: Evidence) -> Judgement | None:
    """The exception of the program that came before that of a lost peer; None where there is none."""
    for error in echo.death.error.chain if echo.death.error is not None else ():
        found = judge(replace(echo.death, error=error), evidence)
        if found.rule.cause in OWN:
            # A guess: an exception that was handled is in the chain of the next one, too.
            return replace(found, rule=replace(found.rule, confidence=Confidence.LOW))
    return None


def _beside_ranks(evidence: Evidence) -> Diagnosis | None:
    """What explains an attempt in which ranks ended as echoes only, or without a word."""
    for facts in evidence.hosts:
        if line := next(filter(is_fatal_xid, facts.kernel or ()), ""):
            return _diagnosis(
                evidence,
                Cause.GPU_FAULT,
                Advice.REPLACE_HOST,
                Confidence.MEDIUM,
                f"host {facts.host} has a broken GPU (the kernel reports {_short(line)}); replace it",
                hosts=(facts.host,),
            )
    if evidence.lost_hosts:
        names = ", ".join(evidence.lost_hosts[:NAMED])
        return _diagnosis(
            evidence,
            Cause.HOST_LOST,
            Advice.RESTART,
            Confidence.HIGH,
            f"hosts were lost: {names}; a spare or a replacement takes each place",
            hosts=evidence.lost_hosts,
        )
    for facts in evidence.hosts:
        # No rank has named a disk, and the host may have some that the job does not use.
        if line := next(filter(is_disk_fault, facts.kernel or ()), ""):
            return _diagnosis(
                evidence,
                Cause.IO_ERROR,
                Advice.RESTART,
                Confidence.LOW,
                f"no rank says why it ended; the kernel of host {facts.host} reports {_short(line)}",
                hosts=(facts.host,),
            )
    return None


def _of_echoes(evidence: Evidence, echoes: Sequence[Judgement]) -> Diagnosis:
    """Where no rank failed by itself, as far as this launcher knows."""
    if not echoes:
        what = "nothing is known of the end of this attempt"
        return _diagnosis(evidence, Cause.UNKNOWN, Advice.RESTART, Confidence.LOW, what)
    for one in echoes:
        death = one.death
        if "collective operation timeout" in death.text:
            what = f"a collective timed out on rank {death.rank} ({death.host}) first; no rank failed before"
            sure = Confidence.LOW if death.error is None else Confidence.MEDIUM
            return _diagnosis(evidence, Cause.HANG, Advice.RESTART, sure, what)
    rule, rank = echoes[0].rule, echoes[0].death.rank
    return _diagnosis(
        evidence,
        rule.cause,
        rule.advice,
        rule.confidence,
        _sentence(echoes[0], (rank,), evidence),
    )


def _diagnosis(
    evidence: Evidence,
    cause: Cause,
    advice: Advice,
    confidence: Confidence,
    sentence: str,
    *,
    ranks: tuple[int, ...] = (),
    hosts: tuple[str, ...] = (),
    signature: str = "",
    error_step: int | None = None,
) -> Diagnosis:
    return Diagnosis(
        attempt=evidence.attempt,
        cause=cause,
        advice=advice,
        confidence=confidence,
        sentence=sentence,
        ranks=ranks,
        hosts=hosts,
        signature=signature,
        error_step=error_step,
        step=evidence.step,
        uptime_s=evidence.uptime_s,
        advanced=_advanced(evidence),
    )


def _advanced(evidence: Evidence) -> bool | None:
    """True if a step beyond the restored checkpoint was finished: the job is nearer to its next one then.

    A job that does not say from which step it began may have finished steps again that were lost; that is
    progress, too, because a step is reported when it is finished.
    """
    if evidence.step is not None:
        restored = evidence.checkpoints.restored if evidence.checkpoints is not None else None
        return restored is None or evidence.step > restored
    # A script that shows itself may report no steps all the same.
    short = evidence.uptime_s is None or evidence.uptime_s <= SETUP_S
    return False if evidence.reports_steps and short else None


def _sentence(found: Judgement, ranks: Sequence[int], evidence: Evidence) -> str:
    death = found.death
    facts = evidence.facts(death.host)
    kernel = next((line for line in facts.kernel or () if is_fatal_xid(line) or is_disk_fault(line)), "")
    full = next((one for one in facts.full if one != SHARED_MEMORY), "")
    others = len(ranks) - 1
    also = f" (and {others} more)" if others else ""
    step = _step_of(death, evidence)
    after = f" (after step {step})" if step is not None else ""
    place = death.error.user_frame if death.error is not None else None
    what = found.rule.says.format_map(
        {
            "error": _short(found.words),
            "end": signal_name(death.signal) if death.signal else f"exit code {death.exit_code}",
            "hang": death.hang,
            "kernel": _short(kernel),
            "full": f" at {full}" if full else "",
            "at": f" at {place}" if place else "",
        }
    )
    return f"rank {death.rank}{also} on {death.host}{after} {what}"


def _step_of(death: RankDeath, evidence: Evidence) -> int | None:
    """The last step that a rank had finished: by its exception, else by its launcher, else the job's."""
    noted = death.error.step if death.error is not None else None
    known = (step for step in (noted, death.step, evidence.step) if step is not None)
    return next(known, None)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= ERROR_CHARS else f"{line[:ERROR_CHARS]}..."
