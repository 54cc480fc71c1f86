# SPDX-License-Identifier: Apache-2.0
"""What goes wrong, as values drawn from a seed: a history is a list of them, and can be cut."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from supervisor.simulation.fleet import SimHost, SimJob
from supervisor.simulation.plane import Plane
from supervisor.values import EventType, HostInfo, LauncherState, Request


@dataclass(frozen=True, kw_only=True)
class SimFault:
    """At `at` seconds, `kind` hits host or job number `target` for `seconds`."""

    at: float
    kind: str
    target: int = 0
    seconds: float = 30.0
    share: float = 0.0
    code: int = 0

    def __str__(self) -> str:
        more = [f"share {self.share:.2f}"] * bool(self.share) + [f"code {self.code}"] * bool(self.code)
        return ", ".join(
            [f"{self.at:7.1f} s {self.kind} of {self.target}", f"for {self.seconds:.0f} s", *more]
        )


def hit_hosts(plane: Plane, fault: SimFault) -> list[SimHost]:
    """The target and, for a share, the hosts after it."""
    hosts = list(plane.fleet.hosts.values())
    count = max(1, round(fault.share * len(hosts)))
    return [hosts[(fault.target + index) % len(hosts)] for index in range(count)]


def _job(plane: Plane, fault: SimFault) -> SimJob:
    jobs = list(plane.fleet.jobs.values())
    return jobs[fault.target % len(jobs)]


def _worker_dies(plane: Plane, fault: SimFault) -> None:
    (host,) = hit_hosts(plane, fault)
    at_it = fault.code % 2 == 0
    plane.fleet.fail_worker(host, LauncherState.RESTARTING if at_it else LauncherState.GAVE_UP)


def _host_dies(plane: Plane, fault: SimFault) -> None:
    for host in hit_hosts(plane, fault):
        plane.fleet.kill_host(host)
        plane.end_stream(host)
        if fault.seconds:
            plane.loop.after(
                fault.seconds, partial(plane.fleet.boot_host, host, launches=fault.code % 2 == 1)
            )


def _daemon_dies(plane: Plane, fault: SimFault) -> None:
    (host,) = hit_hosts(plane, fault)
    if not host.alive:
        return
    host.daemon = False
    plane.end_stream(host)

    def start() -> None:
        if host.alive and not host.daemon:
            host.daemon = True
            host.incarnation += 1
            host.sequence = 0

    plane.loop.after(fault.seconds, start)


def _hangs(plane: Plane, fault: SimFault) -> None:
    job = _job(plane, fault)
    plane.fleet.hang(job, plane.fleet.hosts[job.hosts[fault.code % len(job.hosts)]])


def _stalls(plane: Plane, fault: SimFault) -> None:
    """Its launchers restart the ranks, which hang before their first step."""
    job = _job(plane, fault)
    host = plane.fleet.hosts[job.hosts[fault.code % len(job.hosts)]]
    if job.since is not None and host.alive:
        job.stalls = True
        plane.fleet.fail_worker(host, LauncherState.RESTARTING)


def _for_hosts(attribute: str, value: object, well: object) -> Callable[[Plane, SimFault], None]:
    def hit(plane: Plane, fault: SimFault) -> None:
        hosts = hit_hosts(plane, fault)

        def put(what: object) -> None:
            for host in hosts:
                setattr(host, attribute, what)

        put(value)
        plane.loop.after(fault.seconds, lambda: put(well))

    return hit


def _slow(plane: Plane, fault: SimFault) -> None:
    job = _job(plane, fault)

    def change(factor: float) -> None:
        running = job.since is not None
        now = plane.loop.now
        if running:
            job.base, job.since = job.step(now), job.step_at(now)
        job.step_s *= factor

    change(3.0)
    plane.loop.after(fault.seconds, lambda: change(1 / 3.0))


def _xid(plane: Plane, fault: SimFault) -> None:
    (host,) = hit_hosts(plane, fault)
    if not host.alive:
        return
    plane.fleet.find(host, EventType.XID, fault.code)
    if fault.code == 79:
        host.broken = True
        plane.fleet.find(host, EventType.XID, 31)
        plane.fleet.fail_worker(host, LauncherState.GAVE_UP)
    elif fault.code == 31:
        plane.fleet.fail_worker(host, LauncherState.GAVE_UP)
    plane.send_report(host)


def _ecc(plane: Plane, fault: SimFault) -> None:
    (host,) = hit_hosts(plane, fault)
    host.broken = True
    plane.fleet.find(host, EventType.ECC, None)
    plane.fleet.fail_worker(host, LauncherState.GAVE_UP)
    plane.send_report(host)


def _diagnosed(plane: Plane, fault: SimFault) -> None:
    """A launcher names its broken host; or it blames a whole one, as an echo, or for an attempt long ago."""
    (host,) = hit_hosts(plane, fault)
    job = plane.fleet.job_of(host)
    if job is None or not host.alive:
        return
    cause, attempt, run = "gpu_fault", job.attempt, job.info.run
    if fault.code % 4 < 2:
        host.broken = True
    elif fault.code % 4 == 2:
        cause = "peer_lost"
    elif job.since is not None and job.step(plane.loop.now) > job.began and attempt > 0:
        attempt -= 1  # no rank of it is left
    else:
        run = "earlier"
    plane.fleet.diagnose(host, cause, attempt=attempt, run=run)
    at_it = fault.code % 8 < 6
    plane.fleet.fail_worker(host, LauncherState.RESTARTING if at_it else LauncherState.GAVE_UP)
    plane.send_report(host)


def _partition(plane: Plane, fault: SimFault) -> None:
    """Reports are lost without a word; a connection that ends shows it at once."""
    hosts = hit_hosts(plane, fault)
    for host in hosts:
        if fault.code % 2:
            plane.end_stream(host)
        host.cut = True

    def heal() -> None:
        for host in hosts:
            host.cut = False
            plane.fleet.changed(host)  # a stream that did not end delivers late what it was given

    plane.loop.after(fault.seconds, heal)


def _crash_write(when: str) -> Callable[[Plane, SimFault], None]:
    def arm(plane: Plane, fault: SimFault) -> None:
        plane.log.crash_at = when

    return arm


def _disk_full(plane: Plane, fault: SimFault) -> None:
    plane.log.full = True

    def make_room() -> None:
        plane.log.full = False

    plane.loop.after(fault.seconds, make_room)


def _api_down(plane: Plane, fault: SimFault) -> None:
    plane.orchestrator.down = True
    plane.loop.after(fault.seconds, lambda: setattr(plane.orchestrator, "down", False))


def _api_flaky(plane: Plane, fault: SimFault) -> None:
    plane.orchestrator.flaky = 0.6
    plane.loop.after(fault.seconds, lambda: setattr(plane.orchestrator, "flaky", 0.0))


def _fragile(plane: Plane, fault: SimFault) -> None:
    """The job's own error, at the same place after each start."""
    job = _job(plane, fault)
    job.fragile = True
    plane.fleet.fail_worker(plane.fleet.hosts[job.hosts[0]], LauncherState.GAVE_UP)


