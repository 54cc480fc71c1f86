# SPDX-License-Identifier: Apache-2.0
"""Each incident gets its cause, culprits and advice; earlier attempts can only end a job."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from resiliency.launch.health.diagnosis import (
    Advice,
    Cause,
    DecidedBy,
    Diagnosis,
    Evidence,
    HostFacts,
    RankError,
    diagnose,
)
from resiliency.launch.health.evidence import read_traceback
from resiliency.launch.health.history import attempts_without_progress, mask
from resiliency.launch.health.rules import FATAL_XIDS
from resiliency.rank.checkpoint_steps import CheckpointSteps
from supervisor.policy import xid

from .incidents import GLOO, INCIDENTS, Incident, after, died, raised

ROOT = Path(__file__).parents[3]
SEEDS = range(1000)


@pytest.mark.parametrize("incident", INCIDENTS, ids=lambda incident: incident.name)
def test_an_incident_gets_its_cause_culprits_and_advice(incident: Incident) -> None:
    found = diagnose(incident.evidence)
    assert found.cause is incident.cause
    if incident.advice is Advice.STOP and found.advice is Advice.RESTART:  # tried once more
        again = diagnose(incident.evidence, [found])
        assert (again.advice, again.decided_by) == (Advice.STOP, DecidedBy.DETERMINISTIC)
    else:
        assert found.advice is incident.advice
    assert (found.ranks, found.hosts) == (incident.ranks, incident.hosts)
    assert incident.says in found.sentence
    assert found.decided_by is DecidedBy.ATTEMPT


def test_the_corpus_is_large_and_shows_every_cause() -> None:
    assert len(INCIDENTS) >= 40
    assert {incident.cause for incident in INCIDENTS} == set(Cause)


def test_the_page_has_a_row_for_each_cause() -> None:
    _, _, page = (ROOT / "docs/health.md").read_text().partition("\n## Diagnosis\n")
    table = re.findall(r"^\| (`.+?`) \|", page.partition("\n## ")[0], re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", " ".join(table))) == sorted(Cause)


def test_an_older_attempt_never_changes_the_verdict_on_this_one() -> None:
    """D22: only the two rules over attempts may change the advice, to STOP, and they say so."""
    for seed in SEEDS:
        _check_history(seed)


def _check_history(seed: int) -> None:
    draw = random.Random(seed)  # noqa: S311
    evidence = replace(draw.choice(INCIDENTS).evidence, attempt=9, step=draw.choice([None, 3, 40, 900]))
    history = list(_history(draw))
    alone, found = diagnose(evidence), diagnose(evidence, history)
    assert replace(found, advice=alone.advice, decided_by=alone.decided_by, sentence=alone.sentence) == alone
    assert found.sentence.startswith(alone.sentence)
    if found != alone:
        assert found.advice is Advice.STOP
        assert found.decided_by is not DecidedBy.ATTEMPT
    repeated = any(one.signature == alone.signature for one in history)
    assert repeated or found.decided_by is not DecidedBy.DETERMINISTIC
    # The rules look at diagnoses alone: the attempt's own evidence leaves no trace in another one's.
    assert diagnose(evidence) == alone


def _history(draw: random.Random) -> Iterator[Diagnosis]:
    known: list[Diagnosis] = []
    for attempt in range(draw.randrange(6)):
        evidence = replace(draw.choice(INCIDENTS).evidence, attempt=attempt, step=draw.choice([None, 3, 40]))
        known.append(diagnose(evidence, tuple(known)))
    return iter(known)


def test_echoes_never_hide_or_become_the_suspect() -> None:
    for seed in SEEDS:
        _check_echoes(seed)


def _check_echoes(seed: int) -> None:
    draw = random.Random(seed)  # noqa: S311
    incident = draw.choice([one for one in INCIDENTS if one.ranks])
    deaths = list(incident.evidence.deaths)
    for rank in range(10, 10 + draw.randrange(1, 6)):
        echo = draw.choice(
            [raised(rank, GLOO), died(rank, -15, ended_by_us=True), died(rank, -6, ended_by_us=True)]
        )
        deaths.insert(draw.randrange(len(deaths) + 1), echo)
    found = diagnose(replace(incident.evidence, deaths=tuple(deaths)))
    assert (found.cause, found.ranks, found.hosts) == (incident.cause, incident.ranks, incident.hosts)


def test_names_and_order_of_hosts_do_not_matter() -> None:
    """D19: nothing of the evidence is a clock, and no rule depends on a host's name."""
    for incident in INCIDENTS:
        evidence = incident.evidence
        renamed = replace(
            evidence,
            deaths=tuple(replace(death, host=f"x{death.host}") for death in evidence.deaths),
            hosts=tuple(replace(facts, host=f"x{facts.host}") for facts in reversed(evidence.hosts)),
            lost_hosts=tuple(f"x{host}" for host in evidence.lost_hosts),
        )
        assert diagnose(renamed).cause is incident.cause


