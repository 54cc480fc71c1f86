# SPDX-License-Identifier: Apache-2.0
"""One fault each, on real processes: when it was detected, when the first action began, and what was harmed.

Zero is the moment before the signal that makes the fault, on the machine's clock; the other moments are those
that sensor and actuator log.  *Action* is the first call of the orchestrator or of the hosts, not its end.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from supervisor_plane import WAIT_S, BenchPlane, Heartbeat, Job, open_plane

from supervisor.policy.thresholds import Thresholds

HOSTS = ("a", "b", "c", "spare")
JOB = Job(name="job", hosts=3)
#: Steps stop for this long before a hang counts, where one is measured.
HANG_S = 10.0
#: How long the action takes beside which another fault is measured.
LONG_ACTION_S = 75.0


@dataclass(frozen=True, kw_only=True)
class Moments:
    """Seconds after the fault; None where it is not of interest.

    Attributes:
        harmed: what happened that should not have; empty where nothing did.
    """

    suspected_s: float | None = None
    detected_s: float | None = None
    acted_s: float | None = None
    whole_s: float | None = None
    harmed: str = ""


def _event(kind: str) -> str:
    return rf"event \S+: {kind} of"


def _first_try(kind: str) -> str:
    return rf"command \S+: {kind} of .*, try 1"


def _both(plane: BenchPlane, began: float, since: dict[str, int], event: str, action: str) -> Moments:
    within_s = plane.heartbeat.timeout_s + plane.heartbeat.period_s + HANG_S + WAIT_S
    detected = plane.moment("sensor", _event(event), since, within_s=within_s)
    acted = plane.moment("actuator", _first_try(action), since, within_s=WAIT_S)
    return Moments(detected_s=detected - began, acted_s=acted - began)


def _training(plane: BenchPlane, *jobs: Job, hosts: tuple[str, ...] = HOSTS) -> dict[str, int]:
    plane.use_hosts(hosts, jobs or (JOB,))
    plane.start_all()
    return plane.mark()


def rank_fails(plane: BenchPlane) -> Moments:
    """The launcher says that its rank has failed, and does nothing about it."""
    since = _training(plane)
    began = time.time()
    plane.signal_hosts(("a", "c"), signal.SIGUSR2)  # they wait for it in a collective
    plane.signal_hosts(("b",), signal.SIGUSR1)
    return _both(plane, began, since, "worker_hb", "in_job_reset")


def worker_silent(plane: BenchPlane) -> Moments:
    """A rank and its launcher give no sign any more; the host is there."""
    since = _training(plane)
    began = time.time()
    plane.signal_hosts(("b",), signal.SIGSTOP)
    plane.signal_hosts(("a", "c"), signal.SIGUSR2)
    return _both(plane, began, since, "worker_hb", "in_job_reset")


def launcher_killed(plane: BenchPlane) -> Moments:
    """SIGKILL of a launcher with its rank; the daemon is there."""
    since = _training(plane)
    began = time.time()
    plane.signal_hosts(("b",), signal.SIGKILL)
    plane.signal_hosts(("a", "c"), signal.SIGUSR2)
    return _both(plane, began, since, "worker_hb", "in_job_reset")


def host_killed(plane: BenchPlane) -> Moments:
    """SIGKILL of all of a host; the orchestrator sees it as well."""
    since = _training(plane)
    plane.signal_hosts(("a", "c"), signal.SIGUSR2)
    began = time.time()
    plane.kill_host("b")
    suspected = plane.moment("sensor", "host b: its stream ended", since, within_s=WAIT_S)
    moments = _both(plane, began, since, "host_hb", "hot_swap")
    return replace(moments, suspected_s=suspected - began)


def host_vanishes(plane: BenchPlane) -> Moments:
    """All of a host stops, its connections stay open, and nobody else can say whether it is there."""
    plane.environment_of["sensor"] = {"ACTUATOR_ADDRESS": None}
    since = _training(plane)
    plane.signal_hosts(("a", "c"), signal.SIGUSR2)
    began = time.time()
    plane.signal_hosts(("b",), signal.SIGSTOP, part="")
    return _both(plane, began, since, "host_hb", "hot_swap")


def hang(plane: BenchPlane) -> Moments:
    """All ranks live and none finishes a step; counted from the end of the threshold."""
    since = _training(plane)
    began = time.time() + HANG_S
    plane.signal_hosts(("a", "b", "c"), signal.SIGUSR2)
    return _both(plane, began, since, "hang", "in_job_reset")


def daemon_killed(plane: BenchPlane) -> Moments:
    """SIGKILL of one daemon while all train: until it is seen again, and whether anything else happened."""
    since = _training(plane)
    began = time.time()
    plane.signal_hosts(("b",), signal.SIGKILL, part="daemon")
    plane.moment("sensor", "host b: its stream ended", since, within_s=WAIT_S)
    plane.wait_until(plane.is_whole, "the daemon is not seen again")
    back = plane.moment("sensor", "host b connected", since, within_s=WAIT_S)
    return Moments(whole_s=back - began, harmed=_harm(plane, since))


def during_an_action(plane: BenchPlane) -> Moments:
    """A host is killed while another job's launcher takes its time to end."""
    slow = Job(name="slow", hosts=1, stubborn=True, grace_s=LONG_ACTION_S)
    since = _training(plane, Job(name="job", hosts=2), slow)
    plane.drain("c")
    plane.moment("actuator", _first_try("drain_host"), since, within_s=WAIT_S)
    plane.signal_hosts(("a",), signal.SIGUSR2)
    began = time.time()
    plane.kill_host("b")
    moments = _both(plane, began, since, "host_hb", "hot_swap")
    if plane.said("actuator", r"command \S+: done, stopped on c", since):
        return Moments(harmed="the slow action had ended before")
    return moments


