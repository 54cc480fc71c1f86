# SPDX-License-Identifier: Apache-2.0
"""A real daemon process between a launcher's link and a sensor and an actuator that this test serves."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest

from resiliency.daemon_link import DaemonLink
from resiliency.errors import ConfigError
from resiliency.launch.health.condition import JobCondition
from resiliency.testing import ManualClock
from supervisor.daemon import daemon as daemon_module
from supervisor.daemon.daemon import _load_fence
from supervisor.daemon.host_check import check_host, while_idle
from supervisor.daemon.settings import DaemonSettings
from supervisor.daemon.workers import ENDED_S, GONE_S, HostWorkers, Reporter
from supervisor.plain import InvalidValue, from_report
from supervisor.protocol.host_commands import HostCommand, HostCommandKind
from supervisor.transport.client import Remote
from supervisor.transport.errors import Refused, Unreachable
from supervisor.transport.security import Security, TokenFile
from supervisor.transport.services import probe_daemon
from supervisor.values import (
    MAX_TEXT_CHARS,
    DeviceState,
    EventType,
    Evidence,
    HostInfo,
    LauncherState,
    Outcome,
    OutcomeStatus,
    WorkerReport,
    WorkloadInfo,
)
from tests.asynchronous import run
from tests.supervisor_wire.certificates import CONTROL, HOST, Authority
from tests.supervisor_wire.fleet import PLAIN, Fleet
from tests.waiting import WAIT_S, wait_until

pytestmark = pytest.mark.leaks("descriptors", reason="gRPC's own pollers")

WORKLOAD = {"workload": "job"}


class Job:
    """What a launcher would report, as a test sets it."""

    def __init__(self, fleet: Fleet, **hello: object) -> None:
        self.commands: list[Mapping[str, Any]] = []
        self.report: dict[str, object] = {"attempt": 0, "launcher": "running", "workers": []}
        self.link = DaemonLink(
            port=fleet.launcher_port,
            hello={"kind": "launcher", "key": "k1", "workload": WORKLOAD, **hello},
            make_report=lambda: self.report,
            on_command=self._obey,
        )

    def _obey(self, command: Mapping[str, Any]) -> None:
        self.commands.append(command)
        outcome = Outcome(
            command=command["id"], epoch=command["epoch"], status=OutcomeStatus.DONE, text="yes"
        )
        self.link.send_outcome(outcome.to_dict())

    def say(self, *states: str, attempt: int = 0, launcher: str = "running", step: int | None = 12) -> None:
        steps = {} if step is None else {"step": step, "step_age_s": 0.25}
        workers = [
            {
                "local_rank": rank,
                "global_rank": rank + 4,
                "state": state,
                "heartbeat_age_s": 0.0,
                "monitor_age_s": 2.0,
                **steps,
            }
            for rank, state in enumerate(states)
        ]
        self.report = {"attempt": attempt, "launcher": launcher, "workers": workers}
        self.link.report_soon()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exc: object) -> None:
        self.link.close()


def restart(id: str, *, epoch: int = 1, workload: str = "job", deadline_s: float = 30.0) -> HostCommand:
    return HostCommand(
        epoch=epoch, id=id, kind=HostCommandKind.RESTART_RANKS, workload=workload, deadline_s=deadline_s
    )


def test_a_command_that_a_stopped_daemon_reads_late_is_answered_and_given_to_no_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon_module, "was_stopped_for", lambda seconds: seconds == 30.0)

    async def work() -> None:
        argv = ["--plaintext", f"--state_dir={tmp_path}"]
        daemon = daemon_module.HostDaemon(DaemonSettings.parse(argv, {"NODE_NAME": "host-1"}))
        for _ in range(2):  # told again, it is the same
            await daemon._execute(restart("c1"))
            outcome = daemon._outcomes.get_nowait()
            assert outcome.status is OutcomeStatus.FAILED
            assert outcome.text == "expired: it may be older than its 30 s"

    run(work())


async def test_what_a_launcher_says_reaches_the_sensor_and_a_command_reaches_the_launcher_once(
    tmp_path: Path,
) -> None:
    # All that is told is told at once: the first step of an attempt, too.
    fleet = Fleet(tmp_path, report_period_s=3600.0)
    async with fleet.serve():
        with fleet.daemon() as daemon:
            await fleet.sensor.wait_for("connected", "host-1")
            with Job(fleet) as job:
                job.say("running", "running", attempt=3, launcher="restarting", step=None)
                await fleet.reported(lambda report: len(report.workers) == 2)
                job.say("running", "running", attempt=3, launcher="restarting")
                seen = await fleet.reported(lambda report: any(one.step for one in report.workers))
                assert (seen.attempt, seen.launcher) == (3, LauncherState.RESTARTING)
                assert [worker.global_rank for worker in seen.workers] == [4, 5]
                assert all(worker.step == 12 for worker in seen.workers)
                ages = [(worker.step_age_s, worker.monitor_age_s) for worker in seen.workers]
                assert all(0.25 <= step < 10 and 2.0 <= monitor < 10 for step, monitor in ages if step)
                # Fence: once, also when it is asked again, and nothing of an older controller.
                await fleet.actuator.wait_for("connected", "host-1")
                assert (await fleet.command(restart("c1", epoch=4))).status is OutcomeStatus.DONE
                assert (await fleet.command(restart("c1", epoch=4))).text == "yes"
                fenced = await fleet.command(restart("c2", epoch=3))
                assert fenced.status is OutcomeStatus.FENCED
                # One that no controller can have is not even remembered: the next ones are not fenced.
                assert fleet.actuator_streams.try_send_command("host-1", restart("c0", epoch=10**15))
                other = await fleet.command(restart("c3", epoch=4, workload="other"))
                assert other.text == "this host works for 'job', not for 'other'"
                assert [command["id"] for command in job.commands] == ["c1"]
                # The second path, and what the process costs.
                async with Remote(f"127.0.0.1:{fleet.port}", PLAIN) as remote:
                    probe = await probe_daemon(remote, timeout_s=WAIT_S)
                assert probe.host == "host-1"
                assert len(probe.report.workers) == 2
                process = psutil.Process(daemon.pid)
                assert process.num_threads() < 20
                assert process.memory_info().rss < 100 << 20
            gone = await fleet.reported(lambda report: report.sequence > seen.sequence and not report.workers)
            assert gone.launcher is LauncherState.RESTARTING
            assert (await fleet.command(restart("c4", epoch=4))).status is OutcomeStatus.FAILED
            daemon.signal(signal.SIGTERM)
            # In a thread: the sensor and the actuator live in this one.
            assert await asyncio.to_thread(lambda: daemon.wait(timeout=WAIT_S)) == 0
        # Another daemon process of the host: the fence has outlived the first.
        with fleet.daemon(), Job(fleet) as job:
            job.say("running")
            await fleet.actuator.wait_for("connected", "host-1", count=2)
            await fleet.reported(lambda report: len(report.workers) == 1)
            assert (await fleet.command(restart("c1", epoch=4))).text == "yes"
            assert (await fleet.command(restart("c5", epoch=3))).status is OutcomeStatus.FENCED
            assert job.commands == []


async def test_what_a_launcher_said_grows_old_when_it_is_gone_and_a_stopped_one_answers_no_command(
    tmp_path: Path,
) -> None:
    fleet = Fleet(tmp_path)
    async with fleet.serve():
        with fleet.daemon():
            await fleet.actuator.wait_for("connected", "host-1")
            # A launcher that is cut off without a detach: a raw connection.
            _, writer = await asyncio.open_connection("127.0.0.1", fleet.launcher_port)
            hello = '{"hello":{"protocol":1,"kind":"launcher","key":"raw","workload":{"workload":"job"}}}'
            worker = '{"local_rank":0,"global_rank":0,"state":"running","heartbeat_age_s":0.0}'
            report = f'{{"report":{{"sequence":1,"attempt":0,"workers":[{worker}]}}}}'
            writer.write(f"{hello}\n{report}\n".encode())
            first = await fleet.reported(lambda one: len(one.workers) == 1)
            late = await fleet.command(restart("c1", deadline_s=0.3))
            assert late.status is OutcomeStatus.TIMED_OUT
            assert late.text == "the launcher did not answer within 0.3 s"
            writer.close()
            later = await fleet.reported(lambda one: one.sequence > first.sequence + 2)
            ages = [one.workers[0].heartbeat_age_s or 0.0 for one in (first, later)]
            assert ages[1] > ages[0] + 0.3
            assert later.workers[0].state is DeviceState.RUNNING


async def test_a_command_fails_at_once_when_its_launcher_disconnects(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    async with fleet.serve():
        with fleet.daemon():
            await fleet.actuator.wait_for("connected", "host-1")
            reader, writer = await asyncio.open_connection("127.0.0.1", fleet.launcher_port)
            hello = '{"hello":{"protocol":1,"kind":"launcher","key":"raw","workload":{"workload":"job"}}}'
            writer.write(f"{hello}\n".encode())
            await reader.readline()  # the welcome
            asked = asyncio.create_task(fleet.command(restart("c1", deadline_s=3600.0)))
            assert b'"command"' in await asyncio.wait_for(reader.readline(), WAIT_S)
            writer.close()
            failed = await asyncio.wait_for(asked, WAIT_S)
            assert failed.status is OutcomeStatus.FAILED
            assert failed.text.startswith("the launcher disconnected before its outcome came")


async def test_a_daemon_speaks_tls_in_both_directions(tmp_path: Path, authority: Authority) -> None:
    control = authority.security(*CONTROL)
    fleet = Fleet(tmp_path, control)
    certificate, key = authority.issue(HOST)
    files = {"CA": authority.path, "CERT": certificate, "KEY": key}
    async with fleet.serve():
        with fleet.daemon(**{f"SUPERVISOR_TLS_{name}": str(path) for name, path in files.items()}):
            await fleet.sensor.wait_for("connected", "host-1")
            await fleet.actuator.wait_for("connected", "host-1")
            async with Remote(f"127.0.0.1:{fleet.port}", control) as remote:
                assert (await probe_daemon(remote, timeout_s=WAIT_S)).host == "host-1"
            async with Remote(f"127.0.0.1:{fleet.port}", Security(plaintext=True)) as remote:
                with pytest.raises(Unreachable):
                    await probe_daemon(remote, timeout_s=WAIT_S)


async def test_a_daemon_with_a_token_and_no_certificate_reports_and_has_no_second_path(
    tmp_path: Path, authority: Authority, token_file: Path
) -> None:
    certificate, key = authority.issue(*CONTROL)
    tokens = TokenFile(token_file, "SUPERVISOR_TOKEN_FILE")
    server = Security(certificate=certificate, key=key, authority=authority.path, tokens=tokens)
    fleet = Fleet(tmp_path, server)
    env = {"SUPERVISOR_TLS_CA": str(authority.path), "SUPERVISOR_TOKEN_FILE": str(token_file)}
    async with fleet.serve():
        with fleet.daemon(**env) as daemon:
            await fleet.sensor.wait_for("connected", "host-1")
            assert "no second path to this host" in daemon.output


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('{"report":{}}', "the first line must be a hello."),
        ("[]", "a line must hold one JSON object."),
        ('{"hello":{"protocol":7}}', "the program speaks protocol 7, this daemon speaks 1"),
        ('{"hello":{"protocol":1,"kind":"launcher"}}', "a hello must carry a key of 1 to 64 characters."),
        (
            '{"hello":{"protocol":1,"key":"k","kind":"cook","workload":{"workload":"job"}}}',
            "kind must be launcher or worker, found 'cook'.",
        ),
        (
            '{"hello":{"protocol":1,"key":"k","kind":"worker","workload":{"workload":"two words"}}}',
            "WorkloadInfo.workload must be at most 253 printable characters",
        ),
    ],
)
def test_a_program_that_says_something_else_is_refused_with_a_sentence(
    line: str, sentence: str, daemon_alone: Fleet
) -> None:
    assert sentence in _say(daemon_alone.launcher_port, line)


def _say(port: int, *lines: str) -> str:
    """All that the daemon answers until it closes the connection."""
    with socket.create_connection(("127.0.0.1", port), WAIT_S) as connection:
        connection.sendall("".join(f"{line}\n" for line in lines).encode())
        answer = b""
        while data := connection.recv(65536):
            answer += data
        return answer.decode()


def test_a_second_launcher_of_the_host_is_refused_and_the_first_one_stays(daemon_alone: Fleet) -> None:
    hello = '{"hello":{"protocol":1,"kind":"%s","key":"k2","workload":{"workload":"%s"}}}'
    with Job(daemon_alone) as job:
        wait_until(lambda: job.link.connected, "the first is not connected")
        assert "a launcher of 'job' is connected already" in _say(
            daemon_alone.launcher_port, hello % ("launcher", "job")
        )
        assert "this host works for 'job', whose launcher is connected" in _say(
            daemon_alone.launcher_port, hello % ("worker", "other")
        )
        assert job.link.connected


def test_a_launcher_without_the_token_is_refused(tmp_path: Path, token_file: Path) -> None:
    fleet = Fleet(tmp_path)
    with fleet.daemon(f"--launcher_token_file={token_file}") as daemon:
        daemon.wait_for_line("host daemon of host-1 ready", timeout=WAIT_S)
        hello = '{"hello":{"protocol":1,"kind":"worker","key":"k","token":%s,"workload":{"workload":"job"}}}'
        for token in ('"a-token-of-somebody-else"', '""', "null", "7"):
            answer = _say(fleet.launcher_port, hello % token)
            assert "the token is not one that this daemon accepts." in answer
        good = hello % '"a-token-of-training-hosts"'
        assert "welcome" in _say(fleet.launcher_port, good, '{"detach":true}')


def _as_another_user(port: int, *lines: str) -> str:
    """What the daemon answers a program of user 65534."""
    read_fd, write_fd = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setuid(65534)
            os.write(write_fd, _say(port, *lines).encode())
        finally:
            os._exit(0)
    os.close(write_fd)
    with os.fdopen(read_fd) as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return answer


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_a_program_of_another_user_is_refused_without_a_token_and_heard_with_it(
    daemon_alone: Fleet, tmp_path: Path, token_file: Path
) -> None:
    hello = '{"hello":{"protocol":1,"kind":"worker","key":"u","token":%s,"workload":{"workload":"job"}}}'
    good = hello % '"a-token-of-training-hosts"'
    answer = _as_another_user(daemon_alone.launcher_port, good)
    assert "the program runs as user 65534, and this daemon listens to root and user 0 only." in answer
    fleet = Fleet(tmp_path)
    with fleet.daemon(f"--launcher_token_file={token_file}") as daemon:
        daemon.wait_for_line("host daemon of host-1 ready", timeout=WAIT_S)
        assert "welcome" in _as_another_user(fleet.launcher_port, good, '{"detach":true}')
        assert "the token is not one that" in _as_another_user(fleet.launcher_port, hello % "null")


def test_a_forked_child_does_not_keep_the_connection_of_its_parent() -> None:
    """Rank monitors are forked from launchers, and may outlive them for a moment."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        link = DaemonLink(port=server.getsockname()[1], hello={}, make_report=dict)
        connection, _ = server.accept()
        connection.settimeout(WAIT_S)
        connection.recv(65536)
        connection.sendall(b'{"welcome":{}}\n')
        wait_until(lambda: link.connected, "no welcome")
        wake_fd, end_fd = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.close(end_fd)
                os.read(wake_fd, 1)
            finally:
                os._exit(0)
        link.close()
        with connection:
            while connection.recv(65536):
                pass  # until its end, although the child lives
        os.close(end_fd)
        os.close(wake_fd)
        os.waitpid(child, 0)


