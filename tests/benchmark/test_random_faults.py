# SPDX-License-Identifier: Apache-2.0
"""`--sim-fault-desc random`: all ranks draw the same faults, and the struck one injures itself alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import flags
import pytest
from random_faults import draw_faults, possible_kinds

from resiliency.events import EventType
from resiliency.goodput_measure.reader import read_events
from resiliency.proc_stat import stat_fields
from simulator.faults import RULES, Kind, seconds
from tests.simulator.disks import small_disk  # noqa: F401 - a fixture
from tests.waiting import wait_until_equal

from .conftest import BENCHMARK, LAUNCHER_VARIABLES

ROOT = Path(__file__).parents[2]
JOB = f"random-faults-{os.getpid()}"
#: Attempts, ranks, kinds and times as a rank draws them.
DRAW = """
import flags
for each in flags.parse(["--sim-fault-desc=random,20"]).random_faults:
    print(each.attempt, *each.fault.row)
"""
#: A rank that says that it trains, then waits for the end of its input.
RANK = """
import sys
from random_faults import RandomFault, RankSimulators
from resiliency.events import EventStream, EventType, FileSink, events_path
from resiliency.runtime import RunInfo
from simulator.faults import Kind, PlannedFault

kind, lasts_us, value = Kind(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) or None
fault = PlannedFault(at_us=0, kind=kind, node=3, duration_us=lasts_us, value=value,
                     gpu=None if kind is Kind.MEMORY else 0)
info = RunInfo.from_env()
with EventStream(info, [FileSink(events_path(info))]) as events:
    simulators = RankSimulators([RandomFault(attempt=2, fault=fault)], info)
    simulators.attach(events)
    events.emit(EventType.INITIALIZED)
    print("trains", flush=True)
    sys.stdin.read()
    simulators.close()
