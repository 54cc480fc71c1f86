# SPDX-License-Identifier: Apache-2.0
"""A sensor and an actuator in this process, and host daemons as processes."""

from __future__ import annotations

import asyncio
import math
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from resiliency.testing.processes import Command as Program
from supervisor.protocol.host_commands import HostCommand
from supervisor.transport.host_streams import HostStreams
from supervisor.transport.security import Security
from supervisor.transport.server import serve
from supervisor.transport.services import actuator_service, sensor_service
from supervisor.values import DaemonReport, Outcome
from tests.ports import free_ports
from tests.supervisor_wire.handlers import TestActuator, TestSensor
from tests.supervisor_wire.listener import Listener
from tests.waiting import WAIT_S

ROOT = Path(__file__).parents[2]
PLAIN = Security(plaintext=True)

_Told = TypeVar("_Told")


class Fleet:
    """A sensor and an actuator of this process, and the daemon process between them and `launcher_port`."""

    def __init__(self, tmp_path: Path, security: Security = PLAIN, *, report_period_s: float = 0.5) -> None:
        self.security = security
        self.port, self.launcher_port = free_ports(2)
        self.tmp_path = tmp_path
        self.sensor, self.actuator = Listener(), Listener()
        self.sensor_streams = HostStreams(
            part="sensor", report_period_s=report_period_s, listener=self.sensor
        )
        self.actuator_streams = HostStreams(part="actuator", report_period_s=0.5, listener=self.actuator)
        self.addresses: dict[str, str] = {}
        self._started = 0

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[None]:
        services = [
            sensor_service(self.sensor_streams, TestSensor()),
            actuator_service(self.actuator_streams, TestActuator()),
        ]
        async with serve(services, address="127.0.0.1", port=0, security=self.security) as port:
            self.addresses = dict.fromkeys(("SENSOR_ADDRESS", "ACTUATOR_ADDRESS"), f"127.0.0.1:{port}")
            yield

    @contextmanager
    def daemon(self, *flags: str, **env: str) -> Iterator[Program]:
        self._started += 1
        argv = [sys.executable, str(ROOT / "supervisor" / "host_daemon.py")]
        argv += ["--plaintext"] if self.security.plaintext else []
        argv += [f"--port={self.port}", f"--launcher_port={self.launcher_port}", "--workers_per_host=2"]
        argv += [f"--state_dir={self.tmp_path / 'state'}", *flags]
        variables = {**os.environ, "NODE_NAME": "host-1", **self.addresses, **env}
        log = self.tmp_path / f"daemon-{self._started}.txt"
        # Its own interpreter: it imports little, and its memory is measured.
        with Program(argv, log=log, env=variables, cold=True) as program:
            yield program

    async def command(self, command: HostCommand) -> Outcome:
        """Send `command` and wait for its outcome."""
        before = len([1 for kind, _, _ in self.actuator.told if kind == "message"])
        asked = -math.inf
        while True:
            # Again, as a controller does: a stream that breaks loses what was queued for it.
            if time.monotonic() - asked > 20 and self.actuator_streams.try_send_command("host-1", command):
                asked = time.monotonic()
            told = [what for kind, _, what in self.actuator.told if kind == "message"][before:]
            found = [one for one in told if isinstance(one, Outcome) and one.command == command.id]
            if found:
                return found[-1]
            await asyncio.sleep(0.01)

    async def reported(self, look: Callable[[DaemonReport], bool]) -> DaemonReport:
        """The first report that `look` accepts, among those that are still to come, too."""
        return await self.told(DaemonReport, look)

    async def told(self, kind: type[_Told], look: Callable[[_Told], bool]) -> _Told:
        """The first value of `kind` that the sensor was or is told and that `look` accepts."""
        seen = 0
        while True:
            for _, _, value in self.sensor.told[seen:]:
                seen += 1
                if isinstance(value, kind) and look(value):
                    return value
            await self.sensor.wait_for_more()


@pytest.fixture(scope="module")
def daemon_alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A daemon without a supervisor, with a token for its launchers."""
    tmp_path = tmp_path_factory.mktemp("daemon")
    fleet = Fleet(tmp_path)
    with fleet.daemon() as daemon:
        daemon.wait_for_line("host daemon of host-1 ready", timeout=WAIT_S)
        yield fleet
