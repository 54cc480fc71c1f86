# SPDX-License-Identifier: Apache-2.0
"""A simulator that is killed at any point leaves nothing that the next start does not undo."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from resiliency.errors import ConfigError
from simulator import session
from simulator.command_line import parse
from simulator.faults import RULES
from simulator.injectors.processes import CpuQuota, Niceness, Stop, _group_of, pack
from simulator.job import Job, Process
from simulator.journal import Journal, Record, default_directory
from simulator.player import recover
from simulator.simulator_entrypoint import main
from tests.simulator.conftest import StartWorker, as_root, identity, state_of
from tests.simulator.dying import POINTS, FileGpus, build
from tests.waiting import wait_until, wait_until_equal

ROOT = Path(__file__).parents[2]
JOB = f"simulator-recovery-{os.getpid()}"


def die(point: str, state_dir: Path, setting: dict[str, Any]) -> None:
    """Run a simulator that is killed at `point`; every other end is an error."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.simulator.dying", point, str(state_dir), json.dumps(setting)],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "DYING": str(state_dir)},
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


@dataclass(frozen=True)
class Scene:
    """A job that is ready to be injured.

    Attributes:
        setting: of the simulator that dies; see `build`.
        state: what the effect changes, and nothing else.
        ends_by_itself: with its simulator, before the next start.
    """

    setting: dict[str, Any]
    state: Callable[[], object]
    ends_by_itself: bool = False


def to_stop(request: pytest.FixtureRequest) -> Scene:
    worker = request.getfixturevalue("start_worker")(JOB)
    return Scene({"kind": "stop", "fault": {"gpu": 0}}, lambda: state_of(worker) == "T")


def to_nice(request: pytest.FixtureRequest) -> Scene:
    if why := Niceness(Job(JOB, 0)).refusal():
        pytest.skip(why)
    worker = request.getfixturevalue("start_worker")(JOB)
    if os.getpriority(os.PRIO_PROCESS, worker.pid) >= 19:
        pytest.skip("the tests run with niceness 19 themselves")
    setting = {"kind": "slow", "fault": {"gpu": 0, "value": 25}}
    return Scene(setting, lambda: os.getpriority(os.PRIO_PROCESS, worker.pid))


def to_limit(request: pytest.FixtureRequest) -> Scene:
    if why := CpuQuota(Job(JOB, 0)).refusal():
        pytest.skip(why)
    worker = request.getfixturevalue("start_worker")(JOB)
    seen: set[Path] = set()

    def groups() -> object:
        now = _group_of(worker.pid)
        assert now is not None
        seen.add(now)
        return now, {each for each in seen if each.exists()}

    return Scene({"kind": "slow", "fault": {"gpu": 0, "value": 25}}, groups)


def to_cap(request: pytest.FixtureRequest) -> Scene:
    worker = request.getfixturevalue("start_worker")(JOB)
    limits = request.getfixturevalue("tmp_path") / "limits.json"
    limits.write_text("[700000, 650000]")
    setting: dict[str, Any] = {"kind": "power_cap", "fault": {"gpu": 0, "value": 300}}
    setting |= {"gpus": str(limits), "pids": [worker.pid]}
    return Scene(setting, lambda: [FileGpus(limits).power_limit(gpu) for gpu in (0, 1)])


def to_press(request: pytest.FixtureRequest) -> Scene:
    request.getfixturevalue("start_worker")(JOB)
    state_dir = request.getfixturevalue("state_dir")
    setting = {"kind": "memory", "fault": {"value": 1}}
    return Scene(setting, lambda: started_by_simulator_of(state_dir), ends_by_itself=True)


def to_fill(request: pytest.FixtureRequest) -> Scene:
    request.getfixturevalue("start_worker")(JOB)
    disk = request.getfixturevalue("small_disk")
    setting = {"kind": "disk_full", "disk": str(disk), "fault": {"value": 0}}
    return Scene(setting, lambda: (os.listdir(disk), os.statvfs(disk).f_bavail))


def to_cut(request: pytest.FixtureRequest) -> Scene:
    worker = request.getfixturevalue("start_worker")(JOB, under=("unshare", "--net"))
    return Scene({"kind": "network_cut", "fault": {}}, lambda: rules(worker.pid))


#: By the name of the injector.
SCENES: dict[str, Callable[[pytest.FixtureRequest], Scene]] = {
    "stop": to_stop,
    "niceness": to_nice,
    "cpu_quota": to_limit,
    "power_cap": to_cap,
    "memory": to_press,
    "disk_full": to_fill,
    "network_cut": to_cut,
}
_MARKS = {"network_cut": as_root}


def test_every_effect_that_ends_has_a_scene() -> None:
    options = parse(["--undo_only", "--job", JOB], {})
    lasting = {kind for kind, rule in RULES.items() if rule.lasts}
    ours = [each for each in session.standard_injectors(Job(JOB, 0), options) if each.kinds & lasting]
    assert {each.name for each in ours} == set(SCENES)
    assert lasting <= frozenset().union(*(each.kinds for each in ours))


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("name", [pytest.param(name, marks=_MARKS.get(name, ())) for name in SCENES])
def test_nothing_is_left_of_an_effect(
    name: str, point: str, request: pytest.FixtureRequest, state_dir: Path
) -> None:
    scene = SCENES[name](request)
    setting = {"injector": name, "job": JOB} | scene.setting
    before = scene.state()
    die(point, state_dir, setting)
    # The effect lasts from its injection to its end.
    if point in ("injected", "ending") and not scene.ends_by_itself:
        wait_until(lambda: scene.state() != before, "the effect did not begin")
    else:
        wait_until_equal(scene.state, before)
    start_again(state_dir, setting, point)
    wait_until_equal(scene.state, before)


def rules(pid: int) -> str:
    command = ["nsenter", f"--net=/proc/{pid}/ns/net", "ip", "rule", "show"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def started_by_simulator_of(state_dir: Path) -> list[int]:
    """Living processes that a simulator with this directory has started; see `die`."""
    found = []
    for pid in (int(name) for name in os.listdir("/proc") if name.isdecimal()):
        with suppress(OSError):
            env = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if f"DYING={state_dir}".encode() in env and Process.of(pid) is not None:
                found.append(pid)
    return found


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
