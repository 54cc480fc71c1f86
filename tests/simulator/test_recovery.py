# SPDX-License-Identifier: Apache-2.0
"""A simulator that is killed at any point leaves nothing that the next start does not undo."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from resiliency.errors import ConfigError
from simulator import session
from simulator.injectors.processes import CpuQuota, Niceness, Stop, _group_of, pack
from simulator.job import Job, Process
from simulator.journal import Journal, Record, default_directory
from simulator.player import recover
from simulator.simulator_entrypoint import main
from tests.simulator.conftest import StartWorker, as_root, identity, state_of
from tests.simulator.dying import POINTS, FileGpus, build
from tests.waiting import wait_until_equal

ROOT = Path(__file__).parents[2]
JOB = f"simulator-recovery-{os.getpid()}"


def die(point: str, state_dir: Path, setting: dict[str, Any]) -> None:
    """Run a simulator that is killed at `point`; every other end is an error."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.simulator.dying", point, str(state_dir), json.dumps(setting)],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == -9, done.stderr
    expected = "1 faults injected, 0 missed, 1 effects undone\n" if point == "closed" else ""
    assert done.stdout == expected, done.stderr
    assert len(list(state_dir.glob("*.journal"))) == 1


def start_again(state_dir: Path, setting: dict[str, Any], point: str) -> None:
    """What the next simulator does first; afterwards no journal of a killed one is left."""
    journal = Journal(state_dir)
    try:
        # An effect is open from when it was written until its end was.
        assert recover(journal, [build(setting)]).undone == int(point not in ("aimed", "closed"))
        assert list(state_dir.glob("*.journal")) == [journal.path]
        assert recover(journal, [build(setting)]) == (0, 0)
    finally:
        journal.close()
    assert os.listdir(state_dir) == []


def left_in(state_dir: Path) -> list[Record]:
    """The records of open effects that the next start finds."""
    found: list[Record] = []
    journal = Journal(state_dir)
    try:
        journal.recover(lambda record, same_boot: found.append(record))
    finally:
        journal.close()
    return found


@pytest.mark.parametrize("point", POINTS)
def test_nothing_is_left_stopped(point: str, start_worker: StartWorker, state_dir: Path) -> None:
    worker = start_worker(JOB)
    setting = {"injector": "stop", "kind": "stop", "job": JOB, "fault": {"gpu": 0}}
    die(point, state_dir, setting)
    if point in ("injected", "ending"):
        wait_until_equal(lambda: state_of(worker), "T")
    start_again(state_dir, setting, point)
    wait_until_equal(lambda: state_of(worker), "S")


@pytest.mark.parametrize("point", POINTS)
def test_nothing_is_left_nice(point: str, start_worker: StartWorker, state_dir: Path) -> None:
    if why := Niceness(Job(JOB, 0)).refusal():
        pytest.skip(why)
    worker = start_worker(JOB)
    before = os.getpriority(os.PRIO_PROCESS, worker.pid)
    if before >= 19:
        pytest.skip("the tests run with niceness 19 themselves")
    setting = {"injector": "niceness", "kind": "slow", "job": JOB, "fault": {"gpu": 0, "value": 25}}
    die(point, state_dir, setting)
    if point in ("injected", "ending"):
        assert os.getpriority(os.PRIO_PROCESS, worker.pid) == 19
    start_again(state_dir, setting, point)
    assert os.getpriority(os.PRIO_PROCESS, worker.pid) == before


@pytest.mark.parametrize("point", POINTS)
def test_nothing_is_left_with_a_quota(point: str, start_worker: StartWorker, state_dir: Path) -> None:
    if why := CpuQuota(Job(JOB, 0)).refusal():
        pytest.skip(why)
    worker = start_worker(JOB)
    before = _group_of(worker.pid)
    assert before is not None
    setting = {"injector": "cpu_quota", "kind": "slow", "job": JOB, "fault": {"gpu": 0, "value": 25}}
    die(point, state_dir, setting)
    during = _group_of(worker.pid)
    assert during is not None
    assert (during == before) == (point not in ("injected", "ending"))
    start_again(state_dir, setting, point)
    assert _group_of(worker.pid) == before
    assert during == before or not during.exists()


