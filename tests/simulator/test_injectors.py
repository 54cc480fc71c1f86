# SPDX-License-Identifier: Apache-2.0
"""Each injector on real processes, and whose processes they are."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from simulator.faults import RULES, FaultMissed, InjectionFailed, Kind, PlannedFault
from simulator.injectors import Injector
from simulator.injectors.host import FullDisk, MemoryPressure, NetworkCut
from simulator.injectors.processes import CpuQuota, Kill, Niceness, Stop, packed
from simulator.job import Job, Process
from tests.simulator.conftest import NOBODY, StartWorker, as_root, identity, state_of
from tests.waiting import WAIT_S, wait_until, wait_until_equal

JOB = f"simulator-injectors-{os.getpid()}"


def fault(kind: Kind, value: int | None = None, gpu: int = 0) -> PlannedFault:
    rule = RULES[kind]
    return PlannedFault(
        at_us=0,
        kind=kind,
        node=0,
        gpu=gpu if rule.on_gpu else None,
        duration_us=1 if rule.lasts else 0,
        value=value if value is not None or not rule.choices else rule.choices[0],
    )


def test_the_worker_of_the_local_rank_is_killed_and_no_other(start_worker: StartWorker) -> None:
    workers = [start_worker(JOB, local_rank) for local_rank in (0, 1)]
    injector = Kill(Job(JOB, 0))
    injector.inject(injector.aim_fault(fault(Kind.KILL, gpu=1)))
    assert workers[1].wait(60) == -signal.SIGKILL
    assert workers[0].poll() is None


def test_only_processes_of_job_node_and_user_are_seen(start_worker: StartWorker) -> None:
    own = start_worker(JOB)
    start_worker("another-job")
    start_worker(JOB, group_rank=1)
    if os.geteuid() == 0:
        start_worker(JOB, user=NOBODY)
    assert [member.process for member in Job(JOB, 0).members()] == [identity(own)]
    assert len(Job(JOB, None).members()) == 2
    assert Job(JOB, 0).other_nodes()[:2] == ["0", "1"]


def test_a_process_without_a_local_rank_is_of_no_job() -> None:
    env = {"PATH": os.environ["PATH"], "JOB_IDENTIFIER": JOB}
    with subprocess.Popen(["sleep", "600"], env=env) as shell:
        try:
            assert Job(JOB, 0).members() == []
        finally:
            shell.kill()


def test_a_child_of_a_worker_is_no_target(start_worker: StartWorker) -> None:
    worker = start_worker(JOB, under=("sh", "-c", "sleep 600 & exec sleep 600"))
    job = Job(JOB, 0)
    wait_until(lambda: len(job.members()) == 2, "the worker has no child")
    assert job.workers()[0].process == identity(worker)
    for member in job.members():
        if member.process.pid != worker.pid:
            job.signal(member.process, signal.SIGKILL)


def test_a_dead_worker_is_a_missed_fault(start_worker: StartWorker) -> None:
    worker = start_worker(JOB)
    injector = Kill(Job(JOB, 0))
    record = injector.aim_fault(fault(Kind.KILL))
    worker.kill()
    worker.wait()
    with pytest.raises(FaultMissed, match="ended before it could be killed"):
        injector.inject(record)
    with pytest.raises(FaultMissed, match="has no worker of local rank 0 now"):
        injector.aim_fault(fault(Kind.KILL))


def test_a_helper_that_outlives_its_rank_is_no_worker(tmp_path: Path) -> None:
    env = {"PATH": os.environ["PATH"], "JOB_IDENTIFIER": JOB, "HELPER": str(tmp_path / "pid")}
    # A rank that leaves a helper with its environment in a session of its own, and waits; and its launcher.
    rank = "(setsid sleep 600 & echo $! > $HELPER.new); mv $HELPER.new $HELPER; exec sleep 600"
    launcher = subprocess.Popen(
        ["sh", "-c", f"RANK=0 LOCAL_RANK=0 GROUP_RANK=0 sh -c '{rank}' & exec sleep 600"], env=env
    )
    job = Job(JOB, 0)
    wait_until((tmp_path / "pid").exists, "no helper")
    helper = Process.of(int((tmp_path / "pid").read_text()))
    assert helper is not None
    try:
        wait_until(job.workers, "no worker")
        worker = job.workers()[0]
        assert worker.process != helper
        injector = Kill(job)
        injector.inject(injector.aim_fault(fault(Kind.KILL)))
        wait_until(lambda: not worker.process.alive, "the worker lives")
        with pytest.raises(FaultMissed, match="no worker of local rank 0 now"):
            injector.aim_fault(fault(Kind.KILL))
        assert helper.alive
    finally:
        helper.send(signal.SIGKILL)
        launcher.kill()
        launcher.wait()


def test_a_number_that_another_process_took_over_is_never_signalled(start_worker: StartWorker) -> None:
    found = identity(start_worker(JOB))
    earlier = Process(found.pid, str(int(found.started) - 1))
    assert not earlier.send(signal.SIGKILL)
    assert not Job(JOB, 0).signal(earlier, signal.SIGKILL)
    # And one of another job is not, whatever a record says.
    assert not Job("another-job", 0).signal(found, signal.SIGKILL)
    assert found.alive


def test_a_stopped_worker_goes_on_at_the_end(start_worker: StartWorker) -> None:
    worker = start_worker(JOB)
    injector = Stop(Job(JOB, 0))
    record = injector.aim_fault(fault(Kind.STOP))
    injector.inject(record)
    wait_until_equal(lambda: state_of(worker), "T")
    with pytest.raises(FaultMissed, match="is stopped already"):
        injector.aim_fault(fault(Kind.STOP))
    injector.end_effect(record)
    wait_until_equal(lambda: state_of(worker), "S")
    injector.end_effect(record)


def test_all_of_the_job_on_a_node_dies_with_its_launcher(start_worker: StartWorker, tmp_path: Path) -> None:
    env = {"PATH": os.environ["PATH"], "JOB_IDENTIFIER": JOB}
    ranks = "RANK=0 LOCAL_RANK=0 GROUP_RANK=0 sleep 600 & RANK=1 LOCAL_RANK=1 GROUP_RANK=0 sleep 600 &"
    # The simulator is no child of the launcher; this process is its parent, and is spared as that.
    launcher = subprocess.Popen(["sh", "-c", f"{ranks} sleep 600 & wait"], env=env)
    other = start_worker("another-job")
    job = Job(JOB, 0)
    try:
        wait_until(lambda: len(job.workers()) == 2, "no workers")
        wait_until(lambda: len(job.host_processes()) == 4, "launcher, helper and two workers")
        injector = Kill(job)
        record = injector.aim_fault(fault(Kind.HOST_KILL))
        assert packed(record)[0].pid == launcher.pid
        injector.inject(record)
        assert launcher.wait(60) == -signal.SIGKILL
        wait_until(lambda: not job.members(), "workers live")
        wait_until(lambda: not any(process.alive for process in packed(record)), "something lives")
    finally:
        launcher.kill()
        launcher.wait()
    assert other.poll() is None


def test_a_launcher_that_is_not_the_jobs_by_name_is_spared(start_worker: StartWorker) -> None:
    ranks = f"JOB_IDENTIFIER={JOB} LOCAL_RANK=0 GROUP_RANK=0 sleep 600 & wait; exec sleep 600"
    shell = subprocess.Popen(["sh", "-c", ranks], env={"PATH": os.environ["PATH"]})
    job = Job(JOB, 0)
    try:
        wait_until(job.workers, "no worker")
        injector = Kill(job)
        injector.inject(injector.aim_fault(fault(Kind.HOST_KILL)))
        wait_until(lambda: not job.members(), "the worker lives")
        assert shell.poll() is None
        # It is still the sign that the job is there.
        assert job.is_present()
    finally:
        shell.kill()
        shell.wait()
    assert not job.is_present()


@pytest.mark.parametrize("kind", [Kind.SLOW, Kind.POWER_CAP])
def test_a_quota_slows_down_and_ends(start_worker: StartWorker, kind: Kind) -> None:
    injector = CpuQuota(Job(JOB, 0))
    if why := injector.refusal():
        pytest.skip(why)
    worker = start_worker(JOB)
    record = injector.aim_fault(fault(kind, 70 if kind is Kind.POWER_CAP else 10))
    assert record["quota_us"] == 10_000  # a tenth of one CPU; 70 of 700 watts
    injector.inject(record)
    group = Path(str(record["group"]))
    assert str(worker.pid) in (group / "cgroup.procs").read_text().split()
    with pytest.raises(FaultMissed, match="is slowed already"):
        injector.aim_fault(fault(kind))
    injector.end_effect(record)
    assert not group.exists()
    assert worker.poll() is None


def test_niceness_is_raised_for_all_threads_and_lowered_again() -> None:
    injector = Niceness(Job(JOB, 0))
    if (why := injector.refusal()) or os.getpriority(os.PRIO_PROCESS, 0) >= 19:
        pytest.skip(why or "the tests run with niceness 19 themselves")
    code = "import threading; e = threading.Event(); threading.Thread(target=e.wait).start(); "
    code += "print(1, flush=True); e.wait()"
    env = {"PATH": os.environ["PATH"], "JOB_IDENTIFIER": JOB, "LOCAL_RANK": "0"}
    worker = subprocess.Popen(["python3", "-I", "-S", "-c", code], env=env, stdout=subprocess.PIPE)
    try:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"1\n"
        threads = [int(name) for name in os.listdir(f"/proc/{worker.pid}/task")]
        assert len(threads) == 2

        def niceness() -> set[int]:
            return {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads}

        before = niceness()
        record = injector.aim_fault(fault(Kind.SLOW))
        injector.inject(record)
        assert niceness() == {19}
        injector.end_effect(record)
        assert niceness() == before
    finally:
        worker.kill()
        worker.communicate()


def test_a_full_disk_refuses_a_byte_and_has_its_room_again(small_disk: Path) -> None:
    injector = FullDisk(small_disk, [])
    assert injector.refusal() == ""
    record = injector.aim_fault(fault(Kind.DISK_FULL))
    injector.inject(record)
    with pytest.raises(OSError, match="No space left"):
        (small_disk / "more").write_bytes(b"x" * (1 << 20))
    injector.end_effect(record)
    (small_disk / "more").write_bytes(b"x" * (1 << 20))
    left = injector.aim_fault(fault(Kind.DISK_FULL, 1))
    injector.inject(left)
    free = os.statvfs(small_disk)
    assert 0 <= free.f_bavail * free.f_frsize - (1 << 20) < 1 << 16
    injector.end_effect(left)


def test_a_disk_that_others_need_is_refused(tmp_path: Path) -> None:
    assert "--disk_dir names no directory" in FullDisk(None, []).refusal()
    assert "which others need" in FullDisk(tmp_path, [tmp_path]).refusal()
    assert "which others need" in FullDisk(Path("/"), [tmp_path]).refusal()
    assert "No such file" in FullDisk(tmp_path / "none", [tmp_path]).refusal()
    with pytest.raises(FaultMissed, match="which others need"):
        FullDisk(tmp_path, [tmp_path]).aim_fault(fault(Kind.DISK_FULL))
    with pytest.raises(InjectionFailed, match="does not fill"):
        FullDisk(tmp_path, [tmp_path]).inject({"path": str(tmp_path / "no" / "file"), "left_bytes": 0})


@pytest.fixture
def linked(start_worker: StartWorker) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A worker in a network namespace of its own, and the address at which it reaches this one."""
    worker = start_worker(JOB, under=("unshare", "--net"))
    inside = ["nsenter", f"--net=/proc/{worker.pid}/ns/net"]
    for command in (
        f"ip link add sim0 type veth peer name sim1 netns {worker.pid}",
        "ip addr add 198.51.100.1/30 dev sim0",
        "ip link set sim0 up",
    ):
        subprocess.run(command.split(), check=True, timeout=60)
    for command in ("ip addr add 198.51.100.2/30 dev sim1", "ip link set sim1 up", "ip link set lo up"):
        subprocess.run([*inside, *command.split()], check=True, timeout=60)
    try:
        yield worker, "198.51.100.1"
    finally:
        subprocess.run(["ip", "link", "del", "sim0"], check=True, timeout=60)


