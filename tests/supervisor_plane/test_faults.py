# SPDX-License-Identifier: Apache-2.0
"""Each part of the supervisor is killed, stopped or starved, and training goes on: the rows of a table.

All processes are real, but for launchers: twins of theirs report steps, and need no torch.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from resiliency.errors import ControlPlaneError
from resiliency.testing.processes import Command as Program
from resiliency.testing.processes import stop_process
from supervisor.orchestrators.local import stop_all
from supervisor.orchestrators.processes import Marked, kill_all, marked_processes
from supervisor.parts.run import LOG_NAME
from supervisor.values import CommandKind, OutcomeStatus, Request
from supervisor.view.status import Status
from tests.ports import free_row
from tests.supervisor_plane.plane import PARTS, PATIENCE_S, ROOT, Plane, host_of, job_of, open_plane
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.leaks("descriptors", reason="gRPC's own pollers")]

SCRIPTS = Path(__file__).parent / "scripts"
#: Silence is noticed soon, so that a part that is away for longer would be.
TIMEOUT_S = 5.0
SHORT = (f"--heartbeat-timeout-s={TIMEOUT_S:g}", "--tick-s=0.5", "--coalesce-s=0.5", "--advancing-s=1")


class Twins:
    """Three processes of the supervisor, and two hosts with a twin each beside a spare."""

    def __init__(self, plane: Plane) -> None:
        self.plane = plane
        plane.env["PYTHONPATH"] = str(ROOT)
        command = ["{python}", str(SCRIPTS / "twin.py"), "{daemon_port}", "{node_rank}", "{replicas}"]
        command.append("{state_dir}/stalled")
        job = {"workload": "job", "replicas": 2, "grace_s": 5, "command": command}
        file = plane.tmp_path / "job.json"
        hosts = ["a", "b", "spare"]
        file.write_text(json.dumps({"hosts": hosts, "first_port": free_row(2 * len(hosts)), "jobs": [job]}))
        self.flags = {"actuator": ("--orchestrator=local", f"--job-file={file}")}

    def start(self, part: str) -> Program:
        return self.plane.start(part, *self.flags.get(part, ()), thresholds=SHORT)

    def start_all(self) -> Status:
        for part in ("actuator", "controller", "sensor"):
            self.start(part)
        return self.is_whole()

    def is_whole(self) -> Status:
        """Wait until the controller sees all hosts, connected and at their work, and the job's next step."""
        first = self.plane.wait_for(self._all_there, "the view is not whole")
        step = job_of(first).step or 0
        return self.plane.wait_for(
            lambda seen: self._all_there(seen) and (job_of(seen).step or 0) > step, "no step is seen"
        )

    @staticmethod
    def _all_there(seen: Status) -> bool:
        hosts = [host_of(seen, name) for name in ("a", "b", "spare")]
        there = all(host is not None and host.connected for host in hosts)
        return there and [len(job.hosts) == job.hosts_needed for job in seen.jobs] == [True]

    def processes(self, part: str, host: str) -> list[Marked]:
        fleet = str(self.plane.state_dir.resolve())
        return [one for one in marked_processes(fleet) if (one.mark.part, one.mark.host) == (part, host)]

    def stall(self) -> None:
        """From here on no rank finishes a step, as when one of them is lost."""
        (self.plane.state_dir / "stalled").touch()

    def did_nothing(self) -> None:
        """No fault was seen, and nothing was done; what the daemon's loss is told by is no incident."""
        status = self.plane.status()
        assert (status.incidents, status.commands, status.frozen) == ((), (), False)

    def acts(self) -> None:
        """The whole chain works: a person's request gets to the orchestrator and its outcome back."""
        self.plane.act(Request.CORDON, host="spare")
        status = self.plane.wait_for(
            lambda seen: any(one.outcome is OutcomeStatus.DONE for one in seen.commands), "no outcome"
        )
        assert status.commands[0].kind is CommandKind.CORDON_HOST


@pytest.fixture
def twins(tmp_path: Path) -> Iterator[Twins]:
    with open_plane(tmp_path) as (plane, _):
        try:
            yield Twins(plane)
        finally:
            for program in plane.programs.values():
                program.signal(signal.SIGCONT)
                program.close()
            stop_all(plane.state_dir)


