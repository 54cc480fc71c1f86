# SPDX-License-Identifier: Apache-2.0
"""Actions that are cut short between any two calls: the JobSet is never lost, and nothing happens twice."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import pytest

from resiliency.runtime import elapsed_s
from supervisor.execution import Executor, Pace, Perform
from supervisor.orchestrators.gke import RIGHTS
from supervisor.orchestrators.gke.view import Times
from supervisor.testing.kubernetes import Cluster, Fault, FaultKind
from supervisor.values import Command, Outcome, OutcomeStatus
from tests.supervisor_kubernetes.fleet import TIMES, Adapter, held_or_done, kill_at
from tests.supervisor_kubernetes.scenarios import EACH_ACTION, SCENARIOS, Scenario, Seen, changing_calls
from tests.supervisor_kubernetes.virtual_time import run_in_virtual_time as run

pytestmark = pytest.mark.virtual_time

BOTH = (FaultKind.HOLD_BEFORE, FaultKind.HOLD_AFTER)
#: Clusters that are played side by side; most of their time is waiting.
AT_ONCE = 4


async def changes_of(scenario: Scenario) -> list[Fault]:
    """Where a try that nothing disturbs can be cut short."""
    async with scenario.played() as (cluster, seen):
        async with Adapter(cluster, "one") as adapter:
            done = await adapter.do("c1", scenario.kind, **scenario.fields(cluster))
            assert done.status is OutcomeStatus.DONE, done
        await settled(cluster, scenario, seen)
        return changing_calls(cluster, "one")


async def gathered(work: Sequence[tuple[str, Awaitable[None]]]) -> None:
    """All of them, each with its name in the error."""
    free = asyncio.Semaphore(AT_ONCE)

    async def one(name: str, todo: Awaitable[None]) -> None:
        async with free:
            try:
                await todo
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error

    await asyncio.gather(*(one(name, todo) for name, todo in work))


async def settled(cluster: Cluster, scenario: Scenario, seen: Seen) -> None:
    await cluster.until(
        lambda: cluster.running("a") == scenario.running and not any(cluster.store.all("configmaps")),
        f"never as wanted: {cluster.running('a')}",
    )
    scenario.check(cluster, seen)


async def killed_at(scenario: Scenario, fault: Fault) -> None:
    """The adapter is killed at a call; another one gets the command again."""
    async with scenario.played() as (cluster, seen):
        fields = scenario.fields(cluster)
        await kill_at(cluster, fault, Command(epoch=1, id="c1", kind=scenario.kind, **fields))
        async with Adapter(cluster, "two") as second:
            done = await second.do("c1", scenario.kind, epoch=2, **fields)
            assert done.status is OutcomeStatus.DONE, done
            await settled(cluster, scenario, seen)


async def without_a_server_at(scenario: Scenario, fault: Fault) -> None:
    """The API server goes away at a call, and comes back."""

    def is_missed(cluster: Cluster, adapter: Adapter) -> bool:
        return bool(cluster.api.missed)

    await _without_a_server_at(scenario, fault, TIMES, is_missed)


async def without_a_server_for_long_at(scenario: Scenario, fault: Fault) -> None:
    """It stays away until the adapter's lease has lapsed, and several renewals of it have failed."""
    times = replace(TIMES, lease_s=1.0)

    def has_lapsed(cluster: Cluster, adapter: Adapter) -> bool:
        lapsed_for = elapsed_s() - adapter.orchestrator._lease._until
        return lapsed_for > 3 * times.lease_s / 5 and cluster.api.missed > 5

    await _without_a_server_at(scenario, fault, times, has_lapsed)


async def _without_a_server_at(
    scenario: Scenario, fault: Fault, times: Times, enough: Callable[[Cluster, Adapter], bool]
) -> None:
    async with scenario.played() as (cluster, seen), Adapter(cluster, "one", times) as adapter:
        cluster.api.faults.place(fault)
        work = asyncio.ensure_future(adapter.do("c1", scenario.kind, **scenario.fields(cluster)))
        await held_or_done(cluster, work)
        cluster.api.down = True
        await cluster.until(lambda: enough(cluster, adapter), "nothing is asked of the server that is away")
        cluster.api.down = False
        done = await work
        assert done.status is OutcomeStatus.DONE, done
        await settled(cluster, scenario, seen)


