# SPDX-License-Identifier: Apache-2.0
"""Who is let in, what is refused and with which sentence, and how long a call may take: over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import random
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest

from resiliency.errors import ConfigError
from resiliency.testing import ManualClock
from supervisor.detection import HostSight
from supervisor.protocol import PROTOCOL_VERSION, fleet_pb2
from supervisor.protocol.convert import from_message, to_message
from supervisor.protocol.host_commands import HostCommand, HostCommandKind
from supervisor.transport import client, host_streams
from supervisor.transport.client import ClientStream, Remote, keep_stream
from supervisor.transport.errors import Reason, Refused, Unreachable
from supervisor.transport.host_streams import HostStreams
from supervisor.transport.limits import BATCH_ITEMS, Backoff, RateLimit
from supervisor.transport.operators import OPERATOR
from supervisor.transport.roles import Role
from supervisor.transport.security import CONTROL_TOKEN_ENV, TOKEN_ENV, Caller, Security, TokenFile
from supervisor.transport.server import ServerStream, serve
from supervisor.transport.services import (
    SENSOR_CONNECT,
    EvidenceCheck,
    Known,
    Observations,
    Probe,
    actuator_service,
    ask_evidence,
    ask_known,
    ask_orchestrator,
    ask_sights,
    controller_service,
    daemon_service,
    probe_daemon,
    send_change,
    send_commands,
    send_observations,
    send_outcomes,
    send_thaw,
    sensor_service,
)
from supervisor.values import (
    MAX_NAME_CHARS,
    Change,
    Command,
    CommandKind,
    DaemonReport,
    Evidence,
    HostInfo,
    LauncherState,
    Outcome,
    OutcomeStatus,
    Progress,
    Silence,
    WorkerInfo,
    WorkerReport,
    WorkloadInfo,
)
from tests.asynchronous import run
from tests.supervisor_wire.certificates import CONTROL, HOST, Authority
from tests.supervisor_wire.handlers import TestActuator, TestSensor, nothing_known
from tests.supervisor_wire.listener import Listener
from tests.waiting import WAIT_S

# gRPC keeps an epoll instance and an eventfd for some time after its last channel.
pytestmark = pytest.mark.leaks("descriptors", reason="gRPC's own pollers")

T = TypeVar("T")
PLAIN = Security(plaintext=True)


def host(name: str = "host-1") -> HostInfo:
    return HostInfo(id=f"{name}.boot", name=name, workers_per_host=2)


def hello(
    name: str = "host-1", incarnation: str = "a1", protocol: int = PROTOCOL_VERSION, release: str = "0"
) -> Any:
    said = fleet_pb2.Hello(
        protocol=protocol, release=release, incarnation=incarnation, host=to_message(host(name))
    )
    return fleet_pb2.HostMessage(hello=said)


def report(sequence: int, name: str = "host-1") -> DaemonReport:
    worker = WorkerReport(local_rank=0, global_rank=4, step=12, step_age_s=0.5)
    return DaemonReport(host=f"{name}.boot", incarnation="a1", sequence=sequence, workers=(worker,))


def restart(id: str) -> HostCommand:
    return HostCommand(epoch=1, id=id, kind=HostCommandKind.RESTART_RANKS, workload="job")


async def with_streams(
    use: Callable[[HostStreams, Listener, Remote], Awaitable[T]],
    server: Security = PLAIN,
    client: Security = PLAIN,
) -> T:
    listener = Listener()
    streams = HostStreams(part="sensor", report_period_s=5.0, listener=listener)
    async with (
        serve([sensor_service(streams, TestSensor())], address="127.0.0.1", port=0, security=server) as port,
        Remote(f"127.0.0.1:{port}", client) as remote,
    ):
        return await use(streams, listener, remote)


# ------------------------------------------------------------------------------------------- streams of hosts


def test_reports_go_up_and_commands_come_down_on_one_stream() -> None:
    async def use(streams: HostStreams, listener: Listener, remote: Remote) -> None:
        async with remote.stream(SENSOR_CONNECT) as stream:
            await stream.send(hello())
            welcome = (await stream.receive()).welcome
            assert (welcome.protocol, welcome.report_period_s) == (PROTOCOL_VERSION, 5.0)
            assert await listener.wait_for("connected", "host-1") == "a1"
            await stream.send(fleet_pb2.HostMessage(report=to_message(report(0))))
            assert await listener.wait_for("message", "host-1") == report(0)
            assert streams.try_send_command("host-1", restart("c1"))
            assert streams.try_ask_resend("host-1")
            assert from_message(HostCommand, (await stream.receive()).command) == restart("c1")
            assert (await stream.receive()).resend
        assert await listener.wait_for("lost", "host-1") == "a1"
        assert streams.hosts == {}
        assert not streams.try_send_command("host-1", restart("c2"))

    run(with_streams(use))


@pytest.mark.parametrize(
    ("first", "reason", "sentence"),
    [
        (
            hello(protocol=9, release="7.1"),
            Reason.VERSION,
            r"daemon of host 'host-1' speaks protocol 9 \(release '7.1'\), this sensor speaks protocol 3 .* "
            "Install the same release on both.",
        ),
        (
            fleet_pb2.HostMessage(report=to_message(report(0))),
            Reason.INVALID,
            "must say hello within 10 s and before anything else",
        ),
        (hello(incarnation="a b"), Reason.INVALID, "an incarnation must be 1 to 64 letters and digits"),
        (
            fleet_pb2.HostMessage(
                hello=fleet_pb2.Hello(
                    protocol=PROTOCOL_VERSION,
                    incarnation="a1",
                    host=fleet_pb2.HostInfo(id="x", name="two words", state="spare", workers_per_host=1),
                )
            ),
            Reason.INVALID,
            "HostInfo.name must be at most 253 printable characters, found 'two words'",
        ),
    ],
)
def test_a_host_that_says_something_else_is_refused_with_a_sentence(
    first: Any, reason: Reason, sentence: str
) -> None:
    async def use(streams: HostStreams, listener: Listener, remote: Remote) -> None:
        async with remote.stream(SENSOR_CONNECT) as stream:
            await stream.send(first)
            with pytest.raises(Refused, match=sentence) as refused:
                await stream.receive()
        assert refused.value.reason is reason
        assert refused.value.fields["address"] == remote.address
        assert listener.told == []
        assert streams.hosts == {}

    run(with_streams(use))


def test_a_host_that_says_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_streams, "HANDSHAKE_S", 0.2)

    async def use(streams: HostStreams, listener: Listener, remote: Remote) -> None:
        async with remote.stream(SENSOR_CONNECT) as stream:
            with pytest.raises(Refused, match=r"must say hello within 0\.2 s"):
                await stream.receive()

    run(with_streams(use))


def test_a_second_daemon_of_the_same_name_is_refused_and_the_first_one_stays() -> None:
    async def use(streams: HostStreams, listener: Listener, remote: Remote) -> None:
        async with remote.stream(SENSOR_CONNECT) as first, remote.stream(SENSOR_CONNECT) as second:
            await first.send(hello())
            await first.receive()
            await second.send(hello(incarnation="b2"))
            with pytest.raises(Refused, match="host name 'host-1' is taken: another daemon") as refused:
                await second.receive()
            assert refused.value.reason is Reason.DUPLICATE_HOST
            assert streams.hosts == {"host-1": "a1"}
            streams.try_send_command("host-1", restart("c1"))
            assert (await first.receive()).command.id == "c1"

    run(with_streams(use))


def test_a_daemon_that_connects_again_replaces_its_own_stream_and_is_not_lost() -> None:
    async def use(streams: HostStreams, listener: Listener, remote: Remote) -> None:
        async with remote.stream(SENSOR_CONNECT) as first, remote.stream(SENSOR_CONNECT) as second:
            for stream in (first, second):
                await stream.send(hello())
                await stream.receive()
            with pytest.raises(Refused, match="the same daemon has made another stream"):
                await first.receive()
            streams.try_send_command("host-1", restart("c1"))
            assert (await second.receive()).command.id == "c1"
        await listener.wait_for("lost", "host-1")
        assert [kind for kind, _, _ in listener.told] == ["connected", "connected", "lost"]

    run(with_streams(use))


class EndedTwice:
    """gRPC's side of a stream whose host was killed: what waits for it takes a moment to end."""

    peer, caller = "host-1", Caller(roles=frozenset({Role.HOST}))

    def __init__(self) -> None:
        self._first = True
        self.ending = asyncio.Event()

    async def receive(self) -> Any:
        if self._first:
            self._first = False
            return hello()
        try:
            await asyncio.Event().wait()
        finally:
            self.ending.set()
            await asyncio.sleep(0)

    async def send(self, message: Any) -> None: ...


