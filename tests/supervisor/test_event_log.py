# SPDX-License-Identifier: Apache-2.0
"""The log on a real disk: what is in it survives, and what cannot be right is said so."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from supervisor.control import PROGRESS_S, RETRY_RECORDS, ControllerCore
from supervisor.decision.controller import BaseController
from supervisor.decision.state import State
from supervisor.event_log import (
    EventLog,
    LogBusy,
    LogDamaged,
    LogDeposed,
    LogError,
    LogFull,
    LogTooNew,
    record_of,
)
from supervisor.execution import Executor, Perform
from supervisor.values import (
    Event,
    EventType,
    Evidence,
    HostInfo,
    LauncherState,
    Outcome,
    OutcomeStatus,
    Progress,
    Request,
    WorkloadInfo,
)

HOST = HostInfo(id="h1", name="n1", workload="train")
CHANGES = (("hosts", "h1", HOST),)


def core(log: EventLog, monotonic: float = 0.0) -> ControllerCore:
    return ControllerCore(BaseController(), log, monotonic)


def test_a_reopened_log_gives_the_state_back_and_its_clock_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with EventLog.open(path) as log:
        assert log.epoch == 1
        first = core(log, monotonic=5000.0)
        first.take(WorkloadInfo(workload="train", max_in_job_restarts=1), 5001.0)
        first.take(HOST, 5002.0)
        first.take(Progress(workload="train", step=10), 5010.0)
        evidence = (Evidence(id="e", witness="test"),)
        first.take(
            Event(id="1", type=EventType.WORKER_HB, evidence=evidence, workload="train", host="h1"), 5030.0
        )
        (command,) = first.take(None, 5040.0)
        state = first.state
    with EventLog.open(path) as log:
        assert log.epoch == 2
        # The machine was started again, or it is another one: its monotonic clock begins anywhere.
        second = core(log, monotonic=3.0)
        assert second.state == state
        assert second.now == 40.0
        (again,) = second.resume()
        assert (again.id, again.epoch) == (command.id, 2)
        assert second.wake_after(3.0) is None  # it waits for the outcome
        assert any("in_job_reset c1" in note for _, note in log.history())


def test_a_second_controller_on_the_machine_is_refused(tmp_path: Path) -> None:
    with EventLog.open(tmp_path / "log"), pytest.raises(LogBusy, match="is open in another controller"):
        EventLog.open(tmp_path / "log")
    EventLog.open(tmp_path / "log").close()


def test_a_controller_that_lost_its_lock_without_a_word_cannot_write(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with EventLog.open(path) as log:
        (tmp_path / "log.lock").unlink()
        with EventLog.open(path), pytest.raises(LogDeposed, match=r"later controller \(epoch 2 after 1\)"):
            log.append([record_of(1.0, HOST, CHANGES, ())])


def test_a_log_that_is_older_than_its_fleet_begins_above_the_epoch_that_refused_it(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with EventLog.open(path) as log:
        restored = core(log)
        restored.take(HOST, 1.0)
        evidence = (Evidence(id="e", witness="operator", text="alice"),)
        cordon = Event(id="1", type=EventType.OPERATOR, evidence=evidence, host="h1", request=Request.CORDON)
        (command,) = restored.take(cordon, 2.0)
        executor = Executor()
        executor.submit(replace(command, epoch=9, id="later"), 0.0)
        (fenced,) = executor.submit(command, 1.0)
        assert isinstance(fenced, Outcome)
        assert (fenced.status, fenced.epoch) == (OutcomeStatus.FENCED, 9)
        # Not yet: the other controller may be the one that is in office.
        restored.take(fenced, 3.0)
        assert (log.epoch, restored.resume()) == (1, ())
    for epoch in (10, 11):
        with EventLog.open(path) as log:
            assert log.epoch == epoch
            (again,) = core(log).take(replace(cordon, id=f"again{epoch}"), 4.0)
            assert again.epoch == epoch
            assert executor.submit(again, 4.0) == [Perform(command=again, number=1)]


def test_a_log_of_a_newer_release_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "log"
    EventLog.open(path).close()
    with sqlite3.connect(path) as database:
        database.execute("UPDATE meta SET value = 2 WHERE key = 'format'")
    database.close()
    with pytest.raises(LogTooNew, match=r"has format 2, this release reads up to 1.*newer release"):
        EventLog.open(path)
    database = sqlite3.connect(path)
    assert dict(database.execute("SELECT key, value FROM meta")) == {"format": 2, "epoch": 1}
    database.close()


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE records SET body = replace(body, 'h1', 'h2')",
        "UPDATE records SET body = '{', crc = 3252684951",
        'UPDATE records SET body = \'{"changes":[["hosts","h1",{"id":""}]]}\', crc = 0',
    ],
)
def test_a_record_that_is_not_what_was_written_is_said_so(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "log"
    with EventLog.open(path) as log:
        log.append([record_of(1.0, HOST, CHANGES, ())])
    with sqlite3.connect(path) as database:
        database.execute(damage)
    database.close()
    with pytest.raises(LogDamaged, match=r"is damaged: .*Move it away and start again"):
        EventLog.open(path)


def test_a_file_that_is_no_log_and_a_place_where_none_can_be_are_said_so(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"no database at all" * 500)
    with pytest.raises(LogDamaged, match="is damaged"):
        EventLog.open(tmp_path / "log")
    with pytest.raises(LogError, match="cannot be locked: No such file or directory"):
        EventLog.open(tmp_path / "missing" / "log")


def test_torn_pages_are_noticed(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with EventLog.open(path) as log:
        for number in range(200):
            log.append([record_of(float(number), HOST, CHANGES, ("x" * 100,))])
    content = bytearray(path.read_bytes())
    content[8192:16384] = b"\xff" * 8192
    path.write_bytes(bytes(content))
    with pytest.raises(LogDamaged):
        EventLog.open(path)


def test_a_full_disk_decides_nothing_and_is_over_when_there_is_room(tmp_path: Path) -> None:
    with EventLog.open(tmp_path / "log") as log:
        controller = core(log)
        controller.take(WorkloadInfo(workload="train"), 1.0)
        before = controller.state
        database = log._connection
        (pages,) = database.execute("PRAGMA page_count").fetchone()
        database.execute(f"PRAGMA max_page_count = {pages}")
        many = [HostInfo(id=f"h{n}", name="n" * 200) for n in range(100)]
        while len(controller.state.hosts) < 99:
            before = controller.state
            try:
                controller.take(many[len(before.hosts)], 2.0)
            except LogFull:
                break
        with pytest.raises(LogFull, match=r"the disk is full.*nothing is decided"):
            controller.take(many[99], 2.0)
        assert controller.state == before
        database.execute("PRAGMA max_page_count = 100000")
        for host in many:
            controller.take(host, 3.0)
        state = controller.state
    with EventLog.open(tmp_path / "log") as log:
        assert log.replayed.state == state


def test_old_records_are_replaced_by_a_snapshot_that_gives_the_same_state(tmp_path: Path) -> None:
    with EventLog.open(tmp_path / "log", compact_after=10, keep=5) as log:
        controller = core(log)
        for step in range(1, 60):
            controller.take(WorkloadInfo(workload="train", max_workload_restarts=step), float(step))
        state = controller.state
        (count,) = log._connection.execute("SELECT count(*) FROM records").fetchone()
        assert count <= 10 + 5
    with EventLog.open(tmp_path / "log") as log:
        assert log.replayed.state == state
        assert log.replayed.records < 10
        assert log.replayed.now == 59.0


def test_a_snapshot_that_fails_takes_no_decision_back_and_is_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    database = sqlite3.connect(":memory:")
    try:
        log = EventLog(database, compact_after=10)
        controller = core(log)
        database.execute(
            "CREATE TRIGGER full BEFORE INSERT ON snapshots BEGIN SELECT RAISE(FAIL, 'disk is full'); END"
        )
        for step in range(1, 30):
            controller.take(WorkloadInfo(workload="train", max_workload_restarts=step), float(step))
            assert controller.state.workloads["train"].max_workload_restarts == step
        assert caplog.text.count("no snapshot was made") == 1
        database.execute("DROP TRIGGER full")
        for step in range(30, 30 + RETRY_RECORDS):
            controller.take(WorkloadInfo(workload="train", max_workload_restarts=step), float(step))
        assert log.since_snapshot < RETRY_RECORDS
        assert EventLog(database).replayed.state == controller.state
        # A controller that was replaced must end, wherever it notices.
        with pytest.raises(LogDeposed):
            controller.take(WorkloadInfo(workload="train", max_workload_restarts=1000), 1000.0)
    finally:
        database.close()


def test_steps_alone_are_written_now_and_then_and_with_each_decision(tmp_path: Path) -> None:
    def written(log: EventLog) -> list[str]:
        return [one.record.kind for one in log.newest(limit=100)]

    with EventLog.open(tmp_path / "log") as log:
        first = core(log)
        first.take(WorkloadInfo(workload="train"), 1.0)
        for step in range(1, 20):
            first.take(Progress(workload="train", step=step), 1.0 + step / 4)
            first.take(Progress(workload="other", step=step), 1.0 + step / 4)
        assert first.state.progress["train"].step == 19
        assert written(log) == ["WorkloadInfo"]
        first.take(HOST, 6.0)
        assert written(log) == ["WorkloadInfo", "Progress", "Progress", "HostInfo"]
        first.take(Progress(workload="train", step=20), 7.0)
        first.take(None, 6.0 + PROGRESS_S)
        assert written(log)[4:] == ["Progress"]
        first.take(Progress(workload="train", step=21), 17.0)
        first.flush()
        state = first.state
    with EventLog.open(tmp_path / "log") as log:
        assert core(log).state == state


WRITER = """
import sys
from pathlib import Path
from supervisor.control import ControllerCore
from supervisor.decision.controller import BaseController
from supervisor.event_log import EventLog
from supervisor.values import WorkloadInfo

