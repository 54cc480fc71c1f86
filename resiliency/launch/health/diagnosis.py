# SPDX-License-Identifier: Apache-2.0
"""Why an attempt ended, and what to do: `diagnose`, a pure function of evidence and history.

The first death is the suspect.  Others are echoes of it: ranks whose peer is gone fail in a collective, and
the launcher ends those that are left.  The first death that is no echo counts, because a rank may notice the
loss of a peer before the launcher does.

    evidence of this attempt --> rules, one death at a time --> the suspect --> cause, culprits, advice
    diagnoses of earlier attempts --> two rules (`history`) --> STOP, or nothing
"""

from __future__ import annotations

from collections.abc import Sequence

from resiliency.launch.health.causes import Advice, Cause, Confidence, DecidedBy, Diagnosis
from resiliency.launch.health.evidence import (
    Evidence,
    Frame,
    HostFacts,
    RankDeath,
    RankError,
    signal_name,
)
from resiliency.launch.health.history import ATTEMPTS_WITHOUT_PROGRESS, signature_of, with_history
from resiliency.launch.health.rollback import with_rollback
from resiliency.launch.health.rules import DiagnosisRule, is_disk_fault, is_fatal_xid, rule_for

__all__ = [
    "Advice",
    "Cause",
    "Confidence",
    "DecidedBy",
    "Diagnosis",
    "Evidence",
    "Frame",
    "HostFacts",
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
    limit: int = ATTEMPTS_WITHOUT_PROGRESS,
    rolls_back: bool = False,
) -> Diagnosis:
    """The verdict on one attempt.

    Cause, culprits and confidence follow from `evidence` alone.  `history`, the diagnoses of earlier
    attempts of this run, can only turn the advice into STOP, and a rollback into one that goes further.

    Args:
        limit: attempts without progress after which the job ends; 0: never for that reason.
        rolls_back: a loss that is not finite is answered by an older checkpoint.
    """
    found = _of_attempt(evidence)
    if rolls_back:
        found = with_rollback(found, evidence.checkpoints, history)
    return with_history(found, history, limit)


def _of_attempt(evidence: Evidence) -> Diagnosis:
    judged = [(death, rule_for(death, evidence)) for death in evidence.deaths if not death.ended_by_us]
    suspects = [(death, rule) for death, rule in judged if rule.cause is not Cause.PEER_LOST]
    # A death without a word may be an echo: one that says something goes first.
    suspects = [pair for pair in suspects if pair[1].cause is not Cause.EXIT_CODE] or suspects
    silent = all(rule.cause is Cause.EXIT_CODE for _, rule in suspects)
    if silent and (found := _beside_ranks(evidence)) is not None:
        return found
    if not suspects:
        return _of_echoes(evidence, [pair for pair in judged if pair[1].cause is Cause.PEER_LOST])
    death, rule = suspects[0]
    same = [other for other, its in suspects if its.cause is rule.cause and other.hang == death.hang]
    ranks = tuple(sorted({other.rank for other in same}))
    return _diagnosis(
        evidence,
        rule.cause,
        rule.advice,
        rule.confidence,
        _sentence(rule, death, ranks, evidence),
        ranks=ranks,
        hosts=tuple(dict.fromkeys(other.host for other in same)),
        signature=signature_of(death),
        error_step=_step_of(death, evidence),
    )


def _beside_ranks(evidence: Evidence) -> Diagnosis | None:
    """What explains an attempt in which ranks ended as echoes only, or without a word."""
    for facts in evidence.hosts:
        for cause, test, what in (
            (Cause.GPU_FAULT, is_fatal_xid, "GPU"),
            (Cause.IO_ERROR, is_disk_fault, "disk"),
        ):
            if line := next(filter(test, facts.kernel or ()), ""):
                return _diagnosis(
                    evidence,
                    cause,
                    Advice.REPLACE_HOST,
                    Confidence.MEDIUM,
                    f"host {facts.host} has a broken {what} (the kernel reports {_short(line)}); replace it",
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
    return None


def _of_echoes(evidence: Evidence, echoes: Sequence[tuple[RankDeath, DiagnosisRule]]) -> Diagnosis:
    """Where no rank failed by itself, as far as this launcher knows."""
    if not echoes:
        what = "nothing is known of the end of this attempt"
        return _diagnosis(evidence, Cause.UNKNOWN, Advice.RESTART, Confidence.LOW, what)
    for death, _ in echoes:
        if "collective operation timeout" in death.text:
            what = f"a collective timed out on rank {death.rank} ({death.host}) first; no rank failed before"
            return _diagnosis(evidence, Cause.HANG, Advice.RESTART, Confidence.MEDIUM, what)
    death, rule = echoes[0]
    return _diagnosis(
        evidence,
        rule.cause,
        rule.advice,
        rule.confidence,
        _sentence(rule, death, (death.rank,), evidence),
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
        checkpoint=evidence.checkpoints.newest if evidence.checkpoints is not None else None,
        uptime_s=evidence.uptime_s,
    )


def _sentence(rule: DiagnosisRule, death: RankDeath, ranks: Sequence[int], evidence: Evidence) -> str:
    facts = evidence.facts(death.host)
    kernel = next((line for line in facts.kernel or () if is_fatal_xid(line) or is_disk_fault(line)), "")
    others = len(ranks) - 1
    also = f" (and {others} more)" if others else ""
    step = _step_of(death, evidence)
    after = f" (after step {step})" if step is not None else ""
    what = rule.says.format_map(
        {
            "error": _short(_last_words(death)),
            "end": signal_name(death.signal) if death.signal else f"exit code {death.exit_code}",
            "hang": death.hang,
            "kernel": _short(kernel),
            "full": f" at {facts.full[0]}" if facts.full else "",
            "at": f" at {death.error.user_frame}"
            if death.error is not None and death.error.user_frame
            else "",
        }
    )
    return f"rank {death.rank}{also} on {death.host}{after} {what}"


def _step_of(death: RankDeath, evidence: Evidence) -> int | None:
    """The last step that a rank had finished: by its exception, else by its launcher, else the job's."""
    noted = death.error.step if death.error is not None else None
    known = (step for step in (noted, death.step, evidence.step) if step is not None)
    return next(known, None)


def _last_words(death: RankDeath) -> str:
    if death.error is not None:
        return str(death.error)
    return death.log[-1] if death.log else "no text"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= ERROR_CHARS else f"{line[:ERROR_CHARS]}..."
