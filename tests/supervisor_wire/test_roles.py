# SPDX-License-Identifier: Apache-2.0
"""Who may call and serve what: each call of the protocol by each role, over TLS and with tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message_factory import GetMessageClass

from supervisor.protocol import PROTOCOL_VERSION, fleet_pb2
from supervisor.protocol.convert import to_message
from supervisor.transport.client import Remote
from supervisor.transport.errors import Reason, Refused, Unreachable
from supervisor.transport.host_streams import HostStreams
from supervisor.transport.operators import operator_service
from supervisor.transport.security import CONTROL_TOKEN_ENV, TOKEN_ENV, Security, TokenFile
from supervisor.transport.server import Service, serve
from supervisor.transport.services import (
    actuator_service,
    controller_service,
    daemon_service,
    send_commands,
    sensor_service,
)
from supervisor.values import Command, CommandKind, HostInfo
from tests.asynchronous import run
from tests.supervisor_wire.certificates import CONTROL, HOST, Authority
from tests.supervisor_wire.fleet import Fleet
from tests.supervisor_wire.handlers import TestActuator
from tests.supervisor_wire.listener import Listener
from tests.waiting import WAIT_S

pytestmark = pytest.mark.leaks("descriptors", reason="gRPC's own pollers")

#: Each call of the protocol, the part that serves it, and the only one that may make it.
RULES = {
    "Sensor.Connect": ("sensor", "host"),
    "Sensor.CheckEvidence": ("sensor", "actuator"),
    "Sensor.ReportChange": ("sensor", "actuator"),
    "Sensor.ListSights": ("sensor", "controller"),
    "Sensor.Thaw": ("sensor", "controller"),
    "Controller.ReportEvents": ("controller", "sensor"),
    "Controller.ReportOutcomes": ("controller", "actuator"),
    "Controller.ListKnown": ("controller", "sensor"),
    "Operator.Status": ("controller", "operator"),
    "Operator.Act": ("controller", "operator"),
    "Operator.History": ("controller", "operator"),
    "Actuator.Connect": ("actuator", "host"),
    "Actuator.Execute": ("actuator", "controller"),
    "Actuator.LookAtHost": ("actuator", "sensor"),
    "HostDaemon.Probe": ("host", "sensor"),
}
METHODS = {
    f"{service.name}.{method.name}": method
    for service in fleet_pb2.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
PARTS = ("host", "sensor", "controller", "actuator", "operator")
#: DNS names in the certificate of each caller.  Both hosts have one that is good for themselves only.
CALLERS = {
    "host": (HOST, f"host-1.{HOST}"),
    "other host": (HOST, f"host-2.{HOST}"),
    **{part: (f"resiliency-{part}",) for part in PARTS[1:]},
    "nobody": (),
}
#: Why a call is refused that none may make, or a host for another one.
REFUSALS = {Reason.ROLE, Reason.IDENTITY}


def real_services() -> list[Service]:
    """As the parts make them; nothing is behind their handlers, which fail with INTERNAL or INVALID."""
    nothing: Any = None
    streams = [
        HostStreams(part=part, report_period_s=1.0, listener=Listener()) for part in ("sensor", "actuator")
    ]
    return [
        sensor_service(streams[0], nothing),
        actuator_service(streams[1], nothing),
        controller_service(nothing, nothing, nothing),
        operator_service(nothing, nothing, nothing),
        daemon_service(nothing),
    ]


def hello(name: str = "host-1", id: str = "host-1.boot") -> Any:
    host = to_message(HostInfo(id=id, name=name, workers_per_host=1))
    said = fleet_pb2.Hello(protocol=PROTOCOL_VERSION, incarnation="a1", host=host)
    return fleet_pb2.HostMessage(hello=said)


async def reason_of(remote: Remote, name: str) -> Reason | None:
    """Why the call, or a stream of host-1, was refused; None where it was not.

    gRPC loses what the server said where that comes while a message is being written: a daemon tries again.
    """
    for _ in range(5):
        try:
            return await _reason_of(remote, name)
        except Unreachable as error:
            if "Internal error from Core" not in str(error):
                raise
    raise AssertionError(f"{name}: the status of the call was lost five times")


async def _reason_of(remote: Remote, name: str) -> Reason | None:
    method = METHODS[name]
    try:
        if method.client_streaming:
            async with remote.stream(method) as stream:
                await stream.send(hello())
                await stream.receive()
        else:
            await remote.call(method, GetMessageClass(method.input_type)(), timeout_s=WAIT_S)
    except Refused as error:
        return error.reason
    return None


@asynccontextmanager
async def served(security: Security, *services: Service) -> AsyncIterator[str]:
    async with serve(
        list(services) or real_services(), address="127.0.0.1", port=0, security=security
    ) as port:
        yield f"127.0.0.1:{port}"


def test_the_rules_name_each_call_of_the_protocol() -> None:
    assert set(RULES) == set(METHODS)
    services = real_services()
    assert {f"{one.descriptor.name}.{name}" for one in services for name in one.handlers} == set(METHODS)


async def test_each_call_is_for_one_role_by_its_certificate(authority: Authority) -> None:
    async with served(authority.security(HOST, *CONTROL)) as address:
        for caller, names in CALLERS.items():
            async with Remote(address, authority.security(*names)) as remote:
                for name in METHODS:
                    allowed = RULES[name][1] == caller
                    assert (await reason_of(remote, name) not in REFUSALS) is allowed, (caller, name)


def test_each_call_is_for_one_role_by_its_token(tmp_path: Path) -> None:
    """A control token is for all parts and operators."""
    files = {role: tmp_path / f"token-{role}" for role in ("host", "control", "nobody")}
    for role, path in files.items():
        path.write_text(f"a-token-of-{role}-and-no-other")
    hosts, control = TokenFile(files["host"], TOKEN_ENV), TokenFile(files["control"], CONTROL_TOKEN_ENV)
    server = Security(plaintext=True, tokens=hosts, control_tokens=control)

    async def work() -> None:
        async with served(server) as address:
            for role, path in files.items():
                caller = Security(plaintext=True, tokens=TokenFile(path, TOKEN_ENV))
                async with Remote(address, caller) as remote:
                    for name in METHODS:
                        allowed = role == ("host" if RULES[name][1] == "host" else "control")
                        assert (await reason_of(remote, name) not in REFUSALS) is allowed, (role, name)

    run(work())


def test_each_service_is_asked_only_of_the_part_that_serves_it(
    authority: Authority, capfd: pytest.CaptureFixture[str]
) -> None:
    async def work() -> None:
        for server in PARTS:
            async with served(authority.security(f"resiliency-{server}")) as address:
                for name in METHODS:
                    if METHODS[name].client_streaming or not name.endswith(
                        ("ListSights", "ListKnown", "Status", "LookAtHost", "Probe")
                    ):
                        continue  # one of each service is enough: the connection is refused
                    async with Remote(address, authority.security(HOST, *CONTROL)) as remote:
                        try:
                            await reason_of(remote, name)
                            believed = True
                        except Unreachable:
                            believed = False
                    assert believed is (RULES[name][0] == server), (server, name)

    run(work())
    capfd.readouterr()  # gRPC's own lines about names that do not match


def test_a_training_host_that_poses_as_the_actuator_commands_no_other_host(
    tmp_path: Path, authority: Authority, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its certificate is of the same authority and for the same address, as the chart once made them."""

    async def work() -> None:
        fleet = Fleet(tmp_path, authority.security(HOST))
        certificate, key = authority.issue(HOST, f"host-1.{HOST}")
        files = {"CA": authority.path, "CERT": certificate, "KEY": key}
        async with fleet.serve():
            with fleet.daemon(
                **{f"SUPERVISOR_TLS_{name}": str(path) for name, path in files.items()}
            ) as daemon:
                said = await asyncio.to_thread(
                    daemon.wait_for_line, "actuator(: connected| at .*)", timeout=WAIT_S
                )
                assert "Hostname Verification Check failed" in said[0]
        assert fleet.actuator.told == []

    run(work())
    capfd.readouterr()