@as_root
def test_nothing_leaves_a_namespace_that_is_cut(linked: tuple[subprocess.Popen[bytes], str]) -> None:
    worker, address = linked
    injector = NetworkCut(Job(JOB, 0))
    if why := injector.refusal():
        pytest.skip(why)
    inside = ["nsenter", f"--net=/proc/{worker.pid}/ns/net"]
    with socket.create_server((address, 0)) as server:
        port = server.getsockname()[1]
        connect = [*inside, "python3", "-I", "-S", "-c"]
        code = f"import socket; socket.create_connection(({address!r}, {port}), timeout=30).close()"
        subprocess.run([*connect, code], check=True, timeout=60)
        record = injector.aim_fault(fault(Kind.NETWORK_CUT))
        injector.inject(record)
        assert subprocess.run([*connect, code], capture_output=True, timeout=60).returncode != 0
        # Its own loopback interface works.
        own = "import socket; s = socket.create_server(('127.0.0.1', 0)); "
        own += "socket.create_connection(s.getsockname())"
        subprocess.run([*connect, own], check=True, timeout=60)
        injector.end_effect(record)
        injector.end_effect(record)
        subprocess.run([*connect, code], check=True, timeout=60)


@as_root
def test_what_started_the_job_in_its_namespace_is_no_stranger() -> None:
    worker = f"JOB_IDENTIFIER={JOB} LOCAL_RANK=0 GROUP_RANK=0 sleep 600 & wait"
    script = ["unshare", "--net", "--kill-child", "--fork", "sh", "-c", worker]
    shell = subprocess.Popen(script, env={"PATH": os.environ["PATH"]})
    job = Job(JOB, 0)
    try:
        wait_until(job.workers, "no worker")
        injector = NetworkCut(job)
        assert str(injector.aim_fault(fault(Kind.NETWORK_CUT))["namespace"]).startswith("net:[")
        for member in job.members():
            job.signal(member.process, signal.SIGKILL)
    finally:
        shell.kill()
        shell.wait()


