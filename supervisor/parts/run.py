# SPDX-License-Identifier: Apache-2.0
"""Run parts in this process until a signal: what the programs of the supervisor have in common."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack

from resiliency.errors import ConfigError, ResiliencyError
from supervisor.entry import REFUSED, start_program, until_signal
from supervisor.event_log import EventLog
from supervisor.orchestrator import RunningOrchestrator
from supervisor.orchestrators.job_file import read_job_file
from supervisor.orchestrators.local import LocalOrchestrator
from supervisor.orchestrators.none import NoOrchestrator
from supervisor.orchestrators.ray.machines import RayMachines
from supervisor.orchestrators.wanted import WantedOrchestrator
from supervisor.parts.actuator import ActuatorPart
from supervisor.parts.controller import ControllerPart
from supervisor.parts.sensor import SensorPart
from supervisor.parts.settings import PARTS, PartSettings, program_of, usage_of
from supervisor.parts.tasks import Tasks
from supervisor.transport.security import CONTROL_TOKEN_ENV, PLAINTEXT_ENV
from supervisor.transport.server import serve
from supervisor.view.server import StatusServer

logger = logging.getLogger(__name__)

#: A part that meets an error which it cannot go on from ends with this code.
FAILED = 1
LOG_NAME = "events.db"


async def run_parts(settings: PartSettings) -> None:
    """Run the parts of `settings` until this is cancelled.

    Raises:
        ConfigError: a port cannot be opened, or a file cannot be used.
        LogError: the event log cannot be used, or a later controller has opened it.
    """
    settings.security.warn_of_plaintext(settings.listen)
    async with AsyncExitStack() as stack:
        running: list[SensorPart | ControllerPart | ActuatorPart] = []
        # The actuator first: what the others need is there when they ask for it.
        if "actuator" in settings.parts:
            orchestrator = make_orchestrator(settings)
            actuator = ActuatorPart(settings, orchestrator)
            await stack.enter_async_context(orchestrator.running(actuator.tell_change, actuator.tell_facts))
            running.append(actuator)
        if "controller" in settings.parts:
            log = EventLog.open(settings.state_dir / LOG_NAME, first_epoch=time.time_ns() // 10**6)
            stack.callback(log.close)
            controller = ControllerPart(settings, log)
            running.append(controller)
            if settings.status_port is not None:
                await stack.enter_async_context(
                    StatusServer(controller.status, host=settings.status_listen, port=settings.status_port)
                )
        if "sensor" in settings.parts:
            running.append(SensorPart(settings))
        for part in running:
            name = next(name for name in PARTS if name in type(part).__name__.lower())
            port = await stack.enter_async_context(
                serve(
                    part.services(),
                    address=settings.listen,
                    port=settings.ports[name],
                    security=settings.security,
                )
            )
            logger.info("%s ready at port %d", name, port)
        await Tasks().run_all(*(part.run() for part in running))


def make_orchestrator(settings: PartSettings) -> RunningOrchestrator:
    """As the flags say.

    Raises:
        ConfigError: the job file, or what was kept of an earlier start, cannot be used; or the client of the
            orchestrator is not installed.
    """
    if settings.orchestrator == "gke":
        return _make_gke(settings)
    if settings.job_file is None:
        return NoOrchestrator()
    file = read_job_file(settings.job_file)
    addresses = {
        "SENSOR_ADDRESS": settings.addresses["sensor"],
        "ACTUATOR_ADDRESS": settings.addresses["actuator"] or f"127.0.0.1:{settings.ports['actuator']}",
        **({PLAINTEXT_ENV: "1"} if settings.security.plaintext else {}),
    }
    if settings.orchestrator == "ray":
        if not file.resources:
            raise ConfigError(
                "--job-file: --orchestrator ray needs resources: several hosts would share a node.",
                hint='Say what only one host of a node can have, such as "resources": {"GPU": 8}.',
                flag="--job-file",
                field="resources",
            )
        # Of other machines: their environment is their own, but for what leads to the supervisor.
        ours = {
            name: text
            for name, text in os.environ.items()
            if name.startswith(("SUPERVISOR_", "HEARTBEAT_")) and name != CONTROL_TOKEN_ENV
        }
        for name, address in addresses.items():
            if address.startswith(("127.", "localhost:", "[::1]")):
                logger.warning("%s is %s: hosts on other machines cannot reach it.", name, address)
        fleet = str(settings.state_dir.resolve())
        machines = RayMachines(file, settings.ray_address, fleet)
        return WantedOrchestrator(file, settings.state_dir, {**ours, **addresses}, machines)
    if file.resources:
        raise ConfigError("--job-file: resources are for --orchestrator ray.", flag="--job-file")
    environment = {**os.environ, **addresses}
    # Of this process, and no daemon's.
    for name in ("PORT", "HOST_DAEMON_PORT", CONTROL_TOKEN_ENV):
        environment.pop(name, None)
    return LocalOrchestrator(file, settings.state_dir, environment)


def _make_gke(settings: PartSettings) -> RunningOrchestrator:
    try:
        # Its client costs a second and 60 MiB, which other orchestrators need not pay.
        from supervisor.orchestrators.gke.orchestrator import GkeOrchestrator
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("kubernetes_asyncio", "aiohttp"):
            raise
        raise ConfigError(
            f"--orchestrator gke needs {error.name}.",
            hint="Install it with: pip install 'resiliency[supervisor,kubernetes]'",
            flag="--orchestrator",
        ) from error
    environment = settings.environment
    return GkeOrchestrator(
        environment.workload_namespace,
        environment.job_namespace,
        hosts_per_replica=environment.hosts_per_replica,
    )


def allow_connections() -> None:
    """Raise the soft limit of open files to the hard one: each host holds a connection to its sensor."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def run_program(parts: Sequence[str], argv: Sequence[str]) -> int:
    """Run `parts` with `argv` until SIGTERM or SIGINT; returns the exit code."""
    try:
        settings = PartSettings.parse(parts, argv, os.environ)
        allow_connections()
        start_program("-".join(parts) if len(parts) == 1 else "supervisor")
        asyncio.run(until_signal(run_parts(settings)))
    except ConfigError as error:
        print(f"usage: {usage_of(parts)}\n{program_of(parts)}: error: {error}", file=sys.stderr)
        return REFUSED
    except ResiliencyError as error:
        print(f"{program_of(parts)}: {error}", file=sys.stderr)
        return FAILED
    return 0
