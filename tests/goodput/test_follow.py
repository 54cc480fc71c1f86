# SPDX-License-Identifier: Apache-2.0
"""Goodput of jobs while they run: tails of logs, live results, metrics, and several jobs at once."""

from __future__ import annotations

import json
import re
import signal
import socket
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from urllib.request import urlopen

import pytest

from resiliency.errors import ConfigError
from resiliency.events import EventType as E
from resiliency.events import RunEvent
from resiliency.goodput_measure.jobs import Fleet, JobEvents, JobResult, Options
from resiliency.goodput_measure.ledger import build_ledger
from resiliency.goodput_measure.live.figures import figures_of_result
from resiliency.goodput_measure.live.follow import LogTail, follow
from resiliency.goodput_measure.live.prometheus import as_metrics, serving, write_metrics
from resiliency.goodput_measure.reader import ReadStats
from resiliency.testing.clock import ManualClock
from resiliency.testing.processes import Command
from tests.goodput.story import Story, at, event, write_log

CALCULATOR = [sys.executable, "-m", "resiliency.goodput_measure.calculator"]
PATIENCE = 120.0


def failed_once(job: str = "demo") -> list[RunEvent]:
    story = Story(2).start().steps(12, save_every=4, hold=0.25).fault(1)
    events = story.start(restore=12).steps(3).finish().events
    return [RunEvent(**{**vars(one), "job_name": job}) for one in events]


def result_of(events: list[RunEvent]) -> JobResult:
    job = JobEvents("demo")
    for one in events:
        job.add_full(one)
    return job.result(Options())


def test_a_tail_gives_whole_new_lines_and_survives_rotation(tmp_path: Path) -> None:
    path, stats = tmp_path / "log", ReadStats()
    tail = LogTail(path, stats)
    first, second = event(0, E.JOB_STARTED).to_json(), event(1, E.JOB_TERMINATED).to_json()
    try:
        assert list(tail.poll()) == []  # the file is not there yet
        path.write_text(first + "\n" + second[:20])
        assert [one.type for one in tail.poll()] == [E.JOB_STARTED]
        assert list(tail.poll()) == []
        with path.open("a") as file:
            file.write(second[20:] + "\nno event\n")
        assert [one.type for one in tail.poll()] == [E.JOB_TERMINATED]
        assert stats.examples[0].startswith(f"{path}:3: ")
        assert (stats.lines, stats.unparsable) == (3, 1)
        path.rename(tmp_path / "old")
        path.write_text(first + "\n")
        assert [one.type for one in tail.poll()] == [E.JOB_STARTED]
        path.write_text("")  # shorter than what was read
        assert list(tail.poll()) == []
        path.write_text(second + "\n")
        assert [one.type for one in tail.poll()] == [E.JOB_TERMINATED]
    finally:
        tail.close()


def test_what_was_written_just_before_a_rotation_is_read_before_the_new_file(tmp_path: Path) -> None:
    path, tail = tmp_path / "log", LogTail(tmp_path / "log", ReadStats())
    first, second, third = (event(n, E.JOB_STARTED).to_json() + "\n" for n in range(3))
    try:
        path.write_text(first)
        assert len(list(tail.poll())) == 1
        with path.open("a") as file:
            file.write(second)
        path.rename(tmp_path / "old")
        path.write_text(third)
        assert [one.to_json() + "\n" for one in tail.poll()] == [second, third]
    finally:
        tail.close()


def test_a_log_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the event log"):
        list(LogTail(tmp_path, ReadStats()).poll())  # a directory


def test_a_job_is_measured_while_it_runs_and_until_it_ends(tmp_path: Path) -> None:
    path, clock, events = tmp_path / "log", ManualClock(at(0)), failed_once()
    written: Iterator[RunEvent] = iter(events)
    stages = iter([40, 0, len(events)])  # events that come in each pause

    def wait(seconds: float) -> bool:
        count = next(stages, 0)
        with path.open("a") as file:
            for _, one in zip(range(count), written, strict=False):
                file.write(one.to_json() + "\n")
                clock.advance(max(one.time - clock.now(), timedelta(0)))
        if count == 0:
            clock.advance(timedelta(seconds=30))  # nothing is written: a hang
        return False

    jobs = {"demo": JobEvents("demo")}
    found = list(follow([path], jobs, Options(), stats=ReadStats(), every_s=1.0, clock=clock, wait=wait))
    ledgers = [figures[0] for figures in found]
    assert len(ledgers) == 3
    assert ledgers[1].wall_us == ledgers[0].wall_us + 30_000_000
    assert (ledgers[1].goodput or 0) < (ledgers[0].goodput or 0)
    # The job ended: its wall time stops there, whatever the clock says.
    assert ledgers[2].totals == build_ledger(events).totals


