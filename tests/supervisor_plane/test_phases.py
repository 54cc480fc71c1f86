# SPDX-License-Identifier: Apache-2.0
"""Each part is killed, or stopped for a while, at each phase of an incident.

Four jobs are in one phase each when the fault hits, so that one fault is four cases: of a part that all jobs
share, or of the same part of each job's hosts.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from resiliency.testing.processes import stop_process
from supervisor.orchestrators.processes import Marked, kill_all
from supervisor.values import CommandKind, DeviceState, OutcomeStatus
from supervisor.view.status import CommandStatus, JobStatus, Status
from tests.supervisor_plane.fault_table import fault
from tests.supervisor_plane.forwarder import Forwarder
from tests.supervisor_plane.plane import PARTS
from tests.supervisor_plane.twins import TIMEOUT_S, Twins, open_twins
from tests.waiting import wait_for_seconds

pytestmark = [pytest.mark.slow, pytest.mark.leaks("descriptors", reason="gRPC's own pollers")]

#: While its evidence is gathered; decided, and the actuator has not heard of it; a host has the command and
#: has not carried it out; carried out, and no rank has finished a step.
EVIDENCE, DECIDED, ACTION, FIRST_STEP = PHASES = ("evidence", "decided", "action", "first-step")
#: Hosts of each job, and as many spares as jobs: all of them lose a host at once.
HOSTS = [f"{phase}-{rank}" for phase in PHASES for rank in (0, 1)] + [f"spare-{n}" for n in range(4)]
#: Jobs that are broken again and again, and together.
THRESHOLDS = (
    *("--silence-share=0.9", "--coalesce-s=1", "--workload-downtime-threshold-s=60", "--hang-threshold-s=6"),
    *("--actions-at-once=100", "--backoff-s=0.5", "--backoff-limit-s=1", "--steps-per-restart=1"),
    *("--max-fruitless=100", "--launcher-grace-s=2"),
)


class Incidents:
    """Twins of four jobs, and where the controller meets the actuator a network that can be cut."""

    def __init__(self, twins: Twins) -> None:
        self.twins = twins
        self.network = Forwarder(twins.plane.ports["actuator"])
        twins.plane.own_env["controller"] = {"ACTUATOR_ADDRESS": self.network.address}
        #: Before the fault: ids of commands, attempts of jobs, and of each job the hosts of its ranks.
        self.before: set[str] = set()
        self.attempts: dict[str, int] = {}
        self.hosts: dict[str, list[str]] = {}

    def open(self) -> None:
        """Bring each job into its phase, by the loss of its first rank."""
        status = self.twins.is_whole()
        self.before = {one.id for one in status.commands}
        self.attempts = {job.workload: job.attempt for job in status.jobs}
        names = {host.id: host.name for host in status.hosts}
        for job in status.jobs:
            self.hosts[job.workload] = sorted((names[host] for host in job.hosts), key=self._rank_of)
        self.twins.folder(FIRST_STEP).joinpath("stalled").touch()
        self.twins.folder(ACTION).joinpath("held").touch()
        self._lose_rank(FIRST_STEP)
        self._lose_rank(ACTION)
        self._wait(FIRST_STEP, lambda one: one.outcome is OutcomeStatus.DONE)
        self._wait(ACTION, self._has_arrived)
        self.network.cut()
        self._lose_rank(DECIDED)
        self._wait(DECIDED, lambda one: one.outcome is None)
        self._lose_rank(EVIDENCE)
        status = self.twins.plane.wait_for(lambda seen: job_named(seen, EVIDENCE).incident, "no incident")
        assert self.commands(status, EVIDENCE) == []

    def go_on(self) -> None:
        """The phases end."""
        self.network.heal()
        self.twins.folder(ACTION).joinpath("held").unlink()
        self.twins.folder(FIRST_STEP).joinpath("stalled").unlink()

    def have_ended(self) -> Status:
        """All jobs train on, as many hosts as they need, and nothing is under way."""

        def look(seen: Status) -> bool:
            return not any(job.incident for job in seen.jobs) and all(one.outcome for one in seen.commands)

        self.twins.plane.wait_for(look, "an incident does not end")
        return self.twins.is_whole()

    def are_spares(self, hosts: list[str]) -> None:
        """Hosts that were swapped out have come back."""
        self.twins.plane.wait_for(
            lambda seen: all(host.state is DeviceState.SPARE for host in seen.hosts if host.name in hosts),
            "a host that stood still is no spare",
        )

    def commands(self, status: Status, phase: str) -> list[CommandStatus]:
        """Those for a job since the incidents were opened, the oldest first."""
        mine = [one for one in status.commands if one.workload == phase and one.id not in self.before]
        return mine[::-1]

    def processes(self, phase: str, rank: int, *parts: str) -> list[Marked]:
        return self.twins.processes(self.hosts[phase][rank], *parts)

    def obeyed(self) -> list[str]:
        """By host and command, all that twins ever carried out."""
        return [
            f"{host} {line}"
            for host in self.twins.hosts
            for line in self._said(host)
            if line.startswith("obeys ")
        ]

    def _lose_rank(self, phase: str) -> None:
        kill_all(self.processes(phase, 0, "rank"))

    def _wait(self, phase: str, wanted: Callable[[CommandStatus], bool]) -> None:
        self.twins.plane.wait_for(
            lambda seen: any(map(wanted, self.commands(seen, phase))), f"job {phase} does not get there"
        )

    def _has_arrived(self, command: CommandStatus) -> bool:
        return any(f"has {command.id}" in self._said(host) for host in self.hosts[ACTION])

    def _rank_of(self, host: str) -> int:
        return int([line for line in self._said(host) if line.endswith(" begins")][-1].split()[1])

    def _said(self, host: str) -> list[str]:
        """By the twins of a host."""
        log = self.twins.plane.state_dir / "logs" / f"{host}-launcher.log"
        return log.read_text().splitlines() if log.exists() else []


def job_named(status: Status, name: str) -> JobStatus:
    return next(each for each in status.jobs if each.workload == name)


@pytest.fixture
def incidents(tmp_path: Path) -> Iterator[Incidents]:
    with open_twins(tmp_path, HOSTS, PHASES, THRESHOLDS) as twins:
        incidents = Incidents(twins)
        try:
            twins.start_all()
            yield incidents
        finally:
            incidents.network.close()


def hit(incidents: Incidents, part: str, number: signal.Signals) -> list[int]:
    """A fault of a part of the supervisor, or of each job's hosts; returns the processes."""
    program = incidents.twins.plane.programs.get(part)
    if program is not None:
        program.signal(number)
        return [program.pid]
    # The daemon is that of the host whose rank is lost; all else is a second fault, of the other host.
    parts = ("daemon", "launcher", "rank") if part == "host" else (part,)
    pids = [one.pid for p in PHASES for one in incidents.processes(p, 0 if part == "daemon" else 1, *parts)]
    for pid in pids:
        if number is signal.SIGSTOP:
            stop_process(pid)
        else:
            os.kill(pid, signal.SIGKILL)
    return pids