def _name_again(plane: Plane, fault: SimFault) -> None:
    """A person ends the job and starts another one under its name."""
    plane.fleet.begin_run(_job(plane, fault))


def _spare_comes(plane: Plane, fault: SimFault) -> None:
    """A node is added, as an autoscaler does for a pod that waits."""
    number = len(plane.fleet.hosts)
    plane.add_host(SimHost(info=HostInfo(id=f"h{number}", name=f"n{number}", zone="z", workers_per_host=1)))


def _operator(plane: Plane, fault: SimFault) -> None:
    plane.ask(Request.FREEZE)
    plane.loop.after(fault.seconds, lambda: plane.ask(Request.THAW))


#: Not drawn among the others of a history: these follow them, and one has histories of its own.
NAME_AGAIN, DIAGNOSED, LATE_SPARE = "name is used again", "host is diagnosed", "spare comes late"

KINDS: dict[str, Callable[[Plane, SimFault], None]] = {
    "worker dies": _worker_dies,
    "host dies": _host_dies,
    "daemon dies": _daemon_dies,
    "job hangs": _hangs,
    "job hangs at its start": _stalls,
    "job is slow": _slow,
    "host is slow": _for_hosts("slow_s", 6.0, 0.0),
    "host is deaf": _for_hosts("deaf", True, False),
    "xid": _xid,
    "ecc": _ecc,
    "partition": _partition,
    "job is broken": _fragile,
    "sensor is cut off": lambda plane, fault: plane.cut_off(plane.sensor, fault.seconds),
    "controller is cut off": lambda plane, fault: plane.cut_off(plane.brain, fault.seconds),
    "actuator is cut off": lambda plane, fault: plane.cut_off(plane.actuator, fault.seconds),
    "sensor crashes": lambda plane, fault: plane.crash_sensor(fault.seconds),
    "sensor stops": lambda plane, fault: plane.sensor.pause(fault.seconds),
    "sensor's clock jumps": lambda plane, fault: plane.clock_jumps(),
    "controller crashes": lambda plane, fault: plane.crash_controller(fault.seconds),
    "controller dies before a write": _crash_write("before"),
    "controller dies after a write": _crash_write("after"),
    "controller stops": lambda plane, fault: plane.brain.pause(fault.seconds),
    "second controller": lambda plane, fault: plane.second_controller(),
    "actuator crashes": lambda plane, fault: plane.crash_actuator(fault.seconds),
    "supervisor stops": lambda plane, fault: plane.stop_all(fault.seconds),
    "actuator stops": lambda plane, fault: plane.actuator.pause(fault.seconds),
    "api is down": _api_down,
    "api is flaky": _api_flaky,
    "disk is full": _disk_full,
    "operator freezes": _operator,
    NAME_AGAIN: _name_again,
    DIAGNOSED: _diagnosed,
    LATE_SPARE: _spare_comes,
}