def test_a_program_that_says_a_lot_is_slowed_down_and_not_refused(daemon_alone: Fleet) -> None:
    with Job(daemon_alone) as job:
        wait_until(lambda: job.link.connected, "not connected")
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            job.say("running", attempt=int(time.monotonic() * 1000))
        assert job.link.connected


def test_a_fence_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "fence.json"
    path.write_text('{"epoch": "many"}')
    with pytest.raises(ConfigError, match=r"fence.json cannot be read: Fence must hold an epoch"):
        _load_fence(path)


# ------------------------------------------------------------------------------------------- host checks


@pytest.mark.slow
async def test_a_host_checks_itself_when_its_launcher_has_ended_and_its_sensor_hears_how_it_is(
    tmp_path: Path,
) -> None:
    fleet = Fleet(tmp_path)
    check = HostCommand(epoch=1, id="c1", kind=HostCommandKind.CHECK_HOST, workload="", deadline_s=2 * WAIT_S)
    async with fleet.serve():
        with fleet.daemon():
            await fleet.actuator.wait_for("connected", "host-1")
            with Job(fleet) as job:
                await fleet.told(HostInfo, lambda host: host.workload == "job")
                asked = asyncio.create_task(fleet.command(check))
                # Commands are carried out side by side: that of the check waits.
                assert (await fleet.command(restart("c2"))).status is OutcomeStatus.DONE
                assert not asked.done()
                await asyncio.to_thread(job.link.close)
            done = await asyncio.wait_for(asked, 3 * WAIT_S)
            report = await fleet.reported(lambda report: bool(report.findings))
            (found,) = report.findings
            assert found.type is EventType.NODE_CHECK
            assert done.status is OutcomeStatus.DONE
            assert done.text.startswith(found.evidence.cause)
            assert (found.evidence.witness, found.evidence.id[-9:]) == ("check", "/check/c1")