def _attempts(*evidence: Evidence) -> list[Diagnosis]:
    known: list[Diagnosis] = []
    for attempt, one in enumerate(evidence):
        known.append(diagnose(replace(one, attempt=attempt), tuple(known)))
    return known


def test_the_same_error_at_the_same_step_on_another_rank_ends_the_job_at_the_second_time() -> None:
    first = after(raised(3, "ValueError: sample 4711 is broken, at 0x7f12ab"), step=57)
    second = after(raised(6, "ValueError: sample 4712 is broken, at 0x7f99cd", host="host-b"), step=57)
    found = _attempts(first, second)[-1]
    assert (found.advice, found.decided_by) == (Advice.STOP, DecidedBy.DETERMINISTIC)
    assert found.ranks == (6,)
    assert "attempt 0 ended at this step in the same way" in found.sentence


@pytest.mark.parametrize(
    "second",
    [
        after(raised(3, "ValueError: x"), step=58),
        after(raised(3, "KeyError: x"), step=57),
        after(died(3, -9), step=57),
        after(raised(3, "ValueError: x"), step=None),
    ],
    ids=["another step", "another error", "a kill", "an unknown step"],
)
def test_what_differs_is_not_deterministic(second: Evidence) -> None:
    assert _attempts(after(raised(3, "ValueError: x"), step=57), second)[-1].advice is Advice.RESTART


def test_the_step_of_an_error_is_its_ranks_own() -> None:
    """Whether another rank of the host has finished one more step is chance."""
    death = replace(raised(3, "ValueError: x"), step=57)
    found = _attempts(after(death, step=57), after(death, step=58))[-1]
    assert found.decided_by is DecidedBy.DETERMINISTIC
    assert found.sentence.startswith(
        "rank 3 on host-a (after step 57) raised ValueError: x at /job/train.py:88 in step"
    )


def test_an_attempt_that_passed_the_step_refutes_that_the_error_is_deterministic() -> None:
    bad, killed = after(raised(3, "ValueError: x"), step=57), after(died(0, -9), step=90)
    assert _attempts(bad, killed, bad)[-1].advice is Advice.RESTART
    assert _attempts(killed, bad, bad)[-1].decided_by is DecidedBy.DETERMINISTIC


def test_what_comes_from_outside_may_repeat_at_a_step() -> None:
    assert _attempts(*[after(died(3, -9), step=57)] * 2)[-1].advice is Advice.RESTART


def test_three_attempts_without_progress_end_the_job() -> None:
    crash = after(raised(3, "RuntimeError: no"), step=None)
    found = _attempts(crash, after(died(1, -11), step=None), after(died(2, -9), step=None))
    assert [one.advice for one in found] == [Advice.RESTART, Advice.RESTART, Advice.STOP]
    assert found[-1].decided_by is DecidedBy.NO_PROGRESS
    assert "3 attempts brought no new step and no new checkpoint" in found[-1].sentence


def test_no_limit_is_a_limit_that_is_never_met() -> None:
    """D28: a flag at 0 says what its page says."""
    known: list[Diagnosis] = []
    for attempt in range(30):
        crash = replace(after(died(attempt % 8, -9), step=None), attempt=attempt)
        known.append(diagnose(crash, tuple(known), limit=0))
    assert {one.advice for one in known} == {Advice.RESTART}


def test_progress_refills_the_budget_and_a_preemption_takes_nothing_from_it() -> None:
    """D21, D32: a job that gets on may fail for ever, and may be preempted without a limit."""
    fails = [after(died(draw % 8, -9), step=10 * draw) for draw in range(100)]
    assert {one.advice for one in _attempts(*fails)} == {Advice.RESTART}
    lost = [after(step=5, lost_hosts=("b",))] * 100
    assert {one.advice for one in _attempts(*lost)} == {Advice.RESTART}
    preempted = [after(died(0, -15, "CANCELLED DUE TO PREEMPTION"), step=5)] * 100
    assert {one.advice for one in _attempts(*preempted)} == {Advice.RESTART}
    saved = [
        replace(after(died(0, -9), step=50), checkpoints=CheckpointSteps(newest=step)) for step in range(30)
    ]
    assert {one.advice for one in _attempts(*saved)} == {Advice.RESTART}
    assert attempts_without_progress(_attempts(*[after(died(0, -9), step=5)] * 3)) == 2


def _rolled_back(*attempts: tuple[int, CheckpointSteps | None], limit: int = 3) -> list[Diagnosis]:
    """Of a job with --on-nan rollback, whose loss fails after these steps."""
    known: list[Diagnosis] = []
    for attempt, (step, checkpoints) in enumerate(attempts):
        death = raised(0, f"LossNotFinite: the loss of step {step} is nan")
        evidence = replace(after(death, step=step), attempt=attempt, checkpoints=checkpoints)
        known.append(diagnose(evidence, tuple(known), limit=limit, rolls_back=True))
    return known