def looks_until_the_end(path: Path, clock: ManualClock, most: int = 30) -> int:
    """How often a log that no longer changes is looked at, a minute apart."""
    pauses = 0

    def wait(seconds: float) -> bool:
        nonlocal pauses
        pauses += 1
        clock.advance(timedelta(minutes=1))
        return pauses >= most

    jobs = {"demo": JobEvents("demo")}
    list(follow([path], jobs, Options(), stats=ReadStats(), every_s=1.0, clock=clock, wait=wait))
    return pauses


@pytest.mark.parametrize("late", [E.CHECKPOINT_SAVED, E.RANK_FINISHED, E.STEP_FINISHED, E.DIAGNOSED])
def test_an_event_that_is_later_than_the_end_of_the_job_does_not_keep_it_running(
    late: E, tmp_path: Path
) -> None:
    events = [*failed_once(), event(3600, late, rank=0, step=15)]
    assert looks_until_the_end(write_log(tmp_path / "log", events), ManualClock(at(3600))) == 1


def test_a_job_of_two_hosts_runs_until_both_have_ended_it(tmp_path: Path) -> None:
    events = [*failed_once(), event(0, E.JOB_STARTED, host="host-1")]
    still = [*events, event(3600, E.STEP_FINISHED, rank=9, step=15, host="host-1")]
    # A host that was lost never says that it ended, and may have had a clock that was ahead.
    assert looks_until_the_end(write_log(tmp_path / "log", still), ManualClock(at(3600))) == 10
    ended = [*still, event(3599, E.JOB_TERMINATED, host="host-1")]
    assert looks_until_the_end(write_log(tmp_path / "log", ended), ManualClock(at(3600))) == 1


def test_a_job_that_was_started_again_runs(tmp_path: Path) -> None:
    events = [*failed_once(), event(3600, E.JOB_STARTED)]
    # It may wait for its hosts for longer than ten minutes, or hang.
    assert looks_until_the_end(write_log(tmp_path / "log", events), ManualClock(at(3600)), most=30) == 30


def test_metrics_say_what_the_ledger_says() -> None:
    events = failed_once('a "job"')
    result = result_of(events)
    assert result.measured is not None
    figures = figures_of_result(result)
    assert figures is not None
    text = as_metrics([figures])
    values = dict(re.findall(r"^(resiliency_goodput_\S+?\{.*\}) (\S+)$", text, re.MULTILINE))
    job = r'job="a \"job\""'
    assert float(values[f"resiliency_goodput_ratio{{{job}}}"]) == result.measured.ledger.goodput
    seconds = [float(value) for name, value in values.items() if "rank_seconds" in name]
    assert sum(seconds) == pytest.approx(result.measured.ledger.wall_us * 2 / 1e6)
    assert float(values[f'resiliency_goodput_save_interval_steps{{{job},which="as_it_was"}}']) == 4
    for name in {line.partition("{")[0] for line in values}:
        assert f"# TYPE {name} gauge\n" in text


def test_metrics_are_replaced_in_one_step_and_served(tmp_path: Path) -> None:
    write_metrics("one 1\n", tmp_path / "m.prom")
    write_metrics("one 2\n", tmp_path / "m.prom")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["one 2\n"]
    with pytest.raises(ConfigError, match="cannot write --prometheus"):
        write_metrics("", tmp_path / "none" / "m.prom")
    with serving(0, "127.0.0.1") as server:
        server.text = "one 3\n"
        with urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=PATIENCE) as answer:
            assert answer.read() == b"one 3\n"
        with pytest.raises(ConfigError, match="cannot listen"), serving(server.port, "127.0.0.1"):
            pass