def hung_daemon(plane: BenchPlane) -> Moments:
    """A rank fails while the daemon of another host is stopped: the action is the last one's restart."""
    since = _training(plane)
    plane.signal_hosts(("c",), signal.SIGSTOP, part="daemon")
    began = time.time()
    plane.signal_hosts(("a", "c"), signal.SIGUSR2)
    plane.signal_hosts(("b",), signal.SIGUSR1)
    detected = plane.moment("sensor", _event("worker_hb"), since, within_s=WAIT_S)
    done = plane.moment("actuator", r"command \S+: done, restarted", since, within_s=WAIT_S)
    restarts = []
    for host in ("a", "b"):
        plane.wait_until(lambda host=host: _restarts(plane, host) != [], f"{host} was not told")  # type: ignore[misc]
        restarts += _restarts(plane, host)
    return Moments(
        detected_s=detected - began, acted_s=max(restarts) - began, whole_s=done - began,
    )  # fmt: skip


def part_killed(part: str) -> Callable[[BenchPlane], Moments]:
    def kill(plane: BenchPlane) -> Moments:
        """SIGKILL of one part, and its start: from its readiness until all hosts and steps are seen."""
        since = _training(plane)
        plane.kill(part)
        plane.start(part)
        began = time.time()
        plane.wait_until(plane.is_whole, "the view is not whole")
        return Moments(whole_s=time.time() - began, harmed=_harm(plane, {**since, part: 0}))

    return kill


def _restarts(plane: BenchPlane, host: str) -> list[float]:
    return [float(text) for text in re.findall(r"restart_ranks at (\S+)", plane.launcher_log(host))]


def _harm(plane: BenchPlane, since: dict[str, int]) -> str:
    commands = plane.said("actuator", r"command \S+: .*, try", since)
    lost = plane.said("sensor", _event("host_hb"), since) + plane.said("sensor", _event("worker_hb"), since)
    return f"{lost} events and {commands} actions" if lost or commands else ""


@dataclass(frozen=True, kw_only=True)
class FaultCell:
    """A fault to measure.

    Attributes:
        name: for ``--only`` and tables.
        peer: its figure of the same fault at a heartbeat, as text; "-" where none was measured.
        bar: what is promised, in words, and the seconds that `judged` may be, at a heartbeat.
        judged: name of the moment that the bar is about.
        detected: the seconds that detection alone may take; the time in which echoes gather comes after it.
        every_heartbeat: else it is measured at the first beat alone, because no heartbeat matters.
    """

    name: str
    what: str
    inflict: Callable[[BenchPlane], Moments]
    judged: str
    bar: Callable[[Heartbeat], float | None]
    detected: Callable[[Heartbeat], float | None] = lambda heartbeat: None
    peer: Callable[[Heartbeat], str] = lambda heartbeat: "-"
    flags: tuple[str, ...] = ()
    every_heartbeat: bool = True