def cut_everywhere(
    scenario: Scenario, cut: Callable[[Scenario, Fault], Awaitable[None]], kinds: Sequence[FaultKind]
) -> Awaitable[None]:
    async def work() -> None:
        faults = await changes_of(scenario)
        assert faults
        await gathered(
            [
                (
                    f"{kind.value} {fault.verb} {fault.resource} {fault.call}",
                    cut(scenario, replace(fault, kind=kind)),
                )
                for fault in faults
                for kind in kinds
            ]
        )

    return work()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        name
        if name in EACH_ACTION
        else pytest.param(name, marks=pytest.mark.thorough("another case of the same action is near"))
        for name in SCENARIOS
    ],
)
def test_an_action_that_is_killed_between_any_two_calls_is_finished_once_by_the_next_adapter(
    name: str,
) -> None:
    run(cut_everywhere(SCENARIOS[name], killed_at, BOTH))


@pytest.mark.slow
@pytest.mark.parametrize("name", EACH_ACTION)
def test_an_action_survives_an_api_server_that_is_away_at_any_of_its_calls(name: str) -> None:
    run(cut_everywhere(SCENARIOS[name], without_a_server_at, (FaultKind.HOLD_AFTER,)))


@pytest.mark.thorough("one that is away at any call is near")
@pytest.mark.slow
@pytest.mark.parametrize("name", EACH_ACTION)
def test_an_action_survives_an_api_server_that_is_away_for_longer_than_the_lease(name: str) -> None:
    run(cut_everywhere(SCENARIOS[name], without_a_server_for_long_at, (FaultKind.HOLD_AFTER,)))


#: The actuator's pace and a command's deadline, so many times as fast.
_SCALE = 20.0
_PACE = Pace(
    look_s=Pace().look_s / _SCALE,
    try_s=Pace().try_s / _SCALE,
    retry_s=Pace().retry_s / _SCALE,
    retry_limit_s=Pace().retry_limit_s / _SCALE,
)


async def outcome_of(adapter: Adapter, command: Command) -> Outcome:
    """What the actuator's own logic makes of a command: its tries, its pauses, its deadline."""
    executor, loop = Executor(_PACE), asyncio.get_running_loop()
    due = executor.submit(command, loop.time())

    def try_it(act: Perform) -> None:
        adapter.orchestrator.perform(
            act.command,
            lambda answer: due.extend(executor.answered(command.id, act.number, answer, loop.time())),
        )

    while True:
        while due:
            act = due.pop(0)
            if isinstance(act, Outcome):
                return act
            assert isinstance(act, Perform)
            try_it(act)
        due += executor.tick(loop.time())
        await asyncio.sleep(0.02)


@pytest.mark.thorough("one that is away at any call is near")
@pytest.mark.slow
async def test_a_command_outlives_an_api_server_that_is_away_for_half_of_its_deadline() -> None:
    scenario = SCENARIOS["hot swap"]
    times = replace(TIMES, lease_s=1.0)
    async with scenario.played() as (cluster, seen), Adapter(cluster, "one", times) as adapter:
        cluster.api.faults.place(Fault(verb="delete", resource="pods", kind=FaultKind.HOLD_AFTER))
        command = Command(epoch=1, id="c1", kind=scenario.kind, **scenario.fields(cluster))
        deadline_s = command.deadline_s / _SCALE
        command = replace(command, deadline_s=deadline_s)
        begun, trying = time.monotonic(), asyncio.ensure_future(outcome_of(adapter, command))
        await cluster.until(cluster.api.held.is_set, "the pod is not deleted")
        cluster.api.down = True
        await cluster.until(lambda: time.monotonic() - begun > deadline_s / 2, "time stands still")
        cluster.api.down = False
        outcome = await trying
        assert outcome.status is OutcomeStatus.DONE, outcome
        await settled(cluster, scenario, seen)


async def refused_everywhere(scenario: Scenario, fault: Fault) -> None:
    """Each kind of call gets the fault the first time."""
    async with scenario.played() as (cluster, seen), Adapter(cluster, "one") as adapter:
        cluster.api.faults.place(
            *(replace(fault, verb=verb, resource=right.resource) for right in RIGHTS for verb in right.verbs)
        )
        done = await adapter.do("c1", scenario.kind, **scenario.fields(cluster))
        assert done.status is OutcomeStatus.DONE, done
        await settled(cluster, scenario, seen)


@pytest.mark.thorough("a server that is away at any call is near")
@pytest.mark.slow
@pytest.mark.parametrize("name", [*EACH_ACTION, "hot swap by eviction"])
def test_an_action_survives_conflicts_throttling_errors_and_lost_answers(name: str) -> None:
    faults = {
        "409": Fault(status=409),
        "429": Fault(status=429, retry_after_s=0),
        "500": Fault(status=500),
        "a lost answer": Fault(kind=FaultKind.DROP_AFTER),
        "latency": Fault(delay_s=0.1, times=0),
    }
    run(gathered([(text, refused_everywhere(SCENARIOS[name], fault)) for text, fault in faults.items()]))
