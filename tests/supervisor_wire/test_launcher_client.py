# SPDX-License-Identifier: Apache-2.0
"""A real launcher beside a real daemon: what it reports, what it obeys, and that it never waits for it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import TypeVar

import pytest

from resiliency import progress
from resiliency.daemon_link import GENERATION_ENV, read_generation, to_fleet_attempt, to_launcher_attempt
from resiliency.errors import ConfigError
from resiliency.events import EventType
from resiliency.launch import cli
from resiliency.launch.fleet import link as seam
from resiliency.launch.fleet import reporter as reporter_module
from resiliency.launch.health.condition import Requeue
from resiliency.launch.options import resolve
from resiliency.launch.stacks import dump_stacks
from resiliency.progress import STEP_PAGE_ENV, StepPage, report_step
from resiliency.testing import warm
from resiliency.testing.processes import Command as Program
from supervisor import values
from supervisor.client import GoogleCloudResiliencyClient
from supervisor.plain import InvalidValue
from supervisor.protocol import host_commands
from supervisor.protocol.host_commands import HostCommand, HostCommandKind
from supervisor.values import DeviceState, LauncherState, OutcomeStatus
from tests.launch.conftest import WAIT, WORKER, Launch, events, launch, leaves_nothing, ready, temporary
from tests.ports import free_ports
from tests.supervisor_wire.fleet import ROOT, Fleet
from tests.waiting import wait_until

__all__ = ["launch", "leaves_nothing", "temporary"]  # fixtures
pytestmark = pytest.mark.leaks("descriptors", reason="gRPC's own pollers")

T = TypeVar("T")
STEPPER = Path(__file__).parent / "scripts" / "stepper.py"
LOST = "the job goes on without it"


def start(launch: Launch, port: int, *flags: str, script: tuple[object, ...] = (STEPPER,)) -> Program:
    return launch(
        *("--nproc-per-node=2", "--max-restarts=1", "--job-name=job", "--workload-name=job"),
        *("--nnodes=1", "--container-name=c", "--use-supervisor", f"--host-daemon-port={port}", *flags),
        *script,
    )


async def elsewhere(wait: Callable[[], T]) -> T:
    """Wait in a thread: sensor and actuator live in this one."""
    return await asyncio.to_thread(wait)


def command(id: str, kind: HostCommandKind, *, attempt: int | None = None) -> HostCommand:
    return HostCommand(epoch=1, id=id, kind=kind, workload="job", attempt=attempt, reason="test")


@pytest.mark.slow
async def test_the_supervisor_sees_what_the_launcher_knows_and_can_ask_it_for_things(
    launch: Launch, leaves_nothing: Callable[[Program], None], tmp_path: Path
) -> None:
    fleet = Fleet(tmp_path)
    async with fleet.serve():
        with fleet.daemon() as daemon:
            await elsewhere(lambda: daemon.wait_for_line("host daemon of host-1 ready", timeout=WAIT))
            job = await elsewhere(lambda: start(launch, fleet.launcher_port))
            _, victim = [await elsewhere(lambda rank=rank: ready(job, rank)) for rank in (0, 1)]
            # States, steps and their ages, and what the job is.
            first = await fleet.reported(
                lambda report: (
                    len(report.workers) == 2
                    and all(
                        (worker.step or 0) > 10 and (worker.step_age_s or 9) < 5 for worker in report.workers
                    )
                )
            )
            assert (first.attempt, first.launcher) == (0, LauncherState.RUNNING)
            paced = await fleet.reported(
                lambda report: report.condition is not None and bool(report.condition.usual_step_s)
            )
            assert paced.condition.still_s is None
            assert {worker.state for worker in first.workers} == {DeviceState.RUNNING}
            assert [worker.kept_step for worker in first.workers] == [0, 0]
            workload = next(v for _, _, v in fleet.sensor.told if isinstance(v, values.WorkloadInfo))
            assert (workload.workload, workload.container, workload.max_in_job_restarts) == (
                "job",
                "c",
                1,
            )
            # Which start of the job it is, the same for all its attempts.
            known = await fleet.told(values.WorkloadInfo, lambda one: one.run == first.run)
            assert (len(known.run), known.first_attempt) == (32, 0)
            # A failure that the launcher itself does something about.
            os.kill(victim, signal.SIGKILL)
            second = await fleet.reported(
                lambda report: report.attempt == 1 and report.launcher is LauncherState.RUNNING
            )
            assert second.run == first.run
            # What it says about that comes in each report from then on.
            (killed,) = second.findings
            assert (killed.ranks, killed.attempt, killed.run) == ((1,), 0, first.run)
            evidence = killed.evidence
            assert (evidence.cause, evidence.advice, evidence.witness) == (
                "killed",
                "restart",
                "launcher",
            )
            assert evidence.text in job.output
            # Asked to restart in place: also with no restart left, and once for each attempt.
            done = await fleet.command(command("c1", HostCommandKind.RESTART_RANKS, attempt=1))
            assert (done.status, done.text) == (OutcomeStatus.DONE, "attempt 1 ends")
            await fleet.reported(lambda report: report.attempt == 2 and len(report.workers) == 2)
            again = await fleet.command(command("c2", HostCommandKind.RESTART_RANKS, attempt=1))
            assert again.text == "attempt 2 runs already"
            for rank in (0, 1):
                await elsewhere(lambda rank=rank: ready(job, rank, attempt=2))
            # Stacks of living ranks.
            stacks = await fleet.command(command("c3", HostCommandKind.DUMP_STACKS))
            assert stacks.status is OutcomeStatus.DONE
            assert stacks.text.count("in ") >= 2
            assert "rank 1: File" in stacks.text
            assert "in train_forever" in job.output
            job.signal(signal.SIGTERM)
            assert await elsewhere(lambda: job.wait(timeout=WAIT)) == 0
            ended = await fleet.reported(lambda report: report.launcher is LauncherState.STOPPING)
            assert ended.attempt == 2
    assert "made" in job.output
    assert LOST not in job.output
    causes = [event.fields["cause"] for event in events(tmp_path / "run", EventType.FAULT_DETECTED)]
    assert causes == ["SIGKILL", "the supervisor asked for a restart: test"]
    leaves_nothing(job)


async def test_a_failure_that_the_launcher_can_do_nothing_about_is_left_to_the_supervisor(
    launch: Launch, tmp_path: Path
) -> None:
    fleet = Fleet(tmp_path)
    async with fleet.serve():
        with fleet.daemon():
            job = await elsewhere(
                lambda: start(launch, fleet.launcher_port, "--max-restarts=0", script=(WORKER, "wait"))
            )
            victim = await elsewhere(lambda: ready(job, 1))
            await fleet.reported(lambda report: len(report.workers) == 2)
            os.kill(victim, signal.SIGKILL)
            assert await elsewhere(lambda: job.wait(timeout=WAIT)) == 1
            given_up = await fleet.reported(lambda report: report.launcher is LauncherState.GAVE_UP)
            assert given_up.workers[-1].state is DeviceState.FAILED
            assert given_up.condition.requeue is Requeue.LATER
            assert given_up.condition.why.startswith("no restart is left: rank 1 on ")
            # It has detached, and the failure is what is left.
            await fleet.reported(
                lambda report: (
                    [(one.local_rank, one.state) for one in report.workers] == [(1, DeviceState.FAILED)]
                )
            )


@pytest.mark.slow
async def test_ranks_of_all_hosts_restart_when_one_is_asked_and_a_host_that_is_asked_to_leave_leaves(
    launch: Launch, tmp_path: Path
) -> None:
    fleet = Fleet(tmp_path)
    async with fleet.serve():
        with fleet.daemon():
            place = f"--rdzv-endpoint=127.0.0.1:{free_ports(1)[0]}"
            pair = ("--nnodes=2", "--nproc-per-node=1", "--rdzv-id=pair", "--local-addr=127.0.0.1", place)
            conf = "--rdzv-conf=keep_alive_interval=1,keep_alive_max_attempt=6,join_timeout=60,is_host="
            # The launcher of the other host is connected to no daemon.
            other = launch(*pair, f"{conf}1", "--job-name=job", STEPPER, run_dir=tmp_path / "other")
            # Commands wake a launcher, whatever its monitor interval.
            flags = (*pair, f"{conf}0", "--monitor-interval=30")
            job = await elsewhere(lambda: start(launch, fleet.launcher_port, *flags))
            await fleet.reported(lambda report: len(report.workers) == 1)
            done = await fleet.command(command("c1", HostCommandKind.RESTART_RANKS))
            assert (done.status, done.text) == (OutcomeStatus.DONE, "attempt 0 ends")
            for host in (job, other):
                await elsewhere(
                    lambda host=host: host.wait_for_line(r"rank \d attempt 1 .* ready", timeout=WAIT)
                )
            left = await fleet.command(command("c2", HostCommandKind.LEAVE))
            assert (left.status, left.text) == (OutcomeStatus.DONE, "this host leaves the job")
            await elsewhere(
                lambda: other.wait_for_line("attempt 1 ends: hosts left: 127.0.0.1", timeout=WAIT)
            )
            assert job.returncode is None  # the orchestrator ends it
            job.signal(signal.SIGTERM)
            assert await elsewhere(lambda: job.wait(timeout=WAIT)) == 1
    said = "this host leaves the job, because it is unhealthy: the supervisor asked for it: test"
    assert said in job.output


@pytest.mark.slow
def test_a_daemon_that_dies_or_stops_costs_a_warning_and_nothing_else(launch: Launch, tmp_path: Path) -> None:
    """The predecessor's client held the job: 7 s a heartbeat with a dead daemon, 59 s with a stopped one."""
    fleet = Fleet(tmp_path)
    job = start(launch, fleet.launcher_port)  # before there is a daemon
    victim = ready(job, 1)
    job.wait_for_line(f"host daemon at port {fleet.launcher_port}: .*refused.*{LOST}", timeout=WAIT)
    with fleet.daemon() as daemon:
        job.wait_for_line("host daemon at port .* connected", timeout=WAIT)
        daemon.signal(signal.SIGSTOP)
        killed = datetime.now(timezone.utc)
        os.kill(victim, signal.SIGKILL)
        ready(job, 0, attempt=1)
        (fault,) = events(tmp_path / "run", EventType.FAULT_DETECTED)
        assert (fault.time - killed).total_seconds() < 6
        # Five silent seconds later the launcher says so, once; then the daemon is killed and another one
        # comes.
        job.wait_for_line(f"has not answered for 5 s; {LOST}", timeout=WAIT)
        daemon.signal(signal.SIGKILL)
        daemon.wait(timeout=WAIT)
    with fleet.daemon() as daemon:
        job.wait_for_line("host daemon at port .* connected", timeout=WAIT, count=2)
        daemon.wait_for_line("launcher of job connected", timeout=WAIT)
        daemon.signal(signal.SIGKILL)
        daemon.wait(timeout=WAIT)
        job.wait_for_line(LOST, timeout=WAIT, count=3)
        job.signal(signal.SIGTERM)
        assert job.wait(timeout=WAIT) == 0
    assert job.output.count(LOST) == 3
    for rank in (0, 1):
        line = job.wait_for_line(rf"rank {rank} attempt 1 made (\d+) steps, .* took (\S+) s", timeout=1)
        assert float(line[2]) < 5.0


