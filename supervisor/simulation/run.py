# SPDX-License-Identifier: Apache-2.0
"""One history from a seed: a fleet, its faults, and the wait until all is well or said not to be."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from supervisor.decision.controller import BaseController
from supervisor.decision.turn import EventReport
from supervisor.policy.thresholds import Thresholds
from supervisor.simulation.faults import KINDS, LATE_SPARE, NAME_AGAIN, SimFault, draw_faults
from supervisor.simulation.fleet import Fleet, SimHost, SimJob
from supervisor.simulation.invariants import Invariants, Violation
from supervisor.simulation.loop import Loop
from supervisor.simulation.plane import Plane
from supervisor.values import HostInfo, Request, WorkloadInfo

#: Short enough that a history of minutes holds several rungs of the ladder.
THRESHOLDS = Thresholds(
    heartbeat_timeout_s=20.0,
    tick_s=1.0,
    hang_threshold_s=40.0,
    workload_downtime_threshold_s=60.0,
    container_termination_threshold_s=90.0,
    launcher_grace_s=20.0,
    steps_per_restart=50,
    actions_at_once=2,
    action_period_s=60.0,
    backoff_s=5.0,
    backoff_limit_s=40.0,
    max_fruitless=4,
    max_cordons=2,
    max_cordons_per_domain=1,
    scale_up_hold_s=60.0,
    verdict_s=7200.0,
    suspicion_s=600.0,
)
PERIOD_S = 10.0
#: Of so many histories one is of jobs whose launchers tell how they are.
_TELLS_EACH = 5
#: A history must have come to rest that long after its last fault.
SETTLED_WITHIN_S = 1500.0


class RecklessController(BaseController):
    """A user's policy at its worst: everything at once, for every report.  The guards must be enough."""

    def event_policy(self, event_reports: Sequence[EventReport]) -> None:
        for report in event_reports:
            self.trigger_cordon_host(report)
            self.trigger_scale_up(report)
            self.trigger_scale_down(report)
            self.trigger_hot_swap(report)
            self.trigger_in_job_reset(report)
            self.trigger_workload_reset(report)
            self.trigger_workload_recreation(report)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """All that a run depends on.  `tells`: launchers tell how their jobs are, and end ranks that hang."""

    seed: int
    hosts: int
    faults: tuple[SimFault, ...]
    reckless: bool
    tells: bool = False


@dataclass(frozen=True, kw_only=True)
class Result:
    """What came of a run; `violation` is empty where all invariants held."""

    scenario: Scenario
    violation: str
    history: tuple[str, ...]
    seconds: float
    messages: int
    effects: int
    steps: int


def scenario(seed: int, hosts: int) -> Scenario:
    """The history of `seed`: with few hosts their number varies as well."""
    draw = random.Random(seed)  # noqa: S311 - a repeatable history is what is wanted
    count = draw.randint(4, hosts) if hosts <= 16 else hosts
    faults, reckless = draw_faults(draw, count, 200.0), draw.random() < 0.2
    if draw.random() < 0.2:
        at = round(max(faults[-1].at, 40.0) + 60.0 * draw.random(), 1)
        faults.append(SimFault(at=at, kind=NAME_AGAIN, target=draw.randrange(count)))
    # A host is lost for good, and what can take its place comes later.
    if draw.random() < 0.2 and all(fault.kind != "partition" for fault in faults):
        for kind in ("host dies", LATE_SPARE, LATE_SPARE):
            at, target = round(20.0 + 200.0 * draw.random(), 1), draw.randrange(count)
            faults.append(SimFault(at=at, kind=kind, target=target))
    return Scenario(
        seed=seed, hosts=count, faults=tuple(faults), reckless=reckless, tells=seed % _TELLS_EACH == 4
    )