def test_a_check_ends_without_a_word_when_a_launcher_comes(tmp_path: Path) -> None:
    """Its probes would take the memory that the ranks need, and the ranks' load would look like a fault."""
    began = tmp_path / "began"
    program = f"import os, time; os.symlink(str(os.getpid()), {str(began)!r}); time.sleep({2 * WAIT_S})"

    async def work() -> None:
        workers, changed = table(), asyncio.Event()
        checking = asyncio.create_task(while_idle(workers, check_host(tmp_path, ("-c", program)), changed))
        await asyncio.to_thread(wait_until, began.is_symlink, "the check has not begun")
        changed.set()
        await asyncio.sleep(0)
        assert not checking.done()
        workers.join("k1", "launcher", WorkloadInfo(workload="job"))
        changed.set()
        assert await asyncio.wait_for(checking, WAIT_S) is None
        assert not Path("/proc", began.readlink()).exists()

    run(work())


def reported(health: str, **probes: str) -> str:
    """A program that prints the report of a check."""
    found = [{"probe": name, "health": one} for name, one in probes.items()]
    return f"print({json.dumps({'health': health, 'why': 'so', 'probes': found})!r})"


@pytest.mark.parametrize(
    ("program", "health", "why", "gpus"),
    [
        (reported("ok", cpu="ok", gpu0="ok"), "ok", "", "gpu0"),
        (reported("undecided", cpu="ok", gpu0="slow", gpu1="undecided"), "undecided", "so", "gpu0"),
        (reported("faulty", cpu="faulty") + "; exit(3)", "faulty", "so", ""),
        (reported("faulty", cpu="undecided"), "undecided", "names no probe that found a fault: so", ""),
        ('print(\'{"health":"drunk","why":"","probes":[]}\')', "undecided", "ended with 0 and no report", ""),
        ("import os; os.abort()", "undecided", "ended with -6 and no report", ""),
    ],
)
def test_a_check_that_says_nothing_that_can_be_read_leaves_its_host_undecided(
    tmp_path: Path, program: str, health: str, why: str, gpus: str
) -> None:
    evidence = run(check_host(tmp_path, ("-c", program))).finding("k").evidence
    assert (evidence.cause, evidence.device) == (health, gpus)
    assert why in evidence.text