def test_metrics_are_for_this_host_unless_an_address_is_given() -> None:
    with serving(0) as server, pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", server.port), timeout=PATIENCE)
    with serving(0, "0.0.0.0") as server:  # noqa: S104
        socket.create_connection(("127.0.0.2", server.port), timeout=PATIENCE).close()


def test_a_fleet_is_the_sum_of_its_jobs() -> None:
    one, other = result_of(failed_once()), result_of(Story(4).start().steps(30).finish().events)
    fleet = Fleet.of([one, other])
    assert one.measured is not None
    assert other.measured is not None
    ledgers = (one.measured.ledger, other.measured.ledger)
    assert sum(fleet.totals.values()) == sum(ledger.wall_us * len(ledger.lanes) for ledger in ledgers)
    assert min(ledger.goodput or 0 for ledger in ledgers) < (fleet.goodput or 0)
    assert (fleet.outages, fleet.mttr_s) == (1, one.measured.reliability.mttr_s)
    assert fleet.mttf_s == pytest.approx(
        one.measured.reliability.trained_s + other.measured.reliability.trained_s
    )
    assert Fleet.of([]).goodput is None


def test_two_jobs_of_one_file_are_reported_and_added_up(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log", [*failed_once("a"), *failed_once("b")])
    flags = ["--event-log", log, "--export", tmp_path / "out.json", "--prometheus", tmp_path / "m.prom"]
    with Command([*CALCULATOR, "--job-name", "a", "b", *flags], cwd=tmp_path) as command:
        assert command.wait(timeout=PATIENCE) == 0, command.output
        text = command.output
    assert "Goodput of job a" in text
    assert "Goodput of job b" in text
    assert "2 jobs" in text
    assert "MTTF" in text
    record = json.loads((tmp_path / "out.json").read_text())
    assert [job["job_name"] for job in record["jobs"]] == ["a", "b"]
    assert record["fleet"]["goodput"] == pytest.approx(record["jobs"][0]["ledger"]["goodput"])
    assert record["jobs"][0]["ledger"]["reliability"]["outages"] == 1
    assert 'job="b"' in (tmp_path / "m.prom").read_text()


@pytest.mark.parametrize("ending", ["job", "signal"])
def test_the_program_follows_a_log_until_the_job_ends_or_it_is_told_to(tmp_path: Path, ending: str) -> None:
    events = failed_once()
    half = len(events) // 2
    log = write_log(tmp_path / "log", events[:half])
    flags = ["--event-log", log, "--follow", "0.1", "--prometheus-port", "0"]
    with Command([*CALCULATOR, "--job-name", "demo", *flags], cwd=tmp_path) as command:
        found = command.wait_for_line(r"metrics: (http://127\.0\.0\.1:\d+/metrics)", timeout=PATIENCE)
        command.wait_for_line("demo: goodput", timeout=PATIENCE)
        with urlopen(found.group(1), timeout=PATIENCE) as answer:  # noqa: S310
            assert b'resiliency_goodput_ratio{job="demo"}' in answer.read()
        if ending == "job":
            with log.open("a") as file:
                file.writelines(one.to_json() + "\n" for one in events[half:])
        else:
            command.signal(signal.SIGTERM)
        assert command.wait(timeout=PATIENCE) == 0, command.output
        assert "Ledger of 2 ranks" in command.output


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--follow"], "--follow needs --event-log"),
        (["--prometheus", "x.prom"], "--prometheus needs --event-log"),
        (["--event-log", "x", "--follow", "0"], "--follow must be seconds above 0"),
        (["--event-log", "x", "--window", "-1"], "--window must be seconds above 0"),
        (["--event-log", "x", "--what-if-interval", "0"], "--what-if-interval must be steps above 0"),
        (["--event-log", "x", "--prometheus-port", "1"], "--prometheus-port needs --follow"),
        (["--event-log", "x", "--log-file", "y", "--follow"], "leave --log-file out"),
        (["b", "--event-log", "x", "--timeline", "t.png"], "--timeline shows one job"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(
    flags: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from resiliency.goodput_measure.calculator import main

    assert main(["--job-name", "a", *flags]) == 2
    assert sentence in capsys.readouterr().err
