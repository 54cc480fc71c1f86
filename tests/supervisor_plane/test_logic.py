# SPDX-License-Identifier: Apache-2.0
"""What is between the wire and the logic: news, commands for all hosts of a job, what happened lately."""

from __future__ import annotations

import asyncio
import sqlite3
from dataclasses import replace

import pytest

from supervisor.control import ControllerCore
from supervisor.decision.controller import BaseController, Input
from supervisor.decision.state import Flight, Incident
from supervisor.event_log import EventLog, Record
from supervisor.orchestrator import Answer
from supervisor.parts.host_commands import HostCommands
from supervisor.parts.journal import COMMANDS, INCIDENTS, NOTES, Journal
from supervisor.parts.sensor import News
from supervisor.parts.status import Surroundings, make_status
from supervisor.policy.thresholds import Thresholds
from supervisor.protocol.host_commands import HostCommand, HostCommandKind
from supervisor.values import (
    Command,
    CommandKind,
    DeviceState,
    Event,
    EventType,
    Evidence,
    HostInfo,
    Outcome,
    OutcomeStatus,
    Progress,
    Silence,
    WorkloadInfo,
)
from supervisor.view.status import Status
from tests.asynchronous import until

LIMITS = Thresholds(max_fruitless=2)


def host(name: str, workload: str = "job") -> HostInfo:
    return HostInfo(id=f"{name}.boot", name=name, workload=workload, workers_per_host=1)


def test_news_are_the_newest_of_each_thing_and_all_events() -> None:
    news = News()
    evidence = (Evidence(id="e", witness="stream"),)
    events = [Event(id=f"s:{n}", type=EventType.SCALE_UP, evidence=evidence) for n in range(2)]
    for told in (
        *(events[0], events[0], events[1]),
        *(host("a"), replace(host("a"), cordoned=True)),
        *(Progress(workload="job", step=1), Progress(workload="job", step=2)),
        *(Silence(frozen=True, silent=3, hosts=4), WorkloadInfo(workload="job")),
    ):
        news.add(told)
    seen = news.take()
    assert (seen.events, seen.hosts) == (tuple(events), (replace(host("a"), cordoned=True),))
    assert seen.progress == (Progress(workload="job", step=2),)
    assert seen.silence == Silence(frozen=True, silent=3, hosts=4)
    assert not news.arrived.is_set()
    assert news.take().events == ()


# ------------------------------------------------------------------------------------------- hosts of a job


class Streams:
    """Hosts that answer as a test says; those without an answer say nothing, others have no stream."""

    def __init__(self, commands: HostCommands, answers: dict[str, tuple[OutcomeStatus, str] | None]) -> None:
        self._commands, self._answers = commands, answers
        self.asked: list[tuple[str, HostCommand]] = []

    def try_send_command(self, name: str, command: HostCommand) -> bool:
        if name not in self._answers:
            return False
        self.asked.append((name, command))
        answer = self._answers[name]
        if answer is not None:
            epoch = 9 if answer[0] is FENCED else command.epoch
            outcome = Outcome(command=command.id, epoch=epoch, status=answer[0], text=answer[1])
            asyncio.get_running_loop().call_soon(self._commands.host_message, name, outcome)
        return True


DONE, FAILED, FENCED = OutcomeStatus.DONE, OutcomeStatus.FAILED, OutcomeStatus.FENCED


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        (
            {"a": (DONE, "attempt 3 ends"), "b": (DONE, "attempt 4 runs already")},
            Answer(status=DONE, text="attempt 3 ends"),
        ),
        ({"a": None, "b": (DONE, "ok")}, Answer(status=DONE, text="ok")),
        ({"a": (FAILED, "no launcher"), "b": (DONE, "ok")}, Answer(status=DONE, text="no launcher; ok")),
        ({"a": (FAILED, "no launcher"), "b": None}, Answer(status=FAILED, text="no launcher")),
        # A host that came from another fleet does not decide for its job; all of them do.
        ({"a": (FENCED, "epoch 9"), "b": (DONE, "ok")}, Answer(status=DONE, text="epoch 9; ok")),
        ({"a": (FENCED, "epoch 9"), "b": (FAILED, "x")}, Answer(status=FAILED, text="epoch 9; x")),
        ({"a": (FENCED, "9"), "b": (FENCED, "9")}, Answer(status=FENCED, text="9", epoch=9)),
        (
            {"a": (FENCED, "epoch 9"), "b": None},
            Answer(status=FAILED, text="none of 2 hosts of job answered within 0.05 s", passing=True),
        ),
        (
            {"a": None},
            Answer(status=FAILED, text="none of 2 hosts of job answered within 0.05 s", passing=True),
        ),
    ],
)
async def test_a_command_for_a_job_is_done_when_one_of_its_hosts_has_done_it(
    answers: dict[str, tuple[OutcomeStatus, str] | None], expected: Answer
) -> None:
    commands = HostCommands()
    streams = commands.streams = Streams(commands, answers)  # type: ignore[assignment]
    for name, workload in (("a", "job"), ("b", "job"), ("c", "other"), ("d", "")):
        commands.host_connected(host(name, workload), "x")
    command = Command(epoch=2, id="c1", kind=CommandKind.IN_JOB_RESET, workload="job")
    kind = HostCommandKind.RESTART_RANKS
    assert await commands.ask(command, kind, attempt=3, within_s=0.05) == expected
    assert {name for name, _ in streams.asked} == set(answers)  # type: ignore[attr-defined]
    assert {asked.attempt for _, asked in streams.asked} == {3}  # type: ignore[attr-defined]