def _steps(newest: int, restored: int | None, branch: int) -> CheckpointSteps:
    return CheckpointSteps(newest=newest, restored=restored, branch=branch)


@pytest.mark.parametrize(
    ("attempts", "rollbacks", "advice"),
    [
        ([(57, None)], [None], Advice.STOP),
        ([(57, _steps(50, None, 0))], [(1, 0, 49)], Advice.RESTART),
        # No step beyond the first failure: behind what did not help.
        ([(57, _steps(50, None, 0)), (57, _steps(50, 40, 1))], [(1, 0, 49), (2, 1, 39)], Advice.RESTART),
        ([(57, _steps(50, 40, 0)), (42, _steps(40, 40, 1))], [(1, 0, 49), (2, 1, 39)], Advice.RESTART),
        # Another failure, later on: its own damage is new.
        ([(57, _steps(50, 40, 3)), (90, _steps(80, 40, 4))], [(4, 3, 49), (5, 4, 79)], Advice.RESTART),
        (
            [(57, _steps(50, None, 0)), *[(57, _steps(50, 40 - 10 * n, 1 + n)) for n in range(3)]],
            [(1, 0, 49), (2, 1, 39), (3, 2, 29), (4, 3, 19)],
            Advice.STOP,
        ),
    ],
    ids=["nothing saved", "the newest", "the same step", "an earlier step", "a later step", "no progress"],
)
def test_a_rollback_goes_behind_the_newest_checkpoint_and_further_back_if_that_did_not_help(
    attempts: list[tuple[int, CheckpointSteps | None]],
    rollbacks: list[tuple[int, int, int] | None],
    advice: Advice,
) -> None:
    told = _rolled_back(*attempts)
    assert [one.rollback for one in told] == rollbacks
    assert told[-1].advice is advice
    if advice is Advice.STOP and rollbacks[-1] is not None:
        assert told[-1].decided_by is DecidedBy.NO_PROGRESS


def test_only_the_loss_makes_a_job_go_back() -> None:
    for incident in INCIDENTS:
        evidence = replace(incident.evidence, checkpoints=_steps(50, None, 0))
        found = diagnose(evidence, rolls_back=True)
        goes_back = incident.cause is Cause.NAN and "no checkpoint before" not in incident.says
        assert (found.rollback is not None) == goes_back


def test_long_attempts_whose_steps_nobody_knows_count_as_progress() -> None:
    """Unknown is a state: a script that reports no steps may have trained for a day."""
    day = replace(after(died(0, -9), step=None), uptime_s=86_400.0)
    unknown = replace(day, uptime_s=None)
    assert {one.advice for one in _attempts(*[day, unknown] * 4)} == {Advice.RESTART}


def test_a_kernel_log_that_cannot_be_read_proves_nothing() -> None:
    """D26: no data is not a finding."""
    for kernel in (None, ()):
        found = diagnose(after(died(3, -9), facts=HostFacts(host="host-a", kernel=kernel)))
        assert found.cause is Cause.KILLED


def test_words_in_a_message_are_no_reason() -> None:
    """D35: an error is compared by what it is; a text that merely names another cause is not that cause."""
    error = RankError(type="ValueError", message="field 'preempted' is no Succeeded or OOMKilled")
    death = replace(raised(3, "X: y"), error=error)
    assert diagnose(after(death)).cause is Cause.EXCEPTION


def test_fatal_xids_are_those_that_the_supervisor_takes_a_gpu_out_for() -> None:
    grave = {xid.Remedy.OUT_OF_SERVICE, xid.Remedy.DRAIN_AND_RESET, xid.Remedy.RESET_GPU}
    assert {code for code in range(1000) if xid.remedy(code) in grave} == FATAL_XIDS


def test_a_traceback_is_read_from_a_log() -> None:
    lines = """\
[rank3]: Traceback (most recent call last):
[rank3]:   File "/job/data.py", line 5, in get
[rank3]: KeyError: 3
[rank3]: During handling of the above exception, another exception occurred:
[rank3]: Traceback (most recent call last):
[rank3]:   File "/job/train.py", line 88, in step
[rank3]:     loss = model(batch)
[rank3]:   File "/opt/lib/python3.11/site-packages/torch/x.py", line 7, in call
[rank3]: mypkg.errors.SampleError: sample #7: it is "broken"
terminate called after throwing an instance of 'std::runtime_error'
  what():  Connection closed by peer
""".splitlines()
    error = read_traceback(lines)
    assert error is not None
    assert str(error) == 'mypkg.errors.SampleError: sample #7: it is "broken"'
    assert str(error.user_frame) == "/job/train.py:88 in step"
    assert read_traceback(["all is well", "loss 3.2"]) is None
    assert mask("pid 47 at 0x7fab: 3.5 GiB") == "pid # at @: # GiB"
