# SPDX-License-Identifier: Apache-2.0
"""Each part of the supervisor is killed, stopped or starved, and training goes on: the rows of a table.

All processes are real, but for launchers: twins of theirs report steps, and need no torch.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from resiliency.errors import ControlPlaneError
from resiliency.testing.processes import stop_process, suspended
from supervisor.orchestrators.processes import Marked, kill_all
from supervisor.parts.run import LOG_NAME
from supervisor.values import CommandKind, OutcomeStatus, Request
from tests.supervisor_plane.fault_table import fault
from tests.supervisor_plane.forwarder import Forwarder
from tests.supervisor_plane.plane import PARTS, PATIENCE_S, ROOT, host_of, job_of
from tests.supervisor_plane.twins import SCRIPTS, TIMEOUT_S, Twins, open_twins
from tests.waiting import wait_for_seconds

pytestmark = [pytest.mark.slow, pytest.mark.leaks("descriptors", reason="gRPC's own pollers")]


@pytest.fixture
def twins(tmp_path: Path) -> Iterator[Twins]:
    with open_twins(tmp_path) as twins:
        yield twins


@fault(
    "sensor, controller, actuator, one after the other",
    "SIGKILL, then started again",
    "nothing happens to training; the view is whole again",
)
def test_a_part_that_is_killed_harms_nothing_and_sees_all_again_after_its_start(twins: Twins) -> None:
    epoch = twins.start_all().epoch
    for part in PARTS:
        twins.plane.kill(part)
        twins.start(part)
        epoch += part == "controller"
        assert twins.is_whole().epoch == epoch
        twins.did_nothing()
    twins.acts()


@fault(
    "sensor, controller, actuator, one after the other",
    "SIGSTOP for longer than the heartbeat timeout",
    "no host is called lost, nothing is done",
)
def test_a_part_that_is_stopped_for_longer_than_the_timeout_harms_nothing(twins: Twins) -> None:
    twins.start_all()
    for part in PARTS:
        with twins.plane.stopped(part):
            wait_for_seconds(TIMEOUT_S + 1)
        twins.is_whole()
        twins.did_nothing()
    twins.acts()


@fault("host daemon", "SIGKILL", "it is started again; training and its launcher go on")
def test_a_daemon_that_is_killed_is_back_and_nothing_happens_to_training(twins: Twins) -> None:
    twins.start_all()
    launcher = twins.processes("a", "launcher")
    kill_all(twins.processes("a", "daemon"))
    twins.plane.wait_for(
        lambda seen: any(note.text.startswith("daemon of a.") for note in seen.decisions), "not noticed"
    )
    twins.is_whole()
    twins.did_nothing()
    assert twins.processes("a", "launcher") == launcher


@fault("host daemon", "SIGSTOP", "the host is there, its daemon is silent: said, and nothing is done")
@pytest.mark.thorough("another part that fails is near")
def test_a_daemon_that_is_stopped_is_no_lost_host(twins: Twins) -> None:
    twins.start_all()
    (daemon,) = twins.processes("a", "daemon")
    stop_process(daemon.pid)
    try:
        twins.plane.wait_for(
            lambda seen: any("the host is there, its daemon is silent" in n.text for n in seen.decisions),
            "not noticed",
        )
        wait_for_seconds(TIMEOUT_S)
        twins.did_nothing()
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    twins.is_whole()
    twins.did_nothing()


@fault(
    "host, while the actuator and then the controller are killed",
    "SIGKILL of all its processes",
    "one hot swap, by the next actuator",
)
def test_a_lost_host_is_swapped_although_the_actuator_was_killed_meanwhile(twins: Twins) -> None:
    before = twins.start_all()
    twins.stall()
    twins.plane.kill("actuator")
    kill_all(twins.processes("b"))
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
    assert len(twins.processes("spare", "launcher")) == 1


@fault(
    "launcher and its rank, of two hosts",
    "SIGKILL",
    "started again beside the other launcher, one in-job reset",
)
@pytest.mark.thorough("another part that fails is near")
def test_a_launcher_that_is_killed_alone_is_started_again_beside_the_others(twins: Twins) -> None:
    twins.start_all()
    twins.stall()  # the others wait for its ranks
    (other,) = twins.processes("b", "launcher")
    kill_all(twins.processes("a", "launcher", "rank"))
    twins.plane.wait_for(
        lambda seen: any(one.outcome is OutcomeStatus.DONE for one in seen.commands), "nothing was done"
    )
    (twins.folder() / "stalled").unlink()
    status = twins.plane.wait_for(
        lambda seen: job_of(seen).step and not job_of(seen).incident, "no step after the action"
    )
    assert [one.kind for one in status.commands] == [CommandKind.IN_JOB_RESET]
    assert len(twins.processes("a", "launcher")) == 1
    assert twins.processes("b", "launcher") == [other]
    assert len(status.hosts) == 3


@fault(
    "host",
    "drained by a person while the fleet is frozen",
    "cordoned and drained at once, replaced after the thaw",
)
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
    assert twins.processes("a", "launcher") == []
    twins.plane.act(Request.THAW)
    status = twins.plane.wait_for(
        lambda seen: any(
            (one.kind, one.outcome) == (CommandKind.HOT_SWAP, OutcomeStatus.DONE) for one in seen.commands
        ),
        "the drained host is not replaced",
    )
    assert {host_of(status, name).id for name in ("b", "spare")} == set(job_of(status).hosts)
    assert len(twins.processes("spare", "launcher")) == 1
    assert len(twins.processes("a", "daemon")) == 1


# ------------------------------------------------------------------------------------- what stands still

#: Of a job that stands still for so long something is done.
STILL = ("--hang-threshold-s=3", "--workload-downtime-threshold-s=8")


@contextmanager
def stopped(processes: Sequence[Marked]) -> Iterator[None]:
    """SIGSTOP of all of them; what is left of them goes on afterwards."""
    for one in processes:
        os.kill(one.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for one in processes:
            with suppress(ProcessLookupError):
                os.kill(one.pid, signal.SIGCONT)


@fault("rank", "SIGSTOP", "the job stands still: stacks, then an in-job reset")
@pytest.mark.thorough("the sensor's logic has what this found, the simulation has both")
def test_a_rank_that_is_stopped_is_restarted_when_its_stacks_are_here(tmp_path: Path) -> None:
    with open_twins(tmp_path, thresholds=STILL) as twins:
        twins.start_all()
        with stopped(twins.processes("a", "rank")):
            status = twins.plane.wait_for(
                lambda seen: any(one.closed_age_s is not None for one in seen.incidents), "no incident ended"
            )
        ended = {one.kind: one.age_s - (one.seconds or 0.0) for one in status.commands}
        assert ended.keys() == {CommandKind.DUMP_STACKS, CommandKind.IN_JOB_RESET}
        assert ended[CommandKind.DUMP_STACKS] > ended[CommandKind.IN_JOB_RESET]  # so long ago
        twins.is_whole()


@fault("launcher, beside ranks that go on", "SIGSTOP", "nothing: a job that finishes steps is not restarted")
@pytest.mark.thorough("the sensor's logic has what this found, the simulation has both")
def test_a_launcher_that_is_stopped_beside_ranks_that_go_on_is_left_alone(twins: Twins) -> None:
    twins.start_all()
    ranks = twins.processes("a", "rank")
    with stopped(twins.processes("a", "launcher")):
        twins.plane.wait_for(lambda seen: seen.incidents, "not noticed")
        wait_for_seconds(TIMEOUT_S)
    status = twins.is_whole()
    assert {one.outcome for one in status.commands} <= {OutcomeStatus.WITHDRAWN}
    assert twins.processes("a", "rank") == ranks


@fault(
    "supervisor and all hosts at once", "SIGSTOP for longer than all limits, later SIGCONT", "nothing is done"
)
def test_a_fleet_that_is_suspended_as_a_whole_goes_on(tmp_path: Path) -> None:
    with open_twins(tmp_path, thresholds=("--hang-threshold-s=8",)) as twins:
        twins.start_all()
        of_hosts = [one for host in twins.hosts for one in twins.processes(host)]
        with suspended(*(twins.plane.programs[part] for part in PARTS)), stopped(of_hosts):
            wait_for_seconds(12.0)
        twins.is_whole()
        wait_for_seconds(TIMEOUT_S)
        twins.did_nothing()


# ------------------------------------------------------------------------------------- network and clocks


@fault(
    "network between all daemons and the sensor",
    "cut, then healed",
    "no host is lost; what happened meanwhile is seen afterwards",
)
@pytest.mark.thorough("another part that fails is near")
def test_daemons_that_are_cut_off_from_the_sensor_are_no_lost_hosts(twins: Twins) -> None:
    network = Forwarder(twins.plane.ports["sensor"])
    with closing(network):
        # It starts the daemons, and so they reach the sensor by this way.
        twins.plane.own_env["actuator"] = {"SENSOR_ADDRESS": network.address}
        twins.start_all()
        network.cut()
        for host in ("a", "b", "spare"):
            twins.plane.wait_for(
                lambda seen, host=host: any(  # type: ignore[misc]
                    note.text.startswith(f"daemon of {host}.") and "the host is there" in note.text
                    for note in seen.decisions
                ),
                f"{host} is not noticed",
            )
        # What happens meanwhile is seen afterwards.
        kill_all(twins.processes("a", "rank"))
        wait_for_seconds(TIMEOUT_S)
        twins.did_nothing()
        network.heal()
        twins.restarts_once()


@fault("clocks of all programs", "moved by an hour, forward and back, against each other", "nothing")
@pytest.mark.thorough("another part that fails is near")
def test_clocks_that_are_moved_by_an_hour_change_nothing(twins: Twins) -> None:
    clocks = twins.plane.tmp_path / "clocks"
    clocks.mkdir()
    twins.plane.env |= {
        "PYTHONPATH": f"{SCRIPTS / 'moved_clock'}{os.pathsep}{ROOT}",
        "MOVED_CLOCKS": str(clocks),
    }
    twins.start_all()
    programs = [f"{part}.py" for part in PARTS] + ["host_daemon.py", "twin.py"]
    for hour in (3600, -3600):
        for number, program in enumerate(programs):
            # The others are an hour ahead when these are an hour behind.
            (clocks / program).write_text(str(-hour if number % 2 else hour))
        wait_for_seconds(TIMEOUT_S + 1)
        twins.is_whole()
        twins.did_nothing()
    kill_all(twins.processes("a", "rank"))
    twins.restarts_once()
    # The clock was moved indeed.
    hour_ago = datetime.now() - timedelta(hours=1)
    assert re.search(rf"^{hour_ago:%H:}", twins.plane.programs["sensor"].lines[-1])


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


@fault("event log", "overwritten", "refused with a sentence; without it, hosts register again")
@pytest.mark.thorough("another part that fails is near")
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


@fault("controller", "a second one on its event log", "refused, the first goes on")
def test_a_second_controller_is_refused_and_the_first_one_goes_on(twins: Twins) -> None:
    twins.start("controller")
    done = controller(twins.plane.tmp_path, twins.plane.state_dir)
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
    assert "events.db is open in another controller." in done.stderr
    assert twins.plane.status().epoch > 0


@fault("event log", "its disk is full", "nothing is decided, which the page says; goes on when there is room")
@pytest.mark.thorough("another part that fails is near")
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