# ------------------------------------------------------------------------------------------- the table


def table(workers_per_host: int = 2) -> HostWorkers:
    host = HostInfo(id="h1", name="host-1", workers_per_host=workers_per_host)
    return HostWorkers(host, "a1", ManualClock())


def worker(rank: int, state: str = "running") -> dict[str, object]:
    return {"local_rank": rank, "global_rank": rank, "state": state, "heartbeat_age_s": 0.0}


def test_a_host_is_spare_until_all_its_workers_are_known() -> None:
    known = table()
    assert known.host_info().state is DeviceState.SPARE
    launcher = known.join("k1", "launcher", WorkloadInfo(workload="job"))
    for workers, state in (
        ([worker(0)], DeviceState.SPARE),
        ([worker(0), worker(1)], DeviceState.RUNNING),
        ([worker(0), worker(1, "failed")], DeviceState.FAILED),
        ([worker(0, "complete"), worker(1, "complete")], DeviceState.COMPLETE),
    ):
        known.update(launcher, {"workers": workers})
        assert known.host_info().state is state
    known.leave(launcher, ended=True)
    assert known.host_info().state is DeviceState.COMPLETE
    assert known.host_info().workload == ""


def test_a_launcher_that_died_without_a_word_holds_its_host_until_that_was_seen_and_no_longer() -> None:
    workers = table()
    clock = workers.clock
    assert isinstance(clock, ManualClock)
    known = {"local_rank": 0, "global_rank": 0, "state": "failed", "heartbeat_age_s": 0.0}

    def join() -> Reporter:
        reporter = workers.join("k1", "launcher", WorkloadInfo(workload="job"))
        workers.update(reporter, {"attempt": 3, "workers": [known]})
        return reporter

    workers.leave(join(), ended=False)
    clock.advance(timedelta(seconds=GONE_S - 1))
    # The sensor is told that its workers are silent, and no size of a job that may have another one by now.
    assert workers.report().workers[0].heartbeat_age_s == GONE_S - 1
    assert (workers.host_info().workload, workers.reported_workload) == ("job", None)
    # One that was cut off only is back by then.
    again = join()
    assert workers.reported_workload == WorkloadInfo(workload="job")
    workers.leave(again, ended=False)
    clock.advance(timedelta(seconds=GONE_S))
    assert (workers.host_info().workload, workers.host_info().state) == ("", DeviceState.SPARE)
    assert workers.report().workers == ()