async def test_a_job_does_not_wait_for_a_silent_host_where_another_has_done_it_but_stacks_are_of_all() -> (
    None
):
    commands = HostCommands()
    streams = Streams(commands, {"a": None, "b": (DONE, "rank 1: train.py:7")})
    commands.streams = streams  # type: ignore[assignment]
    for name in ("a", "b"):
        commands.host_connected(host(name), "x")
    command = Command(epoch=2, id="c1", kind=CommandKind.IN_JOB_RESET, workload="job")
    asking = commands.ask(command, HostCommandKind.RESTART_RANKS, attempt=3, within_s=3600)
    assert (await asking).status is DONE
    assert not commands._waiting
    stacks = asyncio.ensure_future(
        commands.ask(command, HostCommandKind.DUMP_STACKS, attempt=None, within_s=3600)
    )
    await until(
        lambda: len(streams.asked) == 4 and len(commands._waiting) == 1, "the hosts are not all asked"
    )
    assert not stacks.done()
    late = Outcome(command="c1", epoch=2, status=DONE, text="rank 0: train.py:9")
    commands.host_message("a", late)
    assert (await stacks).text == "rank 1: train.py:7; rank 0: train.py:9"


async def test_a_host_that_is_to_leave_is_asked_alone_and_one_that_is_gone_is_not_waited_for() -> None:
    commands = HostCommands()
    streams = Streams(commands, {"a": (DONE, "this host leaves the job"), "b": None})
    commands.streams = streams  # type: ignore[assignment]
    for name in ("a", "b"):
        commands.host_connected(host(name), "x")
    leaving = host("a").id
    swap = Command(epoch=2, id="c1", kind=CommandKind.HOT_SWAP, workload="job", host=leaving, spare="s.boot")
    asked = await commands.ask(swap, HostCommandKind.LEAVE, within_s=3600, only=leaving)
    assert asked == Answer(status=DONE, text="this host leaves the job")
    assert [name for name, _ in streams.asked] == ["a"]
    commands.host_lost("a", "x")
    assert (await commands.ask(swap, HostCommandKind.LEAVE, within_s=3600, only=leaving)).passing


async def test_a_job_without_connected_hosts_is_worth_another_try_and_a_stream_that_ends_is_no_answer() -> (
    None
):
    commands = HostCommands()
    streams = Streams(commands, {"a": None})
    commands.streams = streams  # type: ignore[assignment]
    command = Command(epoch=2, id="c1", kind=CommandKind.DUMP_STACKS, workload="job")
    kind = HostCommandKind.DUMP_STACKS
    none = await commands.ask(command, kind, attempt=None, within_s=60)
    assert (none.status, none.passing) == (FAILED, True)
    assert none.text == "no host of job is connected to the actuator"
    commands.host_connected(host("a"), "x")
    asking = asyncio.ensure_future(commands.ask(command, kind, attempt=None, within_s=60))
    await until(lambda: streams.asked, "the host is not asked")
    commands.host_lost("a", "x")
    ended = await asking
    assert (ended.status, ended.passing) == (FAILED, True)


# ------------------------------------------------------------------------------------------- the journal


