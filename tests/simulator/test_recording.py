# SPDX-License-Identifier: Apache-2.0
"""From the event log of a job to the schedule that the simulator draws from its failures."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from resiliency.events import EventType, JsonValue, RunEvent
from resiliency.launch.health.causes import Cause
from simulator import recording
from simulator.command_line import parse
from simulator.faults import Kind, PlannedFault
from simulator.schedule import schedule
from simulator.simulator_entrypoint import main

BEGIN = datetime(2026, 1, 31, tzinfo=timezone.utc)


class Job:
    """Writes the events of a job with two hosts of four ranks as launchers and ranks do; times in seconds."""

    def __init__(self, name: str = "demo") -> None:
        self.name, self.attempt, self.events = name, 0, list[RunEvent]()

    def emit(
        self, type: EventType, at: float, *, rank: int | None = None, node: int = 0, **fields: JsonValue
    ) -> None:
        node = node if rank is None else rank // 4
        event = RunEvent(
            type=type,
            time=BEGIN + timedelta(seconds=at),
            job_name=self.name,
            host=f"host{node}",
            node_rank=node,
            rank=rank,
            attempt=self.attempt,
            fields=fields,
        )
        self.events.append(event)

    def start(self, at: float) -> None:
        for node in (0, 1):
            self.emit(EventType.WORKERS_STARTED, at, node=node, ranks=[4 * node + rank for rank in range(4)])
        for rank in range(8):
            self.emit(EventType.PROCESS_STARTED, at, rank=rank)

    def step(self, at: float) -> None:
        for rank in range(8):
            self.emit(EventType.STEP_FINISHED, at, rank=rank)

    def lose(
        self, at: float, rank: int, cause: str = "", ranks: Sequence[int] = (), **more: JsonValue
    ) -> None:
        """A rank is noticed to be dead at `at`; another attempt begins ten seconds later."""
        self.emit(EventType.FAULT_DETECTED, at, rank=rank, cause="SIGABRT", exit_code=-6)
        self.emit(EventType.FAULT_DETECTED, at + 0.1, rank=7, cause="SIGABRT", exit_code=-6)
        if cause:
            self.emit(EventType.DIAGNOSED, at + 0.2, cause=cause, ranks=list(ranks), **more)
        self.emit(EventType.WORKERS_STOPPED, at + 1)
        self.attempt += 1
        self.start(at + 10)

    def write(self, path: Path, *, node: int | None = None) -> Path:
        events = [event for event in self.events if node in (None, event.node_rank)]
        path.write_text("".join(f"{event.to_json()}\n" for event in events))
        return path


@pytest.fixture
def job() -> Job:
    """A bad day: a crash, a hang, a lost host, a GPU, and what was injected, among other stops."""
    job = Job()
    job.emit(EventType.JOB_STARTED, -20)
    job.start(0)
    job.step(100)
    job.lose(103, 5)  # nobody has diagnosed it
    job.step(200)
    job.emit(EventType.HANG_DETECTED, 230, cause="rank 2 stands still", ranks=[2], hosts=["host0"])
    job.step(240)  # it went on by itself
    job.emit(EventType.HANG_DETECTED, 300, cause="rank 3 stands still", ranks=[3], hosts=["host0"])
    job.lose(310, 6, cause="hang", ranks=[3])
    job.step(400)
    job.emit(EventType.FAULT_DETECTED, 460, cause="hosts left: host1")
    job.emit(EventType.DIAGNOSED, 461, cause="host_lost", ranks=[], hosts=["host1"])
    job.start(480)
    job.step(500)
    job.lose(502, 4, cause="gpu_fault", ranks=[1], hosts=["host0"])
    # Injected by the simulator, then noticed; and a slow rank, which interrupted nothing.
    job.emit(
        EventType.FAULT_INJECTED, 599, rank=6, fault="stop of ...", kind="stop", duration_s=45.5, value=None
    )
    job.lose(600, 6, cause="hang", ranks=[6])
    job.step(620)
    job.emit(
        EventType.FAULT_INJECTED,
        700,
        rank=0,
        fault="slow",
        kind="slow",
        cause="CPU",
        duration_s=30.0,
        value=25,
    )
    job.step(710)
    job.step(720)
    job.emit(EventType.FAULT_INJECTED, 800, rank=2, fault="rank_hung,step=9,rank=2")
    job.lose(805, 2, cause="killed", ranks=[2])
    # Hosts that join stop the workers, too.
    job.step(850)
    job.emit(EventType.WORKERS_STOPPED, 860)
    job.start(870)
    job.step(900)
    job.emit(EventType.WORKERS_STOPPED, 901)
    job.emit(EventType.JOB_TERMINATED, 902)
    return job


ROWS = [
    "100.000000,kill,1,1,,,SIGABRT",
    "240.000000,stop,0,3,,,hang",
    "400.000000,host_kill,1,,,,host_lost",
    "500.000000,xid_crash,0,1,,,gpu_fault",
    "599.000000,stop,1,2,45.500000,,stop of ...",
    "700.000000,slow,0,0,30.000000,25,CPU",
    '800.000000,stop,0,2,,,"rank_hung,step=9,rank=2"',
]


def test_the_schedule_of_a_trace_has_the_failures_of_the_log(job: Job, tmp_path: Path) -> None:
    logs = [job.write(tmp_path / f"host{node}.jsonl", node=node) for node in (1, 0)]
    out = tmp_path / "trace.csv"
    assert main(["trace", *map(str, logs), "--output", str(out)]) == 0
    about, size, _, *rows = out.read_text().splitlines()
    assert about == "# 7 failures of job demo"
    assert rows == ROWS
    flags = size.removeprefix("# of a job with ").split()
    assert flags == ["--nnodes", "2", "--gpus_per_node", "4", "--duration_s", "903"]

    def played(*more: str) -> list[PlannedFault]:
        options = parse(["--job", "j", "--trace", str(out), *flags, *more], {})
        return schedule(options.sources, options.shape)

    faults = played()
    assert [(fault.at_us / 1e6, fault.kind.value, fault.node, fault.gpu) for fault in faults] == [
        (100, "kill", 1, 1),
        (240, "stop", 0, 3),
        (400, "host_kill", 1, None),
        (500, "xid_crash", 0, 1),
        (599, "stop", 1, 2),
        (700, "slow", 0, 0),
        (800, "stop", 0, 2),
    ]
    assert [fault.duration_us / 1e6 for fault in faults] == [0, 30, 0, 0, 45.5, 30, 30]
    assert faults[5].value == 25
    assert [fault.at_us * 60 for fault in played("--speed", "60")] == pytest.approx(
        [fault.at_us for fault in faults], abs=60
    )


def test_what_the_log_does_not_tell_is_left_to_the_draw_or_a_flag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job()
    job.emit(EventType.WORKERS_STARTED, 0)
    job.emit(EventType.FAULT_DETECTED, 50, cause="the supervisor asked for\na restart")
    log = job.write(tmp_path / "log")
    assert main(["trace", str(log)]) == 0
    row = "50.000000,kill,,,,,the supervisor asked for a restart"
    assert capsys.readouterr().out.splitlines()[1:] == [
        "# of a job with --duration_s 51",
        "time_s,kind,node,gpu,duration_s,value,cause",
        row,
    ]
    assert main(["trace", str(log), "--default-kind", "host_kill"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == row.replace("kill", "host_kill")


def test_a_job_without_failures_is_an_empty_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = Job()
    job.start(0)
    assert main(["trace", str(job.write(tmp_path / "log"))]) == 0
    told = capsys.readouterr()
    assert told.out.splitlines()[0] == "# 0 failures of job demo"
    assert "job demo had no failure" in told.err


def test_a_torn_line_is_named_and_costs_nothing_else(
    job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = job.write(tmp_path / "log")
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join([*lines[:3], lines[3][:40] + "\n", *lines[3:]]))
    assert main(["trace", str(log)]) == 0
    told = capsys.readouterr()
    assert told.out.splitlines()[3:] == ROWS
    assert f"warning: 1 of {len(lines) + 1} lines are no whole event, the first {log}:4: " in told.err


@pytest.mark.parametrize(
    ("text", "flags", "sentence"),
    [
        (None, [], "cannot read the event log '{log}': No such file or directory"),
        ("", [], "{log}: there is no event of a job; jobs: none"),
        ("time_s,kind\n1,kill\n", [], "2 of 2 lines are no whole event, the first {log}:1: "),
        ("full", ["--job", "other"], "{log}: there is no event of job other; jobs: demo (1 events)"),
        (
            "two",
            [],
            "{log}: there are several jobs: demo (1 events), next (1 events).  Choose one with --job.",
        ),
        ("goodput", [], "{log}: this is a goodput log, which has no failures.  Name the full event log"),
        ("full", ["--default_kind", "tired"], "'tired' is no kind of fault"),
        ("full", ["--gpus_per_node", "0"], "--gpus_per_node must be 1 or more, found 0"),
        ("full", ["--output", "/none/trace.csv"], "--output /none/trace.csv cannot be written: No such file"),
        ("full", ["--kind", "kill"], "unrecognized arguments: --kind kill"),
    ],
)
def test_a_log_or_a_flag_that_cannot_be_is_refused(
    text: str | None,
    flags: list[str],
    sentence: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    log = tmp_path / "log"
    jobs = {"full": ["demo"], "two": ["demo", "next"], "goodput": ["demo"]}.get(text or "", [])
    if text is not None:
        log.write_text("" if jobs else text)
    for name in jobs:
        job = Job(name)
        job.emit(EventType.JOB_STARTED if text == "goodput" else EventType.WORKERS_STARTED, 0)
        log.write_text(log.read_text() + job.write(tmp_path / name).read_text())
    assert main(["trace", str(log), *flags]) == 2
    assert sentence.format(log=log) in capsys.readouterr().err


def test_every_diagnosis_that_is_looked_for_is_one_of_a_launcher() -> None:
    assert {*recording._BY_DIAGNOSIS, *recording._UNDIAGNOSED} <= {cause.value for cause in Cause}
    assert set(recording._BY_DIAGNOSIS.values()) <= set(Kind)