async def test_a_host_is_lost_also_where_its_handler_is_cancelled_again_while_it_ends() -> None:
    listener, stream = Listener(), EndedTwice()
    streams = HostStreams(part="sensor", report_period_s=5.0, listener=listener)
    handler = asyncio.ensure_future(streams.connect(cast(ServerStream, stream)))
    await listener.wait_for("connected", "host-1")
    await asyncio.sleep(0)
    handler.cancel()
    await stream.ending.wait()
    handler.cancel()
    await asyncio.wait({handler})
    assert streams.hosts == {}
    assert [kind for kind, _, _ in listener.told] == ["connected", "lost"]


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        (
            fleet_pb2.HostMessage(report=to_message(report(0, "host-2"))),
            "host 'host-1.boot' speaks for host 'host-2.boot'",
        ),
        (hello(), "a host must not send 'hello' after its hello"),
        (fleet_pb2.HostMessage(), "a host must not send None after its hello"),
        (
            fleet_pb2.HostMessage(outcome=fleet_pb2.Outcome(command="c" * 300_000)),
            "a message of 3000.. bytes is larger than 262144",
        ),
        (
            fleet_pb2.HostMessage(report=fleet_pb2.DaemonReport(host="host-1.boot", incarnation="a1")),
            "DaemonReport.launcher must be one of",
        ),
    ],
)
def test_a_message_that_breaks_the_rules_ends_the_stream_of_its_host_only(
    message: Any, sentence: str
) -> None:
    async def use(streams: HostStreams, listener: Listener, remote: Remote) -> None:
        async with remote.stream(SENSOR_CONNECT) as bad, remote.stream(SENSOR_CONNECT) as good:
            await bad.send(hello())
            await bad.receive()
            await good.send(hello("host-2"))
            await good.receive()
            await bad.send(message)
            with pytest.raises(Refused, match=sentence):
                await bad.receive()
            await listener.wait_for("lost", "host-1")
            assert streams.hosts == {"host-2": "a1"}

    run(with_streams(use))


