# SPDX-License-Identifier: Apache-2.0
"""Sensor, controller, actuator and daemons as real processes, with launchers that a test plays."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from resiliency.daemon_link import DaemonLink
from resiliency.errors import ControlPlaneError
from resiliency.testing.processes import Command as Program
from supervisor.transport.client import Remote
from supervisor.transport.operators import RemoteController
from supervisor.transport.security import Security
from supervisor.values import Outcome, OutcomeStatus, Request
from supervisor.view.status import (
    ActReply,
    ActRequest,
    History,
    HistoryRequest,
    HostStatus,
    JobStatus,
    Status,
)
from tests.ports import free_ports
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
PLAIN = Security(plaintext=True)
PARTS = ("sensor", "controller", "actuator")
PATIENCE_S = 180.0
#: Quick decisions; silence takes long, so that a busy test machine makes none.
THRESHOLDS = (
    *("--heartbeat-timeout-s=20", "--tick-s=0.5", "--coalesce-s=0.5", "--advancing-s=1"),
    *("--backoff-s=1", "--launcher-grace-s=2", "--workload-downtime-threshold-s=20"),
)


class Plane:
    """The parts of one supervisor at ports of their own, and what operators may ask of it."""

    def __init__(self, tmp_path: Path, stack: ExitStack) -> None:
        self.tmp_path, self._stack = tmp_path, stack
        self.ports = dict(zip(PARTS, free_ports(3), strict=True))
        self.state_dir = tmp_path / "state"
        self.address = f"127.0.0.1:{self.ports['controller']}"
        self.env = {f"{part.upper()}_ADDRESS": f"127.0.0.1:{port}" for part, port in self.ports.items()} | {
            "HEARTBEAT_POLLING_PERIOD_S": "1"
        }
        self.own_env: dict[str, dict[str, str]] = {}  # of one part
        self.programs: dict[str, Program] = {}
        self.security, self.security_flags = PLAIN, ("--plaintext",)

    def start(self, part: str, *flags: str, thresholds: tuple[str, ...] = THRESHOLDS) -> Program:
        """Start one part, or ``all`` in one process, and wait until it is ready."""
        if part == "all":
            argv = [sys.executable, "-m", "supervisor", "--all-in-one", f"--state-dir={self.state_dir}"]
        else:
            argv = [sys.executable, str(ROOT / "supervisor" / f"{part}.py"), f"--port={self.ports[part]}"]
            argv += [f"--state-dir={self.state_dir}"] * (part != "sensor")
        argv += thresholds if part != "actuator" else ()
        argv += ["--status-port=0"] * (part in ("all", "controller"))
        program = Program(
            [*argv, *self.security_flags, "--listen=127.0.0.1", *flags],
            env={**self.env, **self.own_env.get(part, {})},
            cwd=ROOT,
            log=self.tmp_path / f"{part}-{len(list(self.tmp_path.glob(part + '-*')))}.txt",
            cold=True,
        )
        self.programs[part] = self._stack.enter_context(program)
        program.wait_for_line(f"{'sensor' if part == 'all' else part} ready at port", timeout=PATIENCE_S)
        return program

    def kill(self, part: str) -> None:
        program = self.programs.pop(part)
        program.signal(signal.SIGKILL)
        program.wait(timeout=PATIENCE_S)

    @contextmanager
    def stopped(self, part: str) -> Iterator[None]:
        self.programs[part].signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.programs[part].signal(signal.SIGCONT)

    # --------------------------------------------------------------------------------------- operators

    def status(self) -> Status:
        return self._ask(lambda controller: controller.status(timeout_s=PATIENCE_S))

    def act(self, request: Request, *, host: str = "", workload: str = "", why: str = "") -> ActReply:
        asked = ActRequest(request=request, by="tester", host=host, workload=workload, why=why)
        return self._ask(lambda controller: controller.act(asked, timeout_s=PATIENCE_S))

    def history(self, limit: int = 1000) -> History:
        asked = HistoryRequest(limit=limit)
        return self._ask(lambda controller: controller.history(asked, timeout_s=PATIENCE_S))

    def _ask(self, ask: Callable[[RemoteController], Any]) -> Any:
        async def work() -> Any:
            async with Remote(self.address, self.security) as remote:
                return await ask(RemoteController(remote))

        return asyncio.run(work())

    def wait_for(
        self, look: Callable[[Status], object], otherwise: str, *, timeout: float = PATIENCE_S
    ) -> Status:
        """The first status that `look` accepts."""
        seen: list[Status] = []

        def accepted() -> Status | None:
            try:
                seen[:] = [self.status()]
            except ControlPlaneError:
                return None
            return seen[0] if look(seen[0]) else None

        try:
            return wait_until(accepted, otherwise, every=0.1, timeout=timeout)
        except AssertionError as error:
            raise AssertionError(f"{error}; seen: {seen}") from error


def host_of(status: Status, name: str) -> HostStatus | None:
    return next((host for host in status.hosts if host.name == name), None)


def job_of(status: Status) -> JobStatus:
    (job,) = status.jobs
    return job


class Host:
    """One daemon process, and the launcher that the test plays: it finishes ten steps a second."""

    def __init__(self, plane: Plane, stack: ExitStack, name: str, *flags: str) -> None:
        self.plane, self.name, self._stack, self._flags = plane, name, stack, flags
        self.launcher_port, self.port = free_ports(2)
        self.commands: list[Mapping[str, Any]] = []
        self.attempt, self.failed = 0, False
        self.began = time.monotonic()
        self.advancing = True
        self._link: DaemonLink | None = None
        self._stuck_at, self._stuck_since = 0, 0.0
        self._starts = 0
        self.start_daemon()

    def start_daemon(self) -> None:
        self._starts += 1
        argv = [sys.executable, str(ROOT / "supervisor" / "host_daemon.py"), *self.plane.security_flags]
        argv += [f"--port={self.port}", f"--launcher_port={self.launcher_port}", "--workers_per_host=1"]
        argv += [f"--state_dir={self.plane.tmp_path / self.name}", "--address=127.0.0.1", *self._flags]
        log = self.plane.tmp_path / f"daemon-{self.name}-{self._starts}.txt"
        env = {**self.plane.env, "NODE_NAME": self.name}
        self.daemon = self._stack.enter_context(Program(argv, env=env, log=log, cold=True))
        self.daemon.wait_for_line(f"host daemon of {self.name} ready", timeout=PATIENCE_S)

    def join(self, rank: int, **workload: object) -> None:
        """Begin to report rank `rank` of a job."""
        self.rank = rank
        hello = {"kind": "launcher", "key": uuid.uuid4().hex, "workload": {"workload": "job", **workload}}
        self._link = DaemonLink(
            port=self.launcher_port, hello=hello, make_report=self._report, on_command=self._obey
        )
        self._stack.callback(self._link.close)
        wait_until(lambda: self._link is not None and self._link.connected, "no daemon takes the launcher")

    def fail(self) -> None:
        """The rank has failed, and the launcher does nothing about it."""
        self.stick()
        self.failed = True
        self._soon()

    def stick(self) -> None:
        """Finish no step any more."""
        self._stuck_at, self._stuck_since, self.advancing = self.step, time.monotonic(), False

    @property
    def step(self) -> int:
        return int((time.monotonic() - self.began) * 10) if self.advancing else self._stuck_at

    def _soon(self) -> None:
        assert self._link is not None
        self._link.report_soon()

    def _report(self) -> Mapping[str, object]:
        worker = {
            "local_rank": 0,
            "global_rank": self.rank,
            "state": "failed" if self.failed else "running",
            "heartbeat_age_s": 0.0,
            "step": self.step,
            "step_age_s": 0.0 if self.advancing else time.monotonic() - self._stuck_since,
        }
        return {"attempt": self.attempt, "launcher": "running", "workers": [worker]}

    def _obey(self, command: Mapping[str, Any]) -> None:
        self.commands.append(command)
        text = "done"
        if command["kind"] == "restart_ranks":
            text = f"attempt {self.attempt} ends"
            self.attempt, self.failed, self.advancing = self.attempt + 1, False, True
        outcome = Outcome(command=command["id"], epoch=command["epoch"], status=OutcomeStatus.DONE, text=text)
        assert self._link is not None
        self._link.send_outcome(outcome.to_dict())
        self._link.report_soon()


@contextmanager
def open_plane(tmp_path: Path) -> Iterator[tuple[Plane, ExitStack]]:
    with ExitStack() as stack:
        yield Plane(tmp_path, stack), stack
