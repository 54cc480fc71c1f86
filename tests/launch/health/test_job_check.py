# SPDX-License-Identifier: Apache-2.0
"""The check in real launchers: who is checked when, and how a host that is not fit leaves."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from resiliency.events import EventStream, EventType, RunEvent
from resiliency.launch import cli
from resiliency.launch.host_check.job_check import JobCheck, UnfitHost
from resiliency.launch.host_check.probes import PROBES, HostProbes
from resiliency.launch.options import resolve
from resiliency.testing import MemorySink
from resiliency.testing.processes import Command
from tests.launch.conftest import SCRIPTS, WAIT, WORKER, Launch, events, ready
from tests.launch.health.broken_probes import broken
from tests.launch.settings import FAST
from tests.launch.several_hosts import rank_of, together
from tests.ports import free_port
from tests.waiting import wait_until

MEMORY = PROBES[:1]


def job_check(tmp_path: Path, *flags: str, fault: str = "") -> tuple[JobCheck, MemorySink]:
    sink = MemorySink()
    options = resolve(cli.parse([f"--run-dir={tmp_path}", *flags, str(WORKER)], {}), {})
    probes = MEMORY if fault else ()
    own = HostProbes(host="h", disk=tmp_path, probes=probes, command=broken(fault, "memory"))
    return JobCheck(options, EventStream(options.info, [sink]), probes=own), sink


@pytest.mark.parametrize(
    ("when", "changes", "checks"),
    [
        ("start", [True, False, True, False], [1, 1, 1, 1]),
        ("host-change", [True, False, True, False], [1, 1, 2, 2]),
        ("always", [True, False, True, False], [1, 2, 3, 4]),
    ],
)
def test_restarts_check_nothing_unless_asked_for(
    tmp_path: Path, when: str, changes: list[bool], checks: list[int]
) -> None:
    """D8.  After each rendezvous: how often the probes have run."""
    check, sink = job_check(tmp_path, "--precheck=1", f"--check-on={when}")
    check.check_alone()
    counts = []
    for attempt, changed in enumerate(changes):
        check.check_with_others(
            None, rank=0, hosts=1, changed=changed, run="r", attempt=attempt, address="127.0.0.1"
        )
        counts.append(len(sink.of_type(EventType.HOST_CHECKED)))
    assert counts == checks


def test_without_the_flag_nothing_is_run(tmp_path: Path) -> None:
    check, sink = job_check(tmp_path, "--check-on=always", fault="crash")
    check.check_alone()
    check.check_with_others(None, rank=0, hosts=2, changed=True, run="r", attempt=0, address="")
    assert sink.events == []


def test_a_faulty_host_may_not_join(tmp_path: Path) -> None:
    check, sink = job_check(tmp_path, "--precheck=1", fault="crash")
    why = "memory: faulty, crashed twice: SIGSEGV, SIGSEGV"
    with pytest.raises(UnfitHost, match=f"this host is faulty: {why}") as caught:
        check.check_alone()
    assert caught.value.exit_code == 3
    (event,) = sink.of_type(EventType.HOST_CHECKED)
    assert (event.fields["health"], event.fields["why"]) == ("faulty", why)


def test_a_host_whose_check_had_no_time_joins_and_says_what_was_not_measured(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    check, sink = job_check(tmp_path, "--precheck=1", "--check-timeout-s=0.01", fault="linger")
    check.check_alone()
    (event,) = sink.of_type(EventType.HOST_CHECKED)
    assert event.fields["health"] == "undecided"
    assert "host checked: undecided: memory: undecided, " in caplog.text


def test_a_launcher_on_a_faulty_host_ends_before_it_starts_workers(launch: Launch, tmp_path: Path) -> None:
    told = SCRIPTS / "told_probes.py"
    command = launch("--precheck=1", WORKER, "finish", launcher=told, HOST_IS="flipped")
    assert command.wait(timeout=WAIT) == 3
    assert "host check: this host is faulty: compute: faulty, results of cores 3 differ" in command.output
    kinds = [event.type for event in events(tmp_path / "run")]
    assert kinds == [EventType.JOB_STARTED, EventType.HOST_CHECKED, EventType.JOB_TERMINATED]


@pytest.mark.slow
def test_two_hosts_check_their_links_once(launch: Launch, tmp_path: Path) -> None:
    port = free_port()
    hosts = [
        launch(
            *("--nnodes=2", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=pair", "--local-addr=127.0.0.1"),
            *("--precheck=2", "--max-restarts=2", WORKER, "wait"),
            run_dir=tmp_path / f"run{index}",
            launcher=SCRIPTS / "told_probes.py",
            HOST_IS="ok",
        )
        for index in range(2)
    ]
    ranks = [rank_of(host, 0) for host in hosts]
    os.kill(ready(hosts[0], ranks[0]), signal.SIGKILL)
    assert [rank_of(host, 1) for host in hosts] == ranks
    for index in range(2):
        alone, together = checked(tmp_path / f"run{index}")
        assert (alone.fields["health"], alone.attempt, together.attempt) == ("ok", None, 0)
        assert together.fields["link_health"] == "ok"
        assert [probe["probe"] for probe in together.fields["probes"]] == ["memory", "shm", "disk", "compute"]  # type: ignore[index, union-attr]


@pytest.mark.slow
def test_a_flipped_bit_and_a_slow_host_leave_the_job_and_those_that_stay_are_checked_when_hosts_change(
    launch: Launch, tmp_path: Path
) -> None:
    """D8, D16: and at no other restart."""
    place = ("--nnodes=2:4", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=four")
    flags = ("--local-addr=127.0.0.1", "--precheck=1", "--check-on=host-change", "--exclude-straggler")
    conf = f"{FAST},join_timeout=60,last_call_timeout=2"

    def start(index: int, host_is: str) -> Command:
        return launch(
            *(conf, *place, *flags, "--max-restarts=9", WORKER, "wait"),
            run_dir=tmp_path / f"run{index}",
            launcher=SCRIPTS / "told_probes.py",
            HOST_IS=host_is,
        )

    good = start(0, "ok")
    # It serves the store, and the job ends with the host that does.
    good.wait_for_line("meeting other hosts", timeout=WAIT)
    # A result of its own, the same each time, is a warning.
    other, flipped, slow = start(1, "other"), start(2, "flipped"), start(3, "slow")
    assert (flipped.wait(timeout=WAIT), slow.wait(timeout=WAIT)) == (3, 4)
    assert "this host is faulty: compute: faulty, results of cores 3 differ" in flipped.output
    assert "this host is slow: memory 50 GB/s: slow, 50% below the median" in slow.output
    left = max(event.attempt or 0 for index in (2, 3) for event in checked(tmp_path / f"run{index}"))

    def go_on() -> tuple[int, list[int]] | None:
        attempt, ranks = together(good, other)
        return (attempt, ranks) if attempt > left else None

    attempt, ranks = wait_until(go_on, "the others do not go on", timeout=WAIT)
    before = [checked(tmp_path / f"run{index}") for index in range(2)]
    assert min(map(len, before)) >= 4  # alone and with the others, at the start and when hosts had left
    assert {event.fields["health"] for each in before for event in each} <= {"ok", "undecided"}
    os.kill(ready(good, ranks[0], attempt), signal.SIGKILL)
    wait_until(lambda: together(good, other) == (attempt + 1, ranks), "no restart", timeout=WAIT)
    assert [checked(tmp_path / f"run{index}") for index in range(2)] == before


def checked(run_dir: Path) -> list[RunEvent]:
    return events(run_dir, EventType.HOST_CHECKED)


@pytest.mark.slow
def test_a_host_that_broke_leaves_at_the_next_rendezvous(launch: Launch, tmp_path: Path) -> None:
    breaks = tmp_path / "breaks"
    command = launch(
        *("--precheck=1", "--check-on=always", "--max-restarts=2", WORKER, "wait"),
        launcher=SCRIPTS / "told_probes.py",
        HOST_IS="ok",
        BREAKS_WITH=str(breaks),
    )
    worker = ready(command, 0)
    breaks.touch()
    os.kill(worker, signal.SIGKILL)
    assert command.wait(timeout=WAIT) == 3
    assert "this host leaves the job, exit code 3" in command.output
    kinds = [event.type for event in events(tmp_path / "run")]
    assert kinds.count(EventType.WORKERS_STARTED) == 1
    assert kinds[-2:] == [EventType.HOST_CHECKED, EventType.JOB_TERMINATED]


@pytest.mark.slow
def test_a_signal_ends_a_launcher_that_checks(
    launch: Launch, tmp_path: Path, leaves_nothing: Callable[[Command], None]
) -> None:
    command = launch("--precheck=1", WORKER, "wait", launcher=SCRIPTS / "told_probes.py", HOST_IS="busy")
    wait_until((tmp_path / "run/probed").exists, "no probe runs")
    command.signal(signal.SIGTERM)
    assert command.wait(timeout=WAIT) == 128 + signal.SIGTERM
    leaves_nothing(command)
