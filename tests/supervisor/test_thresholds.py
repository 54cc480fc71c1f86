# SPDX-License-Identifier: Apache-2.0
"""Thresholds by their effect: the same story with two values of one, and when its command comes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial

import pytest

from supervisor.decision.controller import BaseController
from supervisor.execution import Executor
from supervisor.policy.thresholds import Thresholds
from supervisor.values import CommandKind, EventType, LauncherState, Outcome, OutcomeStatus, Silence
from tests.supervisor.controllers import LIMITS, Controller
from tests.supervisor.sensors import Sensor, _worker, events

#: The fleet of a story, and seconds until its command.
Story = Callable[[Controller], object]


def seconds_until(fleet: Controller, *wanted: CommandKind, most: int = 10_000) -> float:
    """Time passes in seconds until one of `wanted`, or any command, is sent."""
    began = fleet.now
    for _ in range(most):
        sent = fleet.wait(1.0)
        if sent and (not wanted or set(wanted) & set(sent)):
            return fleet.now - began
    raise AssertionError(f"nothing was sent within {most} s")


def no_step_after_an_action(fleet: Controller) -> float:
    fleet.happens(EventType.WORKER_HB)
    fleet.end()
    return seconds_until(fleet)


def an_action_without_an_outcome(fleet: Controller) -> float:
    """The actuator's part: the deadline travels in the command."""
    fleet.happens(EventType.WORKER_HB)
    executor = Executor()
    executor.submit(fleet.sent[-1], 0.0)
    for now in range(10_000):
        for act in executor.tick(float(now)):
            if isinstance(act, Outcome):
                assert act.status is OutcomeStatus.TIMED_OUT
                return float(now)
        executor.looked(fleet.sent[-1].id, None, float(now))
    raise AssertionError("no outcome")


def one_more_action_than_at_once(fleet: Controller, *, begun: int) -> float:
    """Each incident ends with a step, and the budget lasts, so that nothing but the bucket is in the way."""
    for number in range(begun):
        assert fleet.happens(EventType.WORKER_HB, attempt=number) == [CommandKind.IN_JOB_RESET]
        fleet.end()
        fleet.now += 10.0
        fleet.advance(1000 + number, attempt=number + 1)
        fleet.now += LIMITS.advancing_s
    began = fleet.now
    fleet.happens(EventType.WORKER_HB, attempt=begun)
    return fleet.now - began if fleet.state.commands else seconds_until(fleet) + LIMITS.coalesce_s


def a_job_that_was_given_up(fleet: Controller) -> float:
    fleet.happens(EventType.WORKER_HB)
    while "job:train" not in fleet.state.verdicts:
        fleet.stuck()
    return seconds_until(fleet)


def a_host_beyond_the_cap(fleet: Controller) -> float:
    """Another finding each hundred seconds, until the host is taken."""
    for number in range(LIMITS.max_cordons):
        fleet.give(replace(fleet.event(EventType.ECC, f"s{number}"), workload=""))
        fleet.wait(LIMITS.coalesce_s)
        fleet.end()
    began, last = fleet.now, f"s{LIMITS.max_cordons}"
    while not any(command.host == last for command in fleet.sent):
        fleet.give(replace(fleet.event(EventType.ECC, last), workload=""))
        fleet.wait(100.0)
    return fleet.now - began


def a_second_hang_after(fleet: Controller, seconds: float) -> CommandKind:
    fleet.happens(EventType.HANG)
    fleet.end()
    fleet.advance(501, attempt=1)
    fleet.now += seconds
    return fleet.happens(EventType.HANG, attempt=1)[-1]


def policy(limits: Thresholds) -> Callable[..., BaseController]:
    """Makes the default policy with these, for a `Controller` of tests."""

    def make(known: object, *, shadow: bool) -> BaseController:
        del known
        return BaseController(limits, shadow=shadow)

    return make


def a_story(story: Story, *, job: dict[str, object] | None = None, **limits: float) -> float:
    made = policy(replace(LIMITS, **limits))
    return story(Controller(policy=made, **{"max_in_job_restarts": 5, **(job or {})}))


