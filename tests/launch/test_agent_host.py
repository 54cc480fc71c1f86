# SPDX-License-Identifier: Apache-2.0
"""Checkpoint agents that the launcher starts: they outlive ranks, and never their launcher."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import psutil
import pytest

from resiliency.checkpoint.agent.protocol import Message, RequestRefused, Start, Started, connect_to
from resiliency.checkpoint.capture.job_memory import DEFAULT_ROOT
from resiliency.checkpoint.format.catalog import Condition, list_checkpoints
from resiliency.checkpoint.storage.posix import LocalStorage
from resiliency.launch.agents.host import start_host
from resiliency.testing.processes import Command, is_alive, wait_for_exit

from .conftest import SCRIPTS, Launch, ready

LeavesNothing = Callable[[Command], None]
WORKER = SCRIPTS / "checkpointing.py"
WAIT = 180.0
#: Slow enough that nothing is committed while a test looks: 1 MB takes a day.
SNAIL = 10


@pytest.fixture
def job(tmp_path: Path) -> Iterator[str]:
    """A name of its own, and nothing in shared memory under it at the end."""
    name = f"agent-host-{os.getpid()}-{tmp_path.name[-20:]}"
    yield name
    assert captures(name) == []


def captures(job: str) -> list[Path]:
    return list(DEFAULT_ROOT.glob(f"resiliency-{job.replace('-', '_')}*"))


def start(launch: Launch, job: str, ranks: int, *words: object) -> Command:
    return launch(f"--nproc-per-node={ranks}", "--job-name", job, *words)


def agent_of(command: Command, rank: int = 0, attempt: int = 0) -> psutil.Process:
    line = command.wait_for_line(rf"rank {rank} attempt {attempt} agent (\d+)", timeout=WAIT)
    return psutil.Process(int(line[1]))


def save(command: Command, ranks: list[int], step: int, attempt: int = 0) -> None:
    for rank in ranks:
        os.kill(ready(command, rank, attempt), signal.SIGUSR1)
    for rank in ranks:
        command.wait_for_line(rf"rank {rank} attempt {attempt} saved {step} ", timeout=WAIT)


def restored(command: Command, rank: int, attempt: int) -> list[str]:
    line = command.wait_for_line(rf"rank {rank} attempt {attempt} restored (\d+) (\w+)", timeout=WAIT)
    return [line[1], line[2]]


def complete(directory: Path) -> list[int]:
    found = list_checkpoints(LocalStorage(directory))
    return [checkpoint.step for checkpoint in found if checkpoint.condition is Condition.COMPLETE]


@pytest.mark.slow
def test_an_agent_outlives_its_ranks_and_the_next_attempt_goes_on_from_memory(
    launch: Launch, tmp_path: Path, job: str, leaves_nothing: LeavesNothing
) -> None:
    command = start(launch, job, 2, "--max-restarts=2", WORKER, tmp_path / "ckpt")
    agent = agent_of(command)
    host = agent.parent()
    assert host is not None
    assert host.ppid() == command.pid
    # A fork of more than one thread could hang; and a child copies what a collector touches.
    assert host.num_threads() == 1
    assert (host.environ()["CUDA_VISIBLE_DEVICES"], host.environ()["OMP_NUM_THREADS"]) == ("", "1")
    save(command, [0, 1], step=1)
    # Both its own ranks die in turn: the one that would have started it without a launcher too.
    for attempt, victim in ((0, 1), (1, 0)):
        os.kill(ready(command, victim, attempt), signal.SIGKILL)
        for rank in (0, 1):
            assert agent_of(command, rank, attempt + 1) == agent
            assert restored(command, rank, attempt + 1) == [str(attempt + 1), "memory"]
        save(command, [0, 1], step=attempt + 2, attempt=attempt + 1)
    for rank in (0, 1):
        os.kill(ready(command, rank, 2), signal.SIGUSR2)
    assert command.wait(timeout=WAIT) == 0
    leaves_nothing(command)
    assert complete(tmp_path / "ckpt") == [1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_when_the_launcher_ends_what_is_captured_is_committed_and_nothing_is_left(
    launch: Launch, tmp_path: Path, job: str, leaves_nothing: LeavesNothing, number: signal.Signals
) -> None:
    command = start(launch, job, 1, "--workers-stop-timeout=60", WORKER, tmp_path / "ckpt", SNAIL)
    agent_of(command)
    save(command, [0], step=1)
    assert complete(tmp_path / "ckpt") == []
    command.signal(number)
    assert command.wait(timeout=WAIT) != 0
    leaves_nothing(command)
    assert complete(tmp_path / "ckpt") == [1]


@pytest.mark.slow
def test_when_the_restarts_are_used_up_the_last_capture_is_committed(
    launch: Launch, tmp_path: Path, job: str, leaves_nothing: LeavesNothing
) -> None:
    command = start(launch, job, 1, WORKER, tmp_path / "ckpt", SNAIL)
    save(command, [0], step=1)
    os.kill(ready(command, 0), signal.SIGKILL)
    assert command.wait(timeout=WAIT) == 1
    leaves_nothing(command)
    assert complete(tmp_path / "ckpt") == [1]


@pytest.mark.thorough("an agent that outlives its ranks is near")
@pytest.mark.slow
def test_when_the_host_of_agents_is_gone_the_launcher_leaves_them_the_time_to_commit(
    launch: Launch, tmp_path: Path, job: str, leaves_nothing: LeavesNothing
) -> None:
    command = start(launch, job, 1, WORKER, tmp_path / "ckpt", SNAIL)
    agent = agent_of(command)
    host = agent.parent()
    assert host is not None
    save(command, [0], step=1)
    agent.suspend()
    host.kill()
    os.kill(ready(command, 0), signal.SIGKILL)
    with pytest.raises(TimeoutError):  # it waits for the agent
        command.wait(timeout=3)
    agent.resume()
    assert command.wait(timeout=WAIT) == 1
    leaves_nothing(command)
    assert complete(tmp_path / "ckpt") == [1]


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Callable[[Path], Message | None]]:
    """An agent host without a launcher: ``host(arena)`` asks it for an agent."""
    name = f"test-{os.getpid()}-{tmp_path.name}"
    lifeline, held = os.pipe()
    process = start_host(name, lifeline, stop_timeout=timedelta(seconds=WAIT), environment=os.environ)
    os.close(lifeline)

    def ask(arena: Path) -> Message | None:
        channel = connect_to("\0" + name)
        assert channel is not None
        try:
            channel.send(Start(arena=str(arena)))
            return channel.receive(timedelta(seconds=WAIT))
        finally:
            channel.close()

    try:
        yield ask
    finally:
        os.close(held)
        assert process.wait(WAIT) == 0


def test_a_host_starts_one_agent_per_arena_and_refuses_one_that_fails_at_once(
    host: Callable[[Path], Message | None], tmp_path: Path
) -> None:
    agents = []
    for name in ("a", "b"):
        answer = host(tmp_path / name)
        assert isinstance(answer, Started)
        assert host(tmp_path / name) == answer
        agents.append(psutil.Process(answer.pid))
    assert agents[0] != agents[1]
    broken = host(tmp_path / "no" / "such" / "place")
    assert isinstance(broken, Started)
    wait_for_exit([broken.pid], time.monotonic() + WAIT)
    refused = host(tmp_path / "no" / "such" / "place")
    assert isinstance(refused, RequestRefused)
    assert "ended at once with exit code 1" in refused.reason
    # Both still live; they leave with their host.
    assert [is_alive(agent) for agent in agents] == [True, True]


#: Asks a host in a process that may start no other, and says what it answers.
FULL = """
import os, resource, socket, sys, threading
from datetime import timedelta
from pathlib import Path
from resiliency.checkpoint.agent.protocol import Start, connect_to
from resiliency.launch.agents.main import Starter