def test_a_job_that_is_started_again_counts_its_attempts_on() -> None:
    first, second = read_generation({}), read_generation({GENERATION_ENV: "1"})
    assert to_fleet_attempt(first, 3) < to_fleet_attempt(second, 0) == 1_000_000
    assert [to_launcher_attempt(second, attempt) for attempt in (None, 3, 1_000_004)] == [None, -1, 4]
    with pytest.raises(ConfigError, match="RESILIENCY_JOB_GENERATION must be a whole number from 0 on"):
        read_generation({GENERATION_ENV: "-1"})


def test_a_command_that_is_taken_after_its_time_is_answered_and_not_obeyed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late = ("old", "stopped")  # one that lay in a rendezvous, and one that a stopped launcher reads
    monkeypatch.setattr(reporter_module, "was_stopped_for", lambda seconds: seconds == 9.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        words = [f"--host-daemon-port={server.getsockname()[1]}", "--job-name=j", "--workload-name=j"]
        argv = [*words, "--container-name=c", "--use-supervisor", str(STEPPER)]
        reporter = reporter_module.DaemonReporter(
            resolve(cli.parse(argv, {}), {}), StepPage(1), stacks_dir=""
        )
        connection, _ = server.accept()
        connection.settimeout(WAIT)
        with connection, connection.makefile("rwb") as lines:
            said = (json.loads(line) for line in lines)
            assert "hello" in next(said)
            lines.write(b'{"welcome": {}}\n')
            for name, deadline_s in (("old", 0.0), ("stopped", 9.0), ("new", 60.0)):
                command = {"epoch": 1, "id": name, "kind": "leave", "deadline_s": deadline_s}
                lines.write(json.dumps({"command": command}).encode() + b"\n")
            lines.flush()
            taken: list[str] = []
            while not taken:
                select.select([reporter.wake_fd], [], [], WAIT)
                taken += [one.id for one in iter(reporter.try_take_command, None)]
            assert taken == ["new"]
            for name in late:
                while "outcome" not in (line := next(said)):
                    lines.write(json.dumps({"ack": line["report"]["sequence"]}).encode() + b"\n")
                    lines.flush()
                assert (line["outcome"]["command"], line["outcome"]["status"]) == (name, "failed")
                assert line["outcome"]["text"].startswith("expired: its time was over")
        reporter.close()


# ------------------------------------------------------------------------------------------- the step page


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Iterator[StepPage]:
    page = StepPage(2)
    monkeypatch.setattr(progress, "_slot", None)
    monkeypatch.setattr(progress, "_looked", False)
    yield page
    page.close()


def test_a_step_of_another_process_is_seen_with_its_time(page: StepPage) -> None:
    before = time.monotonic()
    told = "report_step(0); report_step(41); report_kept(40); report_kept(30)"
    program = f"from resiliency.progress import report_kept, report_step; {told}"
    env = {**os.environ, STEP_PAGE_ENV: page.variable(1)}
    subprocess.run([sys.executable, "-c", program], env=env, check=True, timeout=60)
    seen = page.read(1)
    assert (seen.step, seen.kept_step) == (41, 40)
    assert seen.step_time is not None
    assert before <= seen.step_time <= time.monotonic()
    assert page.read(0).step is page.read(0).step_time is page.read(0).kept_step is None
    page.record_heartbeat(0)
    page.record_heartbeat(7)  # of a rank that the page has no room for
    heartbeat = page.read(0).heartbeat_time
    assert heartbeat is not None
    assert before <= heartbeat <= time.monotonic()
    page.clear()
    assert page.read(1).step is None


def test_step_zero_is_a_step_and_no_page_is_no_error(page: StepPage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STEP_PAGE_ENV, page.variable(0))
    report_step(0)
    assert page.read(0).step == 0
    for wrong in ("", "nonsense", "/proc/self/fd/9999:0", f"{page.variable(0).partition(':')[0]}:9"):
        monkeypatch.setattr(progress, "_slot", None)
        monkeypatch.setattr(progress, "_looked", False)
        monkeypatch.setenv(STEP_PAGE_ENV, wrong)
        report_step(3)
    assert page.read(0).step == 0


def test_a_report_of_a_step_costs_no_system_call(page: StepPage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bound is 1 us on an idle core; the fastest of many rounds shows that also on a busy one."""
    monkeypatch.setenv(STEP_PAGE_ENV, page.variable(0))
    report_step(0)
    rounds = []
    for _ in range(50):
        began = time.perf_counter()
        for step in range(1000):
            report_step(step)
        rounds.append((time.perf_counter() - began) / 1000)
    assert min(rounds) < 1e-6


def test_stacks_of_a_rank_that_offers_none_come_from_the_kernel(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        sleeper.send_signal(signal.SIGSTOP)
        os.waitpid(sleeper.pid, os.WUNTRACED)
        stacks = dump_stacks({3: sleeper.pid, 4: 2**22 - 1}, str(tmp_path))
        sleeper.kill()
    assert f"process {sleeper.pid} gives no Python stacks; State: T (stopped), waits in" in stacks[3]
    assert stacks[4] == f"process {2**22 - 1} is gone"


#: Writes its stacks piece by piece, as the interpreter does, and is stopped between two of them.
SLOW = """
import os, signal, sys, time
from resiliency.rank.inspection import STACK_SIGNAL, stacks_file

def write(*_):
    for piece in ("Thread 0x1 (most recent call first):\\n", "  File a\\n", "  File b\\n"):
        os.write(file.fileno(), piece.encode())
        time.sleep(0.15)

file = stacks_file(sys.argv[1], os.getpid()).open("w")
signal.signal(STACK_SIGNAL, write)
print("ready", flush=True)
while True:
    signal.pause()
"""


def test_stacks_of_a_rank_that_is_slow_to_write_them_are_whole(tmp_path: Path) -> None:
    with Program([sys.executable, "-c", SLOW, tmp_path]) as rank:
        rank.wait_for_line("ready", timeout=WAIT)
        for _ in range(2):
            (stacks,) = dump_stacks({0: rank.pid}, str(tmp_path)).values()
            assert stacks == "Thread 0x1 (most recent call first):\n  File a\n  File b\n"


# ------------------------------------------------------------------------------------------- without our
# launcher


def test_a_program_reports_for_itself(daemon_alone: Fleet) -> None:
    with GoogleCloudResiliencyClient(
        0, daemon_alone.launcher_port, local_rank=0, global_rank=4, workload_name="job"
    ) as client:
        wait_until(lambda: client.connected, "not connected")
        client.send_heartbeat(step=12)
        client.update_state(DeviceState.COMPLETE)


def test_the_example_reports_from_a_job_without_our_launcher(daemon_alone: Fleet) -> None:
    program = [sys.executable, str(ROOT / "examples" / "report_from_torchrun.py"), "--workload-name=job"]
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    rank |= {"MASTER_PORT": str(free_ports(1)[0]), "GCP_HOST_DAEMON_PORT": str(daemon_alone.launcher_port)}
    done = warm.run([*program, "--steps=5"], env={**os.environ, **rank}, timeout=WAIT)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "rank 0 finished step 5\n"
    assert LOST not in done.stderr


def test_a_program_without_a_daemon_is_not_held(caplog: pytest.LogCaptureFixture) -> None:
    client = GoogleCloudResiliencyClient(0, 1, local_rank=0, global_rank=0, workload_name="job")
    began = time.monotonic()
    for step in range(1000):
        client.send_heartbeat(step)
        client.update_state(DeviceState.RUNNING)
    assert time.monotonic() - began < 10
    wait_until(lambda: "port 1" in caplog.text, "no warning")
    began = time.monotonic()
    client.close()
    assert time.monotonic() - began < 10
    assert caplog.text.count(LOST) == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"port": -1}, "port must be 0 to 65535, found -1."),
        ({"host_port": 0}, "host_port must be 1 to 65535, found 0."),
        ({"local_rank": -2}, "local_rank must be 0 or more, found '-2'."),
        (
            {"global_rank": None},
            "global_rank must be 0 or more, found ''.  Give it, or let the launcher set RANK.",
        ),
    ],
)
def test_a_client_that_cannot_work_is_refused(
    arguments: dict[str, int | None], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    given: dict[str, int | None] = {"port": 0, "host_port": 1, "local_rank": 0, "global_rank": 0, **arguments}
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        GoogleCloudResiliencyClient(**given, workload_name="job")  # type: ignore[arg-type]
    with pytest.raises(InvalidValue, match=r"WorkloadInfo\.workload must be set"):
        GoogleCloudResiliencyClient(0, 1, 0, 0)


def test_launcher_and_supervisor_use_the_same_texts() -> None:
    of_daemon = {host_commands.HostCommandKind.CHECK_HOST}
    taken = set(host_commands.HostCommandKind) - of_daemon
    assert {one.name: one.value for one in seam.HostCommandKind} == {one.name: one.value for one in taken}
    assert {state.value for state in seam.WorkerReport} <= {state.value for state in DeviceState}