def seconds_until_event(
    sensor: Sensor, *kinds: EventType, silent: Sequence[str] = (), **fields: object
) -> float:
    began = sensor.now
    while not events(sensor.run(1, silent, **fields), *kinds):
        assert sensor.now - began < 10_000
    return sensor.now - began


def a_silent_host(limits: Thresholds) -> float:
    sensor = Sensor(limits=limits)
    return seconds_until_event(sensor, EventType.HOST_HB, silent=["h1"])


def a_silence_of_long_ago(limits: Thresholds) -> float:
    """Its echoes have come; what was silent with it is noticed at the same look."""
    fleet = Controller(policy=policy(limits))
    old = fleet.event(EventType.HOST_HB)
    fleet.give(replace(old, evidence=(replace(old.evidence[0], age_s=60.0),)))
    began = fleet.now
    while not fleet.wait(0.25):
        pass
    return fleet.now - began


def a_job_without_steps(limits: Thresholds) -> float:
    sensor = Sensor(limits=limits)
    sensor.run(5, workers=_worker(step=9, step_age_s=0.0))
    stuck = {"workers": _worker(step=9, step_age_s=0.0)}
    return seconds_until_event(sensor, EventType.HANG, **stuck)


def hosts_that_fall_silent(limits: Thresholds, *, silent: int) -> bool:
    """Whether that freezes a fleet of ten."""
    sensor = Sensor(hosts=10, limits=limits)
    said = sensor.run(60, silent=[f"h{number}" for number in range(2, 2 + silent)])
    return any(isinstance(each, Silence) and each.frozen for each in said)


def a_lost_worker(limits: Thresholds) -> float:
    fleet = Controller(policy=policy(limits), max_in_job_restarts=5)
    fleet.give(fleet.event(EventType.WORKER_HB))
    return seconds_until(fleet)


def a_launcher_at_work(limits: Thresholds) -> float:
    fleet = Controller(policy=policy(limits), max_in_job_restarts=5)
    fleet.give(fleet.event(EventType.WORKER_HB, launcher=LauncherState.RESTARTING))
    return seconds_until(fleet)


def a_step_just_before(limits: Thresholds) -> float:
    fleet = Controller(policy=policy(limits), max_in_job_restarts=5)
    fleet.advance(501)
    fleet.give(fleet.event(EventType.WORKER_HB))
    return seconds_until(fleet)


def steps_after_the_last_restart(limits: Thresholds) -> CommandKind:
    """The budget is spent; 60 steps later a rank is lost again."""
    fleet = Controller(policy=policy(limits), max_in_job_restarts=1)
    fleet.happens(EventType.WORKER_HB)
    fleet.end()
    fleet.now += 10.0
    fleet.advance(560, attempt=1)
    fleet.now += 60.0
    return fleet.happens(EventType.WORKER_HB, attempt=1)[0]


def pauses_between_fruitless_actions(limits: Thresholds) -> list[float]:
    fleet = Controller(policy=policy(limits), max_in_job_restarts=9, downtime_threshold_s=1.0)
    fleet.happens(EventType.WORKER_HB)
    pauses = []
    for _ in range(3):
        fleet.end()
        pauses.append(seconds_until(fleet))
    return pauses


def actions_before_the_verdict(limits: Thresholds) -> int:
    fleet = Controller(policy=policy(limits))
    fleet.happens(EventType.WORKER_HB)
    while "job:train" not in fleet.state.verdicts:
        fleet.stuck()
    return len(fleet.sent)


def broken_hosts(limits: Thresholds) -> int:
    """Hosts that are cordoned of four with a fault of memory, of which two share a rack each."""
    fleet = Controller(policy=policy(limits), spares=4)
    for number in range(4):
        known = fleet.state.hosts[f"s{number}"]
        fleet.give(replace(known, subblock=f"r{number // 2}"))
        fleet.give(replace(fleet.event(EventType.ECC, known.id), workload=""))
        fleet.wait(LIMITS.coalesce_s)
        fleet.end()
    return len({command.host for command in fleet.sent})