if os.getuid() == 0:
    os.setuid(65534)  # limits are not for root
lifeline, held = os.pipe()
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind(sys.argv[1].replace("@", chr(0)))
listener.listen()

def ask():
    channel = connect_to(listener.getsockname().decode())
    channel.send(Start(arena="/nowhere"))
    print(channel.receive(timedelta(seconds=60)), flush=True)
    channel.close()
    os.close(held)

threading.Thread(target=ask).start()
resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
Starter(listener, lifeline, lambda arena: 0).run()
"""


def test_a_host_that_can_start_no_process_says_so_and_lives_on(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", FULL, f"@full-{os.getpid()}-{tmp_path.name}"]
    with Command(argv, env={"OMP_NUM_THREADS": "1"}) as command:
        command.wait_for_line("Refused.*no process can be started", timeout=WAIT)
        assert command.wait(timeout=WAIT) == 0


@pytest.mark.slow
@pytest.mark.parametrize("patience", ["limited", "lost"])
def test_an_agent_that_hangs_is_killed_with_its_launcher_and_the_next_start_finds_the_capture(
    launch: Launch, tmp_path: Path, job: str, leaves_nothing: LeavesNothing, patience: str
) -> None:
    flags = ["--term-timeout=1"] if patience == "limited" else []
    command = start(launch, job, 1, *flags, WORKER, tmp_path / "ckpt", SNAIL)
    agent = agent_of(command)
    save(command, [0], step=1)
    agent.suspend()
    command.signal(signal.SIGTERM)
    if patience == "lost":  # the default would be half an hour
        wait_for_exit([ready(command, 0)], time.monotonic() + WAIT)
        command.signal(signal.SIGTERM)
    assert command.wait(timeout=WAIT) == 128 + signal.SIGTERM
    leaves_nothing(command)
    assert complete(tmp_path / "ckpt") == []
    assert len(captures(job)) == 1
    again = start(launch, job, 1, WORKER, tmp_path / "ckpt")
    assert restored(again, 0, 0) == ["1", "memory"]
    save(again, [0], step=2)  # else the only copy would stay in memory
    os.kill(ready(again, 0), signal.SIGUSR2)
    assert again.wait(timeout=WAIT) == 0
    leaves_nothing(again)


@pytest.mark.slow
def test_a_killed_agent_is_replaced_by_its_host_and_the_job_goes_on(
    launch: Launch, tmp_path: Path, job: str, leaves_nothing: LeavesNothing
) -> None:
    command = start(launch, job, 1, WORKER, tmp_path / "ckpt")
    agent = agent_of(command)
    host = agent.parent()
    assert host is not None
    save(command, [0], step=1)
    agent.kill()
    save(command, [0], step=2)  # it may still have been passed to the dead one
    os.kill(ready(command, 0), signal.SIGUSR1)
    line = command.wait_for_line(r"attempt 0 saved 3 committed agent (\d+)", timeout=WAIT)
    assert psutil.Process(int(line[1])).parent() == host
    os.kill(ready(command, 0), signal.SIGUSR2)
    assert command.wait(timeout=WAIT) == 0
    leaves_nothing(command)
    assert complete(tmp_path / "ckpt")[-1] == 3


@pytest.mark.thorough("an agent that outlives its ranks is near")
@pytest.mark.slow
def test_without_its_host_an_agent_stays_with_its_ranks_and_the_next_attempt_starts_its_own(
    launch: Launch, tmp_path: Path, job: str, leaves_nothing: LeavesNothing
) -> None:
    command = start(launch, job, 1, "--max-restarts=1", WORKER, tmp_path / "ckpt")
    agent = agent_of(command)
    host = agent.parent()
    assert host is not None
    host.kill()
    wait_for_exit([host.pid], time.monotonic() + WAIT)
    assert not is_alive(host)
    save(command, [0], step=1)
    assert complete(tmp_path / "ckpt") == [1]
    os.kill(ready(command, 0), signal.SIGKILL)
    assert agent_of(command, attempt=1).ppid() == ready(command, 0, attempt=1)
    assert restored(command, 0, 1)[0] == "1"
    # Its successor takes over when it gives up the address, the last thing that it does.
    wait_for_exit([agent.pid], time.monotonic() + WAIT)
    assert not is_alive(agent)
    os.kill(ready(command, 0, 1), signal.SIGUSR2)
    assert command.wait(timeout=WAIT) == 0
    leaves_nothing(command)
