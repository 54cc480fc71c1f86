# SPDX-License-Identifier: Apache-2.0
"""Two launchers on one machine stand for two hosts of one job."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from resiliency.events import EventType, RunEvent
from resiliency.launch import standby
from resiliency.template.program import PythonCommand
from resiliency.testing.processes import Command
from tests.launch.settings import FAST, SLOW
from tests.launch.several_hosts import rank_of, together
from tests.ports import free_port
from tests.waiting import wait_until

from .conftest import WAIT, WORKER, Launch, children, events, ready

pytestmark = pytest.mark.slow


def start(launch: Launch, tmp_path: Path, *words: object, fixed: bool = False) -> list[Command]:
    """Two hosts with one worker each; `fixed`: the one that comes first asks for node rank 1."""
    port = free_port()
    hosts = []
    for index in range(2):
        place = ["--node-rank", 1 - index] if fixed else []
        flags = [
            "--nnodes=2",
            f"--rdzv-endpoint=127.0.0.1:{port}",
            "--rdzv-id=pair",
            "--local-addr=127.0.0.1",
        ]
        conf = f"{FAST},join_timeout=60"
        hosts.append(launch(conf, *flags, *place, *words, run_dir=tmp_path / f"run{index}"))
    return hosts


def starts(run_dir: Path, count: int) -> list[RunEvent]:
    """The starts of one host's workers; a launcher tells of one when the workers may be ready already."""
    wait_until(
        lambda: len(events(run_dir, EventType.WORKERS_STARTED)) >= count,
        f"fewer than {count} starts are told",
    )
    return events(run_dir, EventType.WORKERS_STARTED)


@pytest.mark.parametrize("fixed", [False, True])
def test_ranks_stay_on_their_hosts_through_restarts_and_attempts_agree(
    launch: Launch, tmp_path: Path, fixed: bool
) -> None:
    hosts = start(launch, tmp_path, "--max-restarts=5", WORKER, "wait", fixed=fixed)
    before = [rank_of(host, 0) for host in hosts]
    assert sorted(before) == [0, 1]
    if fixed:
        assert before == [1, 0]
    for attempt, victim in enumerate((hosts[0], hosts[1])):
        rank = before[hosts.index(victim)]
        os.kill(ready(victim, rank, attempt), signal.SIGKILL)
        assert [rank_of(host, attempt + 1) for host in hosts] == before
    for index in range(2):
        started = starts(tmp_path / f"run{index}", 3)
        # A host whose own workers were healthy counts the restarts of the other.
        assert [(event.attempt, event.fields["restarts"]) for event in started] == [(0, 0), (1, 1), (2, 2)]
        assert {event.node_rank for event in started} == {before[index]}


@pytest.mark.thorough("tests/launch/test_failed_exit.py fails for good")
def test_a_host_whose_job_failed_for_good_ends_the_others(launch: Launch, tmp_path: Path) -> None:
    hosts = start(launch, tmp_path, WORKER, "wait")
    rank = rank_of(hosts[1], 0)
    os.kill(ready(hosts[1], rank), signal.SIGKILL)
    assert [host.wait(timeout=WAIT) for host in hosts] == [1, 1]
    assert re.search(rf"rank {rank} \(host .*SIGKILL", hosts[1].output)
    assert "another host ended the job" in hosts[0].output


def start_ordered(launch: Launch, tmp_path: Path, *, join_timeout: int) -> tuple[Command, Command]:
    """Two hosts; the first has node rank 0 and serves the meeting point."""
    port = free_port()
    first, second = (join(launch, tmp_path, port, index, join_timeout) for index in range(2))
    assert (rank_of(first, 0), rank_of(second, 0)) == (0, 1)
    return first, second


def join(
    launch: Launch,
    tmp_path: Path,
    port: int,
    index: int,
    join_timeout: int,
    nnodes: str = "2",
    signs: str = FAST,
    **options: Any,
) -> Command:
    conf = f"{signs},join_timeout={join_timeout},last_call_timeout=2"
    place = ["--master-addr=127.0.0.1", f"--master-port={port}", f"--node-rank={index}", "--rdzv-id=pair"]
    flags = [conf, f"--nnodes={nnodes}", *place, "--local-addr=127.0.0.1"]
    return launch(*flags, WORKER, "wait", run_dir=tmp_path / f"run{index}", **options)


def test_a_launcher_that_vanishes_is_noticed_and_its_replacement_takes_its_place(
    launch: Launch, tmp_path: Path
) -> None:
    """And forks its ranks from what is known of the script, at its first start."""
    first, second = start_ordered(launch, tmp_path, join_timeout=60)
    port = re.search(r"--master-port=(\d+)", " ".join(first.argv))
    assert port is not None
    second.signal(signal.SIGKILL)
    first.wait_for_line("hosts left", timeout=WAIT)
    keep_imports(tmp_path / "cache")
    replacement = join(launch, tmp_path, int(port[1]), 1, 60, cold=True, PET_STANDBY="auto")
    assert (rank_of(first, 1), rank_of(replacement, 1)) == (0, 1)
    (_, joined) = starts(tmp_path / "run1", 2)
    assert joined.fields["forked"] == 1, replacement.output
    second.assert_no_orphans(timeout=30)  # its agent host may still import torch