def room_to_grow(limits: Thresholds) -> list[CommandKind]:
    fleet = Controller(policy=policy(limits), spares=2, scaling=True, max_replicas=3)
    fleet.now += LIMITS.scale_up_hold_s
    return [command.kind for command in fleet.give(fleet.event(EventType.SCALE_UP, ""))]


def room_to_grow_after_an_incident(limits: Thresholds) -> list[CommandKind]:
    fleet = Controller(policy=policy(limits), spares=2, scaling=True, max_replicas=3, max_in_job_restarts=1)
    fleet.happens(EventType.WORKER_HB)
    fleet.end()
    fleet.now += 10.0
    fleet.advance(501, attempt=1)
    fleet.now += 200.0
    return [command.kind for command in fleet.give(fleet.event(EventType.SCALE_UP, ""))]


def a_spare_that_says_nothing_of_itself(limits: Thresholds) -> CommandKind:
    """A host is lost: the spare is one, or is asked to check itself first."""
    fleet = Controller(policy=policy(limits))
    return fleet.happens(EventType.HOST_HB)[0]


def the_deadline_of_a_swap(limits: Thresholds) -> float:
    fleet = Controller(policy=policy(limits))
    fleet.happens(EventType.HOST_HB)
    return fleet.sent[-1].deadline_s


def application_xids(limits: Thresholds) -> bool:
    """Whether three of one GPU, of two jobs, make its host suspect."""
    fleet = Controller(policy=policy(limits))
    for workload in ("train", "train", "other"):
        fleet.give(replace(fleet.event(EventType.XID, code=31), workload=workload))
    return "host:h1" in fleet.state.verdicts


def with_limits(story: Story, **job: object) -> Callable[[Thresholds], float]:
    """A story of this file about a job that has restarts left."""
    return lambda limits: story(Controller(policy=policy(limits), **{"max_in_job_restarts": 5, **job}))


#: The last report came within the second before.
about = partial(pytest.approx, abs=1.0)
IN_JOB, RESET, UP = CommandKind.IN_JOB_RESET, CommandKind.WORKLOAD_RESET, CommandKind.SCALE_UP
#: Of each threshold a story, and what comes of it with each of two values.
EFFECTS: dict[str, tuple[Callable[[Thresholds], object], dict[float, object]]] = {
    "heartbeat_timeout_s": (a_silent_host, {20.0: about(20.0), 40.0: about(40.0)}),
    "tick_s": (a_silence_of_long_ago, {0.5: 0.5, 1.0: 1.0}),
    "hang_threshold_s": (a_job_without_steps, {60.0: about(60.0), 90.0: about(90.0)}),
    "silence_share": (partial(hosts_that_fall_silent, silent=4), {0.3: True, 0.5: False}),
    "silence_min_hosts": (partial(hosts_that_fall_silent, silent=4), {4: True, 5: False}),
    "coalesce_s": (a_lost_worker, {2.0: 2.0, 5.0: 5.0}),
    "launcher_grace_s": (a_launcher_at_work, {30.0: 30.0, 60.0: 60.0}),
    "advancing_s": (a_step_just_before, {5.0: 5.0, 9.0: 9.0}),
    "workload_downtime_threshold_s": (with_limits(no_step_after_an_action), {200.0: 200.0, 400.0: 400.0}),
    "container_termination_threshold_s": (
        with_limits(an_action_without_an_outcome),
        {200.0: 200.0, 400.0: 400.0},
    ),
    "hot_swap_threshold_s": (the_deadline_of_a_swap, {60.0: 60.0, 90.0: 90.0}),
    "steps_per_restart": (steps_after_the_last_restart, {50: IN_JOB, 100: RESET}),
    "actions_at_once": (
        with_limits(partial(one_more_action_than_at_once, begun=2), max_in_job_restarts=99),
        {2: pytest.approx(570.0, abs=20.0), 3: LIMITS.coalesce_s},
    ),
    "action_period_s": (
        with_limits(partial(one_more_action_than_at_once, begun=5), max_in_job_restarts=99),
        {200.0: pytest.approx(130.0, abs=30.0), 400.0: pytest.approx(330.0, abs=30.0)},
    ),
    "backoff_s": (pauses_between_fruitless_actions, {10.0: [10.0, 20.0, 40.0], 20.0: [20.0, 40.0, 80.0]}),
    "backoff_limit_s": (
        pauses_between_fruitless_actions,
        {20.0: [15.0, 20.0, 20.0], 40.0: [15.0, 30.0, 40.0]},
    ),
    "max_fruitless": (actions_before_the_verdict, {2: 2, 4: 4}),
    "cordon_window_s": (
        with_limits(a_host_beyond_the_cap, spares=LIMITS.max_cordons + 1),
        {1000.0: pytest.approx(1000.0, abs=100.0), 2000.0: pytest.approx(2000.0, abs=100.0)},
    ),
    "max_cordons": (broken_hosts, {2: 2, 3: 3}),
    "max_cordons_per_domain": (broken_hosts, {1: 2, 2: 4}),
    "spare_floor": (room_to_grow, {1: [UP], 2: []}),
    "spare_check_s": (
        a_spare_that_says_nothing_of_itself,
        {0.0: CommandKind.HOT_SWAP, 600.0: RESET},
    ),
    "scale_up_hold_s": (room_to_grow_after_an_incident, {100.0: [UP], 300.0: []}),
    "verdict_s": (with_limits(a_job_that_was_given_up), {200.0: 200.0, 400.0: 400.0}),
    "suspicion_s": (
        with_limits(partial(a_second_hang_after, seconds=500.0)),
        {1000.0: CommandKind.HOT_SWAP, 300.0: IN_JOB},
    ),
    "suspicious_xids": (application_xids, {3: True, 4: False}),
}