def test_a_host_that_sends_too_often_is_cut_off(caplog: pytest.LogCaptureFixture) -> None:
    async def use(streams: HostStreams, listener: Listener, remote: Remote) -> None:
        async with remote.stream(SENSOR_CONNECT) as stream:
            await stream.send(hello())
            await stream.receive()
            with contextlib.suppress(Refused, Unreachable):  # whether the reason came before the end
                for sequence in itertools.count():  # a busy machine needs more than the burst
                    await stream.send(fleet_pb2.HostMessage(report=to_message(report(sequence))))
            await listener.wait_for("lost", "host-1")

    with caplog.at_level(logging.INFO, logger="supervisor"):
        run(with_streams(use))
    assert "refused: host host-1 sends more than 50 messages a second." in caplog.text


async def test_a_stream_is_made_again_when_the_server_is_back() -> None:
    listener = Listener()
    streams = HostStreams(part="sensor", report_period_s=5.0, listener=listener)
    service = sensor_service(streams, TestSensor())

    async def use(stream: ClientStream) -> None:
        await stream.send(hello())
        while True:
            await stream.receive()

    async with serve([service], address="127.0.0.1", port=0, security=PLAIN) as port:
        backoff = Backoff(first_s=0.02, most_s=0.1)
        remote = Remote(f"127.0.0.1:{port}", PLAIN)
        keeper = asyncio.create_task(keep_stream(remote, SENSOR_CONNECT, use, what="sensor", backoff=backoff))
        await listener.wait_for("connected", "host-1")
    await listener.wait_for("lost", "host-1")
    async with serve([service], address="127.0.0.1", port=port, security=PLAIN):
        await listener.wait_for("connected", "host-1", count=2)
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)


# ------------------------------------------------------------------------------------------- calls


