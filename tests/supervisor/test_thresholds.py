# SPDX-License-Identifier: Apache-2.0
"""Thresholds by their effect: the same story with two values of one, and when its command comes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from supervisor.decision.controller import BaseController
from supervisor.execution import Executor
from supervisor.values import CommandKind, EventType, Outcome, OutcomeStatus
from tests.supervisor.controllers import LIMITS, Controller

#: The fleet of a story, and seconds until its command.
Story = Callable[[Controller], float]


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
    """Each incident ends with a step, so that nothing but the bucket is in the way."""
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


def a_story(story: Story, *, spares: int = 1, job: dict[str, object] | None = None, **limits: float) -> float:
    def policy(known: object, *, shadow: bool) -> BaseController:
        del known
        return BaseController(replace(LIMITS, **limits), shadow=shadow)

    return story(Controller(policy=policy, spares=spares, **{"max_in_job_restarts": 5, **(job or {})}))


@pytest.mark.parametrize("value", [200.0, 400.0])
@pytest.mark.parametrize(
    ("threshold", "story"),
    [
        ("workload_downtime_threshold_s", no_step_after_an_action),
        ("container_termination_threshold_s", an_action_without_an_outcome),
        ("verdict_s", a_job_that_was_given_up),
    ],
)
def test_the_command_comes_when_the_threshold_is_over(threshold: str, story: Story, value: float) -> None:
    assert a_story(story, **{threshold: value}) == value


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


@pytest.mark.parametrize(("at_once", "period_s"), [(2, 200.0), (2, 400.0), (3, 200.0)])
def test_actions_follow_each_other_up_to_the_capacity_and_then_one_each_period(
    at_once: int, period_s: float
) -> None:
    limits = {"actions_at_once": at_once, "action_period_s": period_s, "steps_per_restart": 1}
    within = a_story(partial(one_more_action_than_at_once, begun=at_once - 1), **limits)
    beyond = a_story(partial(one_more_action_than_at_once, begun=at_once), **limits)
    assert within == LIMITS.coalesce_s
    # What came back while the first ones were taken: some seconds for each.
    assert period_s - 20.0 * at_once <= beyond < period_s


@pytest.mark.parametrize("value", [1000.0, 2000.0])
def test_a_cordon_counts_within_its_window_only(value: float) -> None:
    seconds = a_story(a_host_beyond_the_cap, spares=LIMITS.max_cordons + 1, cordon_window_s=value)
    assert value - 100.0 <= seconds <= value + 100.0


@pytest.mark.parametrize(
    ("seconds", "kind"), [(500.0, CommandKind.HOT_SWAP), (1100.0, CommandKind.IN_JOB_RESET)]
)
def test_a_hang_is_remembered_for_the_time_of_suspicion(seconds: float, kind: CommandKind) -> None:
    assert a_story(lambda fleet: a_second_hang_after(fleet, seconds), suspicion_s=1000.0) is kind  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize(("seconds", "suspect"), [(300.0, True), (600.0, False)])
def test_application_xids_count_together_for_the_time_of_suspicion(seconds: float, suspect: bool) -> None:
    def story(fleet: Controller) -> float:
        for workload in ("train", "train", "other"):
            fleet.give(replace(fleet.event(EventType.XID, code=31), workload=workload))
            fleet.now += seconds
        return float("host:h1" in fleet.state.verdicts)

    assert a_story(story, suspicion_s=1000.0) == suspect
