# SPDX-License-Identifier: Apache-2.0
"""Journeys of a job under a supervisor, each with the losses that an undisturbed run has.

Each prints what it cost, as the job's ledger has it: ``pytest -s``.
"""

from __future__ import annotations

import html
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from resiliency.testing.processes import stop_process
from supervisor.orchestrators.local import stop_all
from supervisor.orchestrators.wanted import restart_at_next_run
from supervisor.values import CommandKind, OutcomeStatus, Request
from supervisor.view.page import status_page
from supervisor.view.status import Status
from tests.supervisor_plane.fault_table import fault
from tests.supervisor_plane.plane import host_of, job_of
from tests.supervisor_plane.training import Training, check_losses, open_training
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.thorough("test_end_to_end.py is near, and the journeys of test_page.py and of a JobSet"),
    pytest.mark.leaks("descriptors", reason="gRPC's own pollers"),
]

#: The launchers that stay wait for the spare's, which takes some seconds to start.
PATIENT = ("--launcher-grace-s=60", "--workload-downtime-threshold-s=180", "--spare-floor=0")


@contextmanager
def journey(tmp_path: Path, **options: int) -> Iterator[tuple[Training, Status]]:
    """A job on hosts a and b that trains, with two spares; afterwards its losses are checked."""
    hosts = ("a", "b", "s1", "s2")
    with open_training(tmp_path, hosts=hosts, replicas=2, **options) as training:
        training.plane.start("all", *training.flags, *PATIENT)
        yield training, training.goes_on(2, -1, "it does not train")
        assert check_losses(training.launcher_log("a")) == {2}
        for incident in training.ledger().incidents:
            seconds = ((incident.first_new_step or incident.fault) - incident.fault) / 1e6
            print(f"{incident.action or 'by itself'}: {seconds:.1f} s, {incident.lost_steps} steps lost")


def hosts_of(training: Training, status: Status) -> set[str]:
    names = ("a", "b", "s1", "s2")
    known = {name: host_of(status, name) for name in names}
    return {name for name, host in known.items() if host and host.id in job_of(status).hosts}


def done(status: Status) -> list[CommandKind]:
    """Without those that had no effect: a step that is read late counts as progress after the fault."""
    withdrawn = OutcomeStatus.WITHDRAWN
    return [one.kind for one in reversed(status.commands) if one.outcome is not withdrawn]


@fault(
    "host that trains",
    "drained by a person",
    "all ranks save and stop at one step, the job goes on from it with a spare",
)
def test_a_drain_of_a_living_host_costs_no_step(tmp_path: Path) -> None:
    with journey(tmp_path) as (training, status):
        survivor = {one.pid for one in training.processes("a")}
        training.plane.act(Request.DRAIN, host="b", why="maintenance")
        status = training.goes_on(2, job_of(status).attempt, "it does not go on with a spare")
        assert hosts_of(training, status) == {"a", "s1"}
        assert done(status) == [CommandKind.DRAIN_HOST, CommandKind.HOT_SWAP]
        assert survivor & {one.pid for one in training.processes("a")}
        log = training.launcher_log("a")
        before = log[: log.rindex(" begins at step ")]
        stopped_at = int(re.findall(r"^rank \d of 2 step (\d+) loss", before, re.M)[-1])
        assert training.begun(r"\d", 2)[-1][0] == stopped_at
        assert set(training.restored(2)[-1]) == {"memory", "peers"}


@fault("GPU", "Xid 79 in the kernel's log", "the host is cordoned and swapped at once")
def test_a_living_host_whose_gpu_is_gone_is_swapped_at_once(tmp_path: Path) -> None:
    with journey(tmp_path) as (training, status):
        survivor = {one.pid for one in training.processes("a")}
        training.break_gpu("b")
        status = training.goes_on(2, job_of(status).attempt, "it does not go on with a spare")
        assert hosts_of(training, status) == {"a", "s1"}
        assert set(done(status)) == {CommandKind.CORDON_HOST, CommandKind.HOT_SWAP}
        assert survivor & {one.pid for one in training.processes("a")}
        assert "all ranks stop" not in training.launcher_log("a") + training.launcher_log("b")