@pytest.mark.parametrize("epoch", [10**15, 2**62])
def test_no_command_of_an_absurd_epoch_is_taken_by_an_actuator(epoch: int) -> None:
    actuator = TestActuator()
    service = actuator_service(
        HostStreams(part="actuator", report_period_s=1.0, listener=Listener()), actuator
    )
    plain = Security(plaintext=True)
    absurd, real = (
        Command(epoch=one, id="c1", kind=CommandKind.IN_JOB_RESET, workload="job") for one in (epoch, 1)
    )

    async def work() -> None:
        async with served(plain, service) as address, Remote(address, plain) as remote:
            with pytest.raises(Refused, match=f"epoch {epoch} is more than a year ahead of this machine's"):
                await send_commands(remote, [absurd], deadline_s=WAIT_S)
            await send_commands(remote, [real], deadline_s=WAIT_S)
        assert actuator.commands == [real]

    run(work())


@pytest.mark.parametrize(
    ("names", "said", "sentence"),
    [
        (
            (HOST, f"host-1.{HOST}"),
            hello("host-2", "host-2.boot"),
            "the certificate is for host host-1, and the daemon calls itself 'host-2'",
        ),
        (
            (HOST,),
            hello("host-1", "host-2.boot"),
            "the id of host 'host-1' must be its name, a dot and its boot, found 'host-2.boot'",
        ),
    ],
)
async def test_a_host_speaks_for_itself_only(
    names: tuple[str, ...], said: Any, sentence: str, authority: Authority
) -> None:
    async with (
        served(authority.security(*CONTROL)) as address,
        Remote(address, authority.security(*names)) as remote,
    ):
        for name in ("Sensor.Connect", "Actuator.Connect"):
            async with remote.stream(METHODS[name]) as stream:
                await stream.send(said)
                with pytest.raises(Refused, match=sentence):
                    await stream.receive()
