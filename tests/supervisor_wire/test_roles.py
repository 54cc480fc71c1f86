# SPDX-License-Identifier: Apache-2.0
"""Who may call what, as a table of all methods, against a real server with tokens of both roles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message_factory import GetMessageClass

from supervisor.protocol import fleet_pb2
from supervisor.transport.client import Remote
from supervisor.transport.errors import Reason, Refused
from supervisor.transport.host_streams import HostStreams
from supervisor.transport.operators import operator_service
from supervisor.transport.security import CONTROL_TOKEN_ENV, TOKEN_ENV, Security, TokenFile
from supervisor.transport.server import Service, serve
from supervisor.transport.services import (
    actuator_service,
    controller_service,
    daemon_service,
    sensor_service,
)
from tests.asynchronous import run
from tests.waiting import WAIT_S

pytestmark = pytest.mark.leaks("descriptors", reason="gRPC's own pollers")

#: Methods that training hosts may call; all others are for the supervisor's own parts and operators.
FOR_HOSTS = {"Sensor.Connect", "Actuator.Connect", "HostDaemon.Probe"}
METHODS = {
    f"{service.name}.{method.name}": method
    for service in fleet_pb2.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
TOKENS = {
    "host": "a-token-of-all-the-hosts",
    "control": "a-token-of-the-controllers",
    "": "nobody-s-own-token",
}


def real_services() -> list[Service]:
    """As the parts make them; their handlers are never reached with a message that is all empty."""
    nothing: Any = None
    streams = HostStreams(part="sensor", report_period_s=1.0, listener=nothing)
    return [
        sensor_service(streams, nothing),
        actuator_service(streams, nothing),
        controller_service(nothing, nothing, nothing),
        operator_service(nothing, nothing, nothing),
        daemon_service(nothing),
    ]


async def reason_of(remote: Remote, name: str) -> Reason | None:
    """Why the call was refused; a handler that has nothing behind it fails with INTERNAL or INVALID."""
    method = METHODS[name]
    try:
        await remote.call(method, GetMessageClass(method.input_type)(), timeout_s=WAIT_S)
    except Refused as error:
        return error.reason
    return None


def test_each_method_is_for_the_roles_of_this_table(tmp_path: Path) -> None:
    files = {role: tmp_path / f"token-{role}" for role in TOKENS}
    for role, path in files.items():
        path.write_text(TOKENS[role])
    hosts, control = TokenFile(files["host"], TOKEN_ENV), TokenFile(files["control"], CONTROL_TOKEN_ENV)
    security = Security(plaintext=True, tokens=hosts, control_tokens=control)
    services = real_services()
    said = {f"{one.descriptor.name}.{name}" for one in services for name in one.for_hosts}
    assert said == FOR_HOSTS
    assert {f"{one.descriptor.name}.{name}" for one in services for name in one.handlers} == set(METHODS)

    async def work() -> None:
        async with serve(services, address="127.0.0.1", port=0, security=security) as port:
            for role, path in files.items():
                caller = Security(plaintext=True, tokens=TokenFile(path, TOKEN_ENV))
                async with Remote(f"127.0.0.1:{port}", caller) as remote:
                    for name, method in METHODS.items():
                        if method.client_streaming:
                            continue  # by the same table: `for_hosts`
                        reason = await reason_of(remote, name)
                        if role == "":
                            assert reason is Reason.IDENTITY, name
                        elif role == "host" and name not in FOR_HOSTS:
                            assert reason is Reason.ROLE, name
                        else:
                            assert reason not in (Reason.IDENTITY, Reason.ROLE), (role, name)

    run(work())