async def test_events_outcomes_and_commands_reach_their_handlers() -> None:
    seen: list[Observations] = []
    ended: list[Outcome] = []

    async def on_observations(one: Observations) -> int:
        seen.append(one)
        return 7

    async def on_outcomes(outcomes: tuple[Outcome, ...]) -> None:
        ended.extend(outcomes)

    known = [host(f"h{number}") for number in range(3)]

    def page(after: str) -> Known:
        rest = [one for one in known if one.id > after]
        jobs = () if after else (WorkloadInfo(workload="job"),)
        return Known(
            epoch=7,
            workloads=jobs,
            hosts=tuple(rest[:2]),
            more=len(rest) > 2,
            progress=() if after else (Progress(workload="job", step=7, attempt=3, age_s=1.5),),
        )

    streams = HostStreams(part="actuator", report_period_s=5.0, listener=Listener())
    sights = [
        HostSight(
            host=one.id,
            connected=True,
            age_s=0.5,
            silent=False,
            attempt=2,
            launcher=LauncherState.RUNNING,
            steps=((0, 12),),
        )
        for one in known
    ]
    holding = {"c1": EvidenceCheck(holds=True, attempt=4), "c2": EvidenceCheck(holds=False)}
    sensor = TestSensor(holding=holding, seen=sights)
    actuator = TestActuator(there={"h0": True, "h1": False})
    services = [
        controller_service(on_observations, on_outcomes, page),
        actuator_service(streams, actuator),
        sensor_service(streams, sensor),
    ]
    probe = Probe(host="host-1", incarnation="a1", age_s=3.5, report=report(3))
    services.append(daemon_service(lambda: probe))
    many = Observations(hosts=tuple(host(f"h{number}") for number in range(BATCH_ITEMS + 1)))
    silence = Silence(frozen=True, silent=3, hosts=4)
    few = Observations(progress=(Progress(workload="job", step=3),), silence=silence)
    command = Command(epoch=1, id="c1", kind=CommandKind.IN_JOB_RESET, workload="job")
    outcome = Outcome(command="c1", epoch=1, status=OutcomeStatus.DONE)
    async with (
        serve(services, address="127.0.0.1", port=0, security=PLAIN) as port,
        Remote(f"127.0.0.1:{port}", PLAIN) as remote,
    ):
        assert await send_observations(remote, many, deadline_s=WAIT_S) == 7
        await send_observations(remote, few, deadline_s=WAIT_S)
        await send_commands(remote, [command], deadline_s=WAIT_S)
        await send_outcomes(remote, [outcome], deadline_s=WAIT_S)
        assert await probe_daemon(remote, timeout_s=WAIT_S) == probe
        for name, answer in (*holding.items(), ("c3", EvidenceCheck(holds=None))):
            asked = replace(command, id=name)
            assert await ask_evidence(remote, asked, timeout_s=WAIT_S) == answer
        for name, there in (("h0", True), ("h1", False), ("h2", None)):
            assert await ask_orchestrator(remote, name, timeout_s=WAIT_S) is there
        told = await ask_known(remote, timeout_s=WAIT_S)
        assert told == Known(
            epoch=7,
            workloads=(WorkloadInfo(workload="job"),),
            hosts=tuple(known),
            progress=(Progress(workload="job", step=7, attempt=3, age_s=1.5),),
        )
        assert await ask_sights(remote, timeout_s=WAIT_S) == sights
        evidence = Evidence(id="o1", witness="orchestrator")
        await send_change(remote, "h1", Change.GONE, evidence, deadline_s=WAIT_S)
        await send_thaw(remote, timeout_s=WAIT_S)
    assert [len(one.hosts) for one in seen] == [BATCH_ITEMS, 1, 0]
    assert seen[0].hosts + seen[1].hosts == many.hosts
    assert seen[2] == few
    assert (actuator.commands, ended) == ([command], [outcome])
    assert (sensor.changes, sensor.thawed) == ([("h1", Change.GONE, evidence)], 1)