@pytest.mark.parametrize(
    ("victim", "outcome"),
    [
        pytest.param(1, "hosts missing", id="nobody comes in its place"),
        pytest.param(0, "meeting point lost", id="it served the meeting point"),
    ],
)
def test_the_survivor_of_a_launcher_that_vanished_does_not_hang(
    launch: Launch, tmp_path: Path, victim: int, outcome: str
) -> None:
    # Long enough for the second to come after the first, and short enough to wait for nobody.
    hosts = start_ordered(launch, tmp_path, join_timeout=10)
    survivor = hosts[1 - victim]
    # One that stands still closes no connection: its missing signs of life are noticed.
    hosts[victim].signal(signal.SIGSTOP if victim else signal.SIGKILL)
    assert survivor.wait(timeout=WAIT) == 1
    hosts[victim].signal(signal.SIGKILL)
    ended = events(tmp_path / f"run{1 - victim}", EventType.JOB_TERMINATED)
    assert [event.fields["outcome"] for event in ended] == [outcome]
    for host in hosts:
        host.assert_no_orphans(timeout=30)


def test_an_elastic_job_shrinks_when_a_host_is_lost_and_grows_when_one_comes(
    launch: Launch, tmp_path: Path
) -> None:
    """At once: nothing waits for the signs of life of a launcher that has ended."""
    port, auto = free_port(), {"PET_STANDBY": "auto", "signs": SLOW}
    first, second = (join(launch, tmp_path, port, index, 60, "1:2", **auto) for index in range(2))
    attempt, ranks = together(first, second)
    assert ranks == [0, 1]
    second.signal(signal.SIGKILL)
    assert rank_of(first, attempt + 1) == 0
    newcomer = join(launch, tmp_path, port, 1, 60, "1:2", **auto)
    assert together(first, newcomer) == (attempt + 2, [0, 1])
    (lost,) = events(tmp_path / "run0", EventType.DIAGNOSED)
    assert (lost.fields["cause"], lost.fields["advice"]) == ("host_lost", "restart")
    started = starts(tmp_path / "run0", attempt + 3)
    assert [event.fields["hosts"] for event in started[attempt:]] == [2, 1, 2]
    assert {event.fields["restarts"] for event in started} == {0}  # such changes are no failures
    joined = starts(tmp_path / "run1", attempt + 2)
    # Of a smaller job, of a larger one, and of a host that joins: each launcher was forked itself.
    assert {event.fields["forked"] for event in (*started, *joined)} == {1}


def test_a_launcher_that_waits_takes_the_place_of_one_that_ended_with_the_imports_of_the_others(
    launch: Launch, tmp_path: Path
) -> None:
    port = free_port()
    place = [f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=pair"]

    def begin(index: int, address: str, **options: Any) -> Command:
        words = [f"{SLOW},join_timeout=60", "--nnodes=2", *place, f"--local-addr={address}", WORKER, "wait"]
        return launch(*words, run_dir=tmp_path / f"run{index}", **options)

    # New hosts are numbered by address, then by process number, which begins again now and then.  One that
    # stays keeps its rank, though by its address it would get another one beside the host that comes.
    first = begin(0, "127.0.0.2")
    wait_until(lambda: listens(port), "nothing serves the store", timeout=WAIT)
    # Not at once: the one that is killed must not be the one that serves it.
    hosts = [first, begin(1, "127.0.0.1")]
    assert together(*hosts) == (0, [1, 0])
    auto = {"PET_STANDBY": "auto", "RESILIENCY_CACHE_DIR": str(tmp_path / "cache")}
    waiting = begin(2, "127.0.0.3", cold=True, **auto)
    waiting.wait_for_line("meeting other hosts", timeout=WAIT)
    keep_imports(tmp_path / "cache")
    wait_until(lambda: children(waiting, str(Path("resiliency") / "template")), "nothing is prepared")
    hosts[1].signal(signal.SIGKILL)
    assert together(hosts[0], waiting) == (1, [1, 0])
    (joined,) = starts(tmp_path / "run2", 1)
    assert joined.fields["forked"] == 1, waiting.output


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def keep_imports(cache: Path) -> None:
    """As a launcher whose ranks run the script does, a moment ago."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(standby.CACHE_DIR_ENV, str(cache))
        command = PythonCommand.parse([sys.executable, "-u", str(WORKER), "wait"])
        assert command is not None
        known = standby._cache_file(command)
    assert known is not None
    known.parent.mkdir(parents=True)
    known.write_text(f"m json\t{json.__file__}\n")