@pytest.mark.parametrize("state", ["gave_up", "stopping"])
def test_a_launcher_that_gave_up_and_says_that_it_ends_leaves_its_host_to_the_job(state: str) -> None:
    workers = table()
    assert isinstance(workers.clock, ManualClock)
    reporter = workers.join("k1", "launcher", WorkloadInfo(workload="job"))
    workers.update(reporter, {"attempt": 3, "launcher": state, "workers": [worker(0), worker(1, "failed")]})
    workers.leave(reporter, ended=True)
    held = state == "gave_up"
    assert workers.host_info().workload == ("job" if held else "")
    assert (workers.report().attempt, workers.report().launcher.value) == (3, state)
    # Its running workers have ended with it, and are no silent ones.
    assert [one.local_rank for one in workers.report().workers] == [1]
    if held:  # not for ever: the supervisor has long decided
        workers.clock.advance(timedelta(seconds=GONE_S))
        assert (workers.host_info().workload, workers.report().workers) == ("", ())


@pytest.mark.parametrize("state", ["complete", "failed"])
def test_a_host_whose_launcher_has_ended_is_a_spare_again_once_that_was_told(state: str) -> None:
    workers = table()
    clock = workers.clock
    assert isinstance(clock, ManualClock)
    launcher = workers.join("k1", "launcher", WorkloadInfo(workload="job"))
    for rank in range(workers.host.workers_per_host):
        said = {"local_rank": rank, "global_rank": rank, "state": state, "heartbeat_age_s": 0.0}
        workers.update(launcher, {"workers": [*map(_plain, launcher.workers), said]})
    workers.leave(launcher, ended=True)
    clock.advance(timedelta(seconds=ENDED_S - 1))
    assert (workers.host_info().workload, workers.host_info().state.value) == ("", state)
    clock.advance(timedelta(seconds=1))
    assert (workers.host_info().workers, workers.host_info().state) == ((), DeviceState.SPARE)


