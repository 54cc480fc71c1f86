# SPDX-License-Identifier: Apache-2.0
"""What one sensor holds, what an idle supervisor costs, and what a sensor that was stopped believes."""

from __future__ import annotations

import json
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from supervisor_hosts import Load
from supervisor_plane import WAIT_S, BenchPlane, Heartbeat, Job, open_plane

from resiliency.errors import ResiliencyError

HOSTS = Path(__file__).with_name("supervisor_hosts.py")
#: Hosts of one load process.
PER_PROCESS = 2500
#: Descriptors of a sensor that are no connections of hosts.
OTHER_FILES = 200
_FALSE = r"event \S+: (host_hb|worker_hb|daemon_lost|hang) of"


@dataclass(frozen=True, kw_only=True)
class Usage:
    """One process over a while.  `cores`: processor time of each second."""

    cores: float
    memory_mib: float
    threads: int


@dataclass(frozen=True, kw_only=True)
class Held:
    """Hosts on one sensor for `window_s`.

    Attributes:
        false: hosts or workers that were called lost, and freezes.
        ended: streams that ended.
        found_s: from the end of a host's reports until it is called lost.
        load_cores, load_late_s: of the programs that are the hosts: what they used, and the most that a
            report was late on their side.
    """

    hosts: int
    heartbeat: Heartbeat
    window_s: float
    per_connection: int
    sensor: Usage
    controller: Usage
    false: int
    ended: int
    found_s: float | None
    opened_s: float
    load_cores: float
    load_late_s: float


class Watch:
    """What a process uses between its making and `usage`."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._cpu_s, self._at = self._used_s(), time.monotonic()

    def usage(self) -> Usage:
        cores = (self._used_s() - self._cpu_s) / (time.monotonic() - self._at)
        memory = self._process.memory_info().rss / 2**20
        return Usage(cores=cores, memory_mib=memory, threads=self._process.num_threads())

    def _used_s(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)


def hold_hosts(hosts: int, heartbeat: Heartbeat, window_s: float, directory: Path) -> Held:
    """Keep `hosts` on one sensor for `window_s`, then let one of them fall silent.

    Raises:
        TimeoutError, OSError, ResiliencyError: the run says nothing.
    """
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    per_connection = -(-hosts // (limit - OTHER_FILES))
    with open_plane(directory, heartbeat) as plane:
        plane.start_all()
        began = time.monotonic()
        with _hosts(plane, hosts, heartbeat, per_connection) as programs:
            opened_s = time.monotonic() - began
            # What connecting costs is not what holding costs.
            _pass_time(2 * heartbeat.period_s)
            since, load = plane.mark(), [Watch(program.pid) for program in programs]
            watches = {part: Watch(plane.programs[part].pid) for part in ("sensor", "controller")}
            _pass_time(window_s)
            usage = {part: watch.usage() for part, watch in watches.items()}
            load_cores = sum(watch.usage().cores for watch in load)
            false = plane.said("sensor", _FALSE, since) + plane.said("controller", "fleet frozen", since)
            found_s = _silence_one(plane, programs[0], heartbeat)
            done = [_end(program) for program in programs]
    return Held(
        hosts=hosts,
        heartbeat=heartbeat,
        window_s=window_s,
        per_connection=per_connection,
        sensor=usage["sensor"],
        controller=usage["controller"],
        false=false,
        ended=sum(one.ended for one in done),
        found_s=found_s,
        opened_s=opened_s,
        load_cores=load_cores,
        load_late_s=max(one.late_s for one in done),
    )


def stop_sensor(hosts: int, heartbeat: Heartbeat, stopped_s: float, directory: Path) -> int:
    """Stop the sensor for `stopped_s`, let it go on, and count what it calls lost within two timeouts."""
    with open_plane(directory, heartbeat) as plane:
        plane.start_all()
        with _hosts(plane, hosts, heartbeat, 1):
            _pass_time(2 * heartbeat.period_s)
            since = plane.mark()
            plane.programs["sensor"].signal(signal.SIGSTOP)
            _pass_time(stopped_s)
            plane.programs["sensor"].signal(signal.SIGCONT)
            _pass_time(2 * heartbeat.timeout_s)
            return plane.said("sensor", _FALSE, since) + plane.said("controller", "fleet frozen", since)


def idle(heartbeat: Heartbeat, window_s: float, directory: Path) -> dict[str, Usage]:
    """What each process uses while three hosts train and nothing happens."""
    with open_plane(directory, heartbeat) as plane:
        plane.use_hosts(("a", "b", "c"), (Job(name="job", hosts=3),))
        plane.start_all()
        (daemon,) = plane.processes("a", "daemon")
        pids = {part: program.pid for part, program in plane.programs.items()} | {"host daemon": daemon.pid}
        watches = {part: Watch(pid) for part, pid in pids.items()}
        _pass_time(window_s)
        return {part: watch.usage() for part, watch in watches.items()}


def simulate(seeds: int, hosts: int) -> float:
    """Seconds that the simulation takes.

    Raises:
        ResiliencyError: an invariant does not hold.
    """
    began = time.monotonic()
    argv = [sys.executable, "-m", "supervisor.simulation", f"--seeds={seeds}", f"--hosts={hosts}", "--seed=7"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ResiliencyError(f"the simulation failed: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return time.monotonic() - began


@contextmanager
def _hosts(
    plane: BenchPlane, hosts: int, heartbeat: Heartbeat, per_connection: int
) -> Iterator[list[subprocess.Popen[str]]]:
    """So many synthetic hosts, connected, in as many programs as they need."""
    programs: list[subprocess.Popen[str]] = []
    try:
        for first in range(0, hosts, PER_PROCESS):
            count = min(PER_PROCESS, hosts - first)
            argv = [sys.executable, str(HOSTS), plane.sensor_address, f"--first={first}", f"--hosts={count}"]
            argv += [f"--period={heartbeat.period_s:g}", f"--per-connection={per_connection}"]
            program = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            programs.append(program)
            _expect_ready(program)
        yield programs
    finally:
        for program in programs:
            program.kill()
            program.communicate()


def _expect_ready(program: subprocess.Popen[str]) -> None:
    assert program.stdout is not None
    if (line := program.stdout.readline()) != "ready\n":
        raise OSError(f"the synthetic hosts did not connect: {line!r}")


def _silence_one(plane: BenchPlane, program: subprocess.Popen[str], heartbeat: Heartbeat) -> float | None:
    """Seconds from now until host 0, which says nothing more, is called lost."""
    since, began = plane.mark(), time.time()
    assert program.stdin is not None
    program.stdin.write("silence 0\n")
    program.stdin.flush()
    try:
        pattern = r"event \S+: host_hb of \S+ host-00000"
        found = plane.moment(
            "sensor", pattern, since, within_s=heartbeat.timeout_s + heartbeat.period_s + WAIT_S
        )
    except TimeoutError:
        return None
    return found - began


def _end(program: subprocess.Popen[str]) -> Load:
    output, _ = program.communicate("end\n", timeout=WAIT_S)
    match = re.search(r"\{.*\}", output)
    if match is None:
        raise OSError("the synthetic hosts did not say what they did")
    return Load(**json.loads(match[0]))


def _pass_time(seconds: float) -> None:
    """The length of a measurement, and no wait for anything."""
    time.sleep(seconds)