@as_root
def test_a_network_that_others_share_is_not_cut(start_worker: StartWorker) -> None:
    start_worker(JOB)
    start_worker("another-job")
    with pytest.raises(FaultMissed, match="shares its network"):
        NetworkCut(Job(JOB, 0)).aim_fault(fault(Kind.NETWORK_CUT))


def test_an_injector_of_ones_own_has_the_form_of_the_protocol() -> None:
    job = Job(JOB, 0)
    every: list[Injector] = [
        *(Kill(job), Stop(job), CpuQuota(job), Niceness(job), MemoryPressure()),
        *(FullDisk(None, []), NetworkCut(job)),
    ]
    assert len({injector.name for injector in every}) == len(every)


def test_a_file_that_fills_a_disk_counts_as_removed_only_where_its_disk_is_mounted(tmp_path: Path) -> None:
    injector = FullDisk(None, [])
    with pytest.raises(InjectionFailed, match="which is not mounted"):
        injector.end_effect({"path": str(tmp_path / "disk" / "file"), "mount": str(tmp_path / "disk")})
    injector.end_effect({"path": str(tmp_path / "disk" / "file"), "mount": "/"})


def test_the_disk_of_a_full_disk_is_recorded(small_disk: Path) -> None:
    (small_disk / "inner").mkdir()
    record = FullDisk(small_disk / "inner", []).aim_fault(fault(Kind.DISK_FULL))
    assert record["mount"] == str(small_disk)