def _plain(worker: WorkerReport) -> dict[str, Any]:
    return worker.to_dict()


def test_programs_without_a_launcher_share_the_host_and_one_that_starts_again_takes_its_rank() -> None:
    known = table()
    first = known.join("p0", "worker", WorkloadInfo(workload="job"))
    second = known.join("p1", "worker", WorkloadInfo(workload="job"))
    known.update(first, {"workers": [worker(0)]})
    with pytest.raises(Refused, match=r"a local rank is reported twice: \[0\]"):
        known.update(second, {"workers": [worker(0)]})
    known.update(second, {"workers": [worker(1)]})
    assert known.host_info().state is DeviceState.RUNNING
    known.leave(first, ended=False)
    again = known.join("p2", "worker", WorkloadInfo(workload="job"))
    known.update(again, {"workers": [worker(0, "failed")]})
    assert [one.state.value for one in known.report().workers] == ["running", "failed"]


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ({"attempt": -1}, "attempt must be 0 or more, found -1"),
        ({"launcher": "asleep"}, "launcher must be one of unknown, running, restarting, stopping, gave_up"),
        ({"workers": 3}, r"a report must list at most 2 workers \(--workers_per_host\), found 3"),
        ({"workers": [worker(0), worker(1), worker(2)]}, "at most 2 workers .* found 3"),
        ({"workers": [worker(0), worker(0)]}, "a local rank is reported twice"),
        ({"workers": [{**worker(0), "step": 3}]}, "step_age_s must be given exactly with a step"),
        (
            {"workers": [{**worker(0), "heartbeat_age_s": float("inf")}]},
            "must be 0 or more seconds, found inf",
        ),
    ],
)
def test_a_report_that_breaks_the_rules_changes_nothing(said: dict[str, object], sentence: str) -> None:
    known = table()
    launcher = known.join("k1", "launcher", WorkloadInfo(workload="job"))
    known.update(launcher, {"workers": [worker(1)]})
    with pytest.raises((InvalidValue, Refused), match=sentence):
        known.update(launcher, said)
    assert [one.local_rank for one in known.report().workers] == [1]


