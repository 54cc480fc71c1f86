# SPDX-License-Identifier: Apache-2.0
"""What sensor, controller and actuator do where another part, a disk or a host is in their way."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from supervisor.orchestrators.none import NoOrchestrator
from supervisor.parts.actuator import MOST_CHANGES, ActuatorPart
from supervisor.parts.host_commands import HostCommands
from supervisor.parts.sensor import SensorPart, first_alive, with_defaults
from supervisor.parts.settings import ALL, PartSettings
from supervisor.transport.errors import Reason, Refused
from supervisor.transport.host_streams import HostStreams
from supervisor.transport.security import CONTROL_TOKEN_ENV, TOKEN_ENV, Security, TokenFile
from supervisor.transport.server import serve
from supervisor.transport.services import Probe, daemon_service, sensor_service
from supervisor.values import Change, DaemonReport, Evidence, HostInfo, WorkloadInfo
from tests.asynchronous import run, until
from tests.supervisor_wire.handlers import TestSensor

pytestmark = pytest.mark.leaks("descriptors", reason="gRPC's own pollers")


def settings(**env: str) -> PartSettings:
    return PartSettings.parse(ALL, ["--plaintext"], env)


# ------------------------------------------------------------------------------------- probes of daemons


def test_the_first_witness_that_sees_a_host_ends_the_wait_for_a_daemon_that_is_stopped() -> None:
    async def never() -> bool | None:
        await asyncio.Event().wait()
        return None

    async def says(alive: bool | None) -> bool | None:
        return alive

    async def work() -> None:
        assert await first_alive(daemon=never(), orchestrator=says(True)) == (True, "orchestrator")
        assert await first_alive(daemon=says(None), orchestrator=says(False)) == (False, "orchestrator")
        assert await first_alive(daemon=says(True), orchestrator=says(False)) == (True, "daemon")
        assert await first_alive(daemon=says(None), orchestrator=says(None)) == (None, "daemon")

    run(work())


class Listening(TokenFile):
    """Tokens of a daemon that keeps what callers show it."""

    def __init__(self, path: Path, variable: str) -> None:
        super().__init__(path, variable)
        self.shown: set[str] = set()

    def accepts(self, token: str) -> bool:
        self.shown.add(token)
        return super().accepts(token)


def test_a_daemon_is_a_second_witness_with_tokens_and_sees_none_of_the_control_tokens(tmp_path: Path) -> None:
    hosts, control = tmp_path / "hosts", tmp_path / "control"
    hosts.write_text("a-token-of-all-the-hosts\n")
    control.write_text("a-token-of-the-controllers\n")
    shown = Listening(hosts, TOKEN_ENV)
    of_control = TokenFile(control, CONTROL_TOKEN_ENV)
    security = Security(plaintext=True, tokens=shown, control_tokens=of_control).for_daemons

    async def work() -> None:
        sensor = SensorPart(settings(**{TOKEN_ENV: str(hosts), CONTROL_TOKEN_ENV: str(control)}))
        report = DaemonReport(host="a.boot", incarnation="d", sequence=0)
        service = daemon_service(lambda: Probe(host="a.boot", incarnation="d", age_s=1.0, report=report))
        async with serve([service], address="127.0.0.1", port=0, security=security) as port:
            host = HostInfo(id="a.boot", name="a", address=f"127.0.0.1:{port}", workers_per_host=1)
            sensor.host_connected(host, "d")
            assert await sensor._ask_daemon("a.boot") is True

    run(work())
    assert shown.shown == {"a-token-of-all-the-hosts"}


# ------------------------------------------------------------------------------------- what hosts tell


@pytest.mark.parametrize("job_first", [False, True])
async def test_a_host_describes_the_job_that_it_works_for_and_no_other(job_first: bool) -> None:
    sensor = SensorPart(settings(MAX_IN_JOB_RESTARTS="2"))
    host = HostInfo(id="a.boot", name="a", workers_per_host=1)
    sensor.host_connected(host, "d")
    sensor.host_message("a", WorkloadInfo(workload="others", scaling=True, max_replicas=9))
    assert sensor._news.take().workloads == ()
    joins = (replace(host, workload="job"), WorkloadInfo(workload="job"))
    for value in joins[:: -1 if job_first else 1]:
        sensor.host_message("a", value)
    assert sensor._news.take().workloads == (WorkloadInfo(workload="job", max_in_job_restarts=2),)
    scales = settings(ENABLE_WORKLOAD_SCALING="1")
    assert with_defaults(WorkloadInfo(workload="job", max_replicas=2), scales).scaling
    assert not with_defaults(WorkloadInfo(workload="job", replicas=2), scales).scaling  # bounds of 1 to 1
    # What counts for nothing is not kept for a daemon that comes later.
    sensor.host_message("a", WorkloadInfo(workload="others"))
    sensor.host_lost("a", "d")
    sensor.host_connected(replace(host, workload="others"), "d2")
    assert sensor._news.take().workloads == ()
    await sensor._controller.close()


async def test_a_host_that_claims_the_job_of_others_does_not_change_how_it_is_described() -> None:
    sensor = SensorPart(settings())

    def join(name: str, info: WorkloadInfo) -> tuple[WorkloadInfo, ...]:
        """What the controller is told of jobs since."""
        host = HostInfo(id=f"{name}.boot", name=name, workload=info.workload, workers_per_host=1)
        sensor.host_connected(host, "d")
        sensor.host_message(name, info)
        return sensor._news.take().workloads

    job = WorkloadInfo(workload="job", replicas=2, max_replicas=2, downtime_threshold_s=60.0)
    assert [join(name, job) for name in "ab"] == [(job,), ()]
    absurd = replace(job, downtime_threshold_s=0.001)
    assert join("thief", absurd) == ()
    # It stays so while the hosts are away one after the other, and none of their number is lost by it.
    sensor.host_lost("a", "d")
    assert sensor._news.take().workloads == ()
    assert join("a", job) == ()
    # The job itself changes with most of its hosts.
    larger = replace(job, replicas=3, max_replicas=3)
    assert [join(name, larger) for name in "abc"] == [(), (larger,), ()]
    await sensor._controller.close()


# ------------------------------------------------------------------------------------- changes of hosts


class LateSensor(TestSensor):
    """Takes nothing at first."""

    refusals: int = 2

    def take_change(self, host: str, change: Change, evidence: Evidence) -> None:
        if self.refusals:
            self.refusals -= 1
            raise Refused("this sensor is about to end.", reason=Reason.INTERNAL)
        super().take_change(host, change, evidence)


def test_a_change_of_a_host_is_told_until_the_sensor_takes_it(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        sensor = LateSensor()
        streams = HostStreams(part="sensor", report_period_s=1.0, listener=HostCommands())
        service = sensor_service(streams, sensor)
        async with serve([service], address="127.0.0.1", port=0, security=Security(plaintext=True)) as port:
            actuator = ActuatorPart(settings(SENSOR_ADDRESS=f"127.0.0.1:{port}"), NoOrchestrator())
            changes = [
                (host, Change.GONE, Evidence(id=f"local:{host}", witness="orchestrator")) for host in "ab"
            ]
            for change in changes:
                actuator.tell_change(*change)
            running = asyncio.ensure_future(actuator.run())
            await until(lambda: len(sensor.changes) == 2, "the changes are not told")
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            assert sensor.changes == changes

    run(work())
    assert caplog.text.count("this sensor is about to end") >= 1


def test_changes_that_no_sensor_takes_have_a_bound(caplog: pytest.LogCaptureFixture) -> None:
    actuator = ActuatorPart(settings(), NoOrchestrator())
    for number in range(MOST_CHANGES + 1):
        actuator.tell_change(f"h{number}", Change.GONE, Evidence(id=f"e{number}", witness="orchestrator"))
    assert list(actuator._changes) == [f"e{number}" for number in range(1, MOST_CHANGES + 1)]
    assert "gone of h0 dropped" in caplog.text
