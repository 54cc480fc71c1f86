# SPDX-License-Identifier: Apache-2.0
"""Each incident gets its cause, culprits and advice; earlier attempts can only end a job for its own."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from resiliency.launch.health.causes import OWN
from resiliency.launch.health.diagnosis import (
    Advice,
    Cause,
    Confidence,
    DecidedBy,
    Diagnosis,
    Evidence,
    HostFacts,
    Limits,
    RankError,
    diagnose,
)
from resiliency.launch.health.evidence import read_traceback
from resiliency.launch.health.history import EQUAL_ERRORS, mask, pause_after
from resiliency.launch.health.rules import FATAL_XIDS
from resiliency.rank.checkpoint_steps import CheckpointSteps
from supervisor.policy import xid

from .incidents import GLOO, INCIDENTS, NCCL, STEP, Incident, after, died, raised

ROOT = Path(__file__).parents[3]
SEEDS = range(300)


@pytest.mark.parametrize("incident", INCIDENTS, ids=lambda incident: incident.name)
def test_an_incident_gets_its_cause_culprits_and_advice(incident: Incident) -> None:
    found, last = diagnose(incident.evidence), _attempts(*[incident.evidence] * EQUAL_ERRORS)[-1]
    assert found.cause is incident.cause
    if incident.advice is Advice.STOP and found.advice is Advice.RESTART:  # what passes may look the same
        assert (last.advice, last.decided_by) == (Advice.STOP, DecidedBy.DETERMINISTIC)
    else:
        assert found.advice is incident.advice
    assert (found.ranks, found.hosts) == (incident.ranks, incident.hosts)
    assert incident.says in found.sentence
    assert found.decided_by is DecidedBy.ATTEMPT
    assert found.cause in OWN or last.advice is not Advice.STOP


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
    repeated = [one.signature for one in history].count(alone.signature)
    assert repeated >= EQUAL_ERRORS - 1 or found.decided_by is not DecidedBy.DETERMINISTIC
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


def test_the_same_error_at_the_same_step_on_any_rank_ends_the_job_at_the_third_time() -> None:
    first = after(raised(3, "ValueError: sample 4711 is broken, at 0x7f12ab"), step=57)
    second = after(raised(6, "ValueError: sample 4712 is broken, at 0x7f99cd", host="host-b"), step=57)
    told = _attempts(first, first, second)
    assert [one.advice for one in told] == [Advice.RESTART, Advice.RESTART, Advice.STOP]
    assert told[-1].decided_by is DecidedBy.DETERMINISTIC
    assert told[-1].ranks == (6,)
    assert "attempts 0 and 1 ended at this step in the same way" in told[-1].sentence


@pytest.mark.parametrize(
    ("text", "step", "reports_steps"),
    [
        ("KeyError: 'labels'", 57, True),
        ("KeyError: 'timeout'", None, True),
        ("ValueError: HTTP 503 is no size of a batch", None, True),
        ("ModuleNotFoundError: No module named 'flash_attn'", None, False),
        ("SyntaxError: invalid syntax (train.py, line 3)", None, False),
    ],
)
def test_mistakes_of_the_program_end_the_job_at_the_third_time(
    text: str, step: int | None, reports_steps: bool
) -> None:
    """Also where an import fails before the script could show that it reports steps."""
    bad = replace(after(raised(3, text), raised(0, GLOO), step=step), reports_steps=reports_steps)
    told = _attempts(*[bad] * 3)
    assert [one.advice for one in told] == [Advice.RESTART, Advice.RESTART, Advice.STOP]
    assert told[-1].decided_by is DecidedBy.DETERMINISTIC


@pytest.mark.parametrize(
    "third",
    [
        after(raised(3, "ValueError: x"), step=58),
        after(raised(3, "KeyError: x"), step=57),
        after(died(3, -9), step=57),
        after(raised(3, "ValueError: x"), step=None),
        after(raised(3, "ValueError: x", "OSError: [Errno 116] Stale file handle"), step=57),
        after(raised(3, "ValueError: x", frames=()), step=57),
    ],
    ids=["another step", "another error", "a kill", "before a step", "storage behind it", "no line"],
)
def test_what_differs_is_not_deterministic(third: Evidence) -> None:
    bad = after(raised(3, "ValueError: x"), step=57)
    assert _attempts(bad, bad, third)[-1].advice is Advice.RESTART


def test_the_step_of_an_error_is_its_ranks_own() -> None:
    """Whether another rank of the host has finished one more step is chance."""
    death = replace(raised(3, "ValueError: x"), step=57)
    found = _attempts(after(death, step=57), after(death, step=58), after(death, step=57))[-1]
    assert found.decided_by is DecidedBy.DETERMINISTIC
    assert found.sentence.startswith(
        "rank 3 on host-a (after step 57) raised ValueError: x at /job/train.py:88 in step"
    )


def test_an_attempt_that_passed_the_step_refutes_that_the_error_is_deterministic() -> None:
    bad, killed = after(raised(3, "ValueError: x"), step=57), after(died(0, -9), step=90)
    assert _attempts(bad, bad, killed, bad)[-1].advice is Advice.RESTART
    assert _attempts(killed, bad, bad, bad)[-1].decided_by is DecidedBy.DETERMINISTIC


PASSING = (
    "OSError: [Errno 116] Stale file handle: '/mnt/nfs/shard-117.tar'",
    "OSError: [Errno 5] Input/output error",
    "OSError: [Errno 112] Host is down: '/mnt/nfs/shard-117.tar'",
    "TimeoutError: [Errno 110] Connection timed out: '/mnt/nfs/shard-117.tar'",
    "OSError: [Errno 122] Disk quota exceeded: '/home/u/ckpt/step-100/model.pt'",
    "OSError: [Errno 28] No space left on device: '/scratch/ckpt'",
    "FileNotFoundError: [Errno 2] No such file or directory: '/mnt/nfs/shard-117.tar'",
    "PermissionError: [Errno 13] Permission denied: '/mnt/nfs/shard-117.tar'",
    "RuntimeError: [enforce fail at inline_container.cc:626] . unexpected pos 1048640 vs 1048532",
    "OSError: Caught OSError in DataLoader worker process 3.\nOSError: [Errno 116] Stale file handle",
    "RuntimeError: DataLoader worker (pid(s) 4711) exited unexpectedly",
    "google.api_core.exceptions.ServiceUnavailable: 503 GET https://storage.googleapis.com/storage/v1/b/run",
    "ServiceError: 503 Slow Down: please reduce your request rate",
    "botocore.exceptions.ClientError: An error occurred (SlowDown) when calling the PutObject operation",
    "botocore.exceptions.EndpointConnectionError: Could not connect to the endpoint URL: s3.amazonaws.com",
    "requests.exceptions.ConnectTimeout: HTTPSConnectionPool(host='hub', port=443): Max retries exceeded",
    "huggingface_hub.errors.HfHubHTTPError: 429 Client Error: Too Many Requests for url: https://hub",
    "socket.gaierror: [Errno -3] Temporary failure in name resolution",
    "google.auth.exceptions.RefreshError: ('invalid_grant: Token has been expired or revoked.')",
    "subprocess.TimeoutExpired: Command 'ffmpeg' timed out after 30 seconds",
    "BrokenPipeError: [Errno 32] Broken pipe",
    "MemoryError: Unable to allocate 64.0 GiB",
    "torch.AcceleratorError: CUDA error: unspecified launch failure",
    "RuntimeError: No CUDA GPUs are available",
    GLOO,
    NCCL,
)


@pytest.mark.parametrize("step", [None, 100])
def test_what_comes_from_outside_may_repeat_at_a_step_or_at_each_start_for_hours(step: int | None) -> None:
    """D32: a preemption, or a service that is away, is no failure of the job."""
    deaths = [raised(3, text) for text in PASSING]
    deaths += [raised(3, "RuntimeError: could not read shard 117", text) for text in PASSING]
    for death in deaths:
        told = _attempts(*[replace(after(death, step=step), uptime_s=800.0)] * 9)
        assert Advice.STOP not in {one.advice for one in told}, told[-1].sentence
        assert told[0].cause not in OWN


def test_a_signal_or_an_exit_code_without_a_word_never_ends_a_job() -> None:
    for exit_code in (-6, -9, -11, -15, 1, 17):
        silent = replace(after(died(3, exit_code), step=None), uptime_s=800.0)
        assert {one.advice for one in _attempts(*[silent] * 9)} == {Advice.RESTART}


def test_words_of_a_log_inform_and_decide_nothing() -> None:
    for line in (
        "INFO gpu0 health: volatile ECC errors: 0, NVLink errors: 0",
        "    Row Remapping Pending : No",
        "    GPU Reset : GPU requires reset: No",
        "will retry on hardware error (none so far)",
        "INFO watching for a preemption notice: none",
        "INFO version mismatch of the tokenizer: none",
        "WARNING No space left on device in the cache; it is not used",
        "CUDA error: device-side assert triggered",
        "torch.OutOfMemoryError is caught: CUDA out of memory. Tried to allocate 2 GiB",
    ):
        told = _attempts(*[replace(after(died(3, 3, line, "INFO leaving")), uptime_s=800.0)] * 9)
        assert {(one.advice, one.confidence) for one in told} == {(Advice.RESTART, Confidence.LOW)}, line
        assert told[0].cause is not Cause.PREEMPTED


def test_drives_that_no_job_uses_and_late_answers_are_no_broken_disk() -> None:
    for line in (
        "Buffer I/O error on dev sr0, logical block 0, async page read",
        "nvme nvme1: I/O 22 QID 5 timeout, completion polled",
        "I/O error, dev loop3, sector 0 op 0x0:(READ)",
    ):
        facts = HostFacts(host="host-a", kernel=(line,))
        assert diagnose(after(died(3, 1), facts=facts)).cause is Cause.EXIT_CODE
        assert diagnose(after(raised(3, PASSING[1]), facts=facts)).advice is Advice.RESTART


def _vain(attempts: int, uptime_s: float = 250.0, **changes: Any) -> list[Evidence]:
    """Attempts that fail by errors of the program, each at another place, before the first step."""
    places = (replace(STEP, line=line) for line in range(attempts))
    deaths = (raised(3, "RuntimeError: no", frames=(place,)) for place in places)
    return [replace(after(death, step=None), uptime_s=uptime_s, **changes) for death in deaths]


def test_attempts_without_progress_end_the_job_after_a_time_and_not_after_a_number() -> None:
    told = _attempts(*_vain(3))
    assert [one.advice for one in told] == [Advice.RESTART, Advice.RESTART, Advice.STOP]
    assert told[-1].decided_by is DecidedBy.NO_PROGRESS
    assert told[-1].sentence.endswith("; 3 attempts of 12 minutes in all finished no new step")
    assert {one.advice for one in _attempts(*_vain(60, uptime_s=9.0))} == {Advice.RESTART}
    long = replace(after(died(0, -9), step=900), uptime_s=3600.0)  # so long it took to come here
    assert {one.advice for one in _attempts(long, *_vain(14))} == {Advice.RESTART}
    assert _attempts(long, *_vain(15))[-1].advice is Advice.STOP


@pytest.mark.parametrize(
    "changes",
    [
        {"reports_steps": False},
        {"uptime_s": 86_400.0},
        {"step": 91, "checkpoints": CheckpointSteps(newest=90, restored=90)},
        {"step": 91},
    ],
    ids=["a script that reports no steps", "a day without a step", "lost steps done again", "some step"],
)
def test_an_attempt_that_may_have_brought_something_is_progress(changes: dict[str, Any]) -> None:
    """D21: failures of before the last progress do not count."""
    told = _attempts(*[replace(one, **changes) for one in _vain(9)])
    assert {one.advice for one in told} == {Advice.RESTART}
    stuck = CheckpointSteps(newest=90, restored=90)
    assert _attempts(*_vain(3, step=90, checkpoints=stuck))[-1].decided_by is DecidedBy.NO_PROGRESS


def test_no_limit_is_a_limit_that_is_never_met() -> None:
    """D28: a flag at 0 says what its page says."""
    known: list[Diagnosis] = []
    for attempt, one in enumerate(_vain(30)):
        known.append(diagnose(replace(one, attempt=attempt), tuple(known), limits=Limits(attempts=0)))
    assert {one.advice for one in known} == {Advice.RESTART}


@pytest.mark.parametrize("checkpoint_s", [600, 1800, 3600])
@pytest.mark.parametrize("mtbf_s", [1800, 3600])
def test_a_sound_job_outlives_any_number_of_random_failures(mtbf_s: int, checkpoint_s: int) -> None:
    """In virtual time: a step a second, a start of 40 s, and failures that come whatever the job does."""
    for seed in range(int(os.environ.get("SURVIVAL_JOBS", "20"))):
        draw = random.Random(seed)  # noqa: S311
        assert Advice.STOP not in {one.advice for one in _random_failures(draw, mtbf_s, checkpoint_s)}, seed


def _random_failures(draw: random.Random, mtbf_s: int, checkpoint_s: int) -> list[Diagnosis]:
    told: list[Diagnosis] = []
    saved = 0
    reports_checkpoints = draw.random() < 0.5
    for attempt in range(20):
        ran_s = draw.expovariate(1 / mtbf_s)
        step = saved + max(int(ran_s) - 40, 0)
        newest = max(step - step % checkpoint_s, saved)
        place = replace(STEP, line=draw.randrange(200))
        death = draw.choice(
            [
                *[died(draw.randrange(64), number) for number in (-9, -11, -6, 1)],
                raised(draw.randrange(64), "torch.AcceleratorError: CUDA error: unspecified launch failure"),
                raised(draw.randrange(64), "RuntimeError: a race", frames=(place,)),
                raised(0, GLOO),
            ]
        )
        evidence = Evidence(
            attempt=attempt,
            deaths=(death,),
            step=step if step > saved else None,
            uptime_s=ran_s,
            checkpoints=CheckpointSteps(newest=newest, restored=saved or None)
            if reports_checkpoints and newest
            else None,
        )
        told.append(diagnose(evidence, tuple(told)))
        saved = newest
    return told


def test_attempts_that_end_at_once_are_followed_by_longer_and_longer_pauses() -> None:
    away = replace(after(raised(3, PASSING[0]), step=None), uptime_s=2.0)
    for one in (away, replace(away, reports_steps=False)):
        told = _attempts(*[one] * 9)
        pauses = [pause_after(told[: count + 1]) for count in range(9)]
        assert pauses == [0, 1, 2, 5, 15, 30, 60, 60, 60]
    save = replace(after(raised(3, PASSING[4]), step=99), uptime_s=20.0)  # after steps that were done again
    assert pause_after(_attempts(*[save] * 4)) == 2
    lost = after(step=None, lost_hosts=("b",))
    for between, pause in (
        (replace(away, step=41), 0),
        (replace(away, uptime_s=61.0), 0),
        (replace(lost, uptime_s=2.0), 2),
    ):
        assert pause_after(_attempts(away, away, between, away)) == pause
    # Another host has ended the attempts that are missing.
    told = _attempts(*[away] * 9)
    assert pause_after([*told[:3], told[-1]]) == pause_after([]) == 0


def _rolled_back(*attempts: tuple[int, CheckpointSteps | None]) -> list[Diagnosis]:
    """Of a job with --on-nan rollback, whose loss fails after these steps."""
    known: list[Diagnosis] = []
    for attempt, (step, checkpoints) in enumerate(attempts):
        death = raised(0, f"LossNotFinite: the loss of step {step} is nan")
        evidence = replace(after(death, step=step), attempt=attempt, checkpoints=checkpoints)
        known.append(diagnose(evidence, tuple(known), rolls_back=True))
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