def build_fleet(loop: Loop, hosts: int) -> Fleet:
    """Hosts in racks of four; most work for one or more jobs, the rest are spares.

    Some hosts that no job has at first have more workers than jobs do, or are in another zone.
    """
    fleet, draw = Fleet(loop, workers_per_host=1), loop.random
    spares = draw.randint(0, max(1, hosts // 4))
    racks = 4
    for number in range(hosts):
        spare = number >= hosts - spares
        info = HostInfo(
            id=f"h{number}",
            name=f"n{number}",
            subblock=f"r{number // racks}",
            zone="y" if spare and number % 5 == 0 else "z",
            workers_per_host=2 if spare and number % 4 == 0 else 1,
        )
        fleet.hosts[info.id] = SimHost(info=info)
    names = list(fleet.hosts)[: hosts - spares]
    largest = 8 if hosts <= 16 else 64
    while names:
        size = min(len(names), draw.randint(2, largest))
        mine, names = names[:size], names[size:]
        scaling = draw.random() < 0.4
        job_info = WorkloadInfo(
            workload=f"j{len(fleet.jobs)}",
            replicas=size,
            min_replicas=max(1, size - 2),
            max_replicas=size + 1 if draw.random() < 0.3 else size,
            max_in_job_restarts=draw.randint(0, 2),
            max_workload_restarts=draw.randint(0, 2),
            scaling=scaling,
            downtime_threshold_s=draw.choice((0.0, 100.0)),
        )
        job = SimJob(info=job_info, hosts=mine, step_s=0.5 + draw.random())
        fleet.jobs[job_info.workload] = job
        for name in mine:
            fleet.hosts[name].info = replace(fleet.hosts[name].info, workload=job_info.workload)
        fleet.begin_run(job)
    return fleet


def run(
    scenario: Scenario,
    *,
    controller: Callable[[], BaseController] | None = None,
    thresholds: Thresholds = THRESHOLDS,
) -> Result:
    """Play one history to its end, or to the first violated invariant."""
    loop = Loop(scenario.seed)
    fleet = build_fleet(loop, scenario.hosts)
    for job in fleet.jobs.values():
        job.tells = scenario.tells
    chosen = RecklessController if scenario.reckless else BaseController
    plane = Plane(fleet, controller or (lambda: chosen(thresholds)), thresholds, PERIOD_S)
    invariants = Invariants(plane, thresholds)
    violation = ""
    try:
        _play(scenario, plane, invariants)
    except Violation as error:
        violation = f"at {loop.now:.1f} s: {error}"
    finally:
        history = tuple(plane.history())
        plane.close()
    return Result(
        scenario=scenario,
        violation=violation,
        history=history,
        seconds=loop.now,
        messages=loop.steps,
        effects=invariants.effects,
        steps=sum(job.step(loop.now) for job in fleet.jobs.values()),
    )


def _play(scenario: Scenario, plane: Plane, invariants: Invariants) -> None:
    loop = plane.loop
    for fault in scenario.faults:
        loop.after(fault.at, partial(_hit, fault, plane, invariants))
    quiet_at = max([fault.at + fault.seconds for fault in scenario.faults], default=0.0) + 30.0
    look_at = quiet_at
    while loop.step():
        if loop.now < look_at:
            continue
        # Nothing may be left that the faults have begun, and no new trouble may come of it.
        unsettled = invariants.unsettled()
        if not unsettled:
            return
        # A freeze that does not heal is a stated verdict; a person looks, and says that the hosts are gone.
        if loop.now > quiet_at + 100.0 and "frozen" in unsettled:
            plane.ask(Request.THAW)
        if scenario.reckless and loop.now > quiet_at + 120.0:
            return  # such a policy promises no progress, only no harm
        if loop.now > quiet_at + SETTLED_WITHIN_S:
            raise Violation(f"no rest {SETTLED_WITHIN_S:g} s after the last fault: {unsettled}")
        look_at = loop.now + 10.0


def _hit(fault: SimFault, plane: Plane, invariants: Invariants) -> None:
    invariants.fault_hits(fault)
    KINDS[fault.kind](plane, fault)


def shrink(failing: Scenario, fails: Callable[[Scenario], bool]) -> Scenario:
    """The history with as few faults as still fail: each is dropped in turn until none can be."""
    smaller = True
    while smaller:
        smaller = False
        for index in range(len(failing.faults)):
            less = replace(failing, faults=failing.faults[:index] + failing.faults[index + 1 :])
            if fails(less):
                failing, smaller = less, True
                break
    return failing