def wait_longer_than(seconds: float) -> None:
    """The length of a fault, and no wait for anything."""
    end = time.monotonic() + seconds
    wait_until(lambda: time.monotonic() > end, "time stands still")


def test_a_part_that_is_killed_harms_nothing_and_sees_all_again_after_its_start(twins: Twins) -> None:
    epoch = twins.start_all().epoch
    for part in PARTS:
        twins.plane.kill(part)
        twins.start(part)
        epoch += part == "controller"
        assert twins.is_whole().epoch == epoch
        twins.did_nothing()
    twins.acts()


def test_a_part_that_is_stopped_for_longer_than_the_timeout_harms_nothing(twins: Twins) -> None:
    twins.start_all()
    for part in PARTS:
        with twins.plane.stopped(part):
            wait_longer_than(TIMEOUT_S + 1)
        twins.is_whole()
        twins.did_nothing()
    twins.acts()


def test_a_daemon_that_is_killed_is_back_and_nothing_happens_to_training(twins: Twins) -> None:
    twins.start_all()
    launcher = twins.processes("launcher", "a")
    kill_all(twins.processes("daemon", "a"))
    twins.plane.wait_for(
        lambda seen: any(note.text.startswith("daemon of a.") for note in seen.decisions), "not noticed"
    )
    twins.is_whole()
    twins.did_nothing()
    assert twins.processes("launcher", "a") == launcher


def test_a_daemon_that_is_stopped_is_no_lost_host(twins: Twins) -> None:
    twins.start_all()
    (daemon,) = twins.processes("daemon", "a")
    stop_process(daemon.pid)
    try:
        twins.plane.wait_for(
            lambda seen: any("the host is there, its daemon is silent" in n.text for n in seen.decisions),
            "not noticed",
        )
        wait_longer_than(TIMEOUT_S)
        twins.did_nothing()
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    twins.is_whole()
    twins.did_nothing()


def test_a_lost_host_is_swapped_although_the_actuator_was_killed_meanwhile(twins: Twins) -> None:
    before = twins.start_all()
    twins.stall()
    twins.plane.kill("actuator")
    kill_all(twins.processes("launcher", "b") + twins.processes("daemon", "b"))
    # The orchestrator cannot be asked, so the host is silent until its time is over.
    twins.plane.wait_for(
        lambda seen: any(one.kind is CommandKind.HOT_SWAP for one in seen.commands), "no swap was decided"
    )
    twins.plane.kill("controller")
    twins.start("controller")
    twins.start("actuator")
    status = twins.plane.wait_for(
        lambda seen: any(one.outcome is OutcomeStatus.DONE for one in seen.commands), "not done"
    )
    assert status.epoch == before.epoch + 1
    assert [one.kind for one in status.commands] == [CommandKind.HOT_SWAP]
    assert len(twins.processes("launcher", "spare")) == 1


def test_a_launcher_that_is_killed_alone_is_started_again_beside_the_others(twins: Twins) -> None:
    twins.start_all()
    twins.stall()  # the others wait for its ranks
    (other,) = twins.processes("launcher", "b")
    kill_all(twins.processes("launcher", "a"))
    twins.plane.wait_for(
        lambda seen: any(one.outcome is OutcomeStatus.DONE for one in seen.commands), "nothing was done"
    )
    (twins.plane.state_dir / "stalled").unlink()
    status = twins.plane.wait_for(
        lambda seen: job_of(seen).step and not job_of(seen).incident, "no step after the action"
    )
    assert [one.kind for one in status.commands] == [CommandKind.IN_JOB_RESET]
    assert len(twins.processes("launcher", "a")) == 1
    assert twins.processes("launcher", "b") == [other]
    assert len(status.hosts) == 3


