# SPDX-License-Identifier: Apache-2.0
"""Ranks are the business of their launcher; the supervisor's numbers are for programs that tell nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from resiliency.launch.health.condition import JobCondition, Requeue
from supervisor.detection.jobs import JobWatch
from supervisor.policy import pace
from supervisor.policy.pace import StepTimes
from supervisor.simulation.innocents import draw, play
from supervisor.values import (
    Command,
    CommandKind,
    DeviceState,
    Event,
    EventType,
    Evidence,
    LauncherState,
    OutcomeStatus,
    Progress,
    Request,
    WorkloadInfo,
)
from tests.supervisor.controllers import LIMITS, Controller, diagnosed
from tests.supervisor.sensors import LIMITS as SENSOR_LIMITS
from tests.supervisor.sensors import Sensor, _worker, events

RUNNING = LauncherState.RUNNING
ADVANCES = JobCondition(state=RUNNING, usual_step_s=1.0)
EVALUATES = JobCondition(state=RUNNING, still_s=60.0, phase="an evaluation", ranks=(0,))
IN_JOB, RESET = CommandKind.IN_JOB_RESET, CommandKind.WORKLOAD_RESET
DAY_S = 86_400.0
LIMIT_S = SENSOR_LIMITS.hang_threshold_s


def trains(sensor: Sensor, step_s: float, seconds: float, *, first: int = 0, stopped: str = "") -> int:
    """Both hosts report each five seconds; returns the last step.

    Args:
        first: step that was finished when this began.
        stopped: host whose launcher says nothing new.
    """
    began, done = sensor.now, 0
    while sensor.now - began < seconds:
        sensor.now += 1.0
        passed = sensor.now - began
        done = int(passed / step_s)
        for name in sensor.names if round(passed) % 5 == 0 else ():
            rank = sensor.names.index(name)
            step, age_s = (first, passed) if name == stopped else (first + done, passed - done * step_s)
            known = {"step": step, "step_age_s": age_s} if step and rank < 2 else {}
            silent_s = passed if name == stopped else 0.0
            sensor.beat(name, workers=_worker(rank, heartbeat_age_s=silent_s, **known) if rank < 2 else ())
        sensor.take(sensor.detector.tick(sensor.now))
    return first + done


def reset(*evidence: Evidence) -> Command:
    ids = tuple(each.id for each in evidence)
    return Command(epoch=1, id="c1", kind=IN_JOB, workload="train", evidence=ids)


# ---------------------------------------------------------------- the sensor


@pytest.mark.parametrize(("condition", "hangs"), [(EVALUATES, 0), (ADVANCES, 0), (None, 1)])
def test_no_number_of_the_sensor_counts_where_the_launchers_tell_how_the_job_is(
    condition: JobCondition | None, hangs: int
) -> None:
    """An evaluation of 20 minutes, then a restart that loads for 20 minutes."""
    sensor = Sensor()
    fields = {"launcher": RUNNING, "condition": condition}
    sensor.run(5, workers=_worker(step=7, step_age_s=0.0), **fields)
    sensor.run(1200, workers=_worker(heartbeat_age_s=0.0), **fields)
    assert len(events(sensor.said, EventType.HANG)) == hangs
    sensor.run(1200, workers=_worker(heartbeat_age_s=0.0), attempt=1, **fields)
    assert len(events(sensor.said, EventType.NO_PROGRESS)) == hangs


def test_a_job_is_down_by_a_number_of_its_own_only_while_its_ranks_do_not_run() -> None:
    sensor = Sensor(downtime_threshold_s=100.0)
    running = {"workers": _worker(heartbeat_age_s=0.0), "launcher": RUNNING, "condition": EVALUATES}
    assert events(sensor.run(1200, **running), EventType.NO_PROGRESS) == []
    waits = JobCondition(state=LauncherState.RESTARTING)
    down = {"workers": _worker(heartbeat_age_s=0.0), "launcher": waits.state, "condition": waits}
    assert events(sensor.run(95, **down), EventType.NO_PROGRESS) == []
    assert len(events(sensor.run(15, **down), EventType.NO_PROGRESS)) == 1


@pytest.mark.parametrize("step_s", [0.3, 30.0, 320.0])
def test_a_program_that_tells_only_its_steps_is_hung_after_ten_of_them_and_not_before(step_s: float) -> None:
    sensor = Sensor()
    trains(sensor, step_s, max(6 * step_s, 30.0))
    still = {"workers": _worker(heartbeat_age_s=0.0)}
    limit = max(LIMIT_S, 10 * step_s)
    assert events(sensor.run(limit - step_s - 5.0, **still), EventType.HANG) == []
    assert len(events(sensor.run(step_s + 15.0, **still), EventType.HANG)) == 1


def test_before_two_steps_are_known_the_first_one_tells_the_least() -> None:
    sensor = Sensor()
    trains(sensor, 320.0, 600.0)
    assert events(sensor.said, EventType.HANG) == []


@pytest.mark.parametrize("step_s", [1.0, 30.0, 320.0])
def test_a_silent_launcher_beside_ranks_that_finish_steps_at_their_pace_is_no_reason_for_a_restart(
    step_s: float,
) -> None:
    sensor = Sensor()
    last = trains(sensor, step_s, max(8 * step_s, 30.0))
    trains(
        sensor, step_s, max(SENSOR_LIMITS.heartbeat_timeout_s + 10.0, 4 * step_s), first=last, stopped="h0"
    )
    (lost,) = events(sensor.said, EventType.WORKER_HB)
    assert sensor.detector.holds(reset(*lost.evidence), sensor.now) is False


def test_ranks_that_finish_no_step_for_two_usual_ones_beside_a_silent_launcher_are_lost() -> None:
    sensor = Sensor()
    last, began = trains(sensor, 30.0, 8 * 30.0), sensor.now

    def is_held() -> bool | None:
        sensor.now += 1.0
        age_s = sensor.now - began
        for rank, silent_s in ((0, age_s), (1, 0.0)):
            known = _worker(rank, step=last, step_age_s=age_s, heartbeat_age_s=silent_s)
            sensor.beat(f"h{rank}", workers=known)
        lost = events(sensor.said, EventType.WORKER_HB)
        return bool(lost) and sensor.detector.holds(reset(*lost[0].evidence), sensor.now)

    while not is_held():
        assert sensor.now - began < 61.0
    assert sensor.now - began >= 60.0


def test_a_new_sensor_knows_the_pace_of_a_job_from_the_controller() -> None:
    sensor = Sensor()
    known = Progress(workload="train", step=7, age_s=50.0, usual_step_s=320.0)
    sensor.take(sensor.detector.expect_progress(known, sensor.now))
    assert [each for each in sensor.detector.snapshot(sensor.now) if isinstance(each, Progress)] == [known]
    assert events(sensor.run(600, workers=_worker(step=7, step_age_s=0.0)), EventType.HANG) == []


def test_the_pace_is_the_median_and_no_evaluation_makes_it_slow() -> None:
    times = StepTimes()
    times.begin(40.0)
    assert (times.usual_s, times.longest_s) == (0.0, 40.0)
    for seconds in (1.0, 1.2, 600.0, 1.1, 0.9):
        times.learn(seconds)
    times.assume(30.0)
    times.begin(900.0)
    assert (times.usual_s, times.longest_s) == (1.1, 600.0)
    assert pace.still_s(300.0, times.usual_s, times.longest_s) == 1200.0
    assert pace.advancing_s(4.0, times.usual_s) == 4.0


def test_each_attempt_all_of_whose_ranks_run_is_told_once_by_launchers_that_judge() -> None:
    sensor = Sensor()
    sensor.run(20, workers=_worker(), launcher=RUNNING)
    assert events(sensor.said) == []
    running = {"workers": _worker(), "launcher": RUNNING, "condition": ADVANCES}
    (first,) = events(sensor.run(60, **running))
    restarting = JobCondition(state=LauncherState.RESTARTING)
    assert events(sensor.run(20, **{**running, "launcher": restarting.state, "condition": restarting})) == []
    (second,) = events(sensor.run(60, **running, attempt=1))
    assert [(each.type, each.attempt) for each in (first, second)] == [
        (EventType.ATTEMPT, 0),
        (EventType.ATTEMPT, 1),
    ]
    # A controller that was away learns of the attempt that runs, and of no other.
    assert events(sensor.detector.snapshot(sensor.now), EventType.ATTEMPT) == [second]


@pytest.mark.parametrize("before", [LauncherState.RUNNING, LauncherState.GAVE_UP])
def test_a_launcher_that_orders_a_stop_is_heard_even_where_it_had_given_up_before(
    before: LauncherState,
) -> None:
    sensor = Sensor()
    workers = _worker(state=DeviceState.FAILED)
    later = JobCondition(state=before, requeue=Requeue.LATER)
    sensor.beat("h0", workers=workers, launcher=before, condition=later)
    stop = JobCondition(state=LauncherState.GAVE_UP, requeue=Requeue.NO, why="KeyError, twice")
    (event,) = events(sensor.beat("h0", workers=workers, launcher=stop.state, condition=stop))
    order = event.order_to_stop
    assert order is not None
    assert order.text == "launcher: gave up, and has ended: KeyError, twice"
    assert events(sensor.beat("h0", workers=workers, launcher=stop.state, condition=stop)) == []


# ---------------------------------------------------------------- the controller


def orders_stop(fleet: Controller, **fields: object) -> Event:
    return diagnosed(
        fleet, cause="exception", advice="stop", text="rank 1 raised KeyError twice", attempt=0, **fields
    )


def gave_up_for_good(fleet: Controller) -> Event:
    event = fleet.event(EventType.WORKER_HB, launcher=LauncherState.GAVE_UP)
    (seen,) = event.evidence
    stop = replace(seen, advice="stop", text="rank 1 raised KeyError twice")
    return replace(event, evidence=(stop,))


@pytest.mark.parametrize("order", [orders_stop, gave_up_for_good])
def test_an_order_to_stop_is_a_verdict_at_once_and_no_restart_follows(
    order: Callable[[Controller], Event],
) -> None:
    fleet = Controller(max_in_job_restarts=5, max_workload_restarts=5)
    fleet.give(order(fleet))
    assert [note for note in fleet.notes if note.startswith("verdict on job:train")] == [
        f"verdict on job:train: the job cannot progress: rank 1 raised KeyError twice, by"
        f" {fleet.state.verdicts['job:train'].evidence[0]}"
    ]
    # The last step of the attempt is read later, its launchers end, and their host is silent at last.
    fleet.now += 1.0
    fleet.give(Progress(workload="train", step=501, age_s=1.5))
    fleet.give(orders_stop(fleet))
    for host in ("h0", "h1"):
        fleet.give(fleet.event(EventType.WORKER_HB, host, launcher=LauncherState.GAVE_UP))
    fleet.give(fleet.event(EventType.HOST_HB))
    for _ in range(48):
        assert fleet.wait(DAY_S / 24) == []
    assert "job:train" in fleet.state.verdicts
    assert len([note for note in fleet.notes if note.startswith("verdict on job:train")]) == 1


def thaw(fleet: Controller) -> None:
    fleet.give(fleet.event(EventType.OPERATOR, "", request=Request.THAW))


def restarted_by_its_owner(fleet: Controller) -> None:
    job = fleet.state.workloads["train"]
    fleet.give(replace(job, run="r2", first_attempt=1_000_000))


def trains_again(fleet: Controller) -> None:
    """In a start of its own, from an older checkpoint: its steps are no best ones yet."""
    fleet.give(Progress(workload="train", step=100, attempt=1, run="r1"))


@pytest.mark.parametrize(
    ("lift", "then"), [(thaw, [RESET]), (restarted_by_its_owner, []), (trains_again, [])]
)
def test_a_person_or_another_start_lifts_the_stop_of_a_job(
    lift: Callable[[Controller], None], then: list[CommandKind]
) -> None:
    fleet = Controller(max_workload_restarts=5, run="r1")
    fleet.give(orders_stop(fleet, run="r1"))
    fleet.give(fleet.event(EventType.WORKER_HB, launcher=LauncherState.GAVE_UP, run="r1"))
    fleet.wait(3600.0)
    lift(fleet)
    assert "job:train" not in fleet.state.verdicts
    assert [command.kind for command in fleet.sent] + fleet.wait(0.1) == then
    # What was said of the earlier start is no order to this one.
    fleet.give(orders_stop(fleet, run="r0"))
    assert "job:train" not in fleet.state.verdicts


def test_a_stopped_job_is_remembered_without_hosts_until_its_verdict_expires() -> None:
    fleet = Controller()
    fleet.give(orders_stop(fleet))
    for name in ("h0", "h1"):
        fleet.give(replace(fleet.state.hosts[name], workload="", state=DeviceState.SPARE))
    for hours in range(23):
        fleet.wait(3600.0)
        assert "train" in fleet.state.workloads, hours
    for _ in range(3):
        fleet.wait(3600.0)
    assert "train" not in fleet.state.workloads
    assert fleet.state.verdicts == {}


def runs(fleet: Controller, attempt: int) -> None:
    fleet.give(fleet.event(EventType.ATTEMPT, "", attempt=attempt, launcher=RUNNING))


@pytest.mark.parametrize("own_s", [0.0, 900.0])
def test_a_job_that_loads_for_hours_after_an_action_is_left_to_its_launchers(own_s: float) -> None:
    fleet = Controller(max_in_job_restarts=5, downtime_threshold_s=own_s)
    assert fleet.happens(EventType.WORKER_HB) == [IN_JOB]
    fleet.end()
    runs(fleet, attempt=1)
    for _ in range(20):
        assert fleet.wait(LIMITS.workload_downtime_threshold_s) == []
    assert fleet.state.incidents["train"].note == "attempt 1 runs, and is left to its launchers"
    # Its ranks fail again, and it is an incident as before.
    assert fleet.happens(EventType.WORKER_HB, attempt=1) == [IN_JOB]


def test_ranks_that_their_launcher_has_restarted_are_no_reason_for_an_action() -> None:
    fleet = Controller(max_in_job_restarts=5)
    fleet.give(fleet.event(EventType.WORKER_HB, launcher=LauncherState.RESTARTING))
    fleet.wait(15.0)
    runs(fleet, attempt=1)
    for _ in range(20):
        assert fleet.wait(LIMITS.workload_downtime_threshold_s) == []
    fleet.advance(500, attempt=1)
    assert fleet.state.incidents == {}
    assert fleet.state.accounts["train"].fruitless == 0


def test_a_launcher_that_pauses_longer_after_each_failure_is_left_to_it() -> None:
    """Its pauses grow to a minute, and each attempt ends at once."""
    fleet = Controller(max_in_job_restarts=5)
    for attempt, pause_s in enumerate((1.0, 2.0, 5.0, 15.0, 30.0, 60.0, 60.0, 60.0)):
        fleet.give(fleet.event(EventType.WORKER_HB, attempt=attempt, launcher=LauncherState.RESTARTING))
        assert fleet.wait(pause_s) == []
        runs(fleet, attempt=attempt + 1)
    assert fleet.sent == []


@pytest.mark.parametrize(("usual_step_s", "within_s"), [(0.3, 4.0), (30.0, 60.0), (320.0, 640.0)])
def test_a_step_within_two_usual_ones_keeps_a_job_from_a_restart(
    usual_step_s: float, within_s: float
) -> None:
    fleet = Controller(max_in_job_restarts=5)
    fleet.give(Progress(workload="train", step=501, usual_step_s=usual_step_s))
    assert fleet.happens(EventType.WORKER_HB) == []
    assert fleet.wait(within_s - LIMITS.coalesce_s - 0.5) == []
    assert fleet.wait(0.5) == [IN_JOB]
    # Nor is the next rung taken before ten of them.
    fleet.end()
    patient_s = max(LIMITS.workload_downtime_threshold_s, 10 * usual_step_s)
    assert fleet.wait(patient_s - 1.0) == []
    assert fleet.wait(1.0) == [IN_JOB]


def lost_ranks(fleet: Controller) -> Event:
    return fleet.event(EventType.WORKER_HB, launcher=LauncherState.RESTARTING)


@pytest.mark.parametrize(("tells", "first"), [(lost_ranks, IN_JOB), (diagnosed, CommandKind.HOT_SWAP)])
def test_ranks_that_ended_by_the_word_of_their_launcher_are_not_waited_for_as_if_they_advanced(
    tells: Callable[[Controller], Event], first: CommandKind
) -> None:
    fleet = Controller(max_in_job_restarts=5)
    fleet.give(Progress(workload="train", step=501, usual_step_s=300.0))
    fleet.give(tells(fleet))
    fleet.wait(LIMITS.coalesce_s)
    fleet.wait(LIMITS.launcher_grace_s - LIMITS.coalesce_s)
    assert first in [command.kind for command in fleet.sent]


def test_an_action_that_fails_while_the_next_attempt_runs_is_not_tried_again() -> None:
    fleet = Controller(max_in_job_restarts=5)
    assert fleet.happens(EventType.WORKER_HB) == [IN_JOB]
    runs(fleet, attempt=1)
    assert fleet.end(OutcomeStatus.FAILED) == []
    assert fleet.wait(LIMITS.workload_downtime_threshold_s) == []


def test_a_guess_that_another_attempt_has_followed_is_over() -> None:
    fleet = Controller(spares=0)
    fleet.give(diagnosed(fleet, confidence="medium"))
    runs(fleet, attempt=1)
    for _ in range(20):
        assert fleet.wait(LIMITS.workload_downtime_threshold_s) == []
    assert "job:train" not in fleet.state.verdicts


def test_a_job_without_a_run_takes_an_attempt_of_any() -> None:
    fleet = Controller()
    fleet.give(WorkloadInfo(workload="train", replicas=2, run="r1"))
    fleet.give(fleet.event(EventType.WORKER_HB, launcher=LauncherState.RESTARTING, run="r1"))
    fleet.give(fleet.event(EventType.ATTEMPT, "", attempt=1, run="r0"))
    assert fleet.state.incidents["train"].runs == -1


# ---------------------------------------------------------------- together


@pytest.mark.parametrize("seed", range(8))
def test_nothing_is_done_to_jobs_that_are_well(seed: int) -> None:
    """Hours of steps of 0.1 to 600 s, evaluations, slow loads and stopped launchers; more by hand."""
    assert play(draw(seed)).violation == ""


def _unjudged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(JobWatch, "is_judged", lambda self, job: False)


def _one_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("supervisor.detection.jobs.advancing_s", lambda least_s, usual_step_s: least_s)
    monkeypatch.setattr("supervisor.decision.guards.advancing_s", lambda least_s, usual_step_s: least_s)


@pytest.mark.parametrize(("mutation", "first"), [(_unjudged, 0), (_one_number, 0)])
def test_without_one_judge_a_job_that_is_well_is_restarted(
    mutation: Callable[[pytest.MonkeyPatch], None], first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutation(monkeypatch)
    played = map(partial(play), map(draw, range(first, first + 20)))
    assert any("and all is well" in result.violation for result in played)