@fault("GPU", "a rank finds none", "its launcher's diagnosis: swapped, and it checks itself")
def test_a_host_whose_rank_finds_no_gpu_is_swapped_checks_itself_and_the_page_says_why(
    tmp_path: Path,
) -> None:
    with journey(tmp_path) as (training, status):
        survivor = {one.pid for one in training.processes("a")}
        training.remove_gpu("b")
        status = training.goes_on(2, job_of(status).attempt, "it does not go on with a spare")
        assert hosts_of(training, status) == {"a", "s1"}
        swap = {CommandKind.CORDON_HOST, CommandKind.HOT_SWAP}
        assert swap <= set(done(status)) <= {*swap, CommandKind.CHECK_HOST}
        assert survivor & {one.pid for one in training.processes("a")}
        said = job_of(status).diagnosis
        assert said is not None
        assert (said.cause, said.advice, said.ranks) == ("gpu_missing", "replace_host", (1,))
        sentence = r"rank 1 on \S+ \(after step \d+\) finds no GPU \(.*No CUDA GPUs are available\)"
        assert re.match(sentence, said.text)
        assert said.text in html.unescape(status_page(status))
        # Its cores are well; that its GPU is there nobody has seen.
        status = training.plane.wait_for(
            lambda seen: [one for one in seen.commands if one.kind is CommandKind.CHECK_HOST and one.outcome],
            "the host does not check itself",
        )
        (check,) = [one for one in status.commands if one.kind is CommandKind.CHECK_HOST]
        assert check.outcome is OutcomeStatus.DONE
        blamed = host_of(status, "b")
        assert blamed is not None
        assert (check.host, blamed.cordoned) == (blamed.id, True)
        training.plane.wait_for(
            lambda seen: any(f"check of {blamed.id}: " in note.text for note in seen.decisions),
            "its check is not told",
        )


@fault(
    "two hosts, one after the other",
    "SIGKILL of all their processes",
    "a launcher that waits takes the first place, a spare the second",
)
def test_two_hosts_are_lost_and_a_launcher_that_waits_and_a_spare_take_their_places(tmp_path: Path) -> None:
    with journey(tmp_path, waiting=1) as (training, status):
        survivor = {one.pid for one in training.processes("a")}
        training.let_in("s1")
        training.lose("b")
        status = training.goes_on(2, job_of(status).attempt, "it does not go on with the one that waits")
        assert hosts_of(training, status) == {"a", "s1"}
        assert done(status) == []
        training.lose("s1")
        status = training.goes_on(2, job_of(status).attempt, "it does not go on with the spare")
        assert hosts_of(training, status) == {"a", "s2"}
        assert done(status) == [CommandKind.HOT_SWAP]
        assert survivor & {one.pid for one in training.processes("a")}


@fault(
    "host, and the spare while it takes the place",
    "SIGKILL of all their processes",
    "the next spare takes it",
)
def test_the_spare_is_lost_while_it_takes_a_place(tmp_path: Path) -> None:
    with journey(tmp_path) as (training, status):
        training.lose("b")
        wait_until(lambda: training.launcher_log("s1"), "no launcher is started on the spare", timeout=120)
        training.lose("s1")
        status = training.goes_on(2, job_of(status).attempt, "it does not go on with the other spare")
        assert hosts_of(training, status) == {"a", "s2"}


@fault("host", "SIGSTOP of all its processes, later SIGCONT", "swapped; it harms nobody when it goes on")
def test_a_host_that_stands_still_is_replaced_and_harms_nobody_when_it_goes_on(tmp_path: Path) -> None:
    with journey(tmp_path) as (training, status):
        survivor = {one.pid for one in training.processes("a")}
        frozen = [one.pid for one in training.processes("b")]
        for pid in frozen:
            stop_process(pid)
        status = training.goes_on(2, job_of(status).attempt, "it does not go on with a spare")
        assert hosts_of(training, status) == {"a", "s1"}
        assert survivor & {one.pid for one in training.processes("a")}
        attempt = job_of(status).attempt
        for pid in frozen:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        wait_until(
            lambda: {one.mark.part for one in training.processes("b")} == {"daemon"},
            "the launcher of a host that was replaced stays",
            timeout=120,
        )
        status = training.plane.wait_for(
            lambda seen: (job_of(seen).step or 0) > (job_of(status).step or 0) + 20, "it does not train on"
        )
        assert (job_of(status).attempt, job_of(status).incident) == (attempt, "")


@fault("rank, of a job without restarts", "SIGKILL", "launchers gave up: all are started again")
def test_launchers_that_gave_up_are_all_started_again(tmp_path: Path) -> None:
    with journey(tmp_path, max_restarts=0) as (training, status):
        os.kill(training.rank_on("b"), signal.SIGKILL)
        status = training.goes_on(2, job_of(status).attempt, "it is not started again")
        assert hosts_of(training, status) == {"a", "b"}
        assert done(status) == [CommandKind.WORKLOAD_RESET]


@fault("job", "its name is used again", "the new job is left alone")
def test_a_job_whose_name_is_used_again_is_left_alone(tmp_path: Path) -> None:
    with journey(tmp_path) as (training, status):
        training.plane.programs.pop("all").close()
        stop_all(training.plane.state_dir)
        restart_at_next_run(training.plane.state_dir / "local.json")
        training.plane.start("all", *training.flags, *PATIENT)
        status = training.goes_on(2, job_of(status).attempt, "it does not train again")
        assert hosts_of(training, status) == {"a", "b"}
        assert done(status) == []
