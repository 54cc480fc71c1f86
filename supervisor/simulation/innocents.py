# SPDX-License-Identifier: Apache-2.0
"""Histories of jobs that are well: whatever their steps take, nothing may be done to them.

Each history is hours of one fleet under the default thresholds: steps of 0.1 to 600 s, evaluations, slow
loads, launchers that restart their ranks or are stopped, and parts of the supervisor that fail.  No host is
lost.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import partial

from supervisor.decision.controller import BaseController
from supervisor.policy.thresholds import Thresholds
from supervisor.simulation.faults import KINDS, SimFault, hit_hosts
from supervisor.simulation.fleet import Fleet, SimJob
from supervisor.simulation.invariants import Invariants, Violation
from supervisor.simulation.loop import Loop
from supervisor.simulation.plane import Plane
from supervisor.simulation.run import Result, Scenario, build_fleet
from supervisor.values import Command, CommandKind, LauncherState

PERIOD_S = 15.0
#: At least so many steps and seconds of each job are played.
_STEPS, _SECONDS = 12, 3600.0
#: The default numbers, looked at less often.
THRESHOLDS = Thresholds(tick_s=1.0)
#: What a program whose launcher tells nothing may take without a step, below the supervisor's own number.
_UNTOLD_S = 250.0
#: Of `KINDS`, what harms no job.
_HARMLESS = (
    *("daemon dies", "sensor crashes", "sensor stops", "sensor is cut off", "controller crashes"),
    *("controller stops", "second controller", "actuator crashes", "supervisor stops", "host is slow"),
)


class _Untouched(Invariants):
    """No host is cordoned and no job is restarted; a command that is withdrawn in time is none."""

    def command_starts(self, command: Command) -> None:
        super().command_starts(command)
        if command.kind is not CommandKind.SCALE_UP:
            raise Violation(f"{command.kind.value} {command.id} for {command.incident}, and all is well")


def draw(seed: int) -> Scenario:
    draws = random.Random(seed)  # noqa: S311 - a repeatable history is what is wanted
    hosts = draws.randint(4, 9)
    faults = [
        SimFault(
            at=round(60.0 + _SECONDS * draws.random(), 1),
            kind=draws.choice(_HARMLESS),
            target=draws.randrange(hosts),
            seconds=draws.choice((3.0, 20.0)),
        )
        for _ in range(draws.randint(0, 6))
    ]
    return Scenario(seed=seed, hosts=hosts, faults=tuple(faults), reckless=False)


def set_pace(job: SimJob, draws: random.Random) -> None:
    """Draw steps of 0.1 to 600 s, evaluations of up to an hour, and a load of up to an hour."""
    job.tells = draws.random() < 0.7
    if not job.tells:
        job.info = replace(job.info, downtime_threshold_s=0.0)  # a number of the user's own counts
    job.step_s = 0.1 * 6000.0 ** draws.random()
    longest_s = 3600.0 if job.tells else _UNTOLD_S
    job.loads_s = longest_s * draws.random() ** 3
    if draws.random() < 0.6:
        job.evaluates = draws.choice((2, 20, 500)), longest_s * draws.random() ** 3


def play(drawn: Scenario, limits: Thresholds = THRESHOLDS) -> Result:
    """The history of `drawn`, to its end or to the first thing that was done."""
    loop = Loop(drawn.seed)
    fleet = build_fleet(loop, drawn.hosts)
    for job in fleet.jobs.values():
        set_pace(job, loop.random)
        if not job.tells and any(fault.kind == "sensor crashes" for fault in drawn.faults):
            job.step_s = min(job.step_s, _UNTOLD_S)  # it may learn nothing of the first step
    plane = Plane(fleet, lambda: BaseController(limits), limits, PERIOD_S)
    watch, violation = _Untouched(plane, limits), ""
    try:
        _play(drawn, plane, watch)
    except Violation as error:
        violation = f"at {loop.now:.1f} s: {error}"
    finally:
        history = tuple(plane.history())
        plane.close()
    return Result(
        scenario=drawn,
        violation=violation,
        history=history,
        seconds=loop.now,
        messages=loop.steps,
        effects=watch.effects,
        steps=sum(job.step(loop.now) for job in fleet.jobs.values()),
    )


def _play(drawn: Scenario, plane: Plane, watch: Invariants) -> None:
    loop = plane.loop
    for fault in drawn.faults:
        loop.after(fault.at, partial(_hit, fault, plane, watch))
    jobs = plane.fleet.jobs
    end = max(_SECONDS, *(4 * job.loads_s + _STEPS * job.step_s for job in jobs.values()))
    for job in jobs.values():
        loop.after(end / 2 * loop.random.random(), partial(_stop_launcher, plane, job))
        if job.tells:
            loop.after(end / 2 * loop.random.random(), partial(_fail_rank, plane.fleet, job))
    while loop.now < end and loop.step():
        pass
    if idle := [name for name, job in jobs.items() if job.since is None]:
        raise Violation(f"{', '.join(idle)} does not train")


def _hit(fault: SimFault, plane: Plane, watch: Invariants) -> None:
    watch.fault_hits(fault)
    if fault.kind != "daemon dies" or hit_hosts(plane, fault)[0].stopped_at is None:
        KINDS[fault.kind](plane, fault)


def _stop_launcher(plane: Plane, job: SimJob) -> None:
    """SIGSTOP of one launcher, beside ranks that go on; the other hosts still tell their steps.

    While a job evaluates, nobody can tell such a launcher from one that is lost with its ranks.
    """
    loop, host = plane.loop, plane.fleet.hosts[job.hosts[0]]
    known = job.since is not None and job.step(loop.now) > job.began
    if len(job.hosts) < 2 or not known or host.failed or job.evaluates is not None:
        return
    host.stopped_at = loop.now

    def go_on() -> None:
        host.stopped_at = None
        plane.send_report(host)

    loop.after(math.exp(loop.random.uniform(math.log(10.0), math.log(1200.0))), go_on)


def _fail_rank(fleet: Fleet, job: SimJob) -> None:
    """A rank dies, and its launcher restarts the ranks, which load for as long as they load."""
    hosts = [fleet.hosts[name] for name in job.hosts]
    if job.since is not None and all(host.stopped_at is None for host in hosts):
        fleet.fail_worker(hosts[-1], LauncherState.RESTARTING)