@as_root
def test_a_network_of_a_container_that_hides_processes_is_not_cut(
    start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    from simulator.injectors import host

    worker = start_worker(JOB)
    injector = NetworkCut(Job(JOB, 0))
    # As seen from a PID namespace of its own, process 1 of which has the network of the container.
    monkeypatch.setattr(host, "_HOST_PIDS", "pid:[1]")
    container = host._namespace(worker.pid)
    see = host._namespace
    monkeypatch.setattr(host, "_namespace", lambda pid: container if pid == 1 else see(pid))
    with pytest.raises(FaultMissed, match="this container hides processes that may share"):
        injector.aim_fault(fault(Kind.NETWORK_CUT))
    start_worker(JOB + "-apart", under=("unshare", "--net"))
    assert NetworkCut(Job(JOB + "-apart", 0)).aim_fault(fault(Kind.NETWORK_CUT))["namespace"] != container


@as_root
def test_a_process_whose_network_cannot_be_seen_is_a_stranger(
    start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    from simulator.injectors import host

    start_worker(JOB, under=("unshare", "--net"))
    other = start_worker("another-job")
    injector = NetworkCut(Job(JOB, 0))
    assert injector.aim_fault(fault(Kind.NETWORK_CUT))
    see = host._namespace
    monkeypatch.setattr(host, "_namespace", lambda pid: "" if pid == other.pid else see(pid))
    with pytest.raises(FaultMissed, match=f"process {other.pid}, which is not of job"):
        injector.aim_fault(fault(Kind.NETWORK_CUT))


@as_root
def test_a_cut_stays_recorded_until_it_surely_ended(
    start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from simulator.injectors import host

    worker = start_worker(JOB, under=("unshare", "--net"))
    injector = NetworkCut(Job(JOB, 0))
    record = injector.aim_fault(fault(Kind.NETWORK_CUT))
    injector.inject(record)
    broken = tmp_path / "nsenter"
    broken.write_text("#!/bin/sh\necho nsenter: no memory >&2\nexit 1\n")
    broken.chmod(0o755)
    with monkeypatch.context() as patched:
        patched.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        with pytest.raises(InjectionFailed, match="may still be cut: nsenter: no memory"):
            injector.end_effect(record)
    injector.end_effect(record)
    worker.kill()
    worker.wait()
    injector.end_effect(record)
    # From another PID namespace, a namespace that is not found may only be hidden.
    monkeypatch.setattr(host, "_HOST_PIDS", "pid:[1]")
    injector.end_effect(record)
    with pytest.raises(InjectionFailed, match="cannot be seen from this PID namespace"):
        injector.end_effect(record | {"pids": "pid:[2]"})


def test_a_fault_of_one_worker_is_missed_where_all_have_its_local_rank() -> None:
    ranks = "".join(f"RANK={rank} LOCAL_RANK=0 sleep 600 & " for rank in (0, 1))
    env = {"PATH": os.environ["PATH"], "JOB_IDENTIFIER": JOB}
    job = Job(JOB, 0)
    with subprocess.Popen(["sh", "-c", f"{ranks} wait"], env=env) as launcher:
        try:
            wait_until(lambda: len(job.workers_of(0)) == 2, "no workers")
            for injector in (Kill(job), Stop(job), Niceness(job), CpuQuota(job)):
                kind = Kind.KILL if injector.name == "kill" else min(injector.kinds - {Kind.POWER_CAP})
                with pytest.raises(FaultMissed, match=f"ranks 0, 1 of job {JOB} all have local rank 0"):
                    injector.aim_fault(fault(kind))
            with pytest.raises(FaultMissed, match="with --virtual-local-rank all workers have local rank 0"):
                Kill(job).aim_fault(fault(Kind.KILL, gpu=1))
        finally:
            for member in job.members():
                job.signal(member.process, signal.SIGKILL)
            launcher.kill()


def test_a_quota_whose_home_group_is_gone_is_kept(tmp_path: Path) -> None:
    injector = CpuQuota(Job(JOB, 0))
    group, home = tmp_path / "group", tmp_path / "home"
    group.mkdir()
    (group / "cgroup.procs").write_text("1\n")
    with pytest.raises(InjectionFailed, match="stay slow"):
        injector.end_effect({"group": str(group), "home": str(home)})
    injector.end_effect({"group": str(tmp_path / "gone"), "home": str(home)})


def test_children_that_a_slow_worker_started_are_not_left_slow() -> None:
    injector = Niceness(Job(JOB, 0))
    if (why := injector.refusal()) or os.getpriority(os.PRIO_PROCESS, 0) >= 19:
        pytest.skip(why or "the tests run with niceness 19 themselves")
    before = os.getpriority(os.PRIO_PROCESS, 0)
    # One child now, nice by its own choice; then on each line one child, and one whose parent ends.
    code = "nice -n 19 sleep 600 & echo; while read line; do sleep 600 & (sleep 600 &) ; echo; done"
    env = {"PATH": os.environ["PATH"], "JOB_IDENTIFIER": JOB, "LOCAL_RANK": "0", "RANK": "0"}
    job, ticks = Job(JOB, 0), os.sysconf("SC_CLK_TCK")
    worker = subprocess.Popen(
        ["sh", "-c", code], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    )
    try:
        assert worker.stdin is not None
        assert worker.stdout is not None
        worker.stdout.readline()

        def niceness() -> list[int]:
            found = [member.process.pid for member in job.members() if member.process.pid != worker.pid]
            return sorted(os.getpriority(os.PRIO_PROCESS, pid) for pid in found)

        wait_until_equal(niceness, [19])
        earliest = max(int(member.process.started) for member in job.members())
        wait_until(
            lambda: time.clock_gettime(time.CLOCK_BOOTTIME) * ticks > earliest + 1, "time stands still"
        )
        record = injector.aim_fault(fault(Kind.SLOW))
        injector.inject(record)
        worker.stdin.write(b"\n")
        worker.stdout.readline()
        wait_until_equal(niceness, [19, 19, 19])
        # The next start may be for another job.
        Niceness(Job("another-job", 0)).end_effect(record)
        assert niceness() == sorted([before, before, 19])
        assert os.getpriority(os.PRIO_PROCESS, worker.pid) == before
    finally:

        def all_are_gone() -> bool:
            members = list(job.members())  # one that is between fork and exec may be in none of them yet
            for member in members:
                job.signal(member.process, signal.SIGKILL)
            return not members

        wait_until(all_are_gone, "a child is still there")
        # Not until the end of its output, which a child that was overlooked would hold open.
        for pipe in filter(None, (worker.stdin, worker.stdout)):
            pipe.close()
        worker.wait(WAIT_S)