async def test_hosts_of_many_workers_with_long_names_go_in_as_many_batches_as_fit_messages() -> None:
    long = "n" * (MAX_NAME_CHARS - 4)
    workers = tuple(WorkerInfo(id=f"{long}{rank}", local_rank=rank, global_rank=rank) for rank in range(64))
    hosts = tuple(
        replace(host(f"h{number:03}"), workers=workers, workers_per_host=64) for number in range(300)
    )
    seen: list[HostInfo] = []
    batches = 0

    async def on_observations(told: Observations) -> int:
        nonlocal batches
        batches += 1
        seen.extend(told.hosts)
        return 7

    async def on_outcomes(outcomes: object) -> None:
        raise AssertionError(outcomes)

    def known(after: str) -> Known:
        return Known(epoch=7, hosts=tuple(one for one in hosts if one.id > after))

    async with (
        serve(
            [controller_service(on_observations, on_outcomes, known)],
            address="127.0.0.1",
            port=0,
            security=PLAIN,
        ) as port,
        Remote(f"127.0.0.1:{port}", PLAIN) as remote,
    ):
        await send_observations(remote, Observations(hosts=hosts), deadline_s=WAIT_S)
        assert (tuple(seen), batches) == (hosts, 3)
        assert (await ask_known(remote, timeout_s=WAIT_S)).hosts == hosts


async def test_a_caller_of_another_protocol_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def accept(_: Any) -> None:
        raise AssertionError

    async with (
        serve(
            [controller_service(accept, accept, nothing_known)],
            address="127.0.0.1",
            port=0,
            security=PLAIN,
        ) as port,
        Remote(f"127.0.0.1:{port}", PLAIN) as remote,
    ):
        monkeypatch.setattr(client, "PROTOCOL_VERSION", 9)
        with pytest.raises(Refused, match="speaks protocol '9', this process speaks protocol 3") as refused:
            await send_observations(remote, Observations(), deadline_s=WAIT_S)
        assert refused.value.reason is Reason.VERSION


async def test_what_a_handler_raises_is_an_answer_and_not_a_traceback() -> None:
    async def broken(_: Any) -> None:
        raise ZeroDivisionError

    async with (
        serve(
            [controller_service(broken, broken, nothing_known)],
            address="127.0.0.1",
            port=0,
            security=PLAIN,
        ) as port,
        Remote(f"127.0.0.1:{port}", PLAIN) as remote,
    ):
        with pytest.raises(Refused, match="an error of its own; its log has it") as refused:
            await send_observations(remote, Observations(), deadline_s=WAIT_S)
        assert refused.value.reason is Reason.INTERNAL


async def test_a_call_to_nobody_is_tried_again_until_its_deadline_and_no_longer() -> None:
    async with serve([], address="127.0.0.1", port=0, security=PLAIN) as port:
        pass
    async with Remote(f"127.0.0.1:{port}", PLAIN) as remote:
        began = time.monotonic()
        # The last try may be cut by the deadline.
        said = rf"ReportEvents at 127.0.0.1:{port} failed: (UNAVAILABLE|DEADLINE_EXCEEDED)"
        with pytest.raises(Unreachable, match=said):
            await send_observations(remote, Observations(), deadline_s=0.5)
        assert time.monotonic() - began < 5


async def test_a_server_that_does_not_answer_costs_the_timeout() -> None:
    async def hang(_: Any) -> None:
        await asyncio.Event().wait()

    async with (
        serve(
            [controller_service(hang, hang, nothing_known)], address="127.0.0.1", port=0, security=PLAIN
        ) as port,
        Remote(f"127.0.0.1:{port}", PLAIN) as remote,
    ):
        with pytest.raises(Unreachable, match="DEADLINE_EXCEEDED"):
            await send_observations(remote, Observations(), deadline_s=0.2)


async def test_a_port_is_held_by_one_server() -> None:
    async with serve([], address="127.0.0.1", port=0, security=PLAIN) as port:
        with pytest.raises(ConfigError, match=rf"cannot listen at 127.0.0.1:{port}"):
            async with serve([], address="127.0.0.1", port=port, security=PLAIN):
                pass


# ------------------------------------------------------------------------------------------- identity


def tokens(path: Path, text: str, variable: str = TOKEN_ENV) -> TokenFile:
    path.write_text(text)
    return TokenFile(path, variable)


async def greet(server: Security, client: Security) -> Role:
    """Whether the server takes the client for a host or for an actuator, or its refusal."""

    async def use(streams: HostStreams, listener: Listener, remote: Remote) -> Role:
        try:
            async with remote.stream(SENSOR_CONNECT) as stream:
                await stream.send(hello())
                await stream.receive()
            return Role.HOST
        except Refused as error:
            if error.reason is not Reason.ROLE:
                raise
        await send_change(remote, "host-1", Change.GONE, Evidence(id="e", witness="w"), deadline_s=WAIT_S)
        return Role.ACTUATOR

    return await with_streams(use, server, client)