class Brain:
    """A controller with its log and journal, at a time of the test's."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self.log = EventLog(database)
        self.core = ControllerCore(BaseController(LIMITS), self.log, 0.0)
        self.journal = Journal()
        for written in self.log.newest(limit=1000):
            self.journal.add(written.record)
        self.core.recorded = self.journal.add

    def take(self, now: float, *inputs: Input) -> None:
        self.core.take_all(inputs, now)

    def status(self, now: float) -> Status:
        around = Surroundings(
            epoch=self.log.epoch,
            uptime_s=now,
            shadow=False,
            log_problem="",
            parts=(),
            counters={},
            sights=None,
        )
        return make_status(self.core.state, self.core.at(now), LIMITS, self.journal, around)


def test_an_incident_is_shown_with_its_spans_also_after_its_end_and_after_a_restart() -> None:
    database = sqlite3.connect(":memory:")
    try:
        brain = Brain(database)
        job = WorkloadInfo(workload="job", max_in_job_restarts=2)
        brain.take(0.0, job, replace(host("a"), state=DeviceState.RUNNING))
        brain.take(1.0, Progress(workload="job", step=500))
        evidence = (Evidence(id="s:1/0", witness="launcher", text="rank 0: launcher: failed"),)
        lost = Event(
            id="s:1", type=EventType.WORKER_HB, evidence=evidence, workload="job", host="a.boot", ranks=(0,)
        )
        brain.take(10.0, lost)
        (opened,) = brain.status(11.0).incidents
        assert (opened.closed_age_s, opened.next_look_s) == (None, 1.0)
        assert [(span.name, span.age_s, span.seconds) for span in opened.spans] == [("gathered", 1.0, None)]
        brain.take(12.0, None)
        (command,) = brain.status(13.0).commands
        assert (command.kind, command.outcome, command.age_s) == (CommandKind.IN_JOB_RESET, None, 1.0)
        brain.take(14.0, Outcome(command=command.id, epoch=1, status=DONE, text="attempt 0 ends"))
        brain.take(17.0, Progress(workload="job", step=501, attempt=1))
        expected = brain.status(20.0)
        (closed,) = expected.incidents
        spans = [(span.name, span.seconds) for span in closed.spans]
        assert spans == [("gathered", 2.0), ("in_job_reset", 2.0), ("first step", 3.0)]
        assert (closed.closed_age_s, closed.reports[0].acted_on) == (3.0, True)
        assert expected.commands[0].seconds == 2.0
        job_status = expected.jobs[0]
        assert (job_status.in_job.left, job_status.best_step, job_status.incident) == (1, 501, "")
        assert expected.decisions[0].text.startswith("incident i1 closed")
        assert expected.hosts[0].connected is None
        assert Status.from_dict(expected.to_dict()) == expected
        # The log's clock stands while no controller runs.
        again = Brain(database).status(3.0)
        assert (again.incidents, again.commands) == (expected.incidents, expected.commands)
    finally:
        database.close()


def test_a_command_that_is_not_waited_for_is_shown_as_ended() -> None:
    journal = Journal()
    command = Command(epoch=1, id="c1", kind=CommandKind.IN_JOB_RESET, workload="job")
    journal.add(Record(2.0, "Tick", None, (("commands", "c1", Flight(command=command, at=2.0)),), ()))
    journal.add(Record(5.0, "Event", {}, (("commands", "c1", None),), ()))
    (past,) = journal.commands.values()
    assert past.outcome is not None
    assert (past.ended_at, past.outcome.status) == (5.0, OutcomeStatus.WITHDRAWN)


def test_a_journal_keeps_so_much_and_no_more() -> None:
    journal = Journal()
    for number in range(3 * COMMANDS):
        times = {"opened_at": 1.0, "reported_at": 1.0, "decide_at": 2.0}
        incident = Incident(id=f"i{number}", subject="job", **times)
        command = Command(epoch=1, id=f"c{number}", kind=CommandKind.WORKLOAD_RESET, workload="job")
        opened = (("incidents", "job", incident), ("commands", command.id, Flight(command=command, at=2.0)))
        journal.add(Record(2.0, "Tick", None, opened, (f"note {number}",)))
        outcome = Outcome(command=command.id, epoch=1, status=DONE).to_dict()
        closed = (("commands", command.id, None), ("incidents", "job", None))
        journal.add(Record(3.0, "Outcome", outcome, closed, ()))
    last = 3 * COMMANDS - 1
    assert (len(journal.incidents), len(journal.commands), len(journal.notes)) == (INCIDENTS, COMMANDS, NOTES)
    assert journal.incidents[f"i{last}"].closed_at == 3.0
    assert journal.commands[f"c{last}"].outcome == Outcome(command=f"c{last}", epoch=1, status=DONE)
    assert journal.notes[-1] == (2.0, f"note {last}")