CONDITION = JobCondition(
    state=LauncherState.RUNNING, usual_step_s=1.5, still_s=60.0, phase="an evaluation", ranks=(0, 3)
)


def test_a_launcher_of_a_later_release_is_heard_without_what_this_one_does_not_know() -> None:
    known = table()
    hello = {"workload": "job", "replicas": 2, "lanes": 8}
    launcher = known.join("k1", "launcher", from_report(WorkloadInfo, hello))
    later = {"launcher": "running", "mood": "good", "workers": [{**worker(0), "flops": 3.0}]}
    later["condition"] = {**CONDITION.to_dict(), "mood": "good"}
    later["diagnoses"] = [diagnosis("d1", severity=3)]
    known.update(launcher, json.loads(json.dumps(later)))
    report = known.report()
    assert [one.local_rank for one in report.workers] == [0]
    assert (report.condition, report.launcher) == (CONDITION, CONDITION.state)
    assert [one.evidence.id for one in report.findings] == ["d1"]
    # What it says of a time grows older here.
    assert isinstance(known.clock, ManualClock)
    known.clock.advance(timedelta(seconds=3))
    assert known.report().condition == replace(CONDITION, still_s=63.0)
    # A launcher of an earlier release tells none.
    known.update(launcher, {"launcher": "running", "workers": [worker(0)]})
    assert known.report().condition is None


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ({"requeue": "maybe"}, "must be one of yes, later, no, found 'maybe'"),
        ({"state": "asleep"}, "must be one of unknown, running, restarting, stopping, gave_up"),
        ({"state": "gave_up"}, "must be running as launcher, found gave_up"),
        ({"still_s": -1.0}, "JobCondition.still_s must be 0 or more seconds, found -1.0"),
        ({"why": "a\nb"}, "JobCondition.why must be at most 2048 printable characters"),
    ],
)
def test_a_condition_that_this_release_does_not_know_is_named_once_and_the_rest_is_heard(
    said: dict[str, object], sentence: str, caplog: pytest.LogCaptureFixture
) -> None:
    known = table()
    launcher = known.join("k1", "launcher", WorkloadInfo(workload="job"))
    for _ in range(2):
        condition = {**CONDITION.to_dict(), **said}
        known.update(launcher, {"launcher": "running", "workers": [worker(0)], "condition": condition})
    assert (known.report().condition, known.report().launcher) == (None, LauncherState.RUNNING)
    assert len(known.report().workers) == 1
    (line,) = caplog.messages
    assert sentence in line


