# SPDX-License-Identifier: Apache-2.0
"""The health check of the image: it finds out which program it is, and that one has to answer."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from resiliency.errors import ConfigError
from supervisor.parts import health
from supervisor.transport.security import Security
from supervisor.transport.server import serve
from tests.asynchronous import run
from tests.ports import free_port
from tests.supervisor_plane.plane import PARTS, Host, open_plane
from tests.supervisor_wire.certificates import CONTROL, HOST, Authority

pytestmark = pytest.mark.leaks("descriptors", reason="gRPC's own pollers")


@pytest.mark.slow
def test_each_program_is_well_until_it_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(health, "ANSWER_S", 2.0)
    with open_plane(tmp_path) as (plane, stack):
        for name, text in plane.env.items():
            monkeypatch.setenv(name, text)
        programs = {part: plane.start(part, *["--status-port=0"] * (part == "controller")) for part in PARTS}
        programs["host"] = Host(plane, stack, "a").daemon
        for name, program in programs.items():
            assert health.main([str(program.pid)]) == 0, name
            program.signal(19)
            assert health.main([str(program.pid)]) == 1, name
            assert f"resiliency-{name} at 127.0.0.1:" in capsys.readouterr().err
            program.signal(18)
            assert health.main([str(program.pid)]) == 0, name


def test_a_server_is_asked_with_the_certificate_of_its_own_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(health, "ANSWER_S", 2.0)

    async def work() -> None:
        authority = Authority(tmp_path)
        certificate, key = authority.issue(*CONTROL, file="served")
        security = Security(certificate=certificate, key=key, authority=authority.path)
        env = {
            "CONTROLLER_ADDRESS": "controller:1",
            "SUPERVISOR_TLS_CA": str(authority.path),
            "SUPERVISOR_TLS_CERT": str(certificate),
            "SUPERVISOR_TLS_KEY": str(key),
        }
        async with serve([], address="127.0.0.1", port=0, security=security) as port:
            command = ["python3", "-m", "supervisor.sensor", f"--port={port}"]

            async def problem() -> str:
                return await asyncio.to_thread(health.find_problem, command, env)

            assert await problem() == ""
            authority.issue(HOST, file="served")
            assert f"resiliency-sensor at 127.0.0.1:{port} does not answer: UNAVAILABLE" in await problem()

    run(work())
    capfd.readouterr()  # gRPC's own lines about handshakes


def test_a_controller_that_cannot_write_its_log_is_not_well() -> None:
    (port,) = [free_port()]
    assert f"http://127.0.0.1:{port}/healthz: " in health._why_unwell("127.0.0.1", port)


@pytest.mark.parametrize("command", [["python3", "train.py"], ["python3", "-m", "supervisor.client"], []])
def test_another_program_is_refused_with_a_sentence(command: list[str]) -> None:
    with pytest.raises(ConfigError, match="is no program of the supervisor"):
        health.find_problem(command, {})