def _at_default(text: str) -> Callable[[Heartbeat], str]:
    return lambda heartbeat: text if (heartbeat.period_s, heartbeat.timeout_s) == (15.0, 30.0) else "-"


def _within(seconds: float) -> Callable[[Heartbeat], float]:
    return lambda heartbeat: seconds


def _timeout_at_once(heartbeat: Heartbeat) -> float:
    """A silence: what is left of the second after the timeout, once `--tick-s` of echoes is taken."""
    return heartbeat.timeout_s + 1.0 - Thresholds().tick_s


#: From the end of a host's stream until it is suspected.
SUSPECTED_S = 0.1
#: A loss that a witness confirms: what is left of the 5 s until the action.
_CONFIRMED_S = 5.0 - Thresholds().coalesce_s


def _timeout_and_a_second(heartbeat: Heartbeat) -> float:
    """Where the timeout is short, a job counts as advancing (`--advancing-s`) for longer than that."""
    return max(heartbeat.timeout_s, Thresholds().advancing_s) + 1.0


FAULTS = (
    FaultCell(
        name="worker-silent", what="worker silent, until the action", inflict=worker_silent,
        judged="acted_s", bar=_timeout_and_a_second, peer=_at_default("45 s (39-56)"),
        detected=_timeout_at_once,
    ),
    FaultCell(
        name="launcher-killed", what="launcher and rank killed, until the action", inflict=launcher_killed,
        judged="acted_s", bar=_timeout_and_a_second,
        detected=_timeout_at_once,
    ),
    FaultCell(
        name="host-killed", what="host killed, witness, until the action", inflict=host_killed,
        judged="acted_s", bar=_within(5.0), peer=_at_default("37-42 s"),
        detected=_within(_CONFIRMED_S),
    ),
    FaultCell(
        name="host-vanishes", what="host silent, no witness, until the action", inflict=host_vanishes,
        judged="acted_s", bar=_timeout_and_a_second, peer=_at_default("37-42 s"),
        detected=_timeout_at_once,
    ),
    FaultCell(
        name="rank-fails", what="rank failed, until the action", inflict=rank_fails,
        judged="acted_s", bar=lambda heartbeat: None,
    ),
    FaultCell(
        name="hang", what=f"hang, from its threshold ({HANG_S:g} s), until the action", inflict=hang,
        judged="acted_s", bar=lambda heartbeat: None, flags=(f"--hang-threshold-s={HANG_S:g}",),
    ),
    FaultCell(
        name="daemon-killed", what="daemon alone killed, until it is back", inflict=daemon_killed,
        judged="whole_s", bar=lambda heartbeat: None, peer=_at_default("the pod is deleted"),
    ),
    FaultCell(
        name="during-an-action", inflict=during_an_action, judged="acted_s", bar=_within(5.0),
        detected=_within(_CONFIRMED_S),
        what=f"host killed during an action of {LONG_ACTION_S:g} s, until the action",
        peer=lambda heartbeat: "77 s", every_heartbeat=False,
    ),
    FaultCell(
        name="hung-daemon", what="rank failed, a daemon hangs, until all others restart", inflict=hung_daemon,
        judged="acted_s", bar=_within(10.0), peer=lambda heartbeat: "27 s late", every_heartbeat=False,
    ),
    *(
        FaultCell(
            name=f"{part}-killed", what=f"{part} killed, until its view is whole after its start",
            inflict=part_killed(part), judged="whole_s", bar=_within(5.0),
            peer=lambda heartbeat: "7 s of retries, then all parts and daemons abort", every_heartbeat=False,
        )
        for part in ("sensor", "controller", "actuator")
    ),
)  # fmt: skip


def measure(cell: FaultCell, heartbeat: Heartbeat, directory: Path) -> Moments:
    """Strike once, at a plane of its own.

    Raises:
        TimeoutError, EOFError, OSError, ResiliencyError: the run says nothing.
    """
    with open_plane(directory, heartbeat, cell.flags) as plane:
        return cell.inflict(plane)