def mend(incidents: Incidents, part: str, number: signal.Signals, pids: list[int]) -> None:
    plane = incidents.twins.plane
    if number is signal.SIGSTOP:
        wait_for_seconds(2 * TIMEOUT_S)
        for pid in pids:
            with suppress(ProcessLookupError):  # of a launcher that was replaced
                os.kill(pid, signal.SIGCONT)
    elif part == "host":
        lost = {incidents.hosts[phase][1] for phase in PHASES}
        incidents.twins.hosts = [host for host in incidents.twins.hosts if host not in lost]
    elif part in PARTS:
        plane.programs.pop(part).wait(timeout=60)
        incidents.twins.start(part)


@fault(
    "each part, daemon, rank, launcher, host",
    "SIGKILL or SIGSTOP at each phase of an incident",
    "no action is done twice, no job is lost",
)
@pytest.mark.thorough("test_faults.py kills and stops each part")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda number: number.name)
def test_a_fault_of_any_part_at_any_phase_of_an_incident_costs_no_job_and_repeats_no_action(
    incidents: Incidents, number: signal.Signals
) -> None:
    for part in (*PARTS, "daemon", "rank", "launcher", "host"):
        incidents.open()
        pids = hit(incidents, part, number)
        incidents.go_on()
        mend(incidents, part, number, pids)
        check(incidents, part, incidents.have_ended())
    if number is signal.SIGSTOP:
        incidents.are_spares([incidents.hosts[phase][1] for phase in PHASES])


def check(incidents: Incidents, part: str, status: Status) -> None:
    """No harm beyond the fault; what it costs a job is a second action at most, or a third."""
    assert not status.frozen
    assert not any(host.cordoned for host in status.hosts)
    assert len(set(incidents.obeyed())) == len(incidents.obeyed())
    done = {
        phase: [
            one.kind
            for one in incidents.commands(status, phase)
            if one.outcome is OutcomeStatus.DONE and one.kind is not CommandKind.DUMP_STACKS
        ]
        for phase in PHASES
    }
    kinds = {kind for each in done.values() for kind in each}
    if part in (*PARTS, "daemon"):
        # As without the fault: the ranks of each job were restarted once.
        after = {job.workload: job.attempt for job in status.jobs}
        assert after == {phase: attempt + 1 for phase, attempt in incidents.attempts.items()}, done
    else:
        assert max(map(len, done.values())) <= 3, done
    assert kinds - {CommandKind.HOT_SWAP} == {CommandKind.IN_JOB_RESET}
    assert (CommandKind.HOT_SWAP in kinds) == (part == "host")
