# SPDX-License-Identifier: Apache-2.0
"""What launchers say about their attempts: whose host is replaced for it, and whose is not."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from resiliency.launch.health.causes import Cause
from supervisor.parts.journal import Journal
from supervisor.parts.status import Surroundings, make_status
from supervisor.simulation.faults import draw_diagnoses
from supervisor.simulation.run import Scenario, run
from supervisor.values import (
    CommandKind,
    DeviceState,
    Event,
    EventType,
    LauncherState,
    OutcomeStatus,
    Silence,
)
from supervisor.view.page import status_page
from supervisor.view.status import Status
from supervisor.view.tables import status_text
from tests.supervisor.controllers import LIMITS, Controller, _host, diagnosed

IN_JOB, RESET = CommandKind.IN_JOB_RESET, CommandKind.WORKLOAD_RESET
SWAP, CORDON = CommandKind.HOT_SWAP, CommandKind.CORDON_HOST
TAKES_A_HOST = (SWAP, CORDON, CommandKind.SCALE_DOWN)


def status(fleet: Controller) -> Status:
    around = Surroundings(
        epoch=7, uptime_s=1.0, shadow=False, log_problem="", parts=(), counters={}, sights=None
    )
    return make_status(fleet.state, fleet.now, LIMITS, Journal(), around)


# ---------------------------------------------------------------- one diagnosis


def test_a_host_is_replaced_on_advice_that_is_no_guess_and_no_echo() -> None:
    rows = itertools.product(Cause, ("high", "medium", "low"), ("restart", "replace_host", "stop"))
    for cause, confidence, advice in rows:
        fleet = Controller(max_in_job_restarts=2)
        fleet.give(diagnosed(fleet, cause=cause.value, confidence=confidence, advice=advice))
        kinds = fleet.wait(LIMITS.coalesce_s)
        is_echo = cause.value in ("peer_lost", "host_lost", "preempted")
        wanted = advice == "replace_host" and confidence != "low" and not is_echo
        assert sorted(kinds, key=str) == ([CORDON, SWAP] if wanted else []), (cause, confidence, advice)
        assert [one.host for one in fleet.sent] == (["h1", "h1"] if wanted else [])
        assert fleet.state.diagnoses["h1"].event.evidence[0].cause == cause.value


def test_nothing_is_done_in_a_shadow_in_a_frozen_fleet_or_for_a_host_that_the_job_has_not() -> None:
    fleet = Controller(shadow=True)
    fleet.give(diagnosed(fleet))
    assert fleet.wait(LIMITS.coalesce_s) == []
    assert any("shadow: hot_swap of train h1" in note for note in fleet.notes)

    fleet = Controller()
    fleet.give(Silence(frozen=True, silent=3, hosts=3))
    fleet.give(diagnosed(fleet))
    assert fleet.wait(LIMITS.coalesce_s) == []
    fleet.give(Silence(frozen=False, silent=0, hosts=3))
    assert fleet.wait(5.0) == [CORDON, SWAP]

    fleet = Controller()
    for event in (diagnosed(fleet, "s0"), diagnosed(fleet, "nobody"), diagnosed(fleet, run="another")):
        fleet.give(replace_run(fleet, event))
    assert fleet.wait(LIMITS.coalesce_s) == []
    assert fleet.state.diagnoses == {}


def replace_run(fleet: Controller, event: Event) -> Event:
    """The job has a run of its own from the first event on."""
    job = replace(fleet.state.workloads["train"], run="this")
    fleet.give(job)
    return event


def test_a_diagnosis_of_an_attempt_that_another_one_has_followed_is_dropped() -> None:
    fleet = Controller()
    fleet.advance(501, attempt=3)
    fleet.now += 60.0
    fleet.give(diagnosed(fleet, attempt=2))
    assert fleet.wait(LIMITS.coalesce_s) == []
    assert fleet.state.diagnoses == {}
    fleet.give(diagnosed(fleet, attempt=3))
    assert fleet.wait(LIMITS.coalesce_s) == [CORDON, SWAP]


def test_a_job_that_goes_on_keeps_its_host_until_the_next_rank_fails_there() -> None:
    fleet = Controller(max_in_job_restarts=5)
    fleet.give(diagnosed(fleet))
    for step in range(501, 507):  # its launcher's restart in place has helped
        fleet.advance(step, attempt=1)
        fleet.wait(1.0)
        fleet.end()
    assert [one.kind for one in fleet.sent] == [CORDON]
    assert "train" not in fleet.state.incidents
    fleet.now += 60.0
    assert fleet.happens(EventType.WORKER_HB, ranks=(1,), attempt=1) == [SWAP]


def test_without_a_spare_the_launcher_has_its_time_before_the_job_is_reset() -> None:
    fleet = Controller(spares=0)
    fleet.give(fleet.event(EventType.WORKER_HB, attempt=0, ranks=(1,)))
    fleet.give(diagnosed(fleet))
    fleet.give(fleet.event(EventType.WORKER_HB, attempt=0, ranks=(), launcher=LauncherState.RESTARTING))
    assert fleet.wait(LIMITS.coalesce_s) == [CORDON]
    assert fleet.wait(LIMITS.launcher_grace_s - LIMITS.coalesce_s) == [RESET]


# ---------------------------------------------------------------- many of them


@pytest.mark.parametrize("seed", range(12))
def test_one_failure_leads_to_one_replacement_whatever_comes_first_twice_or_late(seed: int) -> None:
    for part in range(10):
        one_failure(random.Random(100 * seed + part))  # noqa: S311 - a repeatable history is what is wanted


def one_failure(draw: random.Random) -> None:
    fleet = Controller(max_in_job_restarts=5)
    said = [
        fleet.event(EventType.WORKER_HB, ranks=(1,)),
        fleet.event(EventType.WORKER_HB, launcher=LauncherState.RESTARTING),
        fleet.event(EventType.WORKER_HB, "h0", ranks=(0,)),
        fleet.event(EventType.WORKER_HB, "h0", launcher=LauncherState.RESTARTING),
        diagnosed(fleet, cause="gpu_fault"),
        diagnosed(fleet, "h0", cause="peer_lost", advice=draw.choice(("restart", "replace_host")), ranks=()),
    ]
    said += draw.sample(said, 3)
    # Told again by a sensor that was started since: another event, the same evidence.
    said += [replace(each, id=f"again:{each.id}") for each in said if each.type is EventType.DIAGNOSIS]
    draw.shuffle(said)
    for event in said:
        fleet.give(event)
        fleet.wait(draw.choice((0.0, 0.0, 0.5, 3.0)))
        if draw.random() < 0.5:
            fleet.end()
    for _ in range(6):
        fleet.end()
        fleet.wait(LIMITS.backoff_s)  # after a restart that a late diagnosis has overtaken
    swaps = [one for one in fleet.sent if one.kind is SWAP]
    assert [(one.host, one.spare) for one in swaps] == [("h1", "s0")]
    assert [one.host for one in fleet.sent if one.kind is CORDON] == ["h1"]


def wide(hosts: int, spares: int) -> Controller:
    fleet = Controller(spares=spares, max_in_job_restarts=9)
    fleet.give(replace(fleet.state.workloads["train"], replicas=hosts))
    for number in range(hosts):
        fleet.give(_host(f"h{number}", "train", DeviceState.RUNNING))
    return fleet


@pytest.mark.parametrize("seed", range(12))
def test_no_echo_and_no_old_word_takes_a_host_away_and_all_together_no_more_than_the_cap(seed: int) -> None:
    for part in range(20):
        many_words(random.Random(100 * seed + part))  # noqa: S311 - a repeatable history is what is wanted


def many_words(draw: random.Random) -> None:
    fleet = wide(8, spares=6)
    attempt, step, given = 0, 500, list[Event]()
    for _ in range(40):
        kind = draw.random()
        host = f"h{draw.randrange(8)}"
        if kind < 0.5:
            event = diagnosed(
                fleet,
                host,
                cause=draw.choice(("gpu_missing", "gpu_fault", "peer_lost", "host_lost", "hang", "unknown")),
                advice=draw.choice(("restart", "replace_host", "replace_host", "stop")),
                confidence=draw.choice(("high", "medium", "low")),
                attempt=max(0, attempt + draw.choice((-1, 0, 0, 1))),
                ranks=(),
            )
            given.append(event)
            fleet.give(event)
        elif kind < 0.6 and given:
            fleet.give(draw.choice(given))
        elif kind < 0.7:
            fleet.give(fleet.event(EventType.WORKER_HB, host, attempt=attempt))
        elif kind < 0.8:
            attempt, step = attempt + draw.randint(0, 1), step + 1
            fleet.advance(step, attempt)
        else:
            fleet.end(draw.choice((OutcomeStatus.DONE, OutcomeStatus.DONE, OutcomeStatus.FAILED)))
        fleet.wait(draw.choice((0.0, 1.0, 5.0, 20.0)))
    against = {
        event.host
        for event in given
        if event.asks_for_another_host and event.evidence[0].cause not in ("peer_lost", "host_lost")
    }
    taken = {one.host for one in fleet.sent if one.kind in TAKES_A_HOST}
    assert taken <= against
    # A swap on a guess that failed took no host away.
    assert len(fleet.state.cordons) <= LIMITS.max_cordons
    for host in taken:
        assert sum(one.host == host and one.kind is SWAP for one in fleet.sent if one.spare) <= 2


def test_where_all_hosts_lack_their_gpus_no_more_are_replaced_than_may_be() -> None:
    fleet = wide(8, spares=8)
    for number in range(8):
        fleet.give(diagnosed(fleet, f"h{number}"))
    for _ in range(20):
        fleet.wait(LIMITS.coalesce_s)
        fleet.end()
    swapped = [one.host for one in fleet.sent if one.kind is SWAP]
    assert len(swapped) == len(set(swapped)) == LIMITS.max_cordons
    assert [one.kind for one in fleet.sent if one.kind is IN_JOB] == []
    assert any("4 hosts were cordoned within 3600 s" in note for note in fleet.notes)


# ---------------------------------------------------------------- hangs


def test_a_hang_has_the_ranks_that_launchers_accuse() -> None:
    fleet = Controller(max_in_job_restarts=2)
    words = {"cause": "hang", "advice": "restart"}
    fleet.give(diagnosed(fleet, text="before its last step", age_s=90.0, ranks=(9,), **words))
    fleet.give(diagnosed(fleet, "h0", text="behind: rank 0 in the data loader", ranks=(0,), **words))
    assert fleet.wait(LIMITS.coalesce_s) == []  # a launcher ends ranks that it accuses itself
    fleet.give(fleet.event(EventType.HANG, ""))
    fleet.wait(LIMITS.coalesce_s)
    (report,) = fleet.state.incidents["train"].past
    assert (report.host, report.ranks) == ("h0", (0,))
    assert report.evidence[0].text == "behind: rank 0 in the data loader; as asked"
    assert fleet.sent[-1].kind is IN_JOB


def test_a_hang_of_which_two_launchers_accuse_their_own_ranks_is_of_no_host() -> None:
    fleet = Controller(max_in_job_restarts=2)
    for host, rank in (("h0", 0), ("h1", 1)):
        fleet.give(diagnosed(fleet, host, cause="hang", advice="restart", ranks=(rank,)))
    for _ in range(3):  # hangs again: no host is held responsible
        fleet.happens(EventType.HANG, "h1")
    (first, *_) = fleet.state.incidents["train"].past
    assert (first.host, first.ranks) == ("", (0, 1))
    assert not any(one.kind in TAKES_A_HOST for one in fleet.sent)


# ---------------------------------------------------------------- for people


def test_the_sentence_is_in_the_rows_of_job_and_host() -> None:
    fleet = Controller()
    fleet.give(diagnosed(fleet, "h0", cause="peer_lost", advice="restart", text="lost a peer", ranks=()))
    fleet.give(diagnosed(fleet, text="rank 1 <b>finds</b> no GPU", attempt=0))
    fleet.now += 3.0
    document = Status.from_dict(status(fleet).to_dict())
    (job,) = document.jobs
    hosts = {one.id: one.diagnosis for one in document.hosts}
    assert job.diagnosis is not None
    assert job.diagnosis == hosts["h1"]
    assert (job.diagnosis.host, job.diagnosis.ranks, job.diagnosis.age_s) == ("h1", (1,), 3.0)
    assert hosts["h0"] is not None
    assert hosts["s0"] is None
    sentence = "gpu_missing 3.0 s ago, attempt 0: rank 1 <b>finds</b> no GPU; advice replace_host"
    assert f"train: {sentence}" in status_text(document)
    assert "rank 1 &lt;b&gt;finds&lt;/b&gt; no GPU; advice replace_host" in status_page(document)
    fleet.wait(LIMITS.coalesce_s)
    (report,) = status(fleet).incidents[0].reports
    assert report.cause == "gpu_missing"


# ---------------------------------------------------------------- the whole supervisor


def test_histories_of_diagnoses_end_in_progress_and_take_away_no_host_that_works() -> None:
    effects = 0
    for seed in range(30):
        draw = random.Random(seed)  # noqa: S311 - a repeatable history is what is wanted
        hosts = draw.randint(4, 12)
        faults = tuple(draw_diagnoses(draw, hosts, 120.0))
        result = run(Scenario(seed=seed, hosts=hosts, faults=faults, reckless=False))
        assert not result.violation, "\n".join((str(seed), result.violation, *map(str, faults)))
        effects += result.effects
    assert effects > 30