@pytest.mark.parametrize(
    ("condition", "sentence"),
    [
        (CONDITION, "stands still for 60 s: ranks 0, 3 in an evaluation"),
        (replace(CONDITION, phase=""), "stands still for 60 s"),
        (replace(CONDITION, still_s=None), ""),
        (
            JobCondition(state=LauncherState.GAVE_UP, why="10 of 10 restarts used"),
            "gave up: 10 of 10 restarts used",
        ),
    ],
)
def test_a_condition_is_a_sentence_where_a_person_may_want_to_know(
    condition: JobCondition, sentence: str
) -> None:
    assert condition.sentence == sentence


def diagnosis(id: str, **fields: object) -> dict[str, object]:
    words = {"cause": "gpu_missing", "advice": "replace_host", "confidence": "medium"}
    about = {"run": "r", "attempt": 1, "ranks": [0], "age_s": 2.0}
    return {"id": id, **about, **words, "text": "rank 0\x1b[31m finds no GPU", **fields}


def test_a_launchers_diagnoses_are_in_each_report_and_grow_older() -> None:
    known = table()
    launcher = known.join("k1", "launcher", WorkloadInfo(workload="job"))
    known.update(launcher, {"diagnoses": [diagnosis("d1"), diagnosis("d2", text="x" * 5000)]})
    assert isinstance(known.clock, ManualClock)
    known.clock.advance(timedelta(seconds=3))
    for _ in range(2):
        first, second = known.report().findings
        assert (first.type, first.attempt, first.run, first.ranks) == (EventType.DIAGNOSIS, 1, "r", (0,))
        assert first.evidence == Evidence(
            **{"id": "d1", "witness": "launcher", "text": "rank 0 [31m finds no GPU", "age_s": 5.0},
            **{"cause": "gpu_missing", "advice": "replace_host", "confidence": "medium"},
        )
        assert len(second.evidence.text) <= MAX_TEXT_CHARS
    known.leave(launcher, ended=False)
    assert len(known.report().findings) == 2
    # The one before this release says nothing, and so does a program without a launcher.
    known.update(launcher, {})
    assert known.report().findings == ()


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (diagnosis("d2", cause="cosmic_ray"), "as cause, found 'cosmic_ray'"),
        (diagnosis("d2", advice="pray"), "one of restart, replace_host, stop as advice, found 'pray'"),
        (diagnosis("d2", confidence="none"), "one of high, medium, low as confidence, found 'none'"),
        (diagnosis("d2", ranks=["a"]), "must be of type int"),
        (diagnosis(""), "Evidence.id must be set"),
        ("gpu_missing", "must be a table of fields, found 'gpu_missing'"),
    ],
)
def test_a_diagnosis_that_this_release_does_not_know_is_named_once_and_the_rest_is_heard(
    said: object, sentence: str, caplog: pytest.LogCaptureFixture
) -> None:
    known = table()
    launcher = known.join("k1", "launcher", WorkloadInfo(workload="job"))
    for _ in range(2):
        known.update(launcher, {"workers": [worker(0)], "diagnoses": [said, diagnosis("d1")]})
    assert [one.evidence.id for one in known.report().findings] == ["d1"]
    assert len(known.report().workers) == 1
    (line,) = caplog.messages
    assert sentence in line
