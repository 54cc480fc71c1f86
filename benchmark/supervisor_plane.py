# SPDX-License-Identifier: Apache-2.0
"""A supervisor of one machine to be measured: its three processes, local hosts, moments in its logs."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from measuring import free_ports

from resiliency.errors import ControlPlaneError
from resiliency.testing.processes import Command
from supervisor.orchestrators.local import stop_all
from supervisor.orchestrators.processes import Marked, kill_all, marked_processes
from supervisor.transport.client import Remote
from supervisor.transport.operators import RemoteController
from supervisor.transport.security import Security
from supervisor.values import Request
from supervisor.view.status import ActRequest, Status

ROOT = Path(__file__).parents[1]
TWIN = Path(__file__).with_name("supervisor_twin.py")
PARTS = ("actuator", "controller", "sensor")
#: Longest wait for anything that takes no time of a setting.
WAIT_S = 30.0
LOOK_S = 0.05
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """How often hosts report, and when one that does not is lost; seconds."""

    period_s: float
    timeout_s: float

    def __str__(self) -> str:
        return f"{self.period_s:g}/{self.timeout_s:g} s"


@dataclass(frozen=True, kw_only=True)
class Job:
    """Twins on so many hosts; stubborn ones end `grace_s` after they were asked to."""

    name: str
    hosts: int
    stubborn: bool = False
    grace_s: float = 5.0


class BenchPlane:
    """One supervisor with default thresholds, and hosts as processes; made by `open_plane`."""

    def __init__(self, directory: Path, stack: ExitStack, heartbeat: Heartbeat, flags: Sequence[str]) -> None:
        self.heartbeat, self._dir, self._stack, self._flags = heartbeat, directory, stack, tuple(flags)
        self.state_dir = directory / "state"
        self.programs: dict[str, Command] = {}
        self._ports = dict(zip(PARTS, free_ports(len(PARTS)), strict=True))
        self._env: dict[str, str | None] = {
            **{f"{part.upper()}_ADDRESS": f"127.0.0.1:{port}" for part, port in self._ports.items()},
            "HEARTBEAT_POLLING_PERIOD_S": f"{heartbeat.period_s:g}",
            "HEARTBEAT_TIMEOUT_S": f"{heartbeat.timeout_s:g}",
            "RESILIENCY_LOG_FORMAT": "json",
            "PYTHONPATH": str(ROOT),
        }
        #: What only one part is told, by its name.
        self.environment_of: dict[str, dict[str, str | None]] = {}
        self._hosts: tuple[str, ...] = ()
        self._jobs: tuple[Job, ...] = ()

    @property
    def sensor_address(self) -> str:
        return f"127.0.0.1:{self._ports['sensor']}"

    def use_hosts(self, hosts: Sequence[str], jobs: Sequence[Job]) -> None:
        """What the local orchestrator is to own; before it starts."""
        self._hosts, self._jobs = tuple(hosts), tuple(jobs)

        def plain(job: Job) -> dict[str, object]:
            words = ["{python}", str(TWIN), "{daemon_port}", "{node_rank}", "{replicas}", job.name]
            command = [*words, *["--stubborn"] * job.stubborn]
            return {"workload": job.name, "replicas": job.hosts, "grace_s": job.grace_s, "command": command}

        file = {
            "hosts": list(hosts),
            "first_port": free_range(2 * len(hosts)),
            "jobs": list(map(plain, jobs)),
        }
        self._dir.joinpath("job.json").write_text(json.dumps(file))

    def start(self, part: str) -> Command:
        """Start one part and wait until it listens."""
        argv = [sys.executable, str(ROOT / "supervisor" / f"{part}.py"), f"--port={self._ports[part]}"]
        argv += ["--plaintext", "--listen=127.0.0.1"]
        argv += [] if part == "sensor" else [f"--state-dir={self.state_dir}"]
        argv += ["--status-port=off"] if part == "controller" else []
        argv += self._flags if part != "actuator" else ()
        if part == "actuator" and self._hosts:
            argv += ["--orchestrator=local", f"--job-file={self._dir / 'job.json'}"]
        log = self._dir / f"{part}-{len(list(self._dir.glob(part + '-*')))}.log"
        env = self._env | self.environment_of.get(part, {})
        program = self._stack.enter_context(Command(argv, env=env, cwd=ROOT, log=log, cold=True))
        program.wait_for_line(f"{part} ready at port", timeout=WAIT_S)
        self.programs[part] = program
        return program

    def start_all(self) -> None:
        for part in PARTS:
            self.start(part)
        if self._hosts:
            self.wait_until(self.is_whole, "the supervisor does not see all hosts")

    def kill(self, part: str) -> None:
        self.programs[part].signal(signal.SIGKILL)
        self.programs[part].wait(timeout=WAIT_S)

    # ------------------------------------------------------------------------------- hosts

    def processes(self, host: str, part: str = "") -> list[Marked]:
        fleet = str(self.state_dir.resolve())
        return [
            one for one in marked_processes(fleet) if one.mark.host == host and part in ("", one.mark.part)
        ]

    def signal_hosts(self, hosts: Sequence[str], number: signal.Signals, part: str = "launcher") -> None:
        for one in [one for host in hosts for one in self.processes(host, part)]:
            os.kill(one.pid, number)

    def kill_host(self, host: str) -> None:
        kill_all(self.processes(host))

    def launcher_log(self, host: str) -> str:
        path = self.state_dir / "logs" / f"{host}-launcher.log"
        return path.read_text() if path.exists() else ""

    # ------------------------------------------------------------------------------- what it says

    def mark(self) -> dict[str, int]:
        """Where the logs end now."""
        return {part: len(program.lines) for part, program in self.programs.items()}

    def moment(self, part: str, pattern: str, since: dict[str, int], *, within_s: float) -> float:
        """When `part` first logged `pattern` behind `since`, as seconds of the machine's clock.

        Raises:
            TimeoutError: not within `within_s`.
        """
        expression = rf'"timestamp": "([^"]+)".*"message": "{pattern}'
        found = self.programs[part].wait_for_line(expression, timeout=within_s, since=since.get(part, 0))
        return datetime.fromisoformat(found[1]).timestamp()

    def said(self, part: str, pattern: str, since: dict[str, int]) -> int:
        """How often `part` logged `pattern` behind `since`."""
        lines = self.programs[part].lines[since.get(part, 0) :]
        return sum(1 for line in lines if re.search(rf'"message": "{pattern}', line))

    def status(self) -> Status:
        return ask(self._ports["controller"], lambda controller: controller.status(timeout_s=WAIT_S))

    def drain(self, host: str) -> None:
        asked = ActRequest(request=Request.DRAIN, by="benchmark", host=host, why="measured")
        ask(self._ports["controller"], lambda controller: controller.act(asked, timeout_s=WAIT_S))

    def is_whole(self) -> bool:
        """All hosts are connected, and all jobs have finished a step."""
        try:
            seen = self.status()
        except ControlPlaneError:
            return False
        there = {host.name for host in seen.hosts if host.connected}
        steps = [job.step for job in seen.jobs]
        return there >= set(self._hosts) and len(steps) == len(self._jobs) and all(steps)

    @staticmethod
    def wait_until(condition: Callable[[], bool], otherwise: str, *, within_s: float = WAIT_S) -> None:
        """Look again and again.

        Raises:
            TimeoutError: `otherwise`.
        """
        end = time.monotonic() + within_s
        while not condition():
            if time.monotonic() >= end:
                raise TimeoutError(f"{otherwise} within {within_s:g} s")
            time.sleep(LOOK_S)


def ask(port: int, question: Callable[[RemoteController], Coroutine[Any, Any, T]]) -> T:
    """Ask the controller at `port` of this machine, as an operator does."""

    async def work() -> T:
        async with Remote(f"127.0.0.1:{port}", Security(plaintext=True)) as remote:
            return await question(RemoteController(remote))

    return asyncio.run(work())


@contextmanager
def open_plane(directory: Path, heartbeat: Heartbeat, flags: Sequence[str] = ()) -> Iterator[BenchPlane]:
    """A plane that leaves no process behind.  `flags`: of sensor and controller."""
    directory.mkdir(parents=True)
    with ExitStack() as stack:
        plane = BenchPlane(directory, stack, heartbeat, flags)
        try:
            yield plane
        finally:
            for program in plane.programs.values():
                program.close()
            stop_all(plane.state_dir)


def free_range(count: int) -> int:
    """The first of so many ports in a row that were free a moment ago."""
    for first in range(20_000, 32_000, count):
        try:
            for port in range(first, first + count):
                socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return first
    raise OSError(f"no {count} ports in a row are free")