log = EventLog.open(Path(sys.argv[1]), compact_after=7)
core = ControllerCore(BaseController(), log, 0.0)
for step in range(1, 1_000_000):
    core.take(WorkloadInfo(workload="train", max_workload_restarts=step), float(step))
    print(step, flush=True)
"""


def test_what_an_append_returned_for_survives_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "log"
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    for line in writer.stdout:
        if int(line) >= 30:
            writer.send_signal(signal.SIGKILL)
            break
    last = max([30, *(int(line) for line in writer.stdout if line.endswith("\n"))])
    writer.wait(timeout=30)
    writer.stdout.close()
    with EventLog.open(path) as log:
        assert log.replayed.state.workloads["train"].max_workload_restarts in (last, last + 1)
        assert log.epoch == 2


def test_a_record_is_readable_without_this_program(tmp_path: Path) -> None:
    with EventLog.open(tmp_path / "log") as log:
        log.append([record_of(1.0, HOST, CHANGES, ("a note",))])
    database = sqlite3.connect(tmp_path / "log")
    kind, body = database.execute("SELECT kind, body FROM records").fetchone()
    database.close()
    assert kind == "HostInfo"
    assert json.loads(body)["given"]["id"] == "h1"
    assert State.empty() != State.empty().with_changes(CHANGES)


def stuck(kind: EventType, host: str, attempt: int) -> Event:
    name = f"s:{kind.value}:{host}:{attempt}"
    found = Evidence(id=f"{name}/0", witness="worker", text="rank 3 has finished no step for 300 s")
    at_it = LauncherState.RESTARTING if kind is EventType.WORKER_HB else LauncherState.UNKNOWN
    return Event(
        id=name, type=kind, evidence=(found,), workload="train", host=host, ranks=(3,), attempt=attempt,
        launcher=at_it,
    )  # fmt: skip


#: More by hand: `RESILIENCY_HOURS=168 python -m pytest tests/supervisor/test_event_log.py -k stuck`.
HOURS = float(os.environ.get("RESILIENCY_HOURS", "0.5"))


def test_a_job_that_is_stuck_in_a_frozen_fleet_for_days_takes_little_of_the_disk(tmp_path: Path) -> None:
    """Its launchers restart the ranks in vain, and each look is written down."""
    frozen = Event(
        id="p1", type=EventType.OPERATOR, request=Request.FREEZE,
        evidence=(Evidence(id="p1/0", witness="operator"),),
    )  # fmt: skip
    options = {"compact_after": 100, "most_bytes": 1 << 20} if HOURS < 1 else {}
    path, largest = tmp_path / "log", 0
    with EventLog.open(path, **options) as log:
        controller = core(log)
        controller.take(WorkloadInfo(workload="train", replicas=8, max_in_job_restarts=3), 0.0)
        controller.take_all((HostInfo(id=f"h{n}", name=f"n{n}", workload="train") for n in range(8)), 0.0)
        controller.take(frozen, 0.0)
        for minute in range(round(HOURS * 60)):
            for kind in (EventType.WORKER_HB, EventType.HANG):
                controller.take_all((stuck(kind, f"h{n}", minute) for n in range(8)), minute * 60.0)
            for look in range(1, 12):
                controller.take(None, minute * 60.0 + 5.0 * look)
            largest = max(largest, path.stat().st_size)
        (incident,) = controller.state.incidents.values()
        assert len(incident.reports) == 16
        assert {report.attempt for report in incident.reports} == {minute}
    assert largest < (64 << 20 if HOURS >= 1 else 6 << 20)  # a snapshot, and twice what may stay
    with EventLog.open(path) as log:
        assert log.replayed.state == controller.state