"""


@pytest.fixture(autouse=True)
def _started_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")


def test_each_attempt_has_one_fault_of_a_kind_that_this_job_can_have() -> None:
    found = flags.parse(["--sim-fault-desc=random,20"]).random_faults
    assert found == flags.parse(["--sim-fault-desc=random,20,seed=42,duration=30"]).random_faults
    assert found != flags.parse(["--sim-fault-desc=random,20,seed=43"]).random_faults
    assert [each.attempt for each in found] == list(range(100))
    assert {each.fault.node for each in found} == {0, 1, 2, 3}
    assert {each.fault.kind for each in found} == set(possible_kinds(""))
    assert 14 < sum(each.fault.at_us for each in found) / 100e6 < 26
    lasts = {each.fault.duration_us for each in found if RULES[each.fault.kind].lasts}
    assert lasts == {30_000_000}
    shorter = flags.parse(["--sim-fault-desc=random,20,duration=1.5"]).random_faults
    assert {each.fault.duration_us for each in shorter} == {0, 1_500_000}


def test_every_kind_that_is_possible_is_drawn() -> None:
    found = draw_faults("random,20,disk_dir=/disk", 4, lambda disk_dir: list(Kind) if disk_dir else [])
    assert {each.fault.kind for each in found} == set(Kind)
    assert {each.disk_dir for each in found} == {"/disk"}


def test_hosts_that_cannot_do_the_same_agree_on_rank_attempt_and_time() -> None:
    def places(kinds: list[Kind]) -> list[tuple[int, int, int]]:
        found = draw_faults("random,20", 4, lambda _: kinds)
        return [(each.attempt, each.fault.node, each.fault.at_us) for each in found]

    assert places(list(Kind)) == places([Kind.KILL, Kind.STOP, Kind.MEMORY])


def test_kinds_that_are_impossible_here_are_left_out_and_named(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    small_disk: Path,  # noqa: F811
) -> None:
    assert {Kind.KILL, Kind.STOP, Kind.MEMORY} <= set(possible_kinds(""))
    assert not {Kind.DISK_FULL, Kind.HOST_KILL, Kind.NETWORK_CUT} & set(possible_kinds(""))
    assert "kind disk_full are left out: --disk_dir names no directory" in caplog.text
    assert "kind host_kill are left out: no launcher has started this process" in caplog.text
    assert Kind.DISK_FULL in possible_kinds(str(small_disk))
    monkeypatch.setenv("JOB_IDENTIFIER", JOB)
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert Kind.HOST_KILL not in possible_kinds("")
    assert "kind host_kill are left out: the job has one host" in caplog.text
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert Kind.HOST_KILL in possible_kinds("")
    # As of a host without a kernel log for this user.
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert not {Kind.XID, Kind.XID_CRASH} & set(possible_kinds(""))
    assert "kind xid are left out: the kernel log /dev/kmsg cannot be written" in caplog.text


def test_the_page_has_every_kind() -> None:
    page = (ROOT / "docs" / "testing.md").read_text().partition("| Drawn where |")[2].partition("\n\n")[0]
    assert all(f"`{kind.value}`" in page for kind in Kind)


def test_all_ranks_draw_the_same_faults() -> None:
    drawn = set()
    for rank, hashes in (("0", "1"), ("3", "2")):
        env = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{BENCHMARK}:{ROOT}", "PYTHONHASHSEED": hashes}
        env |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
        done = subprocess.run(
            [sys.executable, "-c", DRAW], env=env, capture_output=True, text=True, timeout=120, check=True
        )
        drawn.add(done.stdout)
    here = flags.parse(["--sim-fault-desc=random,20"]).random_faults
    lines = [" ".join((str(each.attempt), *each.fault.row)) for each in here]
    assert drawn == {"".join(f"{line}\n" for line in lines)}
    assert seconds(here[0].fault.at_us) in lines[0]


class Ranks:
    """Ranks of one job: `start` starts rank 3 or another one in attempt 2."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self.started: list[subprocess.Popen[str]] = []

    def start(self, kind: Kind, lasts_us: int = 0, value: int = 0, rank: int = 3) -> subprocess.Popen[str]:
        env = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{BENCHMARK}:{ROOT}", "JOB_IDENTIFIER": JOB}
        env |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
        env |= {"RESILIENCY_RUN_DIR": str(self._run_dir), "TORCHELASTIC_RESTART_COUNT": "2"}
        process = subprocess.Popen(
            [sys.executable, "-c", RANK, kind.value, str(lasts_us), str(value)],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "trains\n"
        return process

    def injected(self) -> list[tuple[object, int | None]]:
        """Kind and rank of the faults that happened."""
        log = self._run_dir / f"{JOB}-events.jsonl"
        events = read_events(log, progress=False) if log.exists() else ()
        return [
            (event.fields["kind"], event.rank) for event in events if event.type is EventType.FAULT_INJECTED
        ]


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    ranks = Ranks(tmp_path)
    yield ranks
    for process in ranks.started:
        process.kill()
        process.communicate()


def test_a_killed_rank_dies_alone(ranks: Ranks) -> None:
    other = ranks.start(Kind.KILL, rank=1)
    struck = ranks.start(Kind.KILL)
    assert struck.wait(120) == -signal.SIGKILL
    wait_until_equal(ranks.injected, [("kill", 3)])
    other.communicate(timeout=120)
    assert other.returncode == 0


def test_a_stopped_rank_goes_on_by_itself(ranks: Ranks) -> None:
    struck = ranks.start(Kind.STOP, lasts_us=1_000_000)
    wait_until_equal(ranks.injected, [("stop", 3)])
    # It reads on only once it was continued.
    struck.communicate(timeout=120)
    assert struck.returncode == 0


def test_a_rank_that_ends_takes_its_memory_pressure_along(ranks: Ranks) -> None:
    struck = ranks.start(Kind.MEMORY, lasts_us=3_000_000_000, value=1)
    wait_until_equal(ranks.injected, [("memory", None)])  # its host is struck
    struck.communicate(timeout=120)
    assert struck.returncode == 0
    # It waited for its simulator, whose helpers end with it.
    wait_until_equal(lambda: _processes_of(struck.pid), [])


def _processes_of(rank: int) -> list[str]:
    """Commands of processes that were started by a rank's simulator and still live."""
    found = []
    for name in os.listdir("/proc"):
        try:
            command = Path("/proc", name, "cmdline").read_bytes() if name.isdecimal() else b""
            env = Path("/proc", name, "environ").read_bytes() if command else b""
        except OSError:
            continue
        alive = (stat_fields(int(name)) or ["Z"])[0] != "Z" if command else False
        if alive and f"JOB_IDENTIFIER={JOB}".encode() in env and int(name) != rank:
            found.append(command.decode())
    return found