def test_each_threshold_has_a_story_that_two_of_its_values_end_in_two_ways() -> None:
    assert set(EFFECTS) == {field.name for field in fields(Thresholds)}
    for name, (_, ends) in EFFECTS.items():
        first, second = ends.values()
        assert first != second, name


@pytest.mark.parametrize(
    ("threshold", "value"), [(name, value) for name, (_, ends) in EFFECTS.items() for value in ends]
)
def test_a_threshold_does_what_its_value_says(threshold: str, value: float) -> None:
    story, ends = EFFECTS[threshold]
    assert story(replace(LIMITS, **{threshold: value})) == ends[value]


@pytest.mark.parametrize("value", [200.0, 400.0])
@pytest.mark.parametrize(
    ("own", "story"),
    [
        ("downtime_threshold_s", no_step_after_an_action),
        ("termination_threshold_s", an_action_without_an_outcome),
    ],
)
def test_a_jobs_own_threshold_goes_first(own: str, story: Story, value: float) -> None:
    assert a_story(story, job={own: value}) == value


@pytest.mark.parametrize(("own", "wanted"), [(0.0, 90.0), (30.0, 30.0)])
def test_a_hot_swap_has_a_deadline_of_its_own(own: float, wanted: float) -> None:
    def story(fleet: Controller) -> float:
        fleet.happens(EventType.HOST_HB)
        (swap,) = fleet.sent
        return swap.deadline_s

    assert a_story(story, job={"termination_threshold_s": own}, hot_swap_threshold_s=90.0) == wanted


@pytest.mark.parametrize(("seconds", "suspect"), [(300.0, True), (600.0, False)])
def test_application_xids_count_together_for_the_time_of_suspicion(seconds: float, suspect: bool) -> None:
    def story(fleet: Controller) -> float:
        for workload in ("train", "train", "other"):
            fleet.give(replace(fleet.event(EventType.XID, code=31), workload=workload))
            fleet.now += seconds
        return float("host:h1" in fleet.state.verdicts)

    assert a_story(story, suspicion_s=1000.0) == suspect
