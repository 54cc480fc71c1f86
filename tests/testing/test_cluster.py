# SPDX-License-Identifier: Apache-2.0
"""The cluster itself: what is killed is dead, what is cut is silent, and nothing is left behind."""

from __future__ import annotations

import os
import re
import runpy
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from resiliency.testing.cluster.hosts import FaultHit, HostFault, HostPhase, TestCluster, flip_bit
from tests.waiting import wait_until_equal


@pytest.fixture(scope="module")
def bed_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cluster") / "log.txt"


@pytest.fixture
def cluster(bed_log: Path) -> Iterator[TestCluster]:
    with TestCluster(2, log=bed_log, domains=lambda name: {"rack": f"r-{name}"}) as cluster:
        yield cluster
        root = cluster.root
    assert not root.exists()


def test_the_example_of_the_page_passes(tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "test-cluster.md"
    (example,) = re.findall(r"^```python\n(.*?)^```$", page.read_text(), flags=re.M | re.S)
    script = tmp_path / "example.py"
    script.write_text(example)
    tests = [value for name, value in runpy.run_path(str(script)).items() if name.startswith("test_")]
    assert len(tests) == 1
    tests[0]()


def say(*words: object) -> None:
    print(*words, flush=True)


def introduce() -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_NAME", "RESILIENCY_FAILURE_DOMAINS")
    say("i am", *(os.environ[name] for name in (*names, "RESILIENCY_PEER_ADDRESS")))
    if os.environ["RANK"] == "1":
        sys.exit(3)


def save_and_wait(steps: int) -> None:
    """A rank alone, with an agent that commits below the disk of its host."""
    import torch

    from resiliency.checkpoint import Checkpointer, CheckpointerOptions
    from resiliency.runtime import RunInfo

    disk, memory = Path(os.environ["BED_DISK"]), Path(os.environ["BED_MEMORY"])
    info = RunInfo(job_name="alone", host=os.environ["NODE_NAME"])
    state = {"weights": torch.zeros(1000)}
    options = CheckpointerOptions(arena_root=memory)
    with Checkpointer(disk, keep=1, info=info, options=options) as checkpoints:
        say("agent", checkpoints.agent_pid)
        for step in range(1, steps + 1):
            handle = checkpoints.save(step, state)
            handle.wait(options.save_timeout)
            say("save", step, handle.state.value, handle.record.why)
        threading.Event().wait()


def serve_echo() -> None:
    with socket.create_server((os.environ["RESILIENCY_PEER_ADDRESS"], 0)) as server:
        say("port", server.getsockname()[1])
        connection, _ = server.accept()
        with connection:
            while data := connection.recv(100):
                connection.sendall(data)


def ask_echo(address: str, port: int) -> None:
    with socket.create_connection((address, port), timeout=60) as connection:
        for line in ("one", "two", "three"):
            connection.sendall(line.encode())
            say("answer", connection.recv(100).decode())
            Path(os.environ["BED_ROOT"], "gates", "next").read_bytes()


def test_ranks_know_who_and_where_they_are(cluster: TestCluster) -> None:
    job = cluster.start(introduce, order=["h1", "h0"])
    assert job.wait() == [0, 3]
    assert sorted(line for line in job.lines if line.startswith("i am")) == [
        "i am 0 2 0 h1 rack=r-h1 127.0.0.11",
        "i am 1 2 0 h0 rack=r-h0 127.0.0.10",
    ]


def test_a_killed_host_loses_its_agent_and_its_memory_and_comes_back_with_its_disk(
    cluster: TestCluster,
) -> None:
    job = cluster.start(save_and_wait, 2, order=["h0"])
    agent = int(job.wait_for_line(r"agent (\d+)")[1])
    job.wait_for_line("save 2 committed")
    assert {cluster["h0"].pid, agent, job.pid(0)} <= set(cluster.pids("h0"))
    assert cluster["h0"].memory != []
    cluster.kill("h0")
    assert job.wait() == [-signal.SIGKILL]
    assert not any(Path(f"/proc/{pid}/maps").exists() and _maps(pid) for pid in (agent, job.pid(0)))
    assert cluster["h0"].memory == []
    assert "step=2" in os.listdir(cluster["h0"].disk)
    cluster.revive("h0")
    again = cluster.start(save_and_wait, 1, order=["h0"])
    again.wait_for_line("^agent [1-9]")
    cluster.kill("h0", disk=True)
    assert list(cluster["h0"].disk.iterdir()) == []
    assert cluster.alive == ["h1"]


def _maps(pid: int) -> bool:
    try:
        return bool(Path(f"/proc/{pid}/maps").read_bytes())
    except OSError:
        return False


@pytest.mark.parametrize("phase", [HostPhase.SAVE, HostPhase.RETIRE])
def test_a_fault_kills_the_host_between_two_operations(cluster: TestCluster, phase: HostPhase) -> None:
    step, name = (2, "manifest.json") if phase is HostPhase.SAVE else (1, "")
    fault = HostFault(host="h0", phase=phase, step=step, name=name)
    cluster.place(fault)
    job = cluster.start(save_and_wait, 2, order=["h0"])
    cluster.wait_for_fault(fault)
    assert job.wait() == [-signal.SIGKILL]
    last = cluster.operations("h0")[-1]
    assert (last.phase, last.step) == (phase, step)
    # The operation itself did not happen any more.
    target = cluster["h0"].disk / last.path
    assert target.exists() == (phase is HostPhase.RETIRE)


def test_a_fault_that_is_for_the_agent_alone_leaves_the_rank(cluster: TestCluster) -> None:
    fault = HostFault(host="h0", phase=HostPhase.SAVE, step=1, hit=FaultHit.PROCESS_KILLED)
    cluster.place(fault)
    job = cluster.start(save_and_wait, 2, order=["h0"])
    job.wait_for_line("save 1 failed")
    job.wait_for_line("save 2 committed")
    assert job.is_alive


def test_a_full_disk_fails_saves_until_it_has_room(cluster: TestCluster) -> None:
    cluster.fill_disk("h0")
    job = cluster.start(save_and_wait, 1, order=["h0"])
    job.wait_for_line("save 1 failed.*ENOSPC")
    cluster.free_disk("h0")
    job.end()
    cluster.start(save_and_wait, 1, order=["h0"]).wait_for_line("save 1 committed")


def test_no_byte_passes_between_hosts_that_are_apart_and_all_arrive_when_it_heals(
    cluster: TestCluster,
) -> None:
    server = cluster.start(serve_echo, order=["h0"])
    port = int(server.wait_for_line(r"port (\d+)")[1])
    gate = cluster.root / "gates" / "next"
    os.mkfifo(gate)
    client = cluster.start(ask_echo, cluster["h0"].address, port, order=["h1"])
    client.wait_for_line("answer one")
    cluster.partition(["h0"], ["h1"])
    gate.open("w").close()
    # Nothing can be waited for that must not come; that it comes after the healing shows the rest.
    with pytest.raises(TimeoutError):
        client.wait_for_line("answer two", timeout=0.5)
    cluster.heal()
    client.wait_for_line("answer two")
    gate.open("w").close()
    client.wait_for_line("answer three")
    gate.open("w").close()
    assert client.wait() == [0]
    # The relay counts what it has passed on.
    wait_until_equal(lambda: cluster.network.passed["h1", "h0"], len("onetwothree"))


def test_a_stopped_host_is_silent_until_it_is_resumed(cluster: TestCluster) -> None:
    server = cluster.start(serve_echo, order=["h0"])
    port = int(server.wait_for_line(r"port (\d+)")[1])
    cluster.stop("h0")
    with socket.create_connection((cluster["h0"].address, port), timeout=60) as connection:
        connection.sendall(b"hello")
        connection.settimeout(0.2)
        with pytest.raises(TimeoutError):
            connection.recv(5)
        cluster.resume("h0")
        connection.settimeout(60)
        assert connection.recv(5) == b"hello"


def test_a_program_started_on_a_host_ends_with_it(cluster: TestCluster) -> None:
    code = "import os, signal; print('program of', os.environ['NODE_NAME'], flush=True); signal.pause()"
    command = cluster.command("h0", [sys.executable, "-c", code])
    command.wait_for_line("program of h0", timeout=60)
    cluster.kill("h0")
    assert command.returncode == -signal.SIGKILL


def test_a_flipped_bit_is_one_bit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(100))
    flip_bit(path)
    changed = [byte for byte in path.read_bytes() if byte]
    assert len(changed) == 1
    assert bin(changed[0]).count("1") == 1