@pytest.mark.parametrize("point", POINTS)
def test_nothing_is_left_capped(
    point: str, start_worker: StartWorker, state_dir: Path, tmp_path: Path
) -> None:
    worker = start_worker(JOB)
    limits = tmp_path / "limits.json"
    limits.write_text("[700000, 650000]")
    setting: dict[str, Any] = {"injector": "power_cap", "kind": "power_cap", "job": JOB}
    setting |= {"gpus": str(limits), "pids": [worker.pid], "fault": {"gpu": 0, "value": 300}}
    die(point, state_dir, setting)
    if point in ("injected", "ending"):
        assert FileGpus(limits).power_limit(0) == 300_000
    start_again(state_dir, setting, point)
    assert json.loads(limits.read_text()) == [700_000, 650_000]


@pytest.mark.parametrize("point", POINTS)
def test_no_disk_is_left_full(
    point: str, start_worker: StartWorker, state_dir: Path, small_disk: Path
) -> None:
    start_worker(JOB)
    setting = {"injector": "disk_full", "kind": "disk_full", "job": JOB, "disk": str(small_disk)}
    setting |= {"fault": {"value": 0}}
    die(point, state_dir, setting)
    free = os.statvfs(small_disk)
    assert (free.f_bavail * free.f_frsize < 1 << 16) == (point in ("injected", "ending"))
    start_again(state_dir, setting, point)
    assert os.listdir(small_disk) == []


@as_root
@pytest.mark.parametrize("point", POINTS)
def test_no_network_is_left_cut(point: str, start_worker: StartWorker, state_dir: Path) -> None:
    worker = start_worker(JOB, under=("unshare", "--net"))
    setting: dict[str, Any] = {"injector": "network_cut", "kind": "network_cut", "job": JOB, "fault": {}}
    die(point, state_dir, setting)
    assert ("blackhole" in rules(worker.pid)) == (point in ("injected", "ending"))
    start_again(state_dir, setting, point)
    assert "blackhole" not in rules(worker.pid)