#: How often each is drawn, of 100: what hits jobs more often than what hits the supervisor.
_WEIGHTS = {
    "worker dies": 14,
    "host dies": 14,
    "job hangs": 6,
    "xid": 8,
    "partition": 8,
    "daemon dies": 5,
    "job is broken": 2,
    "ecc": 3,
}


def draw_faults(random: random.Random, hosts: int, last_s: float) -> list[SimFault]:
    """A history: one to eight faults, often near to each other, because that is where the trouble is."""
    faults = []
    kinds = [kind for kind in KINDS if kind not in (NAME_AGAIN, DIAGNOSED, LATE_SPARE)]
    weights = [_WEIGHTS.get(kind, 3) for kind in kinds]
    at = 20.0 + 60.0 * random.random()
    for _ in range(random.randint(1, 8)):
        kind = random.choices(kinds, weights)[0]
        many = kind in ("partition", "host is deaf") or (kind == "host dies" and random.random() < 0.2)
        faults.append(
            SimFault(
                at=round(at, 1),
                kind=kind,
                target=random.randrange(hosts),
                seconds=0.0
                if kind == "host dies" and random.random() < 0.6
                else random.choice((3.0, 20.0, 60.0)),
                share=random.choice((0.01, 0.3, 0.55, 1.0)) if many else 0.0,
                code=random.choice((31, 31, 79, 94, 63, 48, 999)) if kind == "xid" else random.randrange(8),
            )
        )
        at = min(last_s, at + random.choice((0.5, 3.0, 10.0, 40.0)) * (0.5 + random.random()))
    return faults


def draw_diagnoses(random: random.Random, hosts: int, last_s: float) -> list[SimFault]:
    """A history of launchers that blame hosts, rightly and wrongly, while a part of the supervisor fails."""
    others = ("worker dies", "host is slow", "sensor crashes", "controller crashes", "supervisor stops")
    kinds = [DIAGNOSED] * random.randint(1, 5) + random.sample(others, 2)
    return [
        SimFault(
            at=round(20.0 + last_s * random.random(), 1),
            kind=kind,
            target=random.randrange(hosts),
            seconds=random.choice((3.0, 20.0)),
            code=random.randrange(8) if kind == DIAGNOSED else 2 * random.randrange(4),
        )
        for kind in kinds
    ]