def test_a_drained_host_is_replaced_and_a_frozen_fleet_waits_for_its_thaw(twins: Twins) -> None:
    twins.start_all()
    twins.plane.act(Request.FREEZE)
    twins.stall()
    twins.plane.act(Request.DRAIN, host="a")  # a person's word goes around the freeze, what follows does not
    status = twins.plane.wait_for(
        lambda seen: any(
            "hot_swap refused by not_frozen: frozen by tester" in n.text for n in seen.decisions
        ),
        "the drained host is not reported",
    )
    assert [one.kind for one in status.commands] == [CommandKind.DRAIN_HOST]
    assert host_of(status, "a").cordoned
    assert twins.processes("launcher", "a") == []
    twins.plane.act(Request.THAW)
    status = twins.plane.wait_for(
        lambda seen: any(
            (one.kind, one.outcome) == (CommandKind.HOT_SWAP, OutcomeStatus.DONE) for one in seen.commands
        ),
        "the drained host is not replaced",
    )
    assert {host_of(status, name).id for name in ("b", "spare")} == set(job_of(status).hosts)
    assert len(twins.processes("launcher", "spare")) == 1
    assert len(twins.processes("daemon", "a")) == 1


# ------------------------------------------------------------------------------------------- the event log


def controller(tmp_path: Path, state_dir: Path) -> subprocess.CompletedProcess[str]:
    """A controller that ends by itself."""
    return subprocess.run(
        [
            *(sys.executable, "-m", "supervisor.controller", "--plaintext", "--port=0"),
            *(f"--state-dir={state_dir}", "--listen=127.0.0.1"),
        ],
        env={**os.environ, "ACTUATOR_ADDRESS": "127.0.0.1:1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


def test_a_damaged_event_log_is_refused_with_a_sentence_and_without_it_hosts_register_again(
    twins: Twins,
) -> None:
    before = twins.start_all()
    twins.acts()
    twins.plane.kill("controller")
    log = twins.plane.state_dir / LOG_NAME
    for side in ("-wal", "-shm"):
        log.with_name(LOG_NAME + side).unlink(missing_ok=True)
    log.write_bytes(b"no database" * 1000)
    done = controller(twins.plane.tmp_path, twins.plane.state_dir)
    assert done.returncode == 1
    assert re.search(r"controller.py: event log .*events.db is damaged: .*Move it away", done.stderr)
    assert "Traceback" not in done.stderr
    log.rename(log.with_name("damaged.db"))
    twins.start("controller")
    # Hosts and orchestrators have seen epochs and ids, and must not take the new ones for those.
    assert twins.is_whole().epoch > before.epoch
    twins.did_nothing()
    twins.acts()


def test_a_second_controller_is_refused_and_the_first_one_goes_on(twins: Twins) -> None:
    twins.start("controller")
    done = controller(twins.plane.tmp_path, twins.plane.state_dir)
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
    assert "events.db is open in another controller." in done.stderr
    assert twins.plane.status().epoch > 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small disk")
def test_a_full_disk_under_the_event_log_decides_nothing_and_says_so(twins: Twins) -> None:
    plane = twins.plane
    with ExitStack() as stack:
        plane.state_dir = plane.tmp_path / "small"
        plane.state_dir.mkdir()
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(plane.state_dir)], capture_output=True
        )
        if mounted.returncode:
            pytest.skip("this process may not mount")
        # Hosts live elsewhere: their logs are not what is full.
        small, plane.state_dir = plane.state_dir, plane.tmp_path / "state"
        stack.callback(lambda: subprocess.run(["umount", "--lazy", str(small)], check=True))
        twins.start("actuator")
        plane.state_dir = small
        twins.start("controller")
        plane.state_dir = plane.tmp_path / "state"
        twins.start("sensor")
        twins.is_whole()
        filler = small / "filler"
        with filler.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(b"x" * 4096)
        status = plane.wait_for(lambda seen: seen.log_problem, "the log still takes records")
        assert "events.db cannot be written: the disk is full." in status.log_problem
        with pytest.raises(ControlPlaneError, match="the disk is full"):
            plane.act(Request.CORDON, host="a")
        twins.did_nothing()
        filler.unlink()
        plane.wait_for(lambda seen: not seen.log_problem, "the log takes nothing")
        twins.is_whole()
        twins.acts()
        for program in plane.programs.values():
            program.close()