def rules(pid: int) -> str:
    command = ["nsenter", f"--net=/proc/{pid}/ns/net", "ip", "rule", "show"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def test_a_living_simulators_effects_are_left_alone(start_worker: StartWorker, state_dir: Path) -> None:
    worker = start_worker(JOB)
    injector = Stop(Job(JOB, 0))
    living = Journal(state_dir)
    other = Journal(state_dir)
    try:
        record: Record = {"injector": "stop", "processes": [pack(identity(worker))]}
        living.begin_effect(record)
        injector.inject(record)
        assert recover(other, [injector]) == (0, 0)
        wait_until_equal(lambda: state_of(worker), "T")
    finally:
        other.close()
        living.close()
    # Closed with an open effect, its file stays for the next start.
    last = Journal(state_dir)
    try:
        assert recover(last, [injector]) == (1, 0)
    finally:
        last.close()
    wait_until_equal(lambda: state_of(worker), "S")


def test_a_process_that_took_over_a_number_is_not_continued(start_worker: StartWorker) -> None:
    worker = start_worker(JOB)
    injector = Stop(Job(JOB, 0))
    injector.inject({"processes": [pack(identity(worker))]})
    earlier = Process(worker.pid, str(int(identity(worker).started) - 1))
    injector.end_effect({"processes": [pack(earlier)]})
    wait_until_equal(lambda: state_of(worker), "T")
    injector.end_effect({"processes": [pack(identity(worker))]})
    wait_until_equal(lambda: state_of(worker), "S")


def test_a_torn_last_line_is_an_effect_that_never_began(state_dir: Path) -> None:
    journal = Journal(state_dir)
    torn = state_dir / "0.journal"
    torn.write_text('{"boot": "x"}\n{"begin": 0, "rec')
    try:
        assert recover(journal, []) == (0, 0)
    finally:
        journal.close()
    assert not torn.exists()


def test_what_cannot_be_undone_stays_for_the_next_start(
    state_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal(state_dir)
    left = state_dir / "0.journal"
    left.write_text('{"boot": "x"}\n{"begin": 0, "record": {"injector": "of a newer release"}}\n')
    try:
        assert recover(journal, []) == (0, 1)
    finally:
        journal.close()
    assert left.exists()
    assert "the next start tries again" in caplog.text


def test_after_a_restart_of_the_host_processes_are_other_ones(
    start_worker: StartWorker, state_dir: Path
) -> None:
    worker = start_worker(JOB)
    injector = Stop(Job(JOB, 0))
    injector.inject({"processes": [pack(identity(worker))]})
    journal = Journal(state_dir)
    record = {"injector": "stop", "processes": [pack(identity(worker))]}
    lines = [{"boot": "another"}, {"begin": 0, "record": record}]
    (state_dir / "0.journal").write_text("".join(json.dumps(line) + "\n" for line in lines))
    try:
        assert recover(journal, [injector]) == (1, 0)
    finally:
        journal.close()
    wait_until_equal(lambda: state_of(worker), "T")


def test_undo_only_undoes_and_ends(
    start_worker: StartWorker, state_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    worker = start_worker(JOB)
    die("injected", state_dir, {"injector": "stop", "kind": "stop", "job": JOB, "fault": {"gpu": 0}})
    assert main(["--undo_only", "--state_dir", str(state_dir)]) == 0
    assert capsys.readouterr().out.startswith("1 effects undone; 0 journals")
    wait_until_equal(lambda: state_of(worker), "S")


def test_what_is_left_is_undone_before_a_refusal_and_before_the_question(
    start_worker: StartWorker, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = start_worker(JOB)
    setting = {"injector": "stop", "kind": "stop", "job": JOB, "fault": {"gpu": 0}}
    flags = ["--job", "another", "--state_dir", str(state_dir)]
    die("injected", state_dir, setting)
    assert main([*flags, "--at", "0,disk_full"]) == 2
    wait_until_equal(lambda: state_of(worker), "S")

    def answer_no(*_: object) -> bool:
        wait_until_equal(lambda: state_of(worker), "S")
        return False

    die("injected", state_dir, setting)
    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr(session, "_agreed", answer_no)
    assert main([*flags, "--at", "0,kill,gpu=0"]) == 0


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    "flags", [["--undo_only"], ["--at", "0,stop,gpu=0,duration=0.01", "--job", JOB, "--yes"]]
)
def test_an_earlier_effect_that_stays_makes_the_exit_code_one(
    flags: list[str], start_worker: StartWorker, state_dir: Path
) -> None:
    start_worker(JOB)
    Journal(state_dir).close()
    left = state_dir / "0.journal"
    left.write_text('{"boot": "x"}\n{"begin": 0, "record": {"injector": "of a newer release"}}\n')
    assert main([*flags, "--state_dir", str(state_dir)]) == 1
    assert left.exists()


def test_a_directory_that_others_can_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match="that only this user can write"):
        Journal(tmp_path)
    with pytest.raises(ConfigError, match="cannot be written"):
        Journal(Path("/proc/none"))
    assert str(os.getuid()) in str(default_directory())


def test_an_entry_that_the_system_takes_in_pieces_is_whole(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", lambda fd, data: write(fd, data[:7]))
        killed = Journal(state_dir)
        killed.begin_effect({"injector": "of a newer release"})
    killed.close()
    assert left_in(state_dir) == [{"injector": "of a newer release"}]


def test_a_torn_line_does_not_swallow_the_next_effect(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    rooms = [20]

    def write_until_full(fd: int, data: bytes) -> int:
        if not rooms:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data[: rooms.pop()])

    killed = Journal(state_dir)
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", write_until_full)
        with pytest.raises(OSError, match="No space left"):
            killed.begin_effect({"injector": "the disk was full"})
    killed.begin_effect({"injector": "of a newer release"})
    killed.close()
    assert left_in(state_dir) == [{"injector": "of a newer release"}]