def test_a_certificate_of_another_authority_is_refused(
    authority: Authority, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    other = Authority(tmp_path)
    certificate, key = other.issue(HOST)
    stranger = Security(certificate=certificate, key=key, authority=authority.path)
    for server, caller in (
        (authority.security(*CONTROL), stranger),
        (other.security(*CONTROL), authority.security(HOST)),  # and a client does not believe any server
    ):
        with pytest.raises(Unreachable):
            run(greet(server, caller))
    capfd.readouterr()  # gRPC's own lines about handshakes


@pytest.mark.parametrize(
    ("tls", "sentence"),
    [
        (
            "server",
            "The server ended the connection before a word, as one does that speaks TLS; this process",
        ),
        ("client", "The server speaks plaintext, this process speaks TLS: give this process --plaintext or"),
    ],
)
def test_where_only_one_side_speaks_tls_streams_and_calls_say_so_and_what_to_do(
    tls: str, sentence: str, authority: Authority, capfd: pytest.CaptureFixture[str]
) -> None:
    secure = authority.security(*CONTROL, HOST)

    async def call(streams: HostStreams, listener: Listener, remote: Remote) -> None:
        await remote.call(OPERATOR.methods_by_name["Status"], fleet_pb2.Document(), timeout_s=WAIT_S)

    sides = (secure, PLAIN) if tls == "server" else (PLAIN, secure)
    for tried in (greet(*sides), with_streams(call, *sides)):
        with pytest.raises(Unreachable, match=sentence):
            run(tried)
    capfd.readouterr()  # gRPC's own lines about handshakes


def test_a_token_does_where_certificates_are_not_at_hand(authority: Authority, tmp_path: Path) -> None:
    of_hosts = tokens(tmp_path / "hosts", "a-token-of-all-the-hosts\n")
    of_control = tokens(tmp_path / "control", "a-token-of-the-controllers\n", CONTROL_TOKEN_ENV)
    certificate, key = authority.issue(*CONTROL)
    server = Security(
        certificate=certificate,
        key=key,
        authority=authority.path,
        tokens=of_hosts,
        control_tokens=of_control,
    )
    assert run(greet(server, Security(authority=authority.path, tokens=of_hosts))) is Role.HOST
    control = Security(authority=authority.path, tokens=of_hosts, control_tokens=of_control)
    assert run(greet(server, control)) is Role.ACTUATOR
    wrong = tokens(tmp_path / "wrong", "a-token-of-somebody-else\n")
    with pytest.raises(Refused, match="the token is not one that this process accepts") as refused:
        run(greet(server, Security(authority=authority.path, tokens=wrong)))
    assert refused.value.reason is Reason.IDENTITY
    with pytest.raises(Refused, match="the token is missing"):
        run(greet(server, authority.security(HOST)))


def test_certificates_are_rotated_without_a_restart(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    past = timedelta(minutes=-1)

    async def work() -> None:
        authority = Authority(tmp_path)
        expired = {"lifetime": past}
        server = Security(**_files(authority, *CONTROL, file="server", **expired))
        caller = Security(**_files(authority, *CONTROL, file="client"))
        told: list[Observations] = []

        async def take(seen: Any) -> None:
            told.append(seen)

        services = [controller_service(take, take, nothing_known)]
        async with (
            serve(services, address="127.0.0.1", port=0, security=server) as port,
            Remote(f"127.0.0.1:{port}", caller) as remote,
        ):

            async def tell(deadline_s: float = WAIT_S) -> None:
                await send_observations(remote, Observations(), deadline_s=deadline_s)

            with pytest.raises(Unreachable):
                await tell(1.0)
            authority.issue(*CONTROL, file="server")
            await tell()
            # A call that could go on over its connection takes another one, with the new certificate.
            authority.issue(HOST, file="client")
            with pytest.raises(Refused, match="and the caller is resiliency-host") as refused:
                await tell()
            assert refused.value.reason is Reason.ROLE
            authority.issue(*CONTROL, file="client", **expired)
            with pytest.raises(Unreachable):
                await tell(1.0)
            authority.issue(*CONTROL, file="client")
            await tell()
            # Of files that do not belong together yet, the ones of before hold.
            (tmp_path / "server.key").write_text("half of a ke")
            os.utime(tmp_path / "client.pem")
            await tell()
            # Another authority, in the place of the one before.
            other = Authority(tmp_path)
            for file in ("server", "client"):
                other.issue(*CONTROL, file=file)
            await tell()
        assert len(told) == 4

    run(work())
    capfd.readouterr()  # gRPC's own lines about handshakes


def _files(authority: Authority, *names: str, **how: Any) -> dict[str, Path]:
    certificate, key = authority.issue(*names, **how)
    return {"certificate": certificate, "key": key, "authority": authority.path}


def test_tokens_are_rotated_without_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "token"
    file = tokens(path, "the-first-token-of-all\n")
    path.write_text("the-second-token-of-all\nthe-first-token-of-all\n")
    os.utime(path, ns=(1, 1))  # a clock with coarse stamps changes nothing
    assert file.read()[0] == "the-second-token-of-all"
    assert file.accepts("the-first-token-of-all")
    assert not file.accepts("the-third-token-of-all")
    path.unlink()
    assert file.accepts("the-second-token-of-all")


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({}, "SUPERVISOR_TLS_CA is not set: the supervisor speaks TLS."),
        ({"SUPERVISOR_PLAINTEXT": "yes"}, "SUPERVISOR_PLAINTEXT must be 0 or 1, found 'yes'"),
        ({"SUPERVISOR_TLS_CA": "{}/nothing"}, "SUPERVISOR_TLS_CA: cannot read .*: No such file"),
        ({"SUPERVISOR_TLS_CA": "{}/file"}, "SUPERVISOR_TLS_CERT or SUPERVISOR_TOKEN_FILE must be set"),
        (
            {"SUPERVISOR_TLS_CA": "{}/file", "SUPERVISOR_TLS_CERT": "{}/file"},
            "SUPERVISOR_TLS_CERT and SUPERVISOR_TLS_KEY must be set together",
        ),
        (
            {"SUPERVISOR_PLAINTEXT": "1", "SUPERVISOR_TLS_CA": "{}/file"},
            "--plaintext contradicts SUPERVISOR_TLS_CERT",
        ),
        (
            {"SUPERVISOR_PLAINTEXT": "1", "SUPERVISOR_TOKEN_FILE": "{}/file"},
            "must hold a token of at least 16 ASCII characters a line, found 1 tokens",
        ),
        (
            {"SUPERVISOR_PLAINTEXT": "1", "SUPERVISOR_CONTROL_TOKEN_FILE": "{}/long"},
            "SUPERVISOR_CONTROL_TOKEN_FILE needs SUPERVISOR_TOKEN_FILE",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused_with_a_sentence(
    variables: dict[str, str], sentence: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("short")
    (tmp_path / "long").write_text("long enough for a token")
    (tmp_path / "long").write_text("long-enough-for-a-token")
    env = {name: value.format(tmp_path) for name, value in variables.items()}
    with pytest.raises(ConfigError, match=sentence):
        Security.from_env(env)


# ------------------------------------------------------------------------------------------- limits


def test_pauses_double_up_to_the_longest_and_differ_between_hosts() -> None:
    one, other = (Backoff(first_s=1.0, most_s=8.0, random=random.Random(seed)) for seed in (1, 2))  # noqa: S311
    pauses = [one.next_s() for _ in range(6)]
    assert all(full / 2 <= pause <= full for pause, full in zip(pauses, (1, 2, 4, 8, 8, 8), strict=True))
    assert pauses != [other.next_s() for _ in range(6)]
    one.reset()
    assert one.next_s() <= 1.0


def test_a_rate_is_for_the_long_run_and_a_burst_for_once() -> None:
    clock = ManualClock()
    limit = RateLimit(per_s=2.0, burst=3, clock=clock)
    for _ in range(3):
        limit.spend("host a")
    with pytest.raises(Refused, match=re.escape("host a sends more than 2 messages a second.")):
        limit.spend("host a")
    clock.advance(timedelta(seconds=0.5))
    limit.spend("host a")
